"""What is asked of several epochs at once: `node.attempts` and `node.serving`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from taskgraph.errors import Refused
from taskgraph.graph.values import encode
from taskgraph.node.epochs.attempts import Attempts
from taskgraph.node.epochs.items import Items
from taskgraph.node.serving import Serving
from taskgraph.protocol.messages import Item, Pull, Reason, Refusal, Stamp
from taskgraph.transport.api import PendingReply

VALUE = encode(7)


class View:
    """Everybody is in one term; the job is at an epoch."""

    def __init__(self, epoch: int = 4) -> None:
        self.stamp = Stamp(1, epoch)
        self.consumer = SimpleNamespace(term=1)
        self.primaries = {1: SimpleNamespace(record=self.consumer)}

    def term(self, task: int) -> int:
        return self.consumer.term if task in self.primaries else 0


def attempts(view: View) -> Attempts:
    return Attempts(SimpleNamespace(view=view), 0, 1)  # type: ignore[arg-type]


def composed(attempts: Attempts, epoch: int) -> Any:
    """The attempt at that epoch began, and can say what it offers: 'x' to task 1."""
    out = Items(Stamp(1, epoch), 1, [("x", 1)])
    attempt: Any = SimpleNamespace(stamp=Stamp(1, epoch), out=out, graph=(), drop=out.drop, put_bytes=0)
    attempts.begin(attempt)
    attempts.composed(attempt)
    return attempt


def pull(epoch: int, count: int, *, tag: str = "x", term: int = 1) -> Pull:
    return Pull(Stamp(1, epoch), 1, term, 0, tag, count)


def state(coming: object) -> object:
    return coming.reply if isinstance(coming, PendingReply) else coming


async def test_each_epoch_of_a_pull_is_answered_by_its_own_attempt() -> None:
    """Of one that is over nothing can be said; one that was composed has its item, or promises it."""
    view = View()
    asked = attempts(view)
    for epoch in (5, 6, 7):
        composed(asked, epoch).out.put("x", 1, VALUE) if epoch == 6 else composed(asked, epoch)
    asked.drop_before(6)
    over, there, promised, *later = asked.items(pull(5, 6))
    assert over is None and there == Item(Stamp(1, 6), 1, "x", VALUE)
    assert [state(coming) for coming in (promised, *later)] == [None] * 4
    asked.of(Stamp(1, 7)).out.put("x", 1, VALUE)  # type: ignore[union-attr]
    assert state(promised) == Item(Stamp(1, 7), 1, "x", VALUE)
    eighth = composed(asked, 8)
    assert [state(coming) for coming in later] == [None] * 3
    eighth.out.put("x", 1, VALUE)
    assert [state(coming) for coming in later] == [Item(Stamp(1, 8), 1, "x", VALUE), None, None]
    view.consumer.term = 2  # the consumer was replaced: its successor asks itself
    composed(asked, 9)
    assert isinstance(stale := state(later[1]), Refusal) and stale.reason == Reason.STALE
    asked.end()
    assert isinstance(stale := state(later[2]), Refusal) and stale.reason == Reason.NOT_PRIMARY


async def test_all_who_ask_for_an_epoch_to_come_are_answered() -> None:
    asked = attempts(View())
    one, other = asked.items(pull(5, 1)), asked.items(pull(5, 1))
    composed(asked, 5).out.put("x", 1, VALUE)
    assert [state(coming) for coming in (*one, *other)] == [Item(Stamp(1, 5), 1, "x", VALUE)] * 2


async def test_who_asks_when_the_term_has_ended_does_not_wait() -> None:
    asked = attempts(View())
    composed(asked, 5)
    asked.end()
    assert asked.item(pull(9, 1)) is None and asked.items(pull(8, 2)) == [None, None]
    with pytest.raises(Refused, match="stepped down"):
        await asked.at(Stamp(1, 9))


async def test_a_channel_that_is_not_in_every_epoch_is_refused_where_it_is_not() -> None:
    asked = attempts(View())
    (one, other) = asked.items(pull(5, 2, tag="y"))
    composed(asked, 5)
    assert isinstance(state(one), Refusal) and state(other) is None


def serving(view: View, asked: Attempts, *, max_parked: int = 100) -> Any:
    settings = SimpleNamespace(max_parked=max_parked, epochs_ahead=4)
    roles: Any = SimpleNamespace(primaries={0: SimpleNamespace(attempts=asked)})
    keeper = SimpleNamespace(view=view)
    node: Any = SimpleNamespace(id="n0-1", name="n0", settings=settings, paused=False, keeper=keeper)
    takeovers: Any = None
    return Serving(node, roles, takeovers)


async def test_what_waits_is_counted_until_it_is_answered_or_not_wanted_any_more() -> None:
    view = View()
    asked = attempts(view)
    serves = serving(view, asked, max_parked=10)
    composed(asked, 5).out.put("x", 1, VALUE)
    assert serves.waits == ()
    there, first, second, third = serves.all_now("n", pull(5, 4))
    assert isinstance(there, Item) and serves._waiting.count == 3
    assert serves.all_now("n", pull(6, 4)) is None, "more than may wait"
    assert serves.now("n", pull(6, 1)) is not None and serves._waiting.count == 4
    serves._node.settings.max_parked = 4
    (full,) = serves.waits
    assert "n0 takes no more calls: 4 wait there already" in full and "Settings(max_parked=...)" in full
    second.cancel()
    second.cancel()
    assert serves._waiting.count == 3
    composed(asked, 6).out.put("x", 1, VALUE)
    assert first.done and serves._waiting.count == 1
    asked.end()
    assert third.done and serves._waiting.count == 0


async def test_what_a_node_asks_itself_in_advance_leaves_room_for_what_others_ask() -> None:
    view = View()
    serves = serving(view, attempts(view), max_parked=16)
    assert len(serves.all_now("n0-1", pull(5, 4))) == 4
    assert serves.all_now("n0-1", pull(9, 1)) is None, "4 of the 8 places for epochs to come are left to others"
    assert len(serves.all_now("n", pull(9, 4))) == 4


async def test_half_of_the_places_are_for_the_epoch_at_work_and_what_is_there_needs_none() -> None:
    """Pulls in advance kept out those whose epoch had to be committed first."""
    view = View()
    asked = attempts(view)
    serves = serving(view, asked, max_parked=4)
    composed(asked, 4)
    ahead = [serves.now("n", pull(epoch, 1)) for epoch in (5, 6, 7)]
    assert [coming is None for coming in ahead] == [False, False, True]
    assert serves.all_now("n", pull(4, 2)) is None, "one of them is of an epoch to come"
    assert [serves.now("n", pull(4, 1)) is None for _ in range(3)] == [False, False, True]
    with pytest.raises(Refused, match="4 calls wait at n0 already"):
        await serves("n", pull(4, 1))
    asked.of(Stamp(1, 4)).out.put("x", 1, VALUE)  # type: ignore[union-attr]
    assert serves._waiting.count == 2
    assert [serves.now("n", pull(5, 1)), serves.now("n", pull(4, 1))] == [None, Item(Stamp(1, 4), 1, "x", VALUE)]


async def test_each_is_asked_for_where_the_view_is_not_where_the_caller_is() -> None:
    view = View()
    asked = attempts(view)
    serves = serving(view, asked)
    reach = view.stamp.epoch + 16  # four times as far as tasks may be ahead
    assert serves.all_now("n", pull(reach - 3, 4)) is not None
    assert serves.all_now("n", pull(reach - 2, 4)) is None
    assert serves.all_now("n", pull(3, 4)) is None, "its first epoch is over"
    assert serves.all_now("n", pull(5, 4, term=2)) is None
    assert serves.all_now("n", Pull(Stamp(2, 4), 1, 1, 0, "x", 4)) is None, "another attempt was not read yet"
    serves._roles.primaries.clear()
    assert serves.all_now("n", pull(5, 4)) is None
    serves._node.paused = True
    assert serves.all_now("n", pull(5, 4)) is None
