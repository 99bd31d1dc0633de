"""The in-sync set: every transition, and at every moment whom a boundary waits for."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from taskgraph.protocol.insync import InSyncSet, MemberState

K0, K1, K2 = (0, 1, 1), (1, 1, 1), (2, 1, 1)


def candidate(*keys: tuple[int, int, int]) -> InSyncSet:
    """A primary with boundaries `keys` and the invited node "b"."""
    insync = InSyncSet([])
    for key in keys:
        insync.add(key)
    insync.invite("b")
    return insync


def member(node: str, *, marked: Iterable[str] = ()) -> InSyncSet:
    """A primary with one member, which has boundary K0."""
    insync = InSyncSet([node], marked=marked)
    insync.add(K0)
    insync.acknowledge(node, K0)
    return insync


def test_single_primary_needs_no_acknowledgement() -> None:
    insync = InSyncSet([])
    insync.add(K0)
    assert insync.waits_for(K0) == ()
    assert insync.count_replicas_with(K0) == 1


def test_members_read_by_a_take_over_must_acknowledge_everything() -> None:
    insync = InSyncSet(["c", "b"])
    insync.add(K0)
    assert insync.state_of("b") is MemberState.MEMBER
    assert insync.waits_for(K0) == ("b", "c")
    insync.acknowledge("b", K0)
    assert insync.waits_for(K0) == ("c",)
    assert insync.count_replicas_with(K0) == 2


def test_member_owes_later_boundaries_only() -> None:
    insync = member("b")
    assert insync.waits_for(K0) == ()
    insync.add(K1)
    assert insync.missing("b") == (K1,)


def test_candidate_is_not_waited_for() -> None:
    insync = candidate(K0)
    assert insync.state_of("b") is MemberState.CANDIDATE
    assert insync.waits_for(K0) == ()
    assert insync.missing("b") == (K0,)
    insync.acknowledge("b", K0)
    assert insync.count_replicas_with(K0) == 1, "it is not known to be a member"


def test_candidate_may_be_admitted_when_it_holds_every_boundary() -> None:
    insync = candidate(K0, K1)
    insync.acknowledge("b", K0)
    assert not insync.may_admit("b")
    with pytest.raises(ValueError, match="candidate"):
        insync.begin_admission("b")
    insync.acknowledge("b", K1)
    assert insync.may_admit("b")


def test_no_admission_without_a_boundary() -> None:
    assert not candidate().may_admit("b")


def test_from_the_admitting_write_on_a_new_boundary_waits_for_the_node() -> None:
    insync = candidate(K0)
    insync.acknowledge("b", K0)
    insync.begin_admission("b")
    insync.add(K1)
    assert insync.waits_for(K1) == ("b",), "the write may exist: the node may take over"
    assert insync.count_replicas_with(K0) == 1, "but it does not count before the write is known"
    insync.end_admission("b", True)
    assert insync.state_of("b") is MemberState.MEMBER
    assert insync.waits_for(K1) == ("b",)
    assert insync.count_replicas_with(K0) == 2


def test_admission_known_to_have_failed_makes_it_a_candidate_again() -> None:
    insync = candidate(K0)
    insync.acknowledge("b", K0)
    insync.begin_admission("b")
    insync.add(K1)
    insync.end_admission("b", False)
    assert insync.state_of("b") is MemberState.CANDIDATE
    assert insync.waits_for(K1) == ()
    assert not insync.may_admit("b")
    insync.acknowledge("b", K1)
    assert insync.may_admit("b")


def test_until_the_evicting_write_is_known_the_node_is_waited_for() -> None:
    insync = member("b")
    insync.add(K1)
    insync.begin_eviction("b")
    assert insync.state_of("b") is MemberState.EVICTING
    assert insync.waits_for(K1) == ("b",)
    insync.end_eviction("b", True)
    assert insync.state_of("b") is None
    assert insync.waits_for(K1) == ()
    assert insync.missing("b") == ()


def test_eviction_known_to_have_failed_makes_it_a_member_again() -> None:
    insync = member("b")
    insync.begin_eviction("b")
    insync.end_eviction("b", False)
    assert insync.state_of("b") is MemberState.MEMBER
    assert insync.count_replicas_with(K0) == 2


def test_marked_node_must_acknowledge() -> None:
    insync = InSyncSet(["b"], marked=["c"])
    insync.add(K0)
    assert insync.state_of("c") is MemberState.MARKED
    assert insync.waits_for(K0) == ("b", "c")
    insync.acknowledge("b", K0)
    insync.acknowledge("c", K0)
    assert insync.count_replicas_with(K0) == 2, "its key names it an heir of this epoch at most"
    assert insync.members() == ("b",)
    assert not insync.drop_candidate("c")
    insync.invite("c")
    assert insync.state_of("c") is MemberState.MARKED


@pytest.mark.parametrize("written", [True, False])
def test_marked_node_is_admitted_again(written: bool) -> None:
    insync = InSyncSet([], marked=["c"])
    insync.add(K0)
    assert not insync.may_admit("c")
    insync.acknowledge("c", K0)
    assert insync.may_admit("c")
    insync.begin_admission("c")
    insync.add(K1)
    assert insync.waits_for(K1) == ("c",)
    insync.end_admission("c", written)
    assert insync.state_of("c") is (MemberState.MEMBER if written else MemberState.MARKED)
    assert insync.waits_for(K1) == ("c",)


@pytest.mark.parametrize("written", [True, False])
def test_marked_node_counts_until_evicted_again(written: bool) -> None:
    insync = InSyncSet([], marked=["c"])
    insync.add(K0)
    insync.begin_eviction("c")
    assert insync.waits_for(K0) == ("c",)
    insync.end_eviction("c", written)
    assert insync.state_of("c") is (None if written else MemberState.MARKED)
    assert insync.waits_for(K0) == (() if written else ("c",))


def test_only_members_are_evicted() -> None:
    insync = candidate(K0)
    for node in ("b", "nobody"):
        with pytest.raises(ValueError, match="not a member"):
            insync.begin_eviction(node)


def test_evicted_node_may_be_invited_again_and_owes_everything() -> None:
    insync = member("b")
    insync.begin_eviction("b")
    insync.end_eviction("b", True)
    insync.invite("b")
    assert insync.state_of("b") is MemberState.CANDIDATE
    assert insync.missing("b") == (K0,)


def test_invitation_keeps_known_states() -> None:
    insync = member("b")
    insync.invite("b")
    assert insync.state_of("b") is MemberState.MEMBER


def test_only_a_candidate_is_dismissed() -> None:
    insync = candidate(K0)
    insync.acknowledge("b", K0)
    insync.begin_admission("b")
    assert not insync.drop_candidate("b"), "it may be a member already"
    insync.end_admission("b", False)
    assert insync.drop_candidate("b")
    assert insync.nodes == ()
    assert not insync.drop_candidate("b")


def test_committed_history_is_not_owed() -> None:
    insync = InSyncSet(["b"])
    for key in (K0, K1, K2):
        insync.add(key)
    insync.drop_before(1)
    assert insync.current == (K1, K2)
    assert insync.missing("b") == (K1, K2)


def test_boundaries_of_an_old_attempt_are_not_owed() -> None:
    insync = member("b")
    insync.add(K1)
    insync.acknowledge("b", K1)
    insync.drop_pending(0)
    assert insync.current == (K0,)
    again = (1, 2, 1)
    insync.add(again)
    assert insync.waits_for(again) == ("b",), "an acknowledgement is of one attempt"


def test_old_acknowledgement_does_not_count() -> None:
    insync = InSyncSet(["b"])
    insync.acknowledge("b", K1)
    insync.acknowledge("stranger", K1)
    insync.add(K1)
    assert insync.waits_for(K1) == ("b",)
    assert insync.nodes == ("b",)


def test_key_of_another_term_is_another_boundary() -> None:
    insync = InSyncSet(["b"])
    insync.add((1, 1, 2))
    insync.acknowledge("b", (1, 1, 1))
    assert insync.waits_for((1, 1, 2)) == ("b",)


def test_missing_boundaries_are_in_order() -> None:
    insync = InSyncSet(["b"])
    for key in (K2, K0, K1, K0):
        insync.add(key)
    assert insync.current == insync.missing("b") == (K0, K1, K2)
    insync.drop_before(1)
    assert insync.current == (K1, K2)


def test_eviction_clears_the_mark() -> None:
    """An epoch must not wait for a candidate whose admission failed."""
    insync = InSyncSet([], marked=["c"])
    insync.add(K0)
    insync.begin_eviction("c")
    insync.end_eviction("c", True)
    insync.invite("c")
    insync.acknowledge("c", K0)
    insync.begin_admission("c")
    insync.end_admission("c", False)
    assert insync.state_of("c") is MemberState.CANDIDATE


@pytest.mark.parametrize("seed", range(20))
def test_steady_while_all_nodes_are_members(seed: int) -> None:
    """With all outcomes, in all orders."""
    rng = random.Random(seed)
    insync = member("a", marked=["m"] if seed % 2 else [])
    nodes = ["a", "b", "c", "m"]
    seen = set()
    for step in range(200):
        node, state_of = rng.choice(nodes), insync.state_of
        if state_of(node) is None:
            insync.invite(node)
        elif state_of(node) is MemberState.CANDIDATE and rng.random() < 0.2:
            insync.drop_candidate(node)
        elif insync.may_admit(node) and rng.random() < 0.7:
            insync.begin_admission(node)
        elif state_of(node) is MemberState.ADMITTING:
            insync.end_admission(node, rng.random() < 0.8)
        elif state_of(node) in (MemberState.MEMBER, MemberState.MARKED) and rng.random() < 0.3:
            insync.begin_eviction(node)
        elif state_of(node) is MemberState.EVICTING:
            insync.end_eviction(node, rng.random() < 0.7)
        else:
            insync.acknowledge(node, K0)
        places = [state_of(node) for node in insync.nodes]
        assert insync.only_members == all(one is MemberState.MEMBER for one in places), f"step {step}"
        assert [insync.are_all_members(count) for count in range(5)] == [
            insync.only_members and count == len(places) for count in range(5)
        ]
        assert insync.add(K0) == bool(places)
        seen.add(insync.only_members)
    assert seen == {True, False}


def test_fulfilled_needs_living_members() -> None:
    insync = InSyncSet(["c"])
    insync.add(K0)
    insync.invite("b")
    assert not insync.wishes_fulfilled(["b"], {"b", "c"}), "a candidate"
    assert not insync.wishes_fulfilled(["b"], {"c"}), "it died: no reason to evict anybody for it"
    insync.acknowledge("b", K0)
    insync.begin_admission("b")
    assert not insync.wishes_fulfilled(["b"], {"b", "c"}), "the write may not happen"
    insync.end_admission("b", True)
    assert insync.wishes_fulfilled(["b"], {"b", "c"})
    assert not insync.wishes_fulfilled(["b"], {"c"}), "a member that died: it goes, and not both"
    assert insync.wishes_fulfilled([], {"c"}), "nobody else is wished for"
