"""A node of this host that does not answer is signalled all the same, and who kills it says that this is meant."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from taskgraph.commands.acting import is_here, signal_here
from taskgraph.errors import JobError
from taskgraph.node import lastwords
from taskgraph.protocol.records import NodeRecord
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
