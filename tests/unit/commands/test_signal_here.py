"""Signals to a node of this host that does not answer; a kill is marked as meant."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from taskgraph.commands import chaos
from taskgraph.commands.acting import can_signal, signal_here, signal_process
from taskgraph.commands.common import FoundJob
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import JobError, TransportError
from taskgraph.jobs import Job
from taskgraph.launch.submit import submit
from taskgraph.node.usercode import lastwords
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import NodeRecord
from taskgraph.task import Task
from taskgraph.transport.endpoints import unix_endpoint


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "taskgraph"]) as process:
        command = Path(f"/proc/{process.pid}/cmdline")
        while b"taskgraph" not in command.read_bytes():  # it has none for a moment while it begins
            time.sleep(0.01)
        yield process
        process.kill()


def record(pid: int, *control: str) -> NodeRecord:
    return NodeRecord(
        name="n1", run="r", host="h", pid=pid, endpoints=(), control="|".join(control), fingerprint="", lease=1
    )


def test_kill_is_marked_as_meant(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    lastwords.LastWords(tmp_path)
    node = record(process.pid, "tcp:h:1", unix_endpoint(tmp_path / "c"))
    assert can_signal(node) and signal_here(node, signal.SIGCONT)
    assert lastwords.read(tmp_path) == ((), False)
    assert signal_here(node, signal.SIGKILL) and process.wait() == -signal.SIGKILL
    assert lastwords.read(tmp_path) == ((), True)
    with pytest.raises(JobError, match="has ended"):
        signal_here(node, signal.SIGKILL)


def test_node_of_another_host_is_not_signalled(process: subprocess.Popen[bytes]) -> None:
    node = record(process.pid, "tcp:h:1", "unix:of-another-host:/tmp/x/c")
    assert not can_signal(node) and not signal_here(node, signal.SIGKILL)
    assert process.poll() is None


def test_other_process_gets_no_signal() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not signal_process(process.pid, signal.SIGKILL)
        process.communicate(b"\n")
        assert process.returncode == 0


def test_first_process_of_container_is_refused(tmp_path: Path) -> None:
    node = record(1, unix_endpoint(tmp_path / "c"))
    assert not can_signal(node), "chaos spares it"
    for number in (signal.SIGKILL, signal.SIGSTOP):
        with pytest.raises(
            TransportError, match=rf"n1 .* first process \(pid 1\).* {number.name} .*: end the container"
        ):
            signal_here(node, number)


@pytest.mark.parametrize("lives", [True, False])
async def test_chaos_counts_effective_kills(
    lives: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    etcd = MemoryCoordinator(MemoryStore())
    spec = JobSpec.local(Job(tasks=1, builder=lambda task_id: Task(), epochs=9, name="fit"))
    await submit(etcd, spec)
    await etcd.txn(Txn(success=(Put(Keys("fit").node("n1-7f"), record(os.getpid()).to_bytes()),)))
    monkeypatch.setattr(chaos, "_GONE_S", 0.0)
    mischief = chaos._Chaos(FoundJob("fit", None, spec, etcd), random.Random(1), ("kill",), mtbf_s=1.0, lossy=False)  # type: ignore[arg-type]
    await mischief.keeper.load()
    mischief._killed = {"n1-7f": os.getpid() if lives else (1 << 31) - 1}  # no process has that number
    assert mischief._sum_up(await mischief._survivors()) == 0
    said = capsys.readouterr().out
    assert ("n1 (process" in said and "is alive after SIGKILL" in said) is lives
    assert f"faults: {'none' if lives else '1 kill'}; job fit: running" in said
