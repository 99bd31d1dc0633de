"""Items in shared memory through a whole job, with nodes killed and frozen: the numbers are those of one process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli_kit import Cli
from processes_kit import becomes

import taskgraph as tg
from taskgraph.driver.loading import load_driver

pytestmark = pytest.mark.timeout(180)

DRIVER = Path(__file__).parent / "drivers" / "bulk.py"


@pytest.fixture(scope="module")
def calm() -> dict[str, object]:
    """The result without faults, made in one process, where nothing is lent."""
    return json.loads(tg.run(load_driver(str(DRIVER))(pace_s=0.0), nodes=0, timeout_s=100).to_json())


def shared_memory(pid: int) -> int:
    """How many pieces of shared memory a process has mapped; none if it was killed."""
    try:
        return Path(f"/proc/{pid}/maps").read_text().count("memfd:taskgraph")
    except (FileNotFoundError, ProcessLookupError):
        return 0


async def test_what_is_kept_stays_as_it_was_whoever_is_killed(cli: Cli, calm: dict[str, object]) -> None:
    command = await cli.start("run", str(DRIVER), "--json", "--nodes", "4", "-o", f"gate={cli.gate}")
    await command.until("the job began")
    for task in ("1", "0"):
        now = await cli.held("bulk")
        assert "sent SIGKILL" in (await cli("kill", "bulk", "--task", task)).out
    pids = [node["pid"] for node in now["nodes"]]
    await becomes(lambda: sum(map(shared_memory, pids)) > 0)  # items are lent
    cli.open()
    done = await command.done()
    assert done.code == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert result["values"]["0"] == calm["values"]["0"]  # type: ignore[index]
    assert result["reports"] == calm["reports"]
    assert result["failovers"] >= 2 and result["restarts"] == 0
    await cli.nothing_left()
    assert not [name for name in os.listdir("/dev/shm") if "taskgraph" in name]
