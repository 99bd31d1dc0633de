"""Fails the job where one task's code has ended the processes of several nodes, while others live; `protocol.fatal`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from taskgraph.node.membership.failing import fatal_record
from taskgraph.protocol import transactions
from taskgraph.protocol.fatal import Fatal, fatal
from taskgraph.protocol.kv import Compare
from taskgraph.protocol.records import name_of

if TYPE_CHECKING:
    from taskgraph.node.core import NodeCore

__all__ = ["FatalCode"]


class FatalCode:
    """One node's look at it. All look, and all may say so: etcd takes the first.

    Args:
        changed: told when it has come to nothing, and others may take over after all.
    """

    def __init__(self, node: NodeCore, changed: Callable[[], None]) -> None:
        self._node = node
        self._changed = changed
        self._failing: asyncio.Task[None] | None = None

    def look(self) -> bool:
        """Whether the job is to fail for it. Then nobody takes over any more."""
        node, view = self._node, self._node.keeper.view
        if self._failing is None:
            found = fatal(view, node.settings.fatal_deaths)
            if found is None or node.paused or not view.open:
                return False
            self._failing = node.own(self._fail(found), "fail for code that ends its process")
        return True

    async def _fail(self, found: Fatal) -> None:
        node, view = self._node, self._node.keeper.view
        names = {name_of(each): record for each, record in found.deaths.items()}
        writer = node.writer()
        status = fatal_record(found, names, node.settings.fatal_deaths, writer)
        # As long as that epoch is not committed: then the code went through after all.
        fences = () if view.epoch is None else (Compare(view.keys.epoch, view.epoch.mod_revision),)
        if view.open and not await node.write_failed(transactions.fail(view, status, fences), status):
            await node.keeper.refresh()
        self._failing = None
        self._changed()
