"""Restores the files of a node's sockets if something removes them, as a cleaner of temporary files does.

Open connections outlive that, but new ones cannot be opened: neither peers, nor the launcher that collects the results.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Protocol

from taskgraph.errors import TransportError
from taskgraph.node.usercode import lastwords
from taskgraph.observe.events import EventLog
from taskgraph.system.files import restore_folder

__all__ = ["SocketListener", "keep_sockets"]

_LOOK_S = 2.0
"""How often the files are checked: a few system calls."""


class SocketListener(Protocol):
    """A service that listens on a unix socket, which is a file."""

    @property
    def unreachable(self) -> bool: ...
    async def listen_anew(self) -> None: ...


async def keep_sockets(folder: Path, listeners: tuple[SocketListener, ...], events: EventLog) -> None:
    """Watches the services' socket files in the node's own folder; if they vanish, makes the services listen again."""
    emitted, held = "", list[int]()
    what = f"the sockets of nodes in {folder.parent} were removed, as a cleaner of temporary files does"
    try:
        while True:
            await asyncio.sleep(_LOOK_S)
            gone = [listener for listener in listeners if listener.unreachable]
            if not gone:
                continue
            try:
                if (file := restore_folder(folder)) is not None:
                    held.append(file)
                for listener in gone:
                    await listener.listen_anew()
                lastwords.recreate_file(folder)
            except (OSError, TransportError) as error:
                if emitted != (emitted := str(error)):
                    events.emit("sockets", f"{what}, and nothing can connect to them: {error}")
                continue
            emitted = ""
            events.emit("sockets", f"{what}: they listen there anew")
    finally:
        for file in held:
            os.close(file)
