"""A trace of nodes that join, freeze and leave, and of jobs that end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from traced_kit import LIMIT_S, TOKEN, Service

from taskgraph.commands import tracing as command
from taskgraph.commands.tracing import missing_parts
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.errors import JobError
from taskgraph.launch import tracing
from taskgraph.launch.tracing import NodeTrace, Tracer, trace_interval
from taskgraph.node.control import ControlServer
from taskgraph.observe.control_client import TraceCall
from taskgraph.observe.events import EventLog
from taskgraph.observe.trace import clock
from taskgraph.protocol.kv import Op, Put, Txn
from taskgraph.protocol.messages import Stamp
from taskgraph.protocol.records import EpochRecord, JobStatus, NodeRecord, StatusRecord


class Job:
    """A job at epoch 7 whose nodes only keep the spans that the test gives them."""

    def __init__(self, services: dict[str, Service]) -> None:
        self.services = services
        self.coordinator = MemoryCoordinator(MemoryStore())
        self.keeper = ViewKeeper(self.coordinator, "fit", refresh_s=1.0)
        self.said: list[str] = []
        self.watching: asyncio.Future[None]

    async def write(self, *ops: Op) -> None:
        await self.keeper.wait_for_revision((await self.coordinator.txn(Txn(success=ops))).revision)

    async def register(self, *names: str) -> None:
        records = {
            name: NodeRecord(
                name=name,
                run="r",
                host="h",
                pid=1,
                endpoints=(),
                control=self.services[name].control,
                fingerprint="",
                lease=1,
            )
            for name in names
        }
        await self.write(*(Put(self.keeper.view.keys.node(name), r.to_bytes()) for name, r in records.items()))

    async def end(self, state: JobStatus, name: str) -> None:
        """Ends the job; the node knows that before our view does."""
        self.watching.cancel()
        record = StatusRecord(state=state).to_bytes()
        await self.coordinator.txn(Txn(success=(Put(self.keeper.view.keys.status, record),)))
        await self.services[name].server.stop()

    def tracer(self, *, epochs: int = 5, every: int = 1, total: int | None = None) -> Tracer:
        return Tracer(self.keeper, "r", TOKEN, None, epochs=epochs, every=every, total=total, say=self.said.append)

    @contextlib.asynccontextmanager
    async def traced(self, tracer: Tracer) -> AsyncIterator[None]:
        """Traces: the epochs are chosen when the block begins, and the trace is over after it."""
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            running = group.create_task(tracer.run())
            while not self.said and not running.done():  # noqa: ASYNC110 (no event tells)
                await asyncio.sleep(0.01)
            yield

    def keep(self, name: str, what: str) -> None:
        """Adds a span to a node."""
        node, now = self.services[name].node, clock()
        node.tracing.keep("put", what, "", now, now, 3, Stamp(1, node.epoch), 1, 0)

    def move(self, epoch: int, *names: str) -> None:
        for name in names or self.services:
            self.services[name].node.move(epoch)


Started = Callable[..., "contextlib.AbstractAsyncContextManager[Job]"]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    monkeypatch.setattr(tracing, "_LEFT_S", LIMIT_S)

    @contextlib.asynccontextmanager
    async def start(*names: str, registered: int = 9) -> AsyncIterator[Job]:
        servers = {name: ControlServer(EventLog(name), TOKEN) for name in names}
        job = Job({n: Service(await s.start(unix_path=tmp_path / n), s) for n, s in servers.items()})
        watching = job.watching = asyncio.ensure_future(job.keeper.run())
        keys = job.keeper.view.keys
        try:
            await job.write(
                Put(keys.status, StatusRecord(state=JobStatus.RUNNING).to_bytes()),
                Put(keys.epoch, EpochRecord(epoch=7, attempt=1).to_bytes()),
            )
            await job.register(*names[:registered])
            yield job
        finally:
            watching.cancel()
            for server in servers.values():
                await server.stop()
            await asyncio.gather(watching, return_exceptions=True)

    return start


def names_of(trace: NodeTrace) -> list[str]:
    return [span[1] for span in trace.spans()]


async def test_spans_of_all_nodes_until_the_last_epoch(started: Started) -> None:
    async with started("n1", "n2") as job:
        async with job.traced(tracer := job.tracer()):
            job.keep("n1", "x")
            job.keep("n2", "y")
            job.move(13)
        assert job.said == ["tracing epochs 8 to 12 on 2 nodes"]
        assert {n: (names_of(t), t.missing) for n, t in tracer.nodes.items()} == {"n1": (["x"], ""), "n2": (["y"], "")}


@pytest.mark.parametrize("early", [True, False])
async def test_frozen_node_is_given_up_after_the_others(
    started: Started, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    async def unheard(self: TraceCall) -> None:
        pass

    monkeypatch.setattr(tracing, "_LEFT_S", 0.3)
    async with started("n1", "n2") as job:
        async with job.traced(tracer := job.tracer()):
            await asyncio.sleep(0)
            if early:  # no node hears of it
                monkeypatch.setattr(TraceCall, "finish", unheard)
                tracer.end_early()
            else:
                job.move(13, "n1")
        lacks = "what it did from epoch 7 on: it does not answer"
        assert [t.missing for t in tracer.nodes.values()] == [lacks if early else "", lacks]


async def test_node_that_joins_is_traced_from_then_on(started: Started) -> None:
    async with started("n1", "n2", registered=1) as job:
        async with job.traced(tracer := job.tracer()):
            await job.register("n2")
            await job.services["n2"].on()
            job.keep("n2", "after")
            job.move(13)
        assert tracer.nodes["n2"].missing == "it joined at epoch 7: what it did before"
        assert names_of(tracer.nodes["n2"]) == ["after"]


async def test_node_that_leaves_is_named(started: Started) -> None:
    async with started("n1", "n2") as job:
        async with job.traced(tracer := job.tracer()):
            await job.services["n2"].server.stop()
            job.move(13, "n1")
        assert tracer.nodes["n1"].missing == ""
        assert tracer.nodes["n2"].missing == "it left at epoch 7: what others did for it since"


@pytest.mark.parametrize("state", [JobStatus.FAILED, JobStatus.FINISHED])
async def test_node_that_ends_with_the_job_has_not_left_it(started: Started, state: JobStatus) -> None:
    async with started("n1") as job:
        async with job.traced(tracer := job.tracer(epochs=50)):
            job.keep("n1", "all")
            await job.end(state, "n1")
        assert (tracer.nodes["n1"].missing, names_of(tracer.nodes["n1"])) == ("", ["all"])


@pytest.mark.parametrize(("every", "said"), [(1, "epochs 8 to 9"), (3, "epochs 9 to 9, one of 3")])
async def test_trace_ends_with_the_jobs_last_epoch(started: Started, every: int, said: str) -> None:
    async with started("n1") as job:
        async with job.traced(job.tracer(every=every, total=10)):
            job.move(10)
        assert job.said == [f"tracing {said} on 1 nodes"]


@pytest.mark.parametrize(
    ("total", "every", "why"), [(8, 1, "has begun already on some node"), (9, 3, "that 3 divides has")]
)
async def test_job_in_its_last_epoch_is_refused(started: Started, total: int, every: int, why: str) -> None:
    async with started("n1") as job:
        with pytest.raises(JobError, match=f"no epoch is left to be traced: every one of the job's {total} {why}"):
            await asyncio.wait_for(job.tracer(every=every, total=total).run(), LIMIT_S)


@pytest.mark.parametrize(
    ("number", "raised"), [(errno.ENOSPC, OSError), (errno.EPIPE, BrokenPipeError), (errno.ENXIO, JobError)]
)
async def test_file_that_cannot_be_written(
    started: Started, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, raised: type[Exception]
) -> None:
    def unwritable(path: Path) -> contextlib.AbstractContextManager[object]:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(command, "chosen_file", unwritable)
    async with started("n1") as job:
        async with job.traced(tracer := job.tracer()):
            job.move(13)
        reached: Any = SimpleNamespace(name="fit")
        with pytest.raises(raised) as failed:
            command._write(tmp_path / "t.json", reached, tracer, 0)
        assert type(failed.value) is raised


@pytest.mark.parametrize(
    ("seen", "early", "lines"),
    [
        (12, False, []),
        (-1, True, ["epochs 8 to 12: they did not commit while the job was traced"]),
        (
            9,
            False,
            [
                "epochs 10 to 10: the node that committed them was not traced, or died",
                "epochs 11 to 12: they did not commit while the job was traced",
            ],
        ),
    ],
)
def test_missing_epochs_are_named(seen: int, early: bool, lines: list[str]) -> None:
    tracer = Job({}).tracer()
    node = NodeTrace(NodeRecord(name="n1", run="r", host="h", pid=1, endpoints=(), control="", fingerprint="", lease=1))
    node.epoch = 11
    tracer.nodes["n1"], tracer.first, tracer.until, tracer.ended_early = node, 8, 13, early
    assert missing_parts(tracer, seen) == lines


@pytest.mark.parametrize(
    ("epochs", "rate", "replicas", "hosts", "every"),
    [
        (1_000, 1_000.0, 7, 1, 1),  # over within a second
        (1_001, 1_000.0, 7, 1, 7),
        (10_000, 1_000.0, 14, 7, 2),  # each host has its own cores
        (10_000, 95.0, 127, 1, 13),  # the work of a host counts, not how fast an epoch is
        (20, 0.0, 0, 0, 1),
    ],
)
def test_long_trace_of_a_fast_job_takes_few_epochs(
    epochs: int, rate: float, replicas: int, hosts: int, every: int
) -> None:
    assert trace_interval(epochs, rate, replicas, hosts) == every
