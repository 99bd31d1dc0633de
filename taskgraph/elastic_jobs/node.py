"""A node of an elastic job: one worker, from registering to leaving.

    load the job ──► register ──► first view, or enter ──► user code and engine ──► the value is put ──► leave

The node's lease, its key and the loss of other nodes are those of task graphs (`node.membership`). What is left is to
propose views: without workers that are lost.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterable
from typing import Any, Unpack

from taskgraph.checkpoint.places import Place
from taskgraph.elastic_jobs.checkpoints import Checkpoints
from taskgraph.elastic_jobs.differing import Differences
from taskgraph.elastic_jobs.engine import Engine
from taskgraph.elastic_jobs.interface import WorkerNode
from taskgraph.elastic_jobs.joining import Joining
from taskgraph.elastic_jobs.leaving import Leaving
from taskgraph.elastic_jobs.reports import StableReports
from taskgraph.elastic_jobs.run import Run
from taskgraph.elastic_jobs.serving import Serving
from taskgraph.elastic_jobs.silence import Silence
from taskgraph.elastic_jobs.together import Together
from taskgraph.elastic_jobs.tracing import WorkerTrace
from taskgraph.elastic_jobs.usercall import Stopped, UserCall
from taskgraph.elastic_jobs.values import Values
from taskgraph.errors import JobError
from taskgraph.graph.values import encode
from taskgraph.node.life import LifeArguments
from taskgraph.node.membership.registration import Registration
from taskgraph.node.membership.suspicion import Suspicion
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.node.usercode.threads import Threads
from taskgraph.observe.status import NodeStatus, TaskResult
from taskgraph.observe.usage import Usage
from taskgraph.protocol.elastic import transactions
from taskgraph.protocol.elastic.succession import first_view, lone_view, must_go_on_alone, next_view
from taskgraph.protocol.elastic.views import View
from taskgraph.protocol.elastic.worker import Phase, Worker
from taskgraph.protocol.kv import Compare
from taskgraph.protocol.messages import (
    Encoded,
    StateCopy,
    StateDigests,
)
from taskgraph.protocol.records import name_of

__all__ = ["ElasticNode"]


class ElasticNode(WorkerNode):
    """One node of one elastic job. `run` it once."""

    def __init__(
        self, *, file_threads: Threads | None = None, place: Place | None = None, **arguments: Unpack[LifeArguments]
    ) -> None:
        super().__init__(**arguments)
        self.file_threads = file_threads or self.threads
        self.trace = WorkerTrace(self.tracing)
        self.leaving_state = self.draining_state = Leaving(self)
        self.checkpoints = Checkpoints(self, place)
        self.suspicion = Suspicion(
            self, self._workers, unproved=lambda: self.registration.unproved, changed=self._changed
        )
        self.registration = Registration(self, suspicion=self.suspicion, reconcile=self.suspicion.update)
        self.silence = Silence(self, self.suspicion.detector, self._changed)
        self.differences = Differences(self, self._changed)
        self.reports = StableReports(self._report_counts)
        self.values = Values(self)
        self._joining: asyncio.Task[None] | None = None
        self._together: Together | None = None
        self.lineage = 0
        self._outside_since = -1  # the number of the view that excluded this worker
        self._begin_anew()
        self._wake = asyncio.Event()
        self._drains = False  # some node of the job drains
        self.serving = Serving(self, lambda: self.call, self._wake.set)
        self._stop_following = self.keeper.on_change(self._changed)

    # -- life -------------------------------------------------------------------------------------

    def services(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {
            "views": self._follow(),
            "user code": self._work(),
            "checkpoints": self.checkpoints.run(),
            "silence": self.silence.run(),
        }

    def stop_following(self) -> None:
        self._stop_following()
        self.call.stop()
        self._close_group()

    def _begin_anew(self) -> None:
        """Makes the engine and the call of user code of a worker that is in no view."""
        self._close_group()
        self._together = self._made_together()
        self.engine = Engine(
            self,
            Worker(self.id, together=self._together is not None),
            self.trace,
            refused=self.suspicion.call_refused,
            stable=self._note_stable,
            differ=self.differences.found,
            excluded=self._excluded,
            together=self._together,
        )
        self.call = UserCall(self, self.engine, self._call_function)
        if self._joining is not None:
            self._joining.cancel()
        self._joining = None

    def _made_together(self) -> Together | None:
        """Makes what sums by the job's communicator, in a process of its own."""
        elastic = self.job.elastic
        if elastic is None or not elastic.communicator or not self.own_process:
            return None
        name = elastic.communicator
        return Together(self, name, fail=self.fail_by, send=self._send_key, changed=self._changed)

    def _send_key(self, view: int, key: str, value: bytes) -> None:
        self.engine.send_key(view, key, value)

    def _close_group(self) -> None:
        if self._together is not None:
            self._together.close()

    def _workers(self) -> tuple[str, ...]:
        known = self.keeper.view.workers
        return () if known is None else tuple(worker for worker, _ in known.record.workers)

    # -- views ------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """The view of the job, or which nodes are suspected, has changed."""
        if not self.running:
            return
        self.suspicion.update()
        view = self.keeper.view
        if self.id in view.gone:
            self.end_with(JobError(f"{self.name} was declared gone: {view.gone[self.id].record.reason}"))
        workers = () if view.workers is None else (worker for worker, _ in view.workers.record.workers)
        self.engine.drop_newcomers({*view.nodes, *workers})
        self._drains = any(known.record.draining for known in view.nodes.values())
        self._wake.set()

    def _note_stable(self, positions: int) -> None:
        self.reports.note_stable(positions)
        if self._drains:
            self._wake.set()  # a worker may leave now

    async def _follow(self) -> None:
        """Follows the views in etcd, and proposes the next one."""
        asyncio.get_running_loop().call_later(self.settings.start_wait_s, self._wake.set)
        self._changed()
        while True:
            self._wake.clear()
            if self.keeper.view.workers is not None:
                await self._read_view(View.of(self.keeper.view.workers.record))
            if not self.paused and self.keeper.view.running:
                if self._must_go_on_alone():
                    await self._go_on_alone()
                    continue
                if (proposed := self._proposal()) is not None:
                    await self._propose(proposed)
                    continue
            await self._wake.wait()

    async def _read_view(self, view: View) -> None:
        """Follows a view: begins, joins, or goes on."""
        core = self.engine.core
        if view.number < self._outside_since:
            return  # a message brought the one that excludes this worker
        self.differences.read_view(view)
        if core.phase == Phase.OUTSIDE and self.call.begun and self.lineage != view.lineage:
            self.call.stop()  # others returned: the totals that this newcomer has may be undone
            self._begin_anew()
            core = self.engine.core
        if not self.call.begun and view.since(self.id) == view.lineage:
            await self._begin_in_first_view(view)
        elif core.phase == Phase.OUTSIDE and self._joining is None and view.since(self.id) is None:
            self._joining = self.own(Joining(self).run(), "join")
        self.engine.read_view(view)

    def _excluded(self) -> None:
        """This worker has read a view without itself."""
        assert self.engine.core.view is not None
        self._outside_since = self.engine.core.view.number
        if not self.draining:
            self.events.emit("excluded", f"{self.name} was taken for lost: it copies the state, and enters again")
            self._restart()

    def copy_anew(self) -> None:
        kept = f"{self.settings.max_totals_bytes / 2**20:.4g} MiB"
        text = f"{self.name} fell behind: workers keep {kept} of totals for newcomers (max_totals_bytes)"
        self.events.emit("behind", f"{text}. It copies the state again")
        self._restart()

    def _restart(self) -> None:
        """Forgets the state: this worker copies it anew."""
        self.call.stop()
        self._begin_anew()
        self._wake.set()

    async def _begin_in_first_view(self, view: View) -> None:
        """Begins as a worker of the first view, which this node may not have read, from the checkpoint if any."""
        core = self.engine.core
        copy = await self.checkpoints.read()
        if copy is None:
            self.call.begin()
        else:
            self.begin_with(copy, view.lineage)
        core.whole = True
        core.enter(view.lineage)

    def _proposal(self) -> View | None:
        job = self.keeper.view
        if job.workers is None:
            waits = self.now() < self.started_at + self.settings.start_wait_s
            expected = self.spec.expected_nodes - len(job.gone) if waits else 1
            return first_view(job, self.id, run=self.spec.run, fewest=max(self.job.min_nodes, expected))
        missed = self.suspects | self.engine.behind
        outvoted = self.differences.outvoted
        again = -1 if self._together is None else self._together.renewed_in
        core = self.engine.core
        return next_view(job, self.id, core, gone=self.gone, suspects=missed, outvoted=outvoted, again=again)

    async def _propose(self, view: View) -> None:
        job, before, writer = self.keeper.view, self._workers(), self.writer()
        txn = transactions.propose(job, view, node=self.id, node_revision=self.node_revision, writer=writer)
        mark = self.trace.begin(of_step=False)
        revision = await self.put_view(txn, writer)
        self.trace.keep(mark, "view", f"puts view {view.number}" + ("" if revision else ", refused"))
        if revision is None:
            await self.short_pause()
            return
        self._emit_losses(before, view)
        await self.keeper.wait_for_revision(revision)

    def _emit_losses(self, before: Iterable[str], view: View) -> None:
        """Emits which workers this node excluded, unless their death or departure is known."""
        job = self.keeper.view
        for worker in before:
            if worker not in view.workers and worker not in job.nodes and worker not in job.gone:
                text = f"{name_of(worker)} does not answer: its lease ended (the node is frozen or cut off)"
                self.events.emit("lost", text, fields={"lost": worker})

    def _must_go_on_alone(self) -> bool:
        if self.draining and self.engine.core.phase == Phase.OUTSIDE:
            return False
        return must_go_on_alone(
            self.keeper.view,
            self.id,
            self.engine.core,
            gone=self.gone,
            excluded_by=self._outside_since,
            none_whole_in=self.engine.none_whole_in,
        )

    async def _go_on_alone(self) -> None:
        """Begins a lineage: from the totals that this newcomer has, or from the checkpoint.

        The totals of a newcomer are stable, so nothing that was given out is undone, unless the checkpoint is newer.
        """
        job, core = self.keeper.view, self.engine.core
        saved = job.checkpoint.record.epoch if job.checkpoint is not None else -1
        if not self.call.begun and saved < 0:
            await self._fail_without_state()
            return
        if self.call.begun and saved > core.position:
            self.call.stop()
            self._begin_anew()
            core = self.engine.core
        if self._joining is not None:
            self._joining.cancel()  # no donor is left
            self._joining = None
        view, writer = lone_view(job, self.id), self.writer()
        gone = sorted({*self._workers()} & self.gone)
        txn = transactions.return_alone(job, view, gone, node=self.id, node_revision=self.node_revision, writer=writer)
        revision = await self.put_view(txn, writer)
        if revision is None:
            await self.short_pause()
            return
        since = core.position if self.call.begun else saved
        text = f"all other workers are gone: {self.name} goes on alone after {since} sums"
        self.events.emit("returned", text)
        if self.call.begun:
            core.whole = True
            core.enter(view.number)
            self.lineage = view.number
        await self.keeper.wait_for_revision(revision)

    async def _fail_without_state(self) -> None:
        job = self.keeper.view
        assert job.workers is not None
        error = JobError(
            "no worker is left that holds the state, and there is no checkpoint: start more workers, so that one "
            "of them lives, or give the job a checkpoint (@tg.elastic(checkpoint='file:///...'))"
        )
        no_checkpoint = Compare(job.keys.checkpoint, 0)  # the last worker may have written one just before its end
        fences = (Compare(job.keys.workers, job.workers.mod_revision), no_checkpoint, self._own_key())
        await self.fail_with(error, None, None, fences, "")

    # -- user code --------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Runs user code, once for each time that this worker enters, and ends the job with its value."""
        await self.keeper.wait_until(lambda v: v.workers is not None)
        while self.keeper.view.running:
            call = self.call
            try:
                await self.threads.run(call)
            except Stopped:
                if call is self.call:
                    return  # the node leaves
            except Exception as error:
                if self.leaving:
                    return
                if call is self.call:
                    await self._fail(error)
                    return
            else:
                if await self._finish(call):
                    return

    def _call_function(self, call: UserCall) -> tuple[Encoded, int]:
        elastic = self.job.elastic
        assert elastic is not None
        run = Run(call)
        value = elastic.function(run, **elastic.arguments)
        return encode(value, what=f"the value of {elastic.function.__name__}"), run.positions

    def has_begun(self) -> bool:
        return self.call.begun

    def begin_with(self, copy: StateCopy, lineage: int) -> None:
        self.lineage = lineage
        self.reports.continue_from(copy.reports, copy.step)
        self.call.begin_with(copy)

    async def copied_state(self) -> StateCopy | None:
        return await self.call.copied_state()

    @property
    def digests(self) -> StateDigests:
        return self.call.digests

    async def _fail(self, error: Exception) -> None:
        """Fails the job with an error of user code."""
        assert self.job.elastic is not None
        await self.fail_by(UserCodeError(self.job.elastic.function.__name__, error))

    async def fail_by(self, error: UserCodeError | JobError) -> None:
        await self.fail_with(error, None, None, (self._own_key(),), "")

    def _own_key(self) -> Compare:
        return Compare(self.keeper.view.keys.node(self.id), self.node_revision)

    async def _finish(self, call: UserCall) -> bool:
        """Ends the job once all workers hold the last total. Returns False if this worker begins anew meanwhile."""
        positions = call.positions
        sums = positions - 1  # the last one is the end of the function on all workers
        if call is self.call:
            self.engine.ended(positions)
        while self.keeper.view.running and call is self.call:
            job = self.keeper.view
            if self.engine.core.stable >= positions and not self.paused and job.workers is not None:
                writer = self.writer()
                txn = transactions.finish(job, sums=sums, node=self.id, node_revision=self.node_revision, writer=writer)
                if await self.transact(txn, key=job.keys.status, writer=writer) is not None:
                    self.events.emit("finished", f"job {self.spec.name!r} finished after {sums} sums")
                    return True
                await self.keeper.refresh()
            await self.short_pause()
        return call is self.call

    @property
    def epoch(self) -> int:
        """The step that user code is at, for a trace; -1: none yet."""
        return self.trace.step

    # -- what comes out ---------------------------------------------------------------------------

    def _report_counts(self, step: int, numbers: dict[str, float]) -> None:
        """Emits the numbers of a step, on the most senior worker."""
        view = self.engine.core.view
        if view is not None and view.workers[:1] == (self.id,) and not self.paused:
            self.events.emit("commit", f"step {step} is stable", epoch=step, transient=True, fields=numbers)

    def _waits(self) -> tuple[str, ...]:
        """Says what this worker waits for."""
        return (*self.leaving_state.waits, *self._waits_in_view())

    def _waits_in_view(self) -> tuple[str, ...]:
        core, known = self.engine.core, self.keeper.view.workers
        if known is None:
            return (f"{self.name} waits for the first view, which needs the nodes that the job was started with",)
        if core.phase == Phase.OUTSIDE:
            return (f"{self.name} waits to enter, after {core.position} sums",)
        if not (awaited := self.engine.awaited):
            return ()
        return (f"{self.name} waits for {awaited}, after {core.position} sums",)

    def status(self) -> NodeStatus:
        view = self.keeper.view
        return NodeStatus(
            node=self.id,
            name=self.name,
            host=self.host,
            pid=os.getpid(),
            paused=self.paused,
            draining=self.draining,
            stamp=(view.stamp.attempt, view.stamp.epoch) if view.stamp else None,
            revision=view.revision,
            leader=view.workers is not None and view.workers.record.workers[0][0] == self.id,
            replicas=(),
            waits=(*self.registration.waits, *self.keeper.waits, *self.writes.waits, *self._waits()),
            usage=Usage.now(),
        )

    async def results(self) -> list[TaskResult]:
        """Waits for the end of the job. Returns its value, if this node is the first living worker of the view."""
        await self.keeper.wait_until(lambda v: not v.running)
        view = self.keeper.view
        if view.result_holders().get(0) != self.id or view.stamp is None or self.call.value is None:
            return []
        attempt, epoch = view.stamp
        if view.finished:
            await self.values.compare(self.call.value)
            self.reports.note_stable(self.call.positions)  # this worker may not have heard that from all others
        lasted_s = self.now() - self.started_at
        return [TaskResult(0, epoch, attempt, self.call.value, (), self.reports.packed(), lasted_s)]
