"""A node of a task graph: puts the parts together.

`core.py` has what every part needs, `life.py` what happens from registering to leaving, `roles.py` what runs here of
the tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from itertools import chain
from typing import Any, Unpack

from taskgraph.node.answers import node_status, task_results
from taskgraph.node.core import Point
from taskgraph.node.life import OWN_TASKS
from taskgraph.node.membership.draining import Draining
from taskgraph.node.membership.failed_setups import FailedSetUps
from taskgraph.node.membership.fatal import FatalCode
from taskgraph.node.membership.notifier import Notifier
from taskgraph.node.membership.registration import Registration
from taskgraph.node.membership.suspicion import Suspicion
from taskgraph.node.primary.takeovers import TakeOvers
from taskgraph.node.reconciler import Reconciler
from taskgraph.node.roles import Roles
from taskgraph.node.services import NodeServices, ServicesArguments
from taskgraph.node.serving import Serving
from taskgraph.observe.status import NodeStatus, TaskResult
from taskgraph.protocol.readiness import are_tasks_in_sync
from taskgraph.protocol.records import RunningCode

__all__ = ["Node", "Point"]


class Node(NodeServices):
    """One node of one job. `run` it once."""

    serving: Serving

    def __init__(self, **arguments: Unpack[ServicesArguments]) -> None:
        super().__init__(**arguments)
        self.roles = Roles(self)
        self.suspicion = Suspicion(
            self,
            lambda: chain.from_iterable(primary.backups.peers for primary in self.roles.primaries.values()),
            unproved=lambda: self.registration.unproved,
            changed=self.roles.reconsider,
        )
        fatal_code = FatalCode(self, self.roles.reconsider)
        self.takeovers = TakeOvers(self, self.roles, suspicion=self.suspicion, fatal_code=fatal_code)
        self.failed_set_ups = FailedSetUps(
            self, lambda: bool(self.roles.primaries or self.roles.runs or self.takeovers.any_under_way)
        )
        self.notices = Notifier(self, self.roles)
        self.reconciler = Reconciler(
            self,
            self.roles,
            suspicion=self.suspicion,
            fatal_code=fatal_code,
            takeovers=self.takeovers,
            notices=self.notices,
        )
        self.registration = Registration(self, suspicion=self.suspicion, reconcile=self.reconciler.reconcile)
        self.serving = Serving(self, self.roles, self.takeovers)
        self.draining_state = Draining(
            self, lambda: not (self.roles.primaries or self.roles.runs), lambda: self.registration.waits
        )
        # From the first read on: a node takes offers while it registers, and must drop boundaries that a roll-back
        # undid before it holds later ones.
        self._stop_following = self.keeper.on_change(self.reconciler.follow_epoch)

    # -- what its life asks -----------------------------------------------------------------------

    def services(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {"notices": self.notices.emit_until_cancelled(), "reconcile": self.reconciler.run()}

    def in_sync(self) -> bool | None:
        view = self.keeper.view
        if view.primaries and self.placement.revision != view.structure_revision:
            return None  # the reconciler places next, and not this: it must see that there is a change
        return are_tasks_in_sync(view, self.id, self.placement.by_task)

    def set_ups(self) -> list[asyncio.Task[None]]:
        return [r.setting_up for r in self.roles.replicas.values() if r.setting_up is not None]

    def stop_new_work(self) -> None:
        self._stop_following()

    async def end_parts(self) -> None:
        await self.roles.tear_down_all()

    def close_threads(self) -> None:
        super().close_threads()
        self.file_threads.close()

    def code_at_work(self) -> tuple[RunningCode, ...]:
        latest = {task: primary.attempts.latest for task, primary in self.roles.primaries.items()}
        return tuple(RunningCode(OWN_TASKS, t, self.epoch if at is None else at.epoch) for t, at in latest.items())

    # -- for the control service and tests --------------------------------------------------------

    def status(self) -> NodeStatus:
        leader = self.roles.leader
        waits = (
            *self.registration.waits,
            *self.placement.waits,
            *self.takeovers.waits,
            *(leader.waits if leader is not None else ()),
            *self.keeper.waits,
            *self.writes.waits,
            *self.roles.waits,
            *self.notices.waits,
            *self.serving.waits,
        )
        return node_status(self, self.roles, waits)

    @property
    def latest_epoch(self) -> int:
        latest = (primary.attempts.latest for primary in self.roles.primaries.values())
        return max(self.epoch, *(stamp.epoch for stamp in latest if stamp is not None), -1)

    async def results(self) -> list[TaskResult]:
        return await task_results(self.keeper, self.roles.primaries)
