"""The simulation is tested, too: it must find every mistake that is put into the protocol, and soon."""

from __future__ import annotations

import pytest
from plants import PLANTS

from taskgraph.protocol.commit import Leader
from taskgraph.testing.simulate import run_seed

WITHIN = 1100
"""Seeds in which a mistake must show. Most show in the first 30."""

LATE = {
    "a commit does not compare the revision of generation": 19,
    "generation is compared by value": 177,
    "digests are reported only for producers whose term changed": 36,
    "a take over does not put generation": 19,
    "the sums are not compared": 10,
    "a successor cannot take back that the job ends": 428,
    "min in sync is ignored": 27,
    "replicas keep what a roll back undid": 154,
    "a finished job that goes back stays finished": 568,
    "a job goes back to a checkpoint that nobody read": 22,
    "a job goes back to a checkpoint that was replaced while it was read": 275,
    "a leader that was replaced advances the checkpoint": 40,
    "a candidate is admitted without the pending boundary": 10,
    "an offer counts whatever became of it": 50,
    "of offers that travel together the first alone is held": 30,
    "a node that is being admitted is not waited for": 33,
    "a node that is being evicted is not waited for": 148,
    "a new primary does not wait for the members it read": 8,
    "an eviction is not fenced by the primary": 380,
    "a promise is forgotten": 8,
    "a take over does not compare the primary it replaces": 8,
    "admissions and evictions are not fenced by the term": 4,
    "processors run in the order of arrival": 7,
    "a late flag misses the snapshot": 4,
    "a seal of any version is accepted": 323,
    "an epoch that is held ends all the same": 25,
    "answers of a gone term count": 79,
    "a request that is sent again runs again": 219,
    "items are dropped when the task is done": 5,
    "items are freed when the commit is sent": 19,
    "a lease is counted from the reply": 55,
    "the content of items is not in the sums": 10,
    "a task is told of a commit after it began the next epoch": 9,
    "a job that ends while a task is ahead gets the state it has": 131,
    "of epochs committed at once only the last is reported": 34,
    "what a task put goes as soon as it is done": 1,
    "reports that came after the snapshot are left out of the boundary": 12,
    "reports that were on their way count as told whatever became of them": 25,
    "a compute that is not stateless does not wait for its turn": 5,
    "the next epoch gets its turn before the snapshot": 12,
    "epochs in flight are snapshotted in any order": 98,
    "an error in a later epoch ends the earlier ones": 243,
    "an error of a later epoch is told at once": 241,
    "a restart leaves lanes running": 112,
    "epochs in flight begin in any order": 12,
    "an admission does not compare that the candidate is not gone": 5,
    "a take over does not compare its own member key": 47,
    "a checkpoint is given up before a later epoch commits": 256,
    "who was evicted counts as a holder until the next commit": 30,
    "reports of epochs ahead outlive a restart": 0,
    "digests of shared state are not compared": 48,
    "the shared state of another boundary is fetched": 17,
    "a done of an old term counts": 19,
    "epochs ahead are committed with reports of gone terms": 17,
    "a restored state is shared with the boundary": 5,
    "a node sees the next run of its jobs name": 1,
    "inputs come in the order of arrival": 1,
    "the status is written after the last commit": 1,
}
"""Mistakes, and a seed that finds each soon. A test tries that seed first, which saves minutes. When the simulation
changes, make this table again from what the tests print."""

BROKEN = ("AttributeError", "TypeError", "NameError", "not handled")
"""A plant that does not fit the code any more is found as well, for the wrong reason."""


@pytest.mark.timeout(590)
@pytest.mark.parametrize("name", PLANTS)
def test_planted_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[name](monkeypatch)
    seeds = (LATE.get(name, 0), *range(WITHIN))
    found = next((outcome for seed in seeds if (outcome := run_seed(seed)).problem), None)
    assert found is not None, f"{WITHIN} seeds do not notice that {name}"
    assert not any(word in found.problem for word in BROKEN), f"the plant itself is broken: {found.problem}"
    print(f"seed {found.seed} finds that {name}: {found.problem}")


def test_a_node_that_breaks_down_is_a_problem_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leader, "decide", lambda self, view, **_: self.no_such_thing)
    problem = run_seed(0).problem
    assert problem is not None and "broke down: AttributeError" in problem


def test_there_are_enough() -> None:
    assert len(PLANTS) >= 20
    assert LATE.keys() <= PLANTS.keys()
