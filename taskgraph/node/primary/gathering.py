"""How long epochs wait to be committed together.

A commit costs each node half a millisecond of processor time, most of it to be woken by etcd. Where many nodes share
cores that is where the time goes: with 15 on two cores 50 commits a second take a fifth of both. So commits are rarer
there, and take no larger a part of the time than where two nodes share a core.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from taskgraph.host import cores

if TYPE_CHECKING:
    from taskgraph.node.node import Node
    from taskgraph.protocol.view import JobView

__all__ = ["Due", "Gathering", "longer"]

_NODES_A_CORE = 2
_MOST = 5


def longer(gather_s: float, nodes: int, cores: int) -> float:
    """What becomes of `gather_s` where so many nodes share so many cores."""
    return gather_s * min(_MOST, max(1.0, nodes / (_NODES_A_CORE * cores)))


class Gathering:
    """For one node: it looks at the host of the leader, and takes all hosts to have as many cores as its own.

    Nodes of one process are woken once for all: there it stays as it was set.
    """

    def __init__(self, node: Node) -> None:
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
                host = leader.record.host if leader is not None else node.host
                nodes = sum(1 for known in view.live_nodes(node.spec.run).values() if known.host == host)
                self._seconds = longer(node.settings.gather_s, nodes, cores())
        return self._seconds


class Due:
    """When what is gathered for the next commit has to go: some time before the leader commits again.

    Args:
        part: of the time from one commit to the next, after which it goes.

    Attributes:
        ahead: as many epochs as the task may be ahead of the last commit.
    """

    def __init__(self, node: Node, part: float) -> None:
        self._node = node
        self._part = part
        self._loop = asyncio.get_running_loop()
        self._at = 0.0  # by the commit that was seen last
        self._of = 0  # the revision of `generation` then: after a takeover nothing is gathered for a commit
        self._went = False  # whether anything did since that commit
        self.ahead = node.settings.epochs_ahead

    def committed(self) -> None:
        """A commit was seen."""
        self._at, self._went = self._loop.time() + self._part * self._seconds(), False
        self._of = self._node.keeper.view.generation_revision

    def forget(self) -> None:
        """Nothing is known of a commit."""
        self._at, self._went = 0.0, False

    def went(self) -> None:
        """All that was gathered did."""
        self._went = True

    def early(self, view: JobView) -> bool:
        """Whether the leader waits for more, even where all have done the epoch at work."""
        return self._loop.time() < self._at and view.generation_revision == self._of

    def at(self, overdue: float) -> float:
        """When what is gathered from now on has to go, in the loop's time.

        Args:
            overdue: of the time between two commits, how long to wait where the next one is overdue.
        """
        now = self._loop.time()
        if self._went:
            return now + self._seconds()
        return self._at if self._at > now else now + overdue * self._seconds()

    def _seconds(self) -> float:
        return self._node.gathering.seconds(self.ahead)
