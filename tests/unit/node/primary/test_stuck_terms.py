"""User code that runs on after its term has ended ends its node."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import IN_STEP, Counting, gated, holder, job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster

__all__ = ["gated"]


class Deaf(Counting, state=["total"]):
    """Task 1's first compute of epoch 3 goes on for 60 s despite cancellation, and then writes."""

    deaf: asyncio.Event
    heard: asyncio.Event
    takes_back = False
    """True to call `uncancel`, too."""

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
def test_code_outlasting_its_term_ends_node(restarts: bool, taken_back: bool) -> None:
    """Otherwise the code could write to the state of a later term on the same node."""

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
        backup.suspicion.note_port_refused(node.id)
        await asyncio.wait([cluster._members[node.id].run])
        why = "task 1 on n2 cannot go on: count did not return within 5 s after its attempt ended"
        assert why in str(cluster._node_failed.result())
        await backup.keeper.wait_until(lambda view: view.finished)
        assert [holder(cluster, task).roles.replicas[task].user_task.total for task in (0, 1)] == [60, 60]  # type: ignore[attr-defined]

    settings = tg.Settings(epochs_ahead=IN_STEP.epochs_ahead, cancel_s=5)
    play(job(Fresh, epochs=60, settings=settings), scenario, nodes=3)
