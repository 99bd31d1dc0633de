"""A task's primary for one term: from the boundary it took over, epoch after epoch, to the job's result.

    begin (restore, or first snapshot) ──► attempt ──► snapshot held by all members ──► done reported
                                             ▲                                              │
                                             │ restart: restore            epoch read as committed: on_commit,
                                             └───────────────────────────── hand over where placement wishes it

Everything here ends when the view shows another primary, or the node pauses for good: the node cancels `run`.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING

from taskgraph.errors import Refused, TaskGraphError, TransportError
from taskgraph.node.actor import StuckError, UserCodeError
from taskgraph.node.attempt import Attempt, Idle
from taskgraph.node.backups import Backups
from taskgraph.node.checkpoints import CheckpointWriter
from taskgraph.node.deviceloss import met
from taskgraph.node.reporter import Reporter
from taskgraph.node.strict import Recording, check_replay
from taskgraph.observe.trace import clock
from taskgraph.protocol.boundaries import Boundary
from taskgraph.protocol.insync import InSync
from taskgraph.protocol.kv import Compare
from taskgraph.protocol.messages import Encoded, HandOver, Reason, Report, RequestRestart, Stamp, Wait
from taskgraph.protocol.records import EpochRecord, State
from taskgraph.protocol.transactions import TakenOver
from taskgraph.protocol.view import JobView, holds
from taskgraph.task import BecamePrimary

if TYPE_CHECKING:
    from taskgraph.node.node import Node
    from taskgraph.node.replica import Replica
    from taskgraph.task import Event

__all__ = ["Primary"]


class Primary:
    """One task, one term."""

    def __init__(self, node: Node, replica: Replica, taken: TakenOver) -> None:
        self._node = node
        self.replica = replica
        self.task = replica.task
        self._tracing = node.tracing
        self._done_ns = 0
        self.term = taken.term
        self.revision = taken.revision
        self._taken = taken
        # Who was evicted before the committed boundary does not hold it, and must not be evicted again: "until" this
        # epoch would make it an heir. Backups tidies its key away.
        others = {n: m for n, (_, m) in taken.members.items() if n != node.id}
        at = EpochRecord(epoch=taken.epoch, attempt=taken.attempt, lineage=taken.lineage)
        insync = InSync(
            [n for n, m in others.items() if m.until is None],
            marked=[n for n, m in others.items() if m.until is not None and holds(m, at)],
        )
        self.backups = Backups(
            node, replica, term=taken.term, epoch=taken.epoch, primary_revision=taken.revision, insync=insync
        )
        self._attempt: Attempt | None = None
        self._attempt_changed = asyncio.Event()
        self._reporter = Reporter(node)
        self._restart_asked: set[tuple[Stamp, str]] = set()
        self._group: asyncio.TaskGroup | None = None
        self._stage = "setup"
        self._writer = CheckpointWriter(node, self.task)
        self._lineage = taken.lineage
        self._epoch_began = node.now()
        self._ended = False
        self.final: tuple[Stamp, Encoded | None] | None = None  # after the last commit

    # -- life -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Works until cancelled. User errors fail the job; a stuck compute ends the node."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self.backups.run(), name=f"backups of task {self.task}")
                group.create_task(self._reporter.run(), name=f"reports of task {self.task}")
                if self._node.spec.checkpoint is not None:
                    group.create_task(self._writer.write(), name=f"checkpoints of task {self.task}")
                    group.create_task(self._writer.tell(), name=f"checkpoints of task {self.task}, told")
                await self._main()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._group = None
            self._ended = True
            self._drop_attempt()
            self._attempt_changed.set()

    async def _main(self) -> None:
        keeper = self._node.keeper
        await keeper.caught_up(self.revision)
        fence = keeper.view.epoch.mod_revision if keeper.view.epoch else 0
        try:
            await self._begin()
        except (UserCodeError, TaskGraphError) as error:
            await self._fail(error, fence)
        while True:
            if not keeper.view.running:
                await self._conclude()
                continue
            if self._undone():
                await self._roll_back()
                continue
            self.final = None
            stamp, fence = keeper.view.stamp, keeper.view.epoch.mod_revision if keeper.view.epoch else 0
            assert stamp is not None
            await self._one_epoch(stamp, fence)
            if keeper.view.stamp != stamp and not self._undone():
                try:
                    await self._moved(stamp)
                except (UserCodeError, TaskGraphError) as error:
                    await self._fail(error, keeper.view.epoch.mod_revision if keeper.view.epoch else 0)

    async def _begin(self) -> None:
        """Brings the user's object to the boundary the take-over read; makes boundary 0 where there is none."""
        replica = self.replica
        await replica.set_up()
        await self._unless_replaced()
        replica.user_task.primary = True
        view = self._node.keeper.view
        assert view.epoch is not None
        # No epoch committed since the take-over, without this task: but the job may have been rolled back.
        at = view.epoch.record
        self._lineage = at.lineage
        replica.follow(at)
        boundary = replica.boundaries.committed
        if boundary is None or boundary.stamp.epoch != at.epoch:
            boundary = await self._boundary_anew(at)
        await replica.restore(boundary.value)
        self.backups.committed(boundary)
        if at.epoch > 0:
            await replica.on_commit(at.epoch - 1, boundary.value)
        await replica.tell(BecamePrimary(term=self.term))

    async def _boundary_anew(self, at: EpochRecord) -> Boundary:
        """The committed boundary where no replica holds it: out of the checkpoint, or made anew."""
        replica, boundary = self.replica, None
        if at.epoch > 0 and (replica.stateful or self.task == 0):
            self._stage = f"its file of the checkpoint of epoch {at.epoch}"
            boundary = await self._node.checkpoints.boundary_of(self.task, self.term)
            self._stage = ""
        if boundary is None:
            if at.epoch > 0 and replica.stateful:
                raise AssertionError(f"task {self.task}: a member without boundary {at.epoch} took over")
            boundary = Boundary(Stamp(at.attempt, at.epoch), self.term, await replica.snapshot({}, {}))
        replica.boundaries.hold(boundary, committed=True)
        replica.fold_log(boundary.value)
        return boundary

    def _undone(self) -> bool:
        """Whether the view shows a roll-back that this primary has not followed yet."""
        epoch = self._node.keeper.view.epoch
        return epoch is not None and epoch.record.lineage > self._lineage

    async def _roll_back(self) -> None:
        """The job went back to a checkpoint, since all members of some task are gone: this task goes there, too."""
        await self._unless_replaced()
        view, replica = self._node.keeper.view, self.replica
        assert view.epoch is not None
        at, fence = view.epoch.record, view.epoch.mod_revision
        replica.follow(at)
        try:
            boundary = await self._boundary_anew(at)
            self._stage = "restore"
            await replica.restore(boundary.value)
        except (UserCodeError, TaskGraphError) as error:
            await self._fail(error, fence)  # where that is moot by now, it is tried again
            return
        self._stage = ""
        self._lineage = at.lineage
        if not self._undone():
            self.backups.rolled_back(boundary)

    async def _one_epoch(self, stamp: Stamp, fence: int) -> None:
        """Works on one attempt until the view moves on, by a commit, a restart, or the end of the job."""
        self._epoch_began = self._node.now()
        began, self._done_ns = self._tracing.on and clock(), 0
        moved = partial(_moved_on, stamp)
        view_moved = self._node.keeper.when(moved)
        work = asyncio.get_running_loop().create_task(self._work(stamp))
        work.add_done_callback(partial(_pass_on_failure, view_moved))
        try:
            await view_moved
        except (UserCodeError, TaskGraphError) as error:
            if self._node.keeper.view.term_changed() and met(error) is None:
                # A replaced primary may have taken messages that this attempt knows nothing of. If it is a mistake
                # of the job, it comes again in the next attempt, in which nobody was replaced.
                self._ask_restart(stamp, f"task {self.task} failed after a primary was replaced: {error}")
            else:
                await self._fail(error, fence)
            await self._node.keeper.wait_until(moved)
        finally:
            if began:
                self._trace_epoch(began, stamp)
            self._drop_attempt()
            view_moved.cancel()
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            self._reporter.set(None)
            if not work.cancelled() and isinstance(stuck := work.exception(), StuckError):
                raise stuck

    def _trace_epoch(self, began: int, stamp: Stamp) -> None:
        self._tracing.add("epoch", began, self.task, stamp, self.term, ended=self._done_ns)
        if self._done_ns:
            self._tracing.add("commit awaited", self._done_ns, self.task, stamp, self.term)

    def _drop_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.drop()

    async def _work(self, stamp: Stamp) -> None:
        """One attempt, its snapshot, and the report that it is done."""
        replica = self.replica
        replica.actor.stamp, replica.actor.term = stamp, self.term
        await self._hand_over_if_wished(stamp)
        self._stage = ""
        if self.task != 0:
            await self._checkpoint(stamp)
        attempt = Attempt(
            replica,
            stamp,
            self.term,
            on_idle=lambda idle: self._report_idle(stamp, idle),
            ask_restart=lambda why: self._ask_restart(stamp, why),
            point=self._node.point,
            recording=Recording(replica, stamp) if self._node.settings.strict else None,
        )
        self._attempt = attempt
        self._attempt_changed.set()
        await self._node.point("compose", self.task, stamp.epoch)
        await attempt.run()
        if attempt.recording is not None:
            await self._replay(attempt.recording, stamp)
        await self._node.point("snapshot", self.task, stamp.epoch)
        self._stage = "reports of the epoch before"
        await self._node.rows_known(self.task, stamp)
        if self.task == 0:
            await self._checkpoint(stamp)
        self._stage = "snapshot"
        value = await replica.snapshot(attempt.numbers, replica.log.delta(stamp.epoch - 1))
        boundary = Boundary(Stamp(stamp.attempt, stamp.epoch + 1), self.term, value)
        replica.boundaries.hold(boundary, committed=False)
        self.backups.pending(boundary)
        at = self._node.keeper.view.epoch
        admit_wait_s = self._node.settings.admit_wait_s if at is not None and stamp.epoch == at.record.base else 0.0
        self._stage = ""
        holding = self._tracing.on and clock()
        await self.backups.held(boundary.key, admit_wait_s=admit_wait_s)
        if holding:
            self._tracing.add("held by backups", holding, self.task, stamp, self.term, size=value.size_bytes)
        await self._node.while_paused()
        await self._node.point("done", self.task, stamp.epoch)
        self._done_ns = self._tracing.on and clock()
        self._set_report(
            Report(
                stamp,
                self.task,
                self.term,
                done=True,
                version=0,
                sent=attempt.ledger.sent_sum,
                received=attempt.ledger.received_sum,
                finish=attempt.finishing,
                numbers=attempt.numbers,
                previous=replica.previous,
            )
        )

    async def _checkpoint(self, stamp: Stamp) -> None:
        """Begins to write the committed boundary, where it is one to become a checkpoint. Task 0's has all reports."""
        committed = self.replica.boundaries.committed
        if committed is None or committed.stamp.epoch != stamp.epoch:
            return  # undone just now
        if self._writer.due(committed, stateful=self.replica.stateful):
            self._stage = self._writer.stage
            await self._writer.room()
            self._stage = ""
            self._writer.begin(committed.stamp, self.replica.adding_log(committed.value))

    async def _replay(self, recording: Recording, stamp: Stamp) -> None:
        """Strict mode: the epoch again, on a fresh object restored from the boundary."""
        boundary = self.replica.boundaries.committed
        assert boundary is not None
        fresh = self.replica.twin()
        try:
            await check_replay(self.replica, fresh, boundary.value, recording, stamp)
        finally:
            await fresh.tear_down()

    async def _moved(self, stamp: Stamp) -> None:
        """The view shows another stamp: a commit, a restart, or a commit and then restarts."""
        await self._unless_replaced()
        replica, view = self.replica, self._node.keeper.view
        now = view.stamp
        assert now is not None
        if now.epoch > stamp.epoch:
            replica.read_epoch(now.epoch)
        committed = replica.boundaries.committed
        if committed is None or committed.stamp.epoch != now.epoch:
            raise AssertionError(f"task {self.task}: epoch {now.epoch} committed without its boundary")
        if now.attempt > stamp.attempt:
            replica.boundaries.drop_pending()
            self.backups.drop_pending()
            self._stage = "restore"
            await replica.restore(committed.value)
        elif self._attempt is not None:
            replica.previous = dict(self._attempt.numbers)
        self.backups.committed(committed)
        if now.epoch > stamp.epoch:
            self._stage = "on_commit"
            await replica.on_commit(now.epoch - 1, committed.value)
        self._stage = ""

    async def _unless_replaced(self) -> None:
        """Returns at once, or never where another primary was read: the node cancels this one (`Node.reconcile`).

        Its successors may have committed since, by the same view: that their boundary is not here is no mistake then.
        """
        if not self._node.keeper.view.is_primary(self.task, self._node.id, self.term):
            self._stage = "the end of its term: another primary was read"
            await asyncio.Event().wait()

    async def _conclude(self) -> None:
        """The job ended. Where it finished: the result, from the last committed state.

        The node ends this term, once the results were collected. Until then the job may be rolled back, and go on: the
        same transaction makes it a running one again.
        """
        keeper, stamp = self._node.keeper, self._node.keeper.view.stamp
        status, committed = keeper.view.status, self.replica.boundaries.committed
        if status is not None and status.record.state == State.FINISHED:
            assert stamp is not None and committed is not None
            self._stage = "result"
            try:
                value = await self.replica.result()
            except (UserCodeError, TaskGraphError) as error:
                await self._node.fail_job(error, self.task, stamp.epoch, (), finished=True)
            else:
                self.final = (stamp, value)
                keeper.notify_later()
        self._stage = ""
        await keeper.wait_until(lambda view: view.running)

    async def _hand_over_if_wished(self, stamp: Stamp) -> None:
        """Right after a commit: where placement wants another primary, and it is in sync, it takes over now."""
        wish = self._node.wish(self.task)
        if wish is None or wish.primary in (None, self._node.id):
            return
        heir = wish.primary
        assert heir is not None
        view = self._node.keeper.view
        if heir not in view.in_sync(self.task) or heir in self._node.suspects or heir not in view.nodes:
            return
        self._stage = f"hand-over to {self._node.name_of(heir)}"
        settings = self._node.settings
        with contextlib.suppress(TransportError, TimeoutError):
            async with asyncio.timeout(settings.hand_over_s):
                await self._node.router.to_node(
                    heir, HandOver(stamp, self.task, self.term), timeout_s=settings.hand_over_s
                )
                await self._node.keeper.wait_until(lambda v: v.term(self.task) > self.term)
                await asyncio.Event().wait()  # the node ends this term as soon as it sees that view

    async def _fail(self, error: UserCodeError | TaskGraphError, epoch_revision: int) -> None:
        """The job fails with this error, if this is still the task's primary and the epoch is still that one."""
        keys, view = self._node.keeper.view.keys, self._node.keeper.view
        fences = (Compare(keys.primary(self.task), self.revision), Compare(keys.epoch, epoch_revision))
        epoch = view.epoch.record.epoch if view.epoch else None
        if await self._node.fail_job(error, self.task, epoch, fences):
            await self._node.keeper.wait_until(lambda v: not v.running)
        else:
            # A restart or a take-over came first: what happened in a dead attempt counts for nothing.
            await self._node.keeper.wait_until_read(
                lambda v: v.epoch is None or v.epoch.mod_revision != epoch_revision or not v.running
            )

    # -- what others ask --------------------------------------------------------------------------

    async def attempt_at(self, stamp: Stamp) -> Attempt:
        """The attempt at `stamp`, as soon as it began; the view has reached that stamp already."""
        while self._attempt is None or self._attempt.stamp < stamp:
            if self._ended:
                raise Refused(Reason.NOT_PRIMARY, f"the primary of task {self.task} in term {self.term} stepped down")
            self._attempt_changed.clear()
            await self._attempt_changed.wait()
        return self._attempt

    @property
    def attempt(self) -> Attempt | None:
        return self._attempt

    @property
    def waiting_for(self) -> str:
        """What the primary itself waits for outside user code, for `status`."""
        return self._stage or self.backups.blocked

    def waits(self, stamp: Stamp) -> tuple[Wait, ...]:
        """What the attempt at `stamp` waits for, and what the primary itself waits for outside user code."""
        attempt = self._attempt
        found = attempt.waits() if attempt is not None and attempt.stamp == stamp and not attempt.cancelled else ()
        if self.waiting_for:
            since_s = self._node.now() - self._epoch_began
            found += (Wait("", "outside", self.task, self.waiting_for, since_s),)
        return found

    def tell(self, event: Event) -> None:
        """Hands an event to the user's object; what that raises fails the job."""
        if self._group is not None:
            self._group.create_task(self._tell_event(event))

    async def _tell_event(self, event: Event) -> None:
        view = self._node.keeper.view
        fence = view.epoch.mod_revision if view.epoch else 0
        try:
            await self.replica.tell(event)
        except UserCodeError as error:
            await self._fail(error, fence)

    # -- reports to the leader --------------------------------------------------------------------

    def _report_idle(self, stamp: Stamp, idle: Idle) -> None:
        self._set_report(
            Report(
                stamp,
                self.task,
                self.term,
                done=False,
                version=idle.version,
                sent=idle.sent,
                received=idle.received,
                previous=self.replica.previous,
            )
        )

    def _set_report(self, report: Report) -> None:
        self._reporter.set(report)

    async def _tell(self, request: RequestRestart) -> None:
        await self._node.router.to_primary(0, lambda: request, timeout_s=self._node.settings.call_s)

    def check_terms(self) -> None:
        """The view changed: an attempt that rests on a gone primary's acknowledgement cannot be completed."""
        attempt = self._attempt
        if attempt is None or attempt.cancelled:
            return
        view = self._node.keeper.view
        for task, term in attempt.mailbox.terms.items():
            if view.term(task) > term:
                self._ask_restart(attempt.stamp, f"task {task} lost a primary that took a message of task {self.task}")
                return

    def _ask_restart(self, stamp: Stamp, why: str) -> None:
        if (stamp, why) in self._restart_asked or self._group is None:
            return
        self._restart_asked = {(stamp, why)}
        self._group.create_task(self._tell(RequestRestart(stamp, self.task, why)))


def _moved_on(stamp: Stamp, view: JobView) -> bool:
    return view.stamp != stamp or not view.running


def _pass_on_failure(waiting: asyncio.Future[None], work: asyncio.Task[None]) -> None:
    """Whoever waits for the view learns that the work failed; where the view moved first, nobody minds."""
    if not work.cancelled() and (error := work.exception()) is not None and not waiting.done():
        waiting.set_exception(error)
