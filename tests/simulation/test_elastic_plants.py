"""The simulation of elastic jobs is tested, too: it must find every mistake that is put into them."""

from __future__ import annotations

import pytest
from elastic_plants import PLANTS

from taskgraph.testing.simulate.elastic import run_elastic_seed

WITHIN = 600
"""Seeds in which a mistake must show."""

FOUND_BY = {
    "a flush ends without all reports": 7,
    "a partial of an old view is taken": 88,
    "parts of other sources are kept": 125,
    "held parts are dealt too": 2,
    "a newcomer counts as a survivor": 168,
    "the position is the lowest one": 9,
    "contributions to a later position survive a view": 186,
    "tags are not compared": 1,
    "a range is summed in another order": 21,
    "a total is dropped when it is complete": 27,
    "early messages are lost": 7,
    "a message is sent once": 13,
    "slice sums survive a view": 266,
    "slices of an old view are added": 25,
    "slices count as whole sums": 5,
    "a slice is added to the own sum": 90,
    "a report counts before its step is stable": 8,
    "a view does not compare the one before": 68,
    "a newcomer enters before its state": 1,
    "a newcomer begins one step later than its state": 1,
    "a newcomer returns while workers live": 53,
    "a worker is waited for although nobody has its totals": 164,
    "a checkpoint has a state that is not stable": 1,
    "messages without a reply are not sent again": 24,
    "a checkpoint is read without its reports": 11,
    "a return begins at the first step": 31,
    "an excluded worker goes on with its state": 1089,
    "a total is completed without a worker": 45,
}
"""Mistakes, and a seed that finds each soon. The test tries that seed first, then all others. If the simulation or the
node changes so that this takes long, make the table again from what the test prints."""


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", PLANTS)
def test_planted_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[name](monkeypatch)
    seeds = (FOUND_BY.get(name, 0), *range(WITHIN))
    found = next((outcome for seed in seeds if (outcome := run_elastic_seed(seed)).problem), None)
    assert found is not None, f"{WITHIN} seeds do not notice that {name}"
    print(f"seed {found.seed} finds that {name}: {found.problem}")


def test_there_are_enough() -> None:
    assert len(PLANTS) >= 12
    assert FOUND_BY.keys() <= PLANTS.keys()
