"""The ledger of a work queue: each piece is counted once in each pass, whatever happens in whatever order."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskgraph.errors import JobError
from taskgraph.protocol.dealing import ErrorOutcome, QueueLedger, Ticket, piece_order

HOLDERS = "abc"

options = st.fixed_dictionaries(
    {
        "pieces": st.integers(0, 12),
        "passes": st.integers(1, 3),
        "seed": st.integers(0, 3),
        "shuffle": st.booleans(),
        "overlap": st.booleans(),
        "attempts": st.integers(1, 3),
        "on_error": st.just("set aside"),
        "straggler": st.sampled_from([0, 1.0, 3.0]),
    }
)
events = st.lists(
    st.tuples(
        st.sampled_from(["deal", "deal", "count", "count", "count", "fail", "lose", "back", "claim", "copy", "finish"]),
        st.sampled_from(HOLDERS),
        st.integers(0, 11),
        st.integers(0, 5),
    ),
    max_size=80,
)


class Audit:
    """A ledger, and what was counted by it."""

    def __init__(self, **arguments: Any) -> None:
        self.pieces, self.passes = arguments["pieces"], arguments["passes"]
        self.ledger = QueueLedger(**arguments)
        self.given: dict[str, list[Ticket]] = {holder: [] for holder in HOLDERS}
        self.counted: Counter[tuple[int, int]] = Counter()
        self.errors: Counter[tuple[int, int]] = Counter()
        self.now = 0.0

    def happen(self, kind: str, holder: str, which: int, passed: int) -> None:
        self.now += passed
        mine = self.given[holder]
        if kind == "deal":
            mine += self.ledger.deal(holder, which % 4 + 1, self.now)
        elif kind == "claim":
            mine += self.ledger.claim(holder, passed % 3, {which, which // 2}, self.now)
        elif kind == "lose":
            self.ledger.lose(holder)  # its results may still come: they are late
        elif kind == "copy":
            state = self.ledger.state()
            self.ledger = QueueLedger.of(state)
            assert self.ledger.state() == state
        elif mine:
            ticket = mine.pop(which % len(mine))
            if kind == "count" and self.ledger.count(holder, ticket, self.now, rows=2):
                self.counted[ticket[:2]] += 1
            elif kind == "finish":
                if self.ledger.finish(holder, ticket, self.now):
                    mine.append(ticket)
            elif kind == "back":
                self.ledger.give_back(holder, [ticket])
            elif kind == "fail":
                self.fail(holder, ticket)

    def fail(self, holder: str, ticket: Ticket) -> None:
        verdict = self.ledger.fail(holder, ticket, "ValueError")
        if verdict is not ErrorOutcome.LATE:
            self.errors[ticket[:2]] += 1
        if verdict is ErrorOutcome.SET_ASIDE:
            self.counted[ticket[:2]] += 1

    def check(self) -> None:
        assert all(count == 1 for count in self.counted.values())
        assert self.ledger.done + self.ledger.set_aside_count == len(self.counted)
        assert self.ledger.rows == 2 * self.ledger.done
        assert self.ledger.left == self.pieces * self.passes - len(self.counted)
        for counts in self.ledger.counts():
            assert sum(counts[1:5]) == self.pieces and min(counts) >= 0

    def finish(self) -> None:
        """Someone computes all that is left."""
        for holder in HOLDERS:
            self.ledger.lose(holder)
        while tickets := self.ledger.deal("z", 5, self.now):
            for ticket in tickets:
                assert self.ledger.count("z", ticket, self.now, rows=2)
                self.counted[ticket[:2]] += 1


@given(options, events)
def test_each_piece_counts_once_in_each_pass(arguments: dict[str, Any], happening: list[Any]) -> None:
    audit = Audit(**arguments)
    for event in happening:
        audit.happen(*event)
        audit.check()
    audit.finish()
    audit.check()
    assert audit.ledger.over
    assert set(audit.counted) == {(e, n) for e in range(arguments["passes"]) for n in range(arguments["pieces"])}


@given(options, events)
def test_only_errors_count_as_attempts(arguments: dict[str, Any], happening: list[Any]) -> None:
    audit = Audit(**arguments)
    for event in happening:
        audit.happen(*event)
    for aside in audit.ledger.set_aside:
        assert audit.errors[aside.pass_number, aside.piece] == arguments["attempts"]
    assert audit.ledger.set_aside_count == sum(n == arguments["attempts"] for n in audit.errors.values())


@given(options, events, st.integers(0, 80))
def test_a_ledger_made_from_its_state_goes_on_alike(arguments: dict[str, Any], happening: list[Any], at: int) -> None:
    plain, copied = Audit(**arguments), Audit(**arguments)
    for index, event in enumerate(happening):
        if index == at:
            copied.happen("copy", "a", 0, 0)
        plain.happen(*event)
        copied.happen(*event)
        assert copied.given == plain.given
        assert copied.ledger.state() == plain.ledger.state()
        assert copied.ledger.slow(plain.now) == plain.ledger.slow(plain.now)


def pieces(tickets: list[Ticket]) -> list[tuple[int, int]]:
    return [(ticket.pass_number, ticket.piece) for ticket in tickets]


def test_pieces_of_a_lost_holder_are_dealt_first() -> None:
    ledger = QueueLedger(6)
    lost = ledger.deal("a", 2, 0)
    ledger.deal("b", 1, 0)
    ledger.lose("a")
    assert pieces(ledger.deal("b", 4, 1)) == [(0, 0), (0, 1), (0, 3), (0, 4)]
    assert not ledger.count("a", lost[0], 1), "its result is late"
    assert ledger.counts()[0].done == 0


def test_the_next_pass_opens_when_this_one_is_done() -> None:
    ledger = QueueLedger(2, passes=2)
    first, second = ledger.deal("a", 9, 0)
    assert ledger.deal("b", 1, 0) == []
    ledger.count("a", first, 1)
    assert ledger.deal("b", 1, 1) == []
    ledger.count("a", second, 1)
    assert pieces(ledger.deal("b", 9, 1)) == [(1, 0), (1, 1)]


def test_with_overlap_at_most_two_passes_are_open() -> None:
    ledger = QueueLedger(2, passes=None, overlap=True)
    assert pieces(ledger.deal("a", 9, 0)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [counts.pass_number for counts in ledger.counts()] == [0, 1]
    ledger.count("a", Ticket(1, 0, 0), 1)
    ledger.count("a", Ticket(1, 1, 0), 1)
    ledger.count("a", Ticket(0, 0, 0), 1)
    assert [counts.done for counts in ledger.counts()] == [1, 2], "pass 1 is done, but waits for pass 0"
    ledger.count("a", Ticket(0, 1, 0), 1)
    assert pieces(ledger.deal("a", 1, 1)) == [(2, 0)]
    assert not ledger.over


def test_passes_are_shuffled_differently_and_alike_on_all_nodes() -> None:
    assert piece_order(5, 0, 7, False) == range(5)
    assert piece_order(8, 0, 7, True) == (0, 1, 6, 7, 4, 2, 3, 5)
    assert piece_order(8, 1, 7, True) != piece_order(8, 0, 7, True) != piece_order(8, 0, 8, True)
    ledger = QueueLedger(8, seed=7, shuffle=True)
    assert [ticket.piece for ticket in ledger.deal("a", 8, 0)] == [*piece_order(8, 0, 7, True)]


def test_errors_over_the_cap_fail_the_job() -> None:
    ledger = QueueLedger(1, attempts=2)
    for attempt, verdict in (0, ErrorOutcome.AGAIN), (1, ErrorOutcome.FAIL_JOB):
        (ticket,) = ledger.deal("a", 1, 0)
        assert ticket == (0, 0, attempt)
        assert ledger.fail("a", ticket, "ValueError: no") is verdict
        ledger.lose("a")


def test_a_piece_set_aside_is_listed_and_tried_again_in_the_next_pass() -> None:
    ledger = QueueLedger(2, attempts=1, on_error="set aside", passes=2)
    first, second = ledger.deal("a", 2, 0)
    assert ledger.fail("a", first, "ValueError: no") is ErrorOutcome.SET_ASIDE
    assert ledger.count("a", second, 1)
    assert ledger.set_aside == ((0, 0, "a", "ValueError: no"),)
    assert ledger.counts()[0] == (0, 1, 0, 0, 1, 0)
    assert pieces(ledger.deal("a", 2, 2)) == [(1, 0), (1, 1)]


def test_a_straggler_is_dealt_again_and_its_late_result_dropped() -> None:
    ledger = QueueLedger(3, straggler=3)
    (slow,) = ledger.deal("a", 1, 0)
    first, second = ledger.deal("b", 2, 0)
    ledger.count("b", first, 1)
    ledger.count("b", second, 1)
    assert ledger.deal("b", 1, 3) == [], "three times the median has not passed"
    assert ledger.deal("a", 1, 4) == [], "its holder does not get it a second time"
    assert ledger.slow(4) == [(0, slow.piece, "a", 4)]
    assert ledger.deal("b", 9, 4) == [slow]
    assert ledger.deal("c", 1, 6) == [], "the newest holder has had it for 2 s only"
    assert ledger.count("b", slow, 7)
    assert not ledger.count("a", slow, 8)
    assert ledger.over


def test_a_straggler_whose_copy_is_lost_stays_dealt() -> None:
    ledger = QueueLedger(2)
    (slow,) = ledger.deal("a", 1, 0)
    (quick,) = ledger.deal("b", 1, 0)
    ledger.count("b", quick, 1)
    assert ledger.deal("b", 1, 9) == [slow]
    ledger.lose("b")
    assert ledger.counts()[0].open == 0
    assert ledger.count("a", slow, 10)


def test_a_finished_piece_is_no_straggler_and_is_open_again_when_its_holder_is_lost() -> None:
    ledger = QueueLedger(2, straggler=1)
    first, second = ledger.deal("a", 2, 0)
    assert ledger.finish("a", first, 1)
    assert ledger.unfinished == 1
    assert ledger.dealt() == {"a": [second]}
    assert ledger.finished("a") == [first]
    assert ledger.is_dealt_to("a", second) and not ledger.is_dealt_to("a", first)
    assert ledger.next_slow_at(0.5) == 1 and ledger.next_slow_at(2) is None
    assert ledger.deal("b", 9, 5) == [second]
    assert ledger.finish("b", second, 6)
    assert not ledger.finish("a", second, 7), "the result of b is kept"
    assert ledger.deal("c", 9, 99) == []
    assert not ledger.over
    ledger.lose("a")
    assert ledger.deal("c", 9, 99) == [first]
    assert ledger.count("c", first, 100)
    assert ledger.count("b", second, 100)
    assert ledger.over


def test_a_claim_takes_a_piece_that_another_one_computes() -> None:
    ledger = QueueLedger(2)
    (dealt, _) = ledger.deal("a", 2, 0)
    assert ledger.claim("b", 0, {0}, 1) == [dealt]
    assert ledger.finish("b", dealt, 1)
    assert not ledger.finish("a", dealt, 2)
    assert ledger.claim("c", 0, {0}, 3) == []


def test_claimed_pieces_are_not_dealt_again() -> None:
    ledger = QueueLedger(6)
    taken = ledger.claim("a", 0, {1, 4, 9}, 0)
    assert pieces(taken) == [(0, 1), (0, 4)]
    assert all(ledger.finish("a", ticket, 0) for ticket in taken)
    assert ledger.claim("b", 0, {4}, 0) == []
    assert [ticket.piece for ticket in ledger.deal("b", 9, 0)] == [0, 2, 3, 5]
    assert all(ledger.count("a", ticket, 1) for ticket in taken)


def test_the_state_is_small() -> None:
    ledger = QueueLedger(100_000, shuffle=True)
    for _ in range(500):
        for ticket in ledger.deal("a", 100, 0):
            ledger.count("a", ticket, 0)
    ledger.deal("b", 100, 1)
    assert len(repr(ledger.state())) < 5_000


def test_events_cost_microseconds() -> None:
    ledger, began = QueueLedger(100_000), time.thread_time()
    while tickets := ledger.deal("a", 50, 0):
        for ticket in tickets:
            ledger.count("a", ticket, 0)
    assert ledger.over
    assert time.thread_time() - began < 5, "100,000 pieces; usually 0.2 s"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"pieces": -1}, "-1 pieces"),
        ({"passes": 0}, "one pass at least"),
        ({"attempts": 0}, "tried once"),
        ({"on_error": "skip"}, "set aside"),
        ({"straggler": 0.5}, "multiple of the median"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        QueueLedger(**{"pieces": 1, **arguments})
