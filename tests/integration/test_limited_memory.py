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


async def test_operator_drains_the_node_without_memory(cli: Cli, calm: dict[str, float]) -> None:
    run = await cli.start("run", str(DRIVER), "--nodes", "2", "--json")
    restart = await run.until("has no memory for")
    assert "task 1 cannot pull 'v' from task 0" in restart
    seen = (await cli.once(lambda done: "memory for 'v' from task 0: " in done.out, "status", "poor")).out
    poor = (await cli.status("poor"))["tasks"][1]["primary"]
    assert f"{poor} has no memory for" in seen
    done = await cli("drain", "poor", "--node", poor)
    assert done.code == 0, done.err
    done = await run.done()
    assert done.code == 0, done.err
    assert json.loads(done.out.splitlines()[-1])["values"] == calm
    assert f"task 1: n{3 - int(poor[1:])} is primary after {poor} " in done.err
    await cli.nothing_left()
