"""Large sums, added up in slices, on one worker.

    sums of each worker ──a slice to each owner──► owner ──the sum of its slice──► all workers ──join──► the total

Each worker with parts owns a slice: a range of the elements. It adds its slice of all sums along the tree, so the total
has the same bits as without slices. A worker receives about twice the size of a sum, with any number of workers.

Slices and their sums are of one view. The next one begins from the whole sums, which each worker keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from taskgraph.elastic_jobs.adding import Total
from taskgraph.graph.blocks import Allocate
from taskgraph.graph.sums import Sums, add_up, encode_sums, join_slices
from taskgraph.protocol.elastic.actions import SumTogether
from taskgraph.protocol.elastic.tree import Span
from taskgraph.protocol.messages import Encoded, SliceSum

if TYPE_CHECKING:
    from taskgraph.node.core import NodeCore

__all__ = ["Slices", "encode_slices"]


def encode_slices(
    sums: Sequence[Sums], owners: Sequence[str], others: Sequence[str], allocate: Allocate
) -> dict[str, Encoded]:
    """Encodes sums for each other worker of the view: its slice; if it owns none, only layout and collected values.

    The sums must not change later.
    """
    bare = encode_sums([each.without_arrays() for each in sums])
    slices = {worker: index for index, worker in enumerate(owners)}
    return {
        worker: encode_sums([each.slice(slices[worker], len(owners)) for each in sums], allocate)
        if worker in slices
        else bare
        for worker in others
    }


class Slices:
    """The slice that this worker adds up, and the sums of slices of all owners.

    Args:
        send: sends a message of a view to all its other workers.
        changed: called when a thread has added up this worker's slice.
    """

    def __init__(self, node: NodeCore, send: Callable[[int, SliceSum], None], changed: Callable[[], None]) -> None:
        self._node = node
        self._send = send
        self._changed = changed
        self._at: SumTogether | None = None  # what is added up
        self._whole: Sums | None = None  # its layout, and what was collected
        self._found: dict[tuple[int, int, str], Sums] = {}  # by view, position and owner

    def begin(self, at: SumTogether, own: Mapping[Span, Sums], received: Mapping[Span, Sums], whole: Sums) -> None:
        """Begins to add up this worker's slice, if it owns one (large ones in a thread); then sends the sum.

        Args:
            own: what this worker contributed.
            received: this worker's slices of what all others contributed.
            whole: a sum without arrays: the layout of the total, and what was collected.
        """
        self._at, self._whole = at, whole
        if self._node.id not in at.owners:
            return
        index = at.owners.index(self._node.id)
        slices = {span: sums.slice(index, len(at.owners)) for span, sums in own.items()} | dict(received)
        add = partial(_add, slices, self._node.router.allocate)
        if any(each.is_large for each in slices.values()):
            self._node.own(self._add_in_thread(at, add), "add up a slice")
        else:
            self._give(at, add())

    async def _add_in_thread(self, at: SumTogether, add: Callable[[], tuple[Sums, Encoded]]) -> None:
        """Adds up this worker's slice in a thread, and sends the sum to all others, unless the view has changed."""
        made = await self._node.threads.run(add)
        if at is self._at:
            self._give(at, made)
            self._changed()

    def _give(self, at: SumTogether, made: tuple[Sums, Encoded]) -> None:
        """Keeps the sum of this worker's slice, and sends it to all others."""
        sums, value = made
        self.put_sum(at.view, at.position, self._node.id, sums)
        self._send(at.view, SliceSum(at.view, at.position, value))

    def put_sum(self, view: int, position: int, owner: str, sums: Sums) -> None:
        """Keeps the sum of a slice, as its owner has added it up."""
        self._found.setdefault((view, position, owner), sums)

    @property
    def awaited(self) -> tuple[str, ...]:
        """The other owners whose slice sums are missing here."""
        at = self._at
        if at is None:
            return ()
        return tuple(w for w in at.owners if w != self._node.id and (at.view, at.position, w) not in self._found)

    def take_total(self) -> tuple[SumTogether, Total] | None:
        """Returns the action of `begin` and its total, once, if the sums of all slices are there; else None."""
        at, whole = self._at, self._whole
        if at is None or whole is None:
            return None
        found = [self._found.get((at.view, at.position, owner)) for owner in at.owners]
        slices = [sums for sums in found if sums is not None]
        if len(slices) < len(found):
            return None
        self._at = self._whole = None
        return at, Total(partial(join_slices, whole, slices, self._node.router.allocate), sum(s.nbytes for s in slices))

    def drop(self, view: int, position: int) -> None:
        """Drops slice sums of views before `view` and of positions before `position`, and stops adding up for those."""
        self._found = {key: sums for key, sums in self._found.items() if key[0] >= view and key[1] >= position}
        if self._at is not None and (self._at.view < view or self._at.position < position):
            self._at = self._whole = None


def _add(slices: Mapping[Span, Sums], allocate: Allocate) -> tuple[Sums, Encoded]:
    """Returns the sum of a slice, also encoded."""
    added = add_up(slices, Span(0, max(span.end for span in slices)), allocate)
    sums = Sums(added.layout, added.arrays)
    return sums, encode_sums([sums], allocate)
