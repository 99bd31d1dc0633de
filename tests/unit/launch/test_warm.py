"""Processes that are started before it is known what they are for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
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
    await taken.end()
    assert taken.process.returncode == 0
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


def _writing_to(folder: Path) -> list[str]:
    """Processes whose output goes to a file in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith(str(folder)):
                found.append(str(path))
    return found


async def test_it_becomes_the_node_it_is_told_to_be(tmp_path: Path) -> None:
    """Here one that finds no etcd: it says so, under the name it was told."""
    one = await WarmProcess.start(tmp_path / "n1.log", 1)
    one.tell(
        NodeConfig(job="fit", name="n1", etcd="unix:/nowhere/to/be/found", token="ab" * 32, parent_pid=os.getpid())
    )
    async with asyncio.timeout(60):
        assert await one.process.wait() == 3, (tmp_path / "n1.log").read_text()
    os.close(one.pipe)
    assert "cannot be reached" in (tmp_path / "n1.log").read_text() or "nowhere" in (tmp_path / "n1.log").read_text()
