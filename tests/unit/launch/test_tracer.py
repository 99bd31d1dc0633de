"""A trace of nodes that go away and come back, and of jobs that end."""

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
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.errors import JobError, PeerGone
from taskgraph.launch import tracing
from taskgraph.launch.tracing import NodeTrace, Tracer
from taskgraph.node.control import ControlServer
from taskgraph.observe.clocks import ClockReading
from taskgraph.observe.control_client import ControlClient, TraceCall
from taskgraph.observe.events import EventLog
from taskgraph.observe.trace import clock
from taskgraph.protocol.kv import Delete, Op, Put, Txn
from taskgraph.protocol.messages import Stamp
from taskgraph.protocol.records import EpochRecord, NodeRecord, State, StatusRecord


class Job:
    """A job at epoch 7 with nodes of these names, which do nothing but tell what they are made to keep."""

    def __init__(self, folder: Path, services: dict[str, Service]) -> None:
        self.services, self.folder = services, folder
        self.coordinator = MemoryCoordinator(MemoryStore())
        self.keeper = ViewKeeper(self.coordinator, "fit", refresh_s=1.0)
        self.said: list[str] = []
        self.watching: asyncio.Future[None]

    async def write(self, *ops: Op) -> None:
        await self.keeper.caught_up((await self.coordinator.txn(Txn(success=ops))).revision)

    async def register(self, *names: str) -> None:
        records = {
            name: NodeRecord(
                name=name, run="r", host="h", pid=1, endpoints=(), control=self.services[name].control, fingerprint="",
                lease=1,
            )
            for name in names
        }  # fmt: skip
        await self.write(*(Put(self.keeper.view.keys.node(name), r.to_bytes()) for name, r in records.items()))

    async def lose(self, *names: str) -> None:
        await self.write(*(Delete(self.keeper.view.keys.node(name)) for name in names))

    def tracer(self, *, epochs: int = 5, every: int = 1, total: int | None = None) -> Tracer:
        return Tracer(
            self.keeper, "r", TOKEN, None, self.folder, epochs=epochs, every=every, total=total, say=self.said.append
        )

    @contextlib.asynccontextmanager
    async def traced(self, tracer: Tracer) -> AsyncIterator[None]:
        """Within, the epochs to be traced are chosen; after it, all is told."""
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            running = group.create_task(tracer.run())
            while not self.said and not running.done():  # noqa: ASYNC110 (no event tells)
                await asyncio.sleep(0.01)
            yield

    def keep(self, name: str, what: str) -> None:
        """A span of that node."""
        node, now = self.services[name].node, clock()
        node.tracing.keep("put", what, "", now, now, 3, Stamp(1, node.epoch), 1, 0)

    def move(self, epoch: int) -> None:
        for service in self.services.values():
            service.node.move(epoch)


Started = Callable[..., "contextlib.AbstractAsyncContextManager[Job]"]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    monkeypatch.setattr(tracing, "_LEFT_S", 0.0)

    @contextlib.asynccontextmanager
    async def start(*names: str) -> AsyncIterator[Job]:
        servers = {name: ControlServer(EventLog(name), TOKEN) for name in names}
        job = Job(tmp_path, {n: Service(await s.start(unix_path=tmp_path / n), s) for n, s in servers.items()})
        watching = job.watching = asyncio.ensure_future(job.keeper.run())
        keys = job.keeper.view.keys
        try:
            await job.write(
                Put(keys.status, StatusRecord(state=State.RUNNING).to_bytes()),
                Put(keys.epoch, EpochRecord(epoch=7, attempt=1).to_bytes()),
            )
            await job.register(*names)
            yield job
        finally:
            watching.cancel()
            for server in servers.values():
                await server.stop()
            await asyncio.gather(watching, return_exceptions=True)

    return start


def told(trace: NodeTrace) -> list[str]:
    return [span[1] for span in trace.spans()]


async def test_where_all_nodes_lose_their_leases_all_of_them_may_come_back(started: Started) -> None:
    """An etcd that stood still for longer than a lease ended the trace, though every node went on."""
    async with started("n1", "n2") as job:
        async with job.traced(tracer := job.tracer()):
            await job.lose("n1", "n2")
            await asyncio.sleep(0.05)
            await job.register("n1", "n2")
            job.keep("n1", "late")
            job.move(13)
        assert [trace.missing for trace in tracer.nodes.values()] == ["", ""]
        assert told(tracer.nodes["n1"]) == ["late"]


async def test_nodes_that_do_not_come_back_are_waited_for_no_longer_than_somebody_wants_to(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unheard(self: TraceCall) -> None:
        pass

    monkeypatch.setattr(TraceCall, "enough", unheard)  # it is frozen
    async with started("n1") as job:
        async with job.traced(tracer := job.tracer()):
            await job.lose("n1")
            await asyncio.sleep(0.05)
            tracer.enough()
        assert tracer.nodes["n1"].missing == "what it did from epoch 7 on: the lease of node n1 ended"


async def test_a_node_that_is_given_up_is_traced_again_when_it_comes_back(started: Started) -> None:
    """A node that was frozen for longer than its lease was never looked at again."""
    async with started("n1", "n2") as job:
        async with job.traced(tracer := job.tracer()):
            job.keep("n2", "before")
            await asyncio.sleep(0.0)
            await job.lose("n2")
            await job.services["n2"].off()
            job.move(9)
            await job.register("n2")
            await job.services["n2"].on()
            job.keep("n2", "after")
            job.move(13)
        assert tracer.nodes["n1"].missing == ""
        assert tracer.nodes["n2"].missing == (
            "what it did from epoch 7 on: the lease of node n2 ended; it came back at epoch 9"
        )
        assert told(tracer.nodes["n2"])[-1] == "after"


async def test_a_node_that_ends_with_the_job_has_not_left_it(started: Started) -> None:
    """The node whose task failed was said to have left: it ends before anybody else hears of that."""
    async with started("n1") as job:
        async with job.traced(tracer := job.tracer()):
            job.watching.cancel()
            failed = StatusRecord(state=State.FAILED).to_bytes()
            await job.coordinator.txn(Txn(success=(Put(job.keeper.view.keys.status, failed),)))
            await job.services["n1"].server.stop()
        assert tracer.nodes["n1"].missing == ""


async def test_a_node_that_told_all_may_be_gone_when_its_clock_is_to_be_read_again(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a job each was said to be missing from the last epoch on."""
    read, readings = ControlClient.clock, 0

    async def clock_of(self: ControlClient, timeout_s: float = 2.0) -> ClockReading:
        nonlocal readings
        readings += 1
        if readings > tracing._READINGS:
            raise PeerGone("no node listens")
        return await read(self, timeout_s)

    monkeypatch.setattr(ControlClient, "clock", clock_of)
    async with started("n1") as job:
        async with job.traced(tracer := job.tracer(epochs=50)):
            job.keep("n1", "all")
            await job.write(Put(job.keeper.view.keys.status, StatusRecord(state=State.FINISHED).to_bytes()))
            await job.services["n1"].server.stop()
        trace = tracer.nodes["n1"]
        assert (trace.missing, told(trace), len(trace.readings)) == ("", ["all"], 1)


@pytest.mark.parametrize(("epochs", "every", "said"), [(5, 1, "epochs 8 to 9"), (5, 3, "epochs 9 to 9, one of 3")])
async def test_no_epoch_beyond_the_jobs_last_is_waited_for(
    started: Started, epochs: int, every: int, said: str
) -> None:
    async with started("n1") as job:
        async with job.traced(tracer := job.tracer(epochs=epochs, every=every, total=10)):
            job.move(10)
        assert job.said == [f"tracing {said} on 1 nodes"] and tracer.nodes["n1"].missing == ""


@pytest.mark.parametrize(
    ("total", "every", "why"), [(8, 1, "has begun already on some node"), (9, 3, "that 3 divides has")]
)
async def test_where_no_epoch_is_left_that_is_said(started: Started, total: int, every: int, why: str) -> None:
    """It waited for epochs that cannot exist."""
    async with started("n1") as job:
        with pytest.raises(ExceptionGroup) as refused:
            async with asyncio.timeout(LIMIT_S):
                await job.tracer(every=every, total=total).run()
        (error,) = refused.value.exceptions
        assert isinstance(error, JobError)
        assert f"no epoch is left to be traced: every one of the job's {total} {why}" in str(error)


@pytest.mark.parametrize(
    ("number", "raised"), [(errno.ENOSPC, OSError), (errno.EPIPE, BrokenPipeError), (errno.ENXIO, JobError)]
)
async def test_a_file_that_cannot_be_written_is_the_commands_mistake_or_the_hosts(
    started: Started, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, raised: type[Exception]
) -> None:
    """A full disk, and a reader that has enough, ended it as if the command was wrong."""

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
        (9, True, ["epochs 10 to 12: they did not commit while the job was traced"]),
        (
            9,
            False,
            [
                "epochs 10 to 10: who told their commits was not traced, or is gone",
                "epochs 11 to 12: they did not commit while the job was traced",
            ],
        ),
    ],
)
async def test_which_epochs_are_missing(started: Started, seen: int, early: bool, lines: list[str]) -> None:
    """Epochs whose leader was not traced were said not to have committed; without any, those before the first, too."""
    async with started("n1") as job:
        async with job.traced(tracer := job.tracer()):
            job.move(11)
            job.keep("n1", "something")
            await asyncio.sleep(0.0)
            if early:
                tracer.enough()
            else:
                await job.write(Put(job.keeper.view.keys.status, StatusRecord(state=State.FAILED).to_bytes()))
                await job.services["n1"].server.stop()
        assert command._missing(tracer, seen) == lines
