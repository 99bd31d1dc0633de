"""A trace as a file that Perfetto and chrome://tracing open: Chrome's trace-event format, written span by span.

A process of the file is a node. The tracks of a task graph's node are its tasks, and beside each task its pulls, its
reports, its offers to backups and the boundaries that a backup holds; then the leader's writes and the node's events. A
worker of an elastic job has a track for its user code, and others for messages, views, copies of the state and
checkpoints. Viewers draw spans of one track within each other, so spans that overlap without nesting, and epochs that
are in flight together, get another track of the same name. Arrows lead from the put of an item to the end of its pull.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import xxhash

from taskgraph.observe.trace import Span

__all__ = ["TraceFile"]

_HOOKS = frozenset(
    [
        *("task builder", "setup", "compose", "snapshot", "restore"),
        *("on_flag", "on_commit", "on_event", "result", "teardown"),
    ]
)
_LEADER = ("commit", "commit refused", "restart", "restart refused")
_BESIDE = {
    "pull": "pulls",
    "pull, given up": "pulls",
    "done": "reports",
    "idle": "reports",
    "offer": "offers to backups",
    "held by backups": "offers to backups",
    "hold": "held for its primary",
}
"""Kinds of spans that have a track of their own beside their task's, on which no span is drawn within another."""
_WORKER = {
    **dict.fromkeys(("step", "part", "add", "wait for", "total", "loop"), "user code"),
    "send": "messages",
    "view": "views",
    "copy": "copies of the state",
    "checkpoint": "checkpoints",
}
"""Kinds of spans of a worker of an elastic job, and their tracks. The name of such a span is its label."""
_COMMON = ("events", "leader", *dict.fromkeys(_WORKER.values()))
_ORDER = ("", *dict.fromkeys(_BESIDE.values()))
_LOOK_BACK = 16
"""The number of last spans of a row that a new one is compared with: earlier spans ended long ago."""
_ROWS = 500
"""The most rows of one track that are placed next to each other; further rows come last."""
_FIRST_SPARE = 1 << 30

Track = tuple[str, int, str]
"""("task" | one of `_COMMON`, task, which of the task's tracks)."""


class TraceFile:
    """Writes one trace. Call `node` for each node, then `close`.

    Args:
        epochs: (first, until): spans of epochs before `first`, and of `until` and later ones, are left out.
        zero_ns: our clock at the trace's time 0.
    """

    def __init__(self, file: BinaryIO, epochs: tuple[int, int], zero_ns: int) -> None:
        self._file = file
        self._first, self._until = epochs
        self._zero_ns = zero_ns
        self._nodes = 0
        self._between = b"\n"
        self.last = -1
        """The last epoch that a commit was written of, or the last step that a worker has ended."""
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')

    def node(self, name: str, labels: str, ahead_ns: int, spans: Iterable[Span]) -> int:
        """Writes the spans of one node, whose clock is `ahead_ns` ahead of ours; returns how many it wrote."""
        self._nodes += 1
        pid, tracks, written = self._nodes, _Tracks(), 0
        self._put_meta(pid, 0, "process_name", name=name)
        self._put_meta(pid, 0, "process_labels", labels=labels)
        self._put_meta(pid, 0, "process_sort_index", sort_index=pid)
        for span, tid in tracks.place(s for s in spans if s[6] < 0 or self._first <= s[6] < self._until):
            self._put_span(pid, tid, span, self._zero_ns + ahead_ns)
            written += 1
        for tid, track in tracks.names():
            self._put_meta(pid, tid, "thread_name", name=track)
            self._put_meta(pid, tid, "thread_sort_index", sort_index=tid)
        return written

    def close(self, about: Mapping[str, Any]) -> None:
        """Ends the file with a description of the trace."""
        self._file.write(b'\n],"otherData":' + json.dumps(about).encode() + b"}\n")

    def _put(self, event: dict[str, Any]) -> None:
        """Writes one event of the file's format."""
        self._file.write(self._between + json.dumps(event, separators=(",", ":")).encode())
        self._between = b",\n"

    def _put_meta(self, pid: int, tid: int, what: str, **args: Any) -> None:
        """Writes a property of a node (its process in the file) or of a row, such as its name."""
        self._put({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args})

    def _put_span(self, pid: int, tid: int, span: Span, zero_ns: int) -> None:
        """Writes a span, or an instant for an event. A put begins the arrow of its item, and a pull ends it."""
        kind, name, peer, begin, end, task, epoch, *_ = span
        begin, end = begin - zero_ns, end - zero_ns
        label, category = _label(kind, name)
        event = {"pid": pid, "tid": tid, "ts": begin / 1000, "name": label, "cat": category}
        if kind == "event":
            self._put(event | {"ph": "i", "s": "p", "args": _arguments(category, span)})
            return
        self._put(event | {"ph": "X", "dur": max(0, end - begin) / 1000, "args": _arguments(category, span)})
        if kind in ("commit", "step"):
            self.last = max(self.last, epoch)
        arrow = event | {"name": "item", "cat": "item"}
        if kind == "put":
            self._put(arrow | {"ph": "s", "id": _item_id(span, task, peer)})
        elif kind == "pull":  # ends one nanosecond early: viewers bind an arrow to a span that still goes on
            at = max(begin, end - 1) / 1000
            self._put(arrow | {"ph": "f", "bp": "e", "id": _item_id(span, peer, task), "ts": at})


class _Tracks:
    """Finds a row for each span of one node. Spans come in the order they ended: the span of an epoch comes last.

    A span of a task waits for the end of its epoch. The epoch then takes the first slot of the task that was free
    when it began, and all its spans go there, apart from those of epochs in flight beside it.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[Track, int], list[_Row]] = {}
        self._count: dict[Track, int] = {}
        self._spare = _FIRST_SPARE
        self._waiting: dict[tuple[int, int, int], list[Span]] = {}
        self._slots: dict[int, list[int]] = {}  # task -> when the last epoch of each slot ended
        self._last_ended: dict[int, tuple[int, int]] = {}  # task -> the last (attempt, epoch) that ended

    def place(self, spans: Iterable[Span]) -> Iterator[tuple[Span, int]]:
        """Yields each span with the number of its row."""
        for span in spans:
            kind, (task, epoch, attempt) = span[0], span[5:8]
            track = _track(kind, task)
            if track[0] != "task" or track[2] or epoch < 0 or (attempt, epoch) <= self._last_ended.get(task, (-1, -1)):
                yield span, self._take_row(track, 0, span)
            elif kind != "epoch":
                self._waiting.setdefault((task, attempt, epoch), []).append(span)
            else:
                slot = self._take_slot(task, span)
                self._last_ended[task] = (attempt, epoch)
                for each in (*self._waiting.pop((task, attempt, epoch), ()), span):
                    yield each, self._take_row(track, slot, each)
        for left in self._waiting.values():
            for each in left:
                yield each, self._take_row(("task", each[5], ""), 0, each)

    def names(self) -> Iterator[tuple[int, str]]:
        """Yields (number, name) of every row."""
        for ((what, task, which), _), rows in self._rows.items():
            name = (f"task {task}" + (f": {which}" if which else "")) if what == "task" else what
            for row in rows:
                yield row.tid, name if row.part == 0 else f"{name} ({row.part + 1})"

    def _take_slot(self, task: int, span: Span) -> int:
        """Occupies the first slot of a task that was free when this span of an epoch began; returns its number."""
        begin, end = span[3:5]
        ends = self._slots.setdefault(task, [])
        slot = next((number for number, last in enumerate(ends) if last <= begin), len(ends))
        ends[slot : slot + 1] = [end]
        return slot

    def _take_row(self, track: Track, slot: int, span: Span) -> int:
        """Puts a span into the first row of a track and slot that has room, or into a new row; returns its number."""
        begin, end = span[3:5]
        flat = track[0] in ("leader", "messages") or track[2] != ""
        rows = self._rows.setdefault((track, slot), [])
        for row in rows:
            if row.take_if_fits(begin, end, flat=flat):
                return row.tid
        rows.append(row := _Row(*self._new_row_number(track)))
        row.take_if_fits(begin, end, flat=flat)
        return row.tid

    def _new_row_number(self, track: Track) -> tuple[int, int]:
        """Numbers a new row of a track: returns (its tid, how many rows the track had). Viewers sort rows by tid."""
        what, task, which = track
        part = self._count[track] = self._count.get(track, -1) + 1
        if part >= _ROWS:
            self._spare += 1
            return self._spare, part
        if what != "task":
            return 1_000_000 + _COMMON.index(what) * _ROWS + part, part
        return 2_000_000 + ((task + 1) * len(_ORDER) + _ORDER.index(which)) * _ROWS + part, part


class _Row:
    """One line of the viewer, whose spans nest or do not touch."""

    def __init__(self, tid: int, part: int) -> None:
        self.tid = tid
        self.part = part
        self._last: deque[tuple[int, int]] = deque(maxlen=_LOOK_BACK)

    def take_if_fits(self, begin: int, end: int, *, flat: bool) -> bool:
        """Adds a span if it fits. Returns False if it does not.

        Args:
            flat: no span may be within another.
        """
        for other_begin, other_end in self._last:
            apart = end <= other_begin or other_end <= begin
            within = begin <= other_begin and other_end <= end
            around = other_begin <= begin and end <= other_end
            if not apart and (flat or not (within or around)):
                return False
        while self._last and begin <= self._last[-1][0] and self._last[-1][1] <= end:
            self._last.pop()  # the new span stands for those within it
        self._last.append((begin, end))
        return True


def _track(kind: str, task: int) -> Track:
    """Returns the track of a span."""
    if kind == "event":
        return ("events", -1, "")
    if kind in _WORKER:
        return (_WORKER[kind], -1, "")
    return ("leader", -1, "") if kind in _LEADER else ("task", task, _BESIDE.get(kind, ""))


def _label(kind: str, name: str) -> tuple[str, str]:
    """Returns (text, category) of a span."""
    if kind == "event" or kind in _WORKER:
        return name, kind
    match kind:
        case "code":
            return name, "hook" if name in _HOOKS else "handler" if name.startswith("handler ") else "processor"
        case "put" | "pull":
            return f"{kind} {name}", kind
        case "pull, given up":
            return f"pull {name}, given up", "pull"
        case "wait":
            return f"waits for {name}'s items", kind
        case "turn":
            return f"{name} waits for its turn", "wait"
    return kind, kind.removesuffix(" refused")


def _arguments(category: str, span: Span) -> dict[str, Any]:
    """Returns the details that a viewer shows of a span: those that its kind has."""
    kind, name, peer, _, _, task, epoch, attempt, term, size = span
    args: dict[str, Any] = {}
    if kind in _WORKER and epoch >= 0:
        args |= {"step": epoch, "view": attempt}
    elif epoch >= 0:
        args |= {"epoch": epoch, "attempt": attempt}
    if task >= 0:
        args["task"] = task
    if term:
        args["from_term" if category == "pull" else "term"] = term
    if kind == "event":
        return args | {"text": peer}
    if name and category in ("pull", "put"):
        args["tag"] = name
    elif name and kind in _LEADER:
        args["why"] = name
    if peer != "":
        args["from" if category in ("pull", "hold") else "to"] = f"task {peer}" if isinstance(peer, int) else peer
    if size >= 0:
        args["bytes"] = size
    return args


def _item_id(span: Span, producer: int | str, consumer: int | str) -> str:
    """Returns the id of an item, which its put and its pull share."""
    epoch, attempt, term = span[6:9]
    return xxhash.xxh3_64_hexdigest(f"{epoch}/{attempt}/{term}/{producer}/{consumer}/{span[1]}".encode())
