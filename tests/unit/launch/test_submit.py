"""Submitting a job under the name of another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import CheckpointError, JobError, JobRunning
from taskgraph.jobs import Job
from taskgraph.launch.resuming import plan
from taskgraph.launch.submit import submit
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import CheckpointRecord, JobStatus, StatusRecord
from taskgraph.task import Task

KEYS = Keys("fit")


def spec() -> JobSpec:
    return JobSpec.local(Job(tasks=1, builder=lambda task_id: Task(), epochs=1, name="fit"))


CHECKPOINT = Put(KEYS.checkpoint, CheckpointRecord(epoch=20, attempt=1, name="s1").to_bytes())
NODE = Put(KEYS.node("n1-1"), b"{}")


@pytest.mark.parametrize(
    ("puts", "says", "not_said"),
    [
        ((CHECKPOINT, NODE), "follow it with `taskgraph status fit --watch`", "no nodes"),
        ((), "(or they are starting): start some with `taskgraph launch fit`", "checkpoint"),
        (
            (CHECKPOINT,),
            "those that you start with `taskgraph launch fit` go on from its checkpoint of epoch 20; "
            "or end it with `taskgraph shutdown fit`, and resume it then",
            "--watch",
        ),
    ],
)
async def test_running_job_says_how_to_go_on(puts: tuple[Put, ...], says: str, not_said: str) -> None:
    etcd = MemoryCoordinator(MemoryStore())
    await submit(etcd, spec())
    await etcd.txn(Txn(success=puts))
    with pytest.raises(JobRunning, match="is running already") as refused:
        await submit(etcd, spec())
    assert says in str(refused.value) and not_said not in str(refused.value)


def keeping(place: Path) -> JobSpec:
    """Another run of a job that keeps checkpoints."""
    job = Job(tasks=1, builder=lambda task_id: Task(), epochs=100, name="fit", checkpoint=f"file://{place}")
    return JobSpec.local(job)


async def ended(etcd: MemoryCoordinator) -> None:
    status = StatusRecord(state=JobStatus.CANCELLED, writer="x")
    await etcd.txn(Txn(success=(Put(KEYS.status, status.to_bytes()),)))


async def test_resume_of_a_running_job_is_refused(tmp_path: Path) -> None:
    """Its checkpoints may change."""
    etcd, again = MemoryCoordinator(MemoryStore()), keeping(tmp_path)
    await submit(etcd, keeping(tmp_path))
    with pytest.raises(JobRunning, match="is running already"):
        await plan(etcd, again, resume=True)


async def test_one_of_two_resumes_wins(tmp_path: Path) -> None:
    """The other one looked at the checkpoints of an earlier run."""
    etcd = MemoryCoordinator(MemoryStore())
    one = await plan(etcd, keeping(tmp_path), resume=True)
    other = await plan(etcd, keeping(tmp_path), resume=True)
    await submit(etcd, *one)
    with pytest.raises(JobRunning):
        await submit(etcd, *other)
    await ended(etcd)
    with pytest.raises(JobError, match="another run of job 'fit' began and ended while its checkpoints were looked at"):
        await submit(etcd, *other)
    await submit(etcd, *await plan(etcd, keeping(tmp_path), resume=True))


async def test_missing_checkpoint_is_an_error(
    tmp_path: Path,
) -> None:
    """The place may not be mounted."""
    etcd = MemoryCoordinator(MemoryStore())
    await submit(etcd, keeping(tmp_path / "disk"))
    await ended(etcd)
    await etcd.txn(Txn(success=(CHECKPOINT,)))
    for resume in (False, True):
        with pytest.raises(CheckpointError, match=r"left the checkpoint s1 in .*/fit, as etcd says, .* mounted here\?"):
            await plan(etcd, keeping(tmp_path / "disk"), resume=resume)
    _, beginning = await plan(etcd, keeping(tmp_path / "disk"), fresh=True)
    assert beginning.epoch.epoch == 0
    _, beginning = await plan(etcd, keeping(tmp_path / "other disk"))
    assert beginning.epoch.epoch == 0


async def test_submit_deletes_an_earlier_jobs_keys() -> None:
    etcd, first, next_ = MemoryCoordinator(MemoryStore()), spec(), spec()
    await submit(etcd, first)
    mine = {item.key for item in (await etcd.list(KEYS.root)).items}
    left = (
        KEYS.gone("n1-1"),
        KEYS.names,
        KEYS.primary(0),
        KEYS.member(0, "n1-1"),
        KEYS.event("0001"),
        KEYS.collected,
        KEYS.checkpoint,
    )
    await etcd.txn(Txn(success=tuple(Put(key, b"{}") for key in left)))
    await ended(etcd)
    await submit(etcd, next_)
    found = {item.key: item.value for item in (await etcd.list(KEYS.root)).items}
    assert found.keys() == mine
    assert JobSpec.from_bytes(found[KEYS.spec]).run == next_.run
