"""The process that nodes are forked from: it has loaded what they need, and then does what its launcher asks.

That all nodes of a launcher are copies of one process does more than to start them sooner. Its code lies at the same
addresses in all of them, and what the processor has learned about it (branches above all) in one node serves the next
that it runs: with several nodes a core an epoch takes a third less processor time. It never runs an event loop, starts
no thread and opens no connection, so that there is nothing a copy could share by mistake.

A request is a line of JSON, with two descriptors: the read end of the node's pipe and the file its output goes to. The
answer is a line, too: {"pid": ...} or {"error": ...}. A node is the launcher's child, not ours: it is forked by a child
of ours that ends at once, and the launcher adopts orphans meanwhile (`taskgraph.children.adopting`).
"""

from __future__ import annotations

import gc
import io
import json
import os
import select
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from taskgraph.node.config import NodeConfig
from taskgraph.signals import hear_of_children

__all__ = ["serve"]

_PIECE_BYTES = 1 << 16
_PARENT_CHECK_S = 1.0
"""The socket tells of the launcher's end at once, unless a process that the launcher forked still holds it."""
_LOOK_S = 0.0005


def serve(server: socket.socket, main: Callable[[NodeConfig], NoReturn]) -> None:
    """Does what is asked until nobody asks any more; in a node, it does not return.

    Args:
        server: the launcher has the other end.
        main: what a node does.
    """
    hear_of_children()
    parent = os.getppid()
    # What was loaded lives as long as the process: no collection, here or in a node, needs to write to its memory.
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
            _become(config, output, main)
        answer = _forked(server, config, output, main)
        os.close(pipe)
        os.close(output)
        server.sendall(json.dumps(answer).encode() + b"\n")


def _forked(
    server: socket.socket, config: NodeConfig, output: int, main: Callable[[NodeConfig], NoReturn]
) -> dict[str, Any]:
    """Forks a node whose parent is ours: by a child that ends at once. Returns the answer."""
    read_end, write_end = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        os.close(read_end)
        os.close(write_end)
        return {"error": str(error)}
    if not child:
        _fork_and_end(server, (read_end, write_end), config, output, main)
    os.close(write_end)
    with open(read_end, "rb") as answer:
        said = answer.read()  # to its end: the child is gone
    os.waitpid(child, 0)
    return json.loads(said) if said else {"error": "it was killed while it began"}


def _fork_and_end(
    server: socket.socket,
    answer: tuple[int, int],
    config: NodeConfig,
    output: int,
    main: Callable[[NodeConfig], NoReturn],
) -> NoReturn:
    between = os.getpid()
    try:
        node = os.fork()
    except OSError as error:
        os.write(answer[1], json.dumps({"error": str(error)}).encode())
        os._exit(1)
    if node:
        os.write(answer[1], json.dumps({"pid": node}).encode())
        os._exit(0)
    try:
        server.close()
        for end in answer:
            os.close(end)
        os.setsid()  # a Ctrl-C on the terminal is for the launcher alone
        while os.getppid() == between:
            time.sleep(_LOOK_S)
        if seeded := sys.modules.get("numpy.random"):
            seeded.seed()  # Python's own generator is seeded anew by itself
        _become(config, output, main)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _become(config: NodeConfig, output: int, main: Callable[[NodeConfig], NoReturn]) -> NoReturn:
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Our file, and our reader: what user code may print is not for the terminal's encoding to say.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    main(config)
