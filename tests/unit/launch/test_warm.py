"""Processes that are started before it is known what they are for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from taskgraph.launch.warm import WarmNodes, WarmProcess
from taskgraph.node.config import NodeConfig

pytestmark = pytest.mark.slow


async def test_one_that_is_not_needed_ends_and_says_nothing(tmp_path: Path) -> None:
    async with WarmNodes(tmp_path, ["n1", "n2"], blas_threads=1) as warm:
        taken = warm.take("n2", tmp_path / "n2.log", 1)
        assert taken is not None and taken.process.returncode is None
        assert warm.take("n2", tmp_path / "n2.log", 1) is None, "it is somebody's"
        assert warm.take("n3", tmp_path / "n3.log", 1) is None
        assert warm.take("n1", tmp_path / "n1.log", 2) is None, "numpy was loaded for one thread already"
        assert warm.take("n1", tmp_path / "elsewhere.log", 1) is None
    assert taken.process.returncode is None
    os.close(taken.pipe)
    async with asyncio.timeout(60):
        assert await taken.process.wait() == 0
    assert (tmp_path / "n1.log").read_text() == (tmp_path / "n2.log").read_text() == ""
    assert (tmp_path / "n1.log").stat().st_mode & 0o777 == 0o600


async def test_one_that_does_not_end_is_killed(tmp_path: Path) -> None:
    one = await WarmProcess.start(tmp_path / "n1.log", 1)
    one.process.send_signal(signal.SIGSTOP)
    await one.end()
    assert one.process.returncode == -signal.SIGKILL


async def test_one_that_died_is_told_nothing_and_nobody_minds(tmp_path: Path) -> None:
    one = await WarmProcess.start(tmp_path / "n1.log", 1)
    one.process.kill()
    await one.process.wait()
    one.tell(NodeConfig(job="fit", name="n1", etcd="127.0.0.1:1", token="ab" * 32))
    os.close(one.pipe)


async def test_a_cancelled_start_leaves_none(tmp_path: Path) -> None:
    async def never() -> None:
        async with WarmNodes(tmp_path, ["n1", "n2"], blas_threads=1):
            await asyncio.Event().wait()

    starting = asyncio.ensure_future(never())
    while not (tmp_path / "n2.log").exists():  # noqa: ASYNC110 (no event tells)
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert _writing_to(tmp_path) == []


async def test_none_outlives_a_launcher_that_is_killed_before_it_has_told_them(tmp_path: Path) -> None:
    script = f"""
import asyncio, os, signal
from pathlib import Path
from taskgraph.launch.warm import WarmNodes
async def main():
    async with WarmNodes(Path({str(tmp_path)!r}), ["n1", "n2"], 1):
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    launcher = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    assert await launcher.wait() == -signal.SIGKILL
    async with asyncio.timeout(30):
        while _writing_to(tmp_path):  # noqa: ASYNC110 (they are nobody's children here)
            await asyncio.sleep(0.05)


def _writing_to(folder: Path) -> list[str]:
    """Processes whose output goes to a file in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith(str(folder)):
                found.append(str(path))
    return found
