"""Items in shared memory through a whole job, with nodes killed and frozen: the numbers are those of one process."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from cli_kit import Cli

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
    command = await cli.start("run", str(DRIVER), "--json", "--nodes", "5")
    await command.until("the job began")
    now = json.loads((await cli("status", "bulk", "--json")).out)
    pids = [node["pid"] for node in now["nodes"]]
    for arguments in (["--task", "1"], ["--task", "6"], ["--task", "0"]):
        while "sent SIGKILL" not in (killed := await cli("kill", "bulk", *arguments)).out:
            assert "shows one more in sync" in killed.err, killed.err  # the kill before was a moment ago
            await asyncio.sleep(0.05)
    assert sum(map(shared_memory, pids)) > 0, "items are lent"
    done = await command.done()
    assert done.code == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert result["values"]["0"] == calm["values"]["0"]  # type: ignore[index]
    assert result["reports"] == calm["reports"]
    assert result["failovers"] >= 2 and result["restarts"] == 0
    await cli.nothing_left()
    assert not [name for name in os.listdir("/dev/shm") if "taskgraph" in name]
