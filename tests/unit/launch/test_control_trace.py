"""Tracing over the control service: off before and after, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from traced_kit import LIMIT_S, TOKEN, Service

from taskgraph.errors import TaskGraphError
from taskgraph.node import control
from taskgraph.node.control import ControlServer
from taskgraph.observe._proto import control_pb2 as pb
from taskgraph.observe.control_client import TraceCall
from taskgraph.observe.events import EventLog
from taskgraph.observe.trace import Span, clock
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
async def tracing(service: Service, every: int = 1) -> AsyncIterator[TraceCall]:
    """A trace that has begun."""
    async with service.client() as client, client.trace(every) as call:
        first = await call.next()
        assert first is not None and first.epoch == service.node.epoch and not first.spans and not first.over
        assert service.node.tracing.on
        yield call


async def rest(call: TraceCall) -> tuple[list[Span], pb.TraceChunk, int]:
    """Returns the spans to come, the last chunk, and the number of lost spans."""
    spans: list[Span] = []
    lost = 0
    async with asyncio.timeout(LIMIT_S):
        while (chunk := await call.next()) is not None:
            spans += msgspec.json.decode(chunk.spans, type=list[Span])
            lost += chunk.lost
            if chunk.over:
                return spans, chunk, lost
    raise AssertionError("no last chunk")


def add(service: Service, count: int) -> None:
    now, stamp = clock(), Stamp(1, service.node.epoch)
    for number in range(count):
        service.node.tracing.keep("put", "x", "", now, now, 3, stamp, 1, number)


async def test_spans_and_events_until_the_tool_has_enough(service: Service) -> None:
    service.events.emit("commit", "before", epoch=6)
    async with tracing(service) as call:
        add(service, 3)
        service.events.emit("takeover", "task 3 was taken over", task=3, epoch=7)
        service.node.move(9)
        add(service, 2)
        await call.finish()
        spans, last, lost = await rest(call)
        await call.finish()  # twice is once
    assert [s[0] for s in spans] == ["put", "put", "put", "event", "put", "put"]
    assert [s[9] for s in spans if s[0] == "put"] == [0, 1, 2, 0, 1]
    assert (last.epoch, lost) == (9, 0)
    await service.off()


async def test_chosen_epochs_are_traced(service: Service) -> None:
    async with tracing(service, every=3):
        assert [epoch for epoch in range(7) if service.node.tracing.is_traced(epoch)] == [0, 3, 6]
    await service.off()
    async with tracing(service):
        assert all(service.node.tracing.is_traced(epoch) for epoch in range(7))


async def test_spans_that_do_not_fit_are_counted(service: Service) -> None:
    async with tracing(service) as call:
        add(service, 6_000)  # at a stretch: nothing is sent meanwhile
        await call.finish()
        spans, _, lost = await rest(call)
    assert (len(spans), lost) == (5_000, 1_000)


async def test_end_of_the_node_sends_the_last_spans(service: Service) -> None:
    async with tracing(service) as call:
        add(service, 2)
        stopping = asyncio.ensure_future(service.server.stop())
        spans, last, _ = await rest(call)
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
async def test_ending_node_waits_a_while_for_a_frozen_tool(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """Unread chunks would be lost with the connection."""
    monkeypatch.setattr(control, "_CLOSE_S", 0.05)
    monkeypatch.setattr(control, "_READ_S", 30.0 if goes_on else 0.1)
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


async def test_tool_that_goes_away_ends_the_trace(service: Service) -> None:
    async with tracing(service):
        pass
    await service.off()
    async with tracing(service) as call:
        await call.finish()
        assert (await rest(call))[1].over


async def test_second_tool_is_refused(service: Service) -> None:
    async with tracing(service) as call:
        async with service.client() as client:
            with pytest.raises(TaskGraphError, match="somebody else traces this node"):
                async with client.trace() as second:
                    await second.next()
        add(service, 1)
        await call.finish()
        assert len((await rest(call))[0]) == 1, "the first goes on"


async def test_clock_of_a_node_on_this_host_is_ours(service: Service) -> None:
    async with service.client() as client:
        best = min([await client.clock() for _ in range(8)], key=lambda reading: reading.within_ns)
    assert abs(best.ahead_ns) <= best.within_ns and best.host_key == host_key()
