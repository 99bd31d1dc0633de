"""The simulation is tested, too: it must find every mistake that is put into the protocol, and soon."""

from __future__ import annotations

import pytest
from plants import PLANTS

from taskgraph.testing.simulate import run_seed

WITHIN = 1000
"""Seeds in which a mistake must show. All showed in the first 250 when this was written, most in the first 30."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[name](monkeypatch)
    found = next((outcome for seed in range(WITHIN) if (outcome := run_seed(seed)).problem), None)
    assert found is not None, f"{WITHIN} seeds do not notice that {name}"
    print(f"seed {found.seed} finds that {name}: {found.problem}")


def test_there_are_enough() -> None:
    assert len(PLANTS) >= 20
