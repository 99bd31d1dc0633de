"""What `on_commit` is given is a copy of the whole state: the event loop does not wait while a large one is made."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from cluster_kit import Counting, job, play

import taskgraph as tg
from taskgraph.graph.values import decode
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node import replica


class Told(Counting, state=["array"]):
    """Its state is of `size` bytes, and more."""

    size: int
    sums: list[float]

    def setup(self) -> None:
        super().setup()
        self.array = np.zeros(self.size // 8)

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await super().count(epoch, ins, outs)
        self.array += 1

    def on_commit(self, number: int, state: Any) -> None:
        state["array"] += 1  # it is its own
        self.sums.append(state["array"].sum() / state["array"].size)


class AwaitsTold(Told, state=["array"]):
    async def on_commit(self, number: int, state: Any) -> None:  # type: ignore[override]
        super().on_commit(number, state)


@pytest.mark.parametrize(("size", "loops"), [(1 << 10, True), (1 << 20, False)])
@pytest.mark.parametrize("builder", [Told, AwaitsTold])
def test_a_large_state_is_copied_in_a_thread(
    builder: type[Told], size: int, loops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[bool] = []  # by the event loop, each

    def seen(value: Any, **options: Any) -> Any:
        if options.get("writable"):
            copied.append(threading.current_thread() is threading.main_thread())
        return decode(value, **options)

    monkeypatch.setattr(replica, "decode", seen)

    class Fresh(builder):  # type: ignore[misc, valid-type]
        sums: list[float] = []  # noqa: RUF012

    Fresh.size = size

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        return await cluster.result()

    assert play(job(Fresh, tasks=1, backups=0), scenario, nodes=1).values == {0: 3}
    assert Fresh.sums == [2.0, 3.0, 4.0]
    assert copied == [False, loops, loops, loops]  # the first for `restore`
