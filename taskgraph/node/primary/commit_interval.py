"""Computes how long epochs wait to be committed together.

A commit costs each node half a millisecond of processor time, mostly for waking up. With 15 nodes on two cores, 50
commits a second take a fifth of both cores. So commits are rarer if many nodes share cores: they cost no larger share
of the time than with two nodes per core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskgraph.system.host import all_cores, allowed_cores

if TYPE_CHECKING:
    from taskgraph.node.core import NodeCore
    from taskgraph.protocol.records import NodeRecord

__all__ = ["CommitInterval", "adapted_interval_s"]

_NODES_PER_CORE = 2
_MOST = 5


def adapted_interval_s(gather_s: float, nodes: int, cores: int) -> float:
    """Returns `gather_s`, or up to five times as much if more than two nodes share a core."""
    return gather_s * min(_MOST, max(1.0, nodes / (_NODES_PER_CORE * cores)))


class CommitInterval:
    """Computes, on one node, how long epochs wait to be committed together.

    Counts the nodes on the leader's host, and assumes that it has as many cores as this node's. Containers of one
    machine count together, against all its cores. For nodes in one process, which are woken once for all, the interval
    is not adapted.
    """

    def __init__(self, node: NodeCore) -> None:
        self._node = node
        self._seconds = node.settings.gather_s
        self._known = -1

    def seconds(self, may_be_ahead: int) -> float:
        """Returns the time between two commits if no task waits for them: longer if many nodes share a core.

        Args:
            may_be_ahead: how many epochs the caller may be ahead of the last commit. If that is below the setting,
                since epochs are large, the interval is not adapted: the task would run out of epochs.
        """
        node, view = self._node, self._node.keeper.view
        if may_be_ahead < node.settings.epochs_ahead:
            return node.settings.gather_s
        if self._known != view.structure_revision:
            self._known = view.structure_revision
            if node.own_process:
                leader = view.nodes.get(view.primary_node(0) or "")
                at: NodeCore | NodeRecord = leader.record if leader is not None else node
                live, set_s = view.live_nodes(node.spec.run).values(), node.settings.gather_s
                self._seconds = adapted_interval_s(
                    set_s, sum(1 for known in live if known.host == at.host), allowed_cores()
                )
                if at.machine:
                    beside = sum(1 for known in live if known.machine == at.machine)
                    self._seconds = max(self._seconds, adapted_interval_s(set_s, beside, all_cores()))
        return self._seconds
