"""Followers of a run whose name is another run's by now, or whose etcd does not answer any more."""

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
from taskgraph.commands.common import Reached
from taskgraph.commands.joining import _left_text
from taskgraph.coordination.api import AccessRefused, Listing, Lost
from taskgraph.coordination.etcd.failures import refusal
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import JobError, OutcomeUnknown, Unavailable
from taskgraph.graph.values import encode
from taskgraph.launch import run as launch_run
from taskgraph.launch.collector import Collector
from taskgraph.launch.kept import why_not_kept
from taskgraph.launch.local import LocalNodes
from taskgraph.launch.run import _cancel_unbegun
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.launch.submit import submit
from taskgraph.launch.supervise import Hooks, Supervisor
from taskgraph.observe.status import TaskResult
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import KeyValue, Put, Txn, TxnResult
from taskgraph.protocol.records import CheckpointRecord, NodeRecord, PrimaryRecord, State, StatusRecord
from taskgraph.results import JobResult

NAME = "again"
KEYS = Keys(NAME)
ENTRY = JobEntry(name=NAME, etcd="a:1", token="ab" * 32, pid=0, embedded=False, tls={})
RESULT = JobResult(name=NAME, values={0: 1}, reports=(), epochs=1, failovers=0, restarts=0, wall_s=1.0)


def no_thread(thread: threading.Thread, why: str = "can't create new thread at interpreter shutdown") -> None:
    raise RuntimeError(why)


def spec() -> JobSpec:
    """One run more of the same job."""
    return JobSpec.local(tg.Job(tasks=1, epochs=1, builder=tg.Task, name=NAME))


class Deaf(MemoryCoordinator):
    """Takes no write once `error` is set."""

    error: Exception | None = None

    async def txn(self, txn: Txn) -> TxnResult:
        if self.error is not None and txn.success:
            raise self.error
        return await super().txn(txn)


class Away(MemoryCoordinator):
    """Does not answer the next `times` calls, or raises `error`."""

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
    ended = StatusRecord(state=State.CANCELLED, reason="by hand")
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


async def test_in_place_of_a_node_that_dies_once_the_job_is_submitted_again_none_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It took a number of the next run, and joined that."""
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    coordinator, first = MemoryCoordinator(MemoryStore()), spec()
    await submit(coordinator, first)
    async with followed(coordinator, first) as follower:
        nodes = Supervisor(first, ENTRY, coordinator, follower, Hooks(), replace=True)._nodes
        assert nodes._replace()
        await end(coordinator)
        await submit(coordinator, spec())
        await follower.keeper.refresh()
        assert follower.view.running and not nodes._replace()
    await coordinator.close()


async def test_who_wakes_up_late_neither_ends_nor_collects_the_run_that_has_the_name_now() -> None:
    coordinator = MemoryCoordinator(MemoryStore())
    first, second = spec(), spec()
    await submit(coordinator, first)
    async with followed(coordinator, first) as follower:
        await end(coordinator)
        await submit(coordinator, second)
        assert not await follower.cancel_job("it did not end within 5 s")
        assert await state(coordinator) == State.RUNNING
        await follower.let_go([], RESULT)
        assert await coordinator.get(KEYS.collected) is None and await coordinator.get(KEYS.result) is None
    async with followed(coordinator, second) as follower:
        await follower.let_go([], RESULT)
        assert await coordinator.get(KEYS.collected) is not None
        assert await follower.cancel_job("it did not end within 5 s")
        assert await state(coordinator) == State.CANCELLED


def reported(values: object, epochs: int) -> JobResult:
    reports = tuple(tg.EpochReport(e, {"loss": 0.5}, {0: {"loss": 0.5}}) for e in range(epochs))
    return JobResult(name=NAME, values={0: values}, reports=reports, epochs=epochs)


async def kept(result: JobResult) -> tuple[MemoryCoordinator, Collector]:
    """An etcd that keeps what it does of this result, and who collected it."""
    coordinator, run = MemoryCoordinator(MemoryStore()), spec()
    await submit(coordinator, run)
    found = [TaskResult(0, result.epochs, 1, encode(result.values[0]), ())]
    async with followed(coordinator, run) as follower:
        await follower.let_go(found, result)
    return coordinator, follower


async def shown(coordinator: MemoryCoordinator, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """`taskgraph result`, of a job that finished and whose nodes are gone."""
    finished = StatusRecord(state=State.FINISHED, reason="", writer="")
    await coordinator.txn(Txn(success=(Put(KEYS.status, finished.to_bytes()),)))
    await reached_by(coordinator, monkeypatch)
    options = cli.parser().parse_args(["result", NAME, "--etcd", "a:1", *arguments])
    return await asyncio.to_thread(looking.result, options)


async def reached_by(coordinator: MemoryCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that look find the job there."""
    entry = JobEntry(name=NAME, etcd="a:1", token="", pid=0, embedded=False, tls={})
    kv = await coordinator.get(KEYS.spec)
    assert kv is not None
    reached = Reached(NAME, entry, JobSpec.from_bytes(kv.value), coordinator)  # type: ignore[arg-type]

    @contextlib.asynccontextmanager
    async def reach(options: object) -> AsyncIterator[Reached]:
        yield reached

    monkeypatch.setattr(looking, "reach", reach)


class LosingTouch(MemoryCoordinator):
    """Answers once, then `error` three times; then the job has ended."""

    error: Exception = Unavailable("no usable answer from etcd within 10 s")
    asked = 0

    async def list(self, prefix: str) -> Listing:
        self.asked += 1
        if self.asked in (2, 3, 4):
            raise self.error
        if self.asked == 5:
            await end(self)
        return await super().list(prefix)


async def test_status_watches_on_while_etcd_does_not_answer_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended with the first call that failed, after ten seconds: when one looks what is the matter."""
    coordinator = LosingTouch(MemoryStore())
    await submit(coordinator, spec())
    await reached_by(coordinator, monkeypatch)
    monkeypatch.setattr(looking, "_WATCH_S", 0.001)
    assert await looking._status(cli.parser().parse_args(["status", NAME, "--etcd", "a:1", "--watch", "--json"])) == 0
    told = capsys.readouterr()
    assert [json.loads(line)["state"] for line in told.out.splitlines()] == ["running", "cancelled"]
    assert re.fullmatch(r"taskgraph: etcd has not answered since \S+ \(no usable .*\); trying again\n", told.err)


@pytest.mark.parametrize(("arguments", "error"), [([], Unavailable("away")), (["--watch"], Lost("older data"))])
async def test_status_ends_where_it_does_not_watch_or_etcd_has_lost_the_job(
    arguments: list[str], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = LosingTouch(MemoryStore())
    await submit(coordinator, spec())
    await reached_by(coordinator, monkeypatch)
    monkeypatch.setattr(looking, "_WATCH_S", 0.001)
    coordinator.asked, coordinator.error = 1, error
    with pytest.raises(type(error), match=re.escape(str(error))):
        await looking._status(cli.parser().parse_args(["status", NAME, "--etcd", "a:1", *arguments]))


@pytest.mark.parametrize("limit", ["executors", "threads"])
def test_a_result_is_kept_where_no_thread_can_be_started_any_more(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's run outlives the main thread. Which of both is so by then depends on the version."""
    if limit == "executors":
        monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    else:
        monkeypatch.setattr(threading.Thread, "start", no_thread)
    _, follower = asyncio.run(kept(RESULT))
    assert follower.kept_json == RESULT.to_json() and follower.not_kept == ""


@pytest.mark.parametrize("nodes", [0, 2])
def test_a_run_is_refused_where_no_thread_can_be_started_any_more(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(JobError, match=r"'again' cannot be run, .* at interpreter shutdown\): run it before the main"):
        tg.run(tg.Job(tasks=1, epochs=1, builder=tg.Task, name=NAME), nodes=nodes)


def test_a_limit_of_threads_is_not_taken_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda thread: no_thread(thread, "can't start new thread"))
    with pytest.raises(tg.JobFailed, match=r"can't start new thread: a limit of this process"):
        tg.run(tg.Job(tasks=1, epochs=1, builder=tg.Task, name=NAME), nodes=0)


async def test_where_the_reports_are_too_large_the_values_are_kept_and_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = reported(1.5, 20_000)
    coordinator, follower = await kept(result)
    assert follower.kept_json == result.to_json(), "on this host all of it is kept"
    left_out = f"reports left out: with them it was {len(result.to_json()) / (1 << 20):.1f} MiB, and less than 1.0 MiB"
    assert await shown(coordinator, monkeypatch) == 0
    told = capsys.readouterr()
    assert told.out == "1.5\n" and told.err.startswith(left_out)
    assert await shown(coordinator, monkeypatch, "--json") == 0
    read = json.loads(capsys.readouterr().out)
    assert read["values"] == {"0": 1.5} and read["reports"] == [] and read["left_out"].startswith(left_out)


async def test_a_small_result_is_kept_with_its_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = reported(1.5, 10)
    coordinator, _ = await kept(result)
    assert await shown(coordinator, monkeypatch, "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(result.to_json())


async def test_values_that_are_too_large_are_not_kept_and_the_message_says_how_large_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator, follower = await kept(reported("x" * (3 << 19), 10))
    assert follower.kept_json is not None and follower.not_kept == "" and await coordinator.get(KEYS.result) is None
    with pytest.raises(
        tg.UnknownJob, match=r"as JSON they take 1\.5 MiB, and less than 1\.0 MiB is kept in etcd: the run"
    ):
        await shown(coordinator, monkeypatch)
    monkeypatch.setattr("taskgraph.launch.collect._KEPT_BYTES", 1 << 20)
    coordinator, follower = await kept(reported("x" * (3 << 19), 0))
    assert follower.kept_json is None
    assert follower.not_kept == "they take 1.5 MiB, and less than 1.0 MiB is kept: the run has returned them"
    with pytest.raises(tg.UnknownJob, match=follower.not_kept):
        await shown(coordinator, monkeypatch)


FINISHED = Put(KEYS.status, StatusRecord(state=State.FINISHED).to_bytes())
CHECKPOINT = Put(KEYS.checkpoint, CheckpointRecord(epoch=20, attempt=1, name="x").to_bytes())


@pytest.mark.parametrize("keeps", [True, False])
async def test_what_nodes_that_leave_take_with_them_is_not_what_a_checkpoint_has(keeps: bool) -> None:
    """All was said to be gone: whoever read it began the job anew."""
    coordinator, run = MemoryCoordinator(MemoryStore()), spec()
    await submit(coordinator, run)
    primary = Put(KEYS.primary(0), PrimaryRecord(node="n1-1", term=1, stateful=True).to_bytes())
    await coordinator.txn(Txn(success=(primary, *([CHECKPOINT] if keeps else []))))
    async with followed(coordinator, run) as follower:
        told = await _left_text("have left", Reached(NAME, ENTRY, run, coordinator), follower)  # type: ignore[arg-type]
    text = "the nodes started here have left; job again has no node left, and the state of its tasks is lost"
    assert told == text + "; new nodes go on from its checkpoint of epoch 20" * keeps
    await coordinator.close()


async def test_of_values_that_went_with_the_nodes_it_is_said_how_they_are_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator = MemoryCoordinator(MemoryStore())
    await submit(coordinator, spec())
    with pytest.raises(tg.UnknownJob, match=r"its last node left before anyone collected them$"):
        await shown(coordinator, monkeypatch)
    await coordinator.txn(Txn(success=(CHECKPOINT,)))
    way = "epoch 20 is complete: go on from there with --resume .*, or with new nodes .*`taskgraph launch again`"
    with pytest.raises(tg.UnknownJob, match=way):
        await shown(coordinator, monkeypatch)


async def test_who_collects_tells_nodes_that_are_gone_from_somebody_else_who_was_first() -> None:
    """Both were taken for the latter: of a job whose values were lost it was said where they are."""
    coordinator, run = MemoryCoordinator(MemoryStore()), spec()
    await submit(coordinator, run)
    await coordinator.txn(Txn(success=(FINISHED,)))
    async with asyncio.timeout(30), followed(coordinator, run) as follower:
        assert await follower.collect() is None
        assert follower.not_kept == "its last node left before anyone collected them"
    async with asyncio.timeout(30), followed(coordinator, run) as follower:
        here: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        collecting = asyncio.ensure_future(follower.collect(here))
        await asyncio.sleep(0.01)
        assert not collecting.done(), "a node that this process started may be about to register"
        await coordinator.txn(Txn(success=(Put(KEYS.collected, b"{}"),)))
        assert await collecting is None and follower.not_kept == ""


async def test_who_collects_stops_where_the_job_runs_again() -> None:
    coordinator, run = MemoryCoordinator(MemoryStore()), spec()
    await submit(coordinator, run)
    await coordinator.txn(Txn(success=(FINISHED,)))
    async with asyncio.timeout(30), followed(coordinator, run) as follower:
        collecting = asyncio.ensure_future(follower.collect(asyncio.get_running_loop().create_future()))
        await asyncio.sleep(0.01)
        await coordinator.txn(Txn(success=(Put(KEYS.status, StatusRecord(state=State.RUNNING).to_bytes()),)))
        assert await collecting is None and follower.not_kept == "" and not follower.finished


async def test_who_read_nothing_of_its_runs_end_does_not_follow_the_next_one() -> None:
    store = MemoryStore()
    coordinator = MemoryCoordinator(store)
    first = spec()
    await submit(coordinator, first)
    async with followed(coordinator, first) as follower:
        ended = asyncio.ensure_future(follower.ended())
        await asyncio.sleep(0)
        for service in follower._services:  # it stands still
            service.cancel()
        await end(coordinator)
        await submit(coordinator, spec())
        await follower.keeper.load()
        async with asyncio.timeout(30):
            status = await ended
        assert status.state == State.CANCELLED and "another one was submitted under its name" in status.reason


@pytest.mark.parametrize(("error", "why"), [(Unavailable("away"), "away"), (OutcomeUnknown("full"), "no answer")])
async def test_a_result_that_is_here_does_not_get_lost_with_etcd(
    error: Exception, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("taskgraph.launch.collector._COLLECTED_S", 0.5)
    coordinator = Deaf(MemoryStore())
    run = spec()
    await submit(coordinator, run)
    async with followed(coordinator, run) as follower:
        coordinator.error = error
        async with asyncio.timeout(30):
            await follower.let_go([], RESULT)
        assert follower.kept_json is not None
    (record,) = caplog.records
    assert "collected is not known" in record.message and record.message.endswith(f": {why}")


async def test_a_submit_that_is_too_large_for_etcd_says_how_large_it_is_and_what_to_pass() -> None:
    coordinator = Deaf(MemoryStore())
    coordinator.error = refusal("transaction", grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: request is too large")
    large = dataclasses.replace(spec(), kwargs={"text": "x" * (3 << 19)})
    with pytest.raises(tg.JobError, match=r"takes 1\.5 MiB with its arguments, .*: pass the name of a file that every"):
        await submit(coordinator, large)


async def test_a_submit_whose_writes_are_never_answered_says_why() -> None:
    coordinator = Deaf(MemoryStore())
    coordinator.error = OutcomeUnknown("space exceeded")
    began = time.monotonic()
    with pytest.raises(OutcomeUnknown, match="space exceeded"):
        await submit(coordinator, dataclasses.replace(spec(), expected_nodes=1))
    assert 1.0 < time.monotonic() - began < 30.0


async def test_an_etcd_that_is_away_while_a_run_starts_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
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


async def test_a_run_that_gives_up_while_etcd_is_away_names_the_job_that_it_leaves() -> None:
    coordinator, run, error = Away(MemoryStore()), spec(), Unavailable("away")
    follower = Collector(coordinator, run, b"")
    await submit(coordinator, run)
    coordinator.times = 1
    await _cancel_unbegun(follower, ENTRY, Unavailable, error, None)
    (note,) = error.__notes__
    assert "job 'again' may be left there as running" in note and "`taskgraph shutdown again --etcd a:1`" in note
    another = Unavailable("away")
    await _cancel_unbegun(follower, ENTRY, Unavailable, another, None)
    assert await state(coordinator) == State.CANCELLED and not hasattr(another, "__notes__")
    await follower.keeper.load()
    coordinator.times = 1
    await _cancel_unbegun(follower, ENTRY, Unavailable, another, None)
    assert not hasattr(another, "__notes__"), "it is known to have ended"


@pytest.mark.parametrize(
    ("why", "answer", "says"),
    [
        (AccessRefused("refused"), AccessRefused("refused"), ""),
        (JobError("too large"), Unavailable("away"), ""),
        (Lost("lost"), OutcomeUnknown("others write"), ""),
        (
            OutcomeUnknown("sent"),
            AccessRefused("refused"),
            "its end was not written (refused), so that job 'again' may",
        ),
        (OutcomeUnknown("sent"), OutcomeUnknown("sent"), "etcd does not answer, so that job 'again' may"),
    ],
)
async def test_a_run_that_gives_up_says_that_a_job_may_be_left_only_where_it_may(
    why: Exception, answer: Exception, says: str
) -> None:
    """It said so of jobs that etcd had lost, and of those that it had not taken."""
    coordinator = Away(MemoryStore())
    coordinator.times, coordinator.error = 1, answer
    await _cancel_unbegun(Collector(coordinator, spec(), b""), ENTRY, type(why), why, None)
    notes = getattr(why, "__notes__", [])
    assert notes == [] if not says else notes[0].startswith(says)


LARGE = reported("x" * (3 << 19), 0)
"""Of more than etcd keeps."""


async def finished_on_a_node(expected_nodes: int = 0) -> tuple[MemoryCoordinator, JobSpec]:
    """A job that has finished, with one node that keeps its results."""
    coordinator, run = MemoryCoordinator(MemoryStore()), dataclasses.replace(spec(), expected_nodes=expected_nodes)
    await submit(coordinator, run)
    record = NodeRecord(
        name="n1", run=run.run, host="h", pid=1, endpoints=("unix:x",), control="", fingerprint=run.fingerprint, lease=0
    )
    await coordinator.txn(Txn(success=(FINISHED, Put(KEYS.node("n1"), record.to_bytes()))))
    return coordinator, run


@pytest.fixture
def on_this_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nodes tell `LARGE`; what is kept is kept in a place of the test's own."""
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("taskgraph.launch.collector._OTHERS_FIRST_S", 0.01)

    async def results(self: Collector) -> list[TaskResult]:
        return [TaskResult(0, LARGE.epochs, 1, encode(LARGE.values[0]), (), (), 12.5)]

    monkeypatch.setattr(Collector, "results", results)


@pytest.mark.usefixtures("on_this_host")
async def test_how_long_a_job_lasted_is_told_by_its_nodes_whatever_the_time_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time here was compared with that of who submitted it: it had lasted minus an hour, or a day."""
    coordinator, run = await finished_on_a_node()
    monkeypatch.setattr(time, "time", lambda: 86_400.0)
    async with asyncio.timeout(30), followed(coordinator, run) as follower:
        collected = await follower.collect()
    assert collected is not None and collected.wall_s == 12.5
    assert follower.kept_json is not None and json.loads(follower.kept_json)["wall_s"] == 12.5


def values_in(told: str) -> object:
    return json.loads(told)["values"]


@pytest.mark.usefixtures("on_this_host")
async def test_what_etcd_cannot_keep_is_kept_on_the_host_of_whoever_collects_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was shown in short, and gone: nobody could ask for it again."""
    coordinator, run = await finished_on_a_node()
    async with asyncio.timeout(30), followed(coordinator, run) as follower:
        assert await follower.collect() is not None and follower.only_there == ""
    for _ in range(2):
        assert await shown(coordinator, monkeypatch, "--json") == 0
        assert values_in(capsys.readouterr().out) == {"0": LARGE.values[0]}
    assert "etcd; `taskgraph result again` has them on host" in why_not_kept(await coordinator.get(KEYS.collected))

    async def connect(*_: object) -> contextlib.nullcontext[MemoryCoordinator]:
        return contextlib.nullcontext(coordinator)

    monkeypatch.setattr(launch_run, "connect", connect)
    assert (await asyncio.to_thread(tg.result, NAME, "a:1")).value == LARGE.value


@pytest.mark.usefixtures("on_this_host")
async def test_what_is_kept_nowhere_is_let_go_only_once_all_of_it_was_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("taskgraph.launch.collect._KEPT_BYTES", 1 << 20)
    coordinator, run = await finished_on_a_node()
    assert await shown(coordinator, monkeypatch) == 0
    way = "alone keep its values (they take 1.5 MiB, and less than 1.0 MiB is kept), for 300 s (results_kept_s): "
    assert way + "`taskgraph result again --json > FILE` takes them" in capsys.readouterr().err
    with monkeypatch.context() as full:
        full.setattr(looking, "print", gone, raising=False)
        with pytest.raises(BrokenPipeError):
            await shown(coordinator, full, "--json")
    assert await coordinator.get(KEYS.collected) is None
    async with asyncio.timeout(30), followed(coordinator, run) as follower:
        assert await follower.collect() is not None
        waiting = asyncio.ensure_future(follower.taken(asyncio.get_running_loop().create_future()))
        assert await shown(coordinator, monkeypatch, "--json") == 0
        await waiting
    assert values_in(capsys.readouterr().out) == {"0": LARGE.values[0]}
    assert "kept; `taskgraph result --json` wrote them on" in why_not_kept(await coordinator.get(KEYS.collected))


def gone(*_: object, **__: object) -> None:
    raise BrokenPipeError


@pytest.mark.usefixtures("on_this_host")
@pytest.mark.parametrize("ours", [True, False])
async def test_very_many_reports_are_kept_whole_where_nobody_else_has_them(
    monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    """Of a job that was submitted; whoever runs one has them. Values were lost with them, of whatever size."""
    monkeypatch.setattr("taskgraph.launch.collect._KEPT_BYTES", 100_000)
    coordinator, run, result = MemoryCoordinator(MemoryStore()), spec(), reported(1.5, 20_000)
    await submit(coordinator, run)
    found = [TaskResult(0, result.epochs, 1, encode(1.5), ())]
    async with followed(coordinator, run) as follower:
        await (follower.let_go if ours else follower._keep_and_let_go)(found, result)
    assert await coordinator.get(KEYS.collected) is not None and not follower.only_there
    in_etcd = await coordinator.get(KEYS.result)
    assert in_etcd is not None and json.loads(in_etcd.value)["values"] == {"0": 1.5}
    assert follower.kept_json is not None
    kept = tg.JobResult.from_json(follower.kept_json)
    assert kept.values == {0: 1.5} and len(kept.reports) == (0 if ours else 20_000)
    if not ours:
        assert Runtime().finished(NAME) is not None


@pytest.mark.usefixtures("on_this_host")
async def test_a_host_that_has_no_room_lets_no_node_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Runtime, "keep_finished", full)
    coordinator, run = await finished_on_a_node()
    async with asyncio.timeout(30), followed(coordinator, run) as follower:
        assert await follower.collect() is not None
        assert "No space left on device" in follower.only_there
    assert await coordinator.get(KEYS.collected) is None


@pytest.mark.usefixtures("on_this_host")
async def test_who_looks_at_the_result_of_a_job_that_somebody_runs_leaves_its_nodes_to_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that had not collected after some 15 s was told that its nodes had ended, and failed."""
    coordinator, _ = await finished_on_a_node(expected_nodes=1)
    assert await shown(coordinator, monkeypatch, "--json") == 0
    assert values_in(capsys.readouterr().out) == {"0": LARGE.values[0]}
    assert await coordinator.get(KEYS.collected) is None and Runtime().finished(NAME) is None
