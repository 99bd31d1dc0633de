"""What a node is to each task: its primary, one of its backups, or nothing; and whether it leads the job.

`reconcile` is the heart: whenever the view or a suspicion changes, it compares what etcd says with what runs here:
primaries of gone terms step down, replicas nobody wishes for go, tasks without a primary are taken over, and the
leader's role follows task 0. It only starts and stops things; what they do is in their own modules.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from taskgraph.device import shared
from taskgraph.device.cuda import array_module
from taskgraph.errors import TaskGraphError, worded
from taskgraph.loading import place_of
from taskgraph.node.primary.leader import LeaderRole
from taskgraph.node.primary.primary import Primary
from taskgraph.node.replica import Replica
from taskgraph.node.reports import Rows
from taskgraph.node.usercode.errors import StuckError, UserCodeError
from taskgraph.protocol.messages import Release, Stamp
from taskgraph.protocol.records import Ran
from taskgraph.task import BecameBackup

if TYPE_CHECKING:
    from taskgraph.node.node import Node

__all__ = ["Roles"]

_LOOK_S = 1.0
"""For what no event announces: a start that waits for nodes, an absence that lasts."""


class Roles:
    """One node's replicas, the terms of those that are primaries, and the leader's role."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.replicas: dict[int, Replica] = {}
        self.primaries: dict[int, Primary] = {}
        self.runs: dict[int, asyncio.Task[None]] = {}
        """Of primaries: there until they have returned."""
        self.stepping_down: dict[int, asyncio.Task[None]] = {}
        self.leader: LeaderRole | None = None
        self._leading: asyncio.Task[None] | None = None
        self.leaving: list[Replica] = []
        """Replicas whose code is brought to its end: others may be here of the same tasks."""
        self._dirty = asyncio.Event()

    # -- as the view says -------------------------------------------------------------------------

    def follow(self) -> None:
        """Every change of the view, synchronously: backups free what etcd says is history."""
        view = self._node.keeper.view
        if view.epoch is not None:
            for replica in self.replicas.values():
                replica.follow(view.epoch.record)
        if view.structure_revision != self._node.wishes.revision:
            self._dirty.set()

    def reconsider(self) -> None:
        """Something has changed that the view does not tell."""
        self._dirty.set()
        self._node.keeper.notify_later()

    async def run(self) -> None:
        """For ever: looks again whenever something changed."""
        while True:
            self._dirty.clear()
            self.reconcile()
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._dirty.wait()
            except TimeoutError:
                pass

    def reconcile(self) -> None:
        """Brings what runs here in line with the view. Synchronous: it decides and starts, others do."""
        node, view = self._node, self._node.keeper.view
        if node.id in view.gone:
            node.end_with(
                node.device_loss.error
                or TaskGraphError(f"{node.name} was declared gone: {view.gone[node.id].record.reason}")
            )
            return
        node.suspicion.update()
        for task, primary in list(self.primaries.items()):
            if view.revision < primary.revision:
                continue  # the view has not come to its takeover yet
            if not view.is_primary(task, node.id, primary.term):
                self._step_down(task)
            else:
                primary.check_terms()
        if not node.wishes.may_start():
            return
        node.wishes.update()
        if not node.fatal_code.look() and (view.running or view.finished):
            for task in range(node.job.tasks):
                node.takeovers.consider(task)
            node.takeovers.tell_unseated()
            self._set_up_backups()
        self._drop_replicas()
        self._follow_leadership()
        node.noticing.look()
        node.keeper.notify_later()

    # -- primaries --------------------------------------------------------------------------------

    def begin_term(self, primary: Primary) -> None:
        """A takeover succeeded: the primary works until the view shows another."""
        task = primary.task
        self.primaries[task] = primary
        self._share()
        run = self.runs[task] = self._node.own(self._run_primary(primary), f"primary of task {task}")
        run.add_done_callback(lambda _: self.runs.pop(task, None))
        self.reconsider()

    def _share(self) -> None:
        """What uncommitted epochs may hold is shared by all primaries here."""
        for primary in self.primaries.values():
            primary.share()

    async def _run_primary(self, primary: Primary) -> None:
        """A primary's term; what it cannot handle ends the node, so that others take over."""
        node = self._node
        try:
            await primary.run()
        except Exception as error:
            node.log.exception("task %d, term %d: cannot go on", primary.task, primary.term)
            why = str(error) if isinstance(error, StuckError | TaskGraphError) else worded(error)
            failed = TaskGraphError(f"task {primary.task} on {node.name} cannot go on: {why}")
            at = primary.attempts.latest
            node.end_with(failed, ran=(Ran("its primary", primary.task, node.epoch if at is None else at.epoch),))

    def _step_down(self, task: int) -> None:
        """The view shows another primary: this one's term is over."""
        primary = self.primaries.pop(task)
        self._share()
        if task == 0:
            self._stop_leading()
        run = self.runs.get(task)
        self.stepping_down[task] = self._node.own(self._finish_step_down(primary, run), f"step down from task {task}")

    async def _finish_step_down(self, primary: Primary, run: asyncio.Task[None] | None) -> None:
        task = primary.task
        if run is not None:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
        replica = primary.replica
        if replica.ready and not replica.actor.abandoned:
            replica.user_task.primary = False
            try:
                await replica.tell(BecameBackup(term=self._node.keeper.view.term(task)))
            except UserCodeError as error:
                await self._node.fail_early(error, task)
        del self.stepping_down[task]
        self.reconsider()

    # -- the leader -------------------------------------------------------------------------------

    def _follow_leadership(self) -> None:
        primary = self.primaries.get(0)
        if primary is not None and self.leader is None:
            self.leader = LeaderRole(self._node, primary)
            self._leading = self._node.own(self.leader.run(), "leader")

    def _stop_leading(self) -> None:
        self.leader = None
        if self._leading is not None:
            self._leading.cancel()
            self._leading = None

    async def rows_before(self, task: int, stamp: Stamp, own: dict[str, float]) -> Rows:
        """Task 0's boundary carries the reports of the epoch before: its leader knows them, or will."""
        return await self.leader.rows_before(stamp, own) if task == 0 and self.leader is not None else {}

    # -- replicas ---------------------------------------------------------------------------------

    def replica(self, task: int) -> Replica:
        """This node's replica of a task, made where there is none."""
        node, known = self._node, self.replicas.get(task)
        if known is None:
            xp, device = array_module(node.devices)
            if device is not None and node.own_process:
                shared.offer(device)
            known = self.replicas[task] = Replica(
                task, node.job, node.router, node.threads, xp=xp, device=device, tracing=node.tracing
            )
            if node.keeper.view.epoch is not None:
                known.follow(node.keeper.view.epoch.record)
        return known

    def _set_up_backups(self) -> None:
        """Where a job begins, beside its primaries: else they would be after them, at the first offer."""
        node, view = self._node, self._node.keeper.view
        if node.paused or not view.running or (view.stamp is not None and view.stamp.epoch > 0):
            return
        for task in range(node.job.tasks):
            wish = node.wish(task)
            if wish is not None and node.id in wish.backups and not (replica := self.replica(task)).begun:
                node.own(self._set_up(replica), f"set up task {task}")

    async def _set_up(self, replica: Replica) -> None:
        try:
            await replica.set_up()
        except (UserCodeError, TaskGraphError) as error:
            await self._node.fail_early(error, replica.task)

    def release(self, message: Release) -> None:
        """A primary does not count on what this node holds for it any more."""
        replica = self.replicas.get(message.task)
        if replica is not None:
            replica.release(message.term, message.invitation)
            self._dirty.set()

    def _drop_replicas(self) -> None:
        """Replicas that are neither primary, nor member, nor wished for."""
        node, view = self._node, self._node.keeper.view
        for task, replica in list(self.replicas.items()):
            if task in self.primaries or task in node.takeovers or task in self.stepping_down:
                continue
            wish = node.wish(task)
            wished = wish is None or node.id == wish.primary or node.id in wish.backups
            if wished or node.id in view.in_sync(task) or view.primary_node(task) == node.id:
                continue
            if not replica.may_go(view.term(task)):
                continue
            del self.replicas[task]
            node.wait_for(self._tear_down(replica), f"tear down task {task}")

    async def _tear_down(self, replica: Replica) -> None:
        try:
            await self._torn_down(replica)
        except UserCodeError as error:
            await self._node.fail_early(error, replica.task)

    async def _torn_down(self, replica: Replica) -> None:
        """Returns when a replica's code has ended, or is left behind. What takes long is told.

        Raises:
            UserCodeError: `teardown()` raised.
        """
        node, loop = self._node, asyncio.get_running_loop()
        self.leaving.append(replica)
        telling = loop.call_later(node.settings.slow_compute_s, self._tell_slow, replica)
        try:
            await replica.tear_down()
        except StuckError as stuck:
            node.events.emit("slow", f"task {replica.task}: {stuck}: it is left behind", task=replica.task)
        finally:
            telling.cancel()
            self.leaving.remove(replica)

    def _tell_slow(self, replica: Replica) -> None:
        self._node.events.emit("slow", self._waits_for(replica), task=replica.task)

    def _waits_for(self, replica: Replica) -> str:
        code = ", ".join(repr(running.where) for running in replica.actor.running) or "its turn"
        limit = self._node.settings.cancel_s
        return f"task {replica.task}: its end on {self._node.name} waits for {code}, for {limit:g} s at most"

    @property
    def waits(self) -> tuple[str, ...]:
        """What the end of replicas waits for, for `status`."""
        return tuple([self._waits_for(replica) for replica in self.leaving])

    async def end(self) -> None:
        """The node ends, and none of them works any more."""
        self.primaries.clear()
        async with asyncio.TaskGroup() as group:  # all at a time: each may take long
            for replica in self.replicas.values():
                group.create_task(self._end(replica))

    async def _end(self, replica: Replica) -> None:
        try:
            await self._torn_down(replica)
        except UserCodeError as error:
            # It changes nothing of what the job has come to, so this is how somebody hears of it.
            what = f"task {replica.task}: teardown raised {worded(error.error)}{place_of(error.error)}"
            text = f"{what}; the log of its node has the traceback"
            self._node.events.emit("teardown failed", text, task=replica.task)
            self._node.log.error("teardown of task %d raised:\n%s", replica.task, error.traceback_text)
