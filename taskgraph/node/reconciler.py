"""Makes the node's roles follow the view.

After each change of the view or of a suspicion, `reconcile` compares:

    a primary whose term is over            steps down
    a task without a living primary         is taken over, if this node may
    a replica without wish or need          is dropped
    a backup of a job that begins           is set up

It only begins and ends roles (`roles.py`) and takeovers; other modules carry them out.
"""

from __future__ import annotations

import asyncio

from taskgraph.errors import TaskGraphError
from taskgraph.node.membership.fatal import FatalCode
from taskgraph.node.membership.notifier import Notifier
from taskgraph.node.membership.suspicion import Suspicion
from taskgraph.node.primary.takeovers import TakeOvers
from taskgraph.node.roles import Roles
from taskgraph.node.services import NodeServices

__all__ = ["Reconciler"]

_LOOK_S = 1.0
"""The longest time between two calls of `reconcile`: job starts and long absences depend on time."""
_REST_FACTOR = 3
"""After a call of 1 ms comes a pause of 3 ms: each call goes through all tasks, and each of thousands of tasks that
begin is a change."""
_REST_S = 1.0
"""The longest pause, even if the process was frozen during a call."""


class Reconciler:
    """Compares the roles of one node with its view, and begins and ends roles and takeovers."""

    def __init__(
        self,
        node: NodeServices,
        roles: Roles,
        *,
        suspicion: Suspicion,
        fatal_code: FatalCode,
        takeovers: TakeOvers,
        notices: Notifier,
    ) -> None:
        self._node = node
        self._roles = roles
        self._suspicion = suspicion
        self._fatal_code = fatal_code
        self._takeovers = takeovers
        self._notices = notices
        self._followed = 0  # the last revision of `epoch` that the replicas here followed

    def follow_epoch(self) -> None:
        """Passes a change of the epoch to the replicas, synchronously: after a commit they free earlier boundaries."""
        view = self._node.keeper.view
        if view.epoch is not None and view.epoch.mod_revision != self._followed:
            self._followed = view.epoch.mod_revision
            for replica in self._roles.replicas.values():
                replica.follow(view.epoch.record)
        if view.structure_revision != self._node.placement.revision:
            self._roles.changed.set()

    async def run(self) -> None:
        """Calls `reconcile` after every change, and at least every `_LOOK_S`, until cancelled.

        The longer a call took, the longer the pause after it.
        """
        changed, now = self._roles.changed, self._node.now
        while True:
            changed.clear()
            began = now()
            self.reconcile()
            looked = now()
            try:
                async with asyncio.timeout(_LOOK_S):
                    await changed.wait()
            except TimeoutError:
                pass
            left_s = pause_after_s(looked - began) - (now() - looked)
            if left_s > 0:
                await asyncio.sleep(left_s)

    def reconcile(self) -> None:
        """Begins and ends roles so that they match the view, synchronously."""
        node, roles, view = self._node, self._roles, self._node.keeper.view
        if node.id in view.gone:
            node.end_with(
                node.device_loss.error
                or TaskGraphError(f"{node.name} was declared gone: {view.gone[node.id].record.reason}")
            )
            return
        self._suspicion.update()
        for task, primary in list(roles.primaries.items()):
            if view.revision < primary.revision:
                continue  # the view does not show its takeover yet
            if not view.is_primary(task, node.id, primary.term):
                roles.step_down(task)
            else:
                primary.restart_if_acknowledger_replaced()
        roles.adapt_shares()
        if not node.placement.may_start():
            return
        node.placement.update()
        if not self._fatal_code.fail_if_fatal() and (view.running or view.finished):
            for task in range(node.job.all_tasks):
                self._takeovers.consider(task)
            self._takeovers.emit_unplaceable()
            self._set_up_backups()
        self._drop_replicas()
        self._notices.notify_of_neighbors()
        node.keeper.notify_later()

    def _set_up_backups(self) -> None:
        """When a job begins, sets up the wished backups at once, not with their first offer."""
        node, view = self._node, self._node.keeper.view
        if node.paused or not view.running or (view.stamp is not None and view.stamp.epoch > 0):
            return
        for task in range(node.job.all_tasks):
            wish = node.wish(task)
            if wish is not None and node.id in wish.backups:
                self._roles.set_up(task)

    def _drop_replicas(self) -> None:
        """Drops replicas that are neither primary, nor in sync, nor wished for, and whose boundaries no primary needs.

        A node without its key in etcd drops nothing: placement wishes for none of its replicas, and the node soon
        pauses. A running set-up may have read gigabytes and cannot be interrupted, so its replica stays until it ends.
        """
        node, roles, view = self._node, self._roles, self._node.keeper.view
        if node.paused or node.id not in view.nodes:
            return
        for task, replica in list(roles.replicas.items()):
            if self._takeovers.is_busy(task) or replica.setting_up is not None:
                continue
            wish = node.wish(task)
            wished = wish is None or node.id == wish.primary or node.id in wish.backups
            if wished or node.id in view.in_sync(task) or view.primary_node(task) == node.id:
                continue
            if replica.is_unneeded(view.term(task)):
                roles.drop(task)


def pause_after_s(took_s: float) -> float:
    """Returns the pause after a call of `reconcile` that took `took_s`."""
    return min(_REST_FACTOR * took_s, _REST_S)
