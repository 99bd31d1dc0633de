"""The values that workers return. The job's value is that of the first worker of the view; others should equal it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from taskgraph.errors import Refused, TransportError
from taskgraph.protocol.messages import DescribeValue, Encoded, ValueDigest
from taskgraph.protocol.records import name_of

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.interface import WorkerNode

__all__ = ["ValueComparison"]

_RETURN_S = 1.0
"""Workers return soon after each other. A value that comes later is not compared: the result would wait for it."""


class ValueComparison:
    """Compares the value of the first worker with those of the others, once."""

    def __init__(self, node: WorkerNode) -> None:
        self._node = node
        self._compared = False

    async def compare(self, value: Encoded) -> None:
        """Asks the other workers for their values' digests, and emits `values differ` if one is unlike `value`'s.

        A worker that does not answer in time is not compared. A second call does nothing.
        """
        known = self._node.keeper.view.workers
        if self._compared or known is None:
            return
        self._compared = True
        others = [worker for worker, _ in known.record.workers if worker != self._node.id]
        digests = await asyncio.gather(*map(self._digest_of, others))
        differing = [name_of(w) for w, d in zip(others, digests, strict=True) if d not in (None, value.digest)]
        if differing:
            self._node.events.emit(
                "values differ",
                f"the job has the value of {self._node.name}, and {', '.join(differing)} returned another one: return "
                f"what rests on totals and run.state alone",
            )

    async def _digest_of(self, worker: str) -> bytes | None:
        """Returns the digest of a worker's value; None if it does not answer in time."""
        peer = self._node.router.peer(worker)
        if peer is None:
            return None
        try:
            async with asyncio.timeout(_RETURN_S):
                return cast(ValueDigest, await self._node.transport.call(peer, DescribeValue())).digest
        except (Refused, TransportError, TimeoutError) as error:
            self._node.log.info("the value of %s is unknown: %s", name_of(worker), str(error) or "no answer")
            return None
