"""Transactions until their outcome is known.

A write whose answer was lost may or may not have happened. It is sent again (its comparisons make that harmless), and
where it then fails, the key it puts is read linearizably: its writer's name tells whether the first one had succeeded.
"""

from __future__ import annotations

import asyncio
import json
import logging

from taskgraph.coordination.api import Coordinator
from taskgraph.errors import CoordinationError, OutcomeUnknown, Unavailable
from taskgraph.protocol.kv import Txn, TxnResult

__all__ = ["Writes"]

log = logging.getLogger("taskgraph.node")

_RETRY_S = 0.05


class Writes:
    """One node's transactions."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def transact(self, txn: Txn, *, key: str, writer: str) -> int | None:
        """Executes a transaction until its outcome is known.

        Args:
            key, writer: a put of the transaction, by which it is recognised when an answer was lost.

        Returns:
            The revision at which it holds, or None where its comparisons failed.
        """
        result = await self.execute(txn, key, writer)
        return result.revision if result is not None else None

    async def execute(self, txn: Txn, key: str, writer: str) -> TxnResult | None:
        """The same, with what it read; no reads where its answer was lost, None where its comparisons failed."""
        uncertain = False
        while True:
            try:
                result = await self._coordinator.txn(txn)
            except OutcomeUnknown as error:
                log.warning("a write's outcome is unknown, looking again: %s", error)
                uncertain = True
            except Unavailable as error:
                log.warning("a write must wait: %s", error)
                await asyncio.sleep(_RETRY_S)
            else:
                if result.succeeded:
                    return result
                if uncertain and (found := await self._written(key, writer)) is not None:
                    return TxnResult(True, found)
                return None

    async def attempt(self, txn: Txn) -> None:
        """Executes a transaction that may as well not happen: whoever needs it tries again when it looks next."""
        try:
            await self._coordinator.txn(txn)
        except CoordinationError as error:
            log.info("left for later: %s", error)

    async def _written(self, key: str, writer: str) -> int | None:
        """Whether `writer` wrote `key`, and at which revision, by a linearizable read."""
        while True:
            try:
                kv = await self._coordinator.get(key)
            except Unavailable as error:
                log.warning("a read must wait: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            return kv.mod_revision if kv is not None and json.loads(kv.value).get("writer") == writer else None
