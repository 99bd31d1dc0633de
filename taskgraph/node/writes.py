"""Executes transactions until their outcome is known.

answer lost    send again (its comparisons make that harmless); if that fails, a linearizable read of the key shows
               by its writer's name whether the first one had succeeded
refused        wait: a permission was withdrawn or a password changed, and the work is in memory; but a node's first
               write fails, since its user may be the wrong one
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from taskgraph.coordination.api import WAITED_OUT, AccessRefused, Coordinator
from taskgraph.errors import CoordinationError, OutcomeUnknown
from taskgraph.node.backoff import Backoff
from taskgraph.protocol.kv import Txn, TxnResult

__all__ = ["EtcdWrites"]

log = logging.getLogger("taskgraph.node")

_LOG_AGAIN_S = 10.0
"""How often a repeated failure is logged: an etcd without space may refuse at once, for hours."""


class EtcdWrites:
    """Executes one node's transactions in etcd, each until its outcome is known."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._repeated: dict[_RepeatedRequest, None] = {}
        self._has_written = False  # True once a write succeeded

    @property
    def waits(self) -> tuple[str, ...]:
        """Names the repeated requests to etcd, for `status`."""
        now = self._coordinator.now()
        return tuple(
            f"a write has waited for etcd for {now - request.since:.1f} s: {request.error}"
            for request in self._repeated
            if request.error is not None
        )

    async def transact(self, txn: Txn, *, key: str, writer: str) -> int | None:
        """Executes a transaction until its outcome is known.

        Args:
            key, writer: the key of a put, and the writer in its value, by which a read recognizes the transaction.

        Returns:
            The revision of the transaction, or None if its comparisons failed.
        """
        result = await self.execute(txn, key, writer)
        return result.revision if result is not None else None

    async def execute(self, txn: Txn, key: str, writer: str) -> TxnResult | None:
        """Does as `transact`, but returns etcd's result, not the revision; without reads if the answer was lost."""
        since = self._coordinator.now()
        try:
            result = await self._coordinator.txn(txn)
        except (OutcomeUnknown, *WAITED_OUT) as error:
            if isinstance(error, AccessRefused) and not self._has_written:
                raise
            return await self._execute_again(txn, key, writer, since, error)
        self._has_written = True
        return result if result.succeeded else None

    async def _execute_again(
        self, txn: Txn, key: str, writer: str, since: float, error: CoordinationError
    ) -> TxnResult | None:
        """Repeats a transaction whose first try failed with `error`, until its outcome is known; returns as
        `execute`.
        """
        uncertain = False
        with self._repeating(since) as request:
            while True:
                if isinstance(error, OutcomeUnknown):
                    uncertain = True
                    await request.log_and_wait("a write's outcome is unknown, looking again", error)
                else:
                    await request.log_and_wait("a write must wait", error)
                try:
                    result = await self._coordinator.txn(txn)
                except (OutcomeUnknown, *WAITED_OUT) as another:
                    error = another
                    continue
                self._has_written = True
                if result.succeeded:
                    return result
                if uncertain and (found := await self._read_back(key, writer)) is not None:
                    return TxnResult(True, found)
                return None

    async def try_once(self, txn: Txn) -> None:
        """Executes a transaction once. Logs a failure: the caller tries again later."""
        try:
            await self._coordinator.txn(txn)
        except CoordinationError as error:
            log.info("left for later: %s", error)

    async def _read_back(self, key: str, writer: str) -> int | None:
        """Reads `key` linearizably. Returns the revision at which `writer` wrote it; None: another wrote last."""
        with self._repeating(self._coordinator.now()) as request:
            while True:
                try:
                    kv = await self._coordinator.get(key)
                except WAITED_OUT as error:
                    await request.log_and_wait("a read must wait", error)
                    continue
                return kv.mod_revision if kv is not None and json.loads(kv.value).get("writer") == writer else None

    @contextmanager
    def _repeating(self, since: float) -> Iterator[_RepeatedRequest]:
        """Lists a request in `waits` while the block repeats it."""
        request = _RepeatedRequest(self._coordinator, since)
        self._repeated[request] = None
        try:
            yield request
        finally:
            del self._repeated[request]


class _RepeatedRequest:
    """A request to etcd that is repeated until etcd answers."""

    def __init__(self, coordinator: Coordinator, since: float) -> None:
        self._coordinator = coordinator
        self._backoff = Backoff()
        self._logged_at = 0.0
        self.since = since
        self.error: CoordinationError | None = None

    async def log_and_wait(self, what: str, error: CoordinationError) -> None:
        """Logs a failure, but not each time, and waits before the next try."""
        now = self._coordinator.now()
        if self.error is None or now - self._logged_at >= _LOG_AGAIN_S:
            self._logged_at = now
            log.warning("%s: %s", what, error)
        self.error = error
        await self._backoff.pause()
