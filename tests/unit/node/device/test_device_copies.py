"""Copies from and to a device never wait on the event loop of a node."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from softdevice import SoftArray, SoftDevice

import taskgraph as tg
from taskgraph.launch import inprocess
from taskgraph.node import roles
from taskgraph.node.epochs import inbound
from taskgraph.node.epochs.outbound import Outbound
from taskgraph.protocol.messages import Reason, Refusal


@pytest.fixture(params=[None, 1, 2], ids=["late", "seed 1", "seed 2"])
def soft(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> SoftDevice:
    device = SoftDevice(request.param, races=request.param == 2)
    monkeypatch.setattr(inprocess, "device_count", lambda: 1)
    monkeypatch.setattr(roles, "array_module", lambda devices: (device.xp, device))
    return device


class Talks(tg.Task, state=["row", "got"]):
    """Arrays in items, flags, requests and replies, state and commits."""

    def setup(self) -> None:
        self.row = self.xp.arange(4.0) + self.task_id
        self.got = 0.0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"row": "right"})
        epoch.processor(self.take, inbound={"row": "left"})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("row", self.row)
        epoch.flag("right", self.row)
        (left,) = epoch.neighbors("left")
        answer = epoch.request(left, "double", self.row).wait()
        epoch.scratch.answer = answer.sum()

    def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.got += float(ins["row"].sum() + epoch.scratch.answer + epoch.scratch.flag)

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: SoftArray) -> None:
        epoch.scratch.flag = meta.sum()

    @tg.handles("double")
    def double(self, epoch: tg.Epoch, sender: int, payload: SoftArray) -> SoftArray:
        return payload * 2.0

    def on_commit(self, number: int, state: dict[str, Any]) -> None:
        assert isinstance(state["row"], SoftArray)

    def result(self) -> float:
        return self.got


def test_nothing_waits_on_the_event_loop(soft: SoftDevice) -> None:
    job = tg.Job(tasks=3, epochs=3, builder=Talks, topology=tg.ring())
    result = tg.run(job, nodes=0)
    rows = [np.arange(4.0).sum() + 4 * task for task in range(3)]
    assert result.values == {t: 3 * (2 * rows[t - 1] + 2 * rows[t]) for t in range(3)}
    assert soft.waits
    assert not soft.waits_on_loops and not soft.calls_on_loops


def test_values_do_not_depend_on_copies(soft: SoftDevice) -> None:
    job = tg.Job(tasks=3, epochs=3, builder=Talks, topology=tg.ring())
    calm = tg.testing.run(job)
    killed = tg.testing.run(job, kills={(0, 1): "sync", (2, 2): "done"}, order=1)
    assert killed.failovers >= 2
    assert killed.values == calm.values
    assert not soft.waits_on_loops and not soft.calls_on_loops


def test_failed_copy_of_an_item_fails_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Refusal(Reason.NOT_COPIED, "it cannot be copied to the host: MemoryError: Unable to allocate 4.0 GiB")
    monkeypatch.setattr(Outbound, "answer", lambda items, pull: refusal)
    monkeypatch.setattr(Outbound, "settle_when_put", lambda items, pull, coming: refusal)
    job = tg.Job(tasks=3, epochs=3, builder=Talks, topology=tg.ring())
    with pytest.raises(tg.JobFailed, match=r"^epoch 0: task \d cannot pull 'row' from task \d: it cannot be copied"):
        tg.testing.run(job, strict=False, timeout_s=30)


class Sends(tg.Task):
    """Sends an array of its node's device."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"row": "right"})
        epoch.processor(self.take, inbound={"row": "left"})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("row", self.xp.arange(20_000.0))

    def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        ins["row"].sum()


def test_no_memory_for_a_host_copy_fails_the_job(soft: SoftDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    each = itertools.cycle([(soft.xp, soft), (np, None)])
    monkeypatch.setattr(roles, "array_module", lambda devices: next(each))
    monkeypatch.setattr(inbound, "copy_to_host", MagicMock(side_effect=MemoryError("Unable to allocate 4.0 GiB")))
    wanted = r"^epoch 0: task \d cannot have 'row' of task \d: it cannot be copied to the host: MemoryError: Unable"
    with pytest.raises(tg.JobFailed, match=wanted):
        tg.run(tg.Job(tasks=3, epochs=3, builder=Sends, topology=tg.ring()), nodes=0, timeout_s=30)
