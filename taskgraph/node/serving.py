"""Calls from other nodes: who may ask what, and when a call has to wait.

stamp ahead of the view     wait until etcd shows it
stamp or term behind        refuse
same stamp                  the attempt, the leader or a replica answers
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from taskgraph.epoch import AttemptEnded
from taskgraph.errors import DecodeError, Refused, StateError, TaskGraphError
from taskgraph.graph.changes import apply_changes
from taskgraph.graph.values import split_values
from taskgraph.node.epochs.attempt import Attempt
from taskgraph.node.primary.leader import within_reach
from taskgraph.node.usercode.errors import StuckError, UserCodeError
from taskgraph.observe.trace import clock
from taskgraph.protocol.boundaries import Boundaries, Boundary
from taskgraph.protocol.messages import (
    Accepted,
    Audit,
    Call,
    DescribeShared,
    Encoded,
    FetchShared,
    Flag,
    HandOver,
    LedgerPage,
    Offer,
    Offers,
    Pull,
    Reason,
    Release,
    Reply,
    Report,
    Reports,
    Request,
    RequestRestart,
    Seal,
    Stamp,
    Waits,
    WaitsPage,
    WrittenFiles,
    stamp_of,
)
from taskgraph.protocol.records import name_of
from taskgraph.transport.api import PendingCount, PendingReply

if TYPE_CHECKING:
    from taskgraph.node.primary.leader import LeaderRole
    from taskgraph.node.primary.primary import Primary
    from taskgraph.node.primary.takeovers import TakeOvers
    from taskgraph.node.replica import Replica
    from taskgraph.node.reports import ReportLog, Rows
    from taskgraph.node.roles import Roles
    from taskgraph.node.services import NodeServices

__all__ = ["Serving"]

_PARKED_KINDS = (Pull, Flag, Request)
"""Kinds of calls that are limited by `max_parked`: there may be many, and they wait for user code. Other calls are few
and not limited: parked calls may wait for a report, an offer or a seal."""
_REPORTS = (Report, Reports)
_OFFERS = (Offer, Offers)
_PULLED_AHEAD = 4
"""Pulls may be ahead of the view by this many times `epochs_ahead`: the caller pulls several epochs at once, and may
have read a commit that this node has not read."""


class Serving:
    """Answers the calls of other nodes to this one."""

    def __init__(self, node: NodeServices, roles: Roles, takeovers: TakeOvers) -> None:
        self._node = node
        self._roles = roles
        self._takeovers = takeovers
        self._waiting = PendingCount()  # calls of the kinds `_PARKED_KINDS` that wait here
        self._ahead = node.settings.epochs_ahead

    @property
    def waits(self) -> tuple[str, ...]:
        """Says, for `status`, if this node refuses further calls, for which parked calls may wait; (): it does not."""
        limit = self._node.settings.max_parked
        if self._waiting.count < limit:
            return ()
        return (
            f"{self._node.name} takes no more calls: {limit} wait there already, as many as may "
            "(give the job a larger Settings(max_parked=...))",
        )

    def answer_now(self, peer: str, message: Call) -> Reply | PendingReply | None:
        """Answers the most frequent calls at once, if the view shows the caller's attempt.

        None: await `__call__`, which answers all calls.
        """
        node = self._node
        if node.paused:
            return None
        if type(message) is Pull:
            return self._answer_pull_now(message)
        if type(message) in _REPORTS and node.leader is not None:
            return node.leader.take_report_now(message)  # type: ignore[arg-type]
        return self._take_offer_now(peer, message) if type(message) in _OFFERS else None  # type: ignore[arg-type]

    def _answer_pull_now(self, pull: Pull) -> Reply | PendingReply | None:
        primary = self._primary_for(pull)
        if primary is None or (self._room_for_calls(pull.stamp) < 1 and primary.attempts.lacks(pull)):
            return None
        reply = primary.attempts.answer_pull(pull)
        if type(reply) is PendingReply:
            self._waiting.count += 1
            reply.counter = self._waiting
        return reply

    def answer_all_now(self, peer: str, pull: Pull) -> list[Reply | PendingReply | None] | None:
        """Answers as `answer_now`, for each epoch of a pull. None: call `answer_now` for each."""
        node, waiting = self._node, self._waiting
        room = self._room_for_calls(Stamp(pull.stamp.attempt, pull.stamp.epoch + pull.count - 1))
        if peer == node.id:
            room -= node.settings.max_parked // 4  # leave room for calls that pull one epoch
        if node.paused or room < pull.count:
            return None
        primary = self._primary_for(pull)
        if primary is None:
            return None
        replies = primary.attempts.answer_pulls(pull)
        for reply in replies:
            if type(reply) is PendingReply:
                waiting.count += 1
                reply.counter = waiting
        return replies

    def _room_for_calls(self, stamp: Stamp) -> int:
        """Returns how many more calls of an epoch may wait here.

        Half of the room is kept for the epoch at work: its calls may free those of later epochs.
        """
        limit, at = self._node.settings.max_parked, self._node.keeper.view.stamp
        return (limit // 2 if at is None or stamp > at else limit) - self._waiting.count

    def _primary_for(self, pull: Pull) -> Primary | None:
        """Returns the primary here that can answer all parts of a pull at once; None: there is none."""
        primary, view = self._roles.primaries.get(pull.task), self._node.keeper.view
        if primary is None or view.term(pull.sender) != pull.sender_term:
            return None
        if view.stamp is None or pull.stamp < view.stamp:
            return None
        last = Stamp(pull.stamp.attempt, pull.stamp.epoch + pull.count - 1)
        return primary if within_reach(last, _PULLED_AHEAD * self._ahead, view) else None

    def _take_offer_now(self, peer: str, offer: Offer | Offers) -> Accepted | None:
        """Stores offered boundaries at once; None: use `_take_offer`, since the replica is not set up, or the view is
        behind.
        """
        node, view = self._node, self._node.keeper.view
        replica = self._roles.replicas.get(offer.task)
        if replica is None or not replica.ready or offer.committed or node.injects_held:
            return None
        if view.term(offer.task) < offer.term or view.stamp is None or view.stamp.attempt < offer.stamp.attempt:
            return None  # the view must show that attempt
        self._check_offer(peer, offer)
        began = node.tracing.on and clock()
        self._store(replica, offer)
        if began:
            self._trace_store(began, peer, offer)
        return Accepted(offer.term)

    async def __call__(self, peer: str, message: Call) -> Reply:
        """Answers one call; raises Refused."""
        if self._node.paused:
            raise Refused(Reason.PAUSED, f"{self._node.name} cannot prove its lease at the moment")
        parks = 0
        if isinstance(message, _PARKED_KINDS):
            if self._room_for_calls(message.stamp) < 1:
                raise Refused(Reason.PAUSED, f"{self._waiting.count} calls wait at {self._node.name} already")
            parks = 1
        self._waiting.count += parks
        try:
            return await self._dispatch(peer, message)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Refused(Reason.ATTEMPT_GONE, "what was asked of is over") from None
        except (AttemptEnded, StuckError):
            raise Refused(Reason.ATTEMPT_GONE, "the attempt is over") from None
        except (
            UserCodeError,
            StateError,
        ) as error:  # the task's primary fails the job, or the attempt is over: the caller waits
            raise Refused(Reason.USER_ERROR, str(error)) from error
        finally:
            self._waiting.count -= parks

    async def _dispatch(self, peer: str, message: Call) -> Reply:
        """Passes a call to the part of the node that answers it."""
        match message:
            case Pull():
                attempt = await self._wait_for_attempt(message.task, message.stamp, message.sender, message.sender_term)
                await attempt.wait_until_composed()
                item = attempt.out.answer(message)
                return await item if isinstance(item, PendingReply) else item
            case Flag():
                attempt = await self._wait_for_attempt(message.task, message.stamp, message.sender, message.sender_term)
                await attempt.wait_until_composed()
                return await attempt.messenger.take_flag(message)
            case Request():
                attempt = await self._wait_for_attempt(message.task, message.stamp, message.sender, message.sender_term)
                await attempt.wait_until_composed()
                return await attempt.messenger.take_request(message)
            case Offer() | Offers():
                return await self._take_offer(peer, message)
            case Release():
                await self._node.keeper.wait_for_revision(message.revision)
                self._roles.release(message)
                return Accepted()
            case Report() | Reports():
                return await self._require_leader().take_report(message)
            case RequestRestart():
                return await self._require_leader().take_restart(message)
            case WrittenFiles():
                return self._require_leader().checkpoint_completer.note_files(message)
            case Seal():
                attempt = await self._wait_for_attempt(message.task, message.stamp)
                if attempt.activity.seal(message.version):
                    return Accepted(attempt.term)
                raise Refused(Reason.MOVED_ON, f"task {message.task} took a message since version {message.version}")
            case HandOver():
                await self._takeovers.accept_handover(message)
                return Accepted()
            case Audit():
                attempt = await self._wait_for_attempt(message.task, message.stamp)
                return LedgerPage(attempt.term, attempt.ledger.entries())
            case Waits():
                return await self._waits_of_primary(message)
            case FetchShared():
                primary = await self._primary_at(message.task, message.stamp)
                return await primary.shared.answer_fetch(message.stamp)
            case DescribeShared():
                primary = await self._primary_at(message.task, message.stamp)
                return await primary.shared.describe(message.stamp, before=message.before)
        raise Refused(Reason.BAD_MESSAGE, f"a node does not serve {type(message).__name__}")

    def _require_leader(self) -> LeaderRole:
        """Returns the leader's role; raises Refused if this node does not lead."""
        leader = self._roles.leader
        if leader is None:
            raise Refused(Reason.NOT_PRIMARY, f"{self._node.name} does not lead the job")
        return leader

    async def _wait_for_attempt(
        self, task: int, stamp: Stamp, sender: int | None = None, sender_term: int = 0
    ) -> Attempt:
        """Waits for the attempt at `stamp` of a task, and returns it. Raises Refused if the primary is not here, or a
        stamp or term is stale.
        """
        node, keeper = self._node, self._node.keeper
        if task not in self._roles.primaries:
            raise Refused(Reason.NOT_PRIMARY, f"{node.name} is not primary of task {task}")
        reach = partial(within_reach, stamp, self._ahead)
        await keeper.wait_until_read(reach)
        if sender is not None:
            await keeper.wait_until_read(lambda view: view.term(sender) >= sender_term)
            if keeper.view.term(sender) > sender_term:
                raise Refused(Reason.STALE, f"task {sender} is in term {keeper.view.term(sender)}, not {sender_term}")
        if keeper.view.stamp is None or keeper.view.stamp > stamp:
            raise Refused(Reason.STALE, f"the job is at {keeper.view.stamp}, not {stamp}")
        primary = self._roles.primaries.get(task)
        if primary is None:
            raise Refused(Reason.NOT_PRIMARY, f"{node.name} is no longer primary of task {task}")
        return await primary.attempts.wait_for_attempt(stamp)

    async def _waits_of_primary(self, message: Waits) -> WaitsPage:
        """Returns what a primary waits for, also before it has begun its attempt."""
        primary = await self._primary_at(message.task, message.stamp)
        primary.reporter.report_again(message.stamp.epoch)
        return WaitsPage(primary.term, primary.waits(message.stamp))

    async def _primary_at(self, task: int, stamp: Stamp) -> Primary:
        """Waits until the view is at `stamp`; returns the primary here, also before it has begun its attempt."""
        node, keeper = self._node, self._node.keeper
        if task not in self._roles.primaries:
            raise Refused(Reason.NOT_PRIMARY, f"{node.name} is not primary of task {task}")
        await keeper.wait_until_read(lambda view: view.stamp is not None and view.stamp >= stamp)
        if keeper.view.stamp != stamp:
            raise Refused(Reason.STALE, f"the job is at {keeper.view.stamp}, not {stamp}")
        primary = self._roles.primaries.get(task)
        if primary is None:
            raise Refused(Reason.NOT_PRIMARY, f"{node.name} is no longer primary of task {task}")
        return primary

    async def _take_offer(self, peer: str, offer: Offer | Offers) -> Accepted:
        """Stores offered boundaries; sets a new replica up first."""
        node, keeper = self._node, self._node.keeper
        await keeper.wait_until_read(lambda view: view.term(offer.task) >= offer.term)
        # The primary read the boundary's attempt from etcd. This node, too, must have read a roll-back that began it.
        await keeper.wait_until_read(lambda view: view.stamp is not None and view.stamp.attempt >= offer.stamp.attempt)
        self._check_offer(peer, offer)
        began = node.tracing.on and clock()
        replica = self._roles.replica(offer.task)
        try:
            await replica.set_up()
        except (UserCodeError, TaskGraphError) as error:
            await node.fail_set_up(error, offer.task)
            raise
        log = await self._read_reports(replica, offer)
        if node.paused:
            raise Refused(Reason.PAUSED, f"{node.name} cannot prove its lease at the moment")
        self._check_offer(peer, offer)  # the set-up may have taken long
        if self._roles.replica(offer.task) is not replica:
            # The replica was dropped and made anew meanwhile. The one that stays must hold what is acknowledged,
            # or a member would have nothing to take over with.
            raise Refused(Reason.STALE, f"{node.name} dropped its replica of task {offer.task} while it was set up")
        self._store(replica, offer, log)
        if node.injects_held:
            for number in _numbers(offer):
                await node.point("held", offer.task, number)
        if began:
            self._trace_store(began, peer, offer)
        return Accepted(offer.term)

    async def _read_reports(self, replica: Replica, offer: Offer | Offers) -> dict[int, Rows] | ReportLog:
        """Reads the reports in a committed boundary: all reports if the replica has none yet, otherwise added ones."""
        if not offer.committed:
            return {}
        try:
            return await replica.read_reports(offer.value)
        except DecodeError as error:
            raise Refused(Reason.BAD_MESSAGE, f"offer of task {offer.task}: {error}") from None

    def _store(self, replica: Replica, offer: Offer | Offers, log: dict[int, Rows] | ReportLog | None = None) -> None:
        """Stores the boundaries of an offer and takes over the reports in them; raises Refused if one is stale."""
        epoch = self._node.keeper.view.epoch
        if epoch is not None:
            replica.follow(epoch.record)  # first drop what a roll-back undid: it must not make later boundaries history
        for boundary in _boundaries(offer, replica.boundaries):
            if not replica.boundaries.store(boundary, committed=offer.committed):
                raise Refused(Reason.STALE, f"boundary {boundary.key} of task {offer.task} is stale")
        if log:
            replica.log.fold(log)
        replica.promise(offer.term, offer.invitation)
        if epoch is not None and offer.stamp.epoch <= epoch.record.epoch:
            replica.follow(epoch.record)  # it is not ahead of the view

    def _trace_store(self, began: int, peer: str, offer: Offer | Offers) -> None:
        """Traces the storing of an offer as one span, of the first traced epoch in it."""
        tracing = self._node.tracing
        for number in _numbers(offer):
            if tracing.is_traced(number - 1):
                made, size = Stamp(offer.stamp.attempt, number - 1), offer.value.size_bytes
                who = name_of(peer)
                tracing.keep("hold", "", who, began, clock(), offer.task, made, offer.term, size)
                return

    def _check_offer(self, peer: str, offer: Offer | Offers) -> None:
        """Raises Refused if an offer is stale, is not of the task's primary, or this node is leaving."""
        view = self._node.keeper.view
        if self._node.leaving:  # a new replica would not be torn down
            raise Refused(Reason.CLOSING, f"{self._node.name} is leaving")
        if not view.is_primary(offer.task, peer, offer.term):
            raise Refused(Reason.STALE, f"task {offer.task} is in term {view.term(offer.task)}, not {offer.term}")
        if offer.task in self._roles.primaries:
            raise Refused(Reason.STALE, f"{self._node.name} is still stepping down from task {offer.task}")
        if not offer.committed and view.stamp is not None and offer.stamp.attempt < view.stamp.attempt:
            raise Refused(Reason.STALE, f"attempt {offer.stamp.attempt} is over")
        if view.epoch is not None and offer.stamp.attempt < view.epoch.record.lineage:
            raise Refused(Reason.STALE, f"boundary {offer.stamp.epoch} of attempt {offer.stamp.attempt} was undone")


def _numbers(offer: Offer | Offers) -> list[int]:
    """Returns the numbers of the boundaries of an offer."""
    return [epoch for epoch, _, _ in offer.parts] if isinstance(offer, Offers) else [offer.stamp.epoch]


def _boundaries(offer: Offer | Offers, stored: Boundaries) -> list[Boundary]:
    """Returns the boundaries of an offer.

    Args:
        stored: the boundaries that the replica has: an offer may lack buffers of one of them.

    Raises:
        Refused: the bytes of several boundaries do not match their announced sizes and digests; or the replica has
            freed the boundary with the buffers that are lacking.
    """
    if type(offer) is Offer:
        return [Boundary(offer.stamp, offer.term, _whole_value(offer, stored))]
    assert type(offer) is Offers
    try:
        values = split_values(offer.value, [(size, digest) for _, size, digest in offer.parts])
    except DecodeError as error:
        raise Refused(Reason.BAD_MESSAGE, f"offers of task {offer.task}: {error}") from None
    attempt, term = offer.stamp.attempt, offer.term
    return [
        Boundary(stamp_of((attempt, epoch)), term, value)
        for (epoch, _, _), value in zip(offer.parts, values, strict=True)
    ]


def _whole_value(offer: Offer, stored: Boundaries) -> Encoded:
    """Returns the value of an offer, with the buffers that it lacks. Raises Refused if they are not there."""
    if offer.kept is None:
        return offer.value
    base = stored.find(offer.kept.base)
    if base is None:
        text = f"the boundary before boundary {offer.stamp.epoch} of task {offer.task} is no longer stored here"
        raise Refused(Reason.STALE, text)
    try:
        return apply_changes(offer.value, offer.kept, base.value)
    except DecodeError as error:
        raise Refused(Reason.BAD_MESSAGE, f"offer of task {offer.task}: {error}") from None
