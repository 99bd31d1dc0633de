"""The simulation is tested, too: it must find every mistake that is put into the protocol, and soon."""

from __future__ import annotations

import pytest
from plants import PLANTS

from taskgraph.protocol.commit import Leader
from taskgraph.testing.simulate import run_seed

WITHIN = 1000
"""Seeds in which a mistake must show. All showed in the first 250 when this was written, most in the first 30."""

BROKEN = ("broke down: AttributeError", "broke down: TypeError", "broke down: NameError", "nobody handled")
"""A plant that does not fit the code any more is found as well, for the wrong reason."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[name](monkeypatch)
    found = next((outcome for seed in range(WITHIN) if (outcome := run_seed(seed)).problem), None)
    assert found is not None, f"{WITHIN} seeds do not notice that {name}"
    assert not any(word in found.problem for word in BROKEN), f"the plant itself is broken: {found.problem}"
    print(f"seed {found.seed} finds that {name}: {found.problem}")


def test_a_node_that_breaks_down_is_a_problem_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leader, "decide", lambda self, view, **_: self.no_such_thing)
    problem = run_seed(0).problem
    assert problem is not None and "broke down: AttributeError" in problem


def test_there_are_enough() -> None:
    assert len(PLANTS) >= 20
