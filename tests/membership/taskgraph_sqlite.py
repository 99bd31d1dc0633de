"""A coordinator in an SQLite file, for the processes of one host: `--etcd sqlite:///absolute/path`.

It is installed as a package of others is, by the entry point in the directory beside this module. A thread of each
handle does what concerns the file, another one renews leases. Time is the host's monotonic clock, which all processes
share. Watches poll.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from urllib.parse import urlsplit

from taskgraph.coordination.api import Listing, WatchBatch, WatchCompacted
from taskgraph.coordination.refusals import check_key, check_txn
from taskgraph.errors import CoordinationError, LeaseGone, OutcomeUnknown, Unavailable
from taskgraph.protocol.kv import Compare, Delete, Get, KeyEvent, KeyValue, Put, Txn, TxnResult

T = TypeVar("T")

_TIMEOUT_S = 10.0
_POLL_S = 0.01
_MIN_TTL_S = 2.0
_EXPIRY_SLACK_S = 0.1
_RENEWALS_PER_TTL = 5

_SCHEMA = """
create table if not exists store (revision integer, compacted integer, dropped integer);
create table if not exists keys (name text primary key, value blob, created integer, modified integer, lease integer);
create table if not exists history (
    revision integer, place integer, kind text, name text, value blob, created integer, modified integer, lease integer,
    primary key (revision, place)
);
create table if not exists leases (id integer primary key autoincrement, ttl_s real, renewed_at real);
insert into store select 1, 0, 0 where not exists (select * from store);
"""


async def connect(url: str, **access: str) -> SqliteCoordinator:
    """Opens the file of `sqlite:///absolute/path`; makes it if it is missing."""
    _, host, path, *_ = urlsplit(url)
    if access or host or not path:
        raise CoordinationError(f"{url}: write sqlite:///absolute/path, without options to reach an etcd")
    coordinator = SqliteCoordinator(path)
    await coordinator.open()
    return coordinator


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Runs a block as one transaction that no other writer interrupts."""
    try:
        db.execute("begin immediate")
    except sqlite3.Error as error:
        raise Unavailable(f"the SQLite file cannot be locked: {error}") from error
    try:
        yield db
    except BaseException:
        db.execute("rollback")
        raise
    try:
        db.execute("commit")
    except sqlite3.Error as error:
        raise OutcomeUnknown(f"the SQLite file did not take a transaction: {error}") from error


def _open(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    db.execute("pragma journal_mode = wal")
    db.execute("pragma synchronous = off")  # a process may die; what the host loses, its nodes lose, too
    return db


def _select(db: sqlite3.Connection, key: str, prefix: bool) -> tuple[KeyValue, ...]:
    if not prefix:
        check_key(key)
    where, given = ("substr(name, 1, ?) = ?", (len(key), key)) if prefix else ("name = ?", (key,))
    found = db.execute(f"select name, value, created, modified, lease from keys where {where} order by name", given)
    return tuple(KeyValue(*row) for row in found)


def _revision(db: sqlite3.Connection) -> int:
    return int(db.execute("select revision from store").fetchone()[0])


def _delete(db: sqlite3.Connection, key: str, revision: int) -> KeyEvent:
    db.execute("delete from keys where name = ?", (key,))
    return KeyEvent("delete", KeyValue(key, b"", 0, revision))


def _put(db: sqlite3.Connection, op: Put, revision: int) -> KeyEvent:
    before = _select(db, op.key, False)
    created = before[0].create_revision if before else revision
    kv = KeyValue(op.key, bytes(op.value), created, revision, op.lease)
    row = (kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.lease)
    db.execute("insert or replace into keys values (?, ?, ?, ?, ?)", row)
    return KeyEvent("put", kv)


def _publish(db: sqlite3.Connection, events: list[KeyEvent]) -> None:
    """Makes changes the next revision."""
    if not events:
        return
    revision = _revision(db) + 1
    db.execute("update store set revision = ?", (revision,))
    for place, event in enumerate(events):
        kv = event.kv
        row = (revision, place, event.kind, kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.lease)
        db.execute("insert into history values (?, ?, ?, ?, ?, ?, ?, ?)", row)


def _revoke(db: sqlite3.Connection, lease: int) -> None:
    names = [row[0] for row in db.execute("select name from keys where lease = ? order by name", (lease,))]
    revision = _revision(db) + 1
    _publish(db, [_delete(db, name, revision) for name in names])
    db.execute("delete from leases where id = ?", (lease,))


def _expire(db: sqlite3.Connection) -> None:
    """Revokes leases that have ended."""
    at = time.monotonic() - _EXPIRY_SLACK_S
    for (lease,) in db.execute("select id from leases where renewed_at + ttl_s < ?", (at,)).fetchall():
        _revoke(db, lease)


def _holds(db: sqlite3.Connection, compare: Compare) -> bool:
    found = _select(db, compare.key, False)
    if not found:
        return compare.revision == 0
    return compare.revision == (found[0].mod_revision if compare.target == "mod" else found[0].create_revision)


def _execute(db: sqlite3.Connection, txn: Txn) -> TxnResult:
    succeeded = all(_holds(db, compare) for compare in txn.compares)
    events: list[KeyEvent] = []
    reads: list[tuple[KeyValue, ...]] = []
    revision = _revision(db) + 1
    for op in txn.success if succeeded else txn.failure:
        match op:
            case Put(lease=lease):
                if lease and not db.execute("select 1 from leases where id = ?", (lease,)).fetchone():
                    raise LeaseGone(f"put of {op.key!r}: the lease does not exist; take a new one")
                events.append(_put(db, op, revision))
            case Delete():
                events += [_delete(db, kv.key, revision) for kv in _select(db, op.key, op.prefix)]
            case Get():
                reads.append(_select(db, op.key, op.prefix))
    _publish(db, events)
    return TxnResult(succeeded, _revision(db), tuple(reads))


class SqliteCoordinator:
    """One process's handle on the file: implements `coordination.api.Coordinator`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, "sqlite")
        self._leases: list[SqliteLease] = []

    def now(self) -> float:
        return time.monotonic()

    async def open(self) -> None:
        def work() -> sqlite3.Connection:
            db = _open(self._path)
            db.executescript(f"begin immediate; {_SCHEMA} commit;")
            return db

        try:
            self._db = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            self._thread.shutdown(wait=False)
            raise Unavailable(f"{self._path} cannot be opened as an SQLite file: {error}") from error

    async def _run(self, work: Callable[[sqlite3.Connection], T], *, write: bool = True) -> T:
        """Does something with the file, in the thread; with `write`, as a transaction that revokes ended leases."""
        db = self._db
        if db is None:
            raise Unavailable("this handle on the SQLite file was closed")

        def in_thread() -> T:
            if not write:
                return work(db)
            with _transaction(db):
                _expire(db)
                return work(db)

        return await asyncio.get_running_loop().run_in_executor(self._thread, in_thread)

    async def get(self, key: str) -> KeyValue | None:
        found = await self._run(lambda db: _select(db, key, False))
        return found[0] if found else None

    async def list(self, prefix: str) -> Listing:
        return await self._run(lambda db: Listing(_revision(db), _select(db, prefix, True)))

    async def txn(self, txn: Txn) -> TxnResult:
        check_txn(txn)
        return await self._run(lambda db: _execute(db, txn))

    def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        if start_revision < 1:
            raise ValueError(f"a watch starts at a revision from 1 on, not {start_revision}")
        return self._watch(prefix, start_revision)

    async def _watch(self, prefix: str, start: int) -> AsyncGenerator[WatchBatch, None]:
        def poll(db: sqlite3.Connection) -> tuple[int, tuple[KeyEvent, ...]]:
            revision, compacted, dropped = db.execute("select * from store").fetchone()
            ended = "select 1 from leases where renewed_at + ttl_s < ?"
            if db.execute(ended, (time.monotonic() - _EXPIRY_SLACK_S,)).fetchone():
                with _transaction(db):
                    _expire(db)
            if start < (compacted if first else dropped):
                raise WatchCompacted(f"revision {start} was compacted away; list again")
            if revision < start:
                return revision, ()
            rows = db.execute(
                "select kind, name, value, created, modified, lease from history where revision between ? and ? "
                "and substr(name, 1, ?) = ? order by revision, place",
                (start, revision, len(prefix), prefix),
            )
            return revision, tuple(KeyEvent(kind, KeyValue(*kv)) for kind, *kv in rows)

        first = True
        while True:
            revision, events = await self._run(poll, write=False)
            first = False
            start = max(start, revision + 1)
            if events:
                yield WatchBatch(events[-1].kv.mod_revision, events)
            else:
                await asyncio.sleep(_POLL_S)

    async def lease(self, ttl_s: float, *, stall_limit_s: float) -> SqliteLease:
        granted_s, sent_at = max(_MIN_TTL_S, float(math.ceil(ttl_s))), time.monotonic()
        insert = "insert into leases (ttl_s, renewed_at) values (?, ?) returning id"
        found = await self._run(lambda db: db.execute(insert, (granted_s, sent_at)).fetchone())
        self._leases.append(SqliteLease(self, self._path, int(found[0]), granted_s, stall_limit_s, sent_at))
        return self._leases[-1]

    async def revoke(self, lease_id: int) -> None:
        await self._run(lambda db: _revoke(db, lease_id))

    async def lease_left(self, lease_id: int) -> int | None:
        select = "select renewed_at + ttl_s from leases where id = ?"
        found = await self._run(lambda db: db.execute(select, (lease_id,)).fetchone())
        return None if found is None else max(0, math.floor(found[0] - time.monotonic()))

    async def compact(self, revision: int) -> None:
        def work(db: sqlite3.Connection) -> None:  # watches that are open may lag: what they need goes the next time
            db.execute("update store set dropped = compacted, compacted = ?", (revision,))
            db.execute("delete from history where revision < (select dropped from store)")

        await self._run(work)

    async def close(self) -> None:
        db, self._db = self._db, None
        for lease in self._leases:
            await lease.close(revoke=False)
        if db is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, db.close)
            self._thread.shutdown()


class SqliteLease:
    """A lease that its own thread renews: implements `coordination.api.Lease`."""

    def __init__(
        self, owner: SqliteCoordinator, path: str, number: int, ttl_s: float, stall_limit_s: float, sent_at: float
    ) -> None:
        self.id = number
        self.ttl_s = ttl_s
        self._owner = owner
        self._path = path
        self._stall_limit_s = stall_limit_s
        self._sent_at = self._ticked_at = sent_at
        self._lost = False
        self._trouble = ""
        self._stop = threading.Event()
        self._renewer = threading.Thread(target=self._renew, name=f"lease {number}", daemon=True)
        self._renewer.start()

    def valid_until(self) -> float:
        return self._sent_at + self.ttl_s

    def lost(self) -> bool:
        return self._lost

    def trouble(self) -> str:
        return self._trouble

    def tick(self) -> None:
        self._ticked_at = time.monotonic()

    async def close(self, *, revoke: bool) -> None:
        self._stop.set()
        await asyncio.to_thread(self._renewer.join)
        if revoke:
            with contextlib.suppress(Unavailable):
                await self._owner.revoke(self.id)

    def _renew(self) -> None:
        with contextlib.closing(_open(self._path)) as db:
            while not self._stop.wait(self.ttl_s / _RENEWALS_PER_TTL) and not self._lost:
                now = time.monotonic()
                if now - self._ticked_at > self._stall_limit_s:
                    self._note_if_gone(db)
                    continue
                try:
                    with _transaction(db):
                        _expire(db)
                        update = "update leases set renewed_at = ? where id = ?"
                        self._lost = db.execute(update, (now, self.id)).rowcount == 0
                    self._trouble = ""
                    if not self._lost:
                        self._sent_at = now
                except CoordinationError as error:
                    self._trouble = str(error)

    def _note_if_gone(self, db: sqlite3.Connection) -> None:
        self._lost = db.execute("select 1 from leases where id = ?", (self.id,)).fetchone() is None
