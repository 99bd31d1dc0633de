"""The simulation is tested, too: it must find every mistake that is put into the protocol, and soon."""

from __future__ import annotations

import pytest
from plants import PLANTS

from taskgraph.testing.simulate import run_seed

WITHIN = 1500
"""Seeds in which a mistake must show. Most show in the first hundred."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[name](monkeypatch)
    problem = next((problem for seed in range(WITHIN) if (problem := run_seed(seed).problem)), "")
    assert problem, f"{WITHIN} seeds do not notice that {name}"


def test_there_are_enough() -> None:
    assert len(PLANTS) >= 20
