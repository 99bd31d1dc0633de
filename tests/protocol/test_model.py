"""Every history of a small job, step by step: no order of steps breaks an invariant, and a missing rule is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import model_states
import pytest
from model_kit import Budget, Model, Plants, Violation, explore
from model_states import Etcd
from msgspec import structs
from protocol_kit import JOB

from taskgraph.protocol import insync, transactions
from taskgraph.protocol.boundaries import Boundaries, Boundary
from taskgraph.protocol.commit import Leader
from taskgraph.protocol.insync import InSyncSet, MemberState
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn, TxnResult
from taskgraph.protocol.records import EpochRecord
from taskgraph.protocol.transactions import TakeoverResult
from taskgraph.protocol.view import JobView

LIMIT = 5_000_000
"""States; more means that the model grew by mistake."""

CORE = Budget(epochs=2, crashes=2, joins=1, takeovers=1)
"""Two tasks on three nodes of which two may die and one may join, and a primary is suspected wrongly once."""

ONE_TASK = {
    "takeovers of living primaries": Budget(epochs=2, takeovers=3),
    "two crashes": Budget(epochs=2, takeovers=2, crashes=2),
    "a node joins while others take over": Budget(epochs=2, takeovers=2, joins=1),
    "nodes join while one takes over and one dies": Budget(epochs=2, takeovers=1, joins=2, crashes=1),
    "members are evicted while they take over": Budget(epochs=2, takeovers=2, evictions=2),
    "a member is evicted, and one dies": Budget(epochs=2, takeovers=1, evictions=1, crashes=1),
    "one is evicted, another joins": Budget(epochs=2, takeovers=1, evictions=1, joins=1),
    "restarts": Budget(epochs=2, takeovers=2, restarts=2),
    "restarts while a node joins and one dies": Budget(epochs=2, joins=1, restarts=1, crashes=1),
}
TWO_TASKS = {
    "both are taken over, or one three times": Budget(epochs=2, takeovers=3),
    "restarts, and a node dies": Budget(epochs=2, takeovers=1, restarts=1, crashes=1),
    "evictions": Budget(epochs=1, takeovers=1, evictions=2),
}


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_two_tasks_with_crashes_and_a_join() -> None:
    explored = explore(Model(2, "abc", CORE), limit=LIMIT)
    assert all(explored.steps[step] for step in ("dies", "takes", "takes from nothing", "invites", "commits", "learns"))
    assert explored.epochs == CORE.epochs


def _cases(budgets: dict[str, Budget]) -> list[Any]:
    """As parameters of a test; more than two kinds of failures together take long."""
    kinds = ("crashes", "takeovers", "joins", "evictions", "restarts")
    return [
        pytest.param(
            budget,
            id=name,
            marks=[pytest.mark.slow] if sum(getattr(budget, kind) > 0 for kind in kinds) > 2 else [],
        )
        for name, budget in budgets.items()
    ]


@pytest.mark.parametrize("budget", _cases(ONE_TASK))
def test_one_task_on_three_nodes(budget: Budget) -> None:
    explored = explore(Model(1, "abc", budget), limit=LIMIT)
    assert explored.epochs == budget.epochs
    happened = {"takes": budget.takeovers, "dies": budget.crashes, "invites": budget.joins, "restarts": budget.restarts}
    assert all(explored.steps[step] for step, allowed in happened.items() if allowed)
    assert not (budget.joins or budget.evictions) or explored.steps["learns"]


@pytest.mark.parametrize("budget", _cases(TWO_TASKS))
def test_two_tasks_on_two_nodes(budget: Budget) -> None:
    assert explore(Model(2, "ab", budget), limit=LIMIT).epochs == budget.epochs


@pytest.mark.slow
def test_three_members_of_which_two_die() -> None:
    explored = explore(Model(1, "abc", Budget(epochs=2, takeovers=1, crashes=2), members="abc"), limit=LIMIT)
    assert explored.epochs == 2
    assert explored.steps["dies"]


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Model(1, "abc", Budget(epochs=2, takeovers=1, crashes=1, joins=1)), marks=pytest.mark.slow),
        Model(1, "abc", Budget(epochs=2, takeovers=1, evictions=1, restarts=1)),
        pytest.param(Model(2, "abc", Budget(epochs=1, crashes=1, joins=1)), marks=pytest.mark.slow),
    ],
)
def test_merged_states_reach_the_same(model: Model) -> None:
    whole = replace(model, reduced=False)
    few, many = explore(model, limit=LIMIT), explore(whole, limit=LIMIT)
    assert few.states < many.states
    assert model.reached() == whole.reached()


def test_violation_shows_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    places_that_count(MemberState.MEMBER)(monkeypatch)
    with pytest.raises(Violation) as broken:
        explore(Model(1, "ab", Budget(epochs=1)), limit=LIMIT)
    assert str(broken.value).split("\n  ") == [
        "b may take over task 0 and holds (0, 1, 1), not the committed (1, 1, 1)",
        "a makes the next boundary of 0",
        "a commits",
    ]


def test_job_without_failures_has_one_history() -> None:
    explored = explore(Model(1, "abc", Budget(epochs=2)), limit=100)
    assert (explored.epochs, explored.steps["takes"]) == (2, 0)


# -- rules that matter: without one of them the exploration finds a history that breaks an invariant ---------------

Patch = Callable[[pytest.MonkeyPatch], None]
KEYS = Keys(JOB)


def places_that_count(*left_out: MemberState) -> Patch:
    return lambda patch: patch.setattr(insync, "_MUST_ACKNOWLEDGE", insync._MUST_ACKNOWLEDGE - set(left_out))


def changed(owner: Any, name: str, change: Callable[..., Any]) -> Patch:
    """`change(original, ...)` in place of the original."""
    original = getattr(owner, name)

    def instead(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    return lambda patch: patch.setattr(owner, name, instead)


def without_compare(function: str, key: str) -> Patch:
    """The transaction no longer compares keys whose name contains `key`."""

    def weaker(original: Callable[..., Txn], *args: Any, **kwargs: Any) -> Txn:
        txn = original(*args, **kwargs)
        return replace(txn, compares=tuple(c for c in txn.compares if key not in c.key))

    return changed(transactions, function, weaker)


def without_members(original: Callable[..., TakeoverResult], *args: Any) -> TakeoverResult:
    """A new primary counts on nobody but itself."""
    return replace(original(*args), members={})


def without_generation(original: Callable[..., Txn], *args: Any, **kwargs: Any) -> Txn:
    txn = original(*args, **kwargs)
    return replace(txn, success=tuple(op for op in txn.success if getattr(op, "key", "") != KEYS.generation))


def by_value(patch: pytest.MonkeyPatch) -> None:
    """`generation` holds the node that took over, and is compared by that: its revision is made to say no more."""

    def named(original: Callable[..., Txn], view: JobView, task: int, node: str, *args: Any, **kwargs: Any) -> Txn:
        txn = original(view, task, node, *args, **kwargs)
        put = Put(KEYS.generation, node.encode())
        return replace(txn, success=tuple(put if getattr(op, "key", "") == put.key else op for op in txn.success))

    def counted(original: Callable[..., Etcd], *args: Any, **kwargs: Any) -> Etcd:
        etcd = original(*args, **kwargs)
        listing = (
            replace(kv, mod_revision=int.from_bytes(kv.value)) if kv.key == KEYS.generation else kv
            for kv in etcd.listing
        )
        return Etcd(tuple(listing), etcd.counts | {KEYS.generation: 0})

    changed(transactions, "take_over", named)(patch)
    changed(transactions, "take_over_from_nothing", named)(patch)
    changed(model_states, "_counted", counted)(patch)


def as_reported(self: Leader, view: JobView) -> dict[int, int]:
    return {task: report.term for task, report in self.reports().items()}


def epoch_of_the_view(
    original: Callable[..., TakeoverResult], result: TxnResult, view: JobView, task: int
) -> TakeoverResult:
    assert view.stamp is not None
    return replace(original(result, view, task), epoch=view.stamp.epoch, attempt=view.stamp.attempt)


def first_attempt(original: Callable[..., Txn], view: JobView, **kwargs: Any) -> Txn:
    """The attempts of each epoch are counted from 1."""
    txn = original(view, **kwargs)
    puts = (structs.replace(EpochRecord.from_bytes(op.value), attempt=1) for op in txn.success if isinstance(op, Put))
    return replace(txn, success=tuple(Put(KEYS.epoch, record.to_bytes()) for record in puts))


def the_first_pending_boundary(self: Boundaries, epoch: int) -> Boundary | None:
    """Of several pending boundaries of an epoch the lowest is taken for the committed one."""
    if self.committed is not None and self.committed.stamp.epoch >= epoch:
        return None
    best = min((key for key in self._stored if key[0] == epoch), default=None)
    if best is None:
        return None
    self.committed = self._stored[best]
    self._stored = {key: b for key, b in self._stored.items() if key[0] > epoch}
    return self.committed


def a_guess_is_kept(original: Callable[..., None], self: Boundaries, boundary: Boundary, *, committed: bool) -> None:
    """What an evicted replica took for the committed boundary stays, whatever it is offered when it comes back."""
    if committed or self.committed is None or boundary.stamp.epoch > self.committed.stamp.epoch:
        original(self, boundary, committed=committed)


def pending_for_committed(
    original: Callable[..., None], self: Boundaries, boundary: Boundary, *, committed: bool
) -> None:
    """A member that is offered a pending boundary puts it in the place of the committed one."""
    original(self, boundary, committed=True)


def freed_on_a_hint(original: Callable[..., None], self: Boundaries, boundary: Boundary, *, committed: bool) -> None:
    """Who is offered the next boundary takes that for news that the one before it is not needed."""
    original(self, boundary, committed=committed)
    if not committed:
        self.committed = None


def only_the_committed(original: Callable[..., tuple[Any, ...]], self: InSyncSet, node: str) -> tuple[Any, ...]:
    """A candidate is offered, and admitted with, no pending boundary."""
    lacking = original(self, node)
    return tuple(key for key in lacking if self.state_of(node) is not MemberState.CANDIDATE or key == self.current[0])


def nobody(self: InSyncSet, key: Any) -> tuple[str, ...]:
    return ()


JOINS = Budget(epochs=2, takeovers=2, joins=1)
EVICTS = Budget(epochs=2, takeovers=2, evictions=2)
ONE = Model(1, "abc", CORE)
REPLACED = Model(2, "abc", Budget(epochs=1, takeovers=1), "abc")
RULES: dict[str, tuple[Patch, Model]] = {
    # commits
    "a commit compares the generation": (without_compare("commit", "generation"), REPLACED),
    "the generation is compared by revision": (by_value, Model(2, "abc", Budget(epochs=1, takeovers=3), "abc")),
    "a takeover puts the generation": (changed(transactions, "take_over", without_generation), REPLACED),
    "a done counts in its own term": (lambda patch: patch.setattr(Leader, "_terms", as_reported), REPLACED),
    "attempts are counted over all epochs": (
        changed(transactions, "commit", first_attempt),
        Model(1, "ab", Budget(epochs=2, restarts=2)),
    ),
    # boundaries
    "members must acknowledge": (places_that_count(MemberState.MEMBER), ONE),
    "a task is done when its members hold the boundary": (
        lambda patch: patch.setattr(InSyncSet, "waits_for", nobody),
        ONE,
    ),
    "a pending boundary does not replace the committed one": (
        changed(Boundaries, "store", pending_for_committed),
        ONE,
    ),
    "the highest pending boundary is the committed one": (
        lambda patch: patch.setattr(Boundaries, "note_committed", the_first_pending_boundary),
        ONE,
    ),
    "a boundary is freed when a later epoch is read": (changed(Boundaries, "store", freed_on_a_hint), ONE),
    "an evicted replica that comes back believes its primary": (
        changed(Boundaries, "store", a_guess_is_kept),
        Model(1, "abc", Budget(epochs=2, takeovers=1, evictions=1, joins=1)),
    ),
    # takeovers
    "a new primary counts on every member, the old primary too": (
        changed(transactions, "decode_takeover", without_members),
        ONE,
    ),
    "a takeover reads the epoch": (changed(transactions, "decode_takeover", epoch_of_the_view), ONE),
    "a takeover compares the primary": (without_compare("take_over", "/primary"), ONE),
    "a takeover compares its own member key": (without_compare("take_over", "members/"), Model(1, "abc", EVICTS)),
    "an evicted member's takeover compares the epoch": (
        without_compare("take_over", "epoch"),
        Model(1, "abc", EVICTS),
    ),
    "a start from nothing compares the epoch": (
        without_compare("take_over_from_nothing", "epoch"),
        Model(2, "abc", Budget(epochs=1, crashes=1), "a b"),
    ),
    # admissions and evictions
    "a candidate does not put its own member key": (lambda _: None, replace(ONE, plants=Plants(joiner_puts_key=True))),
    "a candidate holds the pending boundary, too": (changed(InSyncSet, "missing", only_the_committed), ONE),
    "a node that may be a member by now must acknowledge": (places_that_count(MemberState.ADMITTING), ONE),
    "an admission compares the primary": (without_compare("admit", "/primary"), Model(1, "abc", JOINS)),
    "a node whose eviction is not known must acknowledge": (
        places_that_count(MemberState.EVICTING),
        Model(1, "abc", EVICTS),
    ),
    "an eviction compares the primary": (without_compare("evict", "/primary"), Model(1, "abc", EVICTS)),
    "an eviction compares the epoch": (without_compare("evict", "epoch"), Model(1, "abc", EVICTS)),
    "an answer to a gone term is forgotten": (
        lambda _: None,
        Model(1, "abc", EVICTS, plants=Plants(answers_are_kept=True)),
    ),
}


@pytest.mark.parametrize(("weaken", "model"), RULES.values(), ids=RULES.keys())
def test_missing_rule_breaks_an_invariant(monkeypatch: pytest.MonkeyPatch, weaken: Patch, model: Model) -> None:
    weaken(monkeypatch)
    with pytest.raises(Violation):
        explore(replace(model), limit=LIMIT)
