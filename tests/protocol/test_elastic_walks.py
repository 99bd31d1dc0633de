"""Elastic workers under random orders of events: invariants hold, and each planted mistake breaks one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from elastic_kit import Broken, Message, Peer, SliceSum, World, walk

from taskgraph.protocol.elastic import actions, flush, worker
from taskgraph.protocol.elastic.actions import Contribution
from taskgraph.protocol.elastic.exchange import Exchange
from taskgraph.protocol.elastic.flush import FlushOutcome, FlushReport
from taskgraph.protocol.elastic.round import PositionAtWork
from taskgraph.protocol.elastic.tree import Span
from taskgraph.protocol.elastic.views import View
from taskgraph.protocol.elastic.worker import Phase, Worker

Plant = Callable[[pytest.MonkeyPatch], None]


def test_invariants_hold() -> None:
    for seed in range(200):
        walk(seed)


def test_invariants_hold_if_workers_add_up_together() -> None:
    for seed in range(200):
        walk(seed, together=True)


def test_invariants_hold_if_sums_are_large() -> None:
    sliced = 0
    for seed in range(400):
        sliced += any(peer.slices for peer in walk(seed, large=True).peers.values())
    assert sliced > 80


@pytest.mark.slow
@pytest.mark.parametrize("first", range(400, 3400, 500))
def test_invariants_hold_in_more_walks_with_large_sums(first: int) -> None:
    for seed in range(first, first + 500):
        walk(seed, large=True)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(200, 1700, 500))
def test_invariants_hold_in_more_walks_together(first: int) -> None:
    for seed in range(first, first + 500):
        walk(seed, together=True)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(200, 3200, 500))
def test_invariants_hold_in_more_walks(first: int) -> None:
    for seed in range(first, first + 500):
        walk(seed)


def total_completed_without_a_worker(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Exchange, "covered", lambda self, w, due: w != max(due) or _covered(self, w, due))


def flush_ends_without_all_reports(patch: pytest.MonkeyPatch) -> None:
    def hear(self: Worker, name: str, report: FlushReport) -> None:
        _take_report(self, name, report)
        if self.phase == Phase.FLUSHING and len(self._reports) * 2 > len(self.view.workers):  # type: ignore[union-attr]
            for other in self.view.workers:  # type: ignore[union-attr]
                self._reports.setdefault(other, FlushReport(self.position, False))
            _take_report(self, name, report)

    patch.setattr(Worker, "_take_report", hear)


def reports_before_it_stops(patch: pytest.MonkeyPatch) -> None:
    reported: dict[int, int] = {}

    def read_view(self: Worker, view: View) -> None:
        if self.phase == Phase.WORKING and view.number > max(self.view.number, reported.get(id(self), -1)):  # type: ignore[union-attr]
            reported[id(self)] = view.number
            held = self._round.own.union(*self._round.exchange.received.values())
            self._actions.append(actions.SendReport(view, FlushReport(self.position, self.whole, tuple(sorted(held)))))
            return
        _read_view(self, view)

    patch.setattr(Worker, "read_view", read_view)


def partial_of_an_old_view_is_taken(patch: pytest.MonkeyPatch) -> None:
    def contribution(self: Worker, name: str, message: Contribution) -> bool:
        if self.view is not None and message.view < self.view.number and name in self.view.workers:
            message = Contribution(self.view.number, message.position, message.spans, message.tag)
        return _contribution(self, name, message)

    patch.setattr(Worker, "receive_contribution", contribution)


def keeps_parts_of_other_sources(patch: pytest.MonkeyPatch) -> None:
    def keep(self: PositionAtWork, outcome: FlushOutcome) -> tuple[Span, ...]:
        own = set(self.own)
        _keep(self, outcome)
        self.own = own
        return ()

    patch.setattr(PositionAtWork, "keep", keep)


def newcomer_counts_as_survivor(patch: pytest.MonkeyPatch) -> None:
    def anyone(view: View, reports: dict[str, FlushReport]) -> FlushOutcome | None:
        return _settle(view, {w: FlushReport(r.position, True, r.held, r.begun) for w, r in reports.items()})

    patch.setattr(worker, "decide_flush", anyone)
    patch.setattr("elastic_kit.NEWCOMERS_PROPOSE", True)


def newcomer_is_whole_before_it_holds_the_totals(patch: pytest.MonkeyPatch) -> None:
    def hear(self: Worker, name: str, report: FlushReport) -> None:
        _take_report(self, name, report)
        if self._outcome is not None:
            self.whole = True

    patch.setattr(Worker, "_take_report", hear)


def total_counts_outside_before_it_is_stable(patch: pytest.MonkeyPatch) -> None:
    def note(self: Worker) -> None:
        if self._outcome is not None and self.position > self.stable:
            self._stability.position = self.position
            self._actions.append(actions.TotalsStable(self.position))

    patch.setattr(Worker, "_note_stable", note)


def donor_gives_totals_that_are_not_stable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("elastic_kit.stable_of", lambda donor: donor.core.position)


def worker_returns_under_an_old_entry(patch: pytest.MonkeyPatch) -> None:
    def read_view(self: Worker, view: View) -> None:
        since = view.since(self._me)
        if since is not None and self.view is not None:
            self._since = since
        _read_view(self, view)

    patch.setattr(Worker, "read_view", read_view)
    patch.setattr("elastic_kit.LATE_COPIES", True)


def held_parts_are_dealt_too(patch: pytest.MonkeyPatch) -> None:
    def deal(self: FlushOutcome, parts: int) -> dict[str, tuple[int, ...]]:
        return flush._deal_ranges(range(parts), self.dealt_to)

    patch.setattr(FlushOutcome, "deal", deal)


def total_is_dropped_when_complete(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("elastic_kit.KEEP_TOTALS", False)


def sums_of_another_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("elastic_kit.IN_TREE_ORDER", False)


def early_contributions_survive_a_view(patch: pytest.MonkeyPatch) -> None:
    def read_view(self: Worker, view: View) -> None:
        early = self._early
        _read_view(self, view)
        self._early = early

    patch.setattr(Worker, "read_view", read_view)


_covered, _take_report, _read_view, _contribution = (
    Exchange.covered,
    Worker._take_report,
    Worker.read_view,
    Worker.receive_contribution,
)
_keep, _settle = PositionAtWork.keep, flush.decide_flush

PLANTS: dict[Plant, int] = {
    total_completed_without_a_worker: 37,
    flush_ends_without_all_reports: 12,
    reports_before_it_stops: 0,
    partial_of_an_old_view_is_taken: 35,
    keeps_parts_of_other_sources: 210,
    newcomer_counts_as_survivor: 139,
    newcomer_is_whole_before_it_holds_the_totals: 139,
    total_counts_outside_before_it_is_stable: 75,
    donor_gives_totals_that_are_not_stable: 4920,
    worker_returns_under_an_old_entry: 2031,
    held_parts_are_dealt_too: 44,
    total_is_dropped_when_complete: 50,
    sums_of_another_order: 5,
    early_contributions_survive_a_view: 134,
}
"""Mistakes, and a walk that finds each. If that takes long, make the table again from what the test prints."""

WALKS = 9000
"""Walks in which a mistake must show. Most show in the first 100."""


def is_found(seed: int, *, together: bool = False, large: bool = False) -> bool:
    try:
        walk(seed, together=together, large=large)
    except (Broken, AssertionError, KeyError, ValueError):
        return True
    return False


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_mistake_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found = next((seed for seed in (PLANTS[plant], *range(WALKS)) if is_found(seed)), None)
    assert found is not None, f"no walk of {WALKS} found it"
    print(f"{plant.__name__}: {found}")


@pytest.mark.parametrize("seed", range(40))
def test_worker_with_another_tag_is_excluded(seed: int) -> None:
    world = World(seed, workers=3, steps=3, parts=4, deaths=0, exclusions=0, joins=0)
    world.liars = {"ABC"[seed % 3]}
    world.end()
    assert set(world.view.workers) == {"A", "B", "C"} - world.liars
    assert all(len(world.peers[worker].totals) == 3 for worker in world.view.workers)


def holds_sums_that_were_not_sent(patch: pytest.MonkeyPatch) -> None:
    def stop(self: Exchange, tag: bytes) -> Any:
        self.apart = False
        return _stop(self, tag)

    patch.setattr(Exchange, "end_view", stop)


def sum_of_some_workers_counts(patch: pytest.MonkeyPatch) -> None:
    def operation(self: World, peer: Peer) -> str:
        assert peer.summing is not None
        sums = dict(self.operations[peer.summing[0]])[peer.summing[1]]
        return "+".join(f"({sums[name]})" for name in sorted(sums) if sums[name])

    patch.setattr(World, "operation", operation)


_stop = Exchange.end_view


def slice_of_an_old_view_is_added(patch: pytest.MonkeyPatch) -> None:
    def take(self: World, peer: Peer, sender: str, content: Contribution, sums: dict[Span, str]) -> None:
        older = {s: v for (_, position, s), v in peer.received.items() if s in sums and position == content.position}
        _take(self, peer, sender, content, {**sums, **older})

    patch.setattr(World, "take", take)


def slice_sum_of_an_old_view_is_taken(patch: pytest.MonkeyPatch) -> None:
    def slice_of(self: World, peer: Peer, action: actions.SumTogether, owner: str) -> str | None:
        return next((v for (_, at, o), v in peer.slices.items() if (at, o) == (action.position, owner)), None)

    patch.setattr(World, "slice_of", slice_of)


def slices_are_joined_before_all_contributed(patch: pytest.MonkeyPatch) -> None:
    def deliver(self: World, message: Message) -> None:
        peer, content, view = self.peers[message[1]], message[2], self.peers[message[1]].core.view
        if isinstance(content, SliceSum) and view is not None and view.number == content.view:
            peer.core.note_summed(content.view, content.position)
            peer.summed = peer.summed or message[3][Span(0, 0)]
        _deliver(self, message)

    patch.setattr(World, "deliver", deliver)


_take, _deliver = World.take, World.deliver

SLICE_PLANTS: dict[Plant, int] = {
    slice_of_an_old_view_is_added: 25,
    slice_sum_of_an_old_view_is_taken: 1053,
    slices_are_joined_before_all_contributed: 5,
    holds_sums_that_were_not_sent: 12,
}


@pytest.mark.parametrize("plant", SLICE_PLANTS, ids=lambda plant: plant.__name__)
def test_planted_mistake_is_found_with_large_sums(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found = next((seed for seed in (SLICE_PLANTS[plant], *range(WALKS)) if is_found(seed, large=True)), None)
    assert found is not None, f"no walk of {WALKS} found it"
    print(f"{plant.__name__}: {found}")


@pytest.mark.parametrize("plant", [holds_sums_that_were_not_sent, sum_of_some_workers_counts])
def test_planted_mistake_is_found_together(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(is_found(seed, together=True) for seed in range(WALKS))
