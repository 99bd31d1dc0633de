"""Notifies people and tasks: neighbors that fail and come back, slow user code, nodes that cannot be reached."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from taskgraph.errors import error_text
from taskgraph.protocol.records import name_of
from taskgraph.task import NeighborFailed, NeighborRestarted

if TYPE_CHECKING:
    from taskgraph.node.core import NodeCore
    from taskgraph.node.primary.primary import Primary
    from taskgraph.node.roles import Roles

__all__ = ["Notifier"]


class Notifier:
    """Tells primaries on this node of neighbors, and the event log of slow code and unreachable nodes."""

    def __init__(self, node: NodeCore, roles: Roles) -> None:
        self._node = node
        self._roles = roles
        self._terms_seen: dict[int, tuple[int, bool]] = {}
        self._emitted_unreachable: set[str] = set()

    def notify_of_neighbors(self) -> None:
        """Notifies primaries here, by `on_event`, of neighbors that failed or restarted since the last call."""
        view = self._node.keeper.view
        seen = {task: (p.record.term, p.record.node in self._node.suspects) for task, p in view.primaries.items()}
        changed = {t: now for t, now in seen.items() if t in self._terms_seen and now != self._terms_seen[t]}
        before, self._terms_seen = self._terms_seen, seen
        for task, (term, dead) in changed.items():
            for primary in self._roles.primaries.values():
                replica = primary.replica
                if not replica.ready or "on_event" not in replica.shape.overrides or primary.task == task:
                    continue
                for link in replica.topology:
                    if task not in self._neighbors(primary, link):
                        continue
                    if dead and not before[task][1]:
                        primary.notify(NeighborFailed(task=task, link=link))
                    if term > before[task][0]:
                        primary.notify(NeighborRestarted(task=task, term=term, link=link))

    def _neighbors(self, primary: Primary, link: str) -> tuple[int, ...]:
        """Returns the neighbors along a user's link; none if the link raises, since that fails the job at `compose`."""
        view, job = self._node.keeper.view, self._node.job
        epoch = view.stamp.epoch if view.stamp else 0
        if primary.task >= job.tasks:
            return ()  # a service: topologies are of the user's tasks
        if job.epochs is not None:
            epoch = min(epoch, job.epochs - 1)  # links are not made for epochs after the last
        try:
            return primary.replica.topology.neighbors(link, primary.task, job.tasks, epoch)
        except Exception as error:
            self._node.log.warning("task %d: link %r in epoch %d: %s", primary.task, link, epoch, error_text(error))
            return ()

    @property
    def waits(self) -> tuple[str, ...]:
        """Names the nodes that this node cannot reach, for `status`."""
        return tuple(self._unreachable().values())

    def _unreachable(self) -> dict[str, str]:
        """Returns {node: reason} of living nodes that this node cannot reach: a wait for one may never end."""
        node = self._node
        found = node.router.unreachable_nodes(node.settings.stall_check_s)
        names = {other: name_of(other) for other in sorted(found) if other not in (node.id, *node.suspects)}
        return {other: f"{node.name} cannot reach {name}: {found[other]}" for other, name in names.items()}

    def _emit_unreachable(self) -> None:
        found = self._unreachable()
        self._emitted_unreachable &= found.keys()
        for other, why in found.items():  # sorted, so that a seed of the simulation replays exactly
            if other not in self._emitted_unreachable:
                self._emitted_unreachable.add(other)
                self._node.events.emit("unreachable", why, fields={"unreachable": other})

    async def emit_until_cancelled(self) -> None:
        """Emits an event, once, about slow user code, and about nodes that stay unreachable, until cancelled.

        `status` shows both while they last.
        """
        emitted: set[tuple[int, str, float]] = set()
        limit = self._node.settings.slow_compute_s
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            replicas = self._roles.replicas
            current = {(r.task, call.where, call.since) for r in replicas.values() for call in r.running}
            emitted &= current
            for task, where, since in sorted(current - emitted):
                if self._node.now() - since > limit:
                    emitted.add((task, where, since))
                    late = "; the epoch went on without it" if where in replicas[task].late_names else ""
                    text = f"task {task}: {where!r} runs for {self._node.now() - since:.0f} s{late}"
                    self._node.events.emit("slow", text, task=task)
            self._emit_unreachable()
