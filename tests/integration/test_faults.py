"""Real processes, a real etcd, real faults: the result is bit for bit the one of a run without any."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_kit import Cli, Command, Done, kill_at_once, sums

import taskgraph as tg
from taskgraph.driver.loading import load_driver
from taskgraph.node.inject import VARIABLE

pytestmark = pytest.mark.timeout(180)

DRIVER = Path(__file__).parent / "drivers" / "steady.py"


@cache
def calm(epochs: int) -> dict[str, Any]:
    """The result without faults, made in one process."""
    job = load_driver(str(DRIVER))(epochs=epochs, pace_s=0.0)
    with ThreadPoolExecutor(1) as thread:  # here there is a loop already
        return json.loads(thread.submit(tg.run, job, nodes=0, timeout_s=100).result().to_json())


def check(done: Done, *, failovers: int, epochs: int = 200) -> None:
    """The same numbers, bit for bit, in every epoch, and the job never began again."""
    assert done.code == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert np.array_equal(result["values"]["0"], calm(epochs)["values"]["0"])
    assert result["reports"] == calm(epochs)["reports"], "every epoch reported once, with the same number"
    assert result["failovers"] >= failovers
    assert result["restarts"] == 0, "recomputing the same thing needs no restart"


async def started(cli: Cli, *arguments: str) -> Command:
    """A run that does not end before `cli.open()`."""
    command = await cli.start("run", str(DRIVER), "--json", "-o", f"gate={cli.gate}", *arguments)
    await command.until("the job began")
    return command


async def status(cli: Cli, job: str = "steady") -> dict[str, Any]:
    return await cli.status(job)


def primary_pid(now: dict[str, Any], task: int) -> int:
    name = now["tasks"][task]["primary"]
    return next(node["pid"] for node in now["nodes"] if node["name"] == name)


async def test_three_kills_change_no_result(cli: Cli) -> None:
    command = await started(cli, "--nodes", "5")
    for arguments in (["--task", "0"], ["--task", "5"], ["--task", "3", "--backup"]):
        await cli.held("steady")
        assert "sent SIGKILL" in (await cli("kill", "steady", *arguments)).out
    cli.open()
    check(await command.done(), failovers=2)
    story = (await cli("events", "steady")).out
    assert "is primary after" in story
    assert "is no longer in sync" in story
    await cli.nothing_left()


async def test_two_nodes_at_once_with_two_backups(cli: Cli) -> None:
    command = await started(cli, "--nodes", "4", "-o", "backups=2")
    await cli.status("steady", lambda now: len({task["primary"] for task in now["tasks"]}) > 1)
    now = await cli.held("steady", backups=2)
    kill_at_once(sorted({primary_pid(now, task) for task in range(7)})[:2])
    cli.open()
    check(await command.done(), failovers=2)


@pytest.mark.smoke
async def test_frozen_primary_steps_down(cli: Cli) -> None:
    command = await started(cli, "--nodes", "3", "-o", "lease_ttl_s=2", "-o", "epochs=100")
    pid = primary_pid(await cli.held("steady"), 0)
    os.kill(pid, signal.SIGSTOP)
    try:
        await command.until(" moved to ")  # its successor
    finally:
        os.kill(pid, signal.SIGCONT)
    cli.open()
    check(await command.done(), failovers=1, epochs=100)


@pytest.mark.smoke
async def test_job_survives_an_etcd_pause(cli: Cli) -> None:
    command = await started(cli, "--nodes", "3", "-o", "lease_ttl_s=2", "-o", "epochs=100")
    etcd = next(pid for pid, line in cli.processes().items() if "etcd" in line and "guard.py" not in line)
    os.kill(etcd, signal.SIGSTOP)
    try:
        await asyncio.sleep(3)  # longer than a TTL: every node pauses
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(etcd, signal.SIGCONT)
    cli.open()
    check(await command.done(), failovers=0, epochs=100)


@pytest.mark.smoke
async def test_lost_state_without_backup_fails_the_job(cli: Cli) -> None:
    command = await started(cli, "--nodes", "3", "-o", "backups=0")
    assert "the job fails" in (await cli("kill", "steady", "--task", "4", "--force")).err
    done = await command.done()
    assert done.code == 1
    assert "every replica in sync is gone" in done.err
    assert "backups" in done.err
    await cli.nothing_left()


FATAL = str(DRIVER.with_name("fatal.py"))
FATAL_LINES = Path(FATAL).read_text().splitlines()


def deaths(said: str, place: str) -> int:
    """Of how many nodes a failed job says that they died there: who takes over may be faster than the word of it."""
    found = re.search(re.escape(place) + r"([3-9]) nodes died while it ran \(fatal_deaths=3\)", said)
    assert found, said
    return int(found[1])


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("11", "exited with code 11"),
        ("0", "exited with code 0"),
        ("segfault", "was killed by SIGSEGV"),
        ("abort", "was killed by SIGABRT"),
        ("killed", "was killed by SIGKILL"),
    ],
)
async def test_code_that_always_exits_fails_the_job(cli: Cli, how: str, told: str) -> None:
    # More backups than nodes may die; and so long that it is known how one died before the next one does.
    options = ("-o", f"how={how}", "-o", "linger_s=0.5", "-o", "backups=3")
    done = await cli("run", FATAL, "--nodes", "5", *options)
    assert done.code == 1
    failed = next(line for line in done.err.splitlines() if "job failed: " in line)
    assert (count := deaths(failed, "task 1, epoch 2, 'crash': ")) < 5, "some are left"
    died = re.findall(rf"(n\d) {told} while it ran 'crash' of task 1", failed)
    assert len(set(died)) == len(died) == count
    assert "'crash' of task 1 ran each time: " in failed and "Settings(fatal_deaths=...)" in failed
    assert ("dmesg" in failed) == (how == "killed")
    if how in ("segfault", "abort"):
        call = {"segfault": "ctypes.string_at(0)", "abort": "os.abort()"}[how]
        line = next(n for n, text in enumerate(FATAL_LINES, 1) if call in text)
        assert f"while it ran 'crash' of task 1 at {FATAL}, line {line}" in failed
    record = await status(cli, "fatal")
    assert (record["state"], record["reason"]) == ("failed", failed.partition("job failed: ")[2])
    await cli.nothing_left()


@pytest.mark.parametrize("how", ["exit", "cancel"])
async def test_asyncio_code_of_its_own_that_ends_the_process_is_named(cli: Cli, how: str) -> None:
    """`sys.exit` in an asyncio task that user code started; a cancel of all asyncio tasks there are."""
    done = await cli("run", str(DRIVER.with_name("leaving.py")), "--nodes", "5", "-o", f"how={how}", "-o", "backups=3")
    assert done.code == 1
    assert "every node has ended" not in done.err
    if "code of the job cancelled the asyncio task it runs in" not in done.err:
        assert deaths(done.err, "'asyncio tasks of its own': ")
    await cli.nothing_left()


@pytest.mark.parametrize(("fatal_at", "where", "backups"), [(-1, "setup", 1), (6, "result", 4)])
async def test_a_setup_or_a_result_that_ends_its_process_does_so_too(
    cli: Cli, fatal_at: int, where: str, backups: int
) -> None:
    # A node more: the first `result()` counts as of the last epoch, which is committed.
    options = ("-o", f"fatal_at={fatal_at}", "-o", "linger_s=0.3", "-o", f"backups={backups}")
    done = await cli("run", FATAL, "--nodes", "6", *options)
    assert done.code == 1
    assert deaths(done.err, f"{where!r}: ")
    await cli.nothing_left()


@contextlib.contextmanager
def little_memory(size: int) -> Iterator[Path]:
    """A control group whose processes may take so many bytes; skips where none can be made."""
    folder = Path(f"/sys/fs/cgroup/memory/taskgraph-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group of version 1 for memory can be made: {error}")
    try:
        for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
            with contextlib.suppress(FileNotFoundError):  # the latter where swap is not counted
                (folder / name).write_text(str(size))
        yield folder
    finally:
        while (folder / "cgroup.procs").read_text():
            time.sleep(0.01)
        folder.rmdir()


async def test_nodes_that_the_kernel_killed_for_their_memory_are_told_so(cli: Cli, tmp_path: Path) -> None:
    """It was said that more backups help, which take more memory."""
    with little_memory(600 << 20) as group:
        inside = (  # else the launcher is the largest one, while a node that was killed still has its memory
            f"import os, sys; open('{group}/cgroup.procs', 'w').write(str(os.getpid())); "
            "open('/proc/self/oom_score_adj', 'w').write('-1000'); "
            "os.execv(sys.executable, [sys.executable, '-m', 'taskgraph', *sys.argv[1:]])"
        )
        options = ("-o", "how=memory", "-o", "ahead=0", "-o", "alone=true", "-o", "linger_s=0.3")
        done = await cli("run", FATAL, "--nodes", "3", *options, python=("-c", inside), **{VARIABLE: str(tmp_path)})
        assert done.code == 1
        assert "task 1: every replica in sync is gone" in done.err
        assert "was killed by SIGKILL, as memory was used up (the kernel killed " in done.err
        assert "Allow more memory where they ran (the limit of the container" in done.err
        assert "run with more backups" not in done.err
        await cli.nothing_left()


async def test_a_job_does_not_go_back_to_its_checkpoint_again_and_again_for_such_code(cli: Cli) -> None:
    done = await cli("run", FATAL, "--nodes", "6", "-o", "ahead=0", "-o", "fatal_at=4", "-o", f"kept={cli.root}/kept")
    assert done.code == 1
    assert deaths(done.err, "task 1, epoch 4, 'crash': ")
    await cli.nothing_left()


@pytest.mark.smoke
async def test_code_that_exits_once_is_repeated(cli: Cli) -> None:
    done = await cli("run", FATAL, "--nodes", "5", "--json", "-o", "once=true", "-o", f"folder={cli.root}")
    assert done.code == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert result["values"]["1"] == 6 and result["failovers"] >= 1
    await cli.nothing_left()


async def test_kills_on_purpose_are_not_blamed_on_what_ran(cli: Cli) -> None:
    """As many in one epoch, while the same code runs in it, as fail the job where nobody says that they are meant."""
    command = await cli.paused("--nodes", "5", "--json")
    for _ in range(3):
        await cli.held("sums")
        assert "sent SIGKILL" in (await cli("kill", "sums", "--task", "0")).out
        await command.until(" moved to ")
    cli.open()
    done = await command.done()
    assert done.code == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert result["values"]["0"] == sums() and result["failovers"] >= 3
    await cli.nothing_left()


@pytest.mark.parametrize("in_task", [False, True])
async def test_a_child_that_a_coroutine_forks_leaves_its_parents_node_alone(cli: Cli, in_task: bool) -> None:
    driver = str(DRIVER.with_name("forking.py"))
    done = await cli("run", driver, "--nodes", "3", "-o", f"in_task={in_task}", "--logs", "--json", "--timeout", "100")
    assert done.code == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert result["values"]["0"] == sum(number * (1 + 2 + 3) for number in range(40))
    assert (result["failovers"], result["restarts"]) == (0, 0)
    assert "a function forked this process, and the child returned from it" in done.err
    await cli.nothing_left()
