"""Placement: what is good about the wishes, and that a job gets there step by step."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskgraph.protocol.placement import CurrentReplicas, Seat, Wish, place

Holdings = dict[int, CurrentReplicas]


def seats_of(*nodes: str, host: str = "h") -> list[Seat]:
    return [Seat(node, host) for node in nodes]


def adopted(wishes: Mapping[int, Wish]) -> Holdings:
    return {t: CurrentReplicas(w.primary, (w.primary, *w.backups)) for t, w in wishes.items() if w.primary is not None}


def without(holdings: Holdings, *gone: str) -> Holdings:
    """What is left when nodes are gone: no takeover has happened yet."""
    return {
        t: CurrentReplicas(None if h.primary in gone else h.primary, tuple(m for m in h.members if m not in gone))
        for t, h in holdings.items()
    }


def pairs(wishes: Mapping[int, Wish]) -> set[tuple[int, str]]:
    return {(t, n) for t, w in wishes.items() if w.primary is not None for n in (w.primary, *w.backups)}


def held(holdings: Holdings) -> set[tuple[int, str]]:
    return {(t, n) for t, h in holdings.items() for n in {h.primary, *h.members} if n is not None}


def leads(wishes: Mapping[int, Wish], seats: Sequence[Seat]) -> list[int]:
    counts = Counter(w.primary for w in wishes.values())
    return [counts[seat.node] for seat in seats]


def replicas(wishes: Mapping[int, Wish], seats: Sequence[Seat]) -> list[int]:
    counts = Counter(node for _, node in pairs(wishes))
    return [counts[seat.node] for seat in seats]


def spread(counts: Sequence[int]) -> int:
    return max(counts) - min(counts)


# -- examples ----------------------------------------------------------------------------------------------------


def test_new_job_is_placed_in_blocks() -> None:
    seats = seats_of("a", "b", "c", "d")
    wishes = place(seats, 12, 1, {})
    assert [wishes[t].primary for t in range(12)] == list("aaabbbcccddd")
    assert replicas(wishes, seats) == [6, 6, 6, 6]
    for node in "abcd":
        behind = {w.backups[0] for w in wishes.values() if w.primary == node}
        assert len(behind) >= 2, "the loss of one node must not burden one other with everything"


def test_order_of_seats_does_not_matter() -> None:
    seats = seats_of("a", "b", "c", "d", "e")
    wishes = place(seats, 17, 2, {})
    assert place(seats[::-1], 17, 2, dict(reversed(adopted(wishes).items()))) == wishes
    assert place(seats[::-1], 17, 2, {}) == wishes


def test_one_node_has_everything_and_no_backups() -> None:
    assert place(seats_of("a"), 3, 2, {}) == {t: Wish("a", ()) for t in range(3)}


def test_no_seats_mean_no_wishes() -> None:
    assert place([], 2, 1, {}) == {0: Wish(None, ()), 1: Wish(None, ())}
    assert place([], 2, 1, {0: CurrentReplicas("a", ("a",))}) == {0: Wish(None, ()), 1: Wish(None, ())}
    assert place([], 0, 1, {}) == {}


def test_more_nodes_than_tasks() -> None:
    seats = seats_of(*"abcdefg")
    wishes = place(seats, 3, 1, {})
    assert sorted(leads(wishes, seats)) == [0, 0, 0, 0, 1, 1, 1]
    assert sorted(replicas(wishes, seats)) == [0, 1, 1, 1, 1, 1, 1]


def test_fewer_nodes_than_replicas_asked_for() -> None:
    wishes = place(seats_of("a", "b"), 4, 3, {})
    assert all(len(w.backups) == 1 and w.primary not in w.backups for w in wishes.values())


def test_joining_node_gets_its_share() -> None:
    seats = seats_of("a", "b", "c")
    before = adopted(place(seats, 24, 1, {}))
    seats = [*seats, Seat("d", "h")]
    wishes = place(seats, 24, 1, before)
    assert leads(wishes, seats) == [6, 6, 6, 6]
    assert replicas(wishes, seats) == [12, 12, 12, 12]
    copies = pairs(wishes) - held(before)
    assert len(copies) == 12
    assert {node for _, node in copies} == {"d"}


def test_second_node_gets_half_of_the_primaries() -> None:
    seats = seats_of("a", "b")
    wishes = place(seats, 10, 1, {t: CurrentReplicas("a", ("a",)) for t in range(10)})
    assert leads(wishes, seats) == [5, 5]
    assert replicas(wishes, seats) == [10, 10]


def test_hand_over_prefers_current_members() -> None:
    # b backs everything: only hand-overs, and only as many as it takes.
    seats = seats_of("a", "b", "c")
    before = {t: CurrentReplicas("a", ("a", "b")) for t in range(4)} | {
        t: CurrentReplicas("c", ("c", "a")) for t in range(4, 6)
    }
    wishes = place(seats, 6, 1, before)
    assert leads(wishes, seats) == [2, 2, 2]
    assert sum(wishes[t].primary != before[t].primary for t in range(6)) == 2
    assert replicas(wishes, seats) == [4, 4, 4]


def test_chain_of_hand_overs_evens_primaries() -> None:
    # a leads three tasks and c one; c backs none of a's.
    seats = seats_of("a", "b", "c", "d")
    holders = ["ab", "ab", "ad", "bc", "bc", "cd", "dc", "da"]
    before = {t: CurrentReplicas(two[0], tuple(two)) for t, two in enumerate(holders)}
    wishes = place(seats, 8, 1, before)
    assert leads(wishes, seats) == [2, 2, 2, 2]
    assert pairs(wishes) == held(before)
    assert sum(wishes[t].primary != before[t].primary for t in range(8)) == 2


def test_backups_take_over_after_a_loss() -> None:
    seats = seats_of("a", "b", "c", "d")
    before = adopted(place(seats, 24, 1, {}))
    left = without(before, "b")
    seats = [s for s in seats if s.node != "b"]
    wishes = place(seats, 24, 1, left)
    assert spread(leads(wishes, seats)) == 0
    assert spread(replicas(wishes, seats)) == 0
    assert pairs(wishes) >= held(left), "nothing that is left moves"
    for t, holding in left.items():
        assert wishes[t].primary in holding.members


def test_draining_node_gives_its_tasks_up() -> None:
    seats = seats_of("a", "b", "c", "d")
    before = adopted(place(seats, 24, 1, {}))
    rest = [s for s in seats if s.node != "b"]
    assert place(rest, 24, 1, before) == place(rest, 24, 1, without(before, "b"))


def test_two_nodes_leave_at_once() -> None:
    seats = seats_of("a", "b", "c", "d", "e")
    left = without(adopted(place(seats, 40, 1, {})), "b", "d")
    orphans = [t for t, h in left.items() if not h.members]
    assert orphans, "the example must lose both replicas of some task"
    seats = [s for s in seats if s.node not in "bd"]
    wishes = place(seats, 40, 1, left)
    assert spread(leads(wishes, seats)) <= 1
    assert spread(replicas(wishes, seats)) <= 1
    assert all(w.primary is not None and len(w.backups) == 1 for w in wishes.values())


def test_absent_node_keeps_its_replicas() -> None:
    seats = seats_of("a", "b", "c", "d")
    before = adopted(place(seats, 22, 1, {}))
    rest = [s for s in seats if s.node != "b"]
    assert place(rest, 22, 1, before, keep=frozenset("b")) == place(seats, 22, 1, before)
    # Its primaries were taken over meanwhile: it still backs them.
    taken = {t: CurrentReplicas(h.members[1], h.members) if h.primary == "b" else h for t, h in before.items()}
    wishes = place(rest, 22, 1, taken, keep=frozenset("b"))
    assert {p for p in pairs(wishes) if p[1] == "b"} == {p for p in held(before) if p[1] == "b"}
    assert all(w.primary != "b" for w in wishes.values())
    # It is gone for good.
    assert all(node != "b" for _, node in pairs(place(rest, 22, 1, taken)))


def test_absent_surplus_member_is_dropped_first() -> None:
    wishes = place(seats_of("a", "c"), 1, 1, {0: CurrentReplicas("a", ("a", "b", "c"))}, keep=frozenset("b"))
    assert wishes == {0: Wish("a", ("c",))}


def test_task_waits_for_its_absent_member() -> None:
    wishes = place(seats_of("a"), 1, 0, {0: CurrentReplicas("x", ("b",))}, keep=frozenset("b"))
    assert wishes == {0: Wish("b", ())}


def test_replicas_are_on_different_hosts() -> None:
    seats = [Seat("a", "h1"), Seat("b", "h1"), Seat("c", "h2"), Seat("d", "h2")]
    host = {s.node: s.host for s in seats}
    wishes = place(seats, 20, 1, {})
    assert all(host[w.primary or ""] != host[w.backups[0]] for w in wishes.values())
    assert leads(wishes, seats) == [5, 5, 5, 5]
    assert replicas(wishes, seats) == [10, 10, 10, 10]


def test_hosts_count_between_primaries_and_replicas() -> None:
    seats = [Seat("a", "h1"), Seat("b", "h1"), Seat("c", "h1"), Seat("d", "h2")]
    wishes = place(seats, 12, 1, {})
    assert all("d" in (w.primary, *w.backups) for w in wishes.values())
    assert leads(wishes, seats) == [3, 3, 3, 3]
    assert replicas(wishes, seats) == [4, 4, 4, 12]


def test_second_host_takes_a_backup_of_everything() -> None:
    seats = seats_of("a", "b")
    before = adopted(place(seats, 8, 1, {}))
    wishes = place([*seats, Seat("c", "other")], 8, 1, before)
    assert all("c" in (w.primary, *w.backups) for w in wishes.values())


def test_device_tasks_are_only_on_seats_with_devices() -> None:
    seats = [Seat("a", "h", 1), Seat("b", "h"), Seat("c", "h", 2), Seat("d", "h")]
    wishes = place(seats, 12, 1, {}, needs_device=lambda t: t < 4)
    assert all({wishes[t].primary, *wishes[t].backups} == {"a", "c"} for t in range(4))
    assert leads(wishes, seats) == [3, 3, 3, 3]
    assert leads({t: wishes[t] for t in range(4)}, seats) == [2, 0, 2, 0]
    wishes = place(seats, 8, 1, {}, needs_device=lambda t: True)
    assert leads(wishes, seats) == [4, 0, 4, 0]


def test_device_task_without_a_device_has_no_primary() -> None:
    wishes = place(seats_of("a", "b"), 2, 1, {0: CurrentReplicas("a", ("a",))}, needs_device=lambda t: t == 0)
    assert wishes[0] == Wish(None, ())
    assert wishes[1].primary is not None


def test_primary_without_member_key_counts() -> None:
    assert place(seats_of("a", "b", "c"), 1, 1, {0: CurrentReplicas("b", ("c",))}) == {0: Wish("b", ("c",))}


def test_backups_stand_in_the_order_of_their_admission() -> None:
    wishes = place(seats_of("a", "b", "c", "d"), 1, 3, {0: CurrentReplicas("c", ("d", "c", "a"))})
    assert wishes == {0: Wish("c", ("d", "a", "b"))}


# -- properties --------------------------------------------------------------------------------------------------


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Seat], int, int, Holdings, Callable[[int], bool], frozenset[str]]:
    """Random seats and holdings, with absent and gone nodes and surplus members."""
    names = [f"n{i}" for i in range(draw(st.integers(1, 7)))]
    hosts = draw(st.integers(1, 4))
    seats = [Seat(n, f"h{draw(st.integers(1, hosts))}", draw(st.integers(0, 1))) for n in names]
    absent = [f"k{i}" for i in range(draw(st.integers(0, 2)))]
    anyone = st.sampled_from([*names, *absent, "gone1", "gone2"])
    tasks = draw(st.integers(0, 14))
    holdings = {
        t: CurrentReplicas(draw(st.none() | anyone), tuple(draw(st.lists(anyone, unique=True, max_size=5))))
        for t in range(tasks)
        if draw(st.booleans())
    }
    choosy = draw(st.sets(st.integers(0, 13), max_size=5))
    return seats, tasks, draw(st.integers(0, 3)), holdings, lambda t: t in choosy, frozenset(absent)


@settings(max_examples=300, deadline=None)
@given(situations())
def test_wishes_are_valid_and_stable(situation: tuple) -> None:
    seats, tasks, backups, holdings, needs_device, keep = situation
    wishes = place(seats, tasks, backups, holdings, needs_device, keep)
    by_id = {s.node: s for s in seats}
    before = held(holdings)
    assert list(wishes) == list(range(tasks))
    for t, w in wishes.items():
        eligible = {s.node for s in seats if s.devices or not needs_device(t)}
        holders = [w.primary, *w.backups]
        assert len(set(holders)) == len(holders)
        if w.primary is None:
            assert not w.backups
            assert not eligible
            continue
        for node in holders:
            assert node in eligible or (node in keep and (t, node) in before)
        absent = sum(node in keep for node in holders)
        assert len(holders) == min(backups + 1, len(eligible) + absent)
        # A primary on a seat or absent is only moved for balance; an absent one never.
        now = holdings[t].primary if t in holdings else None
        if now in keep:
            assert w.primary == now
        hosts = [by_id[n].host for n in holders if n in by_id]
        unused = {by_id[n].host for n in eligible} - set(hosts)
        assert len(set(hosts)) == len(hosts) or not unused
    again = place(seats, tasks, backups, adopted(wishes), needs_device, keep)
    assert again == wishes


@settings(max_examples=300, deadline=None)
@given(situations())
def test_primaries_are_even_also_on_devices(situation: tuple) -> None:
    seats, tasks, backups, holdings, needs_device, keep = situation
    wishes = place(seats, tasks, backups, holdings, needs_device, keep)
    counts = dict(zip([s.node for s in seats], leads(wishes, seats), strict=True))
    for t, w in wishes.items():
        if w.primary in counts:
            for s in seats:
                if s.devices or not needs_device(t):
                    assert counts[w.primary] - counts[s.node] <= 1
    with_device = Counter(w.primary for t, w in wishes.items() if needs_device(t))
    assert spread([with_device[s.node] for s in seats if s.devices] or [0]) <= 1


def test_device_tasks_change_places_with_others() -> None:
    """Even numbers of primaries alone would leave one device with everything."""
    needs = {0, 1, 2, 3}
    alone = [Seat("a", "h", 1), Seat("b", "h")]
    before = adopted(place(alone, 8, 1, {}, needs.__contains__))
    assert {before[t].primary for t in needs} == {"a"}
    grown = [*alone, Seat("c", "h", 1)]
    wishes = place(grown, 8, 1, before, needs.__contains__)
    assert Counter(wishes[t].primary for t in needs) == {"a": 2, "c": 2}
    assert spread(leads(wishes, grown)) <= 1
    assert place(grown, 8, 1, adopted(wishes), needs.__contains__) == wishes


@settings(max_examples=200, deadline=None)
@given(situations())
def test_replicas_are_even_on_one_host(situation: tuple) -> None:
    seats, tasks, backups, holdings, _, _ = situation
    seats = [replace(s, host="h") for s in seats]
    wishes = place(seats, tasks, backups, holdings)
    assert spread(leads(wishes, seats)) <= 1
    assert spread(replicas(wishes, seats)) <= 2


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 7), st.integers(1, 40), st.integers(0, 3), st.data())
def test_moves_are_few(nodes: int, tasks: int, backups: int, data: st.DataObject) -> None:
    seats = seats_of(*(f"n{i}" for i in range(nodes)))
    before = adopted(place(seats, tasks, backups, {}))
    lost = data.draw(st.sampled_from(seats)).node
    rest = [s for s in seats if s.node != lost]
    left = without(before, lost)
    wishes = place(rest, tasks, backups, left)
    copies = pairs(wishes) - held(left)
    # What the lost node held is copied, and at most one replica per seat more, for the balance.
    assert len(copies) <= len(held(before) - held(left)) + len(rest)
    joined = [*seats, Seat("new", "h")]
    wishes = place(joined, tasks, backups, before)
    copies = pairs(wishes) - held(before)
    share = -(-len(pairs(wishes)) // len(joined))
    assert len([n for _, n in copies if n == "new"]) <= share
    if backups < nodes:
        assert len(copies) <= share + 1


# -- getting there -----------------------------------------------------------------------------------------------


class Job:
    """Adopts wishes as the protocol does, one step at a time in any order."""

    def __init__(self, rnd: random.Random, tasks: int, backups: int) -> None:
        self.rnd, self.tasks, self.backups = rnd, tasks, backups
        self.holdings: Holdings = {}
        self.admitted = self.handed_over = 0

    def settle(self, seats: list[Seat]) -> dict[int, Wish]:
        present = {s.node for s in seats}
        for _ in range(20 * self.tasks * (self.backups + 2)):
            wishes = place(seats, self.tasks, self.backups, self.holdings)
            steps = [step for t in range(self.tasks) for step in self.steps(t, wishes[t], present)]
            if not steps:
                return wishes
            self.rnd.choice(steps)()
        raise AssertionError("the wishes run in circles")

    def steps(self, t: int, wish: Wish, present: set[str]) -> list[Callable[[], None]]:
        now = self.holdings.get(t)
        assert wish.primary is not None
        if now is None or not now.members:
            return [lambda: self.put(t, wish.primary, (wish.primary,), admitted=1)]
        if now.primary not in present and now.primary not in now.members:  # lost; a draining one hands over
            return [lambda: self.put(t, next(m for m in now.members if m in present), now.members)]
        wished = {wish.primary, *wish.backups}
        steps: list[Callable[[], None]] = [
            (lambda n=n: self.put(t, now.primary, (*now.members, n), admitted=1))  # type: ignore[misc]
            for n in sorted(wished - set(now.members))
        ]
        if wish.primary != now.primary and wish.primary in now.members:
            steps.append(lambda: self.put(t, wish.primary, now.members, handed_over=1))
        if wished <= set(now.members):
            steps += [
                (lambda n=n: self.put(t, now.primary, tuple(m for m in now.members if m != n)))  # type: ignore[misc]
                for n in now.members
                if n not in wished and n != now.primary
            ]
        return steps

    def put(self, t: int, primary: str | None, members: tuple, admitted: int = 0, handed_over: int = 0) -> None:
        self.holdings[t] = CurrentReplicas(primary, members)
        self.admitted += admitted
        self.handed_over += handed_over


@settings(max_examples=25, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.integers(1, 5),
    st.integers(1, 16),
    st.integers(0, 2),
    st.integers(1, 3),
    st.lists(st.sampled_from(["join", "kill", "drain", "replace"]), max_size=4),
)
def test_job_reaches_its_wishes_through_changes(
    rnd: random.Random, nodes: int, tasks: int, backups: int, hosts: int, churn: list[str]
) -> None:
    job = Job(rnd, tasks, backups)
    seats = [Seat(f"n{i}", f"h{i % hosts}") for i in range(nodes)]
    wishes = job.settle(seats)
    for number, change in enumerate(churn):
        if change in ("join", "replace"):
            seats = [*seats, Seat(f"m{number}", f"h{number % hosts}")]
        if change != "join" and len(seats) > 1:
            victim = rnd.choice(seats)
            seats = [s for s in seats if s != victim]
            if change != "drain":
                job.holdings = without(job.holdings, victim.node)
        needed = len(pairs(place(seats, tasks, backups, job.holdings)) - held(job.holdings))
        job.admitted = 0
        wishes = job.settle(seats)
        assert job.holdings.keys() == wishes.keys()
        assert held(job.holdings) == pairs(wishes)
        assert {t: h.primary for t, h in job.holdings.items()} == {t: w.primary for t, w in wishes.items()}
        assert spread(leads(wishes, seats)) <= 1
        assert job.admitted <= needed + 3, "wishes changed while they were being fulfilled"


@pytest.mark.parametrize(("nodes", "limit_s"), [(4, 0.02), (100, 0.3)])
def test_placement_is_fast(nodes: int, limit_s: float) -> None:
    seats = [Seat(f"n{i:03}", "h") for i in range(nodes)]
    before = adopted(place(seats, 1000, 1, {}))

    def best_s(*args: object) -> float:
        times = []
        for _ in range(5):
            began = time.thread_time()
            place(*args)  # type: ignore[arg-type]
            times.append(time.thread_time() - began)
        return min(times)

    slack = 5  # the machine may be slow; quadratic would be far beyond
    assert best_s(seats, 1000, 1, {}) < limit_s * slack
    assert best_s(seats, 1000, 1, before) < limit_s * slack
    assert best_s([*seats, Seat("x", "h")], 1000, 1, before) < limit_s * slack
    assert best_s(seats[1:], 1000, 1, before) < limit_s * slack
