"""Followers of a run whose name another run has, or whose etcd does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

import taskgraph as tg
from taskgraph import cli
from taskgraph.commands import looking
from taskgraph.commands.common import FoundJob
from taskgraph.commands.joining import _end_of_nodes_text
from taskgraph.coordination.api import AccessRefused, DataLost, Listing
from taskgraph.coordination.etcd.failures import refusal
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import JobError, OutcomeUnknown, Unavailable
from taskgraph.launch.collector import Collector
from taskgraph.launch.local import LocalNodes
from taskgraph.launch.run import _cancel_unbegun
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.launch.submit import submit
from taskgraph.launch.supervise import FrontEndHooks, Supervisor
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import KeyValue, Put, Txn, TxnResult
from taskgraph.protocol.records import CheckpointRecord, JobStatus, PrimaryRecord, StatusRecord
from taskgraph.results import JobResult

NAME = "again"
KEYS = Keys(NAME)
ENTRY = JobEntry(name=NAME, etcd="a:1", token="ab" * 32, pid=0, embedded=False, tls={})
RESULT = JobResult(name=NAME, values={0: 1}, reports=(), epochs=1, failovers=0, restarts=0, wall_s=1.0)


def no_thread_text(thread: threading.Thread, why: str = "can't create new thread at interpreter shutdown") -> None:
    raise RuntimeError(why)


def spec() -> JobSpec:
    """Another run of the same job."""
    return JobSpec.local(tg.Job(tasks=1, epochs=1, builder=tg.Task, name=NAME))


class Deaf(MemoryCoordinator):
    """An etcd that takes no write once `error` is set."""

    error: Exception | None = None

    async def txn(self, txn: Txn) -> TxnResult:
        if self.error is not None and txn.success:
            raise self.error
        return await super().txn(txn)


class Away(MemoryCoordinator):
    """An etcd that fails the next `times` calls with `error`."""

    times = 0
    error: Exception = Unavailable("no usable answer from etcd")

    def _answer(self) -> None:
        if self.times:
            self.times -= 1
            raise self.error

    async def list(self, prefix: str) -> Listing:
        self._answer()
        return await super().list(prefix)

    async def get(self, key: str) -> KeyValue | None:
        self._answer()
        return await super().get(key)


async def end(coordinator: MemoryCoordinator) -> None:
    ended = StatusRecord(state=JobStatus.CANCELLED, reason="by hand")
    await coordinator.txn(Txn(success=(Put(KEYS.status, ended.to_bytes()),)))


async def state(coordinator: MemoryCoordinator) -> str:
    kv = await coordinator.get(KEYS.status)
    assert kv is not None
    return StatusRecord.from_bytes(kv.value).state


@contextlib.asynccontextmanager
async def followed(coordinator: MemoryCoordinator, run: JobSpec) -> AsyncIterator[Collector]:
    follower = Collector(coordinator, run, b"")
    await follower.start()
    try:
        yield follower
    finally:
        await follower.stop()


async def test_ended_run_replaces_no_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    coordinator, first = MemoryCoordinator(MemoryStore()), spec()
    await submit(coordinator, first)
    async with followed(coordinator, first) as follower:
        nodes = Supervisor(first, ENTRY, coordinator, follower, FrontEndHooks(), replace=True)._nodes
        assert nodes._replace()
        await end(coordinator)
        await submit(coordinator, spec())
        await follower.keeper.refresh()
        assert follower.view.running and not nodes._replace()
    await coordinator.close()


async def test_late_launcher_leaves_the_next_run_alone() -> None:
    coordinator = MemoryCoordinator(MemoryStore())
    first, second = spec(), spec()
    await submit(coordinator, first)
    async with followed(coordinator, first) as follower:
        await end(coordinator)
        await submit(coordinator, second)
        assert not await follower.cancel_job("it did not end within 5 s")
        assert await state(coordinator) == JobStatus.RUNNING
        await follower.let_nodes_go([], RESULT)
        assert await coordinator.get(KEYS.collected) is None
    async with followed(coordinator, second) as follower:
        await follower.let_nodes_go([], RESULT)
        assert await coordinator.get(KEYS.collected) is not None
        assert await follower.cancel_job("it did not end within 5 s")
        assert await state(coordinator) == JobStatus.CANCELLED


async def reached_by(coordinator: MemoryCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes commands find the job in this etcd."""
    entry = JobEntry(name=NAME, etcd="a:1", token="", pid=0, embedded=False, tls={})
    kv = await coordinator.get(KEYS.spec)
    assert kv is not None
    reached = FoundJob(NAME, entry, JobSpec.from_bytes(kv.value), coordinator)  # type: ignore[arg-type]

    @contextlib.asynccontextmanager
    async def reach(options: object) -> AsyncIterator[FoundJob]:
        yield reached

    monkeypatch.setattr(looking, "reach", reach)


class LosingTouch(MemoryCoordinator):
    """An etcd that answers once, and then fails three times; then the job has ended."""

    error: Exception = Unavailable("no usable answer from etcd within 10 s")
    asked = 0

    async def list(self, prefix: str) -> Listing:
        self.asked += 1
        if self.asked in (2, 3, 4):
            raise self.error
        if self.asked == 5:
            await end(self)
        return await super().list(prefix)


async def test_status_watch_waits_for_etcd(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    coordinator = LosingTouch(MemoryStore())
    await submit(coordinator, spec())
    await reached_by(coordinator, monkeypatch)
    monkeypatch.setattr(looking, "_WATCH_S", 0.001)
    assert await looking._status(cli.parser().parse_args(["status", NAME, "--etcd", "a:1", "--watch", "--json"])) == 0
    said = capsys.readouterr()
    assert [json.loads(line)["state"] for line in said.out.splitlines()] == ["running", "cancelled"]
    assert re.fullmatch(r"taskgraph: etcd has not answered since \S+ \(no usable .*\); trying again\n", said.err)


@pytest.mark.parametrize(("arguments", "error"), [([], Unavailable("away")), (["--watch"], DataLost("older data"))])
async def test_status_ends_without_etcd(
    arguments: list[str], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = LosingTouch(MemoryStore())
    await submit(coordinator, spec())
    await reached_by(coordinator, monkeypatch)
    monkeypatch.setattr(looking, "_WATCH_S", 0.001)
    coordinator.asked, coordinator.error = 1, error
    with pytest.raises(type(error), match=re.escape(str(error))):
        await looking._status(cli.parser().parse_args(["status", NAME, "--etcd", "a:1", *arguments]))


@pytest.mark.parametrize("nodes", [0, 2])
def test_run_needs_a_thread(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread_text)
    with pytest.raises(JobError, match=r"'again' cannot be run, .* at interpreter shutdown\): run it before the main"):
        tg.run(tg.Job(tasks=1, epochs=1, builder=tg.Task, name=NAME), nodes=nodes)


def test_limit_of_threads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda thread: no_thread_text(thread, "can't start new thread"))
    with pytest.raises(tg.JobFailed, match=r"can't start new thread: a limit of this process"):
        tg.run(tg.Job(tasks=1, epochs=1, builder=tg.Task, name=NAME), nodes=0)


FINISHED = Put(KEYS.status, StatusRecord(state=JobStatus.FINISHED).to_bytes())
CHECKPOINT = Put(KEYS.checkpoint, CheckpointRecord(epoch=20, attempt=1, name="x").to_bytes())


@pytest.mark.parametrize("keeps", [True, False])
async def test_leaving_nodes_name_the_checkpoint(keeps: bool) -> None:
    coordinator, run = MemoryCoordinator(MemoryStore()), spec()
    await submit(coordinator, run)
    primary = Put(KEYS.primary(0), PrimaryRecord(node="n1-1", term=1, stateful=True).to_bytes())
    await coordinator.txn(Txn(success=(primary, *([CHECKPOINT] if keeps else []))))
    async with followed(coordinator, run) as follower:
        said = await _end_of_nodes_text("have left", FoundJob(NAME, ENTRY, run, coordinator), follower)  # type: ignore[arg-type]
    text = "the nodes started here have left; job again has no node left, and the state of its tasks is lost"
    assert said == text + "; new nodes go on from its checkpoint of epoch 20" * keeps
    await coordinator.close()


async def test_follower_does_not_follow_the_next_run() -> None:
    store = MemoryStore()
    coordinator = MemoryCoordinator(store)
    first = spec()
    await submit(coordinator, first)
    async with followed(coordinator, first) as follower:
        ended = asyncio.ensure_future(follower.wait_for_end())
        await asyncio.sleep(0)
        for service in follower._services:  # it stands still
            service.cancel()
        await end(coordinator)
        await submit(coordinator, spec())
        await follower.keeper.load()
        async with asyncio.timeout(30):
            status = await ended
        assert status.state == JobStatus.CANCELLED and "another one was submitted under its name" in status.reason


async def test_too_large_submit_names_its_size() -> None:
    coordinator = Deaf(MemoryStore())
    coordinator.error = refusal("transaction", grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: request is too large")
    large = dataclasses.replace(spec(), kwargs={"text": "x" * (3 << 19)})
    with pytest.raises(tg.JobError, match=r"takes 1\.5 MiB with its arguments, .*: pass the name of a file that every"):
        await submit(coordinator, large)


async def test_unanswered_submit_fails() -> None:
    coordinator = Deaf(MemoryStore())
    coordinator.error = OutcomeUnknown("space exceeded")
    began = time.monotonic()
    with pytest.raises(OutcomeUnknown, match="space exceeded"):
        await submit(coordinator, dataclasses.replace(spec(), expected_nodes=1))
    assert 1.0 < time.monotonic() - began < 30.0


async def test_starting_run_waits_for_etcd(caplog: pytest.LogCaptureFixture) -> None:
    coordinator, run = Away(MemoryStore()), spec()
    await submit(coordinator, run)
    coordinator.times = 3
    async with asyncio.timeout(30), followed(coordinator, run) as follower:
        assert follower.view.running
        coordinator.times = 3
        assert await LocalNodes(ENTRY, coordinator, Runtime())._take_numbers(2) == 1
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "cannot list the job",
        "nodes are started once etcd answers",
    ], "once each"


async def test_failed_start_names_the_job_it_leaves() -> None:
    coordinator, run, error = Away(MemoryStore()), spec(), Unavailable("away")
    follower = Collector(coordinator, run, b"")
    await submit(coordinator, run)
    coordinator.times = 1
    await _cancel_unbegun(follower, ENTRY, Unavailable, error, None)
    (note,) = error.__notes__
    assert "job 'again' may be left there as running" in note and "`taskgraph shutdown again --etcd a:1`" in note
    another = Unavailable("away")
    await _cancel_unbegun(follower, ENTRY, Unavailable, another, None)
    assert await state(coordinator) == JobStatus.CANCELLED and not hasattr(another, "__notes__")
    await follower.keeper.load()
    coordinator.times = 1
    await _cancel_unbegun(follower, ENTRY, Unavailable, another, None)
    assert not hasattr(another, "__notes__"), "it is known to have ended"


@pytest.mark.parametrize(
    ("why", "answer", "says"),
    [
        (AccessRefused("refused"), AccessRefused("refused"), ""),
        (JobError("too large"), Unavailable("away"), ""),
        (DataLost("lost"), OutcomeUnknown("others write"), ""),
        (
            OutcomeUnknown("sent"),
            AccessRefused("refused"),
            "its end was not written (refused), so that job 'again' may",
        ),
        (OutcomeUnknown("sent"), OutcomeUnknown("sent"), "etcd does not answer, so that job 'again' may"),
    ],
)
async def test_failed_start_leaves_no_job(why: Exception, answer: Exception, says: str) -> None:
    coordinator = Away(MemoryStore())
    coordinator.times, coordinator.error = 1, answer
    await _cancel_unbegun(Collector(coordinator, spec(), b""), ENTRY, type(why), why, None)
    notes = getattr(why, "__notes__", [])
    assert notes == [] if not says else notes[0].startswith(says)
