"""Implements `coordination.api.Coordinator` on a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from typing import Any

from taskgraph.coordination.api import AccessRefused, Listing, WatchBatch
from taskgraph.coordination.etcd import convert
from taskgraph.coordination.etcd import v3_pb2 as v3
from taskgraph.coordination.etcd.connection import Connection
from taskgraph.coordination.etcd.failures import PermissionRefused
from taskgraph.coordination.etcd.lease import EtcdLease
from taskgraph.coordination.etcd.methods import (
    COMPACT,
    LEASE_GRANT,
    LEASE_REVOKE,
    LEASE_TIME_TO_LIVE,
    MEMBER_LIST,
    RANGE,
    STATUS,
    TXN,
)
from taskgraph.coordination.etcd.options import EtcdOptions
from taskgraph.coordination.etcd.watch import check_not_lost, watch
from taskgraph.errors import CoordinationError, LeaseGone, Unavailable, no_thread_text
from taskgraph.protocol.kv import KeyValue, Txn, TxnResult

__all__ = ["EtcdCoordinator"]

log = logging.getLogger(__name__)

#: The limit of the first contact: a user waits this long for an error if nothing listens.
_FIRST_CONTACT_S = 5.0
#: The limit of the first login if etcd answers, since etcd may be busy with the logins of all nodes.
_FIRST_LOGIN_S = 150.0
#: Keys in a page of a listing: all keys of most jobs, some 100 kB, which a link of 20 kB/s carries within the timeout.
_PAGE_KEYS = 300
#: etcd's words for a revision that was compacted away, or lost.
_REVISION_GONE_TEXT = "required revision"
#: The limit of a revocation at the end. If it fails, the lease expires.
_REVOKE_S = 2.0
_KeyValues = list[v3.KeyValue]  # `list` is a method there

_START_ADVICE = "start one (`etcd`), or leave --etcd out: a run on this host brings its own"
_SHORT = {
    "Connection refused": "connection refused",
    "errors resolving": "no host has that name",
    "Failed parsing HTTP/2": "what answers is no etcd, or one that speaks TLS: https://HOST:PORT",
}
"""What gRPC says at length, in short."""


class EtcdCoordinator:
    """A coordinator on an etcd cluster, for one event loop. Create it by `connect`, end it by `close` or `async with`.

    Attributes:
        version: the version of the etcd member that answered first, e.g. "3.5.1".
    """

    def __init__(self, connection: Connection, version: str) -> None:
        self._connection = connection
        self._leases: set[EtcdLease] = set()
        self._known_revision = 0  # the last revision of a listing or a transaction
        self.version = version

    @classmethod
    async def connect(cls, endpoints: str | Sequence[str], **access: Any) -> EtcdCoordinator:
        """Connects, and checks by a linearizable read that a cluster with a leader answers.

        The first contact takes at most 5 s; logging in to an etcd that answers, up to 150 s.

        Args:
            endpoints, access: see `EtcdOptions.make`.

        Raises:
            Unavailable: no usable etcd answers. The message says what was tried and how to start one.
            CoordinationError: the arguments are wrong, or etcd refuses them.
        """
        options = EtcdOptions.make(endpoints, **access)
        connection = Connection(options)
        limit_s = min(options.timeout_s, _FIRST_CONTACT_S)
        first = partial(connection.call, STATUS, v3.StatusRequest(), what="first contact", again=True)
        try:
            login_s = limit_s
            if connection.login.needed:
                with contextlib.suppress(AccessRefused):  # a refusal is an answer
                    await first(timeout_s=limit_s, anonymous=True)
                login_s = _FIRST_LOGIN_S
            with _warn_of_slow_login(connection, limit_s):
                status = await first(timeout_s=login_s)
            probe = convert.range_request("/taskgraph/", prefix=False)
            with contextlib.suppress(PermissionRefused):  # the cluster answered; the user may read other keys
                await connection.call(RANGE, probe, what="first read", again=True, timeout_s=limit_s)
        except Unavailable as error:
            await connection.close()
            names = ", ".join(endpoint.target for endpoint in options.endpoints)
            why = str(error).removeprefix("first contact: ")
            why = next((short for sign, short in _SHORT.items() if sign in why), why)
            raise Unavailable(f"No etcd answers at {names} ({why}): {_START_ADVICE}") from error
        except BaseException:
            await connection.close()
            raise
        return cls(connection, status.version)

    async def __aenter__(self) -> EtcdCoordinator:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def now(self) -> float:
        """Returns `time.monotonic()`, the clock of `Lease.valid_until`."""
        return time.monotonic()

    async def get(self, key: str) -> KeyValue | None:
        """Reads a key, linearizably; None: it does not exist."""
        request = convert.range_request(key, prefix=False)
        answer = await self._connection.call(RANGE, request, what=f"get {key!r}", again=True)
        return convert.key_value(answer.kvs[0]) if answer.kvs else None

    async def list(self, prefix: str) -> Listing:
        """Reads all keys under `prefix` at one revision, linearizably.

        It reads pages: on a slow link, all keys of a large job in one call could exceed the timeout.

        Raises:
            Unavailable: etcd does not answer.
            DataLost: etcd lost writes that it had acknowledged.
            CoordinationError: etcd refuses the read.
        """
        known = self._known_revision
        revision, found = await self._list_pages(prefix)
        if revision < known:
            await check_not_lost(self._connection, prefix, known)
        self._known_revision = max(self._known_revision, revision)
        return Listing(revision, tuple(convert.key_value(kv) for kv in found))

    async def _list_pages(self, prefix: str) -> tuple[int, _KeyValues]:
        """Reads all keys under `prefix`, page by page, at the revision of the first page; returns (revision, keys)."""
        request, found = convert.range_request(prefix, prefix=True), _KeyValues()
        request.limit = _PAGE_KEYS
        while True:
            try:
                answer = await self._connection.call(RANGE, request, what=f"list {prefix!r}", again=True)
            except CoordinationError as error:
                if _REVISION_GONE_TEXT not in str(error):
                    raise
                raise Unavailable(f"{error}: its history was dropped during the listing") from error
            request.revision = request.revision or answer.header.revision
            found += answer.kvs
            if not answer.more:
                return request.revision, found
            request.key = answer.kvs[-1].key + b"\0"

    async def txn(self, txn: Txn) -> TxnResult:
        """Executes `txn` at one revision.

        Raises:
            Unavailable: nothing was done.
            OutcomeUnknown: the transaction may have been executed.
            LeaseGone: a put names a lease that does not exist; nothing was done.
            AccessRefused: the permission is missing, or the password changed; nothing was done.
            CoordinationError: etcd refuses the transaction (too large, a key written twice).
        """
        answer = await self._connection.call(
            TXN, convert.txn_request(txn), what=_TxnText(txn), again=not convert.has_writes(txn)
        )
        self._known_revision = max(self._known_revision, answer.header.revision)
        return convert.txn_result(answer)

    def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Yields the events under `prefix` from `start_revision` on, each once and in order (`watch`).

        While etcd does not answer, a watch waits for ever; other calls raise Unavailable after their time limit.
        """
        if start_revision < 1:
            raise ValueError(f"a watch starts at a revision from 1 on, not {start_revision}")
        return watch(self._connection, prefix, start_revision)

    async def lease(self, ttl_s: float, *, stall_limit_s: float) -> EtcdLease:
        """Grants a lease and starts renewing it. etcd's shortest TTL is 2 s.

        Raises:
            Unavailable: etcd does not answer.
            CoordinationError: etcd refuses the lease, or no thread for its renewal can be started.
        """
        sent_at = time.monotonic()
        # `again`: a lease that was granted twice has no keys, and expires.
        answer = await self._connection.call(
            LEASE_GRANT, v3.LeaseGrantRequest(ttl=math.ceil(ttl_s)), what="grant of a lease", again=True
        )
        if answer.error:
            raise CoordinationError(f"etcd refused a lease of {ttl_s:g} s: {answer.error}")
        lease = EtcdLease(
            self._connection.options,
            answer.id,
            ttl_s=float(answer.ttl),
            stall_limit_s=stall_limit_s,
            sent_at=sent_at,
            revoke=self._revoke_at_end,
            forget=self._leases.discard,
            endpoint=self._connection.endpoint,
            cluster=lambda: self._connection.cluster,
            login=self._connection.login,
        )
        try:
            lease.start()
        except RuntimeError as error:
            with contextlib.suppress(CoordinationError):  # the lease expires anyway
                await self._revoke_at_end(answer.id)
            raise CoordinationError(f"a lease cannot be renewed: {no_thread_text(error) or error}") from error
        self._leases.add(lease)
        return lease

    async def revoke(self, lease_id: int, *, timeout_s: float | None = None) -> None:
        """Revokes any lease, also of another client. A lease that does not exist is no error.

        `timeout_s`: the limit of all tries together; None: that of the options.
        """
        request = v3.LeaseRevokeRequest(id=lease_id)
        what = f"revocation of lease {lease_id:x}"
        with contextlib.suppress(LeaseGone):
            await self._connection.call(LEASE_REVOKE, request, what=what, again=True, timeout_s=timeout_s)

    async def lease_left(self, lease_id: int) -> int | None:
        """Returns the remaining seconds of any lease, rounded down; None if the lease is gone."""
        request = v3.LeaseTimeToLiveRequest(id=lease_id)
        answer = await self._connection.call(LEASE_TIME_TO_LIVE, request, what=f"TTL of lease {lease_id:x}", again=True)
        return answer.ttl if answer.ttl >= 0 else None  # negative: the lease does not exist, or ended over a second ago

    async def members(self) -> tuple[str, ...]:
        """Returns the names of the cluster's members, as set by etcd's `--name`."""
        request = v3.MemberListRequest()
        answer = await self._connection.call(MEMBER_LIST, request, what="list of members", again=True)
        return tuple(member.name for member in answer.members)

    async def compact(self, revision: int) -> None:
        """Drops the history up to `revision`, for all clients. For tests."""
        request = v3.CompactionRequest(revision=revision, physical=True)
        await self._connection.call(COMPACT, request, what=f"compaction at {revision}", again=False)

    async def close(self) -> None:
        """Ends every call, watch and renewal. Leases are not revoked."""
        for lease in tuple(self._leases):
            await lease.close(revoke=False)
        await self._connection.close()

    async def _revoke_at_end(self, lease_id: int) -> None:
        """Revokes a lease of this coordinator, within a short time."""
        await self.revoke(lease_id, timeout_s=min(_REVOKE_S, self._connection.options.timeout_s))


@contextlib.contextmanager
def _warn_of_slow_login(connection: Connection, after_s: float) -> Iterator[None]:
    """Logs a warning if the block still waits for a login after `after_s`."""

    def warn() -> None:
        if waits := connection.login.waits():
            log.warning("%s: it answers, and may have many logins to do, a hash for each", waits)

    timer = asyncio.get_running_loop().call_later(after_s, warn)
    try:
        yield
    finally:
        timer.cancel()


class _TxnText:
    """Formats a transaction by its keys, only when an error needs the text."""

    __slots__ = ("_txn",)

    def __init__(self, txn: Txn) -> None:
        self._txn = txn

    def __str__(self) -> str:
        ops = self._txn.success or self._txn.failure
        keys = dict.fromkeys(op.key for op in (*ops, *self._txn.compares))
        shown = ", ".join(list(keys)[:3])
        return f"transaction on {shown}{', ...' if len(keys) > 3 else ''}"
