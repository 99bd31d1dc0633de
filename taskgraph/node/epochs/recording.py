"""What a task did in an epoch, kept in strict mode: to look at while it runs, and to be done again afterwards."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from taskgraph.channels import Outputs
from taskgraph.epoch import Scratch
from taskgraph.errors import StateError
from taskgraph.graph.compose import Processor
from taskgraph.graph.values import separate, untouched, verify
from taskgraph.node.epochs.differing import digest
from taskgraph.node.epochs.given import Given
from taskgraph.node.replica import Replica, encode_fields
from taskgraph.node.usercode.coroutines import is_async
from taskgraph.protocol.messages import Encoded, EncodedOnDevice, Stamp

__all__ = [
    "Fields",
    "Left",
    "Moment",
    "Recording",
    "RequestKey",
    "Step",
    "changed",
    "digests",
    "fields_of",
    "left_by",
    "seen",
]

R = TypeVar("R")

Fields = dict[str, bytes]
RequestKey = tuple[str, int, str, int]
"""Of a request: where it was sent, to which task, its method, and which of these it is."""
Moment = tuple[Literal["began", "ended"], int, float] | tuple[Literal["answered"], RequestKey, float]
"""A step began or ended, by its index, or a request was answered; and when, by the event loop's clock."""
_PURE_CALLS = 4
"""So many calls of a pure handler are looked at in an epoch: all of `epoch.scratch` is, before and after each."""


@dataclass(frozen=True, slots=True)
class Step:
    """One piece of user code that ran: a processor, or a handler with what it was given."""

    processor: Processor | None
    where: str
    method: str = ""
    sender: int = 0
    payload: Encoded | None = None

    @property
    def called(self) -> str:
        """What it is called in errors: `where` names the message, too, and that by a digest."""
        if self.processor is not None:
            return self.where
        called = self.where.rsplit("/", 2)[0]
        return called if self.method == "on_flag" else f"handler {called}"


@dataclass(frozen=True, slots=True)
class Left:
    """What there was, but items, before and after a processor.

    Attributes:
        beside: other code of the task ran between the two looks: what it did is among that.
    """

    before: Fields
    then: Fields
    beside: bool


class Recording:
    """What one task did in one attempt, and whether its state stayed as it was until the sync points."""

    def __init__(self, replica: Replica, stamp: Stamp) -> None:
        self._replica = replica
        self._stamp = stamp
        self.before: Fields = {}
        self.composed: tuple[Processor, ...] = ()
        self.steps: list[Step] = []
        self.moments: list[Moment] = []
        self.answers: dict[RequestKey, Encoded] = {}
        self.asked: dict[tuple[str, int, str, bytes], list[int]] = {}  # by payload, which of its kind each request was
        self.answered: dict[str, bytes] = {}  # handler, sender and number -> digest of what it answered
        self.flagged: set[tuple[int, bytes]] = set()  # task, digest of the meta
        self.numbers: Mapping[str, float] = {}  # that it reported
        self.finishing = False
        self.items: dict[tuple[str, int], Encoded] = {}
        self.puts: dict[tuple[str, int], Encoded] = {}
        self.filled: dict[tuple[str, int], str] = {}  # by whom: what was computed into the memory that is sent
        self.left: dict[str, Left] = {}
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # of what threads note, where computes are parallel
        self._open = 0
        self.interleaved = False
        self._written: Given | None = None
        self._looked: Counter[str] = Counter()

    def claim_look(self, method: str) -> bool:
        """Counts a call of this pure handler. Whether it is looked at: the first ones are, which tell what it does."""
        self._looked[method] += 1
        return self._looked[method] <= _PURE_CALLS

    async def begin(self) -> None:
        """The epoch begins: the state is the boundary's."""
        self.before = await fields_of(self._replica)

    def started(self, where: str, processor: Processor | None = None, **given: Any) -> int:
        """User code is about to be called. Returns which step it is."""
        self.steps.append(Step(processor, where, **given))
        return len(self.steps) - 1

    def marked(self, step: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, so that it is noted when it begins and ends: it may have to wait for its turn before."""
        if is_async(function):

            @functools.wraps(function)
            async def run_async(*args: Any) -> Any:
                self._begins(step)
                try:
                    return await function(*args)
                finally:
                    self._ends(step)

            return run_async

        @functools.wraps(function)
        def run(*args: Any) -> Any:
            self._begins(step)
            try:
                return function(*args)
            finally:
                self._ends(step)

        return run

    def _begins(self, step: int) -> None:
        with self._lock:
            self.interleaved |= self._open > 0
            self._open += 1
            self.moments.append(("began", step, self._loop.time()))

    def _ends(self, step: int) -> None:
        with self._lock:
            self._open -= 1
            self.moments.append(("ended", step, self._loop.time()))

    def others_ran(self, step: int, since: int) -> bool:
        """Whether other code than this step's began or ended since there were so many moments."""
        return any(moment[0] != "answered" and moment[1] != step for moment in self.moments[since:])

    def asks(self, key: RequestKey, value: Encoded) -> None:
        """A request is sent."""
        where, to, method, count = key
        self.asked.setdefault((where, to, method, value.digest), []).append(count)

    def has_answer(self, key: RequestKey, value: Encoded) -> None:
        """User code is about to be given the answer of a request."""
        self.answers[key] = value
        with self._lock:
            self.moments.append(("answered", key, self._loop.time()))

    async def finished(self, where: str, *, sync: bool = False, looked: bool = False) -> None:
        """User code returned; only a sync point may have changed the state.

        Args:
            looked: what `watched` gave was called.

        Raises:
            StateError: something else did, or what others read, too, was written to.
        """
        await self._check_given(where, looked)
        await seen(self._replica, partial(self._check_filled, where))
        if not sync:
            await self.check(where)

    async def given(self, processor: Processor) -> Mapping[tuple[str, int], Encoded]:
        """The items as they are given to a processor.

        Others may read, and look at, the same memory before it is looked at what a coroutine did: one is given a copy.
        """
        items = self.items
        for tag, producers in processor.inbound.items():
            for producer in producers:
                value = self.items[(tag, producer)]
                if type(value) is EncodedOnDevice:
                    own = value
                    if is_async(processor.compute):
                        own = await seen(self._replica, partial(separate, value))
                        items = {**items, (tag, producer): own}
                    self._replica.given.append(Given(own, tag, producer, processor.name, self._stamp.epoch))
        return items

    def closes(self, name: str, outputs: Outputs) -> None:
        """Where a processor ran, right after it: what it filled in place is sent, and nobody may write to it then."""
        self.filled |= dict.fromkeys(outputs.filled, name)
        outputs.close()

    def watched(self, processor: Processor, close: Callable[[], None]) -> Callable[[], None]:
        """What to do where a processor ran, right after it: `close`, and a look at what the task was given.

        The first who looks after a write is who wrote, then.
        """
        if not self._replica.given or is_async(processor.compute):
            return close  # what a coroutine did is looked at later: here it would stop the event loop

        def look() -> None:
            close()
            self._look_at_given()

        return look

    def _look_at_given(self) -> None:
        """In a thread, on the task's stream."""
        for given in self._replica.given:
            if self._written is None and not untouched(given.value):
                self._written = given

    async def _check_given(self, where: str, looked: bool) -> None:
        """Raises StateError where user code wrote to what others read, too."""
        replica = self._replica
        if replica.given:
            if not looked:
                await seen(replica, self._look_at_given)
            replica.given = [given for given in replica.given if given.viewed]
        if (given := self._written) is not None:
            raise StateError(
                f"task {replica.task}, epoch {self._stamp.epoch}: {where!r} wrote to what {given.tag!r} of task "
                f"{given.producer} brought to {given.processor!r} in epoch {given.epoch}: an array on a device is the "
                f"memory that was put, and others read it, too; write to a copy of it"
            )

    def _check_filled(self, where: str) -> None:
        """Raises StateError where what was sent was written to: a view that user code kept of it is still writable."""
        for channel, processor in self.filled.items():
            value = self.puts.get(channel)
            if value is not None and value.buffers and not verify(value):
                raise StateError(
                    f"task {self._replica.task}, epoch {self._stamp.epoch}: what {processor!r} sent as {channel[0]!r} "
                    f"was written to after that, when {where!r} had run at the latest: the array of outs.empty, and "
                    f"every view of it, is the memory that others read; do not keep it, write to a copy"
                )

    async def check(self, where: str) -> None:
        """Raises StateError where the state is not what it was when the epoch began."""
        if not self.before:
            return
        if written := changed(self.before, await fields_of(self._replica)):
            raise StateError(
                f"task {self._replica.task}, epoch {self._stamp.epoch}: {where!r} changed state "
                f"({', '.join(written)}) outside a sync point; change state only in a processor without outbound "
                f"channels, and hand values there through epoch.scratch"
            )


async def fields_of(replica: Replica) -> Fields:
    """Digests of what `snapshot()` returns, by name where it is a dict."""
    if not replica.stateful:
        return {}
    task = replica.user_task

    def take() -> Fields:
        return {name: value.digest for name, value in encode_fields(task.snapshot(), replica.task).items()}

    return await replica.actor.call("snapshot", take)


def changed(before: Fields, after: Fields) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


async def seen(replica: Replica, look: Callable[[], R]) -> R:
    """What a look at values of user code finds. It waits for a device, if there is one: in a thread, then."""
    return look() if replica.device is None else await replica.actor.call("strict mode", look, alone=False)


def digests(values: Mapping[str, object]) -> Fields:
    """Of those that can travel."""
    return {name: found for name, value in values.items() if (found := digest(value)) is not None}


class _Leaves(Protocol):
    """What an epoch's processors hand on, besides what they put: of an attempt, or of its replay."""

    @property
    def scratch(self) -> Scratch: ...
    @property
    def numbers(self) -> Mapping[str, float]: ...
    @property
    def finishing(self) -> bool: ...


def left_by(work: _Leaves) -> Fields:
    """Digests of what an epoch's processors hand on so far, besides what they put."""
    left: dict[str, object] = {f"epoch.scratch.{name}": value for name, value in vars(work.scratch).items()}
    left |= {f"reported {name!r}": number for name, number in work.numbers.items()}
    if work.finishing:
        left["epoch.finish()"] = True
    return digests(left)
