"""How a worker leaves in good order: the others get a view without it; then it may go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskgraph.protocol.elastic.succession import leavers

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.interface import WorkerNode

__all__ = ["Leaving"]


class Leaving:
    """Decides if a draining worker may leave (`node.life.DrainingState`)."""

    def __init__(self, node: WorkerNode) -> None:
        self._node = node

    def begin(self, why: str) -> None:
        """Makes the worker drain, and writes that into etcd if the node runs. A second call does nothing."""
        node = self._node
        if node.draining:
            return
        node.draining = True
        node.events.emit("drain", f"{node.name} leaves: {why}", fields={"leaves": node.id})
        if node.running:
            self.announce()

    def announce(self) -> None:
        """Starts a task that writes into etcd that this node drains."""
        self._node.own(self._node.announce(), "announce the drain")

    @property
    def waits(self) -> tuple[str, ...]:
        """Text: why a draining worker cannot leave yet; (): it can, or does not drain."""
        node = self._node
        if not node.draining or self.over or node.id in leavers(node.keeper.view, node.suspects | node.gone):
            return ()
        return (f"{node.name} leaves once another worker has the state: `taskgraph launch`",)

    @property
    def over(self) -> bool:
        """True once the draining worker is in no view, and may go."""
        node, known = self._node, self._node.keeper.view.workers
        return node.draining and (known is None or node.id not in {worker for worker, _ in known.record.workers})
