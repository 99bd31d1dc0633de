"""The items that one attempt pulls from their producers for its processors; each counts once in its ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from taskgraph.errors import GraphError, Refused, TaskGraphError, error_text
from taskgraph.graph.values import copy_to_host
from taskgraph.node.epochs.pulls import LARGE_BYTES
from taskgraph.observe.trace import clock
from taskgraph.protocol.deviceloss import device_error
from taskgraph.protocol.messages import Encoded, EncodedOnDevice, Item, Pull, Reply, Stamp
from taskgraph.transport.api import CallFuture

if TYPE_CHECKING:
    from taskgraph.graph.compose import Graph, Processor
    from taskgraph.node.epochs.primary_interface import PrimaryInterface
    from taskgraph.node.epochs.recording import Recording
    from taskgraph.protocol.sums import MessageLedger

__all__ = ["Inbound", "raise_in_attempt"]

Channel = tuple[str, int]
"""(tag, producer)."""


class Inbound:
    """One attempt's inbound channels. `pull` begins to pull all items at once, except those of optional channels, which
    `pull_optional` pulls. Items stay until the attempt has run.

    Lives on the event loop.
    """

    __slots__ = (
        "_awaited",
        "_channels",
        "_graph",
        "_ledger",
        "_primary",
        "_pulling",
        "_pulls",
        "_recording",
        "_run_deriving",
        "_spawn",
        "_stamp",
        "_task",
        "_traced_since",
        "items",
        "open",
        "over",
        "taken_bytes",
    )

    def __init__(
        self,
        primary: PrimaryInterface,
        stamp: Stamp,
        ledger: MessageLedger,
        recording: Recording | None,
    ) -> None:
        self._primary = primary
        self._task = primary.task
        self._stamp = stamp
        self._pulls = primary.pulls
        self._ledger = ledger
        self._recording = recording
        self._traced_since = 0  # when the pulls began, if traced
        self._graph: Graph | None = None
        self._channels: tuple[Channel, ...] = ()
        self._run_deriving: Callable[[Processor], None] | None = None
        self._spawn: Callable[[Coroutine[Any, Any, None]], object] | None = None
        self._pulling: dict[asyncio.Future[Reply], None] = {}  # calls without an asyncio task
        self._awaited: list[tuple[asyncio.Future[None], set[Channel]]] = []  # waiters, with the items that each lacks
        self.items: dict[Channel, Encoded] = {}
        self.open = 0  # items that have not arrived
        self.taken_bytes = 0
        self.over = False  # items that arrive now are dropped

    # -- for the attempt --------------------------------------------------------------------------

    def pull(
        self,
        graph: Graph,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        run_deriving: Callable[[Processor], None],
        traced_since: int,
    ) -> None:
        """Begins to pull every item of the epoch, except those of optional channels.

        Args:
            spawn: runs a coroutine of the attempt; an error in it ends the attempt.
            run_deriving: begins to run a processor that derives a local channel; called once its source has arrived.
            traced_since: `clock()` if the epoch is traced; otherwise 0.
        """
        self._graph, self._spawn, self._run_deriving, self._traced_since = graph, spawn, run_deriving, traced_since
        self._channels = graph.channels_in
        self.open = len(self._channels) + len(graph.derived)
        begin, stamp, task, term = self._pulls.begin, self._stamp, self._task, self._primary.term
        for channel in self._channels:
            reply, (tag, producer) = begin(stamp, task, term, channel), channel
            if reply is None:
                self._create_task(self._pull(tag, producer))
            elif reply.done():
                self._on_pull_reply(tag, producer, reply)
            else:
                self._pulling[reply] = None
                came = partial(self._on_pull_reply, tag, producer)
                if isinstance(reply, CallFuture):
                    reply.listener = came
                else:
                    reply.add_done_callback(came)

    def pull_optional(self, channels: tuple[Channel, ...]) -> asyncio.Future[None]:
        """Begins to pull the items of optional channels; the returned future is done when all have arrived."""
        self._channels += channels
        self.open += len(channels)
        for tag, producer in channels:
            self._create_task(self._pull(tag, producer))
        return self.wait_for_items(set(channels))

    def supply(self, channel: Channel, value: Encoded) -> None:
        """Keeps the value that a processor derived for a local channel; see `DerivedChannel`."""
        if not self.over:
            self.taken_bytes += value.size_bytes
            self._keep_item(channel, value)

    def source_of(self, tag: str, producer: int) -> Channel:
        """Returns the channel whose item has to arrive first: the source of a local channel, or else the channel
        itself.
        """
        assert self._graph is not None
        found = (source for source, (derived, _) in self._graph.derived.items() if derived.tag == tag)
        return next(found, (tag, producer)) if producer == self._task else (tag, producer)

    def lacks(self, tag: str, producer: int) -> bool:
        """True if a pull of this item has begun, and the item has not arrived."""
        return (tag, producer) not in self.items and (tag, producer) in self._channels

    def wait_for_items(self, lacking: set[Channel]) -> asyncio.Future[None]:
        """Returns a future that is done when the last of these items has arrived."""
        arrived: asyncio.Future[None] = self._primary.loop.create_future()
        self._awaited.append((arrived, lacking))
        return arrived

    def wait_for_all_items(self) -> asyncio.Future[None]:
        """Returns a future that is done when every item of the epoch has arrived."""
        assert self._graph is not None
        local = [(derived.tag, self._task) for derived, _ in self._graph.derived.values()]
        return self.wait_for_items({*self._channels, *local}.difference(self.items))

    def end(self) -> None:
        """Cancels the pulls and frees the items, since the attempt has run. Its commit may come much later."""
        if not self.over:
            self._traced_since = 0
            if self._recording is None:
                self.items.clear()
        self.over = True
        self._spawn = self._run_deriving = None  # breaks reference cycles
        if self._pulling:
            for reply in tuple(self._pulling):
                reply.cancel()

    def drop(self) -> None:
        """Frees the items, and ignores items that still arrive, since the attempt is over."""
        self.over = True
        if self._traced_since:
            for tag, producer in self._channels:
                if (tag, producer) not in self.items:
                    self._trace("pull, given up", tag, producer, None)
            self._traced_since = 0
        self.items.clear()

    # -- one item ---------------------------------------------------------------------------------

    def _create_task(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._spawn is not None
        self._spawn(work)

    def _on_pull_reply(self, tag: str, producer: int, reply: asyncio.Future[Reply]) -> None:
        """Handles the reply to a pull. Retries a failed pull in an asyncio task."""
        self._pulling.pop(reply, None)
        if self.over:
            return
        try:
            item = reply.result()
        except (Exception, asyncio.CancelledError):
            self._create_task(self._pull(tag, producer))
            return
        try:
            self._take_item(tag, producer, item)
        except Exception as error:
            self._create_task(raise_in_attempt(error))

    async def _pull(self, tag: str, producer: int) -> None:
        """Pulls one item and takes it, with retries while its producer fails.

        Raises:
            GraphError: the producer does not offer the item in this epoch.
        """
        stamp, task, primary, what = self._stamp, self._task, self._primary, f"{tag!r} from task {producer}"
        pull, lost = partial(Pull, stamp, task, primary.term, producer, tag), f"task {task} cannot pull {what}"
        try:
            reply = await primary.call(stamp, producer, pull, what, lost)
        except Refused as refused:
            raise GraphError(
                f"task {task}, epoch {stamp.epoch}: {self._describe_pull(tag, producer)} pulls {what}, which does not "
                f"offer it in this epoch; {refused}{self._collective_advice(tag)}"
            ) from refused
        self._take_item(tag, producer, reply)

    def _describe_pull(self, tag: str, producer: int) -> str:
        """Returns the name of the processor that takes an item, quoted, for messages."""
        assert self._graph is not None
        return next(repr(p.name) for p in self._graph.processors if producer in p.inbound.get(tag, ()))

    def _collective_advice(self, tag: str) -> str:
        assert self._graph is not None
        if tag.partition(":")[0] not in self._graph.collectives:
            return ""
        return ". All tasks declare the same collectives, with the same arguments, in the same order"

    def _take_item(self, tag: str, producer: int, reply: Reply) -> None:
        """Counts an item that arrived in the ledger, keeps it, and begins to derive the local channel that has it as
        its source.
        """
        assert type(reply) is Item
        value, channel, task = reply.value, (tag, producer), self._task
        if value.buffers and type(value) is EncodedOnDevice and self._primary.replica.device is None:
            self._create_task(self._take_to_host(tag, producer, reply))
            return
        size = value.size_bytes
        if size > LARGE_BYTES or self._pulls.large:
            self._pulls.item_arrived(tag, producer, value)
        self._ledger.count_received("item", producer, task, tag, value.digest)
        if producer != task:  # otherwise the put has counted it
            self.taken_bytes += size
        if self._traced_since:
            self._trace("pull", tag, producer, reply)
        self._keep_item(channel, value)
        assert self._graph is not None
        if self._graph.derived and channel in self._graph.derived:
            derived, processor = self._graph.derived[channel]
            if value.digest != derived.mark:
                self._keep_item((derived.tag, task), value)
            elif self._run_deriving is not None:
                self._run_deriving(processor)

    def _keep_item(self, channel: Channel, value: Encoded) -> None:
        """Keeps an item, and wakes those that wait for it."""
        self.items[channel] = value
        self.open -= 1
        if self._recording is not None:
            self._recording.items[channel] = value
        for waiting in tuple(self._awaited):
            waiter, lacking = waiting
            lacking.discard(channel)
            if not lacking:
                self._awaited.remove(waiting)
                if not waiter.done():
                    waiter.set_result(None)

    async def _take_to_host(self, tag: str, producer: int, item: Item) -> None:
        """Copies an item to the host, since it is on the device of another node in this process, and takes it."""
        try:
            value = await self._primary.replica.threads.run(partial(copy_to_host, item.value))
        except Exception as error:
            if device_error(error) is not None:
                raise
            raise TaskGraphError(
                f"epoch {self._stamp.epoch}: task {self._task} cannot have {tag!r} of task {producer}: it cannot be "
                f"copied to the host: {error_text(error)}"
            ) from error
        self._take_item(tag, producer, Item(item.stamp, item.term, item.tag, value))

    def _trace(self, kind: str, tag: str, producer: int, item: Item | None) -> None:
        """Adds a span of a pull to the trace, with the producer's term, which distinguishes equal items."""
        size, term = (item.value.size_bytes, item.term) if item is not None else (-1, 0)
        tracing = self._primary.replica.tracing
        tracing.keep(kind, tag, producer, self._traced_since, clock(), self._task, self._stamp, term, size)


async def raise_in_attempt(error: Exception) -> None:
    """Raises `error`. As an asyncio task of the attempt it ends the attempt; an error in a callback would not."""
    raise error
