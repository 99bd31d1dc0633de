"""`taskgraph forget`: its jobs, its etcd, its messages."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from commands_kit import ETCD, in_memory

from taskgraph.cli import parser
from taskgraph.commands.acting import forget
from taskgraph.coordination.memory import MemoryCoordinator
from taskgraph.errors import JobError, UnknownJob
from taskgraph.launch.kept import KeptJob
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import JobStatus, StatusRecord


@pytest.fixture
async def etcd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MemoryCoordinator:
    """With `one` and `two`, which have ended, and `fit`, which runs."""
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    found = in_memory(monkeypatch)
    for name, state in (("one", JobStatus.FINISHED), ("two", JobStatus.FAILED), ("fit", JobStatus.RUNNING)):
        await found.txn(Txn(success=(Put(Keys(name).status, StatusRecord(state=state).to_bytes()),)))
    return found


async def names(etcd: MemoryCoordinator) -> list[str]:
    return sorted(kv.key.split("/")[2] for kv in (await etcd.list("/taskgraph/")).items)


async def test_forget_skips_refused_jobs(etcd: MemoryCoordinator, capsys: pytest.CaptureFixture[str]) -> None:
    Runtime().keep_finished("two", KeptJob(status=StatusRecord(state=JobStatus.FAILED)))
    jobs = ("one", "fit", "", "two", "three")
    with pytest.raises(UnknownJob, match="nothing is kept in etcd of a job 'three'"):
        await forget(parser().parse_args(["forget", *jobs, "--etcd", ETCD]))
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        f"job one is forgotten by etcd at {ETCD} (1 key)",
        f"job two is forgotten by etcd at {ETCD} (1 key); this host keeps its copy",
    ]
    assert "job 'fit' is running: end it first" in said.err and "'' cannot be the name of a job" in said.err
    assert await names(etcd) == ["fit"]
    assert Runtime().find_finished("two") is not None


async def test_forget_finds_etcd_of_job(etcd: MemoryCoordinator) -> None:
    options = parser().parse_args(["forget", "one"])
    for embedded in (True, False):
        with pytest.raises(JobError, match="job 'one': give its etcd with --etcd"):
            await forget(options)
        Runtime().put(JobEntry(name="one", etcd=ETCD, token="", pid=_killed(), embedded=embedded, tls={}))
    assert await forget(options) == 0
    assert await names(etcd) == ["fit", "two"]


def _killed() -> int:
    """Returns the id of a process that has ended."""
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid
