"""What is pulled in advance, and given: `node.pulls` and `node.items`."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from taskgraph.errors import PeerLost
from taskgraph.graph.values import encode
from taskgraph.node.epochs.items import Items
from taskgraph.node.epochs.pulls import Pulls
from taskgraph.protocol.messages import Item, Pull, Reason, Refusal, Reply, Stamp
from taskgraph.transport.api import Counted, PendingReply

VALUE = encode(7)


class Asked:
    """A router that notes what is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []  # attempt, epoch, count
        self.refuses = False
        self.none_at_once = False

    def begin(self, task: int, pull: Pull) -> asyncio.Future[Reply] | None:
        if self.refuses:
            return None
        self.calls.append((*pull.stamp, pull.count))
        return asyncio.get_running_loop().create_future()

    def begin_all(self, task: int, pull: Pull) -> list[asyncio.Future[Reply]] | None:
        if self.none_at_once:
            return None
        self.calls.append((*pull.stamp, pull.count))
        return [asyncio.get_running_loop().create_future() for _ in range(pull.count)]


def pulls(router: Asked, *, ahead: int = 4, epochs: int | None = None) -> Pulls:
    return Pulls(router, ahead=ahead, epochs=epochs)  # type: ignore[arg-type]


def begin(pulls: Pulls, epoch: int, *, attempt: int = 0, tag: str = "x") -> asyncio.Future[Reply]:
    reply = pulls.begin(Stamp(attempt, epoch), 1, 1, (tag, 0))
    assert reply is not None
    return reply


async def test_a_channel_pulled_twice_running_is_pulled_in_advance() -> None:
    router = Asked()
    asks = pulls(router)
    replies = [begin(asks, epoch) for epoch in range(10)]
    assert router.calls == [(0, 0, 1), (0, 1, 4), (0, 5, 4), (0, 9, 4)]
    assert len(set(replies)) == 10, "each epoch has a call of its own"


async def test_more_than_sixteen_at_a_time_gain_nothing() -> None:
    router = Asked()
    asks = pulls(router, ahead=64)
    for epoch in range(18):
        begin(asks, epoch)
    assert router.calls == [(0, 0, 1), (0, 1, 16), (0, 17, 16)]


async def test_a_channel_that_is_not_in_every_epoch_is_not() -> None:
    router = Asked()
    asks = pulls(router)
    for epoch in range(0, 10, 2):
        begin(asks, epoch)
    assert [count for *_, count in router.calls] == [1] * 5


async def test_nothing_is_asked_for_beyond_the_last_epoch() -> None:
    router = Asked()
    asks = pulls(router, epochs=4)
    for epoch in range(4):
        begin(asks, epoch)
    assert router.calls == [(0, 0, 1), (0, 1, 3)]


async def test_another_attempt_asks_anew_and_the_old_one_wants_nothing_any_more() -> None:
    router = Asked()
    asks = pulls(router)
    begin(asks, 0)
    taken = begin(asks, 1)
    early = [*asks._early[("x", 0)].values()]
    again = begin(asks, 1, attempt=1)
    assert all(reply.cancelled() for reply in early) and not taken.done() and not again.done()
    assert router.calls[-1] == (1, 1, 1)
    begin(asks, 2, attempt=1)
    asks.drop()
    assert not asks._early


async def test_what_was_lost_in_advance_is_asked_for_again() -> None:
    router = Asked()
    asks = pulls(router)
    begin(asks, 0)
    begin(asks, 1)
    second, third, fourth = asks._early[("x", 0)].values()
    second.set_exception(PeerLost("gone"))
    second.exception()
    assert begin(asks, 2) is not second and router.calls[-1] == (0, 2, 4)
    assert third.cancelled() and fourth.cancelled()


async def test_an_epoch_that_was_left_out_gives_up_what_was_asked_for_in_advance() -> None:
    router = Asked()
    asks = pulls(router)
    begin(asks, 0)
    begin(asks, 1)
    (two, *_) = asks._early[("x", 0)].values()
    begin(asks, 3)
    assert not two.cancelled(), "it may still be there: nobody takes it"
    begin(asks, 9)
    assert two.cancelled()


async def test_large_items_are_asked_for_in_advance_as_far_as_they_are_not_too_many() -> None:
    """A task may have many producers, each of which may be ahead of it."""
    router = Asked()
    asks = pulls(router, ahead=16)
    for producer in range(3):
        asks.came("x", producer, encode(np.zeros(1 << 20, np.uint8)))
    begin(asks, 0)
    for producer in range(3):
        asks.came("x", producer, encode(np.zeros(1 << 20, np.uint8)))
    begin(asks, 1)
    assert router.calls[-1] == (0, 1, 10), "10 epochs of 3 MiB each"
    for epoch in range(2, 11):
        begin(asks, epoch)
    asks.came("x", 1, encode(np.zeros(40 << 20, np.uint8)))
    begin(asks, 11)
    assert router.calls[-1] == (0, 11, 1)
    for producer in range(3):
        asks.came("x", producer, VALUE)  # small again
    begin(asks, 12)
    assert router.calls[-1] == (0, 12, 16)


async def test_items_without_buffers_count_where_they_are_large() -> None:
    router = Asked()
    asks = pulls(router, ahead=16)
    value = encode(np.zeros(60_000, np.uint8))
    assert not value.buffers
    for epoch in range(2):
        for producer in range(60):
            begin(asks, epoch)
            asks.came("x", producer, value)
    assert sum(asks.large.values()) == 60 * value.size_bytes
    begin(asks, 20)
    begin(asks, 21)
    assert router.calls[-1] == (0, 21, (32 << 20) // (60 * value.size_bytes))


async def test_of_many_channels_fewer_epochs_are_asked_for_in_advance() -> None:
    router = Asked()
    asks = pulls(router, ahead=16)
    for epoch in range(3):
        for producer in range(100):
            asks.begin(Stamp(0, epoch), 1, 1, ("x", producer))
    assert {count for _, epoch, count in router.calls if epoch > 0} == {2}
    assert sum(count - 1 for *_, count in router.calls) <= 256


async def test_channels_that_are_not_pulled_again_are_forgotten() -> None:
    """Tags with the epoch in them were kept for as long as the attempt; of 256 of them on, no channel was asked for in
    advance, and each pull added up all their bytes."""
    router = Asked()
    asks = pulls(router, ahead=8)
    large = encode(np.zeros(5000, np.uint8))
    for epoch in range(300):
        for tag in ("always", f"epoch {epoch}", f"epochs {epoch // 10}0 to {epoch // 10}9"):
            begin(asks, epoch, tag=tag)
        asks.came("always", 0, large)
        asks.came(f"epoch {max(0, epoch - 3)}", 0, large)  # as of a slow epoch in flight with this one
    assert len(asks._latest) == 4 and len(asks._early) <= 3 and len(asks.large) <= 3
    assert {count for *_, count in router.calls} == {1, 8}
    assert len([count for _, epoch, count in router.calls if epoch >= 290 and count == 8]) == 3


async def test_where_nothing_is_saved_each_is_asked_for_by_itself() -> None:
    router = Asked()
    router.none_at_once = True
    asks = pulls(router)
    for epoch in range(3):
        begin(asks, epoch)
    assert [count for *_, count in router.calls] == [1, 1, 1]
    router.refuses = True
    assert asks.begin(Stamp(0, 3), 1, 1, ("x", 0)) is None


def pull(sender: int = 1, tag: str = "x") -> Pull:
    return Pull(Stamp(2, 5), sender, 1, 0, tag)


async def test_an_item_is_given_to_all_who_wait_and_to_all_who_come_later() -> None:
    items = Items(Stamp(2, 5), 3, [("x", 1), ("x", 2)])
    heard: list[Any] = []
    early = [items.ask(pull()), items.ask(pull())]
    for number, coming in enumerate(early):
        assert isinstance(coming, PendingReply)
        coming.listen(lambda number, reply: heard.append((number, reply)), number)
    assert items.lacks("x", 1) and items.put("x", 1, VALUE) and not items.lacks("x", 1)
    item = Item(Stamp(2, 5), 3, "x", VALUE)
    assert heard == [(0, item), (1, item)]
    assert items.ask(pull()) == item and items.lacks("x", 2)
    assert not items.put("x", 1, VALUE) and not items.put("y", 1, VALUE)


async def test_who_asks_for_what_is_not_offered_hears_what_is() -> None:
    items = Items(Stamp(2, 5), 3, [("x", 1), ("y", 2)])
    items.put("x", 1, VALUE)
    refusal = items.ask(pull(tag="z"))
    assert isinstance(refusal, Refusal) and refusal.reason == Reason.NOT_OFFERED
    assert refusal.text == "to task 1 it offers: 'x'; to others: 'y'"
    assert isinstance(items.promise(pull(sender=3), PendingReply()), Refusal)


async def test_items_that_are_dropped_are_promised_to_nobody() -> None:
    items = Items(Stamp(2, 5), 3, [("x", 1), ("x", 2)])
    items.put("x", 2, VALUE)
    waiting = items.ask(pull())
    assert isinstance(waiting, PendingReply)
    items.drop()
    over = Refusal(Reason.ATTEMPT_GONE, "attempt 2 of epoch 5 is over")
    assert waiting.reply == over and items.ask(pull(sender=2)) == over and not items.put("x", 1, VALUE)


async def test_what_is_coming_is_heard_of_once_and_not_by_who_left() -> None:
    heard: list[Any] = []
    coming = PendingReply()
    coming.among = among = Counted()
    among.count = 1
    coming.listen(lambda number, reply: heard.append(number), 4)
    coming.settle(Refusal("no"))
    coming.settle(Refusal("again"))
    coming.cancel()
    assert heard == [4] and among.count == 0 and await coming == Refusal("no")
    coming.listen(lambda number, reply: heard.append(number), 5)
    assert heard == [4, 5], "there is one: told at once"
    left = PendingReply()
    waiting = asyncio.ensure_future(_await(left))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert left.done and left.reply is None


async def _await(coming: PendingReply) -> Reply:
    return await coming
