"""How long epochs wait to be committed together.

A commit costs each node half a millisecond of processor time, most of it to be woken by etcd. Where many nodes share
cores that is where the time goes: with 15 on two cores 50 commits a second take a fifth of both. So commits are rarer
there, and take no larger a part of the time than where two nodes share a core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskgraph.system.host import all_cores, allowed_cores

if TYPE_CHECKING:
    from taskgraph.node.core import NodeCore
    from taskgraph.protocol.records import NodeRecord

__all__ = ["Gathering", "longer"]

_NODES_A_CORE = 2
_MOST = 5


def longer(gather_s: float, nodes: int, cores: int) -> float:
    """What becomes of `gather_s` where so many nodes share so many cores."""
    return gather_s * min(_MOST, max(1.0, nodes / (_NODES_A_CORE * cores)))


class Gathering:
    """For one node: it looks at the host of the leader, and takes all hosts to have as many cores as its own.

    Containers of one machine have names of their own, and share its cores: they count together, against all cores of
    the machine, as each may have some for itself.

    Nodes of one process are woken once for all: there it stays as it was set.
    """

    def __init__(self, node: NodeCore) -> None:
        self._node = node
        self._seconds = node.settings.gather_s
        self._known = -1

    def seconds(self, ahead: int) -> float:
        """From a commit to the next one, where nobody waits for it, and not so many epochs come before.

        Args:
            ahead: how many epochs who asks may be ahead of the last commit. Where that is fewer than was set, since
                they are large, it would run out of them: it stays as it was set.
        """
        node, view = self._node, self._node.keeper.view
        if ahead < node.settings.epochs_ahead:
            return node.settings.gather_s
        if self._known != view.structure_revision:
            self._known = view.structure_revision
            if node.own_process:
                leader = view.nodes.get(view.primary_node(0) or "")
                at: NodeCore | NodeRecord = leader.record if leader is not None else node
                live, set_s = view.live_nodes(node.spec.run).values(), node.settings.gather_s
                self._seconds = longer(set_s, sum(1 for known in live if known.host == at.host), allowed_cores())
                if at.machine:
                    beside = sum(1 for known in live if known.machine == at.machine)
                    self._seconds = max(self._seconds, longer(set_s, beside, all_cores()))
        return self._seconds
