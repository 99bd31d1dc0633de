"""Keeps a node's role for each task: primary, backup or none; and whether it leads the job.

This module begins and ends roles; `reconciler.py` decides when.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from taskgraph.device import shared
from taskgraph.device.cuda import array_module
from taskgraph.driver.loading import place_of
from taskgraph.errors import TaskGraphError, error_text
from taskgraph.node.garbage import adapt_garbage_threshold
from taskgraph.node.primary.leader import LeaderRole
from taskgraph.node.primary.primary import Primary
from taskgraph.node.replica import Replica
from taskgraph.node.usercode.errors import StuckError, UserCodeError
from taskgraph.protocol.messages import Release
from taskgraph.protocol.records import RunningCode
from taskgraph.task import BecameBackup

if TYPE_CHECKING:
    from taskgraph.node.services import NodeServices

__all__ = ["Roles"]


class Roles:
    """One node's replicas, its primaries, and the leader's role.

    Attributes:
        changed: set after changes upon which the reconciler must run.
    """

    def __init__(self, node: NodeServices) -> None:
        self._node = node
        self.replicas = node.replicas
        self.primaries: dict[int, Primary] = {}
        self.runs: dict[int, asyncio.Task[None]] = {}
        """The primaries' `run`, until they have returned."""
        self.stepping_down: dict[int, asyncio.Task[None]] = {}
        self._last_share = 0  # number of primaries at the last `share`
        self._leading: asyncio.Task[None] | None = None
        self.leaving: list[Replica] = []
        """Replicas that are being torn down; the same tasks may have new replicas here."""
        self.changed = asyncio.Event()

    def reconsider(self) -> None:
        """Makes the reconciler run after a change that the view does not show."""
        self.changed.set()
        self._node.keeper.notify_later()

    # -- primaries --------------------------------------------------------------------------------

    def begin_term(self, primary: Primary) -> None:
        """Starts a primary whose takeover succeeded, and with task 0's the leader. Both work until `step_down`."""
        task = primary.task
        self.primaries[task] = primary
        self._node.epoch_memory.primaries = len(self.primaries)
        if task == 0:  # before its first boundary, which carries all reports
            self._lead(primary)
        run = self.runs[task] = self._node.own(self._run_primary(primary), f"primary of task {task}")
        run.add_done_callback(lambda _: self.runs.pop(task, None))
        self.reconsider()

    def adapt_shares(self) -> None:
        """Adapts the memory that each primary may use for uncommitted epochs, and how rarely garbage is searched for,
        to the number of primaries.

        The reconciler calls this once for many changes: each of thousands of tasks that begin would go through all
        others.
        """
        if self._last_share != len(self.primaries):
            self._last_share = len(self.primaries)
            adapt_garbage_threshold(len(self.primaries))
            for primary in self.primaries.values():
                primary.adapt_share()

    async def _run_primary(self, primary: Primary) -> None:
        """Runs a primary's term. An unexpected error ends the node, so that others take over."""
        node = self._node
        try:
            await primary.run()
        except Exception as error:
            known = isinstance(error, StuckError | TaskGraphError)
            failed = TaskGraphError(
                f"task {primary.task} on {node.name} cannot go on: {error if known else error_text(error)}"
            )
            node.log.error("%s", failed, exc_info=None if known else error)
            at = primary.attempts.latest
            code = RunningCode("its primary", primary.task, node.epoch if at is None else at.epoch)
            node.end_with(failed, ran=(code,))

    def step_down(self, task: int) -> None:
        """Begins to end the term of this node's primary of a task, since the view shows another primary."""
        primary = self.primaries.pop(task)
        self._node.epoch_memory.primaries = len(self.primaries)
        if task == 0:
            self._stop_leading()
        run = self.runs.get(task)
        self.stepping_down[task] = self._node.own(self._finish_step_down(primary, run), f"step down from task {task}")

    async def _finish_step_down(self, primary: Primary, run: asyncio.Task[None] | None) -> None:
        """Cancels a primary that was replaced, waits for its end, and tells the user's object that it is a backup."""
        task = primary.task
        if run is not None:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
        replica = primary.replica
        if replica.ready and not replica.actor.abandoned:
            replica.user_task.primary = False
            try:
                await replica.notify(BecameBackup(term=self._node.keeper.view.term(task)))
            except UserCodeError as error:
                await self._node.fail_early(error, task)
        del self.stepping_down[task]
        self.reconsider()

    # -- the leader -------------------------------------------------------------------------------

    @property
    def leader(self) -> LeaderRole | None:
        """The role of the job's leader, if this node leads; None: it does not. Primaries see only `LeaderInterface`."""
        leader = self._node.leader
        assert leader is None or isinstance(leader, LeaderRole)
        return leader

    def _lead(self, primary: Primary) -> None:
        """Begins to lead the job, for task 0's new primary here."""
        self._node.leader = leader = LeaderRole(self._node, primary)
        self._leading = self._node.own(leader.run(), "leader")

    def _stop_leading(self) -> None:
        self._node.leader = None
        if self._leading is not None:
            self._leading.cancel()
            self._leading = None

    # -- replicas ---------------------------------------------------------------------------------

    def replica(self, task: int) -> Replica:
        """Returns this node's replica of a task, made on demand."""
        node, known = self._node, self.replicas.get(task)
        if known is None:
            xp, device = array_module(node.devices)
            if device is not None and node.own_process:
                shared.offer_memory(device)
            known = self.replicas[task] = Replica(
                task, node.job, node.router, node.threads, xp=xp, device=device, tracing=node.tracing
            )
            if node.keeper.view.epoch is not None:
                known.follow(node.keeper.view.epoch.record)
        return known

    def set_up(self, task: int) -> None:
        """Begins to set a replica up, unless that began before."""
        if not (replica := self.replica(task)).set_up_began:
            self._node.own(self._set_up(replica), f"set up task {task}")

    async def _set_up(self, replica: Replica) -> None:
        """Sets a replica up; a failure ends this node or the job."""
        try:
            await replica.set_up()
        except (UserCodeError, TaskGraphError) as error:
            await self._node.fail_set_up(error, replica.task)

    def release(self, message: Release) -> None:
        """Handles a primary's message that it no longer needs this node's boundaries: the reconciler may drop them."""
        replica = self.replicas.get(message.task)
        if replica is not None:
            replica.release(message.term, message.invitation)
            self.changed.set()

    def drop(self, task: int) -> None:
        """Removes a replica, and begins to tear it down."""
        self._node.run_to_end(self._tear_down(self.replicas.pop(task)), f"tear down task {task}")

    async def _tear_down(self, replica: Replica) -> None:
        """Tears a dropped replica down; an error in `teardown()` fails the job."""
        try:
            await self._tear_down_reporting(replica)
        except UserCodeError as error:
            await self._node.fail_early(error, replica.task)

    async def _tear_down_reporting(self, replica: Replica) -> None:
        """Tears a replica down, and emits an event if that takes long.

        Raises:
            UserCodeError: `teardown()` raised.
        """
        node, loop = self._node, asyncio.get_running_loop()
        self.leaving.append(replica)
        telling = loop.call_later(node.settings.slow_compute_s, self._emit_slow, replica)
        try:
            await replica.tear_down()
        except StuckError as stuck:
            node.events.emit("slow", f"task {replica.task}: {stuck}: it is left behind", task=replica.task)
        finally:
            telling.cancel()
            self.leaving.remove(replica)

    def _emit_slow(self, replica: Replica) -> None:
        self._node.events.emit("slow", self._waits_text(replica), task=replica.task)

    def _waits_text(self, replica: Replica) -> str:
        code = ", ".join(repr(running.where) for running in replica.actor.running) or "its turn"
        limit = self._node.settings.cancel_s
        return f"task {replica.task}: its end on {self._node.name} waits for {code}, for {limit:g} s at most"

    @property
    def waits(self) -> tuple[str, ...]:
        """What the teardown of replicas waits for, for `status`."""
        return tuple([self._waits_text(replica) for replica in self.leaving])

    async def tear_down_all(self) -> None:
        """Calls `teardown()` of all replicas here, at the node's end, and waits for it; errors in it become events."""
        self.primaries.clear()
        async with asyncio.TaskGroup() as group:  # concurrently: each may take long
            for replica in self.replicas.values():
                group.create_task(self._end(replica))

    async def _end(self, replica: Replica) -> None:
        """Tears a replica down at the node's end; an error in `teardown()` is an event."""
        try:
            await self._tear_down_reporting(replica)
        except UserCodeError as error:
            # The job has ended, so an event is the only way to report this.
            what = f"task {replica.task}: teardown raised {error_text(error.error)}{place_of(error.error)}"
            text = f"{what}; the log of its node has the traceback"
            self._node.events.emit("teardown failed", text, task=replica.task)
            self._node.log.error("teardown of task %d raised:\n%s", replica.task, error.traceback_text)
