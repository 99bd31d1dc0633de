"""What a node's process leaves behind: nothing of its own, and everything that others need."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import taskgraph as tg
from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import CoordinationError, Unavailable
from taskgraph.launch.submit import submit
from taskgraph.node import process
from taskgraph.node.config import NodeConfig
from taskgraph.node.process import (
    _remove_sockets,
    allow_more_files,
    run_node,
    wait_for_job,
)
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import JobStatus, StatusRecord


def config(folder: Path, *, parent_pid: int) -> NodeConfig:
    made = NodeConfig(
        job="fit", name="n1", etcd="a:1", token="ab" * 32, sockets=str(folder), parent_pid=parent_pid, node_id="n1-0bad"
    )
    assert made.folder is not None
    made.folder.mkdir(parents=True)
    return made


def test_ending_node_keeps_launchers_directory(tmp_path: Path) -> None:
    """Nodes that start later need it."""
    made = config(tmp_path / "s", parent_pid=os.getppid())
    _remove_sockets(made)
    assert list((tmp_path / "s").iterdir()) == []


@pytest.mark.parametrize(("parent_pid", "launcher_gone"), [(0, False), (1 << 30, False), (os.getppid(), True)])
def test_last_node_removes_directory_without_launcher(tmp_path: Path, parent_pid: int, launcher_gone: bool) -> None:
    made = config(tmp_path / "s", parent_pid=parent_pid)
    (tmp_path / "s" / "other").mkdir()
    _remove_sockets(made, launcher_gone=launcher_gone)
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["other"]
    (tmp_path / "s" / "other").rmdir()
    _remove_sockets(made, launcher_gone=launcher_gone)
    assert not (tmp_path / "s").exists()


async def test_launched_node_waits_for_etcd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[CoordinationError] = []

    async def connect(*_: object) -> EtcdCoordinator:
        raise answers.pop(0)

    monkeypatch.setattr(EtcdCoordinator, "connect", connect)
    monkeypatch.setattr(process, "_ETCD_RETRY_S", 0.0, raising=False)
    launched = config(tmp_path / "s", parent_pid=os.getppid())
    answers[:] = [Unavailable("away"), Unavailable("away"), CoordinationError("refused")]
    assert await run_node(launched) == 3 and not answers
    assert [record.message for record in caplog.records] == ["waiting for etcd, which the launcher has reached: away"]
    answers[:] = [Unavailable("away"), CoordinationError("refused")]
    assert await run_node(dataclasses.replace(launched, parent_pid=0)) == 3
    assert len(answers) == 1, "of one that was started by hand the address may be wrong"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), 4096),
        ((1024, 1 << 20), 65_536),
        ((1024, resource.RLIM_INFINITY), 65_536),
        ((1 << 17, 1 << 20), 1 << 17),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), resource.RLIM_INFINITY),
    ],
)
def test_limit_of_open_files_is_raised(before: tuple[int, int], after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = before

    def set_limits(which: int, given: tuple[int, int]) -> None:
        nonlocal limits
        limits = given

    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    allow_more_files()
    assert limits == (after, before[1])


_LAUNCHED = """
import os, sys
from taskgraph.node.config import NodeConfig
from taskgraph.node.process import main
sockets, pipe = sys.argv[1], int(sys.argv[2])
main(NodeConfig(job="fit", name="n1", etcd="127.0.0.1:1", token="ab" * 32, sockets=sockets, node_id="n1-0bad",
                parent_fd=pipe, parent_pid=os.getppid()))
"""


def test_starting_node_leaves_at_once(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"leave\n")
    words = [sys.executable, "-c", _LAUNCHED, str(tmp_path / "s"), str(read_end)]
    try:
        done = subprocess.run(words, pass_fds=(read_end,), capture_output=True, text=True, timeout=60)
    finally:
        os.close(read_end)
        os.close(write_end)
    assert done.returncode == 143, done.stderr


async def test_finished_job_accepts_nodes_until_collected() -> None:
    """All nodes with results may have been killed."""
    coordinator, keys = MemoryCoordinator(MemoryStore()), Keys("fit")
    spec, again = (JobSpec.local(tg.Job(tasks=1, builder=tg.Task, name="fit")) for _ in range(2))
    await submit(coordinator, spec)
    await coordinator.txn(Txn(success=(Put(keys.status, StatusRecord(state=JobStatus.FINISHED).to_bytes()),)))
    assert (await wait_for_job(coordinator, "fit"))[0] == spec
    await coordinator.txn(Txn(success=(Put(keys.collected, b"{}"),)))
    waiting = asyncio.ensure_future(wait_for_job(coordinator, "fit"))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await submit(coordinator, again)
    assert (await asyncio.wait_for(waiting, 30))[0] == again
