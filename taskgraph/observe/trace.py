"""What a node does, span by span, for as long as somebody traces it.

Every place of interest asks `Tracing.on` before it does anything else: that is all that tracing costs while it is
off. While it is on, a span is 62 bytes at the end of a buffer that is used again and again: nothing is allocated that
stays, nothing is made that the garbage collector would look at, and what is fetched travels as it is.

    began = tracing.on and tracing.began(stamp)
    ...                                   # what is to be seen
    if began:
        tracing.keep("pull", tag, producer, began, clock(), task, stamp, term, size)

Of a fast job every so many epochs may be traced, each of them whole; of the others nothing is kept.

What does not fit is counted: how much there is, is looked at a few times a second, and whenever it is fetched.
"""

from __future__ import annotations

import asyncio
import io
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from taskgraph.errors import TaskGraphError

if TYPE_CHECKING:
    from taskgraph.observe.events import Event, EventLog
    from taskgraph.protocol.messages import Stamp

__all__ = ["BEGINS", "FIRST_TEXTS", "MAX_TEXTS", "NO_STAMP", "SPAN", "Span", "Tracing", "clock"]

clock = time.perf_counter_ns
"""Monotonic, in nanoseconds; on Linux and macOS the same for all processes of a host."""

Span = tuple[str, str, str, int, int, int, int, int, int, int]
"""(kind, name, peer, begin_ns, end_ns, task, epoch, attempt, term, bytes)."""
SPAN = struct.Struct("<3H7q")
"""The same as it is kept, and travels; the three texts are numbers."""
FIRST_TEXTS = ("", "...")
"""The first numbers. The second stands for what is one text too many."""
MAX_TEXTS = 1 << 16
"""Texts one trace may tell: an event's text is one, so they are not few."""

_ROOM = 1 << 17
"""Spans that wait to be fetched: 8 MB, seconds of the fastest job."""
_TOLD_AT = 1 << 13
"""So many wait: whoever fetches them is woken, long before room runs out."""
_LOOK_S = 0.2
BEGINS = "begins"
"""The kind of a moment, not shown: an epoch begins that others of its task may be in flight with. Spans come in the
order they end, and so would not tell."""
NO_STAMP = (0, -1)
"""Of what belongs to no epoch."""

_pack = SPAN.pack


class _Texts(dict[int | str, int]):
    """Text -> number: `texts[text]` gives it one where it has none. A number stands for that task."""

    def __init__(self) -> None:
        super().__init__((text, number) for number, text in enumerate(FIRST_TEXTS))
        self.new: list[str] = []
        """Those that were not told yet, in the order of their numbers."""

    def __missing__(self, text: int | str) -> int:
        number = len(self)
        if number >= MAX_TEXTS:
            return self["..."]
        self[text] = number
        self.new.append(text if isinstance(text, str) else f"task {text}")
        return number


class Tracing:
    """One node's spans. Lives on the event loop.

    Attributes:
        on: whether somebody traces; asked before anything is done for it.
    """

    __slots__ = ("_every", "_look_again", "_lost", "_room", "_spans", "_stop_events", "_texts", "_wake", "on")

    def __init__(self, room: int = _ROOM) -> None:
        self.on = False
        self._room = room
        self._every = 1
        self._spans = io.BytesIO()
        self._texts = _Texts()
        self._lost = 0
        self._wake: asyncio.Event | None = None
        self._look_again: asyncio.TimerHandle | None = None
        self._stop_events: Callable[[], None] | None = None

    def start(self, events: EventLog | None = None, every: int = 1) -> None:
        """Begins.

        Args:
            events: what is told here from now on is a moment each.
            every: of the epochs, those that this divides.

        Raises:
            TaskGraphError: somebody traces already.
        """
        if self.on:
            raise TaskGraphError("somebody else traces this node at the moment")
        self._spans, self._texts, self._lost, self._wake = io.BytesIO(), _Texts(), 0, asyncio.Event()
        self._every = every
        if events is not None:
            self._stop_events = events.listen(self._told)
        self.on = True
        self._look()

    def stop(self) -> None:
        """Ends; what was not fetched is dropped."""
        self.on = False
        self._spans, self._texts = io.BytesIO(), _Texts()
        if self._look_again is not None:
            self._look_again.cancel()
            self._look_again = None
        if self._stop_events is not None:
            self._stop_events()
            self._stop_events = None

    def takes(self, epoch: int) -> bool:
        """Whether it is one of those that are traced; so is what belongs to no epoch, which is -1."""
        return epoch % self._every == 0 or epoch < 0

    def began(self, stamp: Stamp | None, *, boundary: bool = False) -> int:
        """What `clock()` says; 0 where what begins now belongs to an epoch that is left out.

        Args:
            boundary: the stamp is that of a boundary, which belongs to the epoch before.
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
        """Takes a span, or a moment, which ends when it begins.

        Args:
            kind: what it is, e.g. "pull".
            name: which of its kind, e.g. the tag.
            peer: the other side: a task's number, or a node's name; "": none.
            began: what `clock()` said then.
            task: -1: none.
            stamp: (attempt, epoch).
            size: bytes; -1: it moves none.
        """
        if self.on:  # else it ended since that began
            texts = self._texts
            self._spans.write(
                _pack(texts[kind], texts[name], texts[peer], began, ended, task, stamp[1], stamp[0], term, size)
            )

    def add(self, kind: str, began: int, task: int, stamp: Stamp | None, term: int = 0, name: str = "") -> None:
        """`keep`, of what ends now."""
        self.keep(kind, name, "", began, clock(), task, stamp or NO_STAMP, term, -1)

    def _told(self, event: Event) -> None:
        if event.kind == "commit":
            return  # of every epoch, and a span of the leader tells it
        now = clock()
        task = event.task if event.task is not None else -1
        stamp = (event.attempt or 0, event.epoch if event.epoch is not None else -1)
        self.keep("event", event.kind, event.text, now, now, task, stamp, event.term or 0, -1)

    def _look(self) -> None:
        assert self._wake is not None
        self._trim()
        if self._spans.tell() >= _TOLD_AT * SPAN.size:
            self._wake.set()
        self._look_again = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _trim(self) -> None:
        """What is too much goes, the newest first."""
        if (more := self._spans.tell() // SPAN.size - self._room) > 0:
            self._spans.seek(self._room * SPAN.size)
            self._lost += more

    async def filled(self) -> None:
        """Returns when so many spans wait that they should be fetched."""
        assert self._wake is not None
        await self._wake.wait()

    def fetch(self) -> tuple[bytes, list[str], int]:
        """What was kept since it was asked last, as (spans, new texts, how many spans were left out).

        Spans are in the order they ended, each as `SPAN` packs it.
        """
        self._trim()
        buffer, texts, lost = self._spans, self._texts.new, self._lost
        size = buffer.tell()
        buffer.seek(0)
        spans = buffer.read(size)
        buffer.seek(0)  # its memory takes the next ones
        self._texts.new, self._lost = [], 0
        if self._wake is not None:
            self._wake.clear()
        return spans, texts, lost
