"""What the rest of the framework sees of a coordinator.

Two implementations: `etcd.EtcdCoordinator` (the real one) and `memory.MemoryCoordinator` (one process, for
`nodes=0` and tests). A conformance suite runs on both. Nothing here knows of jobs, tasks or epochs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Protocol

from taskgraph.errors import CoordinationError, Unavailable
from taskgraph.protocol.frozen import frozen
from taskgraph.protocol.kv import KeyEvent, KeyValue, Txn, TxnResult

__all__ = [
    "WAITED_OUT",
    "AccessRefused",
    "Coordinator",
    "Lease",
    "Listing",
    "Lost",
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
    """Events of complete revisions, in order; `revision` is the last one contained.

    An empty `events` is a progress notice: everything up to `revision` has been delivered.

    Attributes:
        reopened: the watch was broken, and goes on from here. Where the store was set up anew meanwhile, what is there
            now is not what the watch has told, and it tells no difference: list again.
    """

    revision: int
    events: tuple[KeyEvent, ...]
    reopened: bool = False


class TooLarge(CoordinationError):
    """A transaction takes more bytes than the coordinator does: nothing was done."""


class Lost(CoordinationError):
    """The coordinator has lost what it had acknowledged.

    Args:
        how: this is seen.
    """

    def __init__(self, how: str) -> None:
        super().__init__(
            f"etcd has lost what it had acknowledged: {how}. Was it started without its data, or from a backup? What "
            "it held of running jobs is gone; one that left a checkpoint goes on from there with --resume"
        )


class AccessRefused(CoordinationError):
    """The coordinator does not let us in, or not there: nothing was done. Whoever runs it may change that again."""


WAITED_OUT: Final = (Unavailable, AccessRefused)
"""Nothing was done, and a job that runs goes on once this is over: its state is in its nodes' memory. Whoever only
begins is told of a refusal at once."""


class WatchCompacted(Exception):
    """The revision asked for was compacted away: list again and watch from there."""


class Lease(Protocol):
    """A lease that is renewed in the background until closed.

    Renewal must go on while the main loop is busy, but only while `tick()` is called often enough: a node
    whose loop is stuck must lose its lease.
    """

    @property
    def id(self) -> int: ...

    @property
    def ttl_s(self) -> float: ...

    def valid_until(self) -> float:
        """The monotonic time (`time.monotonic()`, or the loop's time in memory) until which the lease is certainly
        alive: the moment the last *answered* renewal was sent, plus the TTL. In the past: it may be gone."""

    def lost(self) -> bool:
        """Whether the coordinator itself said that the lease does not exist any more."""

    def trouble(self) -> str:
        """Why the last renewal failed, for people; "" where one was answered since, or nobody knows."""

    def tick(self) -> None:
        """Says that the main loop is alive. Renewal stops `stall_limit_s` after the last tick, till the next."""

    async def close(self, *, revoke: bool) -> None:
        """Stops renewing; with `revoke`, deletes the lease and every key on it (best effort, bounded)."""


class Coordinator(Protocol):
    """Linearizable keys, transactions, watches and leases.

    Every call is bounded by `timeout_s` of the implementation and raises `errors.Unavailable` where nothing was
    done, or `errors.OutcomeUnknown` where a write may have happened. Reads raise only `Unavailable`. What is refused
    is another `errors.CoordinationError`; nothing was done then.
    """

    def now(self) -> float:
        """The clock that `Lease.valid_until` is told in."""

    async def get(self, key: str) -> KeyValue | None:
        """A linearizable read."""

    async def list(self, prefix: str) -> Listing:
        """A linearizable read of all keys under `prefix`, at one revision."""

    async def txn(self, txn: Txn) -> TxnResult: ...

    def watch(self, prefix: str, start_revision: int) -> AsyncIterator[WatchBatch]:
        """Every event under `prefix` from `start_revision` on, each once, in order, across reconnections, of which it
        tells (`WatchBatch.reopened`).

        Raises `WatchCompacted` where that history is gone, and `AccessRefused` where it is refused from the start.
        Closing the iterator ends the watch.
        """

    async def lease(self, ttl_s: float, *, stall_limit_s: float) -> Lease:
        """Grants a lease and starts renewing it. The server may grant a longer TTL than asked for."""

    async def revoke(self, lease_id: int) -> None:
        """Revokes any lease, also one of another process. A lease that does not exist is no error."""

    async def lease_left(self, lease_id: int) -> int | None:
        """How many whole seconds any lease has left, rounded down; None where it is gone.

        0 is also said of one that has ended, but was not deleted with its keys yet.
        """

    async def close(self) -> None: ...
