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

__all__ = ["Writes"]

log = logging.getLogger("taskgraph.node")

_SAY_AGAIN_S = 10.0
"""How often a repeated failure is logged: an etcd without space answers at once, and may refuse for hours."""


class Writes:
    """One node's transactions."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._tried: dict[_RepeatedRequest, None] = {}
        self._let_in = False  # True once a write succeeded

    @property
    def waits(self) -> tuple[str, ...]:
        """Names the repeated requests to etcd, for `status`."""
        now = self._coordinator.now()
        return tuple(
            f"a write has waited for etcd for {now - tried.since:.1f} s: {tried.error}"
            for tried in self._tried
            if tried.error is not None
        )

    async def transact(self, txn: Txn, *, key: str, writer: str) -> int | None:
        """Executes a transaction until its outcome is known.

        Args:
            key, writer: a put of the transaction, by which it is recognised after a lost answer.

        Returns:
            Its revision, or None if its comparisons failed.
        """
        result = await self.execute(txn, key, writer)
        return result.revision if result is not None else None

    async def execute(self, txn: Txn, key: str, writer: str) -> TxnResult | None:
        """Executes like `transact`, and also returns the reads; none if the answer was lost."""
        since = self._coordinator.now()
        try:
            result = await self._coordinator.txn(txn)
        except (OutcomeUnknown, *WAITED_OUT) as error:
            if isinstance(error, AccessRefused) and not self._let_in:
                raise
            return await self._execute_again(txn, key, writer, since, error)
        self._let_in = True
        return result if result.succeeded else None

    async def _execute_again(
        self, txn: Txn, key: str, writer: str, since: float, error: CoordinationError
    ) -> TxnResult | None:
        """Repeats a transaction whose first try failed with `error`."""
        uncertain = False
        with self._trying(since) as tried:
            while True:
                if isinstance(error, OutcomeUnknown):
                    uncertain = True
                    await tried.again("a write's outcome is unknown, looking again", error)
                else:
                    await tried.again("a write must wait", error)
                try:
                    result = await self._coordinator.txn(txn)
                except (OutcomeUnknown, *WAITED_OUT) as another:
                    error = another
                    continue
                self._let_in = True
                if result.succeeded:
                    return result
                if uncertain and (found := await self._written(key, writer)) is not None:
                    return TxnResult(True, found)
                return None

    async def attempt(self, txn: Txn) -> None:
        """Executes a transaction that may fail: its caller tries again with its next look."""
        try:
            await self._coordinator.txn(txn)
        except CoordinationError as error:
            log.info("left for later: %s", error)

    async def _written(self, key: str, writer: str) -> int | None:
        """The revision at which `writer` wrote `key`, by a linearizable read; None: it did not."""
        with self._trying(self._coordinator.now()) as tried:
            while True:
                try:
                    kv = await self._coordinator.get(key)
                except WAITED_OUT as error:
                    await tried.again("a read must wait", error)
                    continue
                return kv.mod_revision if kv is not None and json.loads(kv.value).get("writer") == writer else None

    @contextmanager
    def _trying(self, since: float) -> Iterator[_RepeatedRequest]:
        tried = _RepeatedRequest(self._coordinator, since)
        self._tried[tried] = None
        try:
            yield tried
        finally:
            del self._tried[tried]


class _RepeatedRequest:
    """A request to etcd that is repeated until etcd answers."""

    def __init__(self, coordinator: Coordinator, since: float) -> None:
        self._coordinator = coordinator
        self._backoff = Backoff()
        self._said_at = 0.0
        self.since = since
        self.error: CoordinationError | None = None

    async def again(self, what: str, error: CoordinationError) -> None:
        """Logs a failure, not each time, and waits before the next try."""
        now = self._coordinator.now()
        if self.error is None or now - self._said_at >= _SAY_AGAIN_S:
            self._said_at = now
            log.warning("%s: %s", what, error)
        self.error = error
        await self._backoff.pause()
