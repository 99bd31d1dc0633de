"""The fork server, and the nodes that it forks."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from taskgraph.launch.forkserver import ForkServer, NodeProcess, NotStarted
from taskgraph.node import forkserver
from taskgraph.node.config import NodeConfig
from taskgraph.system import host
from taskgraph.system.processes import can_adopt, signal_child

pytestmark = pytest.mark.slow
forks = pytest.mark.skipif(not can_adopt(), reason="this system cannot fork nodes from one process")

LIMIT_S = 60.0


@pytest.fixture
def silent() -> Iterator[str]:
    """An etcd that accepts connections and sends nothing: a node waits for it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield "{}:{}".format(*listening.getsockname())


def config(etcd: str, name: str = "n1") -> NodeConfig:
    return NodeConfig(job="fit", name=name, etcd=etcd, token="ab" * 32, parent_pid=os.getpid())


async def end(started: NodeProcess) -> int:
    os.close(started.pipe)
    async with asyncio.timeout(LIMIT_S):
        return await started.process.wait()


@forks
async def test_nodes_are_copies_of_one_process(tmp_path: Path, silent: str) -> None:
    async with ForkServer(tmp_path, 1) as server:
        nodes = [await server.start(config(silent, name), tmp_path / f"{name}.log") for name in ("n1", "n2")]
    pids = [node.process.pid for node in nodes]
    assert sorted(os.listdir(tmp_path)) == ["n1.log", "n2.log"]
    assert _parents(pids) == [os.getpid()] * 2, "and what they were forked from is gone"
    assert [os.getsid(pid) for pid in pids] == pids, "a Ctrl-C on the terminal is for the launcher alone"
    assert _code(pids[0]) == _code(pids[1])
    assert [node.process.returncode for node in nodes] == [None, None]
    signal_child(nodes[1].process, signal.SIGKILL)
    assert await end(nodes[1]) == nodes[1].process.returncode == -signal.SIGKILL
    assert await end(nodes[0]) == 1
    for node in nodes:
        assert node.log_path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ProcessLookupError):
            os.kill(node.process.pid, 0)
    assert nodes[0].log_path.read_text().endswith("taskgraph node: the launcher is gone\n")
    assert nodes[1].log_path.read_text().count("\n") <= 1, "each has a log of its own"


@forks
async def test_launcher_that_ignores_sigchld_starts_nodes(tmp_path: Path, silent: str) -> None:
    """The fork server inherits that, and could not wait for its children."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        server = ForkServer(tmp_path, 1)
        await server.__aenter__()
        signal.signal(signal.SIGCHLD, before)
        async with contextlib.aclosing(server):
            node = await server.start(config(silent), tmp_path / "n1.log")
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert await end(node) == 1


@forks
async def test_concurrent_starts_do_not_mix(tmp_path: Path, silent: str) -> None:
    async with ForkServer(tmp_path, 1) as a, ForkServer(tmp_path, 1) as b:
        nodes = await asyncio.gather(
            a.start(config(silent, "n1"), tmp_path / "n1.log"), b.start(config(silent, "n2"), tmp_path / "n2.log")
        )
        assert _parents([node.process.pid for node in nodes]) == [os.getpid()] * 2
        assert [await end(node) for node in nodes] == [1, 1]


@forks
async def test_orphans_of_other_processes_are_not_adopted(tmp_path: Path) -> None:
    async with ForkServer(tmp_path, 1) as server:
        started = await server.start(config("127.0.0.1:1"), tmp_path / "n1.log")
    script = "import os, time\nif not os.fork():\n    os.setsid(); time.sleep(60)\nelse:\n    os._exit(0)"
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    await parent.wait()
    (orphan,) = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_orphan(pid, script)]
    try:
        assert _parents([orphan]) != [os.getpid()]
    finally:
        os.kill(orphan, signal.SIGKILL)
        await end(started)


async def test_system_without_subreapers_starts_each_node_alone(tmp_path: Path, silent: str) -> None:
    async with ForkServer(tmp_path, 1, fork=False) as server:
        nodes = [await server.start(config(silent, name), tmp_path / f"{name}.log") for name in ("n1", "n2")]
    assert sorted(os.listdir(tmp_path)) == ["n1.log", "n2.log"]
    assert [await end(node) for node in nodes] == [1, 1]


@forks
async def test_random_numbers_of_nodes_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if numpy's generator was loaded before the fork."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'taskgraph.node.process' in sys.orig_argv:\n"
        "    import random, numpy.random\n"
        "    from taskgraph.node import config\n"
        "    def folder(self):\n"
        "        print(numpy.random.random(), random.random(), flush=True); os._exit(9)\n"
        "    config.NodeConfig.__getattribute__ = lambda self, name: folder(self) if name == 'devices' else "
        "object.__getattribute__(self, name)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    async with ForkServer(tmp_path, 1) as server:
        nodes = [await server.start(config("127.0.0.1:1", name), tmp_path / f"{name}.log") for name in ("n1", "n2")]
    assert [await end(node) for node in nodes] == [9, 9]
    drawn = [float(text) for node in nodes for text in node.log_path.read_text().split()]
    assert len(set(drawn)) == 4


@forks
@pytest.mark.parametrize(("given", "seen"), [(None, "NONE"), ("INFO", "INFO")])
async def test_grpc_is_silent_in_nodes(
    given: str | None, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.write(2, os.environb[b'GRPC_VERBOSITY']); os._exit(1)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    if given:
        monkeypatch.setenv("GRPC_VERBOSITY", given)
    async with ForkServer(tmp_path, 1) as server:
        with pytest.raises(NotStarted, match=rf"it said:\n{seen}$"):
            await server.start(config("127.0.0.1:1"), tmp_path / "n1.log")


@forks
async def test_failed_import_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uvloop.py").write_text("raise ImportError('uvloop is broken here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    async with ForkServer(tmp_path, 1) as server:
        with pytest.raises(NotStarted, match=r"(?s)node n1 cannot be started: .* it said:.*uvloop is broken here"):
            await server.start(config("127.0.0.1:1"), tmp_path / "n1.log")
        with pytest.raises(NotStarted, match=r"(?s)node n2 cannot be started: .*uvloop is broken here"):
            await server.start(config("127.0.0.1:1", "n2"), tmp_path / "n2.log")


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_interpreter_without_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def start() -> None:
        async with ForkServer(tmp_path, 1, fork=True):
            raise AssertionError("it cannot be started")

    (python := tmp_path / "python").write_text("")
    monkeypatch.setattr(sys, "executable", str(python))
    with asyncio.Runner(loop_factory=loop) as runner, pytest.raises(PermissionError, match=f"'{python}'"):
        runner.run(start())


HALTS = """
import os, signal, socket, sys
if "taskgraph.node.process" in sys.orig_argv:
    place, number = os.environ["HALT_AT"], getattr(signal, os.environ["HALT_BY"])
    fork, sendall, setsid, server = os.fork, socket.socket.sendall, os.setsid, os.getpid()
    def at(here):
        if here == place:
            os.kill(os.getpid(), number)
    def halting_fork():
        between = os.getpid() != server
        if between:
            at("before the node")
        if forked := fork():
            at("after the node" if between else "after the child")
        elif between:
            at("in the node")
        return forked
    def halting_sendall(*args):
        at("before the answer")
        sendall(*args)
        at("after the answer")
    def halting_setsid():
        setsid()
        at("in the node that began")
    os.fork, socket.socket.sendall, os.setsid = halting_fork, halting_sendall, halting_setsid
"""
PLACES = ("after the child", "before the node", "after the node", "in the node", "before the answer")


@pytest.fixture
def halting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Makes the fork server send itself a signal at a place in its work.

    Checks that no process is left, and that children of the program itself were not waited for.
    """

    def halt(place: str, by: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(HALTS)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setenv("HALT_AT", place)
        monkeypatch.setenv("HALT_BY", by)

    before = _children()
    own = subprocess.Popen([sys.executable, "-c", "raise SystemExit(9)"])
    yield halt
    assert _children() == before | {own.pid}
    assert own.wait(LIMIT_S) == 9


@forks
@pytest.mark.parametrize(
    ("place", "times"),
    [*((place, 1) for place in (*PLACES, "after the answer", "in the node that began")), ("before the node", 2)],
)
async def test_cancelled_start_leaves_no_child(
    halting: Callable[[str, str], None], tmp_path: Path, silent: str, place: str, times: int
) -> None:
    halting(place, "SIGSTOP")
    async with ForkServer(tmp_path, 1) as server:
        starting = asyncio.ensure_future(server.start(config(silent), tmp_path / "n1.log"))
        await asyncio.sleep(0)
        _until_halted(tmp_path)
        for _ in range(times):
            starting.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert _writing_to(tmp_path) == []


HELD = """
import os, signal, sys
if "taskgraph.node.process" in sys.orig_argv:
    launcher = os.getppid()
    def held():
        if os.getppid() != launcher:
            os.kill(launcher, signal.SIGKILL)
            signal.pause()
    os.register_at_fork(after_in_child=held)
"""


@forks
@pytest.mark.parametrize("custom", ["", HELD], ids=["", "while-it-forks"])
async def test_no_process_outlives_a_killed_launcher(
    tmp_path: Path, silent: str, monkeypatch: pytest.MonkeyPatch, custom: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(custom)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    script = f"""
import asyncio, os, signal
from pathlib import Path
from taskgraph.launch.forkserver import ForkServer
from taskgraph.node.config import NodeConfig
async def main():
    folder = Path({str(tmp_path)!r})
    async with ForkServer(folder, 1) as server:
        config = NodeConfig(job="fit", name="n1", etcd={silent!r}, token="ab" * 32, parent_pid=os.getpid())
        await server.start(config, folder / "n1.log")
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    launcher = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    assert await launcher.wait() == -signal.SIGKILL
    async with asyncio.timeout(30):
        while _writing_to(tmp_path):  # noqa: ASYNC110 (they are nobody's children here)
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("how", ["refused", "hangs"])
def test_failed_fork_is_reported(how: str, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child that is to fork the node cannot be forked, or cannot fork; or one of the two hangs."""
    fork, calls, tester, forked = os.fork, [0], os.getpid(), []
    until_closed, close = os.pipe()

    def failing() -> int:
        calls[0] += 1
        if how == "refused" and calls[0] == which:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        forked.append(fork())
        if how == "hangs" and not forked[-1] and calls[0] == which:
            os.close(close)
            os.read(until_closed, 1)
            os._exit(0)
        return forked[-1]

    monkeypatch.setattr(os, "fork", failing)
    monkeypatch.setattr(forkserver, "_FORK_S", 0.2 if how == "hangs" else LIMIT_S)
    ours, theirs = socket.socketpair()
    with ours, theirs, open(until_closed), open(close, "w"):
        forkserver._fork(theirs, os.getppid(), config("127.0.0.1:1"), 1, lambda _: os._exit(0))
        (answer,) = json.loads(ours.recv(4096)).values()
    assert os.getpid() == tester
    if how == "hangs":
        assert answer == f"{forkserver._FORK_HINT} for 0.2 s"
    else:
        assert answer.startswith(f"no process can be started ({os.strerror(errno.EAGAIN)}): a limit of this process")
        assert "`ulimit -u`" in answer and "of its container (processes" in answer
    for pid in forked:
        with pytest.raises(ChildProcessError):  # it has ended, and was waited for
            os.waitpid(pid, os.WNOHANG)


async def test_ended_forkserver_starts_no_node(tmp_path: Path) -> None:
    server = ForkServer(tmp_path, 1, fork=True)
    with pytest.raises(NotStarted, match="no node can be started: the fork server"):
        await server.start(config("127.0.0.1:1"), tmp_path / "n1.log")


def _parents(pids: list[int]) -> list[int]:
    return [int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids]


def _code(pid: int) -> list[str]:
    """Returns the executable ranges of a process's memory."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if " r-xp " in line and "/" in line]


def _children() -> set[int]:
    """Returns the children of this process, also zombies."""
    return {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_ours(pid)}


def _is_ours(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _parents([pid]) == [os.getpid()]
    return False


def _until_halted(folder: Path) -> None:
    """Waits until a process that writes in this folder is stopped, while the event loop reads nothing."""
    until = time.monotonic() + LIMIT_S
    while all(host.state(pid) != "T" for pid in _writing_to(folder)):
        assert time.monotonic() < until
        time.sleep(0.002)


def _is_orphan(pid: int, script: str) -> bool:
    try:
        return script.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and host.state(pid) != "Z"
    except OSError:
        return False


def _writing_to(folder: Path) -> list[int]:
    """Returns the processes whose output goes to a file in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith(str(folder)):
                found.append(int(path.parts[2]))
    return found
