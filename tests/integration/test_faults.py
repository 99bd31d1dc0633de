"""Real processes, a real etcd, real faults: the result is bit for bit the one of a run without any."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from cli_kit import Cli, Command, Done, shell

import taskgraph as tg
from taskgraph.driver import load_driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

DRIVER = Path(__file__).parent / "drivers" / "steady.py"


@pytest.fixture
async def cli() -> AsyncIterator[Cli]:
    async with shell() as made:
        yield made


@pytest.fixture(scope="module")
def calm() -> dict[str, object]:
    """The result without faults, made in one process."""
    result = tg.run(load_driver(str(DRIVER))(), nodes=0, timeout_s=100)
    return json.loads(result.to_json())


def check(done: Done, calm: dict[str, object], *, failovers: int) -> dict[str, object]:
    """The same numbers, bit for bit, in every epoch, and the job never began again."""
    assert done.code == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert np.array_equal(result["values"]["0"], calm["values"]["0"])  # type: ignore[index]
    assert result["reports"] == calm["reports"], "every epoch reported once, with the same number"
    assert result["failovers"] >= failovers
    assert result["restarts"] == 0, "recomputing the same thing needs no restart"
    return result


async def started(cli: Cli, *arguments: str) -> Command:
    command = await cli.start("run", str(DRIVER), "--json", *arguments)
    await command.until("the job began")
    return command


async def status(cli: Cli) -> dict[str, object]:
    return json.loads((await cli("status", "steady", "--json")).out)


async def primary_pid(cli: Cli, task: int) -> int:
    now = await status(cli)
    name = now["tasks"][task]["primary"]  # type: ignore[index]
    return next(node["pid"] for node in now["nodes"] if node["name"] == name)  # type: ignore[index, union-attr]


async def test_one_after_another_the_root_another_primary_and_a_backup(cli: Cli, calm: dict[str, object]) -> None:
    command = await started(cli, "--nodes", "5")
    for arguments in (["--task", "0"], ["--task", "5"], ["--task", "3", "--backup"]):
        assert "sent SIGKILL" in (await cli("kill", "steady", *arguments)).out
    check(await command.done(), calm, failovers=2)
    story = (await cli("events", "steady")).out
    assert "is primary after" in story
    assert "is out of its in-sync set" in story
    await cli.nothing_left()


async def test_two_nodes_at_once_with_two_backups(cli: Cli, calm: dict[str, object]) -> None:
    command = await started(cli, "--nodes", "4", "-o", "backups=2")
    first, second = await primary_pid(cli, 0), await primary_pid(cli, 6)
    assert first != second
    for pid in (first, second):
        os.kill(pid, signal.SIGKILL)
    check(await command.done(), calm, failovers=2)


async def test_a_frozen_primary_is_replaced_and_steps_down_when_it_wakes(cli: Cli, calm: dict[str, object]) -> None:
    command = await started(cli, "--nodes", "3", "-o", "lease_ttl_s=2")
    pid = await primary_pid(cli, 0)
    os.kill(pid, signal.SIGSTOP)
    try:
        await command.until("is primary after")  # its successor
    finally:
        os.kill(pid, signal.SIGCONT)
    result = check(await command.done(), calm, failovers=1)
    assert result["epochs"] == 400


async def test_the_job_outlasts_a_pause_of_etcd(cli: Cli, calm: dict[str, object]) -> None:
    command = await started(cli, "--nodes", "3", "-o", "lease_ttl_s=2")
    etcd = next(pid for pid, line in cli.processes().items() if "etcd" in line and "guard.py" not in line)
    os.kill(etcd, signal.SIGSTOP)
    try:
        await asyncio.sleep(4)  # two TTLs: every node pauses
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(etcd, signal.SIGCONT)
    check(await command.done(), calm, failovers=0)


async def test_without_a_backup_a_lost_state_fails_the_job_and_says_so(cli: Cli) -> None:
    command = await started(cli, "--nodes", "3", "-o", "backups=0")
    await cli("kill", "steady", "--task", "4")
    done = await command.done()
    assert done.code == 1
    assert "every replica in sync is gone" in done.err
    assert "backups" in done.err
    await cli.nothing_left()


async def test_code_that_ends_its_process_is_named_once_it_ended_those_of_all_replicas(cli: Cli) -> None:
    # In step a successor begins with the fatal epoch, and dies of it before it has another backup.
    done = await cli("run", str(DRIVER.with_name("fatal.py")), "--nodes", "4", "-o", "ahead=0")
    assert done.code == 1
    assert "task 1: every replica in sync is gone" in done.err
    died = [line for line in done.err.splitlines() if "exited with code 11 while it ran 'crash' of task 1; " in line]
    assert len(died) == 1
    assert "'crash' of task 1 ran each time: it may have ended the process itself, by os._exit" in died[0]
    told = (await cli("events", "fatal")).out
    assert "exited with code 11 while it ran 'crash' of task 1" in told
    await cli.nothing_left()


async def test_code_that_ends_its_process_is_named_also_where_it_ended_every_node(cli: Cli) -> None:
    """Where successors begin before the fatal epoch they may have another backup by then, which dies of it, too."""
    done = await cli("run", str(DRIVER.with_name("fatal.py")), "--nodes", "4")
    assert done.code == 1
    assert "every replica in sync is gone" in done.err or "every node has ended" in done.err
    assert "'crash' of task 1 ran each time: it may have ended the process itself, by os._exit" in done.err
    await cli.nothing_left()
