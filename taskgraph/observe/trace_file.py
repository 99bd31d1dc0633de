"""A trace as a file that Perfetto and chrome://tracing open: Chrome's trace-event format, written span by span.

A process is a node. Its tracks are its tasks (what each does, one thing after another or within another), their pulls,
reports, offers and what is held for others, the leader's writes, and what the node told. What would overlap without
nesting goes to another track of the same name; so does what a task does in another epoch meanwhile. Arrows lead from
where an item was put to where its pull ended.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import xxhash

from taskgraph.observe.clocks import NodeClock
from taskgraph.observe.trace import BEGINS, Span

__all__ = ["TraceFile"]

_HOOKS = frozenset(
    (
        "task builder",
        "setup",
        "compose",
        "snapshot",
        "restore",
        "on_flag",
        "on_commit",
        "on_event",
        "result",
        "teardown",
    )
)
_LOOK_BACK = 16
"""Spans of a track that a new one is compared with: those before ended long ago."""
_TRACKS = {
    "pull": "pulls",
    "pull, given up": "pulls",
    "done": "reports",
    "idle": "reports",
    "offer": "offers to backups",
    "hold": "held for its primary",
}
_LEADER = ("commit", "commit refused", "restart", "restart refused")
_ORDER = ("", "pulls", "reports", "offers to backups", "held for its primary")


class TraceFile:
    """Writes one trace. Call `node` for each node, then `close`.

    Args:
        epochs: (first, until): what belongs to an epoch before `first`, or to `until` or later, is left out.
        base_ns: our clock where the trace's time begins.
    """

    def __init__(self, file: BinaryIO, epochs: tuple[int, int], base_ns: int) -> None:
        self._file = file
        self._first, self._until = epochs
        self._base_ns = base_ns
        self._any = False
        self._processes = 0
        self.written = 0
        """Spans."""
        self.ended = -1
        """The last epoch of which a commit was seen."""
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')

    def node(self, name: str, labels: str, clock: NodeClock, spans: Iterable[Span]) -> int:
        """One node's spans; returns how many were written."""
        self._processes += 1
        process = _Process(self._processes)
        self._put({"ph": "M", "pid": process.pid, "name": "process_name", "args": {"name": name}})
        self._put({"ph": "M", "pid": process.pid, "name": "process_labels", "args": {"labels": labels}})
        self._put({"ph": "M", "pid": process.pid, "name": "process_sort_index", "args": {"sort_index": process.pid}})
        before = self.written
        for span in spans:
            epoch = span[6]
            if epoch < 0 or self._first <= epoch < self._until:
                self._span(process, span, clock)
        for tid, track in process.tracks():
            self._put({"ph": "M", "pid": process.pid, "tid": tid, "name": "thread_name", "args": {"name": track}})
            place = {"sort_index": tid}
            self._put({"ph": "M", "pid": process.pid, "tid": tid, "name": "thread_sort_index", "args": place})
        return self.written - before

    def close(self, about: Mapping[str, Any]) -> None:
        """Ends the file with what is to be known of it."""
        self._file.write(b'\n],"otherData":' + json.dumps(about).encode() + b"}\n")

    def _put(self, event: dict[str, Any]) -> None:
        self._file.write((b",\n" if self._any else b"\n") + json.dumps(event, separators=(",", ":")).encode())
        self._any = True

    def _span(self, process: _Process, span: Span, clock: NodeClock) -> None:
        kind, name, peer, begin_ns, end_ns, task, epoch, attempt, term, size = span
        begin, end = clock.ours(begin_ns) - self._base_ns, clock.ours(end_ns) - self._base_ns
        if kind == "event":
            self._event(process, span, begin)
            return
        if kind == BEGINS:
            process.begins(_track("epoch", task), begin, (attempt, epoch))
            return
        text, category = _label(kind, str(name))
        args: dict[str, Any] = {}
        if epoch >= 0:
            args |= {"epoch": epoch, "attempt": attempt}
        if task >= 0:
            args["task"] = task
        if term:
            args["term" if category != "pull" else "from_term"] = term
        if name and category in ("pull", "put"):
            args["tag"] = name
        elif name and kind in _LEADER:
            args["why"] = name
        if peer:
            args[_PEERS.get(kind, "to")] = peer
        if size >= 0:
            args["bytes"] = size
        track = _track(kind, task)
        flat = kind in _TRACKS or kind in _LEADER
        tid = process.track(track, begin, end, flat=flat, of=(attempt, epoch) if epoch >= 0 and not flat else None)
        if kind == "epoch":
            process.over(track, (attempt, epoch))
        event = {"ph": "X", "pid": process.pid, "tid": tid, "ts": begin / 1000, "dur": (end - begin) / 1000}
        self._put(event | {"name": text, "cat": category, "args": args})
        self.written += 1
        if kind == "commit":
            self.ended = max(self.ended, epoch)
        if kind in ("put", "pull"):
            producer, consumer = (f"task {task}", peer) if kind == "put" else (peer, f"task {task}")
            number = xxhash.xxh3_64_hexdigest(f"{epoch}/{attempt}/{term}/{producer}/{consumer}/{name}".encode())
            flow = {"pid": process.pid, "tid": tid, "name": "item", "cat": "item", "id": number}
            if kind == "put":
                self._put(flow | {"ph": "s", "ts": begin / 1000})
            else:  # one nanosecond before its end: an arrow leads to what has not ended
                self._put(flow | {"ph": "f", "bp": "e", "ts": max(begin, end - 1) / 1000})

    def _event(self, process: _Process, span: Span, at: int) -> None:
        _, kind, text, _, _, task, epoch, attempt, term, _ = span
        if kind == "commit":
            return  # a span of the leader
        known = {"task": (task, -1), "epoch": (epoch, -1), "attempt": (attempt, 0), "term": (term, 0)}
        args = {"text": text, **{name: value for name, (value, none) in known.items() if value != none}}
        tid = process.track(("events", -1, ""), at, at, flat=False)
        event = {"ph": "i", "s": "p", "pid": process.pid, "tid": tid, "ts": at / 1000, "name": str(kind)}
        self._put(event | {"cat": "event", "args": args})
        self.written += 1


_PEERS = {"pull": "from", "pull, given up": "from", "hold": "from"}

Track = tuple[str, int, str]
"""(what, task, which of it)"""
Work = tuple[int, int]
"""(attempt, epoch)"""
_NOTHING: Work = (-1, -1)
_UNDER_WAY = 64
"""Epochs before the one that is over: one so far behind has lost its end."""


def _track(kind: str, task: int) -> Track:
    if kind in _LEADER:
        return ("leader", -1, "")
    return ("task", task, _TRACKS.get(kind, ""))


def _label(kind: str, name: str) -> tuple[str, str]:
    """What a span is called, and its category."""
    if kind == "code":
        category = "hook" if name in _HOOKS else "handler" if name.startswith("handler ") else "processor"
        return name, category
    if kind in ("pull", "pull, given up", "put"):
        return f"{kind.partition(',')[0]} {name}" + (", given up" if "," in kind else ""), kind.partition(",")[0]
    if kind == "wait":
        return f"waits for {name}'s items", "wait"
    if kind == "turn":
        return f"{name} waits for its turn", "wait"
    return kind, kind.removesuffix(" refused")


class _Process:
    """The tracks of one node, as spans come that need them. A track's parts share its name.

    Numbers are in the order in which tracks are to be seen, for viewers that go by them.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._rows: dict[Track, list[_Row]] = {}
        self._over: dict[Track, Work] = {}  # the last that is
        self._spare = _SPARE

    def track(self, track: Track, begin: int, end: int, *, flat: bool, of: Work | None = None) -> int:
        """The number of the first part of a track that has room for a span.

        Args:
            of: what it belongs to. While that is under way, which it is until `over`, its part is for nothing else:
                what is within its time would be drawn as if it were within it.
        """
        rows = self._rows.setdefault(track, [])
        its = next((row for row in rows if of is not None and row.of == of), None)
        if its is not None and its.takes(begin, end, flat=flat):
            return its.tid
        found = next((row for row in rows if row.of is None and row.takes(begin, end, flat=flat)), None)
        if found is None:
            tid = _number(track) + len(rows)
            if len(rows) >= _PARTS:
                self._spare = tid = self._spare + 1
            found = _Row(tid)
            rows.append(found)
            found.takes(begin, end, flat=flat)
        if its is None and of is not None and of > self._over.get(track, _NOTHING):
            found.of = of
        return found.tid

    def begins(self, track: Track, at: int, of: Work) -> None:
        """It is under way from now on: a part of the track is for nothing else until it is `over`."""
        rows = self._rows.setdefault(track, [])
        if not any(row.of == of for row in rows):
            self.track(track, at, at, flat=False, of=of)

    def over(self, track: Track, of: Work) -> None:
        """Nothing else of it is under way. What may come of it later is apart from it."""
        self._over[track] = max(self._over.get(track, _NOTHING), of)
        for row in self._rows[track]:
            if row.of is not None and (row.of == of or row.of < (of[0], of[1] - _UNDER_WAY)):
                row.of = None

    def tracks(self) -> Iterable[tuple[int, str]]:
        """(tid, name) of every part."""
        for (what, task, which), rows in self._rows.items():
            name = (f"task {task}" + (f": {which}" if which else "")) if what == "task" else what
            for number, row in enumerate(rows):
                yield row.tid, name if number == 0 else f"{name} ({number + 1})"


_PARTS = 500
"""Parts of a track that are next to each other; more come last."""
_SPARE = 1 << 30


def _number(track: Track) -> int:
    """Of a track's first part: events and the leader first, then task by task. None is that of a process."""
    what, task, which = track
    if what != "task":
        return 1_000_000 + ("events", "leader").index(what) * _PARTS
    return 2_000_000 + ((task + 1) * len(_ORDER) + _ORDER.index(which)) * _PARTS


class _Row:
    """Spans of it nest, or do not touch.

    Attributes:
        of: what is under way in it.
    """

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self.of: Work | None = None
        self._last: deque[tuple[int, int]] = deque(maxlen=_LOOK_BACK)

    def takes(self, begin: int, end: int, *, flat: bool) -> bool:
        for other_begin, other_end in self._last:
            if end <= other_begin or other_end <= begin:
                continue
            within = (begin <= other_begin and other_end <= end) or (other_begin <= begin and end <= other_end)
            if flat or not within:
                return False
        while self._last and begin <= self._last[-1][0] and self._last[-1][1] <= end:
            self._last.pop()  # within the new one, which stands for it
        self._last.append((begin, end))
        return True
