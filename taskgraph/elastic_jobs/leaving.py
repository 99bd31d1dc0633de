"""How a worker leaves in good order: the others get a view without it; then it may go.

If all nodes drain, they leave once the most senior one has written a checkpoint (`checkpoints`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from taskgraph.protocol.elastic.succession import all_may_leave, leavers

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.interface import WorkerNode

__all__ = ["Leaving"]


class Leaving:
    """Decides if a draining worker may leave (`node.life.DrainingState`).

    Args:
        writing: returns True while this worker writes a checkpoint.
    """

    def __init__(self, node: WorkerNode, writing: Callable[[], bool]) -> None:
        self._node = node
        self._writing = writing

    def begin(self, why: str) -> None:
        """Makes the worker drain, and writes that into etcd if the node runs. A second call does nothing."""
        node = self._node
        if node.draining:
            return
        node.draining = True
        node.events.emit("drain", f"{node.name} leaves: {why}", fields={"leaves": node.id})
        if node.running:
            self.announce_in_etcd()

    def announce_in_etcd(self) -> None:
        """Begins to write the drain to the node's key in etcd. Does not wait."""
        self._node.own(self._node.announce(), "announce the drain")

    @property
    def waits(self) -> tuple[str, ...]:
        """Lines for `status`: what a draining worker waits for until it leaves; (): it can leave, or does not drain."""
        node = self._node
        if not node.draining or self.over or node.id in leavers(node.keeper.view, node.suspects | node.gone):
            return ()
        saved = "" if node.spec.checkpoint is None else ", or a checkpoint is complete"
        return (f"{node.name} leaves once another worker has the state{saved}: `taskgraph launch`",)

    @property
    def over(self) -> bool:
        """True once the draining worker is in no view, or all nodes drain and a checkpoint is complete."""
        node, view = self._node, self._node.keeper.view
        if not node.draining or self._writing():
            return False
        known = view.workers
        return known is None or node.id not in {worker for worker, _ in known.record.workers} or all_may_leave(view)
