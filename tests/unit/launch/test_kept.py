"""What etcd and this host keep of a job that has ended, and what `taskgraph result` finds there."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import re
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph import cli
from taskgraph.commands import looking
from taskgraph.commands.common import FoundJob
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import OutcomeUnknown, Unavailable
from taskgraph.graph.values import encode
from taskgraph.launch import collect
from taskgraph.launch import run as launch_run
from taskgraph.launch.collector import Collector
from taskgraph.launch.kept import KeptJob, collected_record
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.launch.submit import submit
from taskgraph.node.reports import ReportLog
from taskgraph.observe.status import TaskResult
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn, TxnResult
from taskgraph.protocol.records import CheckpointRecord, JobStatus, NodeRecord, StatusRecord
from taskgraph.results import json_pieces

NAME = "fit"
KEYS = Keys(NAME)
ENDED = StatusRecord(state=JobStatus.FINISHED)
FINISHED = Put(KEYS.status, ENDED.to_bytes())


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr("taskgraph.launch.collector._OTHERS_FIRST_S", 0.01)
    monkeypatch.chdir(tmp_path)


def reported(value: object, epochs: int, name: str = "loss") -> tg.JobResult:
    """A result with one number reported in each epoch."""
    reports = tuple(tg.EpochReport(e, {name: 0.5}, {0: {name: 0.5}}) for e in range(epochs))
    return tg.JobResult(name=NAME, values={0: value}, reports=reports, epochs=epochs)


LARGE = reported("x" * (3 << 19), 0)
"""Too large for etcd."""
LARGE_REPORTS = reported(1.5, 5000, "l" * 120)


async def finished_job(etcd: MemoryCoordinator, *, nodes: int = 0, expected_nodes: int = 0) -> JobSpec:
    """Puts a job that has finished, with registered nodes that keep its results."""
    job = tg.Job(tasks=1, epochs=1, builder=tg.Task, name=NAME)
    spec = dataclasses.replace(JobSpec.local(job), expected_nodes=expected_nodes)
    await submit(etcd, spec)
    node = NodeRecord(
        name="n1", run=spec.run, host="h", pid=1, endpoints=(), control="", fingerprint="", lease=0
    ).to_bytes()
    await etcd.txn(Txn(success=(FINISHED, *(Put(KEYS.node(f"n{number}"), node) for number in range(nodes)))))
    return spec


@contextlib.asynccontextmanager
async def following(etcd: MemoryCoordinator, spec: JobSpec) -> AsyncIterator[Collector]:
    follower = Collector(etcd, spec, b"")
    await follower.start()
    try:
        async with asyncio.timeout(30):
            yield follower
    finally:
        await follower.stop()


def nodes_send(result: tg.JobResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes nodes send this result to each collector."""
    log = ReportLog()
    log.fold({each.epoch: each.by_task for each in result.reports})
    found = [TaskResult(0, result.epochs, 1, encode(result.values[0]), (), tuple(log.packed()), 12.5)]

    async def results(self: Collector) -> list[TaskResult]:
        return found

    monkeypatch.setattr(Collector, "results", results)


async def returned(result: tg.JobResult) -> tuple[MemoryCoordinator, KeptJob]:
    """Returns etcd, and this host's copy, after a run has returned its result."""
    etcd = MemoryCoordinator(MemoryStore())
    async with following(etcd, await finished_job(etcd)) as follower:
        await follower.let_nodes_go([TaskResult(0, result.epochs, 1, encode(result.values[0]), ())], result)
        return etcd, follower.kept


async def shown(etcd: MemoryCoordinator, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Runs `taskgraph result`."""
    spec = await etcd.get(KEYS.spec)
    assert spec is not None
    entry = JobEntry(name=NAME, etcd="a:1", token="", pid=0, embedded=False, tls={})

    @contextlib.asynccontextmanager
    async def reach(options: object) -> AsyncIterator[FoundJob]:
        yield FoundJob(NAME, entry, JobSpec.from_bytes(spec.value), etcd)  # type: ignore[arg-type]

    monkeypatch.setattr(looking, "reach", reach)
    options = cli.parser().parse_args(["result", NAME, "--etcd", "a:1", *arguments])
    return await asyncio.to_thread(looking.result, options)


async def in_etcd(etcd: MemoryCoordinator) -> KeptJob:
    return collected_record(await etcd.get(KEYS.collected))


# -- the copies of a run --------------------------------------------------------------------------------------


async def test_small_result_is_kept_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    result = reported(1.5, 10)
    etcd, _ = await returned(result)
    assert await shown(etcd, monkeypatch, "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(result.to_json())


async def test_etcd_leaves_out_many_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = LARGE_REPORTS
    etcd, here = await returned(result)
    assert here.result == result.to_json() and not here.not_kept
    left_out = "reports left out: with them the result is larger, and etcd keeps less than 1.0 MiB: the run has"
    assert await shown(etcd, monkeypatch) == 0
    said = capsys.readouterr()
    assert said.out == "1.5\n" and said.err.startswith(left_out)
    assert await shown(etcd, monkeypatch, "--json") == 0
    read = json.loads(capsys.readouterr().out)
    assert read["values"] == {"0": 1.5} and read["reports"] == [] and read["left_out"].startswith(left_out)


async def test_large_values_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd, here = await returned(LARGE)
    assert here.result and (await in_etcd(etcd)).result == ""
    with pytest.raises(tg.UnknownJob, match=r"as JSON they are larger, and etcd keeps less than 1\.0 MiB: the run has"):
        await shown(etcd, monkeypatch)
    monkeypatch.setattr(collect, "_HOST_BYTES", 1 << 20)
    etcd, here = await returned(LARGE)
    assert here == KeptJob(not_kept="they take 1.5 MiB, and less than 1.0 MiB is kept: the run has returned them")
    with pytest.raises(tg.UnknownJob, match=here.not_kept):
        await shown(etcd, monkeypatch)


class Unreadable:
    tolist = None  # looks like an array, and is none


class ManyNumbers: ...


tg.codec(ManyNumbers, lambda _: [np.ones(1 << 21)], lambda _: ManyNumbers())


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Unreadable(), r"cannot be written as JSON \(AttributeError: "),
        (ManyNumbers(), "have 2,097,152 numbers or texts or more, and no more than 1,048,576 are kept"),
    ],
)
def test_unkept_values_have_a_reason(value: object, why: str) -> None:
    here, there = collect.make_copies(tg.JobResult(name=NAME, values={0: value}), 8)
    assert here == there and here.result == "" and re.match(f"they {why}", here.not_kept)


def test_writing_stops_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def counted(result: tg.JobResult) -> Iterator[str]:
        for piece in json_pieces(result):
            written.append(len(piece))
            yield piece

    monkeypatch.setattr(collect, "json_pieces", counted)
    monkeypatch.setattr(collect, "_HOST_BYTES", 100_000)
    here, there = collect.make_copies(reported(1.5, 20_000), 8)
    assert sum(written) <= 200_000
    assert here == there and here.parsed_result["values"] == {"0": 1.5} and here.parsed_result["reports"] == []
    assert here.not_kept == "reports left out: with them the result is larger, and this host keeps less than 0.1 MiB"


async def test_event_loop_runs_while_a_result_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    ticked = threading.Event()

    def json_pieces(result: tg.JobResult) -> Iterator[str]:
        assert ticked.wait(30), "the loop stands still"
        yield "{}"

    monkeypatch.setattr(collect, "json_pieces", json_pieces)
    etcd = MemoryCoordinator(MemoryStore())
    async with following(etcd, await finished_job(etcd)) as follower:
        asyncio.get_running_loop().call_soon(ticked.set)
        await follower.let_nodes_go([], tg.JobResult(name=NAME))
    assert follower.kept.result == "{}"


@pytest.mark.parametrize("limit", ["executors", "threads"])
def test_result_is_kept_without_threads(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in a thread may outlive the main thread: then no other thread can start."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    if limit == "executors":
        monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    else:
        monkeypatch.setattr(threading.Thread, "start", start)
    _, here = asyncio.run(returned(reported(1.5, 1)))
    assert here.result == reported(1.5, 1).to_json()


class Refusing(MemoryCoordinator):
    """Takes no write once `error` is set."""

    error: Exception | None = None

    async def txn(self, txn: Txn) -> TxnResult:
        if self.error is not None and txn.success:
            raise self.error
        return await super().txn(txn)


@pytest.mark.parametrize(("error", "why"), [(Unavailable("away"), "away"), (OutcomeUnknown("full"), "no answer")])
async def test_etcd_failure_loses_no_result(
    error: Exception, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("taskgraph.launch.collector._COLLECTED_S", 0.1)
    etcd = Refusing(MemoryStore())
    async with following(etcd, await finished_job(etcd)) as follower:
        etcd.error = error
        await follower.let_nodes_go([], reported(1.5, 1))
        assert follower.kept.result
    (record,) = caplog.records
    assert "collected is not known" in record.message and record.message.endswith(f": {why}")


# -- results that other commands collect ----------------------------------------------------------------------


async def test_collected_result_is_kept_on_this_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes_send(LARGE, monkeypatch)
    etcd = MemoryCoordinator(MemoryStore())
    spec = await finished_job(etcd, nodes=1)
    async with following(etcd, spec) as follower:
        collected = await follower.collect()
        assert collected is not None and collected.wall_s == 12.5, "by the clock of the nodes"
        assert not follower.only_on_nodes
    for _ in range(2):
        assert await shown(etcd, monkeypatch, "--json") == 0
        assert json.loads(capsys.readouterr().out)["values"] == {"0": LARGE.value}
    assert "1.0 MiB; `taskgraph result fit` has them on host" in (await in_etcd(etcd)).not_kept

    monkeypatch.setattr(launch_run, "opened", lambda *_: contextlib.nullcontext(etcd))
    assert (await asyncio.to_thread(tg.result, NAME, "a:1")).value == LARGE.value


@pytest.mark.parametrize("too_large", ["values", "reports"])
async def test_nodes_keep_too_large_results_until_written(
    too_large: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collect, "_HOST_BYTES", 1 << 20)
    result = LARGE if too_large == "values" else LARGE_REPORTS
    nodes_send(result, monkeypatch)
    etcd = MemoryCoordinator(MemoryStore())
    spec = await finished_job(etcd, nodes=1)
    async with following(etcd, spec) as follower:
        assert await shown(etcd, monkeypatch) == 0
        way = "less than 1.0 MiB{}), for 300 s (results_kept_s): `taskgraph result fit --json > FILE` takes them"
        assert way.format(" is kept" if too_large == "values" else "") in capsys.readouterr().err
        with monkeypatch.context() as full:
            full.setattr(looking, "print", broken_pipe, raising=False)
            with pytest.raises(BrokenPipeError):
                await shown(etcd, full, "--json")
        assert await etcd.get(KEYS.collected) is None
        assert await follower.collect() is not None
        waiting = asyncio.ensure_future(follower.wait_until_taken(asyncio.get_running_loop().create_future()))
        assert await shown(etcd, monkeypatch, "--json") == 0
        await waiting
    found = json.loads(capsys.readouterr().out)
    assert found["values"] == {"0": result.value} and len(found["reports"]) == len(result.reports)
    assert "; `taskgraph result --json` wrote them on" in (await in_etcd(etcd)).not_kept


def broken_pipe(*_: object, **__: object) -> None:
    raise BrokenPipeError


async def test_full_disk_lets_no_node_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Runtime, "keep_finished", full)
    nodes_send(LARGE, monkeypatch)
    etcd = MemoryCoordinator(MemoryStore())
    async with following(etcd, await finished_job(etcd, nodes=1)) as follower:
        assert await follower.collect() is not None
        assert "No space left on device" in follower.only_on_nodes
    assert await etcd.get(KEYS.collected) is None


async def test_result_leaves_nodes_to_their_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes_send(LARGE, monkeypatch)
    etcd = MemoryCoordinator(MemoryStore())
    async with following(etcd, await finished_job(etcd, nodes=1, expected_nodes=1)):
        assert await shown(etcd, monkeypatch, "--json") == 0
    assert json.loads(capsys.readouterr().out)["values"] == {"0": LARGE.value}
    assert await etcd.get(KEYS.collected) is None and Runtime().find_finished(NAME) is None


async def test_lost_values_say_how_to_compute_them(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd = MemoryCoordinator(MemoryStore())
    await finished_job(etcd)
    with pytest.raises(tg.UnknownJob, match=r"its last node left before anyone collected them$"):
        await shown(etcd, monkeypatch)
    checkpoint = CheckpointRecord(epoch=20, attempt=1, name="x").to_bytes()
    await etcd.txn(Txn(success=(Put(KEYS.checkpoint, checkpoint),)))
    way = "epoch 20 is complete: go on from there with --resume .*, or with new nodes .*`taskgraph launch fit`"
    with pytest.raises(tg.UnknownJob, match=way):
        await shown(etcd, monkeypatch)


@pytest.mark.parametrize("then", ["nodes died", "collected", "runs again"])
async def test_collecting_ends_without_a_result(then: str) -> None:
    etcd = MemoryCoordinator(MemoryStore())
    async with following(etcd, await finished_job(etcd)) as follower:
        here: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        collected = asyncio.ensure_future(follower.collect(here))
        await asyncio.sleep(0.01)
        assert not collected.done(), "a node that this process started may be about to register"
        if then == "nodes died":
            here.set_result(None)
            follower.keeper.notify_later()
        else:
            running = Put(KEYS.status, StatusRecord(state=JobStatus.RUNNING).to_bytes())
            await etcd.txn(Txn(success=(Put(KEYS.collected, b"{}") if then == "collected" else running,)))
        assert await collected is None
        lost = "its last node left before anyone collected them" if then == "nodes died" else ""
        assert follower.kept.not_kept == lost and follower.finished == (then != "runs again")


# -- records on this host -------------------------------------------------------------------------------------


def test_kept_result_has_its_reports() -> None:
    reports = (tg.EpochReport(0, {"loss": math.inf}, {1: {"loss": math.inf}}),)
    result = tg.JobResult(name=NAME, values={0: "\udcff"}, reports=reports, epochs=1)
    Runtime().keep_finished(NAME, KeptJob(run="r", status=ENDED, result=result.to_json()))
    assert tg.result(NAME) == result


def test_missing_parts_are_named(caplog: pytest.LogCaptureFixture) -> None:
    kept = KeptJob(status=ENDED, result=reported(1.5, 0).to_json(), not_kept="reports left out: all")
    Runtime().keep_finished(NAME, kept)
    assert tg.result(NAME).value == 1.5
    assert "of job 'fit': reports left out: all" in caplog.text
    for why, says in (("they take 90.0 MiB", r"they take 90\.0 MiB"), ("", "the process that collected them has them")):
        Runtime().keep_finished(NAME, KeptJob(status=ENDED, not_kept=why))
        with pytest.raises(tg.UnknownJob, match=f"are not kept: {says}"):
            tg.result(NAME)


def test_record_without_result_replaces_none() -> None:
    result = reported(1.5, 0).to_json()
    for kept in (KeptJob(run="r", status=ENDED, result=result), KeptJob(run="r", status=ENDED)):
        Runtime().keep_finished(NAME, kept)
        assert tg.result(NAME).value == 1.5
    Runtime().keep_finished(NAME, KeptJob(run="another", status=ENDED))
    with pytest.raises(tg.UnknownJob):
        tg.result(NAME)


def test_later_versions_record_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    event = json.dumps({"at": 1.0, "node": "n1", "kind": "began", "text": "it began", "later": 1})
    result = json.dumps({**json.loads(reported(1.5, 0).to_json()), "epochs": 9, "later": 1})
    kept = KeptJob(run="r", status=ENDED, result=result, event_lines=('{"at": 1.0}', "3", event))
    Runtime().keep_finished(NAME, kept)
    path = Runtime().root / "finished" / "fit.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}))
    assert tg.result(NAME).value == 1.5
    for command, says in (("status", '"state": "finished"'), ("events", '"it began"'), ("result", '"epochs": 9')):
        assert cli.main([command, NAME, "--json"]) == 0
        assert says in capsys.readouterr().out


@pytest.mark.parametrize("etcd", [None, "127.0.0.1:1"])
@pytest.mark.parametrize("name", [None, 3, b"fit"])
def test_result_needs_a_name(name: Any, etcd: str | None) -> None:
    with pytest.raises(tg.JobError, match=r"tg\.result takes the name of a job, not "):
        tg.result(name, etcd=etcd)
