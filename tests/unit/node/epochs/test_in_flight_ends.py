"""Epochs in flight when one of them fails, or their attempt or the job ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cluster_kit import holder, play, restart, set_up_when_offered, told, until_attempt
from flight_kit import Early, Script, at_work, early, job, stamps, whole

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.protocol.messages import Stamp

__all__ = ["early", "set_up_when_offered"]


# -- mistakes of the job ------------------------------------------------------------------------------


class Wrong(Early, state=["seen"]):
    """Raises in `early` in some epochs: (task, epoch)."""

    wrong: frozenset[tuple[int, int]]

    async def first(self, epoch: tg.Epoch) -> None:
        if (self.task_id, epoch.number) in self.wrong:
            raise ValueError(f"wrong in {epoch.number}")


def wrong(*where: tuple[int, int]) -> type[Wrong]:
    class Fresh(Wrong, state=["seen"]):
        script = Script()
        wrong = frozenset(where)

    return Fresh


def test_mistake_waits_for_earlier_commits() -> None:
    made = wrong((0, 4))
    gate = made.script.hold("early", 0, 2)

    async def scenario(cluster: InProcessCluster) -> None:
        await made.script.until("early", 0, 4)
        await asyncio.sleep(3)
        assert at_work(cluster) == Stamp(1, 2)
        assert not told(cluster, "failed")
        gate.set()
        with pytest.raises(tg.JobFailed, match=r"task 0, epoch 4, 'early': ValueError: wrong in 4") as caught:
            await cluster.result()
        assert caught.value.epoch == 4
        assert at_work(cluster) == Stamp(1, 4)
        assert made.script.epochs("late", 0) == [0, 1, 2, 3]

    play(job(made), scenario, nodes=2)


def test_mistake_in_an_uncommitted_epoch_is_ignored() -> None:
    class Finishing(Wrong, state=["seen"]):
        script = Script()
        wrong = frozenset({(0, 4)})

        async def late(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await super().late(epoch, ins, outs)
            if (self.task_id, epoch.number) == (1, 3):
                epoch.finish()

    gate = Finishing.script.hold("early", 1, 3)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await Finishing.script.until("early", 0, 4)
        await asyncio.sleep(3)
        gate.set()
        return await cluster.result()

    whole(play(job(Finishing, epochs=None), scenario, nodes=2), epochs=4)


# -- the end of an attempt ----------------------------------------------------------------------------


def test_a_restart_ends_all_epochs_in_flight(early: type[Early]) -> None:
    script = early.script
    script.hold("early", 0, 3)
    held = script.hold("early", 0, 2)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await script.until("early", 0, 5)
        await asyncio.sleep(3)
        assert stamps(cluster, 0) == [Stamp(1, epoch) for epoch in (2, 3, 4, 5)]
        actor = holder(cluster, 0).roles.primaries[0].replica.actor
        assert [running.where for running in actor.running] == ["early", "early"]
        script.came.clear()
        await restart(cluster, Stamp(1, 2))
        await script.until("early", 0, 2)
        await asyncio.sleep(3)
        assert stamps(cluster, 0) == [Stamp(2, 2)], "of which nothing is known: how large it is, say"
        assert len(actor.running) == 1
        for epoch in (2, 3):
            script.hold("early", 0, epoch).set()
        held.set()
        found = await cluster.result()
        assert sorted(script.epochs("early", 0)) == script.epochs("late", 0) == list(range(2, 12))
        return found

    found = play(job(early), scenario, nodes=2)
    whole(found)
    assert found.restarts == 1


@pytest.mark.parametrize("dies", [0, 1])
def test_takeover_with_epochs_in_flight(early: type[Early], dies: int) -> None:
    script = early.script
    gate = script.hold("early", dies, 2)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await script.until("early", dies, 5)
        await asyncio.sleep(3)
        assert at_work(cluster) == Stamp(1, 2)
        script.came.clear()
        cluster.crash(holder(cluster, dies).id)
        gate.set()
        ahead = script.hold("early", dies, 4)
        await script.until("early", dies, 7)
        ahead.set()
        return await cluster.result()

    found = play(job(early), scenario, nodes=3)
    whole(found)
    assert found.failovers >= 1
    assert script.epochs("late", dies) == list(range(2, 12))


def test_roll_back_ends_epochs_in_flight(early: type[Early], tmp_path: Path) -> None:
    """Every replica of task 1 is lost while task 0 works on epochs behind the checkpoint."""
    script = early.script
    gate = script.hold("early", 0, 5)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await script.until("early", 0, 7)
        await cluster.nodes[0].keeper.wait_until(lambda view: view.checkpoint is not None)
        await asyncio.sleep(3)
        assert at_work(cluster) == Stamp(1, 5)
        lost, kept = holder(cluster, 1), holder(cluster, 0)
        assert lost is not kept
        script.came.clear()
        cluster.crash(lost.id)
        cluster.add()
        await until_attempt(kept, 2)
        await script.until("early", 0, 5)
        await asyncio.sleep(3)
        assert {stamp.attempt for stamp in stamps(cluster, 0)} == {2}
        gate.set()
        found = await cluster.result()
        assert script.epochs("early", 0) == script.epochs("late", 0) == list(range(4, 12))
        assert len(told(cluster, "rolled back")) == 1
        return found

    given = job(early, backups=0, checkpoint=f"file://{tmp_path}", checkpoint_every=4)
    whole(play(given, scenario, nodes=2))


# -- the end of the job -------------------------------------------------------------------------------


@pytest.mark.usefixtures("set_up_when_offered")
@pytest.mark.parametrize(("where", "last"), [("early", 4), ("late", 7)])
def test_finish_ends_the_job_with_epochs_in_flight(where: str, last: int) -> None:

    class Finishing(Early, state=["seen"]):
        script = Script()

        async def early(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await super().early(epoch, ins, outs)
            self.end(epoch, "early")

        tg.stateless(early)

        async def late(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            await super().late(epoch, ins, outs)
            self.end(epoch, "late")

        def end(self, epoch: tg.Epoch, place: str) -> None:
            if (self.task_id, epoch.number, place) == (0, 4, where):
                epoch.finish()

    script = Finishing.script
    gate = script.hold("early", 0, 3)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        await script.until("early", 0, min(last, 6))
        await asyncio.sleep(3)
        gate.set()
        return await cluster.result()

    whole(play(job(Finishing, epochs=None), scenario, nodes=2), epochs=5)
    assert script.epochs("early", 0) == list(range(last + 1)), "none begins when one is known to be the last"
