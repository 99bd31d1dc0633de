"""A node's side of `taskgraph trace`: streams the node's spans to one tool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

import msgspec

from taskgraph.observe._proto import control_pb2 as pb
from taskgraph.observe.events import EventLog
from taskgraph.observe.trace import Tracing
from taskgraph.system.alongside import alongside

__all__ = ["TracedNode", "stream_spans"]

_FETCH_S = 0.5
"""How often spans are sent: a killed node loses the spans of this interval, and a message costs as much as hundreds of
spans."""


class TracedNode(Protocol):
    """What a trace reads of a node: the epoch at work, and the latest that a task here has begun; -1: none."""

    tracing: Tracing

    @property
    def epoch(self) -> int: ...
    @property
    def latest_epoch(self) -> int: ...


async def stream_spans(
    node: TracedNode, events: EventLog, requests: AsyncIterator[pb.TraceRequest], ending: asyncio.Event
) -> AsyncGenerator[pb.TraceChunk, None]:
    """Yields the spans of `node` from the first request until the requests or the node end.

    The first chunk is empty and names the latest epoch that began before the trace.

    Raises:
        TaskGraphError: another tool traces this node.
    """
    asked = aiter(requests)

    async def next_request() -> pb.TraceRequest | None:
        return await anext(asked, None)

    async with alongside(ending.wait(), next_request()) as (ends, first):
        await asyncio.wait((ends, first), return_when=asyncio.FIRST_COMPLETED)
        request = first.result() if first.done() else None
    if request is None:
        return
    node.tracing.start(events, max(request.every, 1))
    try:
        yield pb.TraceChunk(epoch=node.latest_epoch)
        async with alongside(ending.wait(), next_request()) as ends_of_it:
            over = False
            while not over:
                done, _ = await asyncio.wait(ends_of_it, timeout=_FETCH_S, return_when=asyncio.FIRST_COMPLETED)
                over = bool(done)
                spans, lost = node.tracing.fetch()
                yield pb.TraceChunk(epoch=node.epoch, lost=lost, over=over, spans=msgspec.json.encode(spans))
    finally:
        node.tracing.stop()
