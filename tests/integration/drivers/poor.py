"""Task 1 pulls 64 MiB in each epoch; after a few epochs its first node may have hardly more memory than it has."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np

import taskgraph as tg
from taskgraph.node.primary import primary

MIB = 1 << 20


class Sums(tg.Task, state=["sum"]):
    def __init__(self, limits: bool) -> None:
        self.limits = limits

    def setup(self) -> None:
        self.sum = 0.0
        if self.limits:
            primary._SHORT_S = 0.1  # what takes minutes is to take seconds

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 0:
            epoch.processor(self.give, outbound={"v": "next"})
        else:
            epoch.processor(self.take, inbound={"v": "last"})

    def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("v", np.arange(64 * MIB // 8 if epoch.number > 2 else 8) + 0.1 * epoch.number)

    def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.sum += float(ins["v"][::1000].sum())
        if self.limits and epoch.number == 2 and self.term == 1:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 32 * MIB, resource.RLIM_INFINITY))

    def on_event(self, event: object) -> None:
        if isinstance(event, tg.BecamePrimary):
            self.term = event.term

    def result(self) -> float:
        return self.sum


@tg.job
def poor(limits: bool = True) -> tg.Job:
    links = {"next": lambda task, tasks, epoch: [1] * (not task), "last": lambda task, tasks, epoch: [0] * task}
    return tg.Job(tasks=2, epochs=5, builder=lambda _: Sums(limits), topology=links, backups=1)
