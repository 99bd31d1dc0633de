"""Deleting the keys of ended jobs, and of no other job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import JobError, OutcomeUnknown, UnknownJob
from taskgraph.jobs import Job
from taskgraph.launch.forget import forget
from taskgraph.launch.submit import submit
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn, TxnResult
from taskgraph.protocol.records import JobStatus, PrimaryRecord, StatusRecord
from taskgraph.task import Task

KEYS = Keys("fit")
SPEC = JobSpec.local(Job(tasks=1, builder=lambda task_id: Task(), epochs=1, name="fit"))


class Etcd(MemoryCoordinator):
    """An etcd with another job; functions may run right before or right after the next writes."""

    before: Callable[[], None] | None = None
    lost_answers = 0

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.put("/taskgraph/fit-2/spec", b"")

    def put(self, key: str, value: bytes) -> None:
        self.store.execute(Txn(success=(Put(key, value),)))

    def ends(self, state: str, *, collected: bool = True, node: bool = False) -> None:
        self.put(KEYS.status, StatusRecord(state=state).to_bytes())
        self.put(KEYS.primary(0), PrimaryRecord(node="n1-1", term=1, stateful=True).to_bytes())
        self.put(KEYS.event("1"), b"")
        if collected:
            self.put(KEYS.collected, b"")
        if node:
            self.put(KEYS.node("n1-1"), b"")

    async def txn(self, txn: Txn) -> TxnResult:
        before, self.before = self.before, None
        if before is not None:
            before()
        done = await super().txn(txn)
        if self.lost_answers:
            self.lost_answers -= 1
            raise OutcomeUnknown("no answer")
        return done

    @property
    def left(self) -> list[str]:
        return [kv.key for kv in self.store.select("/", prefix=True)]


@pytest.fixture
async def etcd() -> Etcd:
    found = Etcd()
    await submit(found, SPEC)
    return found


@pytest.mark.parametrize("state", [JobStatus.FINISHED, JobStatus.FAILED, JobStatus.CANCELLED])
async def test_forget_deletes_one_job(etcd: Etcd, state: str) -> None:
    etcd.ends(state)
    assert await forget(etcd, "fit") == 7
    assert etcd.left == ["/taskgraph/fit-2/spec"]
    with pytest.raises(UnknownJob, match="nothing is kept in etcd of a job 'fit'"):
        await forget(etcd, "fit")


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (lambda etcd: None, "job 'fit' is running: end it first, with `taskgraph shutdown fit`"),
        (
            lambda etcd: etcd.ends(JobStatus.FINISHED, collected=False, node=True),
            "its nodes keep its results, which were not collected: take them first, with `taskgraph result fit`",
        ),
        (lambda etcd: etcd.ends(JobStatus.FAILED, node=True), "its nodes are about to leave: try again in a moment"),
    ],
)
async def test_running_job_is_not_forgotten(etcd: Etcd, end: Callable[[Etcd], None], says: str) -> None:
    end(etcd)
    there = etcd.left
    with pytest.raises(JobError, match=says):
        await forget(etcd, "fit")
    assert etcd.left == there


async def test_lost_results_do_not_stop_forget(etcd: Etcd) -> None:
    etcd.ends(JobStatus.FINISHED, collected=False)
    assert await forget(etcd, "fit") == 6


async def test_forget_spares_the_next_run(etcd: Etcd) -> None:
    etcd.ends(JobStatus.FINISHED)
    another = dataclasses.replace(SPEC, run="another")

    def submitted() -> None:
        etcd.put(KEYS.spec, another.to_bytes())
        etcd.put(KEYS.status, StatusRecord(state=JobStatus.RUNNING).to_bytes())

    etcd.before = submitted
    with pytest.raises(JobError, match="is running"):
        await forget(etcd, "fit")
    spec = await etcd.get(KEYS.spec)
    assert spec is not None and JobSpec.from_bytes(spec.value).run == "another"


async def test_forget_gives_up_on_unknown_outcomes(etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskgraph.launch.forget.UNKNOWN_PAUSE_S", 0.0)
    etcd.ends(JobStatus.FINISHED)

    async def unknown(txn: Txn) -> TxnResult:
        raise OutcomeUnknown("no answer")

    monkeypatch.setattr(etcd, "txn", unknown)
    with pytest.raises(OutcomeUnknown):
        await forget(etcd, "fit")
