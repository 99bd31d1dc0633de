"""Small boundaries of a task that works ahead of the commit: gathered, and offered to its members in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from taskgraph.graph.values import join_values
from taskgraph.node.primary.send_deadline import SendDeadline
from taskgraph.protocol.boundaries import Boundary
from taskgraph.protocol.messages import Encoded, Offer, Offers

if TYPE_CHECKING:
    from taskgraph.node.services import NodeServices

__all__ = ["UnsentOffers", "message_of"]

_DEADLINE_SHARE = 0.6
"""Deadline, as a share of the commit interval: boundaries offered by then are acknowledged before reports are sent."""
_OVERDUE_SHARE = 0.1
"""How long a boundary waits for others if the next commit is overdue, as a share of the interval."""
_SMALL_BYTES = 16 << 10
"""Larger boundaries are offered at once, each in its own message."""
_MESSAGE_BYTES = 64 << 10


class UnsentOffers:
    """Pending boundaries of one task that were not offered to its members yet.

    They are sent early enough to be acknowledged and reported before the leader's next commit; at once if there are
    enough of them, or if `flush` or `flush_soon` is called since code waits for one.

    Args:
        offer: offers boundaries, in order, to all members.

    Attributes:
        boundaries: by key, in the order they were added.
    """

    def __init__(self, node: NodeServices, offer: Callable[[list[Boundary]], None]) -> None:
        self._node = node
        self._offer = offer
        self._loop = asyncio.get_running_loop()
        self._deadline = SendDeadline(node, _DEADLINE_SHARE)
        self._bytes = 0
        self._last: Encoded | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.boundaries: dict[tuple[int, int, int], Boundary] = {}
        self.set_ahead(node.settings.epochs_ahead)

    def set_ahead(self, ahead: int) -> None:
        """Sets how many epochs the task may be ahead of the commit. Half as many boundaries fill a message."""
        self._deadline.ahead = ahead
        self._enough = max(1, ahead // 2) if self._node.settings.gather_s else 1

    @staticmethod
    def is_small(value: Encoded) -> bool:
        """True if a boundary is small enough to be gathered."""
        return not value.buffers and value.size_bytes <= _SMALL_BYTES

    def add(self, boundary: Boundary, *, goes_on: bool) -> None:
        """Gathers a boundary.

        Args:
            goes_on: the task goes on, and `flush` is called when it stops; False: offer all boundaries now.
        """
        key, value, view = boundary.key, boundary.value, self._node.keeper.view
        self.boundaries[key] = boundary
        if value is not self._last:  # else it will not be sent twice
            self._last = value
            self._bytes += value.size_bytes
        if not goes_on or len(self.boundaries) >= self._enough or self._bytes > _MESSAGE_BYTES:
            self.flush()
        elif view.stamp is not None and key[0] == view.stamp.epoch + 1 and not self._deadline.has_time_left(view):
            self.flush_soon()  # the leader waits for it, perhaps also for others made right now
        elif self._timer is None:
            self._set_timer(self._deadline.at(_OVERDUE_SHARE))

    def note_commit(self, *, goes_on: bool) -> None:
        """Notes that a commit was read: the next deadline counts from it.

        Args:
            goes_on: the attempt goes on; False: there is no deadline, since it is unknown when the next commit comes.
        """
        if goes_on:
            self._deadline.note_commit()
        else:
            self._deadline.forget()
        if self.boundaries:
            self._set_timer(self._deadline.at(_OVERDUE_SHARE))

    def flush(self) -> None:
        """Offers the gathered boundaries to the members now."""
        if self.boundaries:
            gathered = list(self.boundaries.values())
            self.clear()
            self._deadline.mark_sent()
            self._offer(gathered)

    def flush_soon(self) -> None:
        """Offers all gathered boundaries in the next turn of the event loop, with those that are added until then."""
        if self.boundaries:
            self._set_timer(0.0)

    def clear(self) -> None:
        """Drops all gathered boundaries."""
        self.boundaries = {}
        self._bytes = 0
        self._last = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self.flush)


def message_of(boundaries: list[Boundary], task: int, term: int, invitation: int) -> Offer | Offers:
    """Makes one message of these boundaries. A value that is the same object as the previous one is sent once."""
    first = boundaries[0]
    if len(boundaries) == 1:
        return Offer(first.stamp, term, task, False, False, invitation, first.value)
    parts, values = [], []
    before: Encoded | None = None
    for boundary in boundaries:
        value = boundary.value
        own = value is not before
        if own:
            values.append(value)
        parts.append((boundary.stamp.epoch, len(value.meta) if own else 0, value.digest))
        before = value
    return Offers(first.stamp, term, task, invitation, tuple(parts), join_values(values))
