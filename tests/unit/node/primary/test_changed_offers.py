"""A member that has freed the boundary with the arrays that an offer lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.errors import Refused
from taskgraph.graph.arrays import immutable_copy
from taskgraph.node.serving import Serving
from taskgraph.protocol.boundaries import Boundaries, Boundary
from taskgraph.protocol.messages import Offer, Offers

SIZE = 100_000


class Log(tg.Task, state=["blocks"]):
    """Its state is a list of arrays that never change, one more in each epoch."""

    def setup(self) -> None:
        self.blocks: list[Any] = []

    def restore(self, state: dict[str, Any]) -> None:
        self.blocks = [immutable_copy([block]) for block in state["blocks"]]

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.add)

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.blocks = [*self.blocks, immutable_copy([np.full(SIZE, epoch.number, np.uint8)])]

    def result(self) -> list[int]:
        return [int(block[0]) for block in self.blocks]


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool, int]]:
    """(lacks arrays, stored, bytes) of all offers to members."""
    seen: list[tuple[bool, bool, int]] = []
    store = Serving._store

    def stores(self: Serving, replica: Any, offer: Offer | Offers, *log: Any) -> None:
        partial = isinstance(offer, Offer) and offer.kept is not None
        try:
            store(self, replica, offer, *log)
        except Refused:
            seen.append((partial, False, offer.value.size_bytes))
            raise
        if not offer.candidate:
            seen.append((partial, True, offer.value.size_bytes))

    monkeypatch.setattr(Serving, "_store", stores)
    return seen


JOB = tg.Job(tasks=1, epochs=8, builder=Log, settings=tg.Settings(epochs_ahead=0))


def test_each_array_is_sent_once(offers: list[tuple[bool, bool, int]]) -> None:
    assert tg.testing.run(JOB, strict=False).value == list(range(8))
    assert all(stored for _, stored, _ in offers)
    assert sum(partial for partial, *_ in offers) >= 4
    assert max(size for partial, _, size in offers if partial) < 1.5 * SIZE


def test_refused_offer_is_repeated_whole(offers: list[tuple[bool, bool, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def forgotten(self: Boundaries, digest: bytes) -> Boundary | None:
        return None

    monkeypatch.setattr(Boundaries, "find", forgotten)
    assert tg.testing.run(JOB, strict=False, kills={(0, 6): "done"}).value == list(range(8))
    assert any(partial and not stored for partial, stored, _ in offers)
    assert not any(partial and stored for partial, stored, _ in offers)
    assert any(size > 4 * SIZE for partial, stored, size in offers if stored and not partial)


def test_successor_has_all_arrays(offers: list[tuple[bool, bool, int]]) -> None:
    kills = {(0, 3): "done", (0, 6): "snapshot"}
    assert tg.testing.run(JOB, strict=False, kills=kills).value == list(range(8))
    assert any(partial and stored for partial, stored, _ in offers)
