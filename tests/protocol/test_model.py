"""Every history of a small job, step by step: no order of steps breaks an invariant, and a missing rule is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from model_kit import Budget, State, Violation, explore, start

from taskgraph.protocol import insync, transactions
from taskgraph.protocol.boundaries import Boundaries, Boundary
from taskgraph.protocol.insync import Place
from taskgraph.protocol.kv import Txn
from taskgraph.protocol.transactions import TakenOver

LIMIT = 400_000
"""States; more means that the model grew by mistake."""

ONE_TASK = {
    "take-overs of living primaries": Budget(epochs=2, takeovers=2),
    "two crashes": Budget(epochs=2, takeovers=2, crashes=2),
    "a node joins while another takes over": Budget(epochs=2, takeovers=1, joins=1),
    "a node joins, and one dies": Budget(epochs=1, takeovers=1, joins=1, crashes=1),
    "a member is evicted while it takes over": Budget(epochs=2, takeovers=2, evictions=1),
    "a member is evicted, and one dies": Budget(epochs=2, takeovers=1, evictions=1, crashes=1),
    "one is evicted, another joins": Budget(epochs=1, takeovers=1, evictions=1, joins=1),
    "an evicted member takes over and evicts in turn": Budget(epochs=1, takeovers=2, evictions=2),
    "restarts": Budget(epochs=2, takeovers=1, restarts=2),
    "a restart while a node joins": Budget(epochs=1, takeovers=1, joins=1, restarts=1),
}
TWO_TASKS = {
    "one is taken over": Budget(epochs=2, takeovers=1),
    "one is taken over twice, or both": Budget(epochs=1, takeovers=2),
    "one node dies": Budget(epochs=2, takeovers=2, crashes=1),
    "a restart": Budget(epochs=1, takeovers=1, restarts=1),
    "an eviction": Budget(epochs=1, takeovers=1, evictions=1),
}


def begin(tasks: int, budget: Budget, *, members: str = "ab") -> State:
    return start(tasks, "abc" if tasks == 1 or "c" in members else "ab", budget, members=members)


@pytest.mark.slow
@pytest.mark.parametrize("budget", ONE_TASK.values(), ids=ONE_TASK.keys())
def test_one_task_on_three_nodes(budget: Budget) -> None:
    explored = explore(begin(1, budget), limit=LIMIT)
    assert explored.epochs == budget.epochs
    happened = {"takes": budget.takeovers, "dies": budget.crashes, "invites": budget.joins, "restarts": budget.restarts}
    assert all(explored.steps[step] for step, allowed in happened.items() if allowed)
    assert not (budget.joins or budget.evictions) or explored.steps["learns:"]


@pytest.mark.slow
@pytest.mark.parametrize("budget", TWO_TASKS.values(), ids=TWO_TASKS.keys())
def test_two_tasks_on_two_nodes(budget: Budget) -> None:
    explored = explore(begin(2, budget), limit=LIMIT)
    assert explored.epochs == budget.epochs


@pytest.mark.slow
def test_three_members_of_which_two_die() -> None:
    explored = explore(begin(1, Budget(epochs=1, takeovers=2, crashes=2), members="abc"), limit=LIMIT)
    assert explored.epochs == 1
    assert explored.steps["dies"]


def test_without_failures_a_job_commits_its_epochs_in_one_way() -> None:
    explored = explore(begin(1, Budget(epochs=2)), limit=100)
    assert (explored.epochs, explored.steps["takes"]) == (2, 0)


# -- rules that matter: without one of them the exploration finds a history that breaks an invariant ---------------

Patch = Callable[[pytest.MonkeyPatch], None]


def places_that_count(*left_out: Place) -> Patch:
    return lambda patch: patch.setattr(insync, "_COUNTS", insync._COUNTS - set(left_out))


def without_compare(function: str, key: str) -> Patch:
    """The transaction no longer compares keys whose name contains `key`."""
    real: Callable[..., Txn] = getattr(transactions, function)

    def weaker(*args: object, **kwargs: object) -> Txn:
        txn = real(*args, **kwargs)
        return replace(txn, compares=tuple(c for c in txn.compares if key not in c.key))

    return lambda patch: patch.setattr(transactions, function, weaker)


def without_members(patch: pytest.MonkeyPatch) -> None:
    """A new primary counts on nobody but itself."""
    real = transactions.taken_over

    def alone(*args: object) -> TakenOver:
        return replace(real(*args), members={})  # type: ignore[arg-type]

    patch.setattr(transactions, "taken_over", alone)


def the_first_pending_boundary(patch: pytest.MonkeyPatch) -> None:
    """Of several pending boundaries of an epoch the lowest is taken for the committed one."""

    def read_epoch(self: Boundaries, epoch: int) -> Boundary | None:
        if self._committed is not None and self._committed.stamp.epoch >= epoch:
            return None
        best = min((key for key in self._held if key[0] == epoch), default=None)
        if best is None:
            return None
        self._committed = self._held[best]
        self._held = {key: b for key, b in self._held.items() if key[0] > epoch}
        return self._committed

    patch.setattr(Boundaries, "read_epoch", read_epoch)


def a_guess_is_kept(patch: pytest.MonkeyPatch) -> None:
    """What an evicted replica took for the committed boundary stays, whatever it is offered when it comes back."""
    real = Boundaries.hold

    def hold(self: Boundaries, boundary: Boundary, *, committed: bool) -> None:
        if committed or self._committed is None or boundary.stamp.epoch > self._committed.stamp.epoch:
            real(self, boundary, committed=committed)

    patch.setattr(Boundaries, "hold", hold)


UNAWARE = without_compare("commit", "generation")
RULES: dict[str, tuple[Patch, Budget]] = {
    "a node that may be a member by now must acknowledge": (
        places_that_count(Place.ADMITTING),
        Budget(epochs=2, takeovers=1, joins=1),
    ),
    "a node whose eviction is not known must acknowledge": (
        places_that_count(Place.EVICTING),
        Budget(epochs=2, takeovers=1, evictions=1),
    ),
    "members must acknowledge": (places_that_count(Place.MEMBER), Budget(epochs=1, takeovers=1)),
    "a new primary counts on every member, the old primary too": (without_members, Budget(epochs=1, takeovers=2)),
    "the highest pending boundary is the committed one": (the_first_pending_boundary, Budget(epochs=1, takeovers=1)),
    "a commit compares the generation": (UNAWARE, Budget(epochs=1, takeovers=1)),
    "a take-over compares its own member key": (
        without_compare("take_over", "members/"),
        Budget(epochs=2, takeovers=1, evictions=1),
    ),
    "an evicted member's take-over compares the epoch": (
        without_compare("take_over", "epoch"),
        Budget(epochs=2, takeovers=1, evictions=1),
    ),
    "an evicted replica that comes back believes its primary": (
        a_guess_is_kept,
        Budget(epochs=1, takeovers=1, evictions=1, joins=1),
    ),
    "an admission compares the primary": (
        without_compare("admit", "/primary"),
        Budget(epochs=2, takeovers=2, joins=1),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("weaken", "budget"), RULES.values(), ids=RULES.keys())
def test_without_a_rule_an_invariant_breaks(monkeypatch: pytest.MonkeyPatch, weaken: Patch, budget: Budget) -> None:
    weaken(monkeypatch)
    # A leader that knows nothing of a take-over needs a task that a third node takes over.
    first = begin(2, budget, members="abc") if weaken is UNAWARE else begin(1, budget)
    with pytest.raises(Violation):
        explore(first, limit=LIMIT)
