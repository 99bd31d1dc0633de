"""A node's side of `taskgraph trace`: its spans told to whoever asks, until the last epoch asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from taskgraph.observe._proto import control_pb2 as pb
from taskgraph.observe.events import EventLog
from taskgraph.observe.trace import Tracing
from taskgraph.observe.trace_chunks import chunks
from taskgraph.system.alongside import alongside, any_done

__all__ = ["Traced", "traced"]

_FETCH_S = 1.0
"""Spans are told this often: a node that is killed takes this much with it, and a message takes as long as hundreds of
spans, whatever its size."""
_SETTLE_S = 0.05
"""What ends just after the last epoch was read is in the trace, too."""


class Traced(Protocol):
    """What is needed of a node. `epoch` is the one it is at, -1: none was read; its tasks may be at `latest`."""

    tracing: Tracing

    @property
    def epoch(self) -> int: ...
    @property
    def latest(self) -> int: ...
    async def epoch_read(self, epoch: int) -> None: ...


async def traced(
    node: Traced, events: EventLog, requests: AsyncIterator[pb.TraceRequest], ending: asyncio.Event
) -> AsyncGenerator[pb.TraceChunk, None]:
    """Spans of `node`, from the first request on. First comes a chunk with none, which tells the latest epoch that
    began before.

    Args:
        events: told in between.
        requests: the first says which epochs; the first that names one says when to end, and so does the end of them.
        ending: set where the node ends.

    Raises:
        TaskGraphError: somebody else traces it.
    """
    tracing, asked = node.tracing, aiter(requests)
    first = await _first_request(asked, ending)
    if first is None:
        return
    tracing.start(events, max(first.every, 1))
    try:
        async with alongside(_first_of(ending, node, asked)) as (over,):
            yield pb.TraceChunk(epoch=node.latest)
            while True:
                last = over.done()
                if last:
                    over.result()
                for chunk in chunks(tracing):
                    chunk.epoch = node.epoch
                    yield chunk
                if last:
                    yield pb.TraceChunk(epoch=node.epoch, over=True)
                    return
                async with alongside(tracing.filled()) as (filled,):
                    await asyncio.wait([over, filled], timeout=_FETCH_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        tracing.stop()


async def _first_request(requests: AsyncIterator[pb.TraceRequest], ending: asyncio.Event) -> pb.TraceRequest | None:
    """None: there is none, or the node ends."""

    async def asked() -> pb.TraceRequest | None:
        return await anext(requests, None)

    async with alongside(asked(), ending.wait()) as (first, end):
        await any_done(first, end)
        return first.result() if first.done() else None


async def _first_of(ending: asyncio.Event, node: Traced, requests: AsyncIterator[pb.TraceRequest]) -> None:
    """Returns when tracing is over: the epoch asked for was read, nothing more is asked, or the node ends."""
    named: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with alongside(ending.wait(), _asked(requests, named), _read(node, named)) as waits:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()


async def _asked(requests: AsyncIterator[pb.TraceRequest], named: asyncio.Future[int]) -> None:
    """Returns after the last request; the first that names an epoch counts."""
    async for request in requests:
        if request.until_epoch > 0 and not named.done():
            named.set_result(request.until_epoch)


async def _read(node: Traced, named: asyncio.Future[int]) -> None:
    await node.epoch_read(await named)
    await asyncio.sleep(_SETTLE_S)
