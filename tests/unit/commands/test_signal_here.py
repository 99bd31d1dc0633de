"""A node of this host that does not answer is signalled all the same, and who kills it says that this is meant."""

from __future__ import annotations

import errno
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
from taskgraph.commands.acting import is_here, signal_here, signal_process
from taskgraph.commands.common import Reached
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


def test_a_kill_is_meant_and_other_signals_say_nothing(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    lastwords.LastWords(tmp_path)
    node = record(process.pid, "tcp:h:1", unix_endpoint(tmp_path / "c"))
    assert is_here(node) and signal_here(node, signal.SIGCONT)
    assert lastwords.read(tmp_path) == ((), False)
    assert signal_here(node, signal.SIGKILL) and process.wait() == -signal.SIGKILL
    assert lastwords.read(tmp_path) == ((), True)
    with pytest.raises(JobError, match="does not exist any more"):
        signal_here(node, signal.SIGKILL)


def test_a_node_elsewhere_is_left_alone(process: subprocess.Popen[bytes]) -> None:
    node = record(process.pid, "tcp:h:1", "unix:of-another-host:/tmp/x/c")
    assert not is_here(node) and not signal_here(node, signal.SIGKILL)
    assert process.poll() is None


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="elsewhere than on Linux a process is its number")
def test_another_process_that_gets_the_number_meanwhile_gets_no_signal(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number is taken again as soon as the process was looked at: to send to the number would reach another."""
    read, by_number = Path.read_bytes, []

    def read_and_end(path: Path) -> bytes:
        found = read(path)
        process.kill()
        process.wait(30)
        monkeypatch.setattr(os, "kill", lambda *call: by_number.append(call))
        return found

    monkeypatch.setattr(Path, "read_bytes", read_and_end)
    assert not signal_process(process.pid, signal.SIGCONT)
    assert by_number == []


@pytest.mark.parametrize("lacks", ["the function", "the system call", "leave"])
def test_where_no_process_can_be_held_its_number_is_signalled(
    lacks: str, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(pid: int) -> int:
        raise OSError(errno.ENOSYS if lacks == "the system call" else errno.EPERM, "")

    if lacks == "the function":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    else:
        monkeypatch.setattr(os, "pidfd_open", fails, raising=False)
    assert signal_process(process.pid, signal.SIGKILL) and process.wait() == -signal.SIGKILL
    assert not signal_process(process.pid, signal.SIGKILL)


def test_where_the_host_tells_nothing_of_processes_its_number_counts(
    tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere than on Linux, or without /proc: of a living node it was said that it does not exist any more."""

    def nothing(path: Path) -> bytes:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    monkeypatch.setattr(Path, "read_bytes", nothing)
    node = record(process.pid, unix_endpoint(tmp_path / "c"))
    assert signal_here(node, signal.SIGCONT)
    process.kill()
    process.wait()
    with pytest.raises(JobError, match="does not exist any more"):
        signal_here(node, signal.SIGCONT)


def test_a_process_that_is_not_ours_gets_no_signal() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not signal_process(process.pid, signal.SIGKILL)
        process.communicate(b"\n")
        assert process.returncode == 0


def test_the_first_process_of_a_container_is_not_said_to_get_what_the_kernel_drops(tmp_path: Path) -> None:
    node = record(1, unix_endpoint(tmp_path / "c"))
    assert not is_here(node), "chaos spares it"
    for number in (signal.SIGKILL, signal.SIGSTOP):
        with pytest.raises(
            TransportError, match=rf"n1 .* first process \(pid 1\).* {number.name} .*: end the container"
        ):
            signal_here(node, number)


@pytest.mark.parametrize("lives", [True, False])
async def test_chaos_counts_a_kill_where_it_sees_the_node_gone(
    lives: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that reached nobody were counted, too."""
    etcd = MemoryCoordinator(MemoryStore())
    spec = JobSpec.local(Job(tasks=1, builder=lambda task_id: Task(), epochs=9, name="fit"))
    await submit(etcd, spec)
    await etcd.txn(Txn(success=(Put(Keys("fit").node("n1-7f"), record(os.getpid()).to_bytes()),)))
    monkeypatch.setattr(chaos, "_GONE_S", 0.0)
    mischief = chaos._Chaos(Reached("fit", None, spec, etcd), random.Random(1), ("kill",), mtbf_s=1.0, lossy=False)  # type: ignore[arg-type]
    await mischief.keeper.load()
    mischief._killed = {"n1-7f": os.getpid() if lives else (1 << 31) - 1}  # no process has that number
    assert mischief._sum_up(await mischief._unkilled()) == 0
    told = capsys.readouterr().out
    assert ("n1 (process" in told and "lives on after SIGKILL" in told) is lives
    assert f"faults: {'none' if lives else '1 kill'}; job fit: running" in told


def test_another_users_node_is_said_to_be_one(
    tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    node = record(process.pid, unix_endpoint(tmp_path / "c"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", refused)
        patched.setattr(signal, "pidfd_send_signal", refused, raising=False)
        assert not is_here(node), "chaos spares it"
        with pytest.raises(TransportError, match=r"n1 \(process \d+\) is another user's"):
            signal_here(node, signal.SIGTERM)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refused)  # its folder is the other user's alone
        with pytest.raises(TransportError, match="another user's"):
            signal_here(node, signal.SIGKILL)
    assert process.poll() is None
