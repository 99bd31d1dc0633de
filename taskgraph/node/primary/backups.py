"""A primary's work for its task's replicas on other nodes: it offers boundaries, admits candidates, evicts members.

    wished for ──► candidate ──► member ──► evicted ──► released
                    offered       acknowledges each pending boundary

One coroutine, the manager, does this for each other node, from the first offer to the release.
`protocol.insync.InSyncSet` decides which acknowledgements a boundary needs, and when a write may be sent.

In epochs without incidents no manager takes part: a pending boundary is offered where it is made, and acknowledgements
are taken where they arrive. Small boundaries of a task that works ahead of the commit are gathered and offered in one
message, in time for the leader's next commit. The managers repeat offers that failed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from taskgraph.errors import Refused, TransportError
from taskgraph.graph.changes import changes_since
from taskgraph.node.backoff import Backoff
from taskgraph.node.primary.peer_replica import PeerReplica
from taskgraph.node.primary.unsent_offers import UnsentOffers, message_of
from taskgraph.observe.trace import clock
from taskgraph.protocol import transactions
from taskgraph.protocol.boundaries import Boundary
from taskgraph.protocol.insync import InSyncSet, MemberState
from taskgraph.protocol.messages import Accepted, Offer, Reason, Release, Reply, Stamp
from taskgraph.protocol.records import name_of
from taskgraph.system.alongside import alongside, any_done

if TYPE_CHECKING:
    from taskgraph.node.replica import Replica
    from taskgraph.node.services import NodeServices

__all__ = ["Backups"]

Key = tuple[int, int, int]

_NO_MEMORY_PAUSE_S = 1.0
"""Pause before a boundary is offered again to a node that had no memory for it: each offer sends the whole boundary."""


class Backups:
    """The in-sync set of one task, maintained by its primary for one term.

    Args:
        epoch: number of the committed boundary, as the takeover read it.
    """

    def __init__(
        self, node: NodeServices, replica: Replica, *, term: int, epoch: int, primary_revision: int, insync: InSyncSet
    ) -> None:
        self._node = node
        self._replica = replica
        self._task = replica.task
        self._term = term
        self._primary_revision = primary_revision
        self._insync = insync
        self._boundaries: dict[Key, Boundary] = {}
        self._committed_epoch = epoch
        self._peers: dict[str, PeerReplica] = {}
        self._deleting: set[str] = set()
        self._invitations = 0
        self._group: asyncio.TaskGroup | None = None
        self._waits: list[asyncio.Future[None]] = []  # waits for the next change of the set
        self._follow_scheduled = False
        self._blocked: dict[Key, Callable[[], str]] = {}  # boundaries that are waited for -> what is lacking
        self.unsent = UnsentOffers(node, self._offer_at_once)
        """Pending boundaries that were not offered yet."""

    @property
    def blocked_by(self) -> str:
        """What the earliest pending boundary waits for, for `status`; "": nothing. Boundaries not offered yet do not
        count.
        """
        waits = self._blocked.keys() - self.unsent.boundaries.keys()
        return self._blocked[min(waits)]() if waits else ""

    @property
    def all_in_sync(self) -> bool:
        """True if all other nodes are members, at least `min_in_sync` with this one: no node is entering or leaving."""
        members = len(self._idle_peers())
        return self._insync.are_all_members(members) and 1 + members >= self._node.settings.min_in_sync

    def _idle_peers(self) -> list[PeerReplica]:
        """Returns the nodes whose managers wait. If all are members, boundaries are offered without managers."""
        return [peer for peer in self._peers.values() if peer.idle]

    # -- boundaries -------------------------------------------------------------------------------

    def set_committed(self, boundary: Boundary, *, goes_on: bool = False) -> None:
        """Sets the committed boundary, at the start of the term or after a commit.

        Args:
            goes_on: the attempt goes on, so that later boundaries may be gathered.
        """
        epoch = self._committed_epoch = boundary.stamp.epoch
        for key in tuple(self._boundaries):
            if key[0] < epoch:
                del self._boundaries[key]
        self._boundaries[boundary.key] = boundary
        self._insync.drop_before(epoch)
        self.unsent.note_commit(goes_on=goes_on)
        if not self._insync.add(boundary.key):
            return  # no other nodes
        self._withdraw_outdated_offers()
        if not self._insync.are_all_members(len(self._idle_peers())):
            self._follow_soon()

    def roll_back(self, boundary: Boundary) -> None:
        """Sets the committed boundary after the job went back to a checkpoint, and drops all others."""
        self._boundaries = {}
        self.unsent.clear()
        self._insync.forget_boundaries()
        self.set_committed(boundary)

    def drop_pending(self) -> None:
        """Drops the pending boundaries, since their attempt is over."""
        self.unsent.clear()
        self._insync.drop_pending(self._committed_epoch)
        self._boundaries = {k: b for k, b in self._boundaries.items() if k[0] <= self._committed_epoch}
        self._withdraw_outdated_offers()

    def offer(self, boundary: Boundary, *, gathers: bool) -> bool:
        """Offers a new boundary, which every member must acknowledge before the task reports.

        Args:
            gathers: the task goes on meanwhile, and calls `flush` when it stops: the offer may be sent later.

        Returns:
            True if the task must wait: for an acknowledgement, or for more members.
        """
        key = boundary.key
        self._boundaries[key] = boundary
        if not self._insync.add(key):
            return self._node.settings.min_in_sync > 1
        if self.unsent.is_small(boundary.value):
            self.unsent.add(boundary, goes_on=gathers)
        else:
            self.unsent.flush()
            self._offer_at_once([boundary])
        return True

    def _offer_at_once(self, boundaries: list[Boundary]) -> None:
        """Offers boundaries at once, if all nodes are members with idle managers; else their managers offer them."""
        idle, offered = self._idle_peers(), False
        try:
            offered = self._insync.are_all_members(len(idle)) and all(
                self._offer_to_member(each, boundaries) for each in idle
            )
        finally:
            if not offered:
                self._follow_soon()  # the managers offer them then, also after an error

    def _offer_to_member(self, peer: PeerReplica, boundaries: list[Boundary]) -> bool:
        """Offers pending boundaries to a member. Returns False if the message could not be sent at once."""
        message = self._changes_of(boundaries, peer) or message_of(boundaries, self._task, self._term, peer.invitation)
        began = self._node.tracing.on and clock()
        reply = self._node.router.begin_at(peer.node, message)
        if reply is None:
            return False
        for boundary in boundaries:
            peer.offered[boundary.key] = reply
        reply.add_done_callback(partial(self._on_answer, peer, boundaries, began))
        return True

    def _changes_of(self, boundaries: list[Boundary], peer: PeerReplica) -> Offer | None:
        """Makes an offer without the buffers that a member has; None: it has none of them.

        If the member refuses, since it has freed the boundary with them, its manager offers the whole boundary.
        """
        boundary = boundaries[-1]
        if len(boundaries) > 1 or not boundary.value.buffers:
            return None
        base = self._boundaries.get(self._insync.acknowledged_before(peer.node, boundary.key) or boundary.key)
        changes = changes_since(boundary.value, base.value) if base is not None and base is not boundary else None
        if changes is None:
            return None
        value, kept = changes
        return Offer(boundary.stamp, self._term, self._task, False, False, peer.invitation, value, kept)

    def _on_answer(
        self, peer: PeerReplica, boundaries: list[Boundary], began: int, reply: asyncio.Future[Reply]
    ) -> None:
        """Handles the answer to an offer of `_offer_to_member`. A manager repeats an offer that was not accepted."""
        offered = peer.offered
        answered = [boundary for boundary in boundaries if offered.get(boundary.key) is reply]
        if not answered:
            return  # withdrawn meanwhile
        for boundary in answered:
            del offered[boundary.key]
        if reply.cancelled() or reply.exception() is not None or type(reply.result()) is not Accepted:
            self._follow_soon()
            return
        self._insync.acknowledge(peer.node, *[boundary.key for boundary in answered])
        peer.refused = ""
        if began:
            self._trace_offer(began, peer.node, answered)
        if self._insync.only_members:
            self._wake_waits()
        else:
            self._follow_soon()

    def _withdraw_outdated_offers(self) -> None:
        """Ignores the answers to offers of boundaries that are no longer needed."""
        current = set(self._insync.current)
        for peer in self._peers.values():
            if offered := peer.offered:
                awaited = {reply for key, reply in offered.items() if key in current}
                for reply in [reply for reply in dict.fromkeys(offered.values()) if reply not in awaited]:
                    reply.cancel()

    def is_acknowledged(self, key: Key) -> bool:
        """True if a boundary has all acknowledgements that it needs."""
        return not self._insync.waits_for(key)

    async def wait_until_acknowledged(self, key: Key, *, admit_wait_s: float) -> None:
        """Waits until every member has stored the boundary, and there are enough members.

        Args:
            admit_wait_s: how long to wait also for wished backups to become members; 0: only for candidates that have
                stored a boundary, until `caught_up_by`.
        """
        need, insync = self._node.settings.min_in_sync, self._insync
        deadline = self._node.now() + admit_wait_s if admit_wait_s else 0.0
        try:
            while True:
                lacking = insync.waits_for(key)
                if lacking:
                    self._blocked[key] = partial(self._lack_text, "the acknowledgement of", lacking)
                    await self._next_change()
                    continue
                if need > 1 and insync.count_replicas_with(key) < need:
                    self._blocked[key] = partial(self._lack_of_holders_text, key, need)
                    await self._next_change()
                    continue
                if not admit_wait_s and insync.only_members:
                    return
                awaited = self._awaited_admissions(deadline)
                if not awaited:
                    return
                self._blocked[key] = partial(self._lack_text, "the admission of", tuple(awaited))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(awaited.values()) - self._node.now()):
                        await self._next_change()
        finally:
            self._blocked.pop(key, None)

    def _next_change(self) -> asyncio.Future[None]:
        """Returns a future that is done at the next change of the in-sync set."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits.append(change)
        return change

    def _wake_waits(self) -> None:
        """Wakes waits for a change of the in-sync set."""
        if self._waits:
            watching, self._waits = self._waits, []
            for change in watching:
                if not change.done():
                    change.set_result(None)

    def _lack_text(self, what: str, nodes: tuple[str, ...]) -> str:
        return f"{what} {', '.join(map(self._name_with_refusal, nodes))}"

    def _name_with_refusal(self, node: str) -> str:
        """Returns a node's name, with its reason for refusing a boundary, if it gave one."""
        refused = peer.refused if (peer := self._peers.get(node)) is not None else ""
        return f"{name_of(node)} (it refuses: {refused})" if refused else name_of(node)

    def _lack_of_holders_text(self, key: Key, need: int) -> str:
        return f"{need - self._insync.count_replicas_with(key)} more in-sync replicas (min_in_sync={need})"

    def _awaited_admissions(self, deadline: float) -> dict[str, float]:
        """Returns {node: deadline} of nodes that should become members before the epoch finishes.

        Args:
            deadline: for wished nodes; 0: only candidates that have stored a boundary, by their own deadlines.
        """
        found = dict.fromkeys(self._invitable(), deadline)
        # A node that needs longer per boundary than an epoch takes would never have them all.
        for node in self._insync.not_yet_members():
            if (peer := self._peers.get(node)) is not None:
                found[node] = max(found.get(node, 0.0), peer.caught_up_by)
        now = self._node.now()
        return {n: by for n, by in found.items() if by > now and self._insync.state_of(n) is not MemberState.MEMBER}

    @property
    def in_sync_count(self) -> int:
        """The number of members, the primary included."""
        return 1 + len(self._insync.members())

    # -- managing other nodes ---------------------------------------------------------------------

    @property
    def peers(self) -> list[str]:
        """The nodes that have a manager, also before and after etcd shows them as members."""
        return list(self._peers)

    async def run(self) -> None:
        """Invites other nodes to keep replicas of the task, and starts their managers, until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            stop = self._node.keeper.on_change(self._follow_changes, structure=True)
            try:
                self._follow_changes()
                await asyncio.Event().wait()  # until the term ends; the managers do the work
            finally:
                stop()
                self.unsent.clear()
                self._group = None
                for peer in self._peers.values():
                    peer.ignore_answers()

    def _follow_soon(self) -> None:
        """Calls `_follow_changes` after this step of the event loop, for a change that the view does not show."""
        self._wake_waits()
        if self._group is not None and not self._follow_scheduled:
            self._follow_scheduled = True
            asyncio.get_running_loop().call_soon(self._follow_now)

    def _follow_now(self) -> None:
        self._follow_scheduled = False
        self._follow_changes()

    def _wished(self) -> list[str]:
        """Returns the other nodes on which placement wants a replica; dead nodes, too, until it is computed again."""
        wish = self._node.wish(self._task)
        if wish is None:
            return []
        nodes = [*wish.backups] + ([wish.primary] if wish.primary else [])
        return [node for node in nodes if node != self._node.id]

    def _living(self) -> set[str]:
        """Returns the registered nodes that are not suspected."""
        return self._node.keeper.view.nodes.keys() - self._node.suspects

    def _invitable(self) -> list[str]:
        """Returns the living nodes that placement wishes for."""
        living = self._living()
        return [node for node in self._wished() if node in living]

    def _follow_changes(self) -> None:
        """Follows a change of the view or of a suspicion: invites wished nodes, wakes managers, deletes old keys."""
        self.unsent.flush()  # nodes come or go: the next commit should wait for nothing else
        self._wake_waits()
        for peer in self._peers.values():
            peer.wake_if_due()
        if self._group is None or self._node.paused:
            return
        for node in self._invitable():
            self._insync.invite(node)
        for node in self._insync.nodes:
            if node not in self._peers:
                self._invitations += 1
                peer = self._peers[node] = PeerReplica(node, self._invitations)
                managing = self._group.create_task(self._manage(peer), name=f"tend {self._task} on {node}")
                managing.add_done_callback(partial(self._on_peer_released, peer))
        for node, member in self._node.keeper.view.members_of(self._task).items():
            until = member.record.until
            over = until is not None and until < self._committed_epoch and self._insync.state_of(node) is None
            if over and node in self._node.keeper.view.gone and node not in self._deleting:
                self._deleting.add(node)
                self._group.create_task(self._delete_evicted_key(node), name=f"tidy {self._task} on {node}")

    def _is_unwanted(self, node: str) -> bool:
        """True for a suspected node, and for a node that is not wished, once all wished nodes are living members.

        A candidate is unwanted as soon as there are enough members: wishes change while replicas are set up, and
        admitting a node only to evict it costs a copy and two writes. If members are lacking, the first candidate that
        is ready is admitted.
        """
        if node in self._node.suspects:
            return True
        if self._node.wish(self._task) is None:
            return False
        wished = self._wished()
        if node in wished:
            return False
        living, insync = self._living(), self._insync
        if insync.state_of(node) is MemberState.CANDIDATE and len(living.intersection(insync.members())) >= len(wished):
            return True
        return insync.wishes_fulfilled(wished, living)

    async def _manage(self, peer: PeerReplica) -> None:
        """Manages the replica on one other node: keeps it in sync while it is wanted, and releases it at the end."""
        backoff, node = Backoff(), peer.node
        await self._keep_in_sync(peer, backoff)
        peer.ignore_answers()
        while node not in self._node.suspects:
            try:
                release = Release(self._task, self._term, peer.invitation, self._node.keeper.view.revision)
                await self._node.router.to_node(node, release, timeout_s=self._node.settings.call_s)
                return
            except TransportError:
                await backoff.pause()

    def _on_peer_released(self, peer: PeerReplica, _: object) -> None:
        """Forgets a node that was released. If it was invited again meanwhile, it gets a new manager."""
        del self._peers[peer.node]
        self._follow_soon()

    async def _keep_in_sync(self, peer: PeerReplica, backoff: Backoff) -> None:
        """Offers boundaries to a node and admits it, until it is unwanted; then drops the candidate, or evicts the
        member.
        """
        node = peer.node
        while (state := self._insync.state_of(node)) is not None:
            if self._is_unwanted(node):
                if state is MemberState.CANDIDATE:
                    self._insync.drop_candidate(node)
                    self._wake_waits()
                    return
                await self._node.wait_while_paused()
                if self._is_unwanted(node):  # it may be wanted again after a pause
                    await self._evict(peer, backoff)
                continue
            missing = self._next_to_offer(peer)
            if missing is not None:
                await self._offer(peer, missing, backoff, candidate=state is MemberState.CANDIDATE)
            elif self._may_admit(node):
                await self._admit(node, backoff)
            else:
                peer.idle = True
                try:
                    await self._wait_until_needed(
                        peer, lambda: self._next_to_offer(peer) is not None or self._may_admit(node)
                    )
                finally:
                    peer.idle = False

    def _next_to_offer(self, peer: PeerReplica) -> Key | None:
        """Returns the first boundary that the node has not acknowledged and is not receiving; None: there is none."""
        offered, gathered = peer.offered, self.unsent.boundaries
        missing = self._insync.missing(peer.node)
        return next((key for key in missing if key not in offered and key not in gathered), None)

    def _may_admit(self, node: str) -> bool:
        """True if the admitting write may be sent; False also while the node's key is absent."""
        return node in self._node.keeper.view.nodes and self._insync.may_admit(node)

    def _wait_until_needed(self, peer: PeerReplica, something: Callable[[], bool]) -> asyncio.Future[None]:
        """Returns a future that is done when `something` is true or the node is unwanted; cancel it after use."""
        return peer.wait_until(lambda: something() or self._is_unwanted(peer.node))

    async def _offer(self, peer: PeerReplica, key: Key, backoff: Backoff, *, candidate: bool) -> None:
        """Offers one boundary to a node, once. The manager retries until the node has it or is known to be dead.

        An offer to a member has no timeout: a large boundary takes as long as the network needs. The lease, the port or
        the broken connection shows that a peer is dead.
        """
        node = peer.node
        boundary = self._boundaries.get(key)
        if boundary is None:
            return  # history by now
        committed = key[0] <= self._committed_epoch
        value = await self._replica.with_all_reports(boundary.value) if candidate and committed else boundary.value
        message = Offer(boundary.stamp, self._term, self._task, committed, candidate, peer.invitation, value)
        settings = self._node.settings
        timeout_s = settings.setup_s if candidate else None
        began = self._node.tracing.on and clock()

        def is_acknowledged_or_dropped() -> bool:
            # An offer to a candidate survives commits: one that takes longer than an epoch would never end.
            return not candidate and key not in self._insync.missing(node)

        dead = self._wait_until_needed(peer, is_acknowledged_or_dropped)
        try:
            async with alongside(self._node.router.to_node(node, message, timeout_s=timeout_s), dead) as (call, _):
                await any_done(call, dead)
                if call.done() and isinstance(call.result(), Accepted):
                    self._insync.acknowledge(node, key)
                    peer.refused = ""
                    if candidate and not peer.caught_up_by:
                        peer.caught_up_by = self._node.now() + settings.admit_wait_s
                    if began:
                        self._trace_offer(began, node, [boundary])
                    backoff.reset()
                    self._follow_soon()
        except Refused as refused:
            if refused.reason in (Reason.USER_ERROR, Reason.DONE):
                self._node.log.info("task %d: node %s refuses boundary %d: %s", self._task, node, key[0], refused)
            if refused.reason in (Reason.BAD_MESSAGE, Reason.NO_MEMORY):
                peer.refused = str(refused)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_NO_MEMORY_PAUSE_S):
                        await self._wait_until_needed(peer, is_acknowledged_or_dropped)
            else:
                await backoff.pause()
        except TransportError as error:
            self._node.log.debug("task %d: offer to node %s: %s", self._task, node, error)
            await backoff.pause()

    def _trace_offer(self, began: int, node: str, boundaries: list[Boundary]) -> None:
        """Traces an offer as one span, of the first traced epoch in it."""
        tracing = self._node.tracing
        size = sum(boundary.value.size_bytes for boundary in boundaries)
        for boundary in boundaries:
            made = Stamp(boundary.stamp.attempt, boundary.stamp.epoch - 1)
            if tracing.is_traced(made.epoch):
                who = name_of(node)
                tracing.keep("offer", "", who, began, clock(), self._task, made, self._term, size)
                return

    async def _admit(self, node: str, backoff: Backoff) -> None:
        """Writes a candidate into the in-sync set, if it still may be admitted."""
        await self._node.wait_while_paused()
        view = self._node.keeper.view
        if not self._may_admit(node):
            return  # while this node was paused
        writer = self._node.new_writer()
        txn = transactions.admit(
            view,
            self._task,
            primary_revision=self._primary_revision,
            node=self._node.id,
            node_revision=self._node.node_revision,
            candidate=node,
            writer=writer,
        )
        self._insync.begin_admission(node)
        revision = await self._node.transact(txn, key=view.keys.member(self._task, node), writer=writer)
        self._insync.end_admission(node, revision is not None)
        self._follow_soon()
        begins = self._committed_epoch == 0  # one event for the job, not two for each task
        what = f"{name_of(node)} has a backup now"
        await self._emit_write(revision, backoff, "admitted", node, what, transient=begins)

    async def _evict(self, peer: PeerReplica, backoff: Backoff) -> None:
        """Writes the member out of the in-sync set, effective from the next boundary."""
        node, view = peer.node, self._node.keeper.view
        key = view.keys.member(self._task, node)
        if node not in view.members_of(self._task):
            # The view may be behind the takeover that named this member: at its revision the key is there.
            await self._node.keeper.wait_for_revision(self._primary_revision)
            if node not in self._node.keeper.view.members_of(self._task):
                self._insync.begin_eviction(node)
                self._note_evicted(peer, True)
            return
        writer = self._node.new_writer()
        txn = transactions.evict(
            view,
            self._task,
            primary_revision=self._primary_revision,
            node=self._node.id,
            node_revision=self._node.node_revision,
            member=node,
            writer=writer,
        )
        known = self._insync.state_of(node) is MemberState.MARKED  # by the primary that marked it
        self._insync.begin_eviction(node)
        revision = await self._node.transact(txn, key=key, writer=writer)
        self._note_evicted(peer, revision is not None)
        ended = not self._node.keeper.view.running  # nodes leave at the end of a job: no event
        what = f"{name_of(node)} is no longer in sync"
        await self._emit_write(revision, backoff, "evicted", node, what, transient=ended or known)

    def _note_evicted(self, peer: PeerReplica, written: bool) -> None:
        """Notes whether the evicting write succeeded; if so, ignores the answers to offers under way to the node."""
        self._insync.end_eviction(peer.node, written)
        if written:
            peer.ignore_answers()
        self._follow_soon()

    async def _emit_write(
        self, revision: int | None, backoff: Backoff, kind: str, node: str, what: str, *, transient: bool
    ) -> None:
        """Emits the change of the in-sync set that a write made; reads the view again if etcd refused it (None)."""
        keeper = self._node.keeper
        if revision is None:
            await keeper.refresh()
            await backoff.pause()
            return
        backoff.reset()
        self._node.events.emit(
            kind,
            f"task {self._task}: {what} (in sync: {self.in_sync_count})",
            task=self._task,
            term=self._term,
            epoch=self._committed_epoch,
            transient=transient,
            fields={"of": node},
        )
        await keeper.wait_for_revision(revision)

    async def _delete_evicted_key(self, node: str) -> None:
        """Deletes the key of a gone member that was evicted before the committed boundary."""
        try:
            await self._node.wait_while_paused()
            view = self._node.keeper.view
            if self._insync.state_of(node) is None and node in view.members_of(self._task):
                txn = transactions.remove_member(
                    view,
                    self._task,
                    primary_revision=self._primary_revision,
                    node=self._node.id,
                    node_revision=self._node.node_revision,
                    member=node,
                )
                await self._node.writes.try_once(txn)
        finally:
            self._deleting.discard(node)
