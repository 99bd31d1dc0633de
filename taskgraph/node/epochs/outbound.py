"""The items that one attempt puts, and the pulls that wait for them."""

from __future__ import annotations

from collections.abc import Iterable

from taskgraph.protocol.messages import Encoded, Item, Pull, Reason, Refusal, Stamp
from taskgraph.transport.api import PendingReply

__all__ = ["Outbound"]

Channel = tuple[str, int]
"""(tag, consumer)."""


class Outbound:
    """One attempt's outbound channels. An item is kept from `put` to `drop`, and answers all pulls for it.

    Lives on the event loop.
    """

    __slots__ = (
        "_awaited",
        "_dropped",
        "_items",
        "_stamp",
        "_term",
    )

    def __init__(self, stamp: Stamp, term: int, channels: Iterable[Channel]) -> None:
        self._stamp = stamp
        self._term = term
        self._items: dict[Channel, Encoded] = {}
        # Every channel without an item -> the replies that wait for it.
        self._awaited: dict[Channel, list[PendingReply] | None] = dict.fromkeys(channels)
        self._dropped = False

    def put(self, tag: str, consumer: int, value: Encoded) -> bool:
        """Keeps an item and answers the pulls that wait for it. False if the channel has an item, or after `drop`."""
        channel = (tag, consumer)
        if channel not in self._awaited:
            return False
        self._items[channel] = value
        if (waiting := self._awaited.pop(channel)) is not None:
            for reply in waiting:
                reply.settle(Item(self._stamp, self._term, tag, value))
        return True

    def lacks(self, tag: str, consumer: int) -> bool:
        """True if the channel's item has not been put."""
        return (tag, consumer) in self._awaited

    def answer(self, pull: Pull) -> Item | PendingReply | Refusal:
        """Answers a pull: with the item, a reply that `put` settles, or a refusal: the sender is not its consumer."""
        value = self._items.get((pull.tag, pull.sender))
        if value is not None:
            return Item(self._stamp, self._term, pull.tag, value)
        reply = PendingReply()
        refusal = self.settle_when_put(pull, reply)
        return reply if refusal is None else refusal

    def settle_when_put(self, pull: Pull, reply: PendingReply) -> Refusal | None:
        """Settles `reply` once the item is put, perhaps now, or with a refusal once the attempt is over, and returns
        None; or returns a refusal: the sender is no consumer of the channel, or the attempt is over.
        """
        channel, awaited = (pull.tag, pull.sender), self._awaited
        if channel in awaited:
            if (waiting := awaited[channel]) is None:
                awaited[channel] = [reply]  # most channels have one consumer
            else:
                waiting.append(reply)
        elif (value := self._items.get(channel)) is not None:
            reply.settle(Item(self._stamp, self._term, pull.tag, value))
        elif self._dropped:
            return self._over_refusal()
        else:
            return Refusal(Reason.NOT_OFFERED, self._channels_text(pull.sender))
        return None

    def drop(self) -> None:
        """Frees the items and refuses pulls, since the attempt is over."""
        self._dropped = True
        self._items.clear()
        if not self._awaited:
            return  # all were put
        awaited, self._awaited = self._awaited, {}
        for waiting in awaited.values():
            for reply in waiting or ():
                reply.settle(self._over_refusal())

    def _over_refusal(self) -> Refusal:
        return Refusal(Reason.ATTEMPT_GONE, f"attempt {self._stamp.attempt} of epoch {self._stamp.epoch} is over")

    def _channels_text(self, consumer: int) -> str:
        channels = [*self._items, *self._awaited]
        mine = sorted({tag for tag, to in channels if to == consumer})
        others = sorted({tag for tag, to in channels if to != consumer})
        text = f"to task {consumer} it offers: {', '.join(map(repr, mine)) or 'nothing'}"
        return text + (f"; to others: {', '.join(map(repr, others))}" if others else "")
