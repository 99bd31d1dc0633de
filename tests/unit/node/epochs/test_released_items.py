"""What an epoch exchanged is gone when nobody needs it any more, not when the garbage collector comes by: its memory
takes the items of the next epoch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import pytest
from cluster_kit import play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.results import JobResult

EPOCHS = 12


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Sends(tg.Task, state=["total"]):
    """Notes the memory of what it received, by epoch."""

    seen: ClassVar[dict[int, list[weakref.ref[np.ndarray]]]]

    def setup(self) -> None:
        self.total = 0.0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"x": "peers"})
        epoch.processor(self.take, inbound={"x": "peers"})

    async def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        answer = await epoch.request(1 - self.task_id, "ask", np.full(20_000, 2.0))
        self.note(epoch, answer)
        outs.put("x", np.full(20_000, float(epoch.number)))

    @tg.handles("ask")
    def ask(self, epoch: tg.Epoch, sender: int, payload: np.ndarray) -> np.ndarray:
        self.note(epoch, payload)
        return payload * 2.0

    def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        for array in ins.all("x").values():
            self.note(epoch, array)
            self.total += float(array[0])

    def note(self, epoch: tg.Epoch, array: np.ndarray) -> None:
        assert isinstance(array.base, np.ndarray)
        self.seen.setdefault(epoch.number, []).append(weakref.ref(array.base))
        alive = {number for number, noted in self.seen.items() if any(ref() is not None for ref in noted)}
        assert min(alive) >= epoch.number - 1, f"epoch {epoch.number}: of {sorted(alive)} something is kept"

    def result(self) -> float:
        return self.total


@pytest.mark.parametrize("nodes", [1, 2])
def test_items_and_answers_go_with_their_epoch(no_collector: None, nodes: int) -> None:
    class Fresh(Sends, state=["total"]):
        seen: ClassVar[dict[int, list[weakref.ref[np.ndarray]]]] = {}

    async def scenario(cluster: InProcessCluster) -> JobResult:
        return await cluster.result()

    job = tg.Job(tasks=2, epochs=EPOCHS, builder=lambda _: Fresh(), topology=tg.full())
    result = play(job, scenario, nodes=nodes)
    assert result.values == dict.fromkeys(range(2), float(sum(range(EPOCHS))))
    assert len(Fresh.seen) == EPOCHS
