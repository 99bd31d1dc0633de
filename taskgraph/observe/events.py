"""Events: what happened to a job, for the log, for `taskgraph events`, and for followers.

Durable events (a takeover, an eviction, a restart, a failure) are few and are kept in etcd, so that they outlive the
node that emitted them. Transient events (a commit) are many, and reach only present listeners.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, fields
from operator import attrgetter

from taskgraph.coordination.api import Coordinator, Listing
from taskgraph.errors import CoordinationError, DecodeError
from taskgraph.observe.format import ids_text
from taskgraph.protocol.frozen import frozen
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Compare, Delete, KeyValue, Put, Txn
from taskgraph.protocol.numbers import Numbers

__all__ = [
    "MERGED_KINDS",
    "Event",
    "EventLog",
    "guarded_listener",
    "keep_events",
    "merge_alike",
    "put_events",
    "readable_events",
    "sort_by_revision",
    "task_ids",
]

log = logging.getLogger("taskgraph.events")

_RING = 4096
"""Events a node remembers; older ones are only in etcd."""
_RING_FIELDS = 1 << 18
"""The most fields of these events in total: a commit has all numbers that tasks reported, 8 bytes each."""
_BATCH = 32
"""Durable events written in one transaction: below etcd's 128 operations."""
_GATHER_S = 0.1
"""How long events wait to be written together: they come in bursts, and each write wakes every node's watch."""
MERGED_KINDS = {"takeover": "from", "hand-over": "from", "evicted": "of", "admitted": "of"}
"""Kind -> its field with the other node. A failure causes an event of these kinds for each task; `merge_alike` merges
them, so that etcd keeps one event for each kind, node and burst."""
_MAX_IDS_LENGTH = 60
"""The most characters of task ids in a text; `fields` has all ids."""
_GATHER_TASKS_S = 0.5
"""How long events of `MERGED_KINDS` wait for more of them."""
_RETRY_S = 0.5
_WARN_AGAIN_S = 10.0
_MAX_TEXT = 4000
_FLUSH_S = 1.0


@frozen
class Event:
    """One entry of the job's history.

    Attributes:
        at: unix time, seconds.
        node: name of the node that emitted it.
        kind: e.g. "takeover", "evicted", "restart", "commit".
        transient: the event is not kept in etcd.
        fields: numbers and names beside the text; for a commit, the numbers that tasks reported.
    """

    at: float
    node: str
    kind: str
    text: str
    task: int | None = None
    epoch: int | None = None
    attempt: int | None = None
    term: int | None = None
    transient: bool = False
    fields: Mapping[str, str | int | float] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return self.to_json().encode()

    def to_json(self) -> str:
        plain = dict(zip(_FIELDS, _values(self), strict=True))
        if type(self.fields) is Numbers:
            plain["fields"] = self.fields.plain()
        return _encode(plain)

    @classmethod
    def from_bytes(cls, data: bytes) -> Event:
        try:
            return cls.from_json(data.decode())
        except UnicodeDecodeError as error:
            raise DecodeError(f"not an event: {data[:200]!r} ({error})") from error

    @classmethod
    def from_json(cls, text: str) -> Event:
        """Reads an event; ignores fields that only a later version knows. Raises DecodeError."""
        try:
            raw = _decode(text)
            return cls(**{name: raw[name] for name in _FIELDS if name in raw})
        except (ValueError, TypeError) as error:
            raise DecodeError(f"not an event: {text[:200]!r} ({error})") from error


_FIELDS = tuple(each.name for each in fields(Event))
_values = attrgetter(*_FIELDS)
# Not `json.dumps` and `json.loads`: they make an encoder each time, and guess encodings; every commit is an event.
_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().decode


def readable_events(kept: Iterable[bytes]) -> Iterator[Event]:
    """Yields the events that these values encode, and skips values that are damaged."""
    for value in kept:
        try:
            yield Event.from_bytes(value)
        except DecodeError as error:
            log.warning("%s", error)


def task_ids(event: Event) -> list[int]:
    """Returns the tasks that an event is about: several after `merge_alike` merged events."""
    if event.task is not None:
        return [event.task]
    ranges = (part.partition("-") for part in str(event.fields.get("tasks", "")).split())
    return [task for first, _, last in ranges for task in range(int(first), int(last or first) + 1)]


def merge_alike(events: Iterable[tuple[str, Event]]) -> list[tuple[str, Event]]:
    """Merges events that differ only in the task, of `MERGED_KINDS`, into one with the key and place of the first."""
    groups: dict[object, list[tuple[str, Event]]] = {}
    for key, event in events:
        alike = event.task is not None and event.kind in MERGED_KINDS
        group = (event.kind, event.node, event.fields.get(MERGED_KINDS[event.kind])) if alike else key
        groups.setdefault(group, []).append((key, event))
    return [(group[0][0], _merge([event for _, event in group])) for group in groups.values()]


def _merge(events: list[Event]) -> Event:
    """Returns one event for events that differ only in the task."""
    first, last = events[0], events[-1]
    if len(events) == 1:
        return first
    texts = {event.text.removeprefix(f"task {event.task}: ") for event in events}
    text = texts.pop() if len(texts) == 1 else texts.pop().rpartition(" (")[0]  # without the part that differs
    tasks = ids_text(sorted(event.task for event in events if event.task is not None))
    fields = {**first.fields, "count": len(events), "tasks": tasks, "until": max(event.at for event in events)}
    whole = f"tasks {tasks}: {text}" if len(tasks) <= _MAX_IDS_LENGTH else f"{len(events)} tasks: {text}"
    return Event(first.at, first.node, first.kind, whole, epoch=last.epoch, attempt=last.attempt, fields=fields)


def guarded_listener(listener: Callable[[Event], None]) -> Callable[[Event], None]:
    """Wraps a user's listener. If it raises, the wrapper logs the error and passes it no further events."""
    failed = False

    def pass_on(event: Event) -> None:
        nonlocal failed
        if failed:
            return
        try:
            listener(event)
        except Exception:
            failed = True
            log.exception("a listener of events raised, and gets no further events; the job goes on")

    return pass_on


class EventLog:
    """One node's events. `emit` never raises and never waits."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._ring: deque[Event] = deque()
        self._ring_fields = 0
        self._listeners: list[Callable[[Event], None]] = []
        self._durable_listeners: list[Callable[[Event], None]] = []
        self._writers: list[_EventWriter] = []

    def emit(
        self,
        kind: str,
        text: str,
        *,
        task: int | None = None,
        epoch: int | None = None,
        attempt: int | None = None,
        term: int | None = None,
        transient: bool = False,
        fields: Mapping[str, str | int | float] | None = None,
    ) -> None:
        """Sends an event to the log and to all listeners; a transient one only to listeners that take such events."""
        text = text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " ..."
        beside = fields if type(fields) is Numbers else dict(fields or {})
        event = Event(time.time(), self._node, kind, text, task, epoch, attempt, term, transient, beside)
        ring = self._ring
        ring.append(event)
        self._ring_fields += len(event.fields)
        while len(ring) > _RING or (self._ring_fields > _RING_FIELDS and len(ring) > 1):
            self._ring_fields -= len(ring.popleft().fields)
        if not transient:
            log.info("%s: %s", kind, text)
            for listener in tuple(self._durable_listeners):
                listener(event)
        elif log.isEnabledFor(logging.DEBUG):
            log.debug("%s: %s", kind, text)
        for listener in tuple(self._listeners):
            listener(event)

    def listen(self, listener: Callable[[Event], None], *, transient: bool = True) -> Callable[[], None]:
        """Calls `listener`, which must not raise or wait, with later events. Returns a function that ends this.

        Args:
            transient: also with transient events, of which every epoch has one.
        """
        listeners = self._listeners if transient else self._durable_listeners
        listeners.append(listener)
        return lambda: listeners.remove(listener) if listener in listeners else None

    def recent(self) -> list[Event]:
        """Returns the events that this node remembers, oldest first."""
        return list(self._ring)

    @contextlib.contextmanager
    def writing(self, writer: _EventWriter) -> Iterator[None]:
        """Queues durable events in `writer` while the block runs. Meanwhile `wait_until_kept` waits for this writer."""
        stop = self.listen(writer.queue, transient=False)
        self._writers.append(writer)
        try:
            yield
        finally:
            self._writers.remove(writer)
            stop()

    async def wait_until_kept(self) -> None:
        """Returns once all durable events so far are in etcd, or after a second.

        The collector of a job's results reads its events next: a job may be over before a burst is gathered.
        """
        try:
            async with asyncio.timeout(_FLUSH_S):
                for writer in tuple(self._writers):
                    await writer.wait_until_written()
        except TimeoutError:
            log.warning("some events are not kept yet: etcd is away, or slow")


def put_events(keys: Keys, spec_revision: int, events: Iterable[tuple[str, Event]]) -> Txn:
    """Makes, but does not run, the transaction that writes events if the spec of their run is still in etcd.

    Another run may have the job's name by now; or etcd lost the job, and nothing would ever delete its events.
    """
    as_read = (Compare(keys.spec, spec_revision),)
    return Txn(as_read, tuple(Put(key, event.to_bytes()) for key, event in events))


class _EventWriter:
    """Writes durable events into etcd, burst by burst."""

    def __init__(self, keys: Keys, spec_revision: int, node_id: str) -> None:
        self.waiting: deque[tuple[str, Event]] = deque()
        self.due: deque[tuple[str, Event]] = deque()  # of a burst that is over
        self._left_out = 0
        self._warned_at = -_WARN_AGAIN_S
        self._keys = keys
        self._spec_revision = spec_revision
        self._node_id = node_id
        self._numbers = itertools.count()
        self._has_events = asyncio.Event()
        self._all_written = asyncio.Event()
        self._write_now = asyncio.Event()
        self._all_written.set()

    def queue(self, event: Event) -> None:
        """Queues a durable event for etcd; ignores a transient one. If the queue is full, drops the oldest event."""
        if not event.transient:
            if len(self.waiting) >= _RING:
                self.waiting.popleft()
                self._left_out += 1
            key = self._keys.event(f"{event.at:017.6f}-{self._node_id}-{next(self._numbers)}")
            self.waiting.append((key, event))
            self._has_events.set()
            self._all_written.clear()

    async def wait_for_burst(self) -> None:
        """Waits for events and for the rest of their burst, then makes them `due`."""
        await self._has_events.wait()
        await self._wait_for_more(_GATHER_S)
        if any(event.kind in MERGED_KINDS for _, event in self.waiting):
            await self._wait_for_more(_GATHER_TASKS_S - _GATHER_S)
        self.end_burst()

    def end_burst(self) -> None:
        """Makes the waiting events `due`, after `merge_alike` merged them."""
        self.due.extend(merge_alike(self.waiting))
        self.waiting.clear()

    async def _wait_for_more(self, within_s: float) -> None:
        """Waits for this time, or until the events are to be written now."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._write_now.wait()

    async def write_some(self, coordinator: Coordinator) -> int:
        """Writes the oldest due events; returns how many were written.

        If etcd does not answer, keeps them due, and waits a moment. Drops them if their run no longer exists.
        """
        batch = [self.due.popleft() for _ in range(min(_BATCH, len(self.due)))]
        try:
            result = await coordinator.txn(put_events(self._keys, self._spec_revision, batch))
        except BaseException as error:  # perhaps they were written: keys are unique, so that writing again is harmless
            self.due.extendleft(reversed(batch))
            if not isinstance(error, CoordinationError):
                raise
            if coordinator.now() - self._warned_at >= _WARN_AGAIN_S:
                self._warned_at = coordinator.now()
                log.warning("events wait for etcd: %s", error)
            await asyncio.sleep(_RETRY_S)
            return 0
        if self._left_out:
            log.warning("%d events were left out: etcd was away for too long", self._left_out)
            self._left_out = 0
        return len(batch) if result.succeeded else 0

    def on_burst_written(self) -> None:
        """Called when all due events are written: ends the waits in `wait_until_written`, unless more are queued."""
        if self.waiting:
            return
        self._has_events.clear()
        self._write_now.clear()
        self._all_written.set()

    async def wait_until_written(self) -> None:
        """Ends the burst now; returns when all events are in etcd."""
        if self.waiting or self.due:
            self._write_now.set()
        await self._all_written.wait()


async def keep_events(
    events: EventLog, coordinator: Coordinator, job: str, *, spec_revision: int, node_id: str, kept: int
) -> None:
    """Writes durable events, also earlier ones, into etcd until cancelled, and prunes all but the last `kept`.

    When cancelled it writes the rest, for a second at most.

    Args:
        spec_revision: the revision of the run's `spec`.
    """
    keys = Keys(job)
    writer = _EventWriter(keys, spec_revision, node_id)
    for event in events.recent():
        writer.queue(event)
    with events.writing(writer):
        try:
            written = 0
            while True:
                await writer.wait_for_burst()
                while writer.due:
                    written += await writer.write_some(coordinator)
                writer.on_burst_written()
                if written >= _BATCH:
                    written = 0
                    await _prune(coordinator, keys, kept)
        finally:
            try:
                writer.end_burst()
                async with asyncio.timeout(_FLUSH_S):
                    while writer.due:
                        await writer.write_some(coordinator)
            except TimeoutError:
                log.warning("%d events could not be kept", len(writer.due))


def sort_by_revision(listing: Listing) -> list[KeyValue]:
    """Sorts kept events in the order in which they were written. Their times are by the clocks of several hosts."""
    return sorted(listing.items, key=attrgetter("create_revision"))  # those of one write stay ordered by key


async def _prune(coordinator: Coordinator, keys: Keys, kept: int) -> None:
    """Deletes the oldest events of a job in etcd, so that `kept` are left."""
    try:
        listing = await coordinator.list(keys.events)
        there = sort_by_revision(listing)
        old = there[: max(0, len(there) - kept)]
        for start in range(0, len(old), _BATCH):
            part = old[start : start + _BATCH]
            await coordinator.txn(Txn(success=tuple(Delete(kv.key) for kv in part)))
    except CoordinationError as error:
        log.warning("old events were not pruned: %s", error)
