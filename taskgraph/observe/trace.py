"""What a node does, span by span, for as long as somebody traces it.

Every place of interest asks `Tracing.on` before it does anything else: that is all that tracing costs while it is
off. While it is on, a span is nine references at the end of a list, put there by the list itself: no function of ours
is called, and nothing is made that the garbage collector would look at.

    began = tracing.on and clock()
    ...                                   # what is to be seen
    if began:
        tracing.keep(("pull", tag, producer, began, clock(), task, stamp, term, size))

What does not fit is counted: how much there is, is looked at a few times a second, and whenever it is fetched.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from taskgraph.errors import TaskGraphError

if TYPE_CHECKING:
    from taskgraph.observe.events import Event, EventLog
    from taskgraph.protocol.messages import Stamp

__all__ = ["NO_STAMP", "WIDTH", "Kept", "Span", "Tracing", "clock"]

clock = time.perf_counter_ns
"""Monotonic, in nanoseconds; on Linux and macOS the same for all processes of a host."""

Span = tuple[str, str, str, int, int, int, int, int, int, int]
"""(kind, name, peer, begin_ns, end_ns, task, epoch, attempt, term, bytes)."""
Kept = tuple[str, str, int | str, int, int, int, tuple[int, int], int, int]
"""(kind, name, peer, begin_ns, end_ns, task, stamp, term, bytes); a peer that is a number is a task."""
WIDTH = 9
"""References that a span is."""

_ROOM = 1 << 17
"""Spans that wait to be fetched: some 20 MB, seconds of the fastest job."""
_TOLD_AT = 1 << 13
"""So many wait: whoever fetches them is woken, long before room runs out."""
_LOOK_S = 0.2
NO_STAMP = (0, -1)
"""Of what belongs to no epoch."""


def _drop(span: Kept) -> None:
    """Tracing ended since it began."""


class Tracing:
    """One node's spans. Lives on the event loop.

    Attributes:
        on: whether somebody traces; asked before anything is done for it.
        keep: takes a span that ended now, or a moment, which ends when it begins.
    """

    __slots__ = ("_look_again", "_lost", "_room", "_spans", "_stop_events", "_wake", "keep", "on")

    def __init__(self, room: int = _ROOM) -> None:
        self.on = False
        self.keep: Callable[[Kept], None] = _drop
        self._room = room
        self._spans: list[Any] = []
        self._lost = 0
        self._wake: asyncio.Event | None = None
        self._look_again: asyncio.TimerHandle | None = None
        self._stop_events: Callable[[], None] | None = None

    def start(self, events: EventLog | None = None) -> None:
        """Begins; what `events` tells from now on is a moment each.

        Raises:
            TaskGraphError: somebody traces already.
        """
        if self.on:
            raise TaskGraphError("somebody else traces this node at the moment")
        self._spans, self._lost, self._wake = [], 0, asyncio.Event()
        self.keep = self._spans.extend
        if events is not None:
            self._stop_events = events.listen(self._told)
        self.on = True
        self._look()

    def stop(self) -> None:
        """Ends; what was not fetched is dropped."""
        self.on = False
        self.keep = _drop
        self._spans = []
        if self._look_again is not None:
            self._look_again.cancel()
            self._look_again = None
        if self._stop_events is not None:
            self._stop_events()
            self._stop_events = None

    def add(self, kind: str, began: int, task: int, stamp: Stamp | None, term: int = 0, name: str = "") -> None:
        """`keep`, for spans that are rare.

        Args:
            kind: what it is, e.g. "takeover".
            began: what `clock()` said then.
            name: which of its kind.
        """
        self.keep((kind, name, "", began, clock(), task, stamp or NO_STAMP, term, -1))

    def _told(self, event: Event) -> None:
        if event.kind == "commit":
            return  # of every epoch, and a span of the leader tells it
        now = clock()
        task = event.task if event.task is not None else -1
        stamp = (event.attempt or 0, event.epoch if event.epoch is not None else -1)
        self.keep(("event", event.kind, event.text, now, now, task, stamp, event.term or 0, -1))

    def _look(self) -> None:
        assert self._wake is not None
        self._trim()
        if len(self._spans) >= _TOLD_AT * WIDTH:
            self._wake.set()
        self._look_again = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _trim(self) -> None:
        """What is too much goes, the newest first."""
        if (more := len(self._spans) // WIDTH - self._room) > 0:
            del self._spans[self._room * WIDTH :]
            self._lost += more

    async def filled(self) -> None:
        """Returns when so many spans wait that they should be fetched."""
        assert self._wake is not None
        await self._wake.wait()

    def fetch(self) -> tuple[list[Any], int]:
        """What was kept since it was asked last, as (spans, how many were left out).

        Spans are in the order they ended, `WIDTH` elements each.
        """
        self._trim()
        spans, lost = self._spans[:], self._lost
        self._spans.clear()  # the same list: `keep` is its own
        self._lost = 0
        if self._wake is not None:
            self._wake.clear()
        return spans, lost
