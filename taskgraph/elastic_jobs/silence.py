"""Asks the other workers of the view for an answer while work stands still.

A lease says that a worker reaches etcd, not that it reaches this one. While sums are completed, all workers hear each
other, and no worker is asked. Which worker is silent is decided in `protocol/failure_detector.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from taskgraph.elastic_jobs.interface import WorkerNode
from taskgraph.errors import TransportError
from taskgraph.protocol.elastic.worker import Phase
from taskgraph.protocol.failure_detector import FailureDetector
from taskgraph.protocol.records import name_of

__all__ = ["Silence"]

_BEATS = 10
"""How often per TTL this worker looks for progress, and asks again."""


class Silence:
    """Finds workers of the view that do not answer this one, while no sum is completed and no view begins.

    Args:
        changed: called when a worker becomes silent, or answers again.
    """

    def __init__(self, node: WorkerNode, detector: FailureDetector, changed: Callable[[], None]) -> None:
        self._node = node
        self._detector = detector
        self._changed = changed
        self._asking: set[str] = set()

    async def run(self) -> None:
        """Asks the other workers while work stands still, and emits `lost` for silent ones; until cancelled."""
        node, ttl_s = self._node, self._node.settings.lease_ttl_s
        beat_s = ttl_s / _BEATS
        before: object = None
        looked_at = node.now()
        while True:
            await asyncio.sleep(beat_s)
            core, now = node.engine.core, node.now()
            was_still, looked_at = now - looked_at > 3 * beat_s, now
            at = (core, core.view, core.phase, core.position)
            others = () if core.view is None else tuple(w for w in core.view.workers if w != node.id)
            silent = self._detector.silent
            if at != before or node.paused or was_still or core.phase == Phase.OUTSIDE:
                before = at
                self._detector.expect_answers(others, now)
            else:
                for worker in others:
                    if worker not in self._asking:
                        self._asking.add(worker)
                        node.own(self._ask(worker), f"ask {worker}")
                for worker in self._detector.find_newly_silent(now, 2 * beat_s):
                    text = f"{name_of(worker)} does not answer {node.name}, though its lease lives"
                    node.events.emit("lost", f"{text}: silent for {ttl_s:g} s", fields={"lost": worker})
            if silent != self._detector.silent:
                self._changed()

    async def _ask(self, worker: str) -> None:
        """Probes one worker, and notes an answer in the detector."""
        try:
            peer = self._node.router.peer(worker)
            if peer is not None:
                await self._node.transport.probe(peer, timeout_s=self._node.settings.lease_ttl_s / 2)
                self._detector.heard(worker, self._node.now())
        except TransportError:
            pass
        finally:
            self._asking.discard(worker)
