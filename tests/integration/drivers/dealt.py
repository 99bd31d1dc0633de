"""Tasks of which the odd ones need a device; each tells what CUDA would see in its process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import taskgraph as tg


class Seen(tg.Task, state=[]):
    def __init__(self, gate: str) -> None:
        self.gate = gate

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.wait)

    def wait(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        while epoch.number == 1 and not Path(self.gate).exists() and not epoch.cancelled:
            time.sleep(0.01)

    def result(self) -> tuple[int, str, str]:
        return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES", "all"), self.xp.__name__


@tg.job
def dealt(tasks: int = 8, gate: str = "", deal: bool = True, min_nodes: int = 1) -> tg.Job:
    return tg.Job(
        tasks=tasks,
        epochs=2,
        builder=lambda task_id: Seen(gate),
        requires_gpu=lambda task_id: task_id % 2 == 1,
        min_nodes=min_nodes,
        settings=tg.Settings(deal_devices=deal),
    )
