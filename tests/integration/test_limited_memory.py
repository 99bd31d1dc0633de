"""A node whose memory is limited, as by `ulimit -v`: what its task pulls finds no room there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_kit import Cli

import taskgraph as tg
from taskgraph.driver.loading import load_driver

pytestmark = pytest.mark.timeout(180)

DRIVER = Path(__file__).parent / "drivers" / "poor.py"


@pytest.fixture(scope="module")
def calm() -> dict[str, float]:
    """What it returns where there is memory enough."""
    values = tg.run(load_driver(str(DRIVER))(limits=False), nodes=0, timeout_s=100).values
    return {str(task): value for task, value in values.items()}


async def test_a_task_goes_on_where_there_is_memory_for_what_it_pulls(cli: Cli, calm: dict[str, float]) -> None:
    done = await cli("run", str(DRIVER), "--nodes", "2", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out.splitlines()[-1])["values"] == calm
    assert "leaves task 1 to n" in done.err and "as it had no memory for 'v' from task 0" in done.err
    await cli.nothing_left()
