"""A worker can always say which others it waits for."""

from __future__ import annotations

from taskgraph.protocol.elastic.actions import Contribution
from taskgraph.protocol.elastic.flush import FlushReport
from taskgraph.protocol.elastic.tree import Span
from taskgraph.protocol.elastic.views import View, ViewEntry
from taskgraph.protocol.elastic.worker import Worker


def test_worker_names_whom_it_waits_for() -> None:
    view = View(0, 0, (ViewEntry("A", 0), ViewEntry("B", 0)))
    worker = Worker("A", whole=True)
    worker.note_entry(0)
    assert worker.awaited == ()
    worker.read_view(view)
    assert worker.awaited == ("B",)  # its report
    worker.receive_report("B", view, FlushReport(0, whole=True))
    assert worker.awaited == ()
    worker.begin(2, b"")
    assert worker.awaited == ("B",)  # its part
    worker.receive_contribution("B", Contribution(0, 0, (Span(1, 2),), b""))
    assert worker.awaited == ()


def test_late_message_of_an_excluded_worker_holds_nothing_up() -> None:
    first = View(0, 0, (ViewEntry("A", 0), ViewEntry("B", 0), ViewEntry("C", 0)))
    worker, view = Worker("A", whole=True), first.without({"C"})
    worker.note_entry(0)
    worker.read_view(view)
    worker.receive_report("B", view, FlushReport(0, whole=True))
    worker.receive_holds_totals("C", 0, 0)  # of the view before
    worker.begin(2, b"")
    worker.receive_contribution("B", Contribution(1, 0, (Span(1, 2),), b""))
    assert worker.take_parts() == [0]
    worker.note_computed(0, [Span(0, 1)])
    worker.receive_holds_totals("B", 1, 1)
    assert worker.stable == 1
