"""What follows from the reports of a view: where it goes on, who sends which sums, and who computes what."""

from __future__ import annotations

import pytest

from taskgraph.protocol.elastic.actions import Contribution
from taskgraph.protocol.elastic.flush import FlushOutcome, FlushReport, decide_flush
from taskgraph.protocol.elastic.round import PositionAtWork
from taskgraph.protocol.elastic.tree import Span
from taskgraph.protocol.elastic.views import View, ViewEntry
from taskgraph.protocol.elastic.worker import Phase, Worker

AB = View(1, 0, (ViewEntry("a", 0), ViewEntry("b", 0)))
ABC = View(1, 0, (*AB.entries, ViewEntry("c", 0)))


def decided(view: View, **reports: FlushReport) -> FlushOutcome:
    outcome = decide_flush(view, reports)
    assert outcome is not None
    return outcome


def holds(*spans: Span, begun: tuple[int, ...] = ()) -> FlushReport:
    return FlushReport(0, True, spans, begun)


def test_largest_span_is_kept_and_all_within_it_are_dropped() -> None:
    few, more, all_four = Span(0, 1), Span(0, 2), Span(0, 4)
    assert decided(ABC, a=holds(few), b=holds(more), c=holds()).sources == {more: "b"}
    assert decided(ABC, a=holds(few, Span(2, 4)), b=holds(more), c=holds(all_four)).sources == {all_four: "c"}
    assert decided(ABC, a=holds(few), b=holds(), c=holds(Span(2, 4))).sources == {Span(2, 4): "c", few: "a"}


def test_most_senior_of_those_that_hold_a_span_is_its_source() -> None:
    first, second = Span(0, 1), Span(1, 2)
    assert decided(ABC, c=holds(first, second), b=holds(second), a=holds()).sources == {first: "c", second: "b"}


def test_worker_that_enters_with_the_view_gets_no_parts_of_the_position_at_work() -> None:
    view = View(2, 0, (ViewEntry("a", 0), ViewEntry("b", 1), ViewEntry("c", 2)))
    outcome = decided(view, a=holds(), b=holds(), c=FlushReport(0, False))
    assert outcome.dealt_to == ("a", "b")
    assert outcome.deal(4) == {"a": (0, 1), "b": (2, 3)}


def test_all_workers_of_a_first_view_get_parts() -> None:
    view = View(2, 2, (ViewEntry("a", 2), ViewEntry("b", 2)))
    assert decided(view, a=holds(), b=holds()).dealt_to == ("a", "b")


def test_parts_of_a_sum_that_another_worker_has_too_are_computed_anew_also_after_the_next_view() -> None:
    work = PositionAtWork("a")
    work.begin(4, b"")
    work.deal(View(0, 0, AB.entries), None)
    assert work.take_parts(None) == [0, 1]
    _, begun = work.end_view()
    outcome = decided(AB, a=holds(begun=begun), b=holds(Span(1, 2)))
    work.keep(outcome)
    work.deal(AB, outcome)
    assert work.due["a"] == {0, 2} and work.take_parts(None) == [2]
    work.finish([Span(0, 2)])
    held, begun = work.end_view()
    assert (held, begun) == ((), (2,))
    outcome = decided(AB, a=holds(begun=begun), b=holds(Span(1, 2)))
    work.keep(outcome)
    work.deal(AB, outcome)
    assert work.take_parts(None) == [0]


@pytest.mark.parametrize(
    ("mine", "a_sent", "c_sent", "held"),
    [
        (b"x", b"x", b"x", (Span(0, 1), Span(2, 3))),
        (b"x", b"y", b"x", (Span(2, 3),)),
        (None, b"y", b"x", ()),  # user code is not there yet
    ],
)
def test_received_sums_are_held_if_their_tag_is_the_workers_own(
    mine: bytes | None, a_sent: bytes, c_sent: bytes, held: tuple[Span, ...]
) -> None:
    """Sums of a worker that differs outlived it if the next view came before the tags of all workers."""
    work = PositionAtWork("b")
    if mine is not None:
        work.begin(3, mine)
    work.exchange.receive("a", Contribution(0, 0, (Span(0, 1),), a_sent))
    work.exchange.receive("c", Contribution(0, 0, (Span(2, 3),), c_sent))
    assert work.end_view()[0] == held


def test_sum_that_came_with_two_tags_is_not_held() -> None:
    """A worker keeps one sum of each span: perhaps the wrong one."""
    work = PositionAtWork("b")
    work.begin(3, b"x")
    work.exchange.receive("a", Contribution(0, 0, (Span(0, 1),), b"y"))
    work.exchange.receive("c", Contribution(0, 0, (Span(0, 1),), b"x"))
    assert work.end_view()[0] == ()


def test_sum_finished_in_a_flush_is_computed_anew_if_one_of_its_parts_was_begun_elsewhere() -> None:
    work = PositionAtWork("b")
    work.begin(4, b"")
    first = View(0, 0, AB.entries)
    work.deal(first, None)
    assert work.take_parts(None) == [2, 3]
    held, begun = work.end_view()
    # user code of "a" was given parts 0 to 2 ahead, of six
    outcome = decided(AB, a=holds(begun=(0, 1, 2)), b=holds(*held, begun=begun))
    assert outcome.begun == {0: "a", 1: "a", 2: "a", 3: "b"}
    work.finish([Span(2, 4)])
    assert work.keep(outcome) == (Span(2, 4),)
    work.deal(AB, outcome)
    assert work.due["b"] == {3} and work.take_parts(None) == [3]


def test_position_that_a_worker_reached_before_the_last_report_came_counts() -> None:
    """It has ended, and says so once in a view."""
    a = Worker("a", position=1, whole=True)
    a.note_entry(0)
    a.read_view(ABC)
    a.receive_report("b", ABC, FlushReport(0, whole=True))
    a.receive_holds_totals("b", ABC.number, 1)  # it had c's report, and got the total that it lacked
    assert a.phase == Phase.FLUSHING
    a.receive_report("c", ABC, FlushReport(1, whole=True))
    assert a.stable == 1


def test_contribution_before_the_last_report_says_what_its_worker_holds() -> None:
    a = Worker("a", position=1, whole=True)
    a.note_entry(0)
    a.read_view(ABC)
    a.receive_report("b", ABC, FlushReport(0, whole=True))
    a.receive_contribution("b", Contribution(ABC.number, 1, (), b""))
    a.receive_report("c", ABC, FlushReport(1, whole=True))
    assert a.stable == 1
