"""The epochs that a primary works on in one attempt of the job: one after another, or several in flight.

Each epoch runs in a lane: attempt, snapshot, boundary, report to the leader. Most tasks have one lane. A task whose
`compose` is `@tg.stateless` has `Settings.epochs_in_flight` lanes, which take the epochs in turns. Epochs begin, are
snapshotted and are reported in their order. In between, stateless code of a later epoch may run before code of an
earlier one.

    begins (`_may_begin`) -> runs (`Attempt`) -> snapshot -> boundary complete -> acknowledged by members -> reported
                                                 (`incomplete`)                  (`awaiting_acks`)
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from taskgraph.epoch import AttemptEnded
from taskgraph.errors import TaskGraphError
from taskgraph.node.epochs import epoch_memory
from taskgraph.node.epochs.attempt import Attempt
from taskgraph.node.epochs.epoch_memory import EPOCH_BYTES, EpochAllowance
from taskgraph.node.epochs.finishing import FinishedEpoch, FinishQueue
from taskgraph.node.epochs.turns import EpochTurns
from taskgraph.node.reports import to_plain
from taskgraph.node.snapshots import Snapshot, shared_digest
from taskgraph.node.usercode.errors import StuckError, UserCodeError, cancelled_by_user_error, cuda_error
from taskgraph.observe.trace import clock
from taskgraph.protocol.boundaries import Boundary
from taskgraph.protocol.messages import Report, Stamp, stamp_of
from taskgraph.protocol.numbers import compact
from taskgraph.protocol.sums import encode_sum
from taskgraph.shape import is_stateless

if TYPE_CHECKING:
    from taskgraph.graph.compose import Graph
    from taskgraph.node.primary.primary import Primary
    from taskgraph.node.reports import Rows

__all__ = ["EpochLanes"]


class EpochLanes:
    """The work of one primary from a committed epoch until a restart, a roll-back or the job's end: its epochs, each in
    an `Attempt`. The primary then cancels `run`, and calls `end`.

    Args:
        at: the first epoch, and the attempt.
        on_report_error: called if an epoch whose code has run cannot be reported; `report_error` then has the error.
    """

    # Attributes of an object with more than 30 are in a dictionary, unless there are slots.
    __slots__ = (
        "_ahead",
        "_at",
        "_checkpoints",
        "_checks",
        "_count",
        "_end",
        "_epoch_bytes",
        "_graph",
        "_has_several",
        "_injects",
        "_keeper",
        "_last_snapshot",
        "_leaves_device",
        "_loop",
        "_may_stay",
        "_next",
        "_node",
        "_placement",
        "_primary",
        "_replica",
        "_reported",
        "_reported_at",
        "_room",
        "_share",
        "_state_bytes",
        "_state_stays",
        "_task",
        "_term",
        "_tracing",
        "_turns",
        "awaiting_acks",
        "began",
        "failed_in",
        "finishing",
        "incomplete",
        "lacking",
        "over",
        "settled",
        "stuck",
    )

    def __init__(self, primary: Primary, at: Stamp, on_report_error: Callable[[], None]) -> None:
        self._primary = primary
        self._node = primary.node
        self._replica = primary.replica
        self._task = primary.task
        self._term = primary.term
        self._tracing = primary.node.tracing
        self._keeper = primary.node.keeper
        self._placement = primary.node.placement
        self._injects = primary.node.injects
        self._at = at
        self._loop = asyncio.get_running_loop()
        self._count = _lane_count(primary)
        self._has_several = self._count > 1
        self._checks = primary.node.settings.strict or primary.unsaved.begin_attempt()
        shape, settings, epochs = primary.replica.shape, primary.node.settings, primary.replica.job.epochs
        # A seal and a call of `on_commit` belong to a committed epoch; strict mode replays the epoch at work.
        alone = settings.strict or shape.receives or "on_commit" in shape.overrides
        self._ahead = 0 if alone else settings.epochs_ahead
        self._end = sys.maxsize if epochs is None else epochs
        self._checkpoints = primary.node.spec.checkpoint is not None
        marked = shape.in_flight and "on_event" not in shape.overrides
        self._may_stay = (marked or not shape.stateful) and not settings.strict
        self._replica.constant_graph, self._replica.graph_may_be_constant = (
            None,
            shape.in_flight and not settings.strict,
        )
        self._graph: Graph | None = None  # of the last epoch
        self._state_stays = False  # an epoch of that graph leaves the state as it is
        self._last_snapshot: Snapshot | None = None  # if it may be used again: it carries no reports
        self._state_bytes = 0  # of the last snapshot
        self.settled = at.epoch
        """The number of the last committed boundary of which the primary has done all that follows from the commit."""
        self.failed_in = -1
        """The epoch that failed; -1: none."""
        self.over = False
        """Set before `run` is cancelled: other cancellations are mistakes of user code."""
        self.stuck: BaseException | None = None
        """The StuckError of a thread that did not return, if `run` raises another error; None: there is none."""
        self.lacking = ""
        """What the oldest incomplete boundary waits for, in words; "": nothing."""
        self.began = self._loop.time()
        """When the newest epoch began (loop time)."""
        self._room = asyncio.Event()  # cleared while a lane waits until it may begin
        self._room.set()
        self._next = at.epoch  # the first epoch that has not begun
        self._turns = EpochTurns(at.epoch)  # of snapshots
        self._reported = EpochTurns(at.epoch)  # of reports
        self._reported_at = 0  # when the last one was sent, if traced
        self.finishing = False
        """An epoch asked for the end of the job: no further epoch begins."""
        self._epoch_bytes: int | None = None  # of items and snapshot of the last epoch
        self._share = EpochAllowance(primary.node.epoch_memory, self._ahead, at.epoch, self._set_ahead)
        self._leaves_device = False  # the last snapshot was on a device
        self.incomplete = FinishQueue(self._complete, on_report_error)
        self.awaiting_acks = FinishQueue(self._await_acks, on_report_error)

    def note_settled(self, epoch: int) -> None:
        """Notes that an epoch has committed, and that the primary has done all that follows; lanes may begin epochs
        now.
        """
        self.settled = epoch
        if epoch > self._share.until:
            self._share.begin_period(self._turns.at)
        self._room.set()

    async def end(self) -> None:
        """Ends the work that `run` has left, since the attempt is over.

        Raises:
            StuckError: a thread does not return.
        """
        try:
            await self.incomplete.end()
        finally:
            try:
                await self.awaiting_acks.end()
            finally:
                self._share.give_back_share()

    @property
    def report_error(self) -> BaseException | None:
        """The error by which an epoch could not be reported though its code had run; None: no error."""
        return self.incomplete.error or self.awaiting_acks.error

    # -- one epoch after another ------------------------------------------------------------------

    def run(self) -> Coroutine[Any, Any, None]:
        """Returns the coroutine that works until cancelled, or raises the error of the first epoch that failed."""
        return self._run_several(self._at) if self._has_several else self._run_lane(self._at)

    async def _run_several(self, first: Stamp) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for after in range(self._count):
                    group.create_task(self._run_lane(Stamp(first.attempt, first.epoch + after)))
        except BaseExceptionGroup as errors:
            raise _first_error(errors) from None

    async def _run_lane(self, stamp: Stamp) -> None:
        """Works on the epoch of `stamp`, then on this lane's next ones, until an epoch fails or the attempt is over.

        All asyncio tasks of an attempt belong to one group; an error in one cancels the others.
        """
        primary, replica, several = self._primary, self._replica, self._has_several
        strict, turns = self._node.settings.strict, self._turns if several else None
        goes_on = False
        error: BaseException
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    if several or not goes_on:
                        await self._wait_until_allowed(stamp)
                    self.began = self._loop.time()
                    traced = self._tracing.on and self._tracing.is_traced(stamp.epoch)
                    began = traced and clock()
                    following = stamp_of((stamp.attempt, stamp.epoch + 1))
                    try:
                        if stamp.epoch == self.settled:
                            await self._after_commit(stamp)
                        replica.actor.term = self._term
                        recording = primary.strict.new_recording(stamp) if strict else None
                        attempt = Attempt(primary, stamp, group=group, recording=recording, turns=turns, traced=traced)
                        primary.attempts.add(attempt)
                        self._next = following.epoch
                        if several:
                            self._room.set()  # its lane may wait for this
                        await attempt.run()
                        goes_on = await self._after_work(attempt, following)
                    finally:
                        if began:
                            self._tracing.add("epoch", began, self._task, stamp, self._term)
                    stamp = Stamp(stamp.attempt, stamp.epoch + self._count) if several else following
        except asyncio.CancelledError:
            if self.over or self.failed_in >= 0:
                raise
            error = cancelled_by_user_error(f"task {self._task}, epoch {stamp.epoch}: ")
        except BaseExceptionGroup as errors:
            error = _first_error(errors)
            if (stuck := errors.subgroup(StuckError)) is not None:
                self.stuck = _first_error(stuck)
        if cuda_error(error) is not None:
            self._node.device_loss.note_error(error, self._task, stamp)
        lane = asyncio.current_task()
        # `cancelling` alone is not enough: user code may have called `uncancel`.
        given_up = self.over or self.failed_in >= 0 or (lane is not None and lane.cancelling())
        if isinstance(error, UserCodeError | TaskGraphError) and not given_up:
            await self._reported.wait(stamp.epoch)  # an earlier epoch may still fail, and counts first
        if self.failed_in < 0:  # other lanes that end because of this one raise, too
            self.failed_in = stamp.epoch
        raise error from None

    async def _wait_until_allowed(self, stamp: Stamp) -> None:
        """Waits until the epoch is the next one to begin, and may begin."""
        waiting = 0
        while self._next < stamp.epoch or not self._may_begin(stamp.epoch):
            waiting = waiting or (
                self._next == stamp.epoch and self._tracing.on and self._tracing.begin(stamp, boundary=True)
            )
            self._room.clear()
            if self._next == stamp.epoch:
                self._primary.backups.unsent.flush()  # the commit that it waits for needs these
            await self._room.wait()
        if waiting and self._reported.at == stamp.epoch:
            last = Stamp(stamp.attempt, stamp.epoch - 1)
            self._tracing.add("commit awaited", max(waiting, self._reported_at), self._task, last, self._term)

    def _may_begin(self, epoch: int) -> bool:
        """True if `epoch`, the next to begin, may begin now, perhaps though earlier epochs are not committed."""
        if epoch == self.settled:
            return True
        if epoch > self.settled + self._ahead or epoch >= self._end or self.finishing:
            return False
        if self._checkpoints:
            boundary = Stamp(self._at.attempt, epoch)
            if self._primary.writer.is_due(boundary, stateful=self._replica.holds_state):
                return False  # a checkpoint is written from the committed boundary
        wish = self._placement.by_task.get(self._task)
        if wish is not None and wish.primary is not None and wish.primary != self._node.id:
            return False  # the hand-over is right after a commit
        share = self._share
        if share.epochs != share.memory.epochs:
            share.compute()
        known = not self._has_several or self._epoch_bytes is not None
        if known and epoch - self.settled <= share.epochs_allowed:
            return True  # all of them are small
        held = self._primary.attempts.uncommitted_bytes(self._turns.at)
        if in_flight := epoch - self._turns.at:
            if self._epoch_bytes is None:
                return False  # the first epoch shows how large epochs are
            held += in_flight * self._epoch_bytes
        if held <= share.bytes:
            return True
        # While a snapshot is copied from a device, the next epoch may compute, however large it is.
        if not self._leaves_device or epoch != self.settled + 1:
            return False
        return held - self._primary.attempts.boundary_bytes(self._turns.at) <= share.bytes

    # -- one epoch --------------------------------------------------------------------------------

    async def _after_commit(self, stamp: Stamp) -> None:
        """Hands the task over if placement wishes that, and begins a checkpoint if one is due.

        Called before the first epoch after a commit. Task 0 begins checkpoints in `_after_work`.
        """
        await self._primary.hand_over_if_wished(stamp)
        if self._task != 0 and self._checkpoints:
            await self._begin_checkpoint(stamp, self._replica.previous)

    async def _after_work(self, attempt: Attempt, following: Stamp) -> bool:
        """Takes the snapshot of an attempt that has run, and offers its boundary, now or by way of `incomplete`.

        Args:
            following: the stamp of the next epoch, and of the boundary before it.

        Returns:
            Whether the next epoch may begin before this one is committed.
        """
        primary, node, replica, stamp = self._primary, self._node, self._replica, attempt.stamp
        if self._has_several:
            await attempt.wait_for_turn("snapshot")
        if self._checks:
            await self._check_epoch(attempt)
        if self._injects:
            await node.point("snapshot", self._task, stamp.epoch)
        if self._leaves_device and self._state_bytes > epoch_memory.AHEAD_BYTES and self.incomplete.pending:
            await self.incomplete.wait_until_empty()  # the device may have no memory for two
        numbers: Mapping[str, float] = {}
        if reported := attempt.numbers:
            numbers, attempt.numbers = compact(reported), {}  # frees memory: many epochs may be uncommitted
        previous, replica.previous = replica.previous, numbers
        if finishing := attempt.finishing:
            self.finishing = True
        rows: Rows | None = {}
        if self._task == 0:
            if self._checkpoints:
                await self._begin_checkpoint(stamp, previous)
            leader = node.leader
            if self.incomplete.pending:
                rows = None  # reports are sent in order
            elif leader is not None:
                rows = leader.rows_now(stamp, previous)
        primary.stage, replica.actor.stamp = "snapshot", stamp
        if attempt.graph is not self._graph:  # epochs that declare the same share a graph
            self._graph, self._state_stays = (
                attempt.graph,
                self._may_stay and self._leaves_state_unchanged(attempt.graph),
            )
        if self._state_stays and self._last_snapshot is not None and not rows and not numbers:
            snapshot = self._last_snapshot  # members have it already: nothing is encoded
        else:
            log = {stamp.epoch - 1: to_plain(rows)} if rows else {}
            snapshot = await replica.snapshot(dict(numbers.items()), log, stays=True)
            self._state_bytes = snapshot.size_bytes
            self._leaves_device = snapshot.on_device
            attempt.snapshot_bytes = self._state_bytes
            if self._may_stay:
                self._last_snapshot = None if self._leaves_device or numbers or rows else snapshot
        self._epoch_bytes = EPOCH_BYTES + attempt.put_bytes + attempt.inbound.taken_bytes + self._state_bytes
        if self._epoch_bytes > self._share.period_bytes:
            self._share.note_epoch(self._epoch_bytes)
        primary.stage = ""
        later = replica.device is not None and (snapshot.on_device or bool(self.incomplete.pending))
        finished = FinishedEpoch(attempt, following, snapshot, numbers, finishing, previous, rows)
        if rows is not None and not later:
            return await self._offer(finished)
        self.incomplete.add(finished)
        self._on_snapshot_taken(following.epoch)
        goes_on = not attempt.cancelled and self._may_begin(self._next)
        if not goes_on:
            await self.incomplete.wait_until_empty()
        return goes_on

    def adapt_share(self) -> None:
        """Adapts the share of memory to the number of primaries on the node.

        Lanes that wait for room check it after the next commit, not now: the attempt may be over.
        """
        self._share.adapt()

    def _set_ahead(self, ahead: int) -> None:
        """Passes on how many epochs the task may be ahead, which limits how many reports and offers are gathered."""
        self._primary.reporter.set_ahead(ahead)
        self._primary.backups.unsent.set_ahead(ahead)
        if self._task == 0 and self._node.leader is not None:
            self._node.leader.set_ahead(ahead)

    def _leaves_state_unchanged(self, graph: Graph | None) -> bool:
        """True if an epoch of that graph cannot change the state, by its `@tg.stateless` marks."""
        if not self._replica.stateful:
            return True
        return graph is not None and all(is_stateless(processor.compute) for processor in graph.processors)

    def _on_snapshot_taken(self, following: int) -> None:
        """Lets the next epoch change the state, since the snapshot is taken."""
        if self._has_several:
            self._turns.end_turn(following - 1)
            self._room.set()
        else:
            self._turns.at = following  # there is one lane

    async def _complete(self, finished: FinishedEpoch) -> None:
        """Completes a boundary, and offers it: copies its snapshot from the device, and adds missing reports."""
        attempt, replica, rows, snapshot = finished.attempt, self._replica, finished.rows, finished.snapshot
        try:
            if snapshot.on_device:
                self.lacking = f"its snapshot of epoch {attempt.number}, being copied from the device"
                snapshot = await replica.copy_to_host(snapshot)
            if rows is None:
                self.lacking = f"what the tasks report in epoch {attempt.number - 1}"
                leader = self._node.leader
                rows = await leader.rows_before(attempt.stamp, finished.previous) if leader is not None else {}
                if rows:
                    value = await replica.with_reports(snapshot.value, {attempt.number - 1: to_plain(rows)})
                    snapshot = replace(snapshot, value=value)
                    attempt.snapshot_bytes = snapshot.size_bytes
                    epoch_bytes = EPOCH_BYTES + attempt.put_bytes + attempt.inbound.taken_bytes + snapshot.size_bytes
                    if epoch_bytes > self._share.period_bytes:
                        self._share.note_epoch(epoch_bytes)
        finally:
            self.lacking = ""
        finished.snapshot, finished.rows = snapshot, rows
        await self._offer(finished)

    async def _offer(self, finished: FinishedEpoch) -> bool:
        """Offers a complete boundary to the members. `awaiting_acks` waits for their acknowledgements, then reports.

        In the run's first epoch, and while replicas enter or leave the in-sync set, this call itself waits and reports.

        Returns:
            Whether the next epoch may begin before this one is committed.
        """
        primary, node, attempt, snapshot = self._primary, self._node, finished.attempt, finished.snapshot
        epoch, following, backups = attempt.number, finished.following, primary.backups
        log = {epoch - 1: finished.rows} if finished.rows else {}
        boundary = Boundary(following, self._term, snapshot.value, log, snapshot.shared)
        self._replica.boundaries.store(boundary, committed=False)
        if self._turns.at == epoch:
            if self._has_several:
                self._on_snapshot_taken(following.epoch)
            else:
                self._turns.at = following.epoch  # without a call
        gathers = self._room.is_set() or self._may_begin(self._next)
        shared = backups.offer(boundary, gathers=gathers)
        if self._task == 0 and node.leader is not None and node.leader.lacks_own_report():
            backups.unsent.flush_soon()  # others wait for nothing else
        at = self._keeper.view.epoch
        admit_wait_s = node.settings.admit_wait_s if at is not None and epoch == at.record.base else 0.0
        finished.since = attempt.traced and clock()
        if shared and not admit_wait_s and backups.all_in_sync:
            if finished.since and any(other.since for other in self.awaiting_acks.pending):
                finished.since = 0  # the trace shows one of those that wait together
            self.awaiting_acks.add(finished)
            return not attempt.cancelled and self._may_begin(self._next)
        if shared or admit_wait_s:
            backups.unsent.flush()
            await backups.wait_until_acknowledged(boundary.key, admit_wait_s=admit_wait_s)
        return await self._report(finished)

    async def _await_acks(self, finished: FinishedEpoch) -> None:
        """Waits for the acknowledgements of a boundary, then reports the epoch."""
        (attempt, epoch), backups = finished.following, self._primary.backups
        await backups.wait_until_acknowledged((epoch, attempt, self._term), admit_wait_s=0.0)
        await self._report(finished)

    async def _report(self, finished: FinishedEpoch) -> bool:
        """Reports an epoch to the leader, after the reports of all earlier ones: all members have its boundary.

        Returns:
            Whether the next epoch may begin before this one is committed, as the report says.
        """
        primary, node, attempt = self._primary, self._node, finished.attempt
        stamp, epoch, ledger = attempt.stamp, attempt.number, attempt.ledger
        if since := finished.since:
            held, size = clock(), finished.snapshot.value.size_bytes
            self._tracing.keep("held by backups", "", "", since, held, self._task, stamp, self._term, size)
        if node.paused:
            await node.wait_while_paused()
        if self._injects:
            await node.point("done", self._task, epoch)
        reported = self._reported
        if reported.at != epoch:
            await reported.wait(epoch)
        ahead = not attempt.cancelled and (self._is_next_acknowledged(finished) or self._may_begin(self._next))
        report = Report(
            stamp,
            self._task,
            self._term,
            True,
            0,
            encode_sum(ledger.sent_sum),
            encode_sum(ledger.received_sum),
            finished.finishing,
            finished.numbers,
            finished.previous,
            ahead,
            self._shared_digests(finished) if finished.snapshot.digest else b"",
        )
        primary.reporter.send_or_gather(report)
        if reported.waiting:
            reported.end_turn(epoch)
        else:
            reported.at = finished.following.epoch
        self._reported_at = self._tracing.on and clock()
        return ahead

    def _shared_digests(self, finished: FinishedEpoch) -> bytes:
        """Returns the digest of the shared state after an epoch; in epoch 0, boundary 0's digest and this one."""
        before = self._replica.boundaries.committed if finished.attempt.number == 0 else None
        return (shared_digest(before) if before is not None else b"") + finished.snapshot.digest

    def _is_next_acknowledged(self, finished: FinishedEpoch) -> bool:
        """True if the next epoch will be reported right after this one, so that the commit need not be hurried."""
        waiting = self.awaiting_acks.pending
        if len(waiting) < 2 or waiting[0] is not finished:
            return False
        attempt, epoch = waiting[1].following
        return self._primary.backups.is_acknowledged((epoch, attempt, self._term))

    async def _begin_checkpoint(self, stamp: Stamp, previous: Mapping[str, float]) -> None:
        """Waits until the queue of the checkpoint writer has room, and queues the boundary of `stamp`, if a checkpoint
        is due there. Task 0 first waits for all tasks' reports of the epoch before `stamp`: its file has all reports.

        Args:
            previous: what this task reported in the epoch before; only task 0's is used.
        """
        primary, replica = self._primary, self._replica
        committed = replica.boundaries.committed
        if committed is None or committed.stamp.epoch != stamp.epoch:
            return  # a roll-back has just undone it
        if primary.writer.is_due(committed.stamp, stateful=replica.holds_state):
            primary.stage = "reports of the epoch before"
            if self._task == 0 and self._node.leader is not None:
                await self._node.leader.rows_before(stamp, previous)
            primary.stage = primary.writer.stage
            await primary.writer.wait_for_room()
            primary.stage = ""
            primary.writer.queue(committed.stamp, replica.bind_all_reports(committed.value))

    async def _check_epoch(self, attempt: Attempt) -> None:
        """Checks an epoch that has run: replays it in strict mode; otherwise looks for changes that no snapshot has."""
        if attempt.recording is not None:
            attempt.recording.numbers, attempt.recording.finishing = attempt.numbers, attempt.finishing
            await self._primary.strict.check(attempt.recording)
        else:
            self._checks = self._primary.unsaved.emit_if_changed(attempt.number)


def _lane_count(primary: Primary) -> int:
    """Returns how many epochs of the task may run at the same time."""
    settings = primary.node.settings
    if not primary.replica.shape.in_flight or settings.strict:
        return 1
    return min(settings.epochs_in_flight, 1 + settings.epochs_ahead)


def _first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the first error of a group that is not a consequence of another one."""
    leaves: list[BaseException] = []
    stack: list[BaseException] = [errors]
    while stack:
        error = stack.pop()
        if isinstance(error, BaseExceptionGroup):
            stack.extend(reversed(error.exceptions))
        else:
            leaves.append(error)
    return next((e for e in leaves if not isinstance(e, AttemptEnded)), leaves[0])
