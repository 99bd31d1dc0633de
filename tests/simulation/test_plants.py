"""The simulation is tested, too: it must find every mistake that is put into the protocol, and soon."""

from __future__ import annotations

import pytest
from plants import PLANTS

from taskgraph.protocol.commit import Leader
from taskgraph.testing.simulate import run_seed

WITHIN = 1100
"""Seeds in which a mistake must show. Most show in the first 30."""

LATE = {
    "generation is compared by value": 481,
    "an eviction is not fenced by the primary": 380,
    "answers of a gone term count": 78,
    "a request that is sent again runs again": 219,
    "a seal of any version is accepted": 323,
    "a job that ends while a task is ahead gets the state it has": 131,
    "admissions and evictions are not fenced by the term": 95,
    "replicas keep what a roll back undid": 154,
    "epochs in flight are snapshotted in any order": 98,
    "an error in a later epoch ends the earlier ones": 92,
    "an error of a later epoch is told at once": 98,
    "a restart leaves lanes running": 193,
    "a successor cannot take back that the job ends": 428,
    "a node that is gone comes back once that is forgotten": 459,
}
"""Those that show later, and the first seed that did: it is tried first, which saves minutes. What seeds do changes
with the simulation; then all are gone through, and this table may be made anew from what the tests print."""

BROKEN = ("AttributeError", "TypeError", "NameError", "nobody handled")
"""A plant that does not fit the code any more is found as well, for the wrong reason."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
