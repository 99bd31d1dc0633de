"""A leader removes what was written of a checkpoint that it gave up only while it knows that nobody else leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_kit import Gated, gated, holder, job, play

from taskgraph.checkpoint.manifest import Name
from taskgraph.checkpoint.store import Store
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node
from taskgraph.node.primary.checkpointer import Checkpointer
from taskgraph.protocol.messages import Stamp, Written

__all__ = ["gated"]


def pauses(node: Node) -> None:
    node.paused = True


def is_replaced(node: Node) -> None:
    node.keeper.view.primaries[0] = SimpleNamespace(record=SimpleNamespace(node="other", term=9))  # type: ignore[assignment]


def reads_a_later_one(node: Node) -> None:
    node.keeper.view.checkpoint = SimpleNamespace(record=SimpleNamespace(epoch=3))  # type: ignore[assignment]


@pytest.mark.parametrize("then", [None, pauses, is_replaced, reads_a_later_one])
def test_it_asks_itself_before_each_file(
    then: Callable[[Node], None] | None, gated: type[Gated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had stood still, and went on removing what was its successor's newest checkpoint by then."""
    removed: list[bool] = []

    def discard(self: Store, name: Name, still: Callable[[], bool]) -> None:
        removed.append(still())
        if then is not None:
            then(node)
            removed.append(still())

    async def scenario(cluster: InProcessCluster) -> None:
        nonlocal node
        await gated.reached.wait()
        node = holder(cluster, 0)
        checkpointer = Checkpointer(node, node.roles.primaries[0])
        checkpointer.take(Written(Stamp(1, 2), 0, 0, ""))  # it could not be written
        monkeypatch.setattr(Store, "discard", discard)
        await checkpointer._give_up()

    node: Any = None
    play(job(gated, tasks=1, backups=0, checkpoint=f"file://{tmp_path}", checkpoint_every=100), scenario, nodes=1)
    assert removed == ([True] if then is None else [True, False])


def test_one_that_pauses_waits_with_it(gated: type[Gated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[Name] = []

    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        node = holder(cluster, 0)
        checkpointer = Checkpointer(node, node.roles.primaries[0])
        checkpointer.take(Written(Stamp(1, 2), 0, 0, ""))
        monkeypatch.setattr(Store, "discard", lambda self, name, still: removed.append(name))
        node.pause(True)
        giving_up = asyncio.ensure_future(checkpointer._give_up())
        await asyncio.sleep(0)
        assert not giving_up.done() and not removed
        node.pause(False)
        await giving_up

    play(job(gated, tasks=1, backups=0, checkpoint=f"file://{tmp_path}", checkpoint_every=100), scenario, nodes=1)
    assert len(removed) == 1
