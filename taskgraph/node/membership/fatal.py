"""Fails the job if one task's code ended the processes of several nodes while others live; see `protocol.fatal`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from taskgraph.node.membership.failing import fatal_record
from taskgraph.protocol import transactions
from taskgraph.protocol.fatal import DeadlyCode, find_deadly_code
from taskgraph.protocol.kv import Compare
from taskgraph.protocol.records import name_of

if TYPE_CHECKING:
    from taskgraph.node.core import NodeCore

__all__ = ["FatalCode"]


class FatalCode:
    """Fails the job if one task's code ended several nodes. Every node checks, and etcd takes the first failure.

    Args:
        changed: called once etcd has taken the failure, or refused it, so that takeovers may go on.
    """

    def __init__(self, node: NodeCore, changed: Callable[[], None]) -> None:
        self._node = node
        self._changed = changed
        self._failing: asyncio.Task[None] | None = None

    def fail_if_fatal(self) -> bool:
        """Begins to fail the job, once, if one task's code ended too many nodes. True if so: no takeover may begin."""
        node, view = self._node, self._node.keeper.view
        if self._failing is None:
            found = find_deadly_code(view, node.settings.fatal_deaths)
            if found is None or node.paused or not view.has_work:
                return False
            self._failing = node.own(self._fail(found), "fail for code that ends its process")
        return True

    async def _fail(self, found: DeadlyCode) -> None:
        """Fails the job in etcd, unless the epoch committed meanwhile; calls `changed` in either case."""
        node, view = self._node, self._node.keeper.view
        names = {name_of(each): record for each, record in found.deaths.items()}
        writer = node.new_writer()
        status = fatal_record(found, names, node.settings.fatal_deaths, writer)
        # Only while that epoch is not committed: a commit means that the code went through.
        fences = () if view.epoch is None else (Compare(view.keys.epoch, view.epoch.mod_revision),)
        if view.has_work and not await node.write_failure(transactions.fail(view, status, fences), status):
            await node.keeper.refresh()
        self._failing = None
        self._changed()
