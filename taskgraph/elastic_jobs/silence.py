"""Finds workers that do not answer although their leases live: they reach etcd, and not this worker.

    answers ──no progress, and no answer for a TTL──► silent: the next view is without it
       ▲───────────────it answers────────────────────────┘

While sums are completed, all workers hear each other, and no worker is asked. A worker that hears fewer others waits
longer: of two sides of a cut, the larger one goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from taskgraph.elastic_jobs.interface import WorkerNode
from taskgraph.errors import TransportError
from taskgraph.protocol.elastic.worker import Phase
from taskgraph.protocol.records import name_of

__all__ = ["Silence"]

_BEATS = 10
"""How often per TTL this worker looks for progress, and asks again."""


class Silence:
    """Watches the other workers of the view.

    Args:
        changed: called when a worker becomes silent, or answers again.

    Attributes:
        workers: the silent ones.
    """

    def __init__(self, node: WorkerNode, changed: Callable[[], None]) -> None:
        self._node = node
        self._changed = changed
        self._heard: dict[str, float] = {}  # other worker of the view -> when it answered last
        self._asking: set[str] = set()
        self.workers: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Watches until cancelled."""
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
            if at != before or node.paused or was_still or core.phase == Phase.OUTSIDE:
                before = at
                self._heard = dict.fromkeys(others, now)
                self._note(frozenset())
                continue
            for worker in others:
                if worker not in self._asking:
                    self._asking.add(worker)
                    node.own(self._ask(worker), f"ask {worker}")
            unheard = [worker for worker, heard in self._heard.items() if now - heard > 2 * beat_s]
            limit_s = ttl_s * (1 + max(0, len(unheard) - 1) / (len(others) + 1))
            self._note(frozenset(worker for worker in unheard if now - self._heard[worker] >= limit_s))

    async def _ask(self, worker: str) -> None:
        try:
            peer = self._node.router.peer(worker)
            if peer is not None:
                await self._node.transport.probe(peer, timeout_s=self._node.settings.lease_ttl_s / 2)
                if worker in self._heard:
                    self._heard[worker] = self._node.now()
        except TransportError:
            pass
        finally:
            self._asking.discard(worker)

    def _note(self, silent: frozenset[str]) -> None:
        before, self.workers = self.workers, silent
        for worker in sorted(silent - before):
            for_s, me = self._node.settings.lease_ttl_s, self._node.name
            text = f"{name_of(worker)} does not answer {me}, though its lease lives: silent for {for_s:g} s"
            self._node.events.emit("lost", text, fields={"lost": worker})
        if silent != before:
            self._changed()
