"""Signals to processes that asyncio started."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from taskgraph.system import host
from taskgraph.system.processes import end_group, signal_child

linux = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")


@linux
def test_signal_to_an_ended_child_keeps_its_exit_code(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio has not noticed the end yet."""

    async def scenario() -> int:
        process = await _ending()
        until = time.monotonic() + 20.0
        while not _is_zombie(process.pid):
            time.sleep(0.01)  # noqa: ASYNC251 - the event loop must not learn of it
            assert time.monotonic() < until
        signal_child(process, signal.SIGTERM)
        return await process.wait()

    with caplog.at_level(logging.WARNING, logger="asyncio"):
        assert _run_with_pidfds(scenario()) == 3
    assert not caplog.records


async def _ending() -> asyncio.subprocess.Process:
    """Starts a child that ends only after asyncio has made it."""
    ours, its = os.pipe()
    try:
        command = [sys.executable, "-c", "input(); raise SystemExit(3)"]
        process = await asyncio.create_subprocess_exec(*command, stdin=ours)
        os.write(its, b"\n")
        return process
    finally:
        os.close(ours)
        os.close(its)


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@linux
def test_running_child_gets_the_signal() -> None:
    async def scenario() -> int:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(60)")
        signal_child(process, signal.SIGKILL)
        code = await process.wait()
        signal_child(process, signal.SIGKILL)  # its number may be somebody else's by now
        return code

    assert asyncio.run(scenario()) == -signal.SIGKILL


@linux
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="no other thread waits for children there")
def test_reused_process_id_gets_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of asyncio has the exit code, but the event loop does not know it yet."""
    said: list[int] = []

    async def scenario() -> int:
        process = await _ending()
        until = time.monotonic() + 20.0
        while Path(f"/proc/{process.pid}").exists():  # noqa: ASYNC240
            time.sleep(0.01)  # noqa: ASYNC251 - the event loop must not learn of it
            assert time.monotonic() < until
        assert process.returncode is None
        monkeypatch.setattr(os, "kill", lambda pid, number: said.append(pid))
        signal_child(process, signal.SIGTERM)
        return await process.wait()

    assert asyncio.run(scenario()) == 3
    assert said == []


_ENDS_ITS_OWN = """
import subprocess, sys
from taskgraph.system.processes import end_children
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
print(*(subprocess.Popen(sleep, stdout=-3, stderr=-3, start_new_session=own).pid for own in (False, True)), flush=True)
sys.stdin.readline()
end_children()
"""


@linux
@pytest.mark.parametrize("leads", ["its session", "a pipeline", "nobody"])
def test_end_mine_spares_other_sessions(leads: str) -> None:
    """A node that was started by hand may be in the group of a shell's pipeline."""
    node = subprocess.Popen(
        [sys.executable, "-c", _ENDS_ITS_OWN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=leads == "its session",
        process_group=0 if leads == "a pipeline" else None,
    )
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with node, subprocess.Popen(sleep, process_group=node.pid if leads == "a pipeline" else None) as beside:
        assert node.stdout is not None
        ended, lives = map(int, node.stdout.readline().split())
        node.communicate("\n", timeout=60)
        try:
            assert node.returncode == 0
            _until(lambda: host.state(ended) in ("", "Z"))  # it is gone a moment after it was killed
            assert host.state(lives) not in ("", "Z") and beside.poll() is None
        finally:
            os.kill(lives, signal.SIGKILL)
            beside.kill()


@linux
def test_group_ends_with_its_leader() -> None:
    code = "import os, time; pid = os.fork(); print(pid, flush=True) if pid else time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as leader:
        assert leader.stdout is not None
        left = int(leader.stdout.readline())
        leader.wait()
        assert host.group_members(leader.pid).keys() == {left}
        end_group(leader.pid)
        assert leader.stdout.read() == b"", "nobody holds its output"
    _until(lambda: not host.group_members(leader.pid))  # a process closes its files shortly before it is gone
    end_group(leader.pid)


def _until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 60.0
    while not true():
        time.sleep(0.01)
        assert time.monotonic() < until


def _run_with_pidfds(main: object) -> int:
    """Runs `asyncio.run` with the child watcher that is the default from Python 3.12 on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        before = None
        if sys.version_info < (3, 12):
            policy = asyncio.get_event_loop_policy()
            before = policy.get_child_watcher()
            policy.set_child_watcher(asyncio.PidfdChildWatcher())
        try:
            return asyncio.run(main)  # type: ignore[arg-type]
        finally:
            if before is not None:
                policy.set_child_watcher(before)
