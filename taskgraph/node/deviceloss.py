"""Ends this node's process when a task's code met an error of its CUDA device; see `protocol.deviceloss`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from taskgraph.errors import CoordinationError, TaskGraphError
from taskgraph.node.actor import UserCodeError
from taskgraph.protocol import transactions
from taskgraph.protocol.deviceloss import Outcome, device_error, outcome
from taskgraph.protocol.records import GoneRecord

if TYPE_CHECKING:
    from taskgraph.node.node import Node

__all__ = ["DeviceLoss", "DeviceLost", "met"]

_LONG = 300
"""Characters of the error that are kept with the node's end."""


class DeviceLost(TaskGraphError):
    """Why a node's process ends: its CUDA context is not to be used any more."""


def met(error: BaseException | None) -> BaseException | None:
    """The error of a CUDA device that user code met, if it did."""
    return device_error(error.error if isinstance(error, UserCodeError) else error)


class DeviceLoss:
    """One node's. A node that shares its process with others does not end it: there, the job fails as ever.

    Args:
        own_process: whether the node's end is its process's.
    """

    def __init__(self, node: Node, own_process: bool) -> None:
        self._node = node
        self._own_process = own_process
        self._met = False
        self.error: DeviceLost | None = None

    async def why_fail(self, error: Exception, task: int, epoch: int) -> str | None:
        """What to add to the reason with which the job fails; None: it does not fail, since this node ends."""
        found = met(error)
        if found is None or not self._own_process:
            return ""
        if self._met:
            return None  # what the first of them leads to is enough
        self._met = True
        if why := await self._until_it_may_end(task, epoch):
            return why
        where = f" in {error.where!r}" if isinstance(error, UserCodeError) else ""
        said = f"{type(found).__name__}: {found}"[:_LONG]
        await self._end(
            found, task, epoch, f"since task {task} met an error of its device{where}, epoch {epoch}: {said}"
        )
        return None

    async def _until_it_may_end(self, task: int, epoch: int) -> str:
        """Waits for what has to be waited for; why the job has to fail, or "": the process may end."""
        node = self._node

        def now() -> Outcome:
            return outcome(
                node.keeper.view,
                node.id,
                node.spec.run,
                task,
                epoch,
                limit=node.settings.device_failures,
                backups=node.job.backups,
                needs_device=node.job.needs_device,
            )

        if (first := now()).wait:
            text = f"task {task} met an error of its device; its node {node.name} ends, and waits for {first.wait}"
            node.events.emit("waits", text, task=task, epoch=epoch)
        try:
            async with asyncio.timeout(node.settings.drain_s):
                await node.keeper.wait_until(lambda _: not now().wait)
        except TimeoutError:
            return f"no other node took the state within {node.settings.drain_s:g} s (drain_s): {now().wait}"
        return now().fail

    async def _end(self, found: BaseException, task: int, epoch: int, since: str) -> None:
        node = self._node
        reason = f"ended its process, {since}"
        self.error = DeviceLost(f"{node.name} {reason}")
        node.log.error("%s", self.error, exc_info=found)
        for replica in node.replicas.values():
            replica.actor.abandoned = True  # none of its code runs here any more, `teardown` neither
        view = node.keeper.view
        record = GoneRecord(reason=reason, task=task, epoch=epoch, writer=node.writer())
        txn = transactions.declare_gone(view, node.id, record)
        try:
            # Said at once: what takes over need not wait until this process has come to its end.
            async with asyncio.timeout(node.settings.call_s):
                await node.transact(txn, key=view.keys.gone(node.id), writer=record.writer)
        except (CoordinationError, TimeoutError) as failed:
            node.log.warning("cannot tell why this node ends: %s", failed)
        node.end_with(self.error)
