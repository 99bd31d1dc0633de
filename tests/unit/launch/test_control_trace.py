"""Tracing over the control service: it is off before and after, whatever ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from traced_kit import LIMIT_S, TOKEN, Service, TracedNode

from taskgraph.errors import PeerGone, TaskGraphError
from taskgraph.node import control
from taskgraph.node.control import ControlServer
from taskgraph.node.tracing import traced
from taskgraph.observe._proto import control_pb2 as pb
from taskgraph.observe.control_client import ControlClient, TraceCall
from taskgraph.observe.events import EventLog
from taskgraph.observe.trace import Span, clock
from taskgraph.observe.trace_chunks import Unpacker
from taskgraph.protocol.messages import Stamp
from taskgraph.transport.endpoints import host_key


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    server = ControlServer(EventLog("n1"), TOKEN)
    try:
        yield Service(await server.start(unix_path=tmp_path / "c"), server)
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def tracing(service: Service) -> AsyncIterator[TraceCall]:
    """A call that has begun."""
    async with service.client() as client, client.trace() as call:
        first = await call.next()
        assert first is not None and first.epoch == service.node.epoch and not first.spans and not first.over
        assert service.node.tracing.on
        yield call


async def rest(call: TraceCall) -> tuple[list[Span], pb.TraceChunk]:
    """All spans that are still told, and the last chunk."""
    unpacker, spans, last = Unpacker(), [], None
    async with asyncio.timeout(LIMIT_S):
        while (chunk := await call.next()) is not None:
            spans += list(unpacker.unpack(chunk))
            last = chunk
            if chunk.over:
                break
    assert last is not None
    return spans, last


def add(service: Service, count: int) -> None:
    now, stamp = clock(), Stamp(1, service.node.epoch)
    for number in range(count):
        service.node.tracing.keep("put", "x", "", now, now, 3, stamp, 1, number)


async def test_until_an_epoch_was_read(service: Service) -> None:
    service.events.emit("commit", "before", epoch=6)
    async with tracing(service) as call:
        add(service, 3)
        service.events.emit("takeover", "task 3 was taken over", task=3, epoch=7)
        await call.until(9)
        service.node.move(8)
        add(service, 2)
        service.node.move(9)
        spans, last = await rest(call)
    assert [s[0] for s in spans] == ["put", "put", "put", "event", "put", "put"]
    assert [s[9] for s in spans if s[0] == "put"] == [0, 1, 2, 0, 1]
    assert (last.over, last.epoch, last.lost) == (True, 9, 0)
    await service.off()


async def test_the_first_request_says_which_epochs(service: Service) -> None:
    async with service.client() as client, client.trace(every=3) as call:
        assert await call.next() is not None
        assert [epoch for epoch in range(7) if service.node.tracing.takes(epoch)] == [0, 3, 6]
    await service.off()
    async with tracing(service):
        assert all(service.node.tracing.takes(epoch) for epoch in range(7))


async def test_nothing_begins_before_it_is_asked_for() -> None:
    node, ending = TracedNode(), asyncio.Event()
    asked: asyncio.Queue[pb.TraceRequest] = asyncio.Queue()

    async def requests() -> AsyncIterator[pb.TraceRequest]:
        while True:
            yield await asked.get()

    async def nothing() -> AsyncIterator[pb.TraceRequest]:
        for request in ():
            yield request

    assert [chunk async for chunk in traced(node, EventLog("n1"), nothing(), ending)] == []
    chunks = traced(node, EventLog("n1"), requests(), ending)
    first = asyncio.ensure_future(anext(chunks, None))
    await asyncio.sleep(0.01)
    assert not first.done() and not node.tracing.on
    asked.put_nowait(pb.TraceRequest())
    told = await asyncio.wait_for(first, LIMIT_S)
    assert told is not None and told.epoch == 7 and node.tracing.on and node.tracing.takes(5)
    await chunks.aclose()
    assert not node.tracing.on
    never = asyncio.ensure_future(anext(traced(node, EventLog("n1"), requests(), ending), None))
    await asyncio.sleep(0.01)
    ending.set()
    assert await asyncio.wait_for(never, LIMIT_S) is None and not node.tracing.on


async def test_an_epoch_that_was_read_before_ends_it_at_once(service: Service) -> None:
    async with tracing(service) as call:
        add(service, 1)
        await call.until(3)
        spans, last = await rest(call)
    assert len(spans) == 1 and last.over


async def test_enough_ends_it_also_while_an_epoch_is_waited_for(service: Service) -> None:
    async with tracing(service) as call:
        await call.until(100)
        add(service, 2)
        await call.enough()
        spans, last = await rest(call)
        assert len(spans) == 2 and last.over
        await call.enough()  # twice is once
        await call.until(200)  # too late, and harmless
    await service.off()


async def test_more_than_one_chunk_and_what_does_not_fit_is_counted(service: Service) -> None:
    async with tracing(service) as call:
        add(service, 6_000)  # at a stretch: nobody could fetch meanwhile
        await call.enough()
        spans, _ = await rest(call)
        assert len(spans) == 5_000
    async with tracing(service) as call:
        add(service, 6_000)
        await call.enough()
        lost = 0
        while (chunk := await call.next()) is not None and not chunk.over:
            lost += chunk.lost
        assert lost == 1_000


async def test_the_end_of_the_node_tells_the_last_spans(service: Service) -> None:
    async with tracing(service) as call:
        await call.until(100)
        add(service, 2)
        stopping = asyncio.ensure_future(service.server.stop())
        spans, last = await rest(call)
        assert len(spans) == 2 and last.over
    await stopping


TRACE = """
import asyncio, sys
from taskgraph.observe.control_client import ControlClient

async def main():
    async with ControlClient(sys.argv[1], bytes.fromhex(sys.argv[2])) as client, client.trace() as call:
        while (chunk := await call.next()) is not None and not chunk.over:
            print("on", flush=True)
    print("all" if chunk is not None else "not all", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("goes_on", [True, False])
async def test_the_end_of_the_node_waits_a_while_for_who_has_not_taken_the_last_spans(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """What a process that stood still for half a second had not read was lost: UNAVAILABLE, "Stream removed"."""
    monkeypatch.setattr(control, "_CLOSE_S", 0.05)
    monkeypatch.setattr(control, "_TAKEN_S", 30.0 if goes_on else 0.1)
    address = f"unix:{tmp_path / 'c'}"
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TRACE, address, TOKEN.hex(), stdout=asyncio.subprocess.PIPE
    )
    assert client.stdout is not None
    try:
        assert await client.stdout.readline() == b"on\n"
        add(service, 3)
        os.kill(client.pid, signal.SIGSTOP)
        stopping = asyncio.ensure_future(service.server.stop())
        await asyncio.wait([stopping], timeout=1.0 if goes_on else 20.0)
        assert stopping.done() != goes_on
        os.kill(client.pid, signal.SIGCONT)
        if goes_on:
            assert (await client.stdout.read()).split()[-1] == b"all"
        await asyncio.wait_for(stopping, LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            client.kill()
        await client.communicate()


async def test_whoever_goes_away_ends_it(service: Service) -> None:
    async with tracing(service):
        pass
    await service.off()
    async with tracing(service) as call:
        await call.enough()
        assert (await rest(call))[1].over


async def test_the_second_is_told_that_somebody_traces(service: Service) -> None:
    async with tracing(service) as call:
        async with service.client() as client:
            with pytest.raises(TaskGraphError, match="somebody else traces this node"):
                async with client.trace() as second:
                    await second.next()
        assert service.node.tracing.on, "the first goes on"
        add(service, 1)
        await call.enough()
        assert len((await rest(call))[0]) == 1


async def test_without_the_jobs_token_nothing_is_told(service: Service) -> None:
    async with service.client(bytes(32)) as client:
        with pytest.raises(TaskGraphError, match="token is missing or wrong"):
            await client.clock()
        with pytest.raises(TaskGraphError, match="token is missing or wrong"):
            async with client.trace() as call:
                await call.next()
    assert not service.node.tracing.on


async def test_the_clock_of_a_node_on_this_host_is_ours(service: Service) -> None:
    async with service.client() as client:
        readings = [await client.clock() for _ in range(8)]
    best = min(readings, key=lambda reading: reading.within_ns)
    assert abs(best.offset_ns) <= best.within_ns and best.host_key == host_key()


async def test_a_node_that_is_not_there_is_gone(tmp_path: Path) -> None:
    async with ControlClient(f"unix:{tmp_path / 'nobody'}", TOKEN) as client:
        with pytest.raises(PeerGone):
            await client.clock(0.5)
        with pytest.raises(PeerGone):
            async with client.trace() as call:
                await call.next()
