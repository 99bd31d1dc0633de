"""The epochs a primary works on in one attempt of the job: one after another, or several in flight.

Each epoch is worked on in a lane: its attempt, its snapshot, the boundary held by all it needs, its done. Most tasks
have one lane. Where `compose` is `@tg.stateless` there are `Settings.epochs_in_flight`, which take the epochs in turns.
Epochs begin in their order, are snapshotted in their order, and told in their order; in between, what is
stateless of a later one may run before what is left of an earlier one.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from taskgraph.epoch import AttemptEnded
from taskgraph.errors import TaskGraphError
from taskgraph.node.epochs import sharing
from taskgraph.node.epochs.attempt import Attempt
from taskgraph.node.epochs.dones import Dones, Worked
from taskgraph.node.epochs.sharing import EPOCH_BYTES, Share
from taskgraph.node.epochs.turns import Turns
from taskgraph.node.reports import plain
from taskgraph.node.usercode.errors import StuckError, UserCodeError, cancelled_by_users, met
from taskgraph.observe.trace import clock
from taskgraph.protocol.boundaries import Boundary
from taskgraph.protocol.messages import Encoded, EncodedOnDevice, Report, Stamp, stamp_of
from taskgraph.protocol.numbers import held
from taskgraph.shape import is_stateless

if TYPE_CHECKING:
    from taskgraph.graph.compose import Graph
    from taskgraph.node.primary.primary import Primary
    from taskgraph.node.reports import Rows

__all__ = ["Lanes"]


class Lanes:
    """The work of one primary from one committed epoch on, until its attempt is over: `run` is cancelled then.

    Args:
        at: the epoch at work, and the attempt.
        not_done: called where an epoch that was worked through cannot be brought to its done; the property says why.
    """

    # Without slots, more than 30 attributes are kept in a dictionary, where each is looked up.
    __slots__ = (
        "_ahead",
        "_at",
        "_bare",
        "_checkpoints",
        "_count",
        "_end",
        "_epoch_bytes",
        "_graph",
        "_injects",
        "_keeper",
        "_leaves_device",
        "_looks",
        "_loop",
        "_may_stay",
        "_next",
        "_node",
        "_primary",
        "_replica",
        "_room",
        "_several",
        "_share",
        "_state_bytes",
        "_stays",
        "_task",
        "_term",
        "_told",
        "_told_at",
        "_tracing",
        "_turns",
        "_wishes",
        "began",
        "dones",
        "failed_in",
        "finishing",
        "helds",
        "lacking",
        "over",
        "settled",
        "stuck",
    )

    def __init__(self, primary: Primary, at: Stamp, not_done: Callable[[], None]) -> None:
        self._primary = primary
        self._node = primary.node
        self._replica = primary.replica
        self._task = primary.task
        self._term = primary.term
        self._tracing = primary.node.tracing
        self._keeper = primary.node.keeper
        self._wishes = primary.node.wishes
        self._injects = primary.node.injects
        self._at = at
        self._loop = asyncio.get_running_loop()
        self._count = _lanes_of(primary)
        self._several = self._count > 1
        self._looks = primary.node.settings.strict or primary.unheld.begin()  # at what an epoch did to the object
        # What holds for the whole attempt is found out once.
        shape, settings, epochs = primary.replica.shape, primary.node.settings, primary.replica.job.epochs
        # The seal, and the order of calls of `on_commit`, are of committed epochs; a replay is of the epoch at work.
        alone = settings.strict or shape.receives or "on_commit" in shape.overrides
        self._ahead = 0 if alone else settings.epochs_ahead
        self._end = sys.maxsize if epochs is None else epochs
        self._checkpoints = primary.node.spec.checkpoint is not None
        # Where nothing that is marked stateless changes the state, and there is nothing that says what happened.
        marked = shape.in_flight and "on_event" not in shape.overrides
        self._may_stay = (marked or not shape.stateful) and not settings.strict
        self._replica.standing, self._replica.may_stand = None, shape.in_flight and not settings.strict
        self._graph: Graph | None = None  # of the last epoch
        self._stays = False  # whether it leaves the state as it was
        self._bare: Encoded | None = None  # the last snapshot, where it may stay and carries no reports
        self._state_bytes = 0  # of the last snapshot
        self.settled = at.epoch
        """The committed boundary, once everything that follows from its commit is done."""
        self.failed_in = -1
        """The epoch whose work failed."""
        self.over = False
        """Whoever cancels `run` says so first: nothing else may."""
        self.stuck: BaseException | None = None
        """A thread that does not return: of an epoch that was given up, which is not what `run` raises."""
        self.lacking = ""
        """What an epoch that is to be done waits for, while others are worked on."""
        self.began = self._loop.time()
        """When the last epoch began that did."""
        self._room = asyncio.Event()  # an epoch may begin, perhaps; else somebody waits for that
        self._room.set()
        self._next = at.epoch  # the first epoch that has not begun
        self._turns = Turns(at.epoch)  # whose snapshot is the next to be taken
        self._told = Turns(at.epoch)  # whose done is the next to be told
        self._told_at = 0  # when one was told last, while somebody traces
        self.finishing = False
        """An epoch said that the job ends with it: none begins any more."""
        self._epoch_bytes: int | None = None  # what the epoch held and pulled that was snapshotted last
        self._share = Share(primary.node.sharing, self._ahead, at.epoch, self._gather_by)
        self._leaves_device = False  # whether its snapshot was on a device
        self.dones = Dones(self._make_whole, not_done)
        self.helds = Dones(self._be_held, not_done)
        """Those whose boundaries are whole, and wait for acknowledgements alone."""

    def settle(self, epoch: int) -> None:
        """`epoch` is the committed boundary now, and all that follows from that is done."""
        self.settled = epoch
        if epoch > self._share.until:
            self._share.look_back(self._turns.at)
        self._room.set()

    async def end(self) -> None:
        """The attempt is over, and `run` has ended: so does what it left to do.

        Raises:
            StuckError: a thread does not return.
        """
        try:
            await self.dones.end()
        finally:
            try:
                await self.helds.end()
            finally:
                self._share.end()

    @property
    def not_done(self) -> BaseException | None:
        """Why an epoch that was worked through could not be brought to its done."""
        return self.dones.error or self.helds.error

    # -- one epoch after another ------------------------------------------------------------------

    def run(self) -> Coroutine[Any, Any, None]:
        """Works until cancelled; raises the job's error of the first epoch that has one, or one of ours."""
        return self._run_several(self._at) if self._several else self._lane(self._at)

    async def _run_several(self, first: Stamp) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for after in range(self._count):
                    group.create_task(self._lane(Stamp(first.attempt, first.epoch + after)))
        except BaseExceptionGroup as errors:
            raise _first_error(errors) from None

    async def _lane(self, stamp: Stamp) -> None:
        """Works on the epoch of `stamp`, and then on the next one that is no other lane's.

        What runs beside an attempt runs in one group; an error ends all of it.
        """
        primary, replica, several = self._primary, self._replica, self._several
        strict, turns = self._node.settings.strict, self._turns if several else None
        goes_on = False
        error: BaseException
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    if several or not goes_on:
                        await self._until_allowed(stamp)
                    self.began = self._loop.time()
                    traced = self._tracing.on and self._tracing.takes(stamp.epoch)
                    began = traced and clock()
                    following = stamp_of((stamp.attempt, stamp.epoch + 1))
                    try:
                        if stamp.epoch == self.settled:
                            await self._after_commit(stamp)
                        replica.actor.term = self._term
                        recording = primary.strict.recording(stamp) if strict else None
                        attempt = Attempt(primary, stamp, group=group, recording=recording, turns=turns, traced=traced)
                        primary.attempts.begin(attempt)
                        self._next = following.epoch
                        if several:
                            self._room.set()  # for the lane of that one
                        await attempt.run()
                        goes_on = await self._after_work(attempt, following)
                    finally:
                        if began:
                            self._tracing.add("epoch", began, self._task, stamp, self._term)
                    stamp = Stamp(stamp.attempt, stamp.epoch + self._count) if several else following
        except asyncio.CancelledError:
            if self.over or self.failed_in >= 0:
                raise
            error = cancelled_by_users(f"task {self._task}, epoch {stamp.epoch}: ")
        except BaseExceptionGroup as errors:
            error = _first_error(errors)
            if (stuck := errors.subgroup(StuckError)) is not None:
                self.stuck = _first_error(stuck)
        if met(error) is not None:
            self._node.device_loss.spoiled(error, self._task, stamp)
        lane = asyncio.current_task()
        # Whether it is cancelled would not do alone: its code may have taken that back (`uncancel`).
        given_up = self.over or self.failed_in >= 0 or (lane is not None and lane.cancelling())
        if isinstance(error, UserCodeError | TaskGraphError) and not given_up:
            await self._told.wait(stamp.epoch)  # those before it may still be done, and are first
        if self.failed_in < 0:  # what those raise that are given up for it is not what `run` raises
            self.failed_in = stamp.epoch
        raise error from None

    async def _until_allowed(self, stamp: Stamp) -> None:
        """Returns when that epoch is the next one to begin, and may."""
        waiting = 0
        while self._next < stamp.epoch or not self._may_begin(stamp.epoch):
            waiting = waiting or (
                self._next == stamp.epoch and self._tracing.on and self._tracing.began(stamp, boundary=True)
            )
            self._room.clear()
            if self._next == stamp.epoch:
                self._primary.backups.gathered.flush()  # the commit that it waits for needs what is gathered there
            await self._room.wait()
        if waiting and self._told.at == stamp.epoch:
            last = Stamp(stamp.attempt, stamp.epoch - 1)
            self._tracing.add("commit awaited", max(waiting, self._told_at), self._task, last, self._term)

    def _may_begin(self, epoch: int) -> bool:
        """Whether that epoch, the first one that has not begun, may begin as far as earlier ones are concerned."""
        if epoch == self.settled:
            return True
        if epoch > self.settled + self._ahead or epoch >= self._end or self.finishing:
            return False
        if self._checkpoints:
            boundary = Stamp(self._at.attempt, epoch)
            if self._primary.writer.due(boundary, stateful=self._replica.stateful):
                return False  # it is written of the committed boundary
        wish = self._wishes.by_task.get(self._task)
        if wish is not None and wish.primary is not None and wish.primary != self._node.id:
            return False  # handed over right after a commit
        share = self._share
        if share.epochs != share.sharing.epochs:
            share.make()
        known = not self._several or self._epoch_bytes is not None
        if known and epoch - self.settled <= share.far:
            return True  # so small are all of them
        held = self._primary.attempts.held_bytes(self._turns.at)
        if in_flight := epoch - self._turns.at:
            if self._epoch_bytes is None:
                return False  # how large its epochs are is found out with one
            held += in_flight * self._epoch_bytes
        if held <= share.bytes:
            return True
        # A snapshot that leaves a device takes its time, which the next epoch computes in, however large it is.
        if not self._leaves_device or epoch != self.settled + 1:
            return False
        return held - self._primary.attempts.boundary_bytes(self._turns.at) <= share.bytes

    # -- one epoch --------------------------------------------------------------------------------

    async def _after_commit(self, stamp: Stamp) -> None:
        """What comes before the first epoch after a commit."""
        await self._primary.hand_over_if_wished(stamp)
        if self._task != 0 and self._checkpoints:
            await self._checkpoint(stamp, self._replica.previous)

    async def _after_work(self, attempt: Attempt, following: Stamp) -> bool:
        """All that an attempt runs has run: its snapshot, and the report that it is done.

        Args:
            following: the stamp of the next epoch, and of the boundary before it.

        Returns:
            Whether the task goes on before it is committed.
        """
        primary, node, replica, stamp = self._primary, self._node, self._replica, attempt.stamp
        if self._several:
            await attempt.turn("snapshot")
        if self._looks:
            await self._look(attempt)
        if self._injects:
            await node.point("snapshot", self._task, stamp.epoch)
        if self._leaves_device and self._state_bytes > sharing.AHEAD_BYTES and self.dones.open:
            await self.dones.all()  # or there would be two copies of so much on the device
        numbers: Mapping[str, float] = {}
        if reported := attempt.numbers:
            numbers, attempt.numbers = held(reported), {}  # who is ahead has many epochs of these
        previous, replica.previous = replica.previous, numbers
        if finishing := attempt.finishing:
            self.finishing = True
        rows: Rows | None = {}
        if self._task == 0:
            if self._checkpoints:
                await self._checkpoint(stamp, previous)
            leader = node.leader
            if self.dones.open:
                rows = None  # its done comes after theirs
            elif leader is not None:
                rows = leader.rows_now(stamp, previous)
        primary.stage, replica.actor.stamp = "snapshot", stamp
        if attempt.graph is not self._graph:  # epochs that declare the same share one
            self._graph, self._stays = attempt.graph, self._may_stay and self._leaves_state(attempt.graph)
        if self._stays and self._bare is not None and not rows and not numbers:
            value = self._bare  # the boundary before, which is held already: nothing is encoded
        else:
            log = {stamp.epoch - 1: plain(rows)} if rows else {}
            value = await replica.snapshot(dict(numbers.items()), log, stays=True)
            self._state_bytes = value.size_bytes
            self._leaves_device = type(value) is EncodedOnDevice
            attempt.snapshot_bytes = self._state_bytes
            if self._may_stay:
                self._bare = value if type(value) is Encoded and not numbers and not rows else None
        self._epoch_bytes = EPOCH_BYTES + attempt.put_bytes + attempt.inbound.taken_bytes + self._state_bytes
        if self._epoch_bytes > self._share.recent:
            self._share.holds(self._epoch_bytes)
        primary.stage = ""
        later = replica.device is not None and (type(value) is EncodedOnDevice or bool(self.dones.open))
        worked = Worked(attempt, following, value, numbers, finishing, previous, rows)
        if rows is not None and not later:
            return await self._be_whole(worked)
        self.dones.add(worked)
        self._snapshotted(following.epoch)
        goes_on = not attempt.cancelled and self._may_begin(self._next)
        if not goes_on:
            await self.dones.all()
        return goes_on

    def share(self) -> None:
        """Their limit is of all primaries of the node, and there are more of these, or fewer.

        Whoever waits for room looks again after the next commit, not now: the attempt may be over.
        """
        self._share.look()

    def _gather_by(self, ahead: int) -> None:
        """What is gathered is a part of the epochs that it may be ahead, which are fewer where they are so large."""
        self._primary.reporter.gather_by(ahead)
        self._primary.backups.gathered.gather_by(ahead)
        if self._task == 0 and self._node.leader is not None:
            self._node.leader.gather_by(ahead)

    def _leaves_state(self, graph: Graph | None) -> bool:
        """Whether an epoch of that graph leaves the state as it was, by what marks promise."""
        if not self._replica.stateful:
            return True
        return graph is not None and all(is_stateless(processor.compute) for processor in graph.processors)

    def _snapshotted(self, following: int) -> None:
        """The next epoch may change the state."""
        if self._several:
            self._turns.passed(following - 1)
            self._room.set()  # there is memory for another one, perhaps
        else:
            self._turns.at = following  # nobody waits for a turn

    async def _make_whole(self, worked: Worked) -> None:
        """Makes a boundary whole that was not: it was still on a device, or what it is to carry was not all here."""
        attempt, replica, rows, value = worked.attempt, self._replica, worked.rows, worked.value
        try:
            if type(value) is EncodedOnDevice:
                self.lacking = f"its snapshot of epoch {attempt.number}, being copied from the device"
                value = await replica.hosted(value)
            if rows is None:
                self.lacking = f"what the tasks report in epoch {attempt.number - 1}"
                leader = self._node.leader
                rows = await leader.rows_before(attempt.stamp, worked.previous) if leader is not None else {}
                if rows:
                    value = await replica.with_rows(value, {attempt.number - 1: plain(rows)})
                    attempt.snapshot_bytes = value.size_bytes
                    epoch_bytes = EPOCH_BYTES + attempt.put_bytes + attempt.inbound.taken_bytes + value.size_bytes
                    if epoch_bytes > self._share.recent:
                        self._share.holds(epoch_bytes)
        finally:
            self.lacking = ""
        worked.value, worked.rows = value, rows
        await self._be_whole(worked)

    async def _be_whole(self, worked: Worked) -> bool:
        """The boundary is whole: it is offered to all it needs. Where they hold it, the leader is told.

        Nobody waits for acknowledgements here, unless there is more to wait for: who is to become a member first.

        Returns:
            Whether the task goes on before the epoch is committed.
        """
        primary, node, attempt, value = self._primary, self._node, worked.attempt, worked.value
        epoch, following, backups = attempt.number, worked.following, primary.backups
        boundary = Boundary(following, self._term, value, {epoch - 1: worked.rows} if worked.rows else {})
        self._replica.boundaries.hold(boundary, committed=False)
        if self._turns.at == epoch:
            if self._several:
                self._snapshotted(following.epoch)
            else:
                self._turns.at = following.epoch  # as there, without a call
        gathers = self._room.is_set() or self._may_begin(self._next)
        shared = backups.pending(boundary, gathers=gathers)
        if self._task == 0 and node.leader is not None and node.leader.lacks_own():
            backups.gathered.flush_soon()  # others wait, and for nothing else
        at = self._keeper.view.epoch
        admit_wait_s = node.settings.admit_wait_s if at is not None and epoch == at.record.base else 0.0
        worked.since = attempt.traced and clock()
        if shared and not admit_wait_s and backups.settled:
            if worked.since and any(other.since for other in self.helds.open):
                worked.since = 0  # of those that wait together a trace tells the first that it looks at
            self.helds.add(worked)
            return not attempt.cancelled and self._may_begin(self._next)
        if shared or admit_wait_s:
            backups.gathered.flush()
            await backups.held(boundary.key, admit_wait_s=admit_wait_s)
        return await self._be_done(worked)

    async def _be_held(self, worked: Worked) -> None:
        """Waits for the acknowledgements of a boundary; then its epoch is done."""
        (attempt, epoch), backups = worked.following, self._primary.backups
        await backups.held((epoch, attempt, self._term), admit_wait_s=0.0)
        await self._be_done(worked)

    async def _be_done(self, worked: Worked) -> bool:
        """The boundary is held by all it needs: the leader is told.

        Returns what it is told: whether the task goes on before the epoch is committed.
        """
        primary, node, attempt = self._primary, self._node, worked.attempt
        stamp, epoch, ledger = attempt.stamp, attempt.number, attempt.ledger
        if since := worked.since:
            held, size = clock(), worked.value.size_bytes
            self._tracing.keep("held by backups", "", "", since, held, self._task, stamp, self._term, size)
        if node.paused:
            await node.while_paused()
        if self._injects:
            await node.point("done", self._task, epoch)
        told = self._told
        if told.at != epoch:
            await told.wait(epoch)
        ahead = not attempt.cancelled and (self._next_held(worked) or self._may_begin(self._next))
        report = Report(
            stamp,
            self._task,
            self._term,
            True,
            0,
            ledger.sent_sum,
            ledger.received_sum,
            worked.finishing,
            worked.numbers,
            worked.previous,
            ahead,
        )
        primary.reporter.set(report)
        if told.waiting:
            told.passed(epoch)
        else:
            told.at = worked.following.epoch
        self._told_at = self._tracing.on and clock()
        return ahead

    def _next_held(self, worked: Worked) -> bool:
        """Whether the next epoch is to be done right after this one, which so has nobody wait for its commit alone."""
        waiting = self.helds.open
        if len(waiting) < 2 or waiting[0] is not worked:
            return False
        attempt, epoch = waiting[1].following
        return self._primary.backups.acknowledged((epoch, attempt, self._term))

    async def _checkpoint(self, stamp: Stamp, previous: Mapping[str, float]) -> None:
        """Begins to write the committed boundary, where it is one to become a checkpoint. Task 0's has all reports.

        Args:
            previous: what the task reported in the epoch before.
        """
        primary, replica = self._primary, self._replica
        committed = replica.boundaries.committed
        if committed is None or committed.stamp.epoch != stamp.epoch:
            return  # undone just now
        if primary.writer.due(committed.stamp, stateful=replica.stateful):
            primary.stage = "reports of the epoch before"
            if self._task == 0 and self._node.leader is not None:
                await self._node.leader.rows_before(stamp, previous)
            primary.stage = primary.writer.stage
            await primary.writer.room()
            primary.stage = ""
            primary.writer.begin(committed.stamp, replica.adding_log(committed.value))

    async def _look(self, attempt: Attempt) -> None:
        """In strict mode an epoch is replayed; else the first ones are looked at."""
        if attempt.recording is not None:
            attempt.recording.numbers, attempt.recording.finishing = attempt.numbers, attempt.finishing
            await self._primary.strict.check(attempt.recording)
        else:
            self._looks = self._primary.unheld.look(attempt.number)


def _lanes_of(primary: Primary) -> int:
    """How many epochs of the task may be in flight."""
    settings = primary.node.settings
    if not primary.replica.shape.in_flight or settings.strict:
        return 1
    return min(settings.epochs_in_flight, 1 + settings.epochs_ahead)


def _first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to tell: the first that is no mere consequence (cancellation, unwinding)."""
    leaves: list[BaseException] = []
    stack: list[BaseException] = [errors]
    while stack:
        error = stack.pop()
        if isinstance(error, BaseExceptionGroup):
            stack.extend(reversed(error.exceptions))
        else:
            leaves.append(error)
    return next((e for e in leaves if not isinstance(e, AttemptEnded)), leaves[0])
