"""Which totals a worker keeps for newcomers."""

from __future__ import annotations

from taskgraph.elastic_jobs.adding import Total
from taskgraph.elastic_jobs.totals import KeptTotals
from taskgraph.graph.sums import Sums
from taskgraph.protocol.elastic.actions import Contribution
from taskgraph.protocol.elastic.flush import FlushReport
from taskgraph.protocol.elastic.tree import Span
from taskgraph.protocol.elastic.views import View, ViewEntry
from taskgraph.protocol.elastic.worker import Worker

BOTH = View(0, 0, (ViewEntry("a", 0), ViewEntry("b", 0)))


def after_a_step() -> tuple[Worker, KeptTotals]:
    """Worker "a" with the total of the first position, which is stable."""
    core = Worker("a", whole=True)
    core.note_entry(0)
    core.read_view(BOTH)
    core.receive_report("b", BOTH, FlushReport(0, whole=True))
    core.begin(1, b"")
    core.receive_contribution("b", Contribution(0, 0, (Span(0, 1),), b""))
    core.receive_holds_totals("b", 0, 1)
    assert core.stable == 1
    totals = KeptTotals(core, 1 << 20)
    totals.keep(0, Total.of(Sums.of({"n": 1})))
    return core, totals


def kept(totals: KeptTotals) -> int:
    totals.drop_entered()
    totals.forget(1)
    return len(totals.page(0)[1])


def test_totals_that_nobody_lacks_are_dropped() -> None:
    _, totals = after_a_step()
    assert kept(totals) == 0


def test_totals_are_kept_for_an_excluded_worker_before_this_one_has_read_the_view_without_it() -> None:
    core, totals = after_a_step()
    totals.keep_for("b", 0)
    assert kept(totals) == 1, "its entry in the view is its earlier one"
    core.read_view(BOTH.without({"b"}))
    assert kept(totals) == 1
    core.read_view(View(2, 0, (ViewEntry("a", 0), ViewEntry("b", 2))))
    assert kept(totals) == 0, "it has entered"


def test_totals_are_not_kept_for_a_newcomer_that_is_gone() -> None:
    _, totals = after_a_step()
    totals.keep_for("c", 0)
    totals.drop_newcomers({"c"})
    assert kept(totals) == 1
    totals.drop_newcomers(())
    assert kept(totals) == 0
