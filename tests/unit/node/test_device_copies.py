"""Copies from and to a device wait for it: never on a node's event loop. With a stand-in for CuPy, which tells."""

from __future__ import annotations

import asyncio
import sys
import types
from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.launch import inprocess
from taskgraph.node import node as node_module

copies: list[str] = []
"""What was copied on an event loop, and whether anything was."""


def note(what: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        copies.append("in a thread")
    else:
        copies.append(f"{what} on the event loop")


class DeviceArray:
    __module__ = "cupy"

    def __init__(self, data: Any, copy: bool = True, order: str = "C") -> None:
        note("to the device")
        self.data = np.array(data, copy=copy, order=order)

    def get(self, order: str = "C") -> Any:
        note("to the host")
        return self.data.copy(order=order)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("cupy")
    module.ndarray = module.array = DeviceArray  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(inprocess, "device_count", lambda: 1)
    monkeypatch.setattr(node_module, "array_module", lambda devices: (module, "cuda"))
    copies.clear()
    return module


class Talks(tg.Task, state=["row", "got"]):
    """Every way by which an array comes to a task: an item, a flag, a request and its answer, a state, a commit."""

    def setup(self) -> None:
        self.row = DeviceArray(np.arange(4.0) + self.task_id)
        self.got = 0.0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"row": "right"})
        epoch.processor(self.take, inbound={"row": "left"})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("row", self.row)
        epoch.flag("right", self.row)
        (left,) = epoch.neighbors("left")
        answer = epoch.request(left, "double", self.row).wait()
        epoch.scratch.answer = answer.data.sum()

    def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.got += ins["row"].data.sum() + epoch.scratch.answer + epoch.scratch.flag

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: DeviceArray) -> None:
        epoch.scratch.flag = meta.data.sum()

    @tg.handles("double")
    def double(self, epoch: tg.Epoch, sender: int, payload: DeviceArray) -> DeviceArray:
        return DeviceArray(2 * payload.data)

    def on_commit(self, number: int, state: dict[str, Any]) -> None:
        assert isinstance(state["row"], DeviceArray)

    def result(self) -> float:
        return self.got


def test_nothing_is_copied_on_the_event_loop(cupy: types.ModuleType) -> None:
    job = tg.Job(tasks=3, epochs=3, builder=Talks, topology=tg.ring())
    result = tg.run(job, nodes=0)
    rows = [np.arange(4.0).sum() + 4 * task for task in range(3)]
    assert result.values == {t: 3 * (2 * rows[t - 1] + 2 * rows[t]) for t in range(3)}
    assert set(copies) == {"in a thread"}


def test_and_none_of_the_values_depends_on_it(cupy: types.ModuleType) -> None:
    job = tg.Job(tasks=3, epochs=3, builder=Talks, topology=tg.ring())
    calm = tg.testing.run(job)
    killed = tg.testing.run(job, kills={(0, 1): "sync", (2, 2): "done"}, order=1)
    assert killed.failovers >= 2
    assert killed.values == calm.values
