"""User code that is still at work when its term ends: its node ends, whatever came first."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from cluster_kit import IN_STEP, Counting, Gated, gated, holder, job, play, restart

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.protocol.messages import Stamp
from taskgraph.protocol.view import JobView

__all__ = ["gated"]


class Deaf(Counting, state=["total"]):
    """Task 1's epoch 3, the first time it is computed: goes on for 60 s whatever cancels it, and then writes."""

    deaf: asyncio.Event
    heard: asyncio.Event
    takes_back = False
    """Whether it says that it was not cancelled."""

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        cls, loop = type(self), asyncio.get_running_loop()
        if self.task_id == 1 and epoch.number == 3 and not cls.deaf.is_set():
            cls.deaf.set()
            until = loop.time() + 60
            while loop.time() < until:
                try:
                    await asyncio.sleep(until - loop.time())
                except asyncio.CancelledError:
                    cls.heard.set()
                    if cls.takes_back and (running := asyncio.current_task()) is not None:
                        running.uncancel()
            self.total += 1000
            return
        await super().count(epoch, ins, outs)


@pytest.mark.parametrize("taken_back", [False, True], ids=["caught", "taken back"])
@pytest.mark.parametrize("restarts", [False, True], ids=["no restart before", "after a restart"])
def test_a_node_whose_code_outlasts_its_term_ends(restarts: bool, taken_back: bool) -> None:
    """Where a restart came before the end of the term, the node lived on, took over again after a while, and that code
    wrote to the state of its new term: the job's result was wrong."""

    class Fresh(Deaf, state=["total"]):
        deaf, heard = asyncio.Event(), asyncio.Event()
        takes_back = taken_back

    async def scenario(cluster: InProcessCluster) -> None:
        await Fresh.deaf.wait()
        node, leader = holder(cluster, 1), holder(cluster, 0).roles.leader
        assert leader is not None
        if restarts:
            await leader._restart("a test wants it")
            await Fresh.heard.wait()
        view = node.keeper.view
        backup = cluster.node(next(n for n in view.in_sync(1) if n != node.id))
        backup.suspicion.refused(node.id)
        await asyncio.wait([cluster._members[node.id].run])
        why = "task 1 on n2 cannot go on: count did not return within 5 s after its attempt ended"
        assert why in str(cluster._node_failed.result())
        await backup.keeper.wait_until(lambda view: view.finished)
        assert [holder(cluster, task).roles.replicas[task].user_task.total for task in (0, 1)] == [60, 60]  # type: ignore[attr-defined]

    settings = tg.Settings(epochs_ahead=IN_STEP.epochs_ahead, cancel_s=5)
    play(job(Fresh, epochs=60, settings=settings), scenario, nodes=3)


def test_a_node_where_code_of_a_task_never_returned_does_not_work_on_it_again(gated: type[Gated]) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        node = holder(cluster, 1)
        backup = next(other for other in cluster.nodes if other is not node)
        backup.roles.replicas[1].actor.abandoned = True
        gated.gate.set()
        cluster.crash(node.id)
        await asyncio.wait([cluster._members[backup.id].run])
        assert "code of task 1 of an earlier term has not returned" in str(cluster._node_failed.result())

    play(job(gated), scenario, nodes=2)


@pytest.mark.parametrize("takes_back", [False, True], ids=["caught", "taken back"])
def test_code_that_catches_the_end_of_its_attempt_and_returns_ends_with_it(takes_back: bool) -> None:
    """What it was part of went on as if nothing had been: it made a boundary of the attempt that was over, whose
    acknowledgements never came, and the job waited for ever."""
    begun = asyncio.Event()

    class Catches(Counting, state=["total"]):
        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            if self.task_id == 1 and epoch.number == 1 and not begun.is_set():
                begun.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                if takes_back and (running := asyncio.current_task()) is not None:
                    running.uncancel()
            await super().count(epoch, ins, outs)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await begun.wait()
        await restart(cluster, Stamp(1, 1))
        return await cluster.result()

    assert play(job(Catches, epochs=4), scenario, nodes=2).values == {0: 4, 1: 4}


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("hook", ["on_commit", "on_event"])
def test_a_hook_that_catches_the_end_of_its_term_ends_with_it(hook: str, raises: bool) -> None:
    """The primary went on as if nothing had been, and its node waited for its end: when the next primary died, it did
    not take over, and the job waited for ever."""
    begun, caught, gate = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Catches(Counting, state=["total"]):
        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            if epoch.number == 3:
                await gate.wait()
            await super().count(epoch, ins, outs)

        async def on_commit(self, number: int, state: object) -> None:  # type: ignore[override]
            if number == 1:
                await self.hook("on_commit")

        async def on_event(self, event: tg.Event) -> None:  # type: ignore[override]
            if isinstance(event, tg.BecamePrimary):
                await self.hook("on_event")

        async def hook(self, name: str) -> None:
            if self.task_id == 1 and name == hook and not begun.is_set():
                begun.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    caught.set()
                    if raises:
                        raise ConnectionError("cut off") from None

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await begun.wait()
        first = holder(cluster, 1)
        await first.keeper.wait_until(lambda view: len(view.in_sync(1)) == 2)
        other = cluster.node(next(node for node in first.keeper.view.in_sync(1) if node != first.id))
        other.suspicion.refused(first.id)
        await caught.wait()

        def is_back(view: JobView) -> bool:
            members = [record for task in (0, 1) for record in view.members_of(task).values()]
            whole = len(members) == 4 and all(member.record.until is None for member in members)
            return view.stamp == Stamp(1, 3) and first.id not in other.suspects and whole

        await other.keeper.wait_until(is_back)
        cluster.crash(other.id)
        gate.set()
        return await cluster.result()

    assert play(job(Catches, epochs=6), scenario, nodes=2).values == {0: 6, 1: 6}
