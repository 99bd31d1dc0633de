"""Follows the views in etcd for one worker, and proposes the next one.

    a view is read ──► begin in the first one, enter, stop and report (`protocol.elastic.worker`)
    a loss, a drain, a difference ──► the next view (`protocol.elastic.succession`) ──► one transaction

A newcomer proposes the view with itself (`joining`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from taskgraph.elastic_jobs.checkpoints import Checkpoints
from taskgraph.elastic_jobs.differing import DifferingWorkers
from taskgraph.elastic_jobs.interface import WorkerNode
from taskgraph.elastic_jobs.joining import Joining
from taskgraph.errors import JobError
from taskgraph.node.membership.failing import deaths_text
from taskgraph.observe.format import counted
from taskgraph.protocol.elastic import transactions
from taskgraph.protocol.elastic.succession import count_returns, first_view, lone_view, must_go_on_alone, next_view
from taskgraph.protocol.elastic.views import View
from taskgraph.protocol.elastic.worker import Phase
from taskgraph.protocol.kv import Compare
from taskgraph.protocol.records import name_of

__all__ = ["ViewChanger"]


class ViewChanger:
    """Follows the views for one worker, and changes them: proposes the next one, or begins a lineage alone.

    Args:
        group_failed_in: returns the number of the view whose process group failed, so that a new one is due; -1: none.

    Attributes:
        wake: set it when something has changed that the next view may depend on.
    """

    def __init__(
        self,
        node: WorkerNode,
        differences: DifferingWorkers,
        checkpoints: Checkpoints,
        group_failed_in: Callable[[], int],
    ) -> None:
        self._node = node
        self._differences = differences
        self._checkpoints = checkpoints
        self._group_failed_in = group_failed_in
        self._joining: asyncio.Task[None] | None = None
        self._outside_since = -1  # the number of the view that excluded this worker
        self.wake = asyncio.Event()

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers of the newest view that was read from etcd."""
        known = self._node.keeper.view.workers
        return () if known is None else tuple(worker for worker, _ in known.record.workers)

    def stop_joining(self) -> None:
        """Cancels the attempt to enter a view, if there is one."""
        if self._joining is not None:
            self._joining.cancel()
        self._joining = None

    async def run(self) -> None:
        """Enters the views that are read, and proposes the next ones, until cancelled."""
        node = self._node
        asyncio.get_running_loop().call_later(node.settings.start_wait_s, self.wake.set)
        node.look_again()
        while True:
            self.wake.clear()
            if node.keeper.view.workers is not None:
                await self._follow_view(View.of(node.keeper.view.workers.record))
            if not node.paused and node.keeper.view.running:
                if self._must_go_on_alone():
                    await self._go_on_alone()
                    continue
                if (proposed := self._proposal()) is not None:
                    await self._propose(proposed)
                    continue
            await self.wake.wait()

    # -- a view is read ---------------------------------------------------------------------------

    async def _follow_view(self, view: View) -> None:
        """Follows a view from etcd: begins in it if it is the first, else begins to join, or goes on."""
        node = self._node
        if view.number < self._outside_since:
            return  # a message brought the one that excludes this worker
        self._differences.read_view(view)
        if node.engine.core.phase == Phase.OUTSIDE and node.has_begun() and node.lineage != view.lineage:
            node.begin_anew()  # others returned: the totals that this newcomer has may be undone
        if not node.has_begun() and view.since(node.id) == view.lineage:
            await self._begin_in_first_view(view)
        elif self._may_join(view):
            self._joining = node.own(Joining(node).run(), "join")
        node.engine.read_view(view)

    def _may_join(self, view: View) -> bool:
        """True if this node is to begin to join: not if it drains, and only ends a checkpoint before it leaves."""
        node = self._node
        outside = node.engine.core.phase == Phase.OUTSIDE and view.since(node.id) is None
        return outside and self._joining is None and not node.draining

    async def _begin_in_first_view(self, view: View) -> None:
        """Begins as a worker of the first view, which this node may not have read, from the checkpoint if any."""
        node, core = self._node, self._node.engine.core
        copy = await self._checkpoints.read()
        if copy is None:
            node.let_code_begin()
        else:
            node.let_code_begin_with(copy, view.lineage)
        core.whole = True
        core.note_entry(view.lineage)

    def handle_exclusion(self) -> None:
        """Called once this worker has read a view without itself: emits `excluded`, begins anew; not if it drains."""
        node = self._node
        assert node.engine.core.view is not None
        self._outside_since = node.engine.core.view.number
        if not node.draining:
            why = "since it differs from the other workers" if self._differences.differs else "as lost or different"
            text = f"{node.name} was excluded, {why}: it copies the state, and enters again"
            node.events.emit("excluded", text)
            self._differences.differs = False
            node.begin_anew()

    # -- the next view ----------------------------------------------------------------------------

    def _proposal(self) -> View | None:
        """Returns the view that this worker is to propose now; None: it proposes none."""
        node, job = self._node, self._node.keeper.view
        if job.workers is None:
            waits = node.now() < node.started_at + node.settings.start_wait_s
            expected = node.spec.expected_nodes - len(job.gone) if waits else 1
            return first_view(job, node.id, run=node.spec.run, fewest=max(node.job.min_nodes, expected))
        missed, outvoted = node.suspects | node.engine.behind, self._differences.outvoted
        core = node.engine.core
        return next_view(
            job, node.id, core, gone=node.gone, suspects=missed, outvoted=outvoted, again=self._group_failed_in()
        )

    async def _propose(self, view: View) -> None:
        """Writes a view to etcd, and waits until this node has read it. If another one came first, only pauses."""
        node = self._node
        job, before, writer = node.keeper.view, self.workers, node.new_writer()
        txn = transactions.propose(job, view, node=node.id, node_revision=node.node_revision, writer=writer)
        mark = node.trace.begin(of_step=False)
        revision = await node.put_view(txn, writer)
        node.trace.keep(mark, "view", f"puts view {view.number}" + ("" if revision else ", refused"))
        if revision is None:
            await node.short_pause()
            return
        if not before:
            self._emit_job_began(view)
        self._emit_losses(before, view)
        await node.keeper.wait_for_revision(revision)

    def _emit_job_began(self, view: View) -> None:
        """Emits that the job began, or goes on from a checkpoint."""
        pointer, names = self._node.keeper.view.checkpoint, ", ".join(map(name_of, view.workers))
        began = f"the job goes on from the checkpoint of sum {pointer.record.epoch}" if pointer else "the job began"
        self._node.events.emit("began", f"{began}: {counted(len(view.workers), 'worker')}: {names}")

    def _emit_losses(self, before: Iterable[str], view: View) -> None:
        """Emits `lost` for each worker that the view excludes, unless its death or departure is known."""
        job = self._node.keeper.view
        for worker in before:
            if worker not in view.workers and worker not in job.nodes and worker not in job.gone:
                text = f"{name_of(worker)} does not answer: its lease ended (the node is frozen or cut off)"
                self._node.events.emit("lost", text, fields={"lost": worker})

    # -- no whole worker is left ------------------------------------------------------------------

    def _must_go_on_alone(self) -> bool:
        """True if no whole worker is left, and this one is to begin a lineage by itself."""
        node = self._node
        if node.draining and node.engine.core.phase == Phase.OUTSIDE:
            return False
        return must_go_on_alone(
            node.keeper.view,
            node.id,
            node.engine.core,
            gone=node.gone,
            excluded_by=self._outside_since,
            none_whole_in=node.engine.none_whole_in,
        )

    async def _go_on_alone(self) -> None:
        """Begins a lineage with this worker alone, from its copied state or the checkpoint; fails the job without both.

        The totals of a newcomer are stable, so nothing that was given out is undone, unless the checkpoint is newer.
        """
        node, job = self._node, self._node.keeper.view
        saved = job.checkpoint.record.epoch if job.checkpoint is not None else -1
        if not node.has_begun() and saved < 0:
            await self._fail_without_state()
            return
        if node.has_begun() and saved > node.engine.core.position:
            node.begin_anew()
        self.stop_joining()  # no donor is left
        sums = node.engine.core.position if node.has_begun() else saved
        if count_returns(job, sums)[0] >= node.settings.fatal_deaths:
            await self._fail_without_progress(sums)
            return
        view, writer, me = lone_view(job, node.id), node.new_writer(), (node.id, node.node_revision)
        gone = sorted({*self.workers} & node.gone)
        txn = transactions.return_alone(job, view, gone, me, sums=sums, writer=writer)
        revision = await node.put_view(txn, writer)
        if revision is None:
            await node.short_pause()
            return
        core = node.engine.core
        text = f"all other workers have ended: {node.name} goes on alone after {core.position} sums"
        if not node.has_begun():
            text = f"all workers have ended: {node.name} goes on from the checkpoint of sum {saved}"
        node.events.emit("returned", text)
        if node.has_begun():
            core.whole = True
            core.note_entry(view.number)
            node.lineage = view.number
        await node.keeper.wait_for_revision(revision)

    async def _fail_without_progress(self, sums: int) -> None:
        """Fails the job: all workers died `fatal_deaths` times, and the job never got past this number of sums."""
        node, job = self._node, self._node.keeper.view
        assert job.workers is not None
        times = node.settings.fatal_deaths
        died = {name_of(worker): job.gone[worker].record for worker in self.workers if worker in job.gone}
        error = JobError(
            f"all workers have ended {times} times (fatal_deaths={times}) before the job got past sum {sums}, and "
            f"would again: {deaths_text(died)}. Look at the code of the steps after it; where it is not to blame, a "
            f"larger Settings(fatal_deaths=...) lets more workers try"
        )
        await node.fail_job(error, Compare(job.keys.workers, job.workers.mod_revision))

    async def _fail_without_state(self) -> None:
        """Fails the job: no worker holds the state, and there is no checkpoint."""
        node = self._node
        error = JobError(
            "no worker is left that holds the state, and there is no checkpoint: start more workers, so that one "
            "of them lives, or give the job a checkpoint (@tg.elastic(checkpoint='file:///...'))"
        )
        await node.fail_job(error, *transactions.compare_without_state(node.keeper.view))
