"""Parts that a worker gives to user code before that has asked for them."""

from __future__ import annotations

from taskgraph.protocol.elastic.actions import SendReport
from taskgraph.protocol.elastic.tree import Span
from taskgraph.protocol.elastic.views import View, ViewEntry
from taskgraph.protocol.elastic.worker import Worker


def alone_after_a_step(parts: int) -> Worker:
    worker = Worker("a", whole=True)
    worker.note_entry(0)
    worker.read_view(View(0, 0, (ViewEntry("a", 0),)))
    worker.begin(parts, b"")
    assert worker.take_parts() == list(range(parts))
    worker.note_computed(0, [Span(part, part + 1) for part in range(parts)])
    assert worker.position == 1
    worker.take_actions()
    return worker


def test_parts_given_ahead_are_not_given_again() -> None:
    worker = alone_after_a_step(4)
    assert worker.give_parts_ahead() == (4, (0, 1, 2, 3))
    worker.begin(4, b"")
    assert worker.take_parts() == []
    worker.note_computed(1, [Span(0, 2), Span(2, 3), Span(3, 4)])
    assert worker.position == 2


def test_other_number_of_parts_is_dealt_as_usual() -> None:
    worker = alone_after_a_step(4)
    worker.give_parts_ahead()
    worker.begin(2, b"")
    assert worker.take_parts() == [0, 1]


def test_no_parts_ahead_before_the_first_position_and_after_a_change() -> None:
    worker = Worker("a", whole=True)
    assert worker.give_parts_ahead() == (0, ())
    worker = alone_after_a_step(2)
    worker.read_view(View(1, 0, (ViewEntry("a", 0),)))
    assert worker.give_parts_ahead() == (0, ()), "what is dealt here follows from the reports"


def test_report_names_parts_given_ahead() -> None:
    worker = alone_after_a_step(2)
    worker.give_parts_ahead()
    worker.read_view(View(1, 0, (ViewEntry("a", 0),)))
    (report,) = (action.report for action in worker.take_actions() if isinstance(action, SendReport))
    assert report.begun == (0, 1)
    worker.begin(1, b"")
    assert worker.take_parts() == [0], "user code asked for another number"
