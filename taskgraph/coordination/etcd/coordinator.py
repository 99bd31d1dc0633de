"""`coordination.api.Coordinator` on a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
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
from taskgraph.coordination.etcd.watch import check_lost, watch
from taskgraph.errors import CoordinationError, LeaseGone, Unavailable, no_thread
from taskgraph.protocol.kv import KeyValue, Txn, TxnResult

__all__ = ["EtcdCoordinator"]

log = logging.getLogger(__name__)

#: A user waits this long to learn that nothing listens.
_FIRST_CONTACT_S = 5.0
#: An etcd that answers may be busy with the logins of all nodes: longer than the limit of one login.
_FIRST_LOGIN_S = 150.0
#: Keys that are listed at a time: all of most jobs, some 100 kB, which a link of 20 kB/s takes within a call's limit.
_PAGE_KEYS = 300
#: etcd's words for a revision that was compacted away, or lost.
_PAGES_GONE = "required revision"
#: A revoke at the end is a courtesy: the lease expires by itself.
_REVOKE_S = 2.0
_Found = list[v3.KeyValue]  # `list` is a method there

_HOW_TO_GET_ONE = "start one (`etcd`), or leave --etcd out: a run on this host brings its own"


class EtcdCoordinator:
    """An etcd cluster, seen from one event loop. Made by `connect`, ended by `close` or as an async context.

    Attributes:
        version: the version of the etcd member that answered first, e.g. "3.5.1".
    """

    def __init__(self, connection: Connection, version: str) -> None:
        self._connection = connection
        self._leases: set[EtcdLease] = set()
        self._known = 0  # the last revision of a listing or a transaction
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
            with _saying(connection, limit_s):
                status = await first(timeout_s=login_s)
            probe = convert.range_request("/taskgraph/", prefix=False)
            with contextlib.suppress(PermissionRefused):  # the user may read other keys; the cluster answered
                await connection.call(RANGE, probe, what="first read", again=True, timeout_s=limit_s)
        except Unavailable as error:
            await connection.close()
            names = ", ".join(endpoint.target for endpoint in options.endpoints)
            why = str(error).removeprefix("first contact: ")
            why = "connection refused" if "Connection refused" in why else why  # gRPC says it at length
            raise Unavailable(f"No etcd answers at {names} ({why}): {_HOW_TO_GET_ONE}") from error
        except BaseException:
            await connection.close()
            raise
        return cls(connection, status.version)

    async def __aenter__(self) -> EtcdCoordinator:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def now(self) -> float:
        """The clock of `Lease.valid_until`: `time.monotonic()`."""
        return time.monotonic()

    async def get(self, key: str) -> KeyValue | None:
        """Reads a key, linearizably."""
        request = convert.range_request(key, prefix=False)
        answer = await self._connection.call(RANGE, request, what=f"get {key!r}", again=True)
        return convert.key_value(answer.kvs[0]) if answer.kvs else None

    async def list(self, prefix: str) -> Listing:
        """A linearizable read of all keys under `prefix`, at one revision.

        It is read in pages: behind a slow link, all keys of a large job would take longer than a call may.

        Raises:
            Unavailable: etcd does not answer.
            DataLost: etcd lost writes that it had acknowledged.
            CoordinationError: etcd refuses it.
        """
        known = self._known
        revision, found = await self._list(prefix)
        if revision < known:
            await check_lost(self._connection, prefix, known)
        self._known = max(self._known, revision)
        return Listing(revision, tuple(convert.key_value(kv) for kv in found))

    async def _list(self, prefix: str) -> tuple[int, _Found]:
        """Lists all keys under `prefix` at the revision of the first page."""
        request, found = convert.range_request(prefix, prefix=True), _Found()
        request.limit = _PAGE_KEYS
        while True:
            try:
                answer = await self._connection.call(RANGE, request, what=f"list {prefix!r}", again=True)
            except CoordinationError as error:
                if _PAGES_GONE not in str(error):
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
            OutcomeUnknown: it may have been executed.
            LeaseGone: a put names a lease that does not exist; nothing was done.
            AccessRefused: no permission, another password; nothing was done.
            CoordinationError: etcd refuses it otherwise (too large, a key written twice).
        """
        answer = await self._connection.call(
            TXN, convert.txn_request(txn), what=_Described(txn), again=not convert.writes(txn)
        )
        self._known = max(self._known, answer.header.revision)
        return convert.txn_result(answer)

    def watch(self, prefix: str, start_revision: int) -> AsyncIterator[WatchBatch]:
        """See `coordination.api.Coordinator.watch`. A watch waits until etcd answers; other calls raise."""
        if start_revision < 1:
            raise ValueError(f"a watch starts at a revision from 1 on, not {start_revision}")
        return watch(self._connection, prefix, start_revision)

    async def lease(self, ttl_s: float, *, stall_limit_s: float) -> EtcdLease:
        """Grants a lease and starts renewing it. etcd's floor is 2 s.

        Raises:
            Unavailable: etcd does not answer.
            CoordinationError: etcd refuses it, or no thread can be started to renew it.
        """
        sent_at = time.monotonic()
        # Asked for again if the outcome is unknown: a lease without an owner holds no key, and expires by itself.
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
            with contextlib.suppress(CoordinationError):  # it expires by itself
                await self._revoke_at_end(answer.id)
            raise CoordinationError(f"a lease cannot be renewed: {no_thread(error) or error}") from error
        self._leases.add(lease)
        return lease

    async def revoke(self, lease_id: int, *, timeout_s: float | None = None) -> None:
        """Revokes any lease. A lease that does not exist is no error."""
        request = v3.LeaseRevokeRequest(id=lease_id)
        what = f"revocation of lease {lease_id:x}"
        with contextlib.suppress(LeaseGone):
            await self._connection.call(LEASE_REVOKE, request, what=what, again=True, timeout_s=timeout_s)

    async def lease_left(self, lease_id: int) -> int | None:
        """See `coordination.api.Coordinator.lease_left`."""
        request = v3.LeaseTimeToLiveRequest(id=lease_id)
        answer = await self._connection.call(LEASE_TIME_TO_LIVE, request, what=f"TTL of lease {lease_id:x}", again=True)
        return answer.ttl if answer.ttl >= 0 else None  # negative: it does not exist, or ended over a second ago

    async def members(self) -> tuple[str, ...]:
        """The names of the cluster's members, as etcd's `--name` sets them."""
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
        await self.revoke(lease_id, timeout_s=min(_REVOKE_S, self._connection.options.timeout_s))


@contextlib.contextmanager
def _saying(connection: Connection, after_s: float) -> Iterator[None]:
    """Logs that the block waits for a login, after `after_s`."""

    def say() -> None:
        if waits := connection.login.waits():
            log.warning("%s: it answers, and may have many logins to do, a hash for each", waits)

    timer = asyncio.get_running_loop().call_later(after_s, say)
    try:
        yield
    finally:
        timer.cancel()


class _Described:
    """A transaction in words, by its keys; made only if an error needs it."""

    __slots__ = ("_txn",)

    def __init__(self, txn: Txn) -> None:
        self._txn = txn

    def __str__(self) -> str:
        ops = self._txn.success or self._txn.failure
        keys = dict.fromkeys(op.key for op in (*ops, *self._txn.compares))
        shown = ", ".join(list(keys)[:3])
        return f"transaction on {shown}{', ...' if len(keys) > 3 else ''}"
