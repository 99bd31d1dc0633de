"""Ends this node's process after a task's code met an error of its CUDA device; see `protocol.deviceloss`.

CUDA reports an illegal access to the next user of the context. That may be the copy of a snapshot while the next epoch
computes. The compute meets the error a moment later and knows its place, so its error is the one reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from taskgraph.errors import CoordinationError, TaskGraphError
from taskgraph.node.replica import COPIES
from taskgraph.node.usercode.errors import UserCodeError, cuda_error
from taskgraph.protocol import transactions
from taskgraph.protocol.deviceloss import Decision, decide, illegal_access_hint
from taskgraph.protocol.records import GoneRecord

if TYPE_CHECKING:
    from taskgraph.node.core import NodeCore
    from taskgraph.node.replica import Replica
    from taskgraph.protocol.messages import Stamp

__all__ = ["DeviceLoss", "DeviceLost"]

_LONG = 300
"""The most characters of the error in the record of the node's end."""


class DeviceLost(TaskGraphError):
    """The node ends its process, since its CUDA context cannot be used."""


class DeviceLoss:
    """One node's handling of device errors. A node that shares its process does not end it: the job fails instead.

    Args:
        replicas: the replicas on this node.
    """

    def __init__(self, node: NodeCore, replicas: Mapping[int, Replica]) -> None:
        self._node = node
        self._replicas = replicas
        self._leaving = False
        self.error: DeviceLost | None = None
        self._first_error: tuple[UserCodeError, int, Stamp] | None = None

    def note_error(self, error: BaseException, task: int, stamp: Stamp) -> None:
        """Notes the first device error of a compute in an attempt, which `root_error` returns later."""
        if isinstance(error, UserCodeError) and (
            self._first_error is None or self._first_error[2].attempt < stamp.attempt
        ):
            self._first_error = error, task, stamp

    def root_error(
        self, error: UserCodeError | TaskGraphError, task: int, epoch: int | None
    ) -> tuple[UserCodeError | TaskGraphError, int, int | None]:
        """Returns (error, task, epoch) to report: the given ones, or, for the device error of a copy, those that
        `note_error` noted in this attempt: their compute caused it.
        """
        if (
            self._first_error is None
            or not isinstance(error, UserCodeError)
            or error.where != COPIES
            or cuda_error(error) is None
        ):
            return error, task, epoch
        cause, by, stamp = self._first_error
        at = self._node.keeper.view.stamp
        return (cause, by, stamp.epoch) if at is not None and at.attempt == stamp.attempt else (error, task, epoch)

    def leave_or_explain(self, error: UserCodeError | TaskGraphError, task: int, epoch: int) -> str | None:
        """Begins, once, to end this node for a device error that the job survives, and returns None. Otherwise returns
        text to add to the job's failure; "": it is no such error.
        """
        found = cuda_error(error)
        if found is None or not self._node.own_process:
            return ""
        if self._leaving or not self._node.running:
            return None
        if why := self._decide(task, epoch).fail:
            return why + illegal_access_hint(found)
        self._leaving = True
        # Owned by the node, which must end even if that primary is replaced meanwhile.
        self._node.own(self._leave(error, found, task, epoch), "leave without a device")
        return None

    def _decide(self, task: int, epoch: int) -> Decision:
        """Decides by the view whether a device error fails the job, and what this node waits for before it ends."""
        node = self._node
        return decide(
            node.keeper.view,
            node.id,
            node.spec.run,
            task,
            epoch,
            limit=node.settings.device_failures,
            backups=node.job.backups,
            needs_device=node.job.needs_device,
        )

    async def _leave(self, error: UserCodeError | TaskGraphError, found: BaseException, task: int, epoch: int) -> None:
        """Waits until other nodes have the state that is here, declares this node gone and ends it; or fails
        the job.
        """
        node = self._node
        where = f" in {error.where!r}" if isinstance(error, UserCodeError) else ""
        said = f"{type(found).__name__}: {found}"[:_LONG] + illegal_access_hint(found)
        reason = f"ended its process, since task {task} met an error of its device{where}, epoch {epoch}: {said}"
        self.error = DeviceLost(f"{node.name} {reason}")
        node.log.error("task %d met an error of its device%s, epoch %d", task, where, epoch, exc_info=found)
        try:
            if why := await self._wait_for_replicas(task, epoch):
                await node.fail_with(error, task, epoch, (), why)
            else:
                await self._declare_gone(GoneRecord(reason=reason, task=task, epoch=epoch, writer=node.new_writer()))
        except CoordinationError as failed:
            node.log.warning("cannot tell why this node ends: %s", failed)
        for replica in self._replicas.values():
            replica.actor.abandoned = True  # no more code of the task may run here, not even `teardown`
        node.end_with(self.error)

    async def _wait_for_replicas(self, task: int, epoch: int) -> str:
        """Waits, `drain_s` at most, until other nodes have all state that is here. Returns why the job fails, or ""."""
        node = self._node
        if (first := self._decide(task, epoch)).wait:
            text = f"task {task} met an error of its device; its node {node.name} ends, and waits for {first.wait}"
            node.events.emit("waits", text, task=task, epoch=epoch)
        try:
            async with asyncio.timeout(node.settings.drain_s):
                await node.keeper.wait_until(lambda _: not self._decide(task, epoch).wait)
        except TimeoutError:
            waited = self._decide(task, epoch).wait
            return f"{node.name} waited {node.settings.drain_s:g} s (drain_s) for {waited}" if waited else ""
        return self._decide(task, epoch).fail

    async def _declare_gone(self, record: GoneRecord) -> None:
        """Declares this node gone at once, so that takeovers need not wait for the end of the process."""
        node, keys = self._node, self._node.keeper.view.keys
        txn = transactions.declare_gone(node.keeper.view, node.id, record)
        try:
            async with asyncio.timeout(node.settings.call_s):
                await node.transact(txn, key=keys.gone(node.id), writer=record.writer)
        except TimeoutError:
            node.log.warning("etcd did not take in time why this node ends")
