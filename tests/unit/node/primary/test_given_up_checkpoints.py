"""A leader gives up a checkpoint, and removes its files, only while it is known to lead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_kit import Counting, Gated, gated, holder, job, play

from taskgraph.checkpoint.manifest import CheckpointName
from taskgraph.checkpoint.store import CheckpointStore
from taskgraph.errors import PeerLost
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node
from taskgraph.node.primary.checkpoint_completer import CheckpointCompleter
from taskgraph.node.router import Router
from taskgraph.protocol.messages import Call, Reply, Stamp, WrittenFile, WrittenFiles

__all__ = ["gated"]


def pauses(node: Node) -> None:
    node.paused = True


def is_replaced(node: Node) -> None:
    node.keeper.view.primaries[0] = SimpleNamespace(record=SimpleNamespace(node="other", term=9))  # type: ignore[assignment]


def reads_a_later_one(node: Node) -> None:
    node.keeper.view.checkpoint = SimpleNamespace(record=SimpleNamespace(epoch=3))  # type: ignore[assignment]


@pytest.mark.parametrize("then", [None, pauses, is_replaced, reads_a_later_one])
def test_replaced_leader_stops_removing_files(
    then: Callable[[Node], None] | None, gated: type[Gated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that was frozen must not remove its successor's newest checkpoint."""
    removed: list[bool] = []

    def discard(self: CheckpointStore, name: CheckpointName, still: Callable[[], bool]) -> None:
        removed.append(still())
        if then is not None:
            then(node)
            removed.append(still())

    async def scenario(cluster: InProcessCluster) -> None:
        nonlocal node
        await gated.reached.wait()
        node = holder(cluster, 0)
        completer = CheckpointCompleter(node, node.roles.primaries[0])
        completer.note_files(WrittenFiles((WrittenFile(Stamp(1, 1), 0, 0, ""),)))  # it could not be written
        monkeypatch.setattr(CheckpointStore, "discard", discard)
        await completer._give_up()

    node: Any = None
    gated.at = 2
    play(job(gated, tasks=1, backups=0, checkpoint=f"file://{tmp_path}", checkpoint_every=100), scenario, nodes=1)
    assert removed == ([True] if then is None else [True, False])


def test_paused_leader_removes_no_files(gated: type[Gated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[CheckpointName] = []

    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        node = holder(cluster, 0)
        completer = CheckpointCompleter(node, node.roles.primaries[0])
        completer.note_files(WrittenFiles((WrittenFile(Stamp(1, 1), 0, 0, ""),)))
        monkeypatch.setattr(CheckpointStore, "discard", lambda self, name, still: removed.append(name))
        node.set_paused(True)
        giving_up = asyncio.ensure_future(completer._give_up())
        await asyncio.sleep(0)
        assert not giving_up.done() and not removed
        node.set_paused(False)
        await giving_up

    gated.at = 2
    play(job(gated, tasks=1, backups=0, checkpoint=f"file://{tmp_path}", checkpoint_every=100), scenario, nodes=1)
    assert len(removed) == 1


def test_unheard_file_is_reported_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[Call] = []
    to_primary = Router.to_primary

    async def loses(self: Router, task: int, message: Callable[[], Call], **options: Any) -> Reply:
        if isinstance(message(), WrittenFiles) and not lost:
            lost.append(message())
            raise PeerLost("its session broke")
        return await to_primary(self, task, message, **options)

    monkeypatch.setattr(Router, "to_primary", loses)

    async def waits(cluster: InProcessCluster, node: str) -> None:
        """Holds writes of later boundaries."""
        await cluster.node(node).keeper.wait_until(lambda view: view.checkpoint is not None)

    async def scenario(cluster: InProcessCluster) -> None:
        assert (await cluster.result()).values == {0: 3} and lost

    made = job(Counting, tasks=1, backups=0, checkpoint=f"file://{tmp_path}", checkpoint_every=1)
    play(made, scenario, nodes=1, stages={("snapshot", 0, 2): waits})
