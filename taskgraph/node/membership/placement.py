"""Computes on which nodes the replicas should be, and when a job may begin.

Every node computes the same placement from the same structure (`protocol.placement`), without messages. Commits do not
change it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskgraph.protocol.placement import CurrentReplicas, Seat, Wish, place

if TYPE_CHECKING:
    from taskgraph.node.core import NodeCore

__all__ = ["Placement", "missing_nodes_text"]


def missing_nodes_text(node: NodeCore, what: str = "nodes") -> str:
    """Names the nodes that a job waits for before it begins; "": none, or it has ended.

    Args:
        what: "workers", of an elastic job.
    """
    view, spec, job = node.keeper.view, node.spec, node.job
    if not view.running:
        return ""
    here = len(view.live_nodes(spec.run))
    if here < job.min_nodes:
        return f"the job waits for {what}: {here} of at least {job.min_nodes} are here (min_{what})"
    limit_s = node.settings.start_wait_s
    if here < spec.expected_nodes and node.now() - node.started_at <= limit_s:
        return (
            f"the job waits for {what}: {here} of the {spec.expected_nodes} that were started with it are here; it "
            f"begins without the others after {limit_s:g} s (start_wait_s)"
        )
    return ""


class Placement:
    """Where the replicas of all tasks should be (`by_task`), computed again when nodes, primaries or members change."""

    def __init__(self, node: NodeCore) -> None:
        self._node = node
        self.by_task: dict[int, Wish] = {}
        self.revision = -1
        """The revision of the view's structure that the wishes were computed from."""
        self._emitted_missing = ""

    def may_start(self) -> bool:
        """True if the job began or ended, or may begin: `min_nodes` nodes are registered, and for `start_wait_s` all
        that were started with it. If not, emits an event that names what is missing, once.
        """
        node = self._node
        missing = self._missing_nodes_text
        if missing and missing != self._emitted_missing and node.emits_for_all():
            # Nodes that start together register one after the other, within a moment: that is no event.
            enough = len(node.keeper.view.live_nodes(node.spec.run)) >= node.job.min_nodes
            if not enough or node.now() - node.started_at > node.settings.stall_check_s:
                self._emitted_missing = missing
                node.events.emit("waits", missing)
        return not missing

    @property
    def _missing_nodes_text(self) -> str:
        return "" if self._node.keeper.view.primaries else missing_nodes_text(self._node)

    @property
    def waits(self) -> tuple[str, ...]:
        """Returns why the job does not begin, for `status`; empty unless this node reports for all."""
        missing = self._missing_nodes_text
        return (missing,) if missing and self._node.emits_for_all() else ()

    def update(self) -> None:
        """Computes the wishes anew if the view's structure changed."""
        node = self._node
        view, job = node.keeper.view, node.job
        if self.revision == view.structure_revision:
            return
        self.revision = view.structure_revision
        live = view.live_nodes(node.spec.run)
        seats = [Seat(n, r.machine or r.host, r.devices) for n, r in sorted(live.items()) if not r.draining]
        # A member evicted "until e" does not count as a holder, although it is one while e is the committed epoch: all
        # nodes must compute the same, whether they read the next commit with this change or after it. Nothing is lost:
        # such a member still takes over if no other can.
        holdings = {
            t: CurrentReplicas(view.primary_node(t), tuple(view.active_members(t)))
            for t in range(job.all_tasks)
            if t in view.primaries
        }
        named = {n for h in holdings.values() for n in (h.primary, *h.members) if n is not None}
        keep = frozenset(n for n in named if n not in live and n not in view.gone)
        self.by_task = place(seats, job.all_tasks, job.backups, holdings, job.needs_device, keep)
