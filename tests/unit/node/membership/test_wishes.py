"""What placement wishes for is the same on every node, however it came to read what it knows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from cluster_kit import Counting, blindable, eyes, job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.membership import wishes as wishes_module
from taskgraph.protocol.assignment import Wish
from taskgraph.protocol.records import MemberRecord

__all__ = ["blindable"]

#: task -> its primary and its backup. Placement itself would have it otherwise, once the last two nodes are gone.
HOLDERS = {0: (2, 4), 1: (4, 5), 2: (6, 7), 3: (4, 5), 4: (5, 1), 5: (2, 1)}


def named(node: int) -> str:
    return f"n{node}-local"


def wished(*, also: tuple[int, ...] = ()) -> Callable[..., dict[int, Wish]]:
    """Placement that wishes for these, and for one backup more of task 1."""
    wishes = {
        task: Wish(named(primary), tuple(named(node) for node in (backup, *(also if task == 1 else ()))))
        for task, (primary, backup) in HOLDERS.items()
    }
    return lambda *args: wishes


@pytest.mark.usefixtures("blindable")
def test_nodes_that_read_deaths_and_a_commit_together_wish_for_the_same_as_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node was evicted "until" the epoch of which the commit is on its way. Whoever still reads its key before the
    commit must not take it for a holder, where others do not: of a task that lost everybody each would wish for another
    as the next primary, so that nobody did what only that one may do."""
    real = wishes_module.place

    def wish(cluster: InProcessCluster, place: Callable[..., dict[int, Wish]]) -> None:
        monkeypatch.setattr(wishes_module, "place", place)
        for node in cluster.nodes:
            node.wishes.revision = -1
            node.roles.reconsider()

    async def until(cluster: InProcessCluster, known: Callable[[MemberRecord | None], bool]) -> None:
        """Returns when that is so of the member key of the node that comes and goes."""
        key = cluster.keys.member(1, named(3))
        while True:
            found = [MemberRecord.from_bytes(kv.value) for kv in cluster.store.select(key, prefix=False)]
            if known(found[0] if found else None):
                return
            await asyncio.sleep(0.01)

    async def add(cluster: InProcessCluster, node: str) -> None:
        wish(cluster, wished(also=(3,)))

    async def evict_and_kill(cluster: InProcessCluster, node: str) -> None:
        """The leader has decided to commit, and has not written it."""
        await until(cluster, lambda record: record is not None)
        wish(cluster, wished())
        await until(cluster, lambda record: record is not None and record.until == 3)
        await asyncio.sleep(0.2)
        late = [eyes(cluster.node(named(n))) for n in (1, 4)]  # the others read the deaths before the commit
        for reads in late:
            reads.blind()
        monkeypatch.setattr(wishes_module, "place", real)
        for lost in (6, 7):
            cluster.crash(named(lost))
        await asyncio.sleep(0.3)
        for reads in late:
            asyncio.get_running_loop().call_later(0.05, reads.see)

    async def scenario(cluster: InProcessCluster) -> None:
        with pytest.raises(tg.JobFailed, match="task 2: every replica in sync is gone"):
            await cluster.result(timeout_s=500)

    monkeypatch.setattr(wishes_module, "place", wished())
    stages = {("commit", 0, 1): add, ("commit", 0, 3): evict_and_kill}
    play(job(Counting, tasks=6, epochs=12), scenario, nodes=7, stages=stages)


def test_containers_of_one_machine_are_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a host's name of its own: both replicas of a task were put on one machine, which takes both along."""
    machines = {named(node): f"m{node % 2}" for node in range(1, 5)}
    add = InProcessCluster.add

    def contained(cluster: InProcessCluster) -> str:
        node = add(cluster)
        cluster.node(node).machine = machines[node]
        return node

    async def scenario(cluster: InProcessCluster) -> list[list[str]]:
        await cluster.result()
        view = cluster.nodes[0].keeper.view
        return [sorted(machines[node] for node in view.in_sync(task)) for task in range(8)]

    monkeypatch.setattr(InProcessCluster, "add", contained)
    assert play(job(Counting, tasks=8), scenario, nodes=4) == [["m0", "m1"]] * 8
