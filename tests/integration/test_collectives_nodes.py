"""Collectives on node processes, one of which is killed while it adds up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import taskgraph as tg
from taskgraph.driver.loading import load_driver

DRIVER = str(Path(__file__).parent / "drivers" / "collective_sums.py")


@pytest.mark.slow
def test_a_killed_node_leaves_the_bits_of_the_sum(tmp_path: Path) -> None:
    sums = load_driver(DRIVER)
    alone, count = tg.run(sums(), nodes=0).value
    assert count == 24
    for via in ("tree", "auto"):
        options: dict[str, Any] = {"via": via, "mark": str(tmp_path / via)}
        killed = tg.run(sums(**options), nodes=2, timeout_s=60)
        assert killed.failovers >= 1
        assert killed.value[0].tobytes() == alone.tobytes()
        assert killed.value[1] == count
