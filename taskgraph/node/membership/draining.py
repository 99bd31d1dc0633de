"""Leaving in good order: the node hands its tasks over, for `drain_s` at most."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from taskgraph.observe.format import ids_text
from taskgraph.protocol.takeover import remaining_nodes, sole_copies

if TYPE_CHECKING:
    from taskgraph.node.core import NodeCore

__all__ = ["Draining"]


class Draining:
    """Drains one node: announces that it leaves, and decides when it may.

    Args:
        empty: returns True if the node has no primary, and is not stepping down from a term.
        why_paused: as `Registration.waits`; empty while the node is not paused.
    """

    def __init__(self, node: NodeCore, empty: Callable[[], bool], why_paused: Callable[[], tuple[str, ...]]) -> None:
        self._node = node
        self._empty = empty
        self._why_paused = why_paused
        self._past_deadline = False

    def begin(self, why: str) -> None:
        """Asks the node to hand its tasks over and leave. Asking again changes nothing.

        A node that is not registered leaves at once. A node that registers meanwhile announces the drain afterwards.
        """
        node = self._node
        if node.draining:
            return
        node.draining = True
        text = f"{node.name} leaves: {why}"
        if node.running and node.keeper.view.has_work and not self._other_nodes():
            text += (
                f"; there is no other node that could take over what it has: start one within "
                f"{node.settings.drain_s:g} s (drain_s), or that is lost"
            )
        node.events.emit("drain", text, fields={"leaves": node.id})
        if node.running:
            self.announce_in_etcd()

    def announce_in_etcd(self) -> None:
        """Begins to write the drain to the node's key in etcd, and starts the time limit `drain_s`. Does not wait."""
        self._node.own(self._node.announce(), "announce the drain")
        self._node.own(self._leave_at_deadline(), "drain deadline")

    async def _leave_at_deadline(self) -> None:
        """Lets the node leave once `drain_s` has passed, with an event about the tasks that it still has."""
        node = self._node
        await asyncio.sleep(node.settings.drain_s)
        if node.running and node.keeper.view.has_work and (text := self._remaining_tasks()):
            node.events.emit("drain", text, fields={"leaves": node.id})
        self._past_deadline = True
        node.keeper.notify_later()

    def _remaining_tasks(self) -> str:
        """Names the tasks that were not handed over, with reason and consequence; "" if all were."""
        node, view = self._node, self._node.keeper.view
        alone = sole_copies(view, node.job.all_tasks, node.id)
        others = [t for t in range(node.job.all_tasks) if view.primary_node(t) == node.id and t not in alone]
        if not alone and not others:
            return ""
        within = f"within {node.settings.drain_s:g} s (drain_s)"
        if paused := self._why_paused():
            why = f"{paused[0]}, and cannot write to etcd that another node takes over"
        else:
            why = "there was no other node to take over" if not self._other_nodes() else "no other node has taken over"
        text = f"{node.name} leaves without having handed over task {ids_text([*alone, *others])} {within}: {why}"
        if others:
            once = " once etcd answers it" if paused else ""
            again = "computes the epoch at work again" if view.running else "makes the result again"
            text += f"; of task {ids_text(others)} another node in sync takes over{once}, and {again}"
        if alone and (others or paused):
            text += f"; task {ids_text(alone)} no other node has"
        return text

    def _other_nodes(self) -> list[str]:
        node = self._node
        return remaining_nodes(node.keeper.view, node.spec.run, node.id)

    @property
    def over(self) -> bool:
        """True once a draining node has no primary and is in no task's in-sync set, or `drain_s` has passed."""
        node = self._node
        if not node.draining:
            return False
        if self._past_deadline:
            return True
        if not self._empty():
            return False
        view = node.keeper.view
        # An evicted member holds the committed boundary until the next commit, which a finished job does not have.
        holders = view.in_sync if view.running else view.active_members
        return not any(view.primary_node(t) == node.id or node.id in holders(t) for t in range(node.job.all_tasks))
