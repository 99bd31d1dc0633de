"""The process that nodes are forked from: it has loaded the modules that they need.

Forked nodes start sooner and run faster: their code lies at the same addresses, so they share the processor's branch
predictions. With several nodes per core an epoch takes a third less processor time. This process never runs an event
loop, starts a thread or opens a connection, so a forked node inherits none by mistake.

A request is a line of JSON with two descriptors: the read end of the node's pipe, and the file for its output. The
answer is a line, too: {"pid": ...} or {"error": ...}. A node is the launcher's child: a child of this process forks it
and ends at once, and the launcher adopts orphans (`taskgraph.system.processes.adopting`).

This process leads a session. A node leaves that session, and begins, after the answer with its process id was written.
Until then the launcher can find and end everything by the session (`taskgraph.system.processes.end_session`).
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from taskgraph.errors import no_process_text
from taskgraph.node.config import NodeConfig
from taskgraph.system.signals import stop_ignoring_children

__all__ = ["serve"]

_PIECE_BYTES = 1 << 16
_PARENT_CHECK_S = 1.0
"""How often the parent is checked: a child of the launcher may hold the socket open, which hides the launcher's end."""
_FORK_HINT = "code that runs at every fork (os.register_at_fork, a debugger that nobody is attached to) has held it up"
_FORK_S = 30.0
"""Timeout of a fork, which takes milliseconds, and seconds on a host without resources; code that runs at forks may
hang."""


def serve(server: socket.socket, main: Callable[[NodeConfig], NoReturn]) -> None:
    """Answers requests until the launcher ends. In a forked node it does not return.

    Args:
        server: the socket whose other end the launcher has.
        main: runs a node.
    """
    stop_ignoring_children()
    parent = os.getppid()
    # Loaded modules live as long as the process: no collection, here or in a node, should write to their memory.
    gc.collect()
    gc.freeze()
    poll = select.poll()
    poll.register(server, select.POLLIN | select.POLLHUP)
    while os.getppid() == parent:
        if not poll.poll(_PARENT_CHECK_S * 1000):
            continue
        request, fds, _, _ = socket.recv_fds(server, _PIECE_BYTES, 2)
        while request and not request.endswith(b"\n"):
            if not (more := server.recv(_PIECE_BYTES)):
                return
            request += more
        if not request:
            return
        asked, (pipe, output) = json.loads(request), fds
        config = NodeConfig.of({**asked["config"], "parent_fd": pipe})
        if not asked["fork"]:
            server.close()
            _run_node(config, output, main)
        _fork(server, parent, config, output, main)
        os.close(pipe)
        os.close(output)


def _fork(
    server: socket.socket, parent: int, config: NodeConfig, output: int, main: Callable[[NodeConfig], NoReturn]
) -> None:
    """Forks a node by a child that ends at once, answers, and lets the node begin.

    If the launcher died meanwhile, this process and the node end.
    """
    with contextlib.ExitStack() as pipes:
        said, say = _pipe(pipes)
        may_begin, begin = _pipe(pipes)
        try:
            child = os.fork()
        except OSError as error:
            answer: dict[str, Any] = {"error": no_process_text(error) or str(error)}
        else:
            if not child:
                _fork_and_end(server, pipes, say, may_begin, begin, config, output, main)
            say.close()
            text = _read_all(said, parent)
            if text is None:
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            if text is None:
                answer = {"error": f"{_FORK_HINT} for {_FORK_S:g} s"}
            else:
                answer = json.loads(text) if text else {"error": "it was killed while it began"}
        server.sendall(json.dumps(answer).encode() + b"\n")
        if "pid" in answer:
            with contextlib.suppress(BrokenPipeError):  # it was killed already
                begin.write(b"\n")


def _read_all(said: io.FileIO, parent: int) -> bytes | None:
    """Reads all that a child writes; None after the timeout. If the launcher died, kills this process and the child."""
    poll = select.poll()
    poll.register(said, select.POLLIN | select.POLLHUP)
    until, text = time.monotonic() + _FORK_S, b""
    while (left_s := until - time.monotonic()) > 0:
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)  # forked nodes are in our group until they begin
        if poll.poll(min(left_s, _PARENT_CHECK_S) * 1000):
            if not (more := said.read(_PIECE_BYTES)):
                return text
            text += more
    return None


def _pipe(pipes: contextlib.ExitStack) -> tuple[io.FileIO, io.FileIO]:
    read_end, write_end = os.pipe()
    return pipes.enter_context(open(read_end, "rb", 0)), pipes.enter_context(open(write_end, "wb", 0))


def _fork_and_end(
    server: socket.socket,
    pipes: contextlib.ExitStack,
    say: io.FileIO,
    may_begin: io.FileIO,
    begin: io.FileIO,
    config: NodeConfig,
    output: int,
    main: Callable[[NodeConfig], NoReturn],
) -> NoReturn:
    """In the child: forks the node, writes its process id to `say`, and ends. The node waits for `may_begin`, then
    runs.
    """
    try:
        try:
            node = os.fork()
        except OSError as error:
            say.write(json.dumps({"error": no_process_text(error) or str(error)}).encode())
            os._exit(1)
        if node:
            say.write(json.dumps({"pid": node}).encode())
            os._exit(0)
        for end in (server, say, begin):  # so that their readers see the end
            end.close()
        if not may_begin.read(1):  # the launcher does not know of this node
            os._exit(1)
        pipes.close()
        os.setsid()  # a Ctrl-C on the terminal is for the launcher alone
        if seeded := sys.modules.get("numpy.random"):
            seeded.seed()  # Python seeds its own generator anew by itself
        _run_node(config, output, main)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _run_node(config: NodeConfig, output: int, main: Callable[[NodeConfig], NoReturn]) -> NoReturn:
    """Runs a node whose standard output and error go to the file `output`."""
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # We read this file, so the terminal's encoding must not limit what user code prints.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    main(config)
