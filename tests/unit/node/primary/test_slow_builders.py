"""What takes long where a task lost every replica, a builder or its checkpoint: others do not stand still meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from cluster_kit import Counting, blindable, crashes, eyes, job, play, told

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node
from taskgraph.node.replica import Replica

__all__ = ["blindable"]


class Held(Counting, state=["total"]):
    """Task 1 waits in some epochs for a gate."""

    gates: dict[int, asyncio.Event]

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.task_id == 1 and epoch.number in self.gates:
            await self.gates[epoch.number].wait()
        await super().count(epoch, ins, outs)


class Late:
    """Builders of task 0 on one node wait for `built`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.built = asyncio.Event()
        self.node: Node | None = None
        build = Replica.build

        async def builds(replica: Replica) -> None:
            if replica.task == 0 and self.node is not None and replica.router is self.node.router:
                await self.built.wait()
            await build(replica)

        monkeypatch.setattr(Replica, "build", builds)

    async def replaced(self, cluster: InProcessCluster, *, from_nothing: bool = False) -> tuple[Node, Node]:
        """A node that was to begin task 0 from its checkpoint, and still builds it; another one that has begun it.

        Args:
            from_nothing: no epoch has committed, and there is no checkpoint.
        """
        lost, node = cluster.nodes
        self.node = node
        await node.keeper.wait_until(
            lambda view: len(view.primaries) == 2 if from_nothing else view.checkpoint is not None
        )
        assert node.keeper.view.primary_node(0) == lost.id
        cluster.crash(lost.id)
        await node.keeper.wait_until(lambda _: node.takeovers.busy(0))
        other = cluster.node(cluster.add())
        await node.keeper.wait_until(lambda view: view.primary_node(0) == other.id)
        assert node.takeovers.busy(0)
        return node, other


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    return Late(monkeypatch)


@pytest.fixture
def held() -> type[Held]:
    class Fresh(Held, state=["total"]):
        pass

    Fresh.gates = {2: asyncio.Event(), 3: asyncio.Event()}
    return Fresh


def checkpointed(builder: type[Held], where: Path) -> tg.Job:
    """Boundary 2 is a checkpoint, 3 is none."""
    settings = tg.Settings(epochs_ahead=0, admit_wait_s=0.5)
    return job(builder, epochs=6, checkpoint=f"file://{where}", checkpoint_every=2, settings=settings)


def acknowledged(node: Node) -> list[int]:
    """The boundaries of task 0 that a node holds before they are committed."""
    return [boundary.stamp.epoch for boundary in node.roles.replicas[0].boundaries.pending]


@pytest.mark.usefixtures("blindable")
def test_what_it_holds_for_the_other_one_stays(
    late: Late, held: type[Held], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on to begin the task, and threw away what it had acknowledged to the new primary meanwhile."""

    async def scenario(cluster: InProcessCluster) -> None:
        node, other = await late.replaced(cluster)
        usable = node.checkpoints.newest_usable

        async def relied_on() -> None:
            await node.keeper.wait_until(lambda view: node.id in view.in_sync(0) and bool(acknowledged(node)))

        async def reads_long(pointer: Any) -> Any:
            await relied_on()
            return await usable(pointer)

        monkeypatch.setattr(node.checkpoints, "newest_usable", reads_long)
        eyes(other).lose(node.keeper.view.keys.epoch)
        held.gates[2].set()
        late.built.set()
        await relied_on()
        await node.keeper.wait_until(lambda _: not node.takeovers.busy(0))
        assert acknowledged(node) == [3]
        eyes(other).lose("")  # boundary 3 is committed, and whoever made it dies
        held.gates[3].set()
        result = await cluster.result()
        assert crashes(cluster) == 2 and other not in cluster.nodes
        assert result.values == {0: 6, 1: 6}

    async def dies(cluster: InProcessCluster, primary: str) -> None:
        cluster.crash(primary)

    play(checkpointed(held, tmp_path), scenario, nodes=2, stages={("compose", 0, 3): dies})


@pytest.mark.usefixtures("blindable")
def test_what_it_holds_for_the_other_one_stays_where_etcd_refuses_it(
    late: Late, held: type[Held], tmp_path: Path
) -> None:
    """Whoever begins a task anew throws nothing away before etcd says that it does."""

    async def scenario(cluster: InProcessCluster) -> None:
        lost, node = cluster.nodes
        late.node = node
        await node.keeper.wait_until(lambda view: view.checkpoint is not None)
        assert node.keeper.view.primary_node(0) == lost.id
        cluster.crash(lost.id)
        await node.keeper.wait_until(lambda _: node.takeovers.busy(0))
        late.built.set()
        await node.keeper.wait_until(lambda _: not node.takeovers.busy(0))
        assert acknowledged(node) == [3]
        eyes(cluster.nodes[1]).lose("")
        held.gates[3].set()
        assert (await cluster.result()).values == {0: 6, 1: 6}

    async def another_one_does(cluster: InProcessCluster, name: str) -> None:
        """It is about to ask etcd: first another one begins the task, and has it hold a boundary."""
        node, other = cluster.node(name), cluster.node(cluster.add())
        await node.keeper.wait_until(lambda view: view.primary_node(0) == other.id)
        eyes(other).lose(node.keeper.view.keys.epoch)
        held.gates[2].set()
        await node.keeper.wait_until(lambda view: node.id in view.in_sync(0) and bool(acknowledged(node)))

    play(checkpointed(held, tmp_path), scenario, nodes=2, stages={("takeover", 0, 2): another_one_does})


@pytest.mark.usefixtures("blindable")
def test_nothing_is_undone_where_the_other_one_is_absent_for_a_moment(
    late: Late, held: type[Held], tmp_path: Path
) -> None:
    """It rolled the job back, though whoever held the task was there again a moment later."""

    async def scenario(cluster: InProcessCluster) -> None:
        node, other = await late.replaced(cluster)
        held.gates[2].set()
        await node.keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch == 3)
        key = node.keeper.view.keys.node(other.id)
        eyes(other).refuse(key)
        cluster.store.revoke(node.keeper.view.nodes[other.id].record.lease)
        await node.keeper.wait_until(lambda view: other.id not in view.nodes)
        late.built.set()
        await node.keeper.wait_until(lambda _: not node.takeovers.busy(0))
        eyes(other).refuse("")
        held.gates[3].set()
        assert (await cluster.result()).values == {0: 6, 1: 6}
        assert told(cluster, "rolled back") == []
        assert node.keeper.view.primary_node(0) == other.id

    play(checkpointed(held, tmp_path), scenario, nodes=2)


@pytest.mark.usefixtures("blindable")
def test_nobody_begins_from_nothing_what_another_one_began_that_is_absent_for_a_moment(
    late: Late, held: type[Held]
) -> None:
    """Before anything has committed there is no checkpoint to read, after which it would look again."""
    held.gates = {0: asyncio.Event()}

    async def scenario(cluster: InProcessCluster) -> None:
        node, other = await late.replaced(cluster, from_nothing=True)
        key = node.keeper.view.keys.node(other.id)
        eyes(other).refuse(key)
        cluster.store.revoke(node.keeper.view.nodes[other.id].record.lease)
        await node.keeper.wait_until(lambda view: other.id not in view.nodes)
        late.built.set()
        await node.keeper.wait_until(lambda _: not node.takeovers.busy(0))
        assert node.keeper.view.primary_node(0) == other.id
        eyes(other).refuse("")
        held.gates[0].set()
        assert (await cluster.result()).values == {0: 3, 1: 3}
        assert node.keeper.view.primary_node(0) == other.id

    play(job(held, epochs=3, backups=0, settings=tg.Settings(epochs_ahead=0)), scenario, nodes=2)


@pytest.mark.usefixtures("blindable")
def test_a_checkpoint_that_became_complete_while_the_one_before_was_read_is_the_one_to_go_back_to(
    held: type[Held], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job went back to the one before, whose files were removed since it was not the newest any more."""
    held.gates = {2: asyncio.Event(), 4: asyncio.Event()}
    staged = asyncio.Event()

    async def scenario(cluster: InProcessCluster) -> None:
        leader, lost = cluster.nodes
        await leader.keeper.wait_until(lambda view: view.checkpoint is not None)
        eyes(leader).refuse(cluster.keys.checkpoint)
        held.gates[2].set()
        await staged.wait()
        usable = leader.checkpoints.newest_usable

        async def reads_long(pointer: Any) -> Any:
            found = await usable(pointer)
            eyes(leader).refuse("")
            await leader.keeper.wait_until(lambda _: len(told(cluster, "checkpoint")) == 2)
            return found

        monkeypatch.setattr(leader.checkpoints, "newest_usable", reads_long)
        cluster.crash(lost.id)
        held.gates[4].set()
        assert (await cluster.result()).values == {0: 6, 1: 6}
        assert told(cluster, "rolled back") == []

    async def is_staged(cluster: InProcessCluster, node: str) -> None:
        staged.set()

    settings = tg.Settings(epochs_ahead=0, checkpoints_kept=1)
    made = job(held, epochs=6, backups=0, checkpoint=f"file://{tmp_path}", checkpoint_every=2, settings=settings)
    play(made, scenario, nodes=2, stages={("checkpointed", 0, 4): is_staged})
