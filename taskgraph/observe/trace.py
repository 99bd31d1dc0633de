"""The spans of one node while it is traced.

Code that is worth a span asks `Tracing.on` first, which is all that tracing costs while it is off:

    began = tracing.on and tracing.begin(stamp)
    ...                                   # the work that the span shows
    if began:
        tracing.keep("pull", tag, producer, began, clock(), task, stamp, term, size)

Of a fast job only every n-th epoch may be traced: `begin` returns 0 for the epochs between. The buffer is bounded:
spans that do not fit are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from taskgraph.errors import TaskGraphError

if TYPE_CHECKING:
    from taskgraph.observe.events import Event, EventLog
    from taskgraph.protocol.messages import Stamp

__all__ = ["NO_STAMP", "Span", "Tracing", "clock"]

clock = time.time_ns
"""The wall clock, in nanoseconds: all processes of a host agree on it, and other hosts nearly do."""

Span = tuple[str, str, int | str, int, int, int, int, int, int, int]
"""(kind, name, peer, begin_ns, end_ns, task, epoch, attempt, term, bytes), as `Tracing.keep` says."""
NO_STAMP = (0, -1)
"""The stamp of a span that belongs to no epoch."""

_ROOM = 1 << 16
"""The most spans between two fetches: about 20 MB, more than a busy node makes in half a second."""


class Tracing:
    """Collects the spans of one node, on its event loop.

    Attributes:
        on: True while the node is traced.
        since: `clock()` when the trace began.
    """

    __slots__ = ("_dropped", "_every", "_room", "_spans", "_stop_events", "on", "since")

    def __init__(self, room: int = _ROOM) -> None:
        self.on = False
        self.since = 0
        self._room = room
        self._every = 1
        self._spans: list[Span] = []
        self._dropped = 0
        self._stop_events: Callable[[], None] | None = None

    def start(self, events: EventLog | None = None, every: int = 1) -> None:
        """Begins to keep spans.

        Args:
            events: each event emitted here from now on becomes a moment in the trace.
            every: traces the epochs that this number divides.

        Raises:
            TaskGraphError: another tool traces this node.
        """
        if self.on:
            raise TaskGraphError("somebody else traces this node at the moment")
        self._spans.clear()
        self._dropped, self._every, self.since = 0, every, clock()
        if events is not None:
            self._stop_events = events.listen(self._on_event)
        self.on = True

    def stop(self) -> None:
        """Stops, and drops the spans that were not fetched."""
        self.on = False
        self._spans.clear()
        if self._stop_events is not None:
            self._stop_events()
            self._stop_events = None

    def is_traced(self, epoch: int) -> bool:
        """True if this epoch is traced. Epoch -1, which means no epoch, always is."""
        return epoch % self._every == 0 or epoch < 0

    def begin(self, stamp: Stamp | None, *, boundary: bool = False) -> int:
        """Returns the time now, for the beginning of a span; 0 if the epoch of `stamp` is not traced.

        Args:
            boundary: `stamp` names a boundary, which the previous epoch made.
        """
        return clock() if stamp is None or (stamp[1] - boundary) % self._every == 0 else 0

    def keep(
        self,
        kind: str,
        name: str,
        peer: int | str,
        began: int,
        ended: int,
        task: int,
        stamp: tuple[int, int],
        term: int,
        size: int,
    ) -> None:
        """Keeps one span, or one moment, which ends when it begins. Any thread may call it.

        Args:
            kind: the kind of the span, e.g. "pull".
            name: distinguishes spans of one kind, e.g. the tag of a pull.
            peer: the other side: the number of a task, or the name of a node; "": none.
            began, ended: `clock()` at the beginning and the end.
            task: the number of the task; -1: none.
            stamp: (attempt, epoch).
            size: the bytes that moved; -1: none.
        """
        if not self.on:  # the trace stopped after the span began
            return
        if len(self._spans) >= self._room:
            self._dropped += 1
            return
        self._spans.append((kind, name, peer, began, ended, task, stamp[1], stamp[0], term, size))

    def add(self, kind: str, began: int, task: int, stamp: Stamp | None, term: int = 0, name: str = "") -> None:
        """Keeps a span that ends now and has no peer."""
        self.keep(kind, name, "", began, clock(), task, stamp or NO_STAMP, term, -1)

    def fetch(self) -> tuple[list[Span], int]:
        """Takes the spans since the last fetch, in the order they ended. Also returns how many did not fit."""
        spans, lost = self._spans[:], self._dropped
        del self._spans[: len(spans)]  # another thread may have added one meanwhile
        self._dropped = 0
        return spans, lost

    def _on_event(self, event: Event) -> None:
        """Keeps an event as a moment in the trace."""
        if event.kind == "commit":
            return  # the leader has a span for each commit
        now = clock()
        task = event.task if event.task is not None else -1
        stamp = (event.attempt or 0, event.epoch if event.epoch is not None else -1)
        self.keep("event", event.kind, event.text, now, now, task, stamp, event.term or 0, -1)
