"""A primary's care for its task's other replicas: offer boundaries, admit candidates, evict members.

One coroutine tends each other node, from the first offer to the eviction. What must be acknowledged, and when a
write may be sent, is decided by `protocol.insync.InSync`.

A pending boundary is offered to members from where it is made, and their acknowledgements are taken where they arrive:
so it goes in all epochs in which nothing happens. Small ones of a task that works ahead of the commit are gathered, and
offered in one message, early enough to be held and reported when the leader commits again. Whatever does not succeed
like that is left to the tenders.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from taskgraph.errors import Refused, TransportError
from taskgraph.node.backoff import Backoff
from taskgraph.node.primary.gathered import Gathered, message_of
from taskgraph.node.primary.tender import Tender
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
"""What a node cannot take, mostly for want of memory, it is offered again so much later: it is sent whole each time."""


class Backups:
    """The in-sync set of one task, as its primary works on it for one term.

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
        self._watching: list[asyncio.Future[None]] = []  # dones that wait for something about the set to change
        self._poked = False
        self._blocked: dict[Key, Callable[[], str]] = {}  # boundaries that a done waits for -> what is lacking
        self.gathered = Gathered(node, self._offer_all)
        """Pending ones that nobody was offered yet."""

    @property
    def blocked(self) -> str:
        """What the earliest done waits for that waits, for `status`. What is gathered waits for nobody."""
        waits = self._blocked.keys() - self.gathered.boundaries.keys()
        return self._blocked[min(waits)]() if waits else ""

    @property
    def settled(self) -> bool:
        """Whether there is nothing about the set to wait for but acknowledgements, which may be left to come."""
        members = len(self._idle())
        return self._insync.all_members(members) and 1 + members >= self._node.settings.min_in_sync

    def _idle(self) -> list[Tender]:
        """Those with nothing to do. Where there are no other nodes, and all are members, it is offered without them."""
        return [tender for tender in self._tenders.values() if tender.idle]

    # -- boundaries -------------------------------------------------------------------------------

    def committed(self, boundary: Boundary, *, goes_on: bool = False) -> None:
        """`boundary` is the committed one, here at the start of the term or read since.

        Args:
            goes_on: so does the attempt that it was made in: what is made from now on may be gathered for the next one.
        """
        epoch = self._committed_epoch = boundary.stamp.epoch
        for key in tuple(self._boundaries):
            if key[0] < epoch:
                del self._boundaries[key]
        self._boundaries[boundary.key] = boundary
        self._insync.keep_from(epoch)
        self.gathered.committed(goes_on=goes_on)
        if not self._insync.add(boundary.key):
            return  # there is nobody to tell
        self._withdraw_history()
        if not self._insync.all_members(len(self._idle())):
            self._poke()

    def rolled_back(self, boundary: Boundary) -> None:
        """The job went back to a checkpoint: `boundary` is the committed one, all others were undone."""
        self._boundaries = {}
        self.gathered.clear()
        self._insync.forget_boundaries()
        self.committed(boundary)

    def drop_pending(self) -> None:
        """The attempt the pending boundaries were made in is over."""
        self.gathered.clear()
        self._insync.drop_pending(self._committed_epoch)
        self._boundaries = {k: b for k, b in self._boundaries.items() if k[0] <= self._committed_epoch}
        self._withdraw_history()

    def pending(self, boundary: Boundary, *, gathers: bool) -> bool:
        """A snapshot was made: every member must hold it before the task is done.

        Args:
            gathers: the task goes on meanwhile, and calls `flush` where it does not any more: it may be offered later.

        Returns:
            Whether there is something to wait for (see `held`): another node, or a wish for more of them.
        """
        key = boundary.key
        self._boundaries[key] = boundary
        if not self._insync.add(key):
            return self._node.settings.min_in_sync > 1
        if self.gathered.takes(boundary.value):
            self.gathered.add(boundary, goes_on=gathers)
        else:
            self.gathered.flush()
            self._offer_all([boundary])
        return True

    def _offer_all(self, boundaries: list[Boundary]) -> None:
        """Offers them to all members, where that takes no waiting."""
        idle, offered = self._idle(), False
        try:
            offered = self._insync.all_members(len(idle)) and all(self._offer_now(each, boundaries) for each in idle)
        finally:
            if not offered:
                self._poke()  # it is left to the tenders, also where something raised

    def _offer_now(self, tender: Tender, boundaries: list[Boundary]) -> bool:
        """Offers a member pending boundaries, where that takes no waiting."""
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
        """What is not accepted, the tender offers again."""
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
        if self._insync.steady:
            self._changed()
        else:
            self._poke()

    def _withdraw_history(self) -> None:
        """Nobody needs to hear any more of offers of what is history, or was never committed."""
        current = set(self._insync.current)
        for tender in self._tenders.values():
            if offered := tender.offered:
                awaited = {reply for key, reply in offered.items() if key in current}
                for reply in [reply for reply in dict.fromkeys(offered.values()) if reply not in awaited]:
                    reply.cancel()

    def acknowledged(self, key: Key) -> bool:
        """Whether everybody has whose acknowledgement that boundary needs."""
        return not self._insync.waits_for(key)

    async def held(self, key: Key, *, admit_wait_s: float) -> None:
        """Returns when every member holds the boundary, and enough of them.

        Args:
            admit_wait_s: how long to wait for the backups wished for to become members, too.
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
                if not admit_wait_s and insync.steady:
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
        """Is done when something about the set changed."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watching.append(change)
        return change

    def _changed(self) -> None:
        """Something about the set did: waits look again."""
        if self._watching:
            watching, self._watching = self._watching, []
            for change in watching:
                if not change.done():
                    change.set_result(None)

    def _lacks(self, what: str, nodes: tuple[str, ...]) -> str:
        return f"{what} {', '.join(map(self._named, nodes))}"

    def _named(self, node: str) -> str:
        """And why it cannot take what it is offered, where it said so: nobody else would tell what is waited for."""
        refused = tender.refused if (tender := self._tenders.get(node)) is not None else ""
        return f"{name_of(node)} (it refuses: {refused})" if refused else name_of(node)

    def _lacks_holders(self, key: Key, need: int) -> str:
        return f"{need - self._insync.holders(key)} more in-sync replicas (min_in_sync={need})"

    def _awaited(self, deadline: float) -> dict[str, float]:
        """Who is to become a member before the epoch is done, and until when that is waited for.

        Args:
            deadline: until then, for whoever is wished for.
        """
        found = dict.fromkeys(self._invitable(), deadline)
        # Who takes longer to be told of a boundary than an epoch takes would never hold all there are.
        for node in self._insync.candidates():
            if (tender := self._tenders.get(node)) is not None:
                found[node] = max(found.get(node, 0.0), tender.caught_up_by)
        now = self._node.now()
        return {n: by for n, by in found.items() if by > now and self._insync.place(n) is not Place.MEMBER}

    @property
    def in_sync(self) -> int:
        """Members, the primary included."""
        return 1 + len(self._insync.members())

    # -- tending ----------------------------------------------------------------------------------

    @property
    def tended(self) -> list[str]:
        """Nodes that it has to do with, also before etcd knows of that, and after."""
        return list(self._tenders)

    async def run(self) -> None:
        """Invites and tends other nodes until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            stop = self._node.keeper.on_change(self._look, structure=True)
            try:
                self._look()
                await asyncio.Event().wait()  # until the term ends; every tender says what it waits for
            finally:
                stop()
                self.gathered.clear()
                self._group = None
                for tender in self._tenders.values():
                    tender.withdraw()

    def _poke(self) -> None:
        """Something about the set changed that the view does not show: looked at once, after the caller is through."""
        self._changed()
        if self._group is not None and not self._poked:
            self._poked = True
            asyncio.get_running_loop().call_soon(self._look_again)

    def _look_again(self) -> None:
        self._poked = False
        self._look()

    def _wished(self) -> list[str]:
        """Other nodes that placement wants to hold this task, the dead included until it is computed anew."""
        wish = self._node.wish(self._task)
        if wish is None:
            return []
        nodes = [*wish.backups] + ([wish.primary] if wish.primary else [])
        return [node for node in nodes if node != self._node.id]

    def _living(self) -> set[str]:
        """Nodes that are registered, and not suspected."""
        return self._node.keeper.view.nodes.keys() - self._node.suspects

    def _invitable(self) -> list[str]:
        """Whoever is wished for and lives."""
        living = self._living()
        return [node for node in self._wished() if node in living]

    def _look(self) -> None:
        """The view or a suspicion changed: invite whom placement wishes for, tend whoever is there."""
        self.gathered.flush()  # somebody comes or goes: the next commit is not to wait for more than that
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
        """Dead, or not wished for any more while everyone who is wished for is a member, and lives.

        Of a candidate it is enough that there are as many members. When nodes join one after the other the wishes
        change while replicas are set up, and each that is admitted to be evicted is a copy and two writes for nothing.
        Where members are lacking, whoever is ready first is welcome.
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
        return insync.fulfilled(wished, living)

    async def _tend(self, tender: Tender) -> None:
        """Everything about one other node, one step after another, and its release at the end."""
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
        """Who was invited again meanwhile is tended anew."""
        del self._tenders[tender.node]
        self._poke()

    async def _keep_in_sync(self, tender: Tender, backoff: Backoff) -> None:
        node = tender.node
        while (place := self._insync.place(node)) is not None:
            if self._unwanted(node):
                if place is Place.CANDIDATE:
                    self._insync.dismiss(node)
                    self._changed()
                    return
                await self._node.while_paused()
                if self._unwanted(node):  # a pause may have been the reason
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
        """The first boundary that it has yet to acknowledge and that is not on its way to it."""
        offered, gathered = tender.offered, self.gathered.boundaries
        missing = self._insync.missing(tender.node)
        return next((key for key in missing if key not in offered and key not in gathered), None)

    def _admissible(self, node: str) -> bool:
        """Whether the admitting write may be sent. Where its key just vanished, that is waited for."""
        return node in self._node.keeper.view.nodes and self._insync.may_admit(node)

    def _when(self, tender: Tender, something: Callable[[], bool]) -> asyncio.Future[None]:
        """A future that is done when there is something to do about a node; cancel it when it is not needed."""
        return tender.until(lambda: something() or self._unwanted(tender.node))

    async def _offer(self, tender: Tender, key: Key, backoff: Backoff, *, candidate: bool) -> None:
        """Offers one boundary; a lost peer is offered again until it is known to be dead.

        A member has no time limit: a large boundary takes as long as the network needs for it, and would begin anew. A
        peer that is frozen or dead is told by its lease, its port or its broken connection.
        """
        node = tender.node
        boundary = self._boundaries.get(key)
        if boundary is None:
            return  # history by now
        committed = key[0] <= self._committed_epoch
        value = await self._replica.with_whole_log(boundary.value) if candidate and committed else boundary.value
        message = Offer(boundary.stamp, self._term, self._task, committed, candidate, tender.invitation, value)
        settings = self._node.settings
        timeout_s = settings.setup_s if candidate else None
        began = self._node.tracing.on and clock()

        def moot() -> bool:
            # A candidate's is not given up when an epoch commits: what takes longer than one would never be over.
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
        """One span, of the first whose epoch is looked at, however many were in the message."""
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
        await self._node.while_paused()
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
        begins = self._committed_epoch == 0  # that is one event, not two for every task
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
        told = self._insync.place(node) is Place.MARKED  # by the primary of the term that marked it
        self._insync.evicting(node)
        revision = await self._node.transact(txn, key=key, writer=writer)
        self._evicted(tender, revision is not None)
        ended = not self._node.keeper.view.running  # and so nodes leave: no news
        what = f"{name_of(node)} is no longer in sync"
        await self._after_write(revision, backoff, "evicted", node, what, transient=ended or told)

    def _evicted(self, tender: Tender, written: bool) -> None:
        """It is known whether the evicting write happened: who is invited again acknowledges everything anew."""
        self._insync.evicted(tender.node, written)
        if written:
            tender.withdraw()
        self._poke()

    async def _after_write(
        self, revision: int | None, backoff: Backoff, kind: str, node: str, what: str, *, transient: bool
    ) -> None:
        """A change of the set is written, and told; or it was refused, and the view is read again."""
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
        """Deletes the key of a member that was evicted before the committed boundary, and is gone."""
        try:
            await self._node.while_paused()
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
