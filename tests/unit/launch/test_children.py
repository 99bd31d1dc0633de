"""Signals to processes that asyncio started."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest

from taskgraph.children import tell_child

linux = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")


@linux
def test_a_child_that_has_ended_by_itself_keeps_its_exit_code(caplog: pytest.LogCaptureFixture) -> None:
    """Also where asyncio does not know yet that it ended."""

    async def scenario() -> int:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(3)")
        until = time.monotonic() + 20.0
        while not _is_zombie(process.pid):
            time.sleep(0.01)  # noqa: ASYNC251 - the event loop must not learn of it
            assert time.monotonic() < until
        tell_child(process, signal.SIGTERM)
        return await process.wait()

    with caplog.at_level(logging.WARNING, logger="asyncio"):
        assert _run_with_pidfds(scenario()) == 3
    assert not caplog.records


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@linux
def test_a_child_that_runs_gets_the_signal() -> None:
    async def scenario() -> int:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(60)")
        tell_child(process, signal.SIGKILL)
        code = await process.wait()
        tell_child(process, signal.SIGKILL)  # its number may be somebody else's by now
        return code

    assert asyncio.run(scenario()) == -signal.SIGKILL


@linux
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="no other thread waits for children there")
def test_a_number_that_is_free_again_gets_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of asyncio's has taken the exit code, and the event loop has not heard of it."""
    told: list[int] = []

    async def scenario() -> int:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(3)")
        until = time.monotonic() + 20.0
        while Path(f"/proc/{process.pid}").exists():  # noqa: ASYNC240
            time.sleep(0.01)  # noqa: ASYNC251 - the event loop must not learn of it
            assert time.monotonic() < until
        assert process.returncode is None
        monkeypatch.setattr(os, "kill", lambda pid, number: told.append(pid))
        tell_child(process, signal.SIGTERM)
        return await process.wait()

    assert asyncio.run(scenario()) == 3
    assert told == []


def _run_with_pidfds(main: object) -> int:
    """`asyncio.run` with the watcher that is the default from 3.12 on: it learns of an end from the event loop."""
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
