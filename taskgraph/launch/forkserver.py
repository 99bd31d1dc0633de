"""Node processes, started: forked from one process that has loaded what they need (`taskgraph.node.forkserver`).

Most of a node's start is loading Python modules. This is done once for all nodes that are started together, and where
their launcher also starts an etcd, which mostly waits for itself, at the same time.

Where a system cannot do that (elsewhere than on Linux) every node is a process that loads its modules by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
from pathlib import Path
from types import TracebackType

from taskgraph.errors import TaskGraphError
from taskgraph.launch.begin import command
from taskgraph.node.config import NodeConfig
from taskgraph.system.environment import node_env
from taskgraph.system.files import remove_file
from taskgraph.system.processes import Adopted, Child, adopting, can_adopt, end_session, tell_child

__all__ = ["ForkServer", "NodeProcess", "NotStarted"]

_END_S = 1.0
"""One that is asked nothing more ends by itself within this time, or is killed."""
_MAX_ANSWER_BYTES = 1 << 16
_SAID_BYTES = 4000


class NotStarted(TaskGraphError):
    """A node cannot be started. It is nobody's mistake, and may go well another time."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeProcess:
    """A node's process. It ends when `pipe` is closed.

    Attributes:
        pipe: the write end, which tells it for all its life that its launcher is there.
        log_path: where its output goes.
    """

    process: Child
    pipe: int
    log_path: Path


class ForkServer:
    """An async context; it can start nodes before it ends. What it started goes on.

    Args:
        folder: for what it says itself, until it ends. That is an error, or nothing.
        blas_threads: the numbers of threads are read when numpy is loaded.
        fork: None: if the system can.
    """

    def __init__(self, folder: Path, blas_threads: int, *, fork: bool | None = None) -> None:
        self._blas_threads = blas_threads
        self._log = folder / f"starting-{os.getpid()}-{id(self):x}.log"
        self._fork = can_adopt() if fork is None else fork
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None

    async def __aenter__(self) -> ForkServer:
        if self._fork:
            self._process, self._socket = await self._started()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends it; twice is no error."""
        process, self._process = self._process, None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if process is not None:
            await _ended(process)
        remove_file(self._log)

    async def _started(self) -> tuple[asyncio.subprocess.Process, socket.socket]:
        """A process that loads what a node needs and then does what it is asked.

        Raises:
            OSError: it cannot be run; names the interpreter.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with os.fdopen(_log_file(self._log), "ab") as output, theirs:
                process = await asyncio.create_subprocess_exec(
                    *command("taskgraph.node.process", str(theirs.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # a Ctrl-C on the terminal is for the launcher alone
                    # gRPC tells of every stranger otherwise, as often as one sends what it does not like.
                    env={"GRPC_VERBOSITY": "NONE", **os.environ, **node_env(self._blas_threads)},
                )
        except BaseException as error:
            ours.close()  # a process that was started nevertheless sees that, and ends
            if isinstance(error, FileNotFoundError | PermissionError) and error.filename is None:  # uvloop names none
                error.filename = sys.executable
            raise
        return process, ours

    async def start(self, config: NodeConfig, log_path: Path) -> NodeProcess:
        """Starts a node. Cancelled meanwhile, none is left.

        Raises:
            NotStarted: it cannot be started; with what was said.
            OSError: the log cannot be opened, or there are too many open files.
        """
        read_end, write_end = os.pipe()
        try:
            output = _log_file(log_path)
            try:
                process = await (self._forked if self._fork else self._new)(config, (read_end, output))
            finally:
                os.close(output)
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return NodeProcess(process, write_end, log_path)

    async def _new(self, config: NodeConfig, fds: tuple[int, int]) -> Child:
        """A process of its own, which becomes the node."""
        process, asked = await self._started()
        with asked:
            _ask(asked, config, fds, fork=False)
        return process

    async def _forked(self, config: NodeConfig, fds: tuple[int, int]) -> Child:
        if self._socket is None or self._process is None:
            raise NotStarted("no node can be started any more: what they are forked from has ended")
        with adopting():
            _ask(self._socket, config, fds, fork=True)
            process, answering = self._process, asyncio.ensure_future(self._answer(self._socket))
            try:
                answer = await asyncio.shield(answering)
                if isinstance(pid := answer.get("pid"), int):
                    return Adopted(pid)
                raise NotStarted(f"node {config.name} cannot be started: {answer['error']}")
            except (Exception, asyncio.CancelledError):
                ending = asyncio.ensure_future(_none_left(process, answering))
                try:
                    await asyncio.shield(ending)
                finally:  # to be cancelled once more changes nothing
                    await asyncio.wait([ending])
                raise

    async def _answer(self, asked: socket.socket) -> dict[str, object]:
        said, loop = b"", asyncio.get_running_loop()
        while not said.endswith(b"\n"):
            try:
                got = await loop.sock_recv(asked, _MAX_ANSWER_BYTES)
            except ConnectionResetError:  # it has ended with our request unread
                got = b""
            if not got:
                return {"error": f"what it is forked from has ended{self._said()}"}
            said += got
        answer: dict[str, object] = json.loads(said)
        return answer

    def _said(self) -> str:
        with contextlib.suppress(OSError):
            if text := self._log.read_bytes()[-_SAID_BYTES:].decode(errors="replace").strip():
                return f"; it said:\n{text}"
        return ""


async def _none_left(process: asyncio.subprocess.Process, answering: asyncio.Future[dict[str, object]]) -> None:
    """Ends what nodes are forked from, and the one that was asked for, however far it is."""
    with adopting():
        tell_child(process, signal.SIGKILL)
        await process.wait()
        await end_session(process.pid)
        # Nobody is left who would keep it waiting, but for a process of another session that holds the socket.
        done, _ = await asyncio.wait([answering], timeout=_END_S)
        answering.cancel()
        for each in done:
            if isinstance(pid := each.result().get("pid"), int):  # told of, it leads a session of its own
                await end_session(pid)


def _ask(asked: socket.socket, config: NodeConfig, fds: tuple[int, int], *, fork: bool) -> None:
    request = json.dumps({"config": dataclasses.asdict(config), "fork": fork}).encode() + b"\n"
    with contextlib.suppress(BrokenPipeError):  # it has ended, which whoever waits for it or its answer sees
        socket.send_fds(asked, [request], fds)


def _log_file(path: Path) -> int:
    """What tasks print is their user's, whatever the umask."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Waits for the end of one that was told to end, or kills it."""
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        pass
    finally:  # slow, or whoever waits is cancelled: it must not be left behind
        tell_child(process, signal.SIGKILL)
        await process.wait()
