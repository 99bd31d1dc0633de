"""Where placement wants every replica, as this node sees it, and when a job may begin.

Every node computes the same from the same structure (`protocol.placement`), so that nobody has to be asked. The epoch
is not looked at: a commit is no change of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskgraph.protocol.placement import Holding, Seat, Wish, place

if TYPE_CHECKING:
    from taskgraph.node.node import Node

__all__ = ["Wishes"]


class Wishes:
    """Placement, computed anew when the structure of the job changed: its nodes, primaries, members."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.by_task: dict[int, Wish] = {}
        self.revision = -1
        """The structure's revision they were computed from."""
        self._told_nodes = -1

    def of(self, task: int) -> Wish | None:
        return self.by_task.get(task)

    def may_start(self) -> bool:
        """A job begins when enough nodes are there: `min_nodes`, and those its launcher started, for a while."""
        node = self._node
        view, spec, job = node.keeper.view, node.spec, node.job
        if view.primaries:
            return True
        live = view.live_nodes(spec.run)
        if len(live) < job.min_nodes:
            if self._told_nodes != len(live) and min(live, default="") == node.id:
                self._told_nodes = len(live)
                node.events.emit(
                    "waits", f"the job waits for nodes: {len(live)} of at least {job.min_nodes} are here (min_nodes)"
                )
            return False
        return len(live) >= spec.expected_nodes or node.now() - node.started_at > node.settings.start_wait_s

    def update(self) -> None:
        """Computes them, unless nothing changed."""
        node = self._node
        view, job = node.keeper.view, node.job
        if self.revision == view.structure_revision:
            return
        self.revision = view.structure_revision
        live = view.live_nodes(node.spec.run)
        seats = [Seat(n, r.host, r.devices) for n, r in sorted(live.items()) if not r.draining]
        # Who was evicted "until e" counts as no holder, though it is one while e is committed. Where all have to wish
        # for the same, it must not matter whether a node read the next commit together with the change or after it.
        # Nothing is lost by that: such a node takes over where nobody else can, whoever is wished for, and is then the
        # primary, which holds its task; else the task's primary lets it go, or invites it again, as placement wants.
        holdings = {
            t: Holding(view.primary_node(t), tuple(view.staying(t))) for t in range(job.tasks) if t in view.primaries
        }
        named = {n for h in holdings.values() for n in (h.primary, *h.members) if n is not None}
        keep = frozenset(n for n in named if n not in live and n not in view.gone)
        self.by_task = place(seats, job.tasks, job.backups, holdings, job.needs_device, keep)
