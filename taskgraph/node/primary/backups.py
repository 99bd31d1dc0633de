"""A primary's care for its task's other replicas: offer boundaries, admit candidates, evict members.

    wished for ──► candidate ──► member ──► evicted ──► released
                    offered       acknowledges each pending boundary

One coroutine tends each other node, from the first offer to the eviction. `protocol.insync.InSync` decides which
acknowledgements a boundary needs, and when a write may be sent.

In epochs without incidents no coroutine takes part: a pending boundary is offered where it is made, and
acknowledgements are taken where they arrive. Small boundaries of a task that works ahead of the commit are gathered and
offered in one message, in time for the leader's next commit. The tenders repeat whatever fails.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from taskgraph.errors import Refused, TransportError
from taskgraph.node.backoff import Backoff
from taskgraph.node.primary.tender import Tender
from taskgraph.node.primary.unsent_offers import UnsentOffers, message_of
from taskgraph.observe.trace import clock
from taskgraph.protocol import transactions
from taskgraph.protocol.boundaries import Boundary
from taskgraph.protocol.insync import InSync, Place
from taskgraph.protocol.messages import Accepted, Offer, Reason, Release, Reply, Stamp
from taskgraph.protocol.records import name_of
from taskgraph.system.alongside import alongside, any_done

if TYPE_CHECKING:
    from taskgraph.node.replica import Replica
    from taskgraph.node.services import NodeServices

__all__ = ["Backups"]

Key = tuple[int, int, int]

_UNTAKEN_S = 1.0
"""Pause before a boundary that a node had no memory for is offered again: each offer sends all of it."""


class Backups:
    """The in-sync set of one task, maintained by its primary for one term.

    Args:
        epoch: number of the committed boundary, as the takeover read it.
    """

    def __init__(
        self, node: NodeServices, replica: Replica, *, term: int, epoch: int, primary_revision: int, insync: InSync
    ) -> None:
        self._node = node
        self._replica = replica
        self._task = replica.task
        self._term = term
        self._primary_revision = primary_revision
        self._insync = insync
        self._boundaries: dict[Key, Boundary] = {}
        self._committed_epoch = epoch
        self._tenders: dict[str, Tender] = {}
        self._tidying: set[str] = set()
        self._invitations = 0
        self._group: asyncio.TaskGroup | None = None
        self._watching: list[asyncio.Future[None]] = []  # waits for the next change of the set
        self._poked = False
        self._blocked: dict[Key, Callable[[], str]] = {}  # boundaries that are waited for -> what is lacking
        self.unsent = UnsentOffers(node, self._offer_all)
        """Pending boundaries that were not offered yet."""

    @property
    def blocked(self) -> str:
        """Names what the earliest pending boundary waits for, for `status`; gathered ones do not count."""
        waits = self._blocked.keys() - self.unsent.boundaries.keys()
        return self._blocked[min(waits)]() if waits else ""

    @property
    def settled(self) -> bool:
        """True if the set waits for nothing but acknowledgements."""
        members = len(self._idle())
        return self._insync.all_members(members) and 1 + members >= self._node.settings.min_in_sync

    def _idle(self) -> list[Tender]:
        """Tenders without work. If all other nodes are idle members, boundaries are offered without tenders."""
        return [tender for tender in self._tenders.values() if tender.idle]

    # -- boundaries -------------------------------------------------------------------------------

    def committed(self, boundary: Boundary, *, goes_on: bool = False) -> None:
        """`boundary` is the committed one: at the start of the term, or after a commit.

        Args:
            goes_on: its attempt goes on, so that later boundaries may be gathered.
        """
        epoch = self._committed_epoch = boundary.stamp.epoch
        for key in tuple(self._boundaries):
            if key[0] < epoch:
                del self._boundaries[key]
        self._boundaries[boundary.key] = boundary
        self._insync.keep_from(epoch)
        self.unsent.committed(goes_on=goes_on)
        if not self._insync.add(boundary.key):
            return  # no other nodes
        self._withdraw_history()
        if not self._insync.all_members(len(self._idle())):
            self._poke()

    def rolled_back(self, boundary: Boundary) -> None:
        """The job went back to a checkpoint: `boundary` is the committed one, all others are undone."""
        self._boundaries = {}
        self.unsent.clear()
        self._insync.forget_boundaries()
        self.committed(boundary)

    def drop_pending(self) -> None:
        """The attempt of the pending boundaries is over."""
        self.unsent.clear()
        self._insync.drop_pending(self._committed_epoch)
        self._boundaries = {k: b for k, b in self._boundaries.items() if k[0] <= self._committed_epoch}
        self._withdraw_history()

    def pending(self, boundary: Boundary, *, gathers: bool) -> bool:
        """Offers a new snapshot: every member must acknowledge it before the task reports.

        Args:
            gathers: the task goes on meanwhile, and calls `flush` when it does not: the offer may come later.

        Returns:
            True if there is something to wait for (see `held`): another node, or a wish for more nodes.
        """
        key = boundary.key
        self._boundaries[key] = boundary
        if not self._insync.add(key):
            return self._node.settings.min_in_sync > 1
        if self.unsent.takes(boundary.value):
            self.unsent.add(boundary, goes_on=gathers)
        else:
            self.unsent.flush()
            self._offer_all([boundary])
        return True

    def _offer_all(self, boundaries: list[Boundary]) -> None:
        """Offers boundaries to all members, as far as that needs no waiting."""
        idle, offered = self._idle(), False
        try:
            offered = self._insync.all_members(len(idle)) and all(self._offer_now(each, boundaries) for each in idle)
        finally:
            if not offered:
                self._poke()  # the tenders take over, also after an error

    def _offer_now(self, tender: Tender, boundaries: list[Boundary]) -> bool:
        """Offers a member pending boundaries, as far as that needs no waiting."""
        message = message_of(boundaries, self._task, self._term, tender.invitation)
        began = self._node.tracing.on and clock()
        reply = self._node.router.begin_at(tender.node, message)
        if reply is None:
            return False
        for boundary in boundaries:
            tender.offered[boundary.key] = reply
        reply.add_done_callback(partial(self._answered, tender, boundaries, began))
        return True

    def _answered(self, tender: Tender, boundaries: list[Boundary], began: int, reply: asyncio.Future[Reply]) -> None:
        """Takes the answer to such an offer; the tender repeats one that was not accepted."""
        offered = tender.offered
        answered = [boundary for boundary in boundaries if offered.get(boundary.key) is reply]
        if not answered:
            return  # withdrawn meanwhile
        for boundary in answered:
            del offered[boundary.key]
        if reply.cancelled() or reply.exception() is not None or type(reply.result()) is not Accepted:
            self._poke()
            return
        self._insync.acknowledge(tender.node, *[boundary.key for boundary in answered])
        tender.refused = ""
        if began:
            self._trace_offer(began, tender.node, answered)
        if self._insync.only_members:
            self._changed()
        else:
            self._poke()

    def _withdraw_history(self) -> None:
        """Withdraws offers of boundaries that are history, or were never committed."""
        current = set(self._insync.current)
        for tender in self._tenders.values():
            if offered := tender.offered:
                awaited = {reply for key, reply in offered.items() if key in current}
                for reply in [reply for reply in dict.fromkeys(offered.values()) if reply not in awaited]:
                    reply.cancel()

    def acknowledged(self, key: Key) -> bool:
        """True if all nodes have acknowledged whose acknowledgement that boundary needs."""
        return not self._insync.waits_for(key)

    async def until_acknowledged(self, key: Key, *, admit_wait_s: float) -> None:
        """Returns when every member holds the boundary, and there are enough members.

        Args:
            admit_wait_s: how long to wait for wished-for backups to become members, too.
        """
        need, insync = self._node.settings.min_in_sync, self._insync
        deadline = self._node.now() + admit_wait_s if admit_wait_s else 0.0
        try:
            while True:
                lacking = insync.waits_for(key)
                if lacking:
                    self._blocked[key] = partial(self._lacks, "the acknowledgement of", lacking)
                    await self._change()
                    continue
                if need > 1 and insync.holders(key) < need:
                    self._blocked[key] = partial(self._lacks_holders, key, need)
                    await self._change()
                    continue
                if not admit_wait_s and insync.only_members:
                    return
                awaited = self._awaited(deadline)
                if not awaited:
                    return
                self._blocked[key] = partial(self._lacks, "the admission of", tuple(awaited))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(awaited.values()) - self._node.now()):
                        await self._change()
        finally:
            self._blocked.pop(key, None)

    def _change(self) -> asyncio.Future[None]:
        """A future that is done at the next change of the set."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watching.append(change)
        return change

    def _changed(self) -> None:
        """The set changed: waits look again."""
        if self._watching:
            watching, self._watching = self._watching, []
            for change in watching:
                if not change.done():
                    change.set_result(None)

    def _lacks(self, what: str, nodes: tuple[str, ...]) -> str:
        return f"{what} {', '.join(map(self._named, nodes))}"

    def _named(self, node: str) -> str:
        """A node's name, with its reason for taking no boundary, if it gave one."""
        refused = tender.refused if (tender := self._tenders.get(node)) is not None else ""
        return f"{name_of(node)} (it refuses: {refused})" if refused else name_of(node)

    def _lacks_holders(self, key: Key, need: int) -> str:
        return f"{need - self._insync.holders(key)} more in-sync replicas (min_in_sync={need})"

    def _awaited(self, deadline: float) -> dict[str, float]:
        """Nodes that should become members before the epoch finishes, with the deadline for each.

        Args:
            deadline: for nodes that are wished for.
        """
        found = dict.fromkeys(self._invitable(), deadline)
        # A node that needs longer per boundary than an epoch takes would never have them all.
        for node in self._insync.candidates():
            if (tender := self._tenders.get(node)) is not None:
                found[node] = max(found.get(node, 0.0), tender.caught_up_by)
        now = self._node.now()
        return {n: by for n, by in found.items() if by > now and self._insync.place(n) is not Place.MEMBER}

    @property
    def in_sync(self) -> int:
        """The number of members, the primary included."""
        return 1 + len(self._insync.members())

    # -- tending ----------------------------------------------------------------------------------

    @property
    def tended(self) -> list[str]:
        """Nodes with a tender, also before and after etcd shows them as members."""
        return list(self._tenders)

    async def run(self) -> None:
        """Invites and tends other nodes until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            stop = self._node.keeper.on_change(self._look, structure=True)
            try:
                self._look()
                await asyncio.Event().wait()  # until the term ends; the tenders do the work
            finally:
                stop()
                self.unsent.clear()
                self._group = None
                for tender in self._tenders.values():
                    tender.withdraw()

    def _poke(self) -> None:
        """Examines all tenders after this step of the event loop: something changed that the view does not show."""
        self._changed()
        if self._group is not None and not self._poked:
            self._poked = True
            asyncio.get_running_loop().call_soon(self._look_again)

    def _look_again(self) -> None:
        self._poked = False
        self._look()

    def _wished(self) -> list[str]:
        """Other nodes that placement wants to hold this task; dead ones, too, until placement is computed again."""
        wish = self._node.wish(self._task)
        if wish is None:
            return []
        nodes = [*wish.backups] + ([wish.primary] if wish.primary else [])
        return [node for node in nodes if node != self._node.id]

    def _living(self) -> set[str]:
        """Registered nodes without a suspicion."""
        return self._node.keeper.view.nodes.keys() - self._node.suspects

    def _invitable(self) -> list[str]:
        """Living nodes that placement wishes for."""
        living = self._living()
        return [node for node in self._wished() if node in living]

    def _look(self) -> None:
        """Follows a change of the view or of a suspicion: invites wished-for nodes, tends all."""
        self.unsent.flush()  # nodes come or go: the next commit should wait for nothing else
        self._changed()
        for tender in self._tenders.values():
            tender.look()
        if self._group is None or self._node.paused:
            return
        for node in self._invitable():
            self._insync.invite(node)
        for node in self._insync.nodes:
            if node not in self._tenders:
                self._invitations += 1
                tender = self._tenders[node] = Tender(node, self._invitations)
                tending = self._group.create_task(self._tend(tender), name=f"tend {self._task} on {node}")
                tending.add_done_callback(partial(self._tended, tender))
        for node, member in self._node.keeper.view.members_of(self._task).items():
            until = member.record.until
            over = until is not None and until < self._committed_epoch and self._insync.place(node) is None
            if over and node in self._node.keeper.view.gone and node not in self._tidying:
                self._tidying.add(node)
                self._group.create_task(self._tidy(node), name=f"tidy {self._task} on {node}")

    def _unwanted(self, node: str) -> bool:
        """True for a dead node; also for one that is not wished for, once all wished-for nodes are living members.

        A candidate is unwanted as soon as there are members enough: wishes change while replicas are set up, and
        admitting a node only to evict it costs a copy and two writes. If members are lacking, the first that is ready
        is admitted.
        """
        if node in self._node.suspects:
            return True
        if self._node.wish(self._task) is None:
            return False
        wished = self._wished()
        if node in wished:
            return False
        living, insync = self._living(), self._insync
        if insync.place(node) is Place.CANDIDATE and len(living.intersection(insync.members())) >= len(wished):
            return True
        return insync.wishes_fulfilled(wished, living)

    async def _tend(self, tender: Tender) -> None:
        """Does everything about one other node, step by step, and releases it at the end."""
        backoff, node = Backoff(), tender.node
        await self._keep_in_sync(tender, backoff)
        tender.withdraw()
        while node not in self._node.suspects:
            try:
                release = Release(self._task, self._term, tender.invitation, self._node.keeper.view.revision)
                await self._node.router.to_node(node, release, timeout_s=self._node.settings.call_s)
                return
            except TransportError:
                await backoff.pause()

    def _tended(self, tender: Tender, _: object) -> None:
        """A tender ended; a node that was invited again meanwhile gets a new one."""
        del self._tenders[tender.node]
        self._poke()

    async def _keep_in_sync(self, tender: Tender, backoff: Backoff) -> None:
        node = tender.node
        while (place := self._insync.place(node)) is not None:
            if self._unwanted(node):
                if place is Place.CANDIDATE:
                    self._insync.drop_candidate(node)
                    self._changed()
                    return
                await self._node.wait_while_paused()
                if self._unwanted(node):  # it may be wanted again after a pause
                    await self._evict(tender, backoff)
                continue
            missing = self._to_offer(tender)
            if missing is not None:
                await self._offer(tender, missing, backoff, candidate=place is Place.CANDIDATE)
            elif self._admissible(node):
                await self._admit(node, backoff)
            else:
                tender.idle = True
                try:
                    await self._when(tender, lambda: self._to_offer(tender) is not None or self._admissible(node))
                finally:
                    tender.idle = False

    def _to_offer(self, tender: Tender) -> Key | None:
        """The first boundary that the node has not acknowledged and is not receiving."""
        offered, gathered = tender.offered, self.unsent.boundaries
        missing = self._insync.missing(tender.node)
        return next((key for key in missing if key not in offered and key not in gathered), None)

    def _admissible(self, node: str) -> bool:
        """True if the admitting write may be sent; waits for a key that just vanished."""
        return node in self._node.keeper.view.nodes and self._insync.may_admit(node)

    def _when(self, tender: Tender, something: Callable[[], bool]) -> asyncio.Future[None]:
        """A future that is done when a node needs attention; cancel it when it is not needed."""
        return tender.until(lambda: something() or self._unwanted(tender.node))

    async def _offer(self, tender: Tender, key: Key, backoff: Backoff, *, candidate: bool) -> None:
        """Offers one boundary, again and again, until the node has it or is known to be dead.

        An offer to a member has no timeout: a large boundary takes as long as the network needs, and would begin again.
        The lease, the port or the broken connection shows that a peer is dead.
        """
        node = tender.node
        boundary = self._boundaries.get(key)
        if boundary is None:
            return  # history by now
        committed = key[0] <= self._committed_epoch
        value = await self._replica.with_all_reports(boundary.value) if candidate and committed else boundary.value
        message = Offer(boundary.stamp, self._term, self._task, committed, candidate, tender.invitation, value)
        settings = self._node.settings
        timeout_s = settings.setup_s if candidate else None
        began = self._node.tracing.on and clock()

        def moot() -> bool:
            # An offer to a candidate survives commits: one that takes longer than an epoch would never end.
            return not candidate and key not in self._insync.missing(node)

        dead = self._when(tender, moot)
        try:
            async with alongside(self._node.router.to_node(node, message, timeout_s=timeout_s), dead) as (call, _):
                await any_done(call, dead)
                if call.done() and isinstance(call.result(), Accepted):
                    self._insync.acknowledge(node, key)
                    tender.refused = ""
                    if candidate and not tender.caught_up_by:
                        tender.caught_up_by = self._node.now() + settings.admit_wait_s
                    if began:
                        self._trace_offer(began, node, [boundary])
                    backoff.reset()
                    self._poke()
        except Refused as refused:
            if refused.reason in (Reason.USER_ERROR, Reason.DONE):
                self._node.log.info("task %d: node %s refuses boundary %d: %s", self._task, node, key[0], refused)
            if refused.reason in (Reason.BAD_MESSAGE, Reason.NO_MEMORY):
                tender.refused = str(refused)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_UNTAKEN_S):
                        await self._when(tender, moot)
            else:
                await backoff.pause()
        except TransportError as error:
            self._node.log.debug("task %d: offer to node %s: %s", self._task, node, error)
            await backoff.pause()

    def _trace_offer(self, began: int, node: str, boundaries: list[Boundary]) -> None:
        """Traces a message as one span, of the first traced epoch in it."""
        tracing = self._node.tracing
        size = sum(boundary.value.size_bytes for boundary in boundaries)
        for boundary in boundaries:
            made = Stamp(boundary.stamp.attempt, boundary.stamp.epoch - 1)
            if tracing.takes(made.epoch):
                who = name_of(node)
                tracing.keep("offer", "", who, began, clock(), self._task, made, self._term, size)
                return

    async def _admit(self, node: str, backoff: Backoff) -> None:
        """Writes the candidate into the in-sync set."""
        await self._node.wait_while_paused()
        view = self._node.keeper.view
        if not self._admissible(node):
            return  # while this node was paused
        writer = self._node.writer()
        txn = transactions.admit(
            view,
            self._task,
            primary_revision=self._primary_revision,
            node=self._node.id,
            node_revision=self._node.node_revision,
            candidate=node,
            writer=writer,
        )
        self._insync.admitting(node)
        revision = await self._node.transact(txn, key=view.keys.member(self._task, node), writer=writer)
        self._insync.admitted(node, revision is not None)
        self._poke()
        begins = self._committed_epoch == 0  # one event for the job, not two for each task
        what = f"{name_of(node)} has a backup now"
        await self._after_write(revision, backoff, "admitted", node, what, transient=begins)

    async def _evict(self, tender: Tender, backoff: Backoff) -> None:
        """Writes the member out of the in-sync set, effective from the next boundary."""
        node, view = tender.node, self._node.keeper.view
        key = view.keys.member(self._task, node)
        if node not in view.members_of(self._task):
            # The view may be behind the takeover that named this member: at its revision the key is there.
            await self._node.keeper.caught_up(self._primary_revision)
            if node not in self._node.keeper.view.members_of(self._task):
                self._insync.evicting(node)
                self._evicted(tender, True)
            return
        writer = self._node.writer()
        txn = transactions.evict(
            view,
            self._task,
            primary_revision=self._primary_revision,
            node=self._node.id,
            node_revision=self._node.node_revision,
            member=node,
            writer=writer,
        )
        known = self._insync.place(node) is Place.MARKED  # by the primary that marked it
        self._insync.evicting(node)
        revision = await self._node.transact(txn, key=key, writer=writer)
        self._evicted(tender, revision is not None)
        ended = not self._node.keeper.view.running  # nodes leave at the end of a job: no event
        what = f"{name_of(node)} is no longer in sync"
        await self._after_write(revision, backoff, "evicted", node, what, transient=ended or known)

    def _evicted(self, tender: Tender, written: bool) -> None:
        """The outcome of the evicting write is known: under a new invitation the node acknowledges everything again."""
        self._insync.evicted(tender.node, written)
        if written:
            tender.withdraw()
        self._poke()

    async def _after_write(
        self, revision: int | None, backoff: Backoff, kind: str, node: str, what: str, *, transient: bool
    ) -> None:
        """Emits the change of the set, or reads the view again if it was refused."""
        keeper = self._node.keeper
        if revision is None:
            await keeper.refresh()
            await backoff.pause()
            return
        backoff.reset()
        self._node.events.emit(
            kind,
            f"task {self._task}: {what} (in sync: {self.in_sync})",
            task=self._task,
            term=self._term,
            epoch=self._committed_epoch,
            transient=transient,
            fields={"of": node},
        )
        await keeper.caught_up(revision)

    async def _tidy(self, node: str) -> None:
        """Deletes the key of a gone member that was evicted before the committed boundary."""
        try:
            await self._node.wait_while_paused()
            view = self._node.keeper.view
            if self._insync.place(node) is None and node in view.members_of(self._task):
                txn = transactions.remove_member(
                    view,
                    self._task,
                    primary_revision=self._primary_revision,
                    node=self._node.id,
                    node_revision=self._node.node_revision,
                    member=node,
                )
                await self._node.writes.attempt(txn)
        finally:
            self._tidying.discard(node)
