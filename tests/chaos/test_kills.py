"""SIGKILL of whoever it hits hardest, at every moment of an epoch: nothing changes but the clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_kit import chaos, kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "stages", [("compose", "processor", "sync", "snapshot"), ("done", "commit", "committed", "commit")]
)
async def test_the_leader_at_every_stage(stages: tuple[str, ...]) -> None:
    async with chaos("--nodes", "6") as job:
        await job.began()
        for count, stage in enumerate(stages, start=1):
            job.inject(f"kill,{stage},task=0")
            await job.injected()
            await job.settled(nodes=6 - count)
        await job.finishes(failovers=len(stages))


@pytest.mark.parametrize("stages", [("compose", "processor", "sync"), ("snapshot", "held", "done")])
async def test_another_primary_and_a_backup_at_every_stage(stages: tuple[str, ...]) -> None:
    """`held` is the moment at which a backup holds a boundary that its primary does not know to be held."""
    async with chaos("--nodes", "5") as job:
        await job.began()
        for count, stage in enumerate(stages, start=1):
            job.inject(f"kill,{stage},task=5")
            await job.injected()
            await job.settled(nodes=5 - count)
        await job.finishes(failovers=1)


async def test_a_successor_that_dies_just_before_and_just_after_it_took_over() -> None:
    async with chaos("--nodes", "5", backups=3) as job:
        await job.began()
        job.inject("kill,takeover,task=0", "kill,taken,task=0")
        kill(job.primary(0))
        await job.injected()
        await job.finishes(failovers=2)


async def test_several_primaries_at_once_at_one_stage() -> None:
    async with chaos("--nodes", "5", backups=2) as job:
        await job.began()
        first, second, *_ = job.leads()
        at = job.epoch + 40  # later than this process needs for the next line
        job.inject(f"kill,done,task={first},epoch={at}", f"kill,done,task={second},epoch={at}")
        await job.injected()
        await job.finishes(failovers=2)


async def test_flags_and_requests_count_once_when_the_epoch_starts_again() -> None:
    async with chaos("--nodes", "5", talk=True) as job:
        await job.began()
        for count, name in enumerate(("kill,sync,task=3", "kill,done,task=0", "kill,commit"), start=1):
            job.inject(name)
            await job.injected()
            await job.settled(nodes=5 - count)
        result = await job.finishes(failovers=3, restarts=None)
        assert result["restarts"] > 0, "whoever had taken a message was replaced"


async def test_every_replica_of_a_task_without_a_checkpoint_fails_the_job_by_name() -> None:
    async with chaos("--nodes", "4") as job:
        await job.began()
        kill(job.primary(4), *job.backups(4))
        done = await job.done()
        assert done.code == 1
        assert "task 4: every replica in sync is gone" in done.err
        assert "backups=1 now" in done.err and "Traceback" not in done.err


async def test_every_replica_of_a_task_with_a_checkpoint_rolls_the_job_back(tmp_path: Path) -> None:
    async with chaos("--nodes", "4", checkpoint=tmp_path.as_uri(), every=5) as job:
        await job.began()
        await job.until("a checkpoint", lambda view: view.checkpoint is not None)
        job.inject("hold,checkpointed")  # at a checkpoint there would be nothing to go back to
        await job.until("more epochs", lambda view: view.stamp.epoch > view.checkpoint.record.epoch + 5)
        kill(job.primary(4), *job.backups(4))
        job.release("hold,checkpointed")
        await job.command.until("goes back from epoch")
        await job.finishes(restarts=None)


async def test_whoever_writes_a_checkpoint_dies_while_it_does(tmp_path: Path) -> None:
    async with chaos("--nodes", "5", checkpoint=tmp_path.as_uri(), every=5) as job:
        await job.began()
        for count, name in enumerate(
            ("kill,checkpoint,task=3", "kill,checkpoint,task=0", "kill,checkpointed"), start=1
        ):
            job.inject(name)
            await job.injected()
            await job.settled(nodes=5 - count)
        await job.finishes(failovers=3)
