"""A job's results on their way from its nodes to a launcher."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import DecodeError
from taskgraph.graph.values import encode
from taskgraph.launch.collect import damaged_tasks, is_complete
from taskgraph.launch.collector import Collector
from taskgraph.launch.submit import submit
from taskgraph.node.control import ControlServer
from taskgraph.observe.events import Event, EventLog, keep_events
from taskgraph.observe.status import NodeStatus, TaskResult
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.messages import Encoded
from taskgraph.protocol.records import NodeRecord, PrimaryRecord

TOKEN = bytes(range(32))
GOOD = encode(np.arange(10_000.0))
BAD = Encoded(GOOD.meta, (memoryview(encode(np.arange(1.0, 10_001.0)).buffers[0]),), GOOD.digest)


class Holder:
    """A node that answers with these values, one after another, the last one again and again."""

    events: EventLog

    def __init__(self, *values: Encoded) -> None:
        self.values = list(values)
        self.asked = 0

    def status(self) -> NodeStatus:
        raise AssertionError("not called")

    def drain(self, why: str) -> None:
        raise AssertionError("not called")

    async def results(self) -> list[TaskResult]:
        self.asked += 1
        return [TaskResult(0, 3, 1, self.values.pop(0) if len(self.values) > 1 else self.values[0], ())]


@contextlib.asynccontextmanager
async def following(
    holder: Holder, folder: Path, on_event: Callable[[Event], None] | None = None, *, tasks: int = 1
) -> AsyncIterator[Collector]:
    """A follower of a job with one node, `holder`, over a socket."""
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
    assert holder.asked == 2 and damaged_tasks(found) == []
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
    """As an event or in the log, not both."""
    monkeypatch.setattr("taskgraph.launch.collector._UNCOLLECTED_S", 0.2)
    said: list[str] = []
    async with following(Holder(GOOD), tmp_path) as follower:
        if followed:
            follower._on_event = lambda event: said.append(event.text)
        (tmp_path / "c").unlink()
        collecting = asyncio.ensure_future(follower.results())
        async with asyncio.timeout(30):
            while not said and "cannot be collected" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # it is not said once more
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
    logged = [record.message for record in caplog.records if "cannot be collected" in record.message]
    (text,) = said + logged
    assert bool(said) == followed
    assert text.startswith("the job has finished, and its results cannot be collected: no node listens at unix:")


async def test_slow_results_are_waited_for_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
        assert damaged_tasks(await follower.results()) == []
        assert holder.asked >= 3 and follower.unreachable is None
    assert "cannot be collected" not in caplog.text


async def test_results_of_another_protocol_are_refused(tmp_path: Path) -> None:
    holder = Holder(BAD)
    async with following(holder, tmp_path) as follower:
        follower._spec = dataclasses.replace(follower._spec, protocol=1)
        with pytest.raises(tg.FingerprintMismatch, match="nodes speak protocol 1"):
            await follower.results()
    assert holder.asked == 0


async def test_fast_job_shows_each_event_once(tmp_path: Path) -> None:
    """Events come from the leader or from etcd, and a short job ends before they are in etcd."""
    said: list[str] = []
    holder = Holder(GOOD)
    async with following(holder, tmp_path, lambda event: said.append(event.text)) as follower:
        holder.events.emit("began", "the job began")
        holder.events.emit("commit", "epoch 0", epoch=0, transient=True)
        holder.events.emit("admitted", "of no interest", transient=True)
        async with asyncio.timeout(30):
            while len(said) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert said == ["the job began", "epoch 0"], "from the leader, in its order"
        await asyncio.sleep(0.2)  # etcd said it, too
        await follower.stop()  # nothing comes by itself any more
        holder.events.emit("finished", "the job finished")
        await follower.results()
    assert said == ["the job began", "epoch 0", "the job finished"]


def test_results_of_two_attempts_are_no_whole() -> None:
    first, second = (TaskResult(task, 3, 1, GOOD, ()) for task in range(2))
    assert is_complete([second, first], 2)
    assert not is_complete([first], 2)
    assert not is_complete([first, dataclasses.replace(second, attempt=2)], 2)
    assert not is_complete([first, dataclasses.replace(second, epoch=4)], 2)
