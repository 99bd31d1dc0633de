"""Starts node processes: forks them from one process that has loaded what they need (`taskgraph.node.forkserver`).

Most of a node's start is loading Python modules. The fork server does this once for all nodes that are started
together, and while the launcher's own etcd starts.

On systems other than Linux every node is a process that loads its modules by itself.
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
from taskgraph.system.processes import AdoptedChild, Child, adopting, can_adopt, end_session, signal_child

__all__ = ["ForkServer", "NodeProcess", "NotStarted"]

_END_S = 1.0
"""A fork server ends within this time after its socket was closed, or is killed."""
_MAX_ANSWER_BYTES = 1 << 16
_SAID_BYTES = 4000


class NotStarted(TaskGraphError):
    """The system cannot start a node now; a later try may succeed."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeProcess:
    """A node's process; it ends when `pipe` is closed.

    Attributes:
        pipe: the write end of the pipe by which the node sees that its launcher lives.
        log_path: the file of its output.
    """

    process: Child
    pipe: int
    log_path: Path


class ForkServer:
    """An async context that starts nodes, which go on after its end.

    Args:
        folder: for its own output, until it ends.
        blas_threads: for the environment, which numpy reads when it is loaded.
        fork: False: each node is a process that loads its modules itself; None: it forks if the system can.
    """

    def __init__(self, folder: Path, blas_threads: int, *, fork: bool | None = None) -> None:
        self._blas_threads = blas_threads
        self._log = folder / f"starting-{os.getpid()}-{id(self):x}.log"
        self._fork = can_adopt() if fork is None else fork
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None

    async def __aenter__(self) -> ForkServer:
        if self._fork:
            self._process, self._socket = await self._start_process()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the fork server. A second call does nothing."""
        process, self._process = self._process, None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if process is not None:
            await _end_process(process)
        remove_file(self._log)

    async def _start_process(self) -> tuple[asyncio.subprocess.Process, socket.socket]:
        """Starts a process that loads what a node needs, and then serves requests.

        Raises:
            OSError: the interpreter cannot be run; the error names it.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with os.fdopen(_open_log(self._log), "ab") as output, theirs:
                process = await asyncio.create_subprocess_exec(
                    *command("taskgraph.node.process", str(theirs.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # a Ctrl-C on the terminal is for the launcher alone
                    # Otherwise gRPC logs every stranger that sends something wrong.
                    env={"GRPC_VERBOSITY": "NONE", **os.environ, **node_env(self._blas_threads)},
                )
        except BaseException as error:
            ours.close()  # a process that was started all the same sees this, and ends
            if isinstance(error, FileNotFoundError | PermissionError) and error.filename is None:  # uvloop names none
                error.filename = sys.executable
            raise
        return process, ours

    async def start(self, config: NodeConfig, log_path: Path) -> NodeProcess:
        """Starts a node. If this is cancelled, no process is left.

        Raises:
            NotStarted: with the output of the fork server.
            OSError: the log cannot be opened, or there are too many open files.
        """
        read_end, write_end = os.pipe()
        try:
            output = _open_log(log_path)
            try:
                process = await (self._fork_node if self._fork else self._start_alone)(config, (read_end, output))
            finally:
                os.close(output)
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return NodeProcess(process, write_end, log_path)

    async def _start_alone(self, config: NodeConfig, fds: tuple[int, int]) -> Child:
        """Starts a process that becomes the node, and returns it."""
        process, asked = await self._start_process()
        with asked:
            _send_request(asked, config, fds, fork=False)
        return process

    async def _fork_node(self, config: NodeConfig, fds: tuple[int, int]) -> Child:
        """Has the fork server fork a node, and returns the node's process. If cancelled, ends both."""
        if self._socket is None or self._process is None:
            raise NotStarted("no node can be started: the fork server has ended")
        with adopting():
            _send_request(self._socket, config, fds, fork=True)
            process, answering = self._process, asyncio.ensure_future(self._read_answer(self._socket))
            try:
                answer = await asyncio.shield(answering)
                if isinstance(pid := answer.get("pid"), int):
                    return AdoptedChild(pid)
                raise NotStarted(f"node {config.name} cannot be started: {answer['error']}")
            except (Exception, asyncio.CancelledError):
                ending = asyncio.ensure_future(_end_all(process, answering))
                try:
                    await asyncio.shield(ending)
                finally:  # a second cancellation changes nothing
                    await asyncio.wait([ending])
                raise

    async def _read_answer(self, asked: socket.socket) -> dict[str, object]:
        """Reads the fork server's answer: the node's process id, or an error."""
        said, loop = b"", asyncio.get_running_loop()
        while not said.endswith(b"\n"):
            try:
                got = await loop.sock_recv(asked, _MAX_ANSWER_BYTES)
            except ConnectionResetError:  # it ended with our request unread
                got = b""
            if not got:
                return {"error": f"the fork server has ended{self._output_text()}"}
            said += got
        answer: dict[str, object] = json.loads(said)
        return answer

    def _output_text(self) -> str:
        """Returns what the fork server printed, for an error; "": nothing."""
        with contextlib.suppress(OSError):
            if text := self._log.read_bytes()[-_SAID_BYTES:].decode(errors="replace").strip():
                return f"; it said:\n{text}"
        return ""


async def _end_all(process: asyncio.subprocess.Process, answering: asyncio.Future[dict[str, object]]) -> None:
    """Kills the fork server, and the node that it was asked to fork, if that was begun."""
    with adopting():
        signal_child(process, signal.SIGKILL)
        await process.wait()
        await end_session(process.pid)
        # Only a process of another session that holds the socket could delay the answer now.
        done, _ = await asyncio.wait([answering], timeout=_END_S)
        answering.cancel()
        for each in done:
            if isinstance(pid := each.result().get("pid"), int):  # the node leads a session of its own
                await end_session(pid)


def _send_request(asked: socket.socket, config: NodeConfig, fds: tuple[int, int], *, fork: bool) -> None:
    """Sends the fork server a request for a node, with two descriptors: its pipe and its output.

    Args:
        fork: the fork server forks the node; False: the asked process becomes the node.
    """
    request = json.dumps({"config": dataclasses.asdict(config), "fork": fork}).encode() + b"\n"
    with contextlib.suppress(BrokenPipeError):  # it has ended: reading the answer shows that
        socket.send_fds(asked, [request], fds)


def _open_log(path: Path) -> int:
    """Opens a log that only the owner can read, whatever the umask."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


async def _end_process(process: asyncio.subprocess.Process) -> None:
    """Waits for a process that is about to end, or kills it."""
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        pass
    finally:  # it is slow, or this is cancelled: the process must not be left
        signal_child(process, signal.SIGKILL)
        await process.wait()
