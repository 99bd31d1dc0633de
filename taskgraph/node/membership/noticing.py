"""What a node notices beside the protocol: neighbors that fail and come back, user code that runs for very long."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from taskgraph.errors import worded
from taskgraph.task import NeighborFailed, NeighborRestarted

if TYPE_CHECKING:
    from taskgraph.node.node import Node
    from taskgraph.node.primary.primary import Primary

__all__ = ["Noticing"]


class Noticing:
    """Tells the primaries here, and the event log. Information only: nothing is decided by it."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._terms_seen: dict[int, tuple[int, bool]] = {}

    def look(self) -> None:
        """NeighborFailed and NeighborRestarted, for the primaries here."""
        view = self._node.keeper.view
        seen = {task: (p.record.term, p.record.node in self._node.suspects) for task, p in view.primaries.items()}
        changed = {t: now for t, now in seen.items() if t in self._terms_seen and now != self._terms_seen[t]}
        before, self._terms_seen = self._terms_seen, seen
        for task, (term, dead) in changed.items():
            for primary in self._node.roles.primaries.values():
                replica = primary.replica
                if not replica.ready or "on_event" not in replica.shape.overrides or primary.task == task:
                    continue
                for link in replica.topology:
                    if task not in self._neighbors(primary, link):
                        continue
                    if dead and not before[task][1]:
                        primary.tell(NeighborFailed(task=task, link=link))
                    if term > before[task][0]:
                        primary.tell(NeighborRestarted(task=task, term=term, link=link))

    def _neighbors(self, primary: Primary, link: str) -> tuple[int, ...]:
        """Along a link of the user's; none where that raises, which fails the job where the epoch is composed."""
        view, job = self._node.keeper.view, self._node.job
        epoch = view.stamp.epoch if view.stamp else 0
        if job.epochs is not None:
            epoch = min(epoch, job.epochs - 1)  # after the last, there is none that links are made for
        try:
            return primary.replica.topology.neighbors(link, primary.task, job.tasks, epoch)
        except Exception as error:
            self._node.log.warning("task %d: link %r in epoch %d: %s", primary.task, link, epoch, worded(error))
            return ()

    async def watch_slow_code(self) -> None:
        """User code that runs for very long is told once, and shown in `status` for as long as it runs."""
        told: set[tuple[int, str, float]] = set()
        limit = self._node.settings.slow_compute_s
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            current = {
                (r.task, running.where, running.since)
                for r in self._node.roles.replicas.values()
                for running in r.actor.running
            }
            told &= current
            for task, where, since in current - told:
                if self._node.now() - since > limit:
                    told.add((task, where, since))
                    self._node.events.emit(
                        "slow", f"task {task}: {where!r} runs for {self._node.now() - since:.0f} s", task=task
                    )
