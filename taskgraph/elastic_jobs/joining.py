"""How a newcomer enters: it copies the state of a worker, follows the totals, and proposes a view with itself.

    outside ──state of a donor──► following ──few totals behind, all workers keep the rest──► entering ──► in the view
       ▲──────────── no worker keeps the totals that it lacks any longer ────────────┘

No worker waits for a newcomer before it proposes the view. All keep the totals that it lacks until it has entered.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from taskgraph.errors import Refused, TransportError
from taskgraph.graph.sums import decode_sums
from taskgraph.protocol.elastic import transactions
from taskgraph.protocol.elastic.views import View
from taskgraph.protocol.messages import CopyState, FollowTotals, Reply, StateCopy, TotalsPage
from taskgraph.protocol.records import name_of

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.interface import WorkerNode

__all__ = ["Joining"]

_BEHIND = 1
"""A newcomer proposes its view when its user code lacks at most this many stable totals: the others wait for these."""
_FOLLOW_S = 0.001
"""Pause between two requests for totals. It doubles while steps take longer."""
_MOST_FOLLOW_S = 0.02
"""Pause while steps take long, and while user code loads its state, which takes all time that it can get."""


class Joining:
    """One newcomer's way into the view."""

    def __init__(self, node: WorkerNode) -> None:
        self._node = node
        self._engine = node.engine
        self._entering = -1  # the number of the view that it proposed last
        self._behind: set[str] = set()  # donors that do not keep the totals that it lacks

    async def run(self) -> None:
        """Brings this node into the view. Returns also if the job ends, or no donor keeps what it lacks.

        In the last case the node has begun anew, to copy the state again.
        """
        node, copied = self._node, self._node.has_begun()
        while node.keeper.view.running:
            donors = [w for w in reversed(self._view().workers) if w not in node.suspects and w not in node.gone]
            self._behind.clear()
            for donor in donors:
                if not copied:
                    copied = await self._copy_state(donor)
                if copied and await self._follow_totals(donor):
                    return
            if copied and self._behind >= set(donors) and donors:
                node.begin_anew_behind()
                return
            await node.short_pause()

    def _view(self) -> View:
        """Returns the newest view that this node has read from etcd."""
        assert self._node.keeper.view.workers is not None
        return View.of(self._node.keeper.view.workers.record)

    async def _copy_state(self, donor: str) -> bool:
        """Copies the state of a donor, and lets user code begin with that. Returns False if the donor gave no state."""
        lineage = self._view().lineage
        mark = self._node.trace.begin(of_step=False)
        reply = await self._call(donor, CopyState())
        if reply is None:
            return False
        text, size = f"copies the state of {name_of(donor)}", cast(StateCopy, reply).value.size_bytes
        self._node.trace.keep(mark, "copy", text, peer=name_of(donor), size_bytes=size)
        self._node.let_code_begin_with(cast(StateCopy, reply), lineage)
        return True

    async def _follow_totals(self, donor: str) -> bool:
        """Takes totals from a donor until this node can enter, and enters. Returns False to try another donor."""
        core, pause_s, mark = self._engine.core, _FOLLOW_S, self._node.trace.begin(of_step=False)
        copied_at = core.position
        while self._node.keeper.view.running:
            page = cast("TotalsPage | None", await self._call(donor, FollowTotals(core.position, True)))
            if page is None:
                return False
            if page.first > core.position:
                self._behind.add(donor)
                return False
            if page.count:
                self._engine.catch_up(core.position, decode_sums(page.value))
            if page.stable - self._engine.user_position <= _BEHIND and await self._enter_view():
                self._node.trace.keep(mark, "copy", f"follows the totals of {name_of(donor)}, and enters")
                return True
            loaded = self._engine.user_position >= copied_at
            pause_s = _FOLLOW_S if page.count and loaded else min(2 * pause_s, _MOST_FOLLOW_S)
            await asyncio.sleep(pause_s)
        return True

    async def _enter_view(self) -> bool:
        """Proposes a view with this node, if all workers keep the totals that it lacks. Returns True if it is in."""
        node, view = self._node, self._view()
        if (since := view.since(node.id)) is not None:
            if since == self._entering:  # etcd's answer was lost
                return True
            await node.keeper.refresh()  # the view is of before this worker was excluded
            return False
        if view.lineage != node.lineage:
            return False  # this node begins anew
        at = self._engine.core.position
        pages = await asyncio.gather(*(self._call(worker, FollowTotals(at, False)) for worker in view.workers))
        if any(page is None or cast(TotalsPage, page).first > at for page in pages) or node.paused:
            return False
        job, writer, proposed = node.keeper.view, node.new_writer(), view.joined_by(node.id)
        if job.workers is None or View.of(job.workers.record) != view or not job.running:
            return False
        self._entering = proposed.number
        self._engine.compared_part_due = True
        self._engine.core.note_entry(proposed.number)
        txn = transactions.propose(job, proposed, node=node.id, node_revision=node.node_revision, writer=writer)
        revision = await node.put_view(txn, writer)
        if revision is None:
            return False
        node.events.emit("joined", f"{node.name} joined after {at} sums")
        await node.keeper.wait_for_revision(revision)
        return True

    async def _call(self, worker: str, message: CopyState | FollowTotals) -> Reply | None:
        """Calls a worker, and returns its reply; None if it refused, did not answer, or has no address in the view."""
        peer = self._node.router.peer(worker)
        if peer is None:
            return None
        try:
            return await self._node.transport.call(peer, message)
        except (Refused, TransportError):
            return None
