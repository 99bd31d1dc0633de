"""A job's result on its way from its nodes to who asked for it, and as it was kept."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import DecodeError
from taskgraph.graph.values import encode
from taskgraph.launch import collect
from taskgraph.launch.collect import damaged, kept_copy
from taskgraph.launch.collector import Collector
from taskgraph.launch.runtime import Runtime
from taskgraph.launch.submit import submit
from taskgraph.node.control import ControlServer
from taskgraph.observe.events import Event, EventLog, keep_events
from taskgraph.observe.status import NodeStatus, TaskResult
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.messages import Encoded
from taskgraph.protocol.records import NodeRecord, PrimaryRecord
from taskgraph.results import json_pieces

TOKEN = bytes(range(32))
GOOD = encode(np.arange(10_000.0))
BAD = Encoded(GOOD.meta, (memoryview(encode(np.arange(1.0, 10_001.0)).buffers[0]),), GOOD.digest)


class Holder:
    """A node that tells these results, one after another; the last one for ever."""

    events: EventLog

    def __init__(self, *values: Encoded) -> None:
        self.values = list(values)
        self.asked = 0

    def status(self) -> NodeStatus:
        raise AssertionError("nobody asks")

    def drain(self, why: str) -> None:
        raise AssertionError("nobody asks")

    async def results(self) -> list[TaskResult]:
        self.asked += 1
        return [TaskResult(0, 3, 1, self.values.pop(0) if len(self.values) > 1 else self.values[0], ())]


@contextlib.asynccontextmanager
async def following(
    holder: Holder, folder: Path, on_event: Callable[[Event], None] | None = None, *, tasks: int = 1
) -> AsyncIterator[Collector]:
    """A follower of a job whose first task's results `holder` tells, over a socket."""
    coordinator = MemoryCoordinator(MemoryStore())
    events = EventLog("n1")
    server = ControlServer(events, TOKEN)
    job = tg.Job(tasks=tasks, builder=lambda task_id: tg.Task(), epochs=3, name="fit")
    spec = JobSpec.local(job)
    try:
        control = await server.start(unix_path=folder / "c", tcp_host=None)
        server.attach(holder)
        await submit(coordinator, spec)
        node = NodeRecord(
            name="n1", run=spec.run, host="h", pid=os.getpid(), endpoints=(), control=control, fingerprint="", lease=0
        )
        keys, primary = Keys("fit"), PrimaryRecord(node="n1-1", term=1, stateful=True)
        puts = (Put(keys.node("n1-1"), node.to_bytes()), Put(keys.primary(0), primary.to_bytes()))
        await coordinator.txn(Txn(success=puts))
        follower = Collector(coordinator, spec, TOKEN)
        if on_event is None:
            await follower.keeper.load()
        else:
            await follower.start(on_event)
        keeping = asyncio.ensure_future(
            keep_events(events, coordinator, "fit", spec_revision=follower.view.spec_revision, node_id="n1-1", kept=100)
        )
        holder.events = events
        yield follower
        await follower.stop()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    finally:
        await server.stop()
        await coordinator.close()


async def test_damaged_result_is_asked_for_again(tmp_path: Path) -> None:
    holder = Holder(BAD, GOOD)
    async with following(holder, tmp_path) as follower:
        found = await follower.results()
    assert holder.asked == 2 and damaged(found) == []
    assert np.array_equal(follower.assemble(found, 0.0).values[0], np.arange(10_000.0))


async def test_lastingly_damaged_result_is_an_error(tmp_path: Path) -> None:
    holder = Holder(BAD)
    async with following(holder, tmp_path) as follower:
        with pytest.raises(DecodeError, match="result of task 0 arrived damaged from node n1, 3 times"):
            await follower.results()
    assert holder.asked == 3


@pytest.mark.parametrize("followed", [True, False])
async def test_unreachable_results_are_reported_once(
    followed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their sockets went with the login, or a firewall keeps the launcher from them. On a terminal it was told twice:
    as an event, and by the log."""
    monkeypatch.setattr("taskgraph.launch.collector._UNCOLLECTED_S", 0.2)
    told: list[str] = []
    async with following(Holder(GOOD), tmp_path) as follower:
        if followed:
            follower._on_event = lambda event: told.append(event.text)
        (tmp_path / "c").unlink()
        collecting = asyncio.ensure_future(follower.results())
        await asyncio.sleep(1.0)
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
    logged = [record.message for record in caplog.records if "cannot be collected" in record.message]
    (text,) = told + logged
    assert bool(told) == followed
    assert text.startswith("the job has finished, and its results cannot be collected: no node listens at unix:")


async def test_slow_results_are_waited_for_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a minute it was told that they cannot be collected."""
    monkeypatch.setattr("taskgraph.launch.collector._UNCOLLECTED_S", 0.0)
    monkeypatch.setattr("taskgraph.launch.collector._SILENT_S", 0.05)
    monkeypatch.setattr("taskgraph.launch.collector._RETRY_S", 0.01)

    class Computing(Holder):
        async def results(self) -> list[TaskResult]:
            found = await super().results()
            if self.asked < 3:
                await asyncio.Event().wait()
            return found

    async with following(holder := Computing(GOOD), tmp_path) as follower:
        assert damaged(await follower.results()) == []
        assert holder.asked == 3 and follower.unreachable is None
    assert "cannot be collected" not in caplog.text


async def test_results_of_another_protocol_are_refused(tmp_path: Path) -> None:
    holder = Holder(BAD)
    async with following(holder, tmp_path) as follower:
        follower._spec = dataclasses.replace(follower._spec, protocol=1)
        with pytest.raises(tg.FingerprintMismatch, match="nodes speak protocol 1"):
            await follower.results()
    assert holder.asked == 0


async def test_fast_job_shows_each_event_once(tmp_path: Path) -> None:
    """From the leader or from etcd, whichever comes first; a quick job ends before its events are written."""
    told: list[str] = []
    holder = Holder(GOOD)
    async with following(holder, tmp_path, lambda event: told.append(event.text)) as follower:
        holder.events.emit("began", "the job began")
        holder.events.emit("commit", "epoch 0", epoch=0, transient=True)
        holder.events.emit("admitted", "of no interest", transient=True)
        async with asyncio.timeout(30):
            while len(told) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert told == ["the job began", "epoch 0"], "from the leader, in its order"
        await asyncio.sleep(0.2)  # etcd told it, too
        await follower.stop()  # nothing comes by itself any more
        holder.events.emit("finished", "the job finished")
        await follower.results()
    assert told == ["the job began", "epoch 0", "the job finished"]


def test_kept_result_has_its_reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path / "run"))
    reports = (tg.EpochReport(0, {"loss": math.inf}, {1: {"loss": math.inf}}),)
    left = tg.JobResult(name="fit", values={0: 1.5}, reports=reports, epochs=1)
    Runtime().keep_finished("fit", {"run": "r", "status": {"state": "finished"}, "result": json.loads(left.to_json())})
    assert tg.result("fit") == left


def test_result_without_reports_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path / "run"))
    raw = json.loads(tg.JobResult(name="fit", values={0: 1.5}, epochs=9).to_json())
    kept = {"run": "r", "status": {"state": "finished"}, "result": {**raw, "left_out": "reports left out: all"}}
    Runtime().keep_finished("fit", kept)
    assert tg.result("fit").value == 1.5
    assert "of job 'fit': reports left out: all" in caplog.text
    Runtime().keep_finished("fit", {**kept, "result": None, "not_kept": "they take 90.0 MiB"})
    with pytest.raises(tg.UnknownJob, match=r"are not kept: they take 90\.0 MiB"):
        tg.result("fit")
    Runtime().keep_finished("fit", {**kept, "result": None})
    with pytest.raises(tg.UnknownJob, match="are not kept: the process that collected them has them, if one did"):
        tg.result("fit")


@pytest.mark.parametrize("etcd", [None, "127.0.0.1:1"])
@pytest.mark.parametrize("name", [None, 3, b"fit"])
def test_result_needs_a_name(name: Any, etcd: str | None) -> None:
    with pytest.raises(tg.JobError, match=r"tg\.result takes the name of a job, not "):
        tg.result(name, etcd=etcd)


class Untold:
    tolist = None  # looks like an array, and is none


def test_result_that_cannot_be_kept_says_why() -> None:
    copy = kept_copy(tg.JobResult(name="fit", values={0: Untold()}), 8)
    assert copy.here is None and copy.in_etcd is None
    assert copy.not_here == copy.not_in_etcd
    assert copy.not_here.startswith("they cannot be written as JSON (AttributeError: ")


class ManyInside: ...


tg.codec(ManyInside, lambda _: [np.ones(1 << 21)], lambda _: ManyInside())


@pytest.mark.parametrize("in_etcd", [True, False])
def test_too_many_reports_are_left_out(monkeypatch: pytest.MonkeyPatch, in_etcd: bool) -> None:
    written = []

    def counted(result: tg.JobResult) -> Iterator[str]:
        for piece in json_pieces(result):
            written.append(len(piece))
            yield piece

    monkeypatch.setattr(collect, "json_pieces", counted)
    monkeypatch.setattr(collect, "_KEPT_BYTES", 100_000)
    monkeypatch.setattr(collect, "_SUMMARY_BYTES", 50_000 if in_etcd else 10)
    reports = tuple(tg.EpochReport(epoch, {"loss": 0.5}, {0: {"loss": 0.5}}) for epoch in range(20_000))
    copy = kept_copy(tg.JobResult(name="fit", values={0: 1.5}, reports=reports, epochs=20_000), 8)
    assert sum(written[:-1]) <= 100_000
    assert copy.here is not None and copy.not_here == ""
    kept = json.loads(copy.here)
    assert kept["left_out"] == "reports left out: they are more than 0.1 MiB, and no more is kept"
    assert tg.JobResult.from_json(copy.here) == tg.JobResult(name="fit", values={0: 1.5}, epochs=20_000)
    assert copy.in_etcd == (copy.here if in_etcd else None)
    assert bool(copy.not_in_etcd) is not in_etcd


async def test_event_loop_runs_while_a_result_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticked = threading.Event()

    def json_pieces(result: tg.JobResult) -> Iterator[str]:
        assert ticked.wait(30), "the loop stands still"
        yield "{}"

    monkeypatch.setattr(collect, "json_pieces", json_pieces)
    async with following(Holder(GOOD), tmp_path) as follower:
        asyncio.get_running_loop().call_soon(ticked.set)
        await follower.let_go([], tg.JobResult(name="fit"))
    assert follower.kept_json == "{}"
