"""A task's primary for one term: from the boundary it took over, epoch after epoch, to the job's result.

    begin (restore, or first snapshot) ──► attempt ──► all members hold the snapshot ──► report to the leader
                                             ▲                                              │
                                             │ restart: restore            epoch read as committed: on_commit,
                                             └──────────────────────────── handover if placement wishes for one

The term ends when the view shows another primary or the node ends: the node then cancels `run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from taskgraph.errors import CheckpointError, GraphError, Refused, TaskGraphError, TransportError
from taskgraph.node.epochs.attempt import Attempt
from taskgraph.node.epochs.attempts import Attempts
from taskgraph.node.epochs.lanes import EpochLanes
from taskgraph.node.epochs.pulls import Pulls
from taskgraph.node.epochs.strict import StrictMode
from taskgraph.node.epochs.unsaved import UnsavedStateCheck
from taskgraph.node.primary.backups import Backups
from taskgraph.node.primary.checkpoint_writer import CheckpointWriter
from taskgraph.node.primary.reporter import Reporter
from taskgraph.node.primary.shared_state import SharedStateAccess
from taskgraph.node.snapshots import empty_snapshot
from taskgraph.node.usercode.errors import StuckError, UserCodeError, cuda_error
from taskgraph.protocol.boundaries import Boundary
from taskgraph.protocol.insync import InSyncSet
from taskgraph.protocol.kv import Compare
from taskgraph.protocol.messages import Call, Encoded, HandOver, Reason, Reply, Report, RequestRestart, Stamp, Wait
from taskgraph.protocol.records import EpochRecord, JobStatus, PrimaryRecord, name_of
from taskgraph.protocol.sums import encode_sum
from taskgraph.protocol.transactions import TakeoverResult
from taskgraph.protocol.view import JobView, Versioned, holds
from taskgraph.task import BecamePrimary

if TYPE_CHECKING:
    from taskgraph.node.replica import Replica
    from taskgraph.node.services import NodeServices
    from taskgraph.task import Event

__all__ = ["Primary"]

_SHORT_S = 1.0
"""Pause before a call is repeated that a node had no memory for: each try may send the whole value."""
_MOST_DOUBLED = 6
"""Waits for memory back off exponentially: `_SHORT_S` doubles this often, to a minute."""


class Primary:
    """A task's primary in one term."""

    def __init__(self, node: NodeServices, replica: Replica, taken: TakeoverResult) -> None:
        self.node = node
        self.replica = replica
        self.task = replica.task
        self.term = taken.term
        self.revision = taken.revision
        self.took_over_at = Stamp(taken.attempt, taken.epoch)
        """The attempt and epoch at work when the takeover was written."""
        # A node that was evicted before the committed boundary does not have it. Evicting it again, "until" this
        # epoch, would make it a possible successor. `Backups` deletes its key.
        others = {n: m for n, (_, m) in taken.members.items() if n != node.id}
        at = EpochRecord(epoch=taken.epoch, attempt=taken.attempt, lineage=taken.lineage)
        insync = InSyncSet(
            [n for n, m in others.items() if m.until is None],
            marked=[n for n, m in others.items() if m.until is not None and holds(m, at)],
        )
        self.backups = Backups(
            node, replica, term=taken.term, epoch=taken.epoch, primary_revision=taken.revision, insync=insync
        )
        self.strict = StrictMode(replica, node.log)
        self.shared = SharedStateAccess(node, replica, taken.term)
        self.unsaved = UnsavedStateCheck(node, replica, taken.term)
        self.attempts = Attempts(node.keeper, replica.task, taken.term)
        settings = node.settings
        ahead = 1 if settings.strict else max(1, settings.epochs_ahead)
        self.pulls = Pulls(node.router, ahead=ahead, epochs=replica.job.epochs)
        self._lanes: EpochLanes | None = None  # of the attempt at work
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self._began = node.now()
        self._moving: asyncio.Future[None] | None = None
        self.reporter = Reporter(node, leads=replica.task == 0)
        self._restart_asked: set[tuple[Stamp, str]] = set()
        self._not_copied: set[Stamp] = set()  # attempts of one epoch that another node's device error ended
        self._short: dict[Stamp, float] = {}  # when memory began to lack, without a commit since
        self._memory_waits: dict[
            tuple[Stamp, str], str
        ] = {}  # calls of this attempt that wait for memory -> the node without
        self._group: asyncio.TaskGroup | None = None
        self.stage = "setup"
        self.writer = CheckpointWriter(node, self.task)
        self._lineage = taken.lineage
        self.began_thinned = False
        """True if reports were already thinned at the takeover: an earlier leader has said so."""
        self.final: tuple[Stamp, Encoded | None] | None = None  # after the last commit
        self.lasted_s = 0.0
        """Seconds from this node's start until `final` was there."""

    # -- life -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Works until cancelled. Errors of user code fail the job; raises StuckError, which ends the node."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self.backups.run(), name=f"backups of task {self.task}")
                group.create_task(self.reporter.run(), name=f"reports of task {self.task}")
                if self.node.spec.checkpoint is not None:
                    group.create_task(self.writer.write(), name=f"checkpoints of task {self.task}")
                    group.create_task(self.writer.report(), name=f"reports of checkpoint files of task {self.task}")
                await self._work()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._group = None
            self.attempts.refuse_waiting_calls()

    async def _work(self) -> None:
        """Begins the term, then works through attempts, roll-backs and the job's end, until cancelled."""
        keeper = self.node.keeper
        await keeper.wait_for_revision(self.revision)
        await self._begin_with_retries()
        while True:
            if not keeper.view.running:
                await self._conclude()
                continue
            if self._was_rolled_back():
                await self._roll_back()
                continue
            self.final = None
            await self._restore_until_moved_on(await self._run_attempt())

    async def _begin_with_retries(self) -> None:
        """Calls `_begin`, with retries after errors that did not fail the job: no unrestored object may compute."""
        keeper = self.node.keeper
        while True:
            fence = keeper.view.epoch.mod_revision if keeper.view.epoch else 0
            try:
                return await self._begin()
            except (UserCodeError, TaskGraphError) as error:
                if not await self._fail(error, fence, finished=True):
                    await self.node.short_pause()
            await keeper.wait_until(lambda _: self._can_affect_job())

    async def _restore_until_moved_on(self, at: Stamp) -> None:
        """Follows the view, which has moved on from `at`, and restores the user's object; tries again after an error
        that does not fail the job.
        """
        keeper = self.node.keeper
        while keeper.view.stamp != at and not self._was_rolled_back() and self._can_affect_job():
            try:
                await self._follow_view(at)
                return
            except (UserCodeError, TaskGraphError) as error:
                if not await self._fail(error, finished=True):
                    await self.node.short_pause()

    async def _begin(self) -> None:
        """Sets up and restores the user's object, calls its `on_commit` and `on_event`; makes a missing boundary 0."""
        replica, self.stage = self.replica, "setup"
        await replica.set_up()
        if replica.actor.abandoned:
            raise StuckError(f"code of task {self.task} of an earlier term has not returned")
        await self._stop_if_replaced()
        await self.shared.find_keeper()
        replica.user_task.primary = True
        at, boundary = await self._first_boundary()
        self.began_thinned = self.term > 1 and replica.log.is_thinned
        self.stage = "restore"
        await replica.restore(boundary)
        self.backups.set_committed(boundary)
        if at.epoch > 0:
            self.stage = "on_commit"
            await replica.on_commit(at.epoch - 1, boundary)
            self._check_term()
        self.stage = "on_event"
        await replica.notify(BecamePrimary(term=self.term))
        self._check_term()
        self.stage = ""

    async def _first_boundary(self) -> tuple[EpochRecord, Boundary]:
        """Returns the `epoch` record, and the committed boundary that it names, with its shared state."""
        replica = self.replica
        while True:
            view = self.node.keeper.view
            assert view.epoch is not None
            # Without this task no epoch can have committed since the takeover, but the job may have been rolled back.
            at = view.epoch.record
            self._lineage = at.lineage
            replica.follow(at)
            boundary = replica.boundaries.committed
            if boundary is None or boundary.stamp.epoch != at.epoch:
                boundary = await self._recover_boundary(at)
            whole = await self.shared.complete(boundary, at.lineage)
            if whole is not None:
                return at, whole
            await self._stop_if_replaced()

    async def _recover_boundary(self, at: EpochRecord) -> Boundary:
        """Returns the committed boundary, which no replica has: read from the checkpoint; in epoch 0, and for a task
        without state, a snapshot of the object as `setup` left it.

        Raises:
            CheckpointError: the task has state, which the checkpoint lacks or which cannot be read.
        """
        replica, boundary = self.replica, None
        if at.epoch > 0 and (replica.holds_state or self.task == 0):
            self.stage = f"its file of the checkpoint of epoch {at.epoch}"
            try:
                boundary = await self.node.checkpoints.boundary_of(self.task, self.term)
            except CheckpointError as error:
                if replica.holds_state:
                    raise
                # Without state, task 0's file has only the numbers of earlier epochs: no reason to fail the job.
                why = f"{error}; what was reported before epoch {at.epoch} may be missing in the result"
                self.node.events.emit("checkpoint refused", why, task=self.task, epoch=at.epoch)
            finally:
                self.stage = ""
        if boundary is None:
            if at.epoch > 0 and replica.holds_state:
                if not self.node.keeper.view.is_checkpointed:
                    raise AssertionError(f"task {self.task}: a member without boundary {at.epoch} took over")
                raise CheckpointError(
                    f"the checkpoint of epoch {at.epoch} in {self.node.checkpoints.store} has no state of task "
                    f"{self.task}: the task had none when that was written, and has some now. Go back to a driver "
                    f"whose task {self.task} has none, or start from the beginning (--fresh, fresh=True)"
                )
            if at.epoch > 0 and replica.stateful:  # its state is all shared, and `setup` made that of boundary 0
                made = empty_snapshot(self.task)
            else:
                made = await replica.snapshot({}, {})
            boundary = Boundary(Stamp(at.attempt, at.epoch), self.term, made.value, shared=made.shared)
        log = await replica.read_reports(boundary.value)
        if replica.boundaries.store(boundary, committed=True):  # else it was undone meanwhile
            replica.log.fold(log)
        self.node.keeper.notify_later()  # other tasks may wait for the shared state in it
        return boundary

    def _was_rolled_back(self) -> bool:
        """True if the view shows a roll-back that this primary has not followed yet."""
        epoch = self.node.keeper.view.epoch
        return epoch is not None and epoch.record.lineage > self._lineage

    async def _roll_back(self) -> None:
        """Restores the checkpoint that the job went back to, since a task had lost all its replicas."""
        await self._stop_if_replaced()
        view, replica = self.node.keeper.view, self.replica
        assert view.epoch is not None
        at, fence = view.epoch.record, view.epoch.mod_revision
        replica.follow(at)
        try:
            boundary = await self.shared.complete(await self._recover_boundary(at), at.lineage)
            if boundary is None:
                return  # rolled back once more
            self.stage = "restore"
            await replica.restore(boundary)
        except (UserCodeError, TaskGraphError) as error:
            await self._fail(error, fence)  # unless that is moot by now: then it is tried again
            return
        self.stage = ""
        self._lineage = at.lineage
        if not self._was_rolled_back():
            self.backups.roll_back(boundary)

    async def _run_attempt(self) -> Stamp:
        """Works on epochs until the attempt ends: by a restart, a roll-back, or the end of the job.

        Returns:
            The stamp that was at work when the attempt ended.
        """
        keeper = self.node.keeper
        at = keeper.view.stamp
        assert at is not None
        lanes = self._lanes = EpochLanes(self, at, self._pass_report_error)
        work = asyncio.get_running_loop().create_task(lanes.run())
        work.add_done_callback(self._pass_work_error)
        try:
            while True:
                await self._wait_until_moved(at, work)
                view = keeper.view
                if (
                    not view.running
                    or view.stamp is None
                    or view.stamp.attempt != at.attempt
                    or self._was_rolled_back()
                ):
                    return at
                try:
                    lanes.note_settled(await self._follow_view(at))  # epochs were committed, and the attempt goes on
                except (UserCodeError, TaskGraphError) as error:
                    await self._fail(error, finished=True)
                at = Stamp(at.attempt, lanes.settled)
        finally:
            self.attempts.drop()
            self.pulls.drop()
            lanes.over = True
            try:
                if not work.done():
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
            finally:
                try:
                    await lanes.end()  # also where this is cancelled once more
                finally:
                    self._lanes = None
                    self._memory_waits.clear()
                    self.reporter.forget()
                    # Also at the end of the term: else the node would go on beside that thread.
                    if not work.cancelled() and isinstance(stuck := work.exception(), StuckError):
                        raise stuck
                    if lanes.stuck is not None and self._can_affect_job():
                        raise lanes.stuck

    async def _wait_until_moved(self, at: Stamp, work: asyncio.Task[None]) -> None:
        """Waits until the view shows another stamp than `at` or the end of the job, or the work fails."""
        keeper, lanes, moved = self.node.keeper, self._lanes, partial(_has_moved_on, at)
        moving = self._moving = keeper.begin_wait(moved)
        if work.done():
            self._pass_work_error(work)
        if lanes is not None and lanes.report_error is not None:
            self._pass_report_error()
        try:
            await moving
        except (UserCodeError, TaskGraphError) as error:
            if moved(keeper.view):
                return  # a restart came first: errors of an ended attempt do not count
            replaced = keeper.view.term_changed(in_attempt=self.node.settings.epochs_ahead > 0)
            if replaced and cuda_error(error) is None:
                # A replaced primary may have taken messages that this attempt knows nothing of. If it is a mistake
                # of the job, it comes again in the next attempt, in which no primary was replaced.
                self.ask_restart(at, f"task {self.task} failed after a primary was replaced: {error}")
            else:
                await self._fail(error)
            await keeper.wait_until(moved)
        finally:
            moving.cancel()

    def _pass_work_error(self, work: asyncio.Task[None]) -> None:
        """Passes an error of the work to the waiting attempt. A later epoch's error of user code waits until that
        epoch is at work, since it may be undone: `_wait_until_moved` checks again.
        """
        moving, lanes = self._moving, self._lanes
        if work.cancelled() or moving is None or moving.done() or lanes is None:
            return
        error = work.exception()
        assert error is not None, "it ends only by being cancelled"
        if lanes.failed_in == lanes.settled or not isinstance(error, UserCodeError | TaskGraphError):
            moving.set_exception(error)

    def _pass_report_error(self) -> None:
        """Passes the error that kept an epoch from being reported, though its code had run, to the waiting attempt."""
        error = self._lanes.report_error if self._lanes is not None else None
        if error is not None and self._moving is not None and not self._moving.done():
            self._moving.set_exception(error)

    def _can_affect_job(self) -> bool:
        """True while user code of this task can still affect the job: the job runs, or its result is wanted."""
        status = self.node.keeper.view.status
        return status is not None and status.record.state in (JobStatus.RUNNING, JobStatus.FINISHED)

    async def _follow_view(self, stamp: Stamp) -> int:
        """Follows the view, which shows another stamp: commits, a restart, or both.

        Returns:
            The epoch at work by then.
        """
        replica, view = self.replica, self.node.keeper.view
        if not view.is_primary(self.task, self.node.id, self.term):
            await self._stop_if_replaced()
        now, boundaries = view.stamp, replica.boundaries
        assert now is not None
        committed = boundaries.committed
        if committed is None or committed.stamp.epoch != now.epoch:  # the node has not followed the view yet
            replica.set_committed_epoch(now.epoch)
            committed = boundaries.committed
        if committed is None or committed.stamp.epoch != now.epoch:
            raise AssertionError(f"task {self.task}: epoch {now.epoch} committed without its boundary")
        # Before anything is awaited: a node that is admitted meanwhile has to hold this boundary, not an earlier one.
        self.backups.set_committed(committed, goes_on=now.attempt == stamp.attempt)
        self.reporter.forget(before=now.epoch)
        self.attempts.drop_before(now.epoch)
        if now.attempt > stamp.attempt:
            boundaries.drop_pending()
            self.backups.drop_pending()
            self.stage = "restore"
            await replica.restore(committed)
        if now.epoch > stamp.epoch and "on_commit" in replica.shape.overrides:
            self.stage = "on_commit"
            await replica.on_commit(now.epoch - 1, committed)
            self._check_term()
        self.stage = ""
        return now.epoch

    async def _stop_if_replaced(self) -> None:
        """Waits for ever if the view shows that this term has ended, until `Reconciler.reconcile` cancels the primary.

        Called after waits, before more user code runs: code of an ended term must not run beside its successor's.
        """
        if not self.node.keeper.view.is_primary(self.task, self.node.id, self.term):
            self.stage = "the end of its term: another primary was read"
            await asyncio.Event().wait()

    def _check_term(self) -> None:
        """Cancels the caller if the term is over: user code may have swallowed the only cancellation.

        Raises:
            CancelledError: the view shows another primary.
        """
        if not self.node.keeper.view.is_primary(self.task, self.node.id, self.term):
            raise asyncio.CancelledError

    async def _conclude(self) -> None:
        """Computes the result if the job has finished, then waits until the job runs again; hands the task over if this
        node drains.

        The term goes on until the results are collected: a roll-back may make the job run again before that.
        """
        await self._stop_if_replaced()
        keeper, stamp = self.node.keeper, self.node.keeper.view.stamp
        status, committed = keeper.view.status, self.replica.boundaries.committed
        if status is not None and status.record.state == JobStatus.FINISHED:
            assert stamp is not None and committed is not None
            self.stage = "result"
            try:
                if (
                    self.attempts.latest is not None and self.attempts.latest >= stamp
                ):  # it was ahead of the last commit
                    await self.replica.restore(committed)
                value = await self.replica.result()
                if self.node.settings.strict:
                    await self.strict.check_result(committed, value)
            except (UserCodeError, TaskGraphError) as error:
                await self.node.fail_job(error, self.task, None, (), finished=True)  # of no epoch: after the last
            else:
                self.final = (stamp, value)
                self.lasted_s = self.node.now() - self.node.started_at
                keeper.notify_later()
        self.stage = ""
        while not keeper.view.running:
            await keeper.wait_until(
                lambda view: view.running or (view.has_work and self._successor_if_draining() is not None)
            )
            if not keeper.view.running and stamp is not None:
                await self.hand_over_if_wished(stamp)
                await self.node.short_pause()

    def _successor_if_draining(self) -> str | None:
        """Returns the successor of a draining node; None: no successor. A finished job moves for no other reason:
        `result()` runs again.
        """
        return self._wished_successor() if self.node.draining else None

    def _wished_successor(self) -> str | None:
        """Returns the other node that placement wishes for as primary; None: there is none, or it cannot take
        over now.
        """
        wish, view = self.node.wish(self.task), self.node.keeper.view
        successor = wish.primary if wish is not None else None
        if successor is None or successor == self.node.id:
            return None
        able = successor in view.in_sync(self.task) and successor not in self.node.suspects and successor in view.nodes
        return successor if able else None

    async def hand_over_if_wished(self, stamp: Stamp) -> None:
        """Hands the task over right after a commit, if placement wishes for another primary that is in sync."""
        self.stage = ""
        successor = self._wished_successor()
        if successor is None:
            return
        self.stage = f"hand-over to {name_of(successor)}"
        settings = self.node.settings
        with contextlib.suppress(TransportError, TimeoutError):
            async with asyncio.timeout(settings.hand_over_s):
                await self.node.router.to_node(
                    successor, HandOver(stamp, self.task, self.term), timeout_s=settings.hand_over_s
                )
                await self.node.keeper.wait_until(lambda v: v.term(self.task) > self.term)
                await asyncio.Event().wait()  # the node ends this term as soon as it sees that view
        self.stage = ""

    async def _fail(
        self,
        error: UserCodeError | TaskGraphError,
        epoch_revision: int | None = None,
        *,
        epoch: int | None = None,
        finished: bool = False,
    ) -> bool:
        """Fails the job, fenced by this primary's term and the epoch.

        Args:
            epoch_revision: revision of the epoch in which the error was raised; None: the one in the view.
            epoch: the epoch to name, if it is an earlier one.
            finished: True to fail also a job whose epochs are all committed (after a commit, or at a takeover).

        Returns:
            False if a restart, a takeover or another end of the job came first.

        Raises:
            CancelledError: as `_check_term`.
        """
        keys, view = self.node.keeper.view.keys, self.node.keeper.view
        if epoch_revision is None:
            epoch_revision = view.epoch.mod_revision if view.epoch else 0
        fences = (Compare(keys.primary(self.task), self.revision), Compare(keys.epoch, epoch_revision))
        if epoch is None and view.epoch and view.running:  # after the last epoch
            epoch = view.epoch.record.epoch
        if await self.node.fail_job(error, self.task, epoch, fences, finished=finished):
            await self.node.keeper.wait_until(lambda v: not v.running)
            return True
        self.node.log.info("task %d: an error did not count, since the job had moved on: %s", self.task, error)
        self._check_term()
        await self.node.keeper.wait_until_read(
            lambda v: v.epoch is None or v.epoch.mod_revision != epoch_revision or not v.running
        )
        return False

    # -- for other parts of the node --------------------------------------------------------------

    @property
    def attempt(self) -> Attempt | None:
        """The attempt that began last; None if it is over, or none has begun."""
        return self.attempts.of(self.attempts.latest) if self.attempts.latest is not None else None

    def note_job_ends(self) -> None:
        if self._lanes is not None:
            self._lanes.finishing = True

    def adapt_share(self) -> None:
        """Adapts the share of memory to the number of primaries on the node."""
        if self._lanes is not None:
            self._lanes.adapt_share()

    @property
    def waiting_for(self) -> str:
        """What the primary waits for outside user code, for `status`; "": nothing."""
        lacking = self._lanes.lacking if self._lanes is not None else ""
        memory = next(iter(self._memory_waits.values()), "")
        # It may lack what itself would report, were it done.
        return self.shared.stage or self.stage or memory or self.backups.blocked_by or lacking

    def waits(self, stamp: Stamp) -> tuple[Wait, ...]:
        """Names what the attempt at `stamp`, and the primary outside user code, wait for."""
        attempt = self.attempts.of(stamp)
        found = attempt.waits() if attempt is not None and not attempt.cancelled else ()
        if self.waiting_for:
            since_s = self.node.now() - (self._lanes.began if self._lanes is not None else self._began)
            found += (Wait("", "outside", self.task, self.waiting_for, since_s),)
        return found

    def notify(self, event: Event) -> None:
        """Passes an event to the user's object; an error there fails the job."""
        if self._group is not None:
            self._group.create_task(self._call_on_event(event))

    async def _call_on_event(self, event: Event) -> None:
        """Calls `on_event`. An error in it fails the job, or is logged if the job or the term has ended."""
        keeper = self.node.keeper
        try:
            await self.replica.notify(event)
        except UserCodeError as error:
            # An error in on_event belongs to no epoch: commits meanwhile change nothing about it.
            while keeper.view.running and keeper.view.is_primary(self.task, self.node.id, self.term):
                if await self._fail(error):
                    return
            self._log_outdated_error(error)

    def _log_outdated_error(self, error: Exception) -> None:
        self.node.log.warning("task %d: %s, after the job ended, or another took over", self.task, error)

    def fail_for_late_message(self, attempt: Attempt, error: GraphError) -> None:
        if self._group is not None:
            self._group.create_task(self._fail_until_recorded(attempt, error))
        elif self._may_still_count(attempt):
            self._log_outdated_error(error)

    async def _fail_until_recorded(self, attempt: Attempt, error: GraphError) -> None:
        """Fails the job, with retries, while the epoch of the attempt may still count and this is the task's
        primary.
        """
        keeper = self.node.keeper
        while self._may_still_count(attempt):
            if not (keeper.view.running and keeper.view.is_primary(self.task, self.node.id, self.term)):
                return self._log_outdated_error(error)
            if await self._fail(error, epoch=attempt.number):
                return

    def _may_still_count(self, attempt: Attempt) -> bool:
        """True if the epoch of an attempt is committed or may still be; an undone epoch sends its messages again."""
        epoch = self.node.keeper.view.epoch
        if epoch is None or epoch.record.lineage > attempt.attempt:
            return False
        return attempt.committed or epoch.record.attempt == attempt.attempt

    # -- reports to the leader --------------------------------------------------------------------

    def report_idle(self, attempt: Attempt, version: int) -> None:
        self.reporter.send_or_gather(
            Report(
                attempt.stamp,
                self.task,
                self.term,
                done=False,
                version=version,
                sent=encode_sum(attempt.ledger.sent_sum),
                received=encode_sum(attempt.ledger.received_sum),
                previous=self.replica.previous,
            )
        )

    async def _request_restart(self, request: RequestRestart) -> None:
        """Sends a request to the leader, and to each later one, until the attempt is over: a leader may die."""
        keeper = self.node.keeper
        while not _is_over(request.stamp, keeper.view):
            leader = keeper.view.primaries.get(0)
            await self.node.router.to_primary(0, lambda: request, timeout_s=self.node.settings.call_s)
            await keeper.wait_until(partial(_is_over_or_leader_changed, request.stamp, leader))

    def restart_if_acknowledger_replaced(self) -> None:
        """Asks for a restart if a primary that acknowledged a flag or request of an attempt here was replaced."""
        view = self.node.keeper.view
        for attempt in self.attempts:
            for task, term in attempt.depends_on.items():
                if view.term(task) > term and not attempt.cancelled:
                    lost = f"task {task} lost a primary that took a message of task {self.task}"
                    self.ask_restart(attempt.stamp, lost)
                    return

    async def call(self, stamp: Stamp, to: int, message: Callable[[], Call], what: str, lost: str) -> Reply:
        """Calls the primary of a task for an attempt, with retries; see `PrimaryInterface.call`."""
        again = False
        while True:
            try:
                reply = await self.node.router.to_primary(to, message)
            except Refused as refused:
                if refused.reason == Reason.NOT_OFFERED:
                    raise
                again = await self._wait_for_memory(stamp, refused, what)
                if not again:
                    self._restart_after_refusal(stamp, refused, f"{lost}: {refused}")
                    await asyncio.Event().wait()  # until the restart cancels this attempt
            else:
                if again:  # else another call of that name waits
                    self._memory_waits.pop((stamp, what), None)
                return reply

    async def _wait_for_memory(self, stamp: Stamp, refused: Refused, what: str) -> bool:
        """Returns True, after a pause, if the same attempt is to repeat a refused call; False: it is not.

        Only memory is waited for: for 0 s in the first attempt that lacks it, then for 1 s, 2 s, 4 s.
        """
        if refused.reason != Reason.NO_MEMORY:
            return False
        now, at = self.node.now(), self.node.keeper.view.stamp
        self._short = {of: since for of, since in self._short.items() if at is None or of.epoch >= at.epoch}
        since = self._short.setdefault(stamp, now)
        before = len({of.attempt for of in self._short} - {stamp.attempt})
        patience_s = _SHORT_S * 2 ** min(before - 1, _MOST_DOUBLED) if before else 0.0
        if now - since >= patience_s:
            return False
        self._memory_waits[stamp, what] = f"memory for {what}: {refused}"
        await asyncio.sleep(_SHORT_S)
        return True

    def _restart_after_refusal(self, stamp: Stamp, refused: Refused, why: str) -> None:
        """Asks for a restart of the epoch, since a call of this attempt was refused and is not tried again.

        Raises:
            TaskGraphError: the call would be refused in each attempt, or device errors came in too many of them.
        """
        again = refused.reason == Reason.NOT_COPIED
        if refused.reason == Reason.DEVICE_ERROR:
            # If the device is harmed, the task's code there fails in the next attempt, and its process ends. An error
            # that did no harm comes again in each attempt.
            self._not_copied = {at for at in self._not_copied if at.epoch == stamp.epoch} | {stamp}
            again = len(self._not_copied) > self.node.settings.device_failures
        if again:
            raise TaskGraphError(f"epoch {stamp.epoch}: {why}") from refused
        self.ask_restart(stamp, why)

    def ask_restart(self, stamp: Stamp, why: str) -> None:
        """Begins to ask the leader for a restart of the epoch; once for each attempt and reason."""
        if (stamp, why) in self._restart_asked or self._group is None:
            return
        self._restart_asked = {asked for asked in self._restart_asked if asked[0].attempt == stamp.attempt}
        self._restart_asked.add((stamp, why))
        self._group.create_task(self._request_restart(RequestRestart(stamp, self.task, why)))


def _is_over(stamp: Stamp, view: JobView) -> bool:
    """True if the epoch at `stamp` needs no restart: it is committed, or its attempt is over."""
    at = view.stamp
    return at is not None and (at.attempt != stamp.attempt or at.epoch > stamp.epoch)


def _is_over_or_leader_changed(stamp: Stamp, leader: Versioned[PrimaryRecord] | None, view: JobView) -> bool:
    """True if `_is_over`, or the view has another primary of task 0 than `leader`."""
    return view.primaries.get(0) is not leader or _is_over(stamp, view)


def _has_moved_on(stamp: Stamp, view: JobView) -> bool:
    """Returns True if the view shows another stamp than this one, or the end of the job."""
    now = view.stamp  # identity first: each commit makes a new stamp, and this is asked often
    return (now is not stamp and now != stamp) or not view.running
