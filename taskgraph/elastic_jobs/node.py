"""A node of an elastic job: one worker, from registering to leaving.

    load the job ──► register ──► first view, or enter ──► user code and engine ──► the value is put ──► leave

The node's lease, its key and the loss of other nodes are those of task graphs (`node.membership`).
"""

from __future__ import annotations

import os
from collections.abc import Coroutine
from typing import Any, Unpack

from taskgraph.checkpoint.places import Place
from taskgraph.elastic_jobs.checkpoints import Checkpoints
from taskgraph.elastic_jobs.differing import DifferingWorkers
from taskgraph.elastic_jobs.engine import Engine
from taskgraph.elastic_jobs.interface import WorkerNode
from taskgraph.elastic_jobs.leaving import Leaving
from taskgraph.elastic_jobs.reports import StableReports
from taskgraph.elastic_jobs.run import Run
from taskgraph.elastic_jobs.serving import WorkerServing
from taskgraph.elastic_jobs.silence import Silence
from taskgraph.elastic_jobs.together import GroupSums
from taskgraph.elastic_jobs.tracing import WorkerTrace
from taskgraph.elastic_jobs.usercall import Stopped, UserCall
from taskgraph.elastic_jobs.values import ValueComparison
from taskgraph.elastic_jobs.view_changes import ViewChanger
from taskgraph.errors import JobError, error_text
from taskgraph.graph.values import encode
from taskgraph.hints import hint
from taskgraph.node.life import LifeArguments
from taskgraph.node.membership.placement import missing_nodes_text
from taskgraph.node.membership.registration import Registration
from taskgraph.node.membership.suspicion import Suspicion
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.node.usercode.threads import Threads
from taskgraph.observe.status import NodeStatus, TaskResult
from taskgraph.observe.usage import Usage
from taskgraph.protocol.elastic import transactions
from taskgraph.protocol.elastic.worker import Phase, Worker
from taskgraph.protocol.kv import Compare
from taskgraph.protocol.messages import (
    Encoded,
    StateCopy,
    StateDigests,
)
from taskgraph.protocol.readiness import is_worker_in_sync
from taskgraph.results import SET_ASIDE, VALUE

__all__ = ["ElasticNode"]


class ElasticNode(WorkerNode):
    """One node of one elastic job. `run` it once."""

    def __init__(
        self, *, file_threads: Threads | None = None, place: Place | None = None, **arguments: Unpack[LifeArguments]
    ) -> None:
        super().__init__(**arguments)
        self.file_threads = file_threads or self.threads
        self.trace = WorkerTrace(self.tracing)
        self.checkpoints = Checkpoints(self, place)
        self.leaving_state = self.draining_state = Leaving(self, lambda: self.checkpoints.writing)
        self.suspicion = Suspicion(
            self, lambda: self.views.workers, unproved=lambda: self.registration.unproved, changed=self.look_again
        )
        self.registration = Registration(self, suspicion=self.suspicion, reconcile=self.suspicion.update)
        self.silence = Silence(self, self.suspicion.detector, self.look_again)
        self.differences = DifferingWorkers(self, self.look_again)
        self.views = ViewChanger(self, self.differences, self.checkpoints, self._group_failed_in)
        self.reports = StableReports(self._emit_numbers)
        self.values = ValueComparison(self)
        self._together: GroupSums | None = None
        self.lineage = 0
        self._begin_anew()
        self._drains = False  # some node of the job drains
        self.serving = WorkerServing(self, lambda: self.call, self.views.wake.set)
        self._stop_following = self.keeper.on_change(self.look_again)

    # -- life -------------------------------------------------------------------------------------

    def services(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {
            "views": self.views.run(),
            "user code": self._run_user_code(),
            "checkpoints": self.checkpoints.run(),
            "final manifests": self.checkpoints.write_missing_manifests(),
            "silence": self.silence.run(),
        }

    def stop_new_work(self) -> None:
        """Stops user code, and closes the process group."""
        self._stop_following()
        self.call.stop()
        self._close_group()

    def _begin_anew(self) -> None:
        """Replaces the engine and the call of user code by new ones, of a worker that is in no view."""
        self._close_group()
        self._together = self._make_group_sums()
        self.engine = Engine(
            self,
            Worker(self.id, together=self._together is not None),
            self.trace,
            refused=self.suspicion.note_call_refused,
            stable=self._note_stable,
            differ=self.differences.begin_exclusion,
            excluded=self.views.handle_exclusion,
            together=self._together,
        )
        self.call = UserCall(self, self.engine, self._call_function)
        self.views.stop_joining()

    def begin_anew(self) -> None:
        self.call.stop()
        self._begin_anew()
        self.views.wake.set()

    def begin_anew_behind(self) -> None:
        kept = f"{self.settings.max_totals_bytes / 2**20:.4g} MiB"
        text = f"{self.name} fell behind: workers keep {kept} of totals for newcomers (max_totals_bytes)"
        self.events.emit("behind", f"{text}. It copies the state again")
        self.begin_anew()

    def _make_group_sums(self) -> GroupSums | None:
        """Returns sums by process groups; None: the job has no communicator, or several nodes share this process."""
        elastic = self.job.elastic
        if elastic is None or not elastic.communicator or not self.own_process:
            return None
        name = elastic.communicator
        return GroupSums(self, name, fail=self.fail_job, send=self._send_key, changed=self.look_again)

    def _send_key(self, view: int, key: str, value: bytes) -> None:
        """Sends a key of the process group to all other workers of a view."""
        self.engine.send_key(view, key, value)

    def _group_failed_in(self) -> int:
        """Returns the number of the view whose process group failed: its workers need a new view. -1: none failed."""
        return -1 if self._together is None else self._together.failed_in

    def _close_group(self) -> None:
        if self._together is not None:
            self._together.close()

    def look_again(self) -> None:
        if not self.running:
            return
        self.suspicion.update()
        view = self.keeper.view
        if self.id in view.gone:
            self.end_with(JobError(f"{self.name} was declared gone: {view.gone[self.id].record.reason}"))
        workers = () if view.workers is None else (worker for worker, _ in view.workers.record.workers)
        self.engine.totals.drop_newcomers({*view.nodes, *workers})
        self._drains = any(known.record.draining for known in view.nodes.values())
        self.views.wake.set()

    def _note_stable(self, positions: int) -> None:
        """Tells reports and user code that the totals below `positions` are stable."""
        self.reports.note_stable(positions)
        self.call.give_stable_copies()
        if self._drains:
            self.views.wake.set()  # a worker may leave now

    # -- user code --------------------------------------------------------------------------------

    async def _run_user_code(self) -> None:
        """Calls the job's function, again after each `begin_anew`. Ends the job with its value, or fails the job."""
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
                if isinstance(error, MemoryError) and self.engine.core.phase == Phase.OUTSIDE:
                    text = f"{self.name} has no memory for the state that it copies ({error_text(error)})"
                    self.end_with(JobError(f"{text}: start fewer nodes on {self.host}, or on a host with more memory"))
                    return
                if call is self.call:
                    await self._fail(error)
                    return
            else:
                if await self._try_to_finish_job(call):
                    return

    def _call_function(self, call: UserCall) -> tuple[Encoded, int]:
        """Calls the job's function, in user code's thread. Returns its encoded value, and the number of totals."""
        elastic = self.job.elastic
        assert elastic is not None
        run = Run(call)
        value = elastic.function(run, **elastic.arguments)
        what = f"the value of {elastic.function.__name__}"
        if run.pieces_set_aside:
            pieces = [(each.pass_number, each.piece, each.node, each.traceback) for each in run.pieces_set_aside]
            return encode({VALUE: value, SET_ASIDE: "shards", "pieces": pieces}, what=what), run.positions
        return encode(value, what=what), run.positions

    def has_begun(self) -> bool:
        return self.call.begun

    def let_code_begin(self) -> None:
        self.call.let_code_begin()

    def let_code_begin_with(self, copy: StateCopy, lineage: int) -> None:
        self.lineage = lineage
        self.reports.continue_from(copy.reports, copy.step)
        self.call.let_code_begin_with(copy)

    async def copied_state(self) -> StateCopy | None:
        return await self.call.copied_state()

    @property
    def digests(self) -> StateDigests:
        return self.call.digests

    async def _fail(self, error: Exception) -> None:
        """Fails the job with an error of user code."""
        assert self.job.elastic is not None
        where = f"in step {self.trace.step}" if self.trace.step >= 0 else ""
        also = "; ".join(filter(None, (where, hint(error))))
        failed = UserCodeError(self.job.elastic.function.__name__, error)
        await self.fail_with(failed, None, None, (self._own_key(),), also)

    async def fail_job(self, error: UserCodeError | JobError, *fences: Compare) -> None:
        await self.fail_with(error, None, None, (*fences, self._own_key()), "")

    def _own_key(self) -> Compare:
        """Returns the comparison that fails a transaction if this node's key in etcd has changed."""
        return Compare(self.keeper.view.keys.node(self.id), self.node_revision)

    async def _try_to_finish_job(self, call: UserCall) -> bool:
        """Ends the job once all workers hold the last total. Returns True if the job has ended; False: this worker has
        begun anew, and calls the function again.
        """
        positions = call.positions
        sums = positions - 1  # the last one is the end of the function on all workers
        if call is self.call:
            self.engine.note_return(positions)
        while self.keeper.view.running and call is self.call:
            job = self.keeper.view
            if self.engine.core.stable >= positions and not self.paused and job.workers is not None:
                writer = self.new_writer()
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

    def in_sync(self) -> bool:
        return is_worker_in_sync(self.keeper.view, self.id)

    # -- what comes out ---------------------------------------------------------------------------

    def _emit_numbers(self, step: int, numbers: dict[str, float]) -> None:
        """Emits the numbers that user code reported of a stable step, if this is the most senior worker."""
        view = self.engine.core.view
        if view is not None and view.workers[:1] == (self.id,) and not self.paused:
            self.events.emit("commit", f"step {step} is stable", epoch=step, transient=True, fields=numbers)

    def _waits(self) -> tuple[str, ...]:
        """Returns texts: what this worker waits for."""
        return (*self.leaving_state.waits, *self._waits_in_view())

    def _waits_in_view(self) -> tuple[str, ...]:
        """Returns texts: what this worker waits for to enter a view, or from other workers in it."""
        core, known, step = self.engine.core, self.keeper.view.workers, self.trace.step
        if known is None:
            missing = missing_nodes_text(self, "workers") if self.emits_for_all() else ""
            return (missing,) if missing else ()
        if core.phase == Phase.OUTSIDE:
            return (f"{self.name} waits to enter" + (f", in step {step}" if step >= 0 else ": it copies the state"),)
        if not (awaited := self.engine.awaited):
            return ()
        return (f"{self.name} waits for {awaited}, in step {step}",)

    def status(self) -> NodeStatus:
        view = self.keeper.view
        return NodeStatus(
            node=self.id,
            name=self.name,
            host=self.host,
            pid=os.getpid(),
            paused=self.paused,
            draining=self.draining,
            stamp=(view.stamp.attempt, self.trace.step) if view.stamp and self.trace.step >= 0 else None,
            revision=view.revision,
            leader=view.workers is not None and view.workers.record.workers[0][0] == self.id,
            replicas=(),
            waits=(*self.registration.waits, *self.keeper.waits, *self.writes.waits, *self._waits()),
            usage=Usage.now(),
            queues=self.engine.queues(),
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
