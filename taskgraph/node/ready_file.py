"""A file that is there while its node is ready (`protocol.readiness`), for a supervisor's probe: `test -e FILE`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from taskgraph.errors import JobError
from taskgraph.protocol.readiness import is_registered
from taskgraph.system.files import remove_file

if TYPE_CHECKING:
    from taskgraph.node.life import NodeLife

__all__ = ["keep_ready_file", "prepare_ready_file"]

log = logging.getLogger("taskgraph.node")

_LOOK_S = 0.5
"""The node itself may begin to run, or to leave, without a change of the view."""


def prepare_ready_file(path: Path) -> None:
    """Removes the file that a killed node left, and checks that its directory takes files.

    Raises:
        JobError: the file cannot be removed, or none can be made there.
    """
    try:
        path.unlink(missing_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()  # not the file itself, which a probe might see
    except OSError as error:
        raise JobError(f"--ready-file {path}: {error.strerror}: name a file in a directory of your own") from error


@contextlib.contextmanager
def keep_ready_file(path: Path, node: NodeLife) -> Iterator[None]:
    """Makes and removes the file as the node's state changes; it is gone after the block."""
    is_there = False

    def update_file() -> None:
        nonlocal is_there
        takes_part = node.running and not node.draining and is_registered(node.keeper.view, node.id)
        ready = node.in_sync() if takes_part else False
        if ready is None or ready == is_there:
            return
        try:
            if ready:
                path.touch()
            else:
                remove_file(path)
            is_there = ready
        except OSError as error:
            log.warning("the file %s cannot be changed: %s", path, error.strerror)

    loop = asyncio.get_running_loop()
    timer: asyncio.Handle = loop.call_soon(lambda: update_repeatedly())

    def update_repeatedly() -> None:
        nonlocal timer
        update_file()
        timer = loop.call_later(_LOOK_S, update_repeatedly)

    stop = node.keeper.on_change(update_file, structure=True)
    try:
        yield
    finally:
        stop()
        timer.cancel()
        remove_file(path)
