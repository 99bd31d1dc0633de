"""Strict mode: records what a task does in one attempt, and checks its state while it runs."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from taskgraph.channels import Outputs
from taskgraph.epoch import Scratch
from taskgraph.errors import StateError
from taskgraph.graph.compose import Processor
from taskgraph.graph.values import copy_device_buffers, device_buffers, device_buffers_intact, verify
from taskgraph.node.epochs.differing import Digests, changed_names, digests, read_values, state_of
from taskgraph.node.replica import Replica
from taskgraph.node.usercode.coroutines import is_async
from taskgraph.protocol.messages import Encoded, EncodedOnDevice, Stamp
from taskgraph.queues.plan import DEAL

__all__ = ["RecordedCall", "RecordedReply", "Recording", "RequestKind", "SideEffects", "WatchedItem", "side_effects_of"]

RequestKind = tuple[str, int, str]
"""(code that sent a request, receiving task, method)."""
_PURE_CALLS = 4
"""Calls of each pure handler that are checked in an epoch. Few, since a check reads all of `epoch.scratch` twice."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of user code: of `processor`, or, if that is None, of the handler `method` with the message it took."""

    processor: Processor | None
    where: str
    method: str = ""
    sender: int = 0
    payload: Encoded | None = None

    @property
    def name(self) -> str:
        """The call's name for errors: `where` without the part that identifies the message."""
        if self.processor is not None:
            return self.where
        called = self.where.rsplit("/", 2)[0]
        return called if self.method == "on_flag" else f"handler {called}"


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """A reply (`value`), the digest of its request (`asked`), and how long after the request the reply came."""

    asked: bytes
    value: Encoded
    delay_s: float


@dataclass(frozen=True, slots=True)
class WatchedItem:
    """An item in device memory that `processor` took. Its memory is checked later: other tasks read it, too, and a
    processor must not write to it.
    """

    value: EncodedOnDevice
    tag: str
    producer: int
    processor: str
    epoch: int

    @property
    def was_viewed(self) -> bool:
        return any(buffer.is_viewed for buffer in device_buffers(self.value))


@dataclass(frozen=True, slots=True)
class SideEffects:
    """Digests of `epoch.scratch` and of what the task reported, before and after one of its processors ran.

    Attributes:
        alone: no other code of the task ran between `before` and `after`.
    """

    before: Digests
    after: Digests
    alone: bool


class Recording:
    """Records what one task does in one attempt.

    Args:
        watched_items: the items whose memory is checked, also of earlier epochs if user code kept views of them.

    Attributes:
        before: digests of the state when the epoch began; {} for a task without state.
        steps: all calls of user code, in the order in which they began.
        interleaved: True if a step began while another step waited.
        answered: handler, sender and number of each request -> digest of the reply.
        switches: counts the beginnings and ends of steps.
    """

    def __init__(self, replica: Replica, stamp: Stamp, watched_items: list[WatchedItem]) -> None:
        self.replica = replica
        self.stamp = stamp
        self.before: Digests = {}
        self.composed: tuple[Processor, ...] = ()
        self.steps: list[RecordedCall] = []
        self.interleaved = False
        self.switches = 0
        self.replies: dict[RequestKind, list[RecordedReply]] = {}
        self.requests: Counter[tuple[RequestKind, bytes]] = Counter()
        self.answered: dict[str, bytes] = {}
        self.flags: set[tuple[int, bytes]] = set()  # task, digest of the meta
        self.numbers: Mapping[str, float] = {}  # that the task reported
        self.finishing = False
        self.items: dict[tuple[str, int], Encoded] = {}
        self.puts: dict[tuple[str, int], Encoded] = {}
        self.side_effects: dict[str, SideEffects] = {}
        self._watched_items = watched_items
        self._filled: dict[tuple[str, int], str] = {}  # channel -> processor that computed into the memory it sends
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # parallel computes begin and end in threads
        self._open = 0
        self._written_item: WatchedItem | None = None
        self._pure_calls: Counter[str] = Counter()

    # -- recording --------------------------------------------------------------------------------

    async def take_state_digests(self) -> None:
        """Takes digests of the state at the beginning of the epoch."""
        self.before = await state_of(self.replica)

    def wrap(self, step: RecordedCall, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps user code so that `step` is recorded when the code begins, maybe after a wait for its turn.

        Returns code of the framework as it is, and records `step` now.
        """
        inner = function.func if isinstance(function, partial) else function
        if getattr(inner, "__taskgraph_internal__", False):
            with self._lock:
                self.steps.append(step)
            return function
        if is_async(function):

            @functools.wraps(function)
            async def run_async(*args: Any) -> Any:
                self._note_begin(step)
                try:
                    return await function(*args)
                finally:
                    self._note_end()

            return run_async

        @functools.wraps(function)
        def run(*args: Any) -> Any:
            self._note_begin(step)
            try:
                return function(*args)
            finally:
                self._note_end()

        return run

    def _note_begin(self, step: RecordedCall) -> None:
        with self._lock:
            self.interleaved |= self._open > 0
            self._open += 1
            self.switches += 1
            self.steps.append(step)

    def _note_end(self) -> None:
        with self._lock:
            self._open -= 1
            self.switches += 1

    def note_request(self, kind: RequestKind, value: Encoded) -> Callable[[Encoded], None]:
        """Notes a request. Returns a function that is to be called with the reply, and records it."""
        sent = self._loop.time()
        if kind[2] != DEAL:
            self.requests[(kind, value.digest)] += 1

        def replied(reply: Encoded) -> None:
            found = RecordedReply(value.digest, reply, self._loop.time() - sent)
            self.replies.setdefault(kind, []).append(found)

        return replied

    def note_pure_call(self, method: str) -> bool:
        """Counts a call of a pure handler. True for the first calls in an epoch, which are checked."""
        self._pure_calls[method] += 1
        return self._pure_calls[method] <= _PURE_CALLS

    async def check_step(self, where: str, *, sync: bool = False, looked: bool = False) -> None:
        """Checks the state after a step, which only a sync point may change, and memory that other tasks read.

        Args:
            looked: True if the function that `checked_close` returned has checked the watched items already.

        Raises:
            StateError: a step that is no sync point changed the state, or a step wrote to memory that other tasks read.
        """
        await self._check_watched_items(where, looked)
        await read_values(self.replica, partial(self._check_put_arrays, where))
        if not sync:
            await self.check_state(where)

    async def check_state(self, where: str) -> None:
        """Raises StateError if the state has changed since the epoch began."""
        if self.before and (written := changed_names(self.before, await state_of(self.replica))):
            raise self._state_error(
                f"{where!r} changed state ({', '.join(written)}) outside a sync point; change state only in a "
                f"processor without outbound channels or in the `then` of a collective, and hand values there through "
                f"epoch.scratch"
            )

    def _state_error(self, text: str) -> StateError:
        return StateError(f"task {self.replica.task}, epoch {self.stamp.epoch}: {text}")

    # -- memory that other tasks read -------------------------------------------------------------

    async def items_for(self, processor: Processor) -> Mapping[tuple[str, int], Encoded]:
        """Returns the items for a processor, and lists those on a device, to check later that it wrote to none.

        A coroutine gets copies of those: the check could not tell its writes from those of other tasks.
        """
        items = self.items
        for tag, producer in processor.takes:
            value = self.items[(tag, producer)]
            if type(value) is EncodedOnDevice:
                item = value
                if is_async(processor.compute):
                    item = await read_values(self.replica, partial(copy_device_buffers, value))
                    items = {**items, (tag, producer): item}
                shared = WatchedItem(item, tag, producer, processor.name, self.stamp.epoch)
                self._watched_items.append(shared)
        return items

    def close_outputs(self, name: str, outputs: Outputs) -> None:
        """Closes the outputs of a processor that has returned, and notes its arrays of `outs.empty`, for checks."""
        self._filled |= dict.fromkeys(outputs.filled, name)
        outputs.close()

    def checked_close(self, processor: Processor, close: Callable[[], None]) -> Callable[[], None]:
        """Returns a function to be called when a processor has returned: it calls `close`, then checks watched items.

        The first check after a write names the processor that wrote. For a coroutine, `check_step` checks.
        """
        if not self._watched_items or is_async(processor.compute):
            return close  # after a coroutine the check would stop the event loop; `check_step` does it

        def run() -> None:
            close()
            self._find_written_item()

        return run

    def _find_written_item(self) -> None:
        """Keeps the first of the watched items, all on a device, whose memory was written to;
        `_check_watched_items` then raises.
        """
        for item in self._watched_items:
            if self._written_item is None and not device_buffers_intact(item.value):
                self._written_item = item

    async def _check_watched_items(self, where: str, looked: bool) -> None:
        if self._watched_items:
            if not looked:
                await read_values(self.replica, self._find_written_item)
            self._watched_items[:] = [item for item in self._watched_items if item.was_viewed]
        if (item := self._written_item) is not None:
            raise self._state_error(
                f"{where!r} wrote to what {item.tag!r} of task {item.producer} brought to {item.processor!r} in epoch "
                f"{item.epoch}: an array on a device is the memory that was put, and others read it, too; write to a "
                f"copy of it"
            )

    def _check_put_arrays(self, where: str) -> None:
        """Raises StateError if an array of `outs.empty` was written to after it was put."""
        for channel, processor in self._filled.items():
            value = self.puts.get(channel)
            if value is not None and value.buffers and not verify(value):
                raise self._state_error(
                    f"what {processor!r} sent as {channel[0]!r} was written to after that, when {where!r} had run at "
                    f"the latest: the array of outs.empty, and every view of it, is the memory that others read; do "
                    f"not keep it, write to a copy"
                )


class _EpochSideEffects(Protocol):
    """What `side_effects_of` reads of an attempt or a replay."""

    @property
    def scratch(self) -> Scratch: ...
    @property
    def numbers(self) -> Mapping[str, float]: ...
    @property
    def finishing(self) -> bool: ...


def side_effects_of(work: _EpochSideEffects) -> Digests:
    """Returns digests of `epoch.scratch`, of the numbers reported so far, and of a call of `epoch.finish()`."""
    found: dict[str, object] = {f"epoch.scratch.{name}": value for name, value in vars(work.scratch).items()}
    found |= {f"reported {name!r}": number for name, number in work.numbers.items()}
    if work.finishing:
        found["epoch.finish()"] = True
    return digests(found)
