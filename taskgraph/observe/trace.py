"""What a node does, span by span, for as long as somebody traces it.

Every place of interest asks `Tracing.on` before it does anything else: that is all that tracing costs while it is
off. While it is on, a span is one tuple in a list that is bounded: what does not fit is counted, not kept.

    began = tracing.on and clock()
    ...                                   # what is to be seen
    if began:
        tracing.add("pull", began, task, stamp, term, name=tag)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from taskgraph.errors import TaskGraphError

if TYPE_CHECKING:
    from taskgraph.observe.events import Event, EventLog
    from taskgraph.protocol.messages import Stamp

__all__ = ["Span", "Tracing", "clock"]

clock = time.perf_counter_ns
"""Monotonic, in nanoseconds; on Linux and macOS the same for all processes of a host."""

_ROOM = 1 << 17
"""Spans that wait to be fetched: some 25 MB, seconds of the fastest job."""
_TOLD_AT = 1 << 13
"""So many wait: whoever fetches them is woken, long before room runs out."""

Span = tuple[str, int | str, int | str, int, int, int, int, int, int, int]
"""(kind, name, peer, begin_ns, end_ns, task, epoch, attempt, term, bytes); a peer that is a number is a task."""


class Tracing:
    """One node's spans. Lives on the event loop.

    Attributes:
        on: whether somebody traces; asked before anything is done for it.
    """

    __slots__ = ("_lost", "_room", "_spans", "_stop_events", "_wake", "on")

    def __init__(self, room: int = _ROOM) -> None:
        self.on = False
        self._room = room
        self._spans: list[Span] = []
        self._lost = 0
        self._wake: asyncio.Event | None = None
        self._stop_events: Callable[[], None] | None = None

    def start(self, events: EventLog | None = None) -> None:
        """Begins; what `events` tells from now on is a moment each.

        Raises:
            TaskGraphError: somebody traces already.
        """
        if self.on:
            raise TaskGraphError("somebody else traces this node at the moment")
        self._spans, self._lost, self._wake = [], 0, asyncio.Event()
        if events is not None:
            self._stop_events = events.listen(self._told)
        self.on = True

    def stop(self) -> None:
        """Ends; what was not fetched is dropped."""
        self.on = False
        self._spans = []
        if self._stop_events is not None:
            self._stop_events()
            self._stop_events = None

    def add(
        self,
        kind: str,
        began: int,
        task: int = -1,
        stamp: Stamp | None = None,
        term: int = 0,
        *,
        name: int | str = "",
        peer: int | str = "",
        size: int = -1,
        ended: int = 0,
    ) -> None:
        """A span that ends now, or ended at `ended`.

        Args:
            kind: what it is, e.g. "pull".
            began: what `clock()` said then.
            name: which of its kind; peer: the other side, a task by its number.
            size: bytes moved.
        """
        spans = self._spans
        if not self.on or len(spans) >= self._room:  # off: since it began
            self._lost += self.on
            return
        epoch, attempt = (stamp.epoch, stamp.attempt) if stamp is not None else (-1, 0)
        spans.append((kind, name, peer, began, ended or clock(), task, epoch, attempt, term, size))
        if len(spans) == _TOLD_AT and self._wake is not None:
            self._wake.set()

    def moment(
        self,
        kind: str,
        task: int = -1,
        stamp: Stamp | None = None,
        term: int = 0,
        *,
        name: int | str = "",
        peer: int | str = "",
        size: int = -1,
    ) -> None:
        """Something that takes no time."""
        now = clock()
        self.add(kind, now, task, stamp, term, name=name, peer=peer, size=size, ended=now)

    def _told(self, event: Event) -> None:
        now = clock()
        at = (
            event.task if event.task is not None else -1,
            event.epoch if event.epoch is not None else -1,
            event.attempt or 0,
            event.term or 0,
        )
        if len(self._spans) >= self._room:
            self._lost += 1
        else:
            self._spans.append(("event", event.kind, event.text, now, now, *at, -1))

    async def filled(self) -> None:
        """Returns when so many spans wait that they should be fetched."""
        assert self._wake is not None
        await self._wake.wait()

    def fetch(self) -> tuple[list[Span], int]:
        """What was added since it was asked last, in the order it ended; and how many were left out."""
        spans, self._spans = self._spans, []
        lost, self._lost = self._lost, 0
        if self._wake is not None:
            self._wake.clear()
        return spans, lost
