"""Defines the interface of a coordinator.

Implementations: `etcd.EtcdCoordinator`, `memory.MemoryCoordinator` within one process, for `nodes=0` and tests, and
those that installed packages offer (`opening`). `taskgraph.testing.conformance` holds all of them to the same tests.
Nothing here knows of jobs, tasks or epochs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final, Protocol

from taskgraph.errors import CoordinationError, Unavailable
from taskgraph.protocol.frozen import frozen
from taskgraph.protocol.kv import KeyEvent, KeyValue, Txn, TxnResult

__all__ = [
    "WAITED_OUT",
    "AccessRefused",
    "Coordinator",
    "DataLost",
    "Lease",
    "Listing",
    "TooLarge",
    "WatchBatch",
    "WatchCompacted",
]


@dataclass(frozen=True, slots=True)
class Listing:
    """All keys under a prefix at one revision, in key order."""

    revision: int
    items: tuple[KeyValue, ...]


@frozen
class WatchBatch:
    """Events of complete revisions, in order. `revision` is the last revision in the batch.

    A batch without events is a progress notice: all events up to `revision` have been delivered.

    Attributes:
        reopened: the watch broke, and continues here. The reader must list again, since the store may have been set up
            anew in between.
    """

    revision: int
    events: tuple[KeyEvent, ...]
    reopened: bool = False


class TooLarge(CoordinationError):
    """A transaction has more bytes than the coordinator accepts: nothing was done."""


class DataLost(CoordinationError):
    """The coordinator lost writes that it had acknowledged.

    Args:
        how: the evidence, in words.
    """

    def __init__(self, how: str) -> None:
        super().__init__(
            f"etcd has lost what it had acknowledged: {how}. Was it started without its data, or from a backup? What "
            "it held of running jobs is gone; one that left a checkpoint goes on from there with --resume"
        )


class AccessRefused(CoordinationError):
    """The coordinator refuses our user or this key: nothing was done. Its operator may change that again."""


WAITED_OUT: Final = (Unavailable, AccessRefused)
"""Errors that a running job retries until they end: nothing was done, and the job's state is in its nodes' memory. A
starting command or node fails at once if it is refused."""


class WatchCompacted(Exception):
    """The requested revision was compacted away: list again, and watch from that revision."""


class Lease(Protocol):
    """A lease that is renewed in the background until closed.

    Renewal must go on while the main loop is busy, but only while `tick()` is called often enough: a node whose loop
    is stuck must lose its lease.
    """

    @property
    def id(self) -> int: ...

    @property
    def ttl_s(self) -> float: ...

    def valid_until(self) -> float:
        """Returns the time, by `Coordinator.now`, until which the lease is certainly alive: when the last *answered*
        renewal was sent, plus the TTL. If that time has passed, the lease may be gone."""

    def lost(self) -> bool:
        """True if the coordinator answered that the lease does not exist."""

    def trouble(self) -> str:
        """Returns why the last renewal failed, in words; "" if it succeeded, or the reason is not known."""

    def tick(self) -> None:
        """Notes that the main loop is alive. Renewal stops `stall_limit_s` after the last tick, until the next one."""

    async def close(self, *, revoke: bool) -> None:
        """Stops renewing; with `revoke`, deletes the lease and every key on it (best effort, bounded)."""


class Coordinator(Protocol):
    """Linearizable keys, transactions, watches and leases.

    Every call is bounded by `timeout_s` of the implementation. It raises `errors.Unavailable` if nothing was done, and
    `errors.OutcomeUnknown` if a write may have happened. A refusal is another `errors.CoordinationError`; nothing was
    done.
    """

    def now(self) -> float:
        """Returns the time of the clock of `Lease.valid_until`."""

    async def get(self, key: str) -> KeyValue | None:
        """Reads a key, linearizably; None: it does not exist."""

    async def list(self, prefix: str) -> Listing:
        """Reads all keys under `prefix` at one revision, linearizably."""

    async def txn(self, txn: Txn) -> TxnResult:
        """Executes a transaction at one revision; returns whether its comparisons held, and what it read."""

    def watch(self, prefix: str, start_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Yields every event under `prefix` from `start_revision` on, once and in order, across reconnections, which it
        reports (`WatchBatch.reopened`).

        Raises `WatchCompacted` if that history is gone, and `AccessRefused` if the watch is refused from the start.
        Closing the iterator ends the watch.
        """

    async def lease(self, ttl_s: float, *, stall_limit_s: float) -> Lease:
        """Grants a lease and starts renewing it. The server may grant a longer TTL than asked for."""

    async def revoke(self, lease_id: int) -> None:
        """Revokes any lease, also one of another process. A lease that does not exist is no error."""

    async def lease_left(self, lease_id: int) -> int | None:
        """Returns the remaining seconds of any lease, rounded down; None if the lease is gone.

        0 may also mean that the lease ended, and its keys are not deleted yet.
        """

    async def close(self) -> None:
        """Ends every call, watch and renewal. Leases are not revoked."""
