"""Shared state on real nodes: kills, drains, a roll-back and a resume leave the result of a run without them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli, Done, kill_at_once
from processes_kit import becomes

import taskgraph as tg
from taskgraph.driver.loading import load_driver

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

DRIVER = Path(__file__).parent / "drivers" / "shared.py"


@cache
def calm() -> dict[str, Any]:
    job = load_driver(str(DRIVER))(pace_s=0.0)
    with ThreadPoolExecutor(1) as thread:  # here there is a loop already
        return json.loads(thread.submit(tg.run, job, nodes=0, timeout_s=100).result().to_json())


def check(done: Done) -> dict[str, Any]:
    assert done.code == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert result["values"] == calm()["values"]
    return result


def file_sizes(place: Path) -> dict[str, int]:
    """The size of each task's file in the last checkpoint."""
    newest = max(place.glob("**/manifest.json")).parent
    return {path.name: path.stat().st_size for path in newest.glob("task-*.safetensors")}


async def test_kills_of_the_keeper_and_others(cli: Cli) -> None:
    command = await cli.start("run", str(DRIVER), "--json", "-o", f"gate={cli.gate}", "--nodes", "5")
    await command.until("the job began")
    for task in ("2", "0", "3"):
        await cli.held("shared")
        assert "sent SIGKILL" in (await cli("kill", "shared", "--task", task)).out
    cli.open()
    assert check(await command.done())["failovers"] >= 3
    await cli.nothing_left()


async def test_lost_keeper_rolls_the_job_back(cli: Cli, tmp_path: Path) -> None:
    options = ("-o", f"gate={cli.gate}", "-o", f"checkpoint=file://{tmp_path}", "-o", "backups=0")
    command = await cli.start("run", str(DRIVER), "--json", "--nodes", "4", *options)
    await command.until("the job began")
    await becomes(lambda: any(tmp_path.glob("**/manifest.json")))
    # Tasks move until each node has one: what was the keeper's node a moment ago has nothing that could be lost.
    now = await cli.status("shared", lambda now: len({task["primary"] for task in now["tasks"]}) == 4)
    names = {task["primary"] for task in now["tasks"] if task["task"] == 0}
    sizes = file_sizes(tmp_path)
    assert sizes["task-000000.safetensors"] > 400_000 > 10_000 > sizes["task-000001.safetensors"]
    kill_at_once([node["pid"] for node in now["nodes"] if node["name"] in names])
    cli.open()
    assert check(await command.done())["restarts"] >= 1


async def test_resume_on_fewer_nodes(cli: Cli, tmp_path: Path) -> None:
    options = ("-o", f"gate={cli.gate}", "-o", f"checkpoint=file://{tmp_path}")
    command = await cli.start("run", str(DRIVER), "--json", "--nodes", "2", *options)
    await command.until("the job began")
    await becomes(lambda: any(tmp_path.glob("**/manifest.json")))
    command.process.kill()
    kill_at_once([*cli.processes()])
    await command.process.communicate()
    await becomes(lambda: not cli.processes())
    cli.open()
    check(await cli("run", str(DRIVER), "--json", "--nodes", "1", "--resume", *options))
