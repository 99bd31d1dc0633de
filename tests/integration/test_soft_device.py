"""Arrays of a device, in software, between real processes: staged on the host, lent, and back on a device."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli_kit import PATIENT, Cli

pytestmark = pytest.mark.timeout(180)

DRIVER = Path(__file__).parent / "drivers" / "soft_device.py"


def wanted(tasks: int, epochs: int, size: int = 50_000) -> dict[int, float]:
    """The driver's result, by numpy. The driver is not imported here: it gives its process a device."""
    rows = [np.arange(float(size)) + 1.0 * task for task in range(tasks)]
    for _ in range(epochs):
        rows = [(rows[t - 1] + rows[(t + 1) % tasks] + rows[t] * 3.0) / 5.0 for t in range(tasks)]
    return {task: float((row * (1 + np.arange(size) % 97)).sum()) for task, row in enumerate(rows)}


async def test_processes_that_share_a_device_open_each_others_memory_and_one_is_killed(cli: Cli) -> None:
    size, epochs = 200_000, 60
    told = {"SOFT_DEVICE_SHARED": "the same", "SOFT_DEVICE_SIZE": str(size)}
    options = ("--json", "--nodes", "3", "-o", f"epochs={epochs}", "-o", f"gate={cli.gate}", *PATIENT)
    command = await cli.start("run", str(DRIVER), *options, **told)
    await command.until("the job began")
    assert "sent SIGKILL" in (await cli("kill", "soft_rows", "--task", "1")).out
    cli.open()
    done = await command.done()
    assert done.code == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert result["failovers"] >= 1
    assert {int(task): value for task, value in result["values"].items()} == wanted(5, epochs, size)
    numbers_of = [numbers for report in result["reports"] for numbers in report["by_task"].values()]
    assert len(numbers_of) == 5 * epochs and not any(numbers["waited_on_loops"] for numbers in numbers_of)
    opened = [numbers["opened"] for numbers in result["reports"][-1]["by_task"].values()]
    assert all(2 <= count <= epochs for count in opened), f"each piece of memory once, of some 180 items: {opened}"
    assert "go by the host" not in done.err
    await cli.nothing_left()


async def test_rows_between_hosts_survive_a_kill(cli: Cli) -> None:
    size, epochs = 600_000, 100  # more than a piece
    told = {"SOFT_DEVICE_REMOTE": "1", "SOFT_DEVICE_SIZE": str(size)}
    options = ("--nodes", "3", "--listen", "127.0.0.1", "-o", f"epochs={epochs}", "-o", f"gate={cli.gate}", *PATIENT)
    command = await cli.start("run", str(DRIVER), "--json", *options, **told)
    await command.until("the job began")
    assert "sent SIGKILL" in (await cli("kill", "soft_rows", "--task", "1")).out
    cli.open()
    done = await command.done()
    assert done.code == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert result["failovers"] >= 1
    assert {int(task): value for task, value in result["values"].items()} == wanted(5, epochs, size)
    numbers_of = [numbers for report in result["reports"] for numbers in report["by_task"].values()]
    assert not any(numbers["waited_on_loops"] or numbers["misuses"] for numbers in numbers_of)
    last = [numbers["registered"] for numbers in result["reports"][-1]["by_task"].values()]
    # What a node needs at once depends on how many tasks it has and how many epochs are under way. It does not grow
    # with the epochs, but what is sent does: each task sends an array in each of them.
    assert all(0 < registered < epochs / 2 for registered in last), f"memory that is used again and again: {last}"
    await cli.nothing_left()
