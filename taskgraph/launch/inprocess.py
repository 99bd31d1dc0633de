"""Several nodes of one job in this process: the real node, on an in-process coordinator and transport.

For notebooks, debuggers and tests: no etcd, no sockets, no other process. What the nodes do is what they do anywhere;
`crash` ends one of them as a killed process would end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import time
from collections.abc import Callable
from typing import TypeVar, cast

from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.device.cuda import device_count
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import JobFailed, JobTimeout, TaskGraphError, error_text
from taskgraph.jobs import Job
from taskgraph.launch.collect import assemble, is_complete
from taskgraph.launch.kept import job_failed, resume_hint
from taskgraph.launch.resuming import Resume, begin, plan
from taskgraph.node.garbage import searching_garbage_less_often
from taskgraph.node.life import NodeLife
from taskgraph.node.node import Node, Point
from taskgraph.node.usercode.errors import cancelled_by_user_error
from taskgraph.node.usercode.threads import PooledThreads, Threads
from taskgraph.observe.events import Event, EventLog, guarded_listener
from taskgraph.observe.status import TaskResult, waits_text
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import CheckpointRecord, GoneRecord, JobStatus, StatusRecord
from taskgraph.results import JobResult
from taskgraph.system.alongside import alongside, any_done
from taskgraph.transport.memory import MemoryNetwork, MemoryTransport

T = TypeVar("T")

__all__ = ["InProcessCluster", "arun_inprocess", "ended_loop_error"]


def ended_loop_error(error: BaseException, job: str) -> JobFailed | None:
    """Makes the error for an event loop that the job's own code ended; None: it did not."""
    if isinstance(error, asyncio.CancelledError):
        text = str(cancelled_by_user_error(""))
    elif isinstance(error, RuntimeError) and "Event loop stopped" in str(error):
        text = (
            "code of the job stopped the event loop that it runs in, which is not its own: to end a processor return "
            "from it, to fail the job raise"
        )
    else:
        return None
    return JobFailed(f"job {job!r}: {text}", job=job)


@dataclasses.dataclass
class _Member:
    """One node of the cluster, and what belongs to it."""

    node: NodeLife
    coordinator: MemoryCoordinator
    events: EventLog
    run: asyncio.Task[None]
    crashed: bool = False


class InProcessCluster:
    """Nodes of one job in one event loop.

    Args:
        endless_leases: no lease ends while its node lives. All nodes share the event loop, so a lease that ends would
            only show that the loop is busy.
    """

    def __init__(
        self,
        job: Job,
        *,
        endless_leases: bool = False,
        rng: random.Random | None = None,
        threads: Callable[[], Threads] | None = None,
        point: Callable[[InProcessCluster, str], Point] | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.job = job
        self.store = MemoryStore()
        self.network = MemoryNetwork(rng)
        self.spec = JobSpec.local(job)
        self.keys = Keys(self.spec.name)
        self._rng = rng
        self._endless_leases = endless_leases
        self._threads = threads
        self._devices = device_count()
        self._point = point
        self._on_event = guarded_listener(on_event) if on_event is not None else None
        self._members: dict[str, _Member] = {}
        self._count = itertools.count(1)
        self._events: list[Event] = []
        self._launcher = MemoryCoordinator(self.store, rng=rng)
        self._node_failed: asyncio.Future[TaskGraphError] = asyncio.get_running_loop().create_future()

    async def start(
        self, nodes: int, *, resume: Resume = False, fresh: bool = False, timeout_s: float | None = None
    ) -> None:
        """Submits the job and starts that many nodes. The other arguments are those of `resuming.plan`."""
        spec = dataclasses.replace(self.spec, expected_nodes=nodes)
        self.spec, beginning = await plan(self._launcher, spec, resume=resume, fresh=fresh, timeout_s=timeout_s)
        await begin(self._launcher, self.spec, beginning)
        for _ in range(nodes):
            self.add()

    def add(self) -> str:
        """Starts another node; returns its id."""
        name = f"n{next(self._count)}"
        node_id = f"{name}-local"
        coordinator = MemoryCoordinator(self.store, rng=self._rng, endless=self._endless_leases)
        events = EventLog(name)
        events.listen(self._events.append)
        if self._on_event is not None:
            events.listen(self._on_event)
        node = (Node if self.job.elastic is None else self.job.elastic.node())(
            spec=self.spec,
            job=self.job,
            coordinator=coordinator,
            transport=MemoryTransport(self.network),
            name=name,
            node_id=node_id,
            events=events,
            host=name,
            devices=self._devices,
            threads=self._threads() if self._threads else None,
            point=self._point(self, node_id) if self._point else None,
        )
        run = asyncio.get_running_loop().create_task(self._run(node, coordinator), name=f"node {name}")
        self._members[node_id] = _Member(node, coordinator, events, run)
        return node_id

    async def _run(self, node: NodeLife, coordinator: MemoryCoordinator) -> None:
        """Runs a node until it has ended. An error of a node that did not crash fails the job."""
        try:
            await node.run()
        except Exception as error:
            if not self._members[node.id].crashed and not self._node_failed.done():
                ours = (
                    error if isinstance(error, TaskGraphError) else TaskGraphError(f"{node.name}: {error_text(error)}")
                )
                self._node_failed.set_result(ours)
            if not isinstance(error, TaskGraphError):
                raise
        finally:
            await coordinator.close()

    def node(self, node_id: str) -> Node:
        """Returns a node by its id; only for a job that is no elastic one."""
        return cast(Node, self._members[node_id].node)

    @property
    def living(self) -> list[NodeLife]:
        """The nodes that have neither crashed nor ended."""
        return [m.node for m in self._members.values() if not m.crashed and not m.run.done()]

    @property
    def nodes(self) -> list[Node]:
        """The living nodes of a task graph; [] if the job is elastic."""
        return cast(list[Node], self.living) if self.job.elastic is None else []

    @property
    def events(self) -> list[Event]:
        return self._events

    def crash(self, node_id: str) -> None:
        """Ends a node as kill -9 would: nothing that it does from now on has an effect. Writes that it is gone."""
        member = self._members[node_id]
        if member.crashed:
            return
        member.crashed = True
        member.coordinator.crash()
        self.network.crash(node_id)
        member.run.cancel()
        record = GoneRecord(reason="killed", writer="launcher")
        self.store.execute(Txn(success=(Put(self.keys.gone(node_id), record.to_bytes()),)))
        lease = next((kv.lease for kv in self.store.select(self.keys.node(node_id), prefix=False)), 0)
        if lease:
            self.store.revoke(lease)

    async def result(self, timeout_s: float | None = None) -> JobResult:
        """Waits for the job's end; returns its result, or raises JobFailed, JobTimeout after `timeout_s`."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                status = await self._wait_for_end()
                if status.state != JobStatus.FINISHED:
                    raise job_failed(self.spec.name, status)
                found = await self._collect_or_fail()
        except TimeoutError:
            raise JobTimeout(
                f"job {self.spec.name!r} did not end within {timeout_s:g} s; {self.waits()}", job=self.spec.name
            ) from None
        view = self.living[0].keeper.view
        return assemble(self.spec.name, found, view.primaries.values(), time.monotonic() - began)

    async def _wait_for_end(self, going_on: tuple[str, ...] = (JobStatus.RUNNING,)) -> StatusRecord:
        """Waits until the state is none of `going_on`; returns the status. Raises JobFailed if a node fails before."""

        async def watch() -> StatusRecord:
            while True:
                kv = await self._launcher.get(self.keys.status)
                if kv is not None and (status := StatusRecord.from_bytes(kv.value)).state not in going_on:
                    return status
                revision = self.store.revision
                async for batch in self._launcher.watch(self.keys.status, revision + 1):
                    if batch.events:
                        break

        async with alongside(watch()) as (watching,):
            await any_done(watching, self._node_failed)
            if watching.done():
                return watching.result()
            raise JobFailed(f"a node could not go on: {self._node_failed.result()}", job=self.spec.name)

    async def _collect_or_fail(self) -> list[TaskResult]:
        """Returns the results, or raises JobFailed: a `result()` that raises fails a finished job."""
        async with alongside(self._collect(), self._wait_for_end((JobStatus.RUNNING, JobStatus.FINISHED))) as (
            collecting,
            failing,
        ):
            await any_done(collecting, failing)
            if collecting.done():
                return collecting.result()
            raise job_failed(self.spec.name, failing.result())

    async def _collect(self) -> list[TaskResult]:
        """Asks the living nodes again and again, until they have the results of all tasks; returns these."""
        while True:
            found = [result for node in self.living for result in await self._results_of(self._members[node.id])]
            if is_complete(found, self.job.all_tasks):
                return found
            await asyncio.sleep(0.01)  # a takeover is under way

    @staticmethod
    async def _results_of(member: _Member) -> list[TaskResult]:
        """Returns the results of a node; none if it ends meanwhile."""
        async with alongside(member.node.results()) as (asking,):
            await any_done(asking, member.run)
            return asking.result() if asking.done() else []

    def checkpoint(self) -> CheckpointRecord | None:
        """Returns the newest complete checkpoint; None: there is none."""
        kv = next(iter(self.store.select(self.keys.checkpoint, prefix=False)), None)
        return CheckpointRecord.from_bytes(kv.value) if kv is not None else None

    def waits(self) -> str:
        """Says what the job waits for, as its leader and primaries know it."""
        return waits_text((node.status() for node in self.living), elastic=self.spec.elastic)

    async def stop(self) -> None:
        """Ends every node. Code that does not return stays in daemon threads, also if a checkpoint directory hangs.

        It waits for files that are being written: they would reappear in a directory that the caller removes.
        """
        self._cancel_if_running()
        self.store.execute(Txn(success=(Put(self.keys.collected, b"{}"),)))
        runs = [m.run for m in self._members.values()]
        _, late = await asyncio.wait(runs, timeout=self.job.settings.call_s) if runs else (set(), set())
        for run in late:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        await self._launcher.close()
        until = time.monotonic() + self.job.settings.call_s
        for member in self._members.values():
            if isinstance(member.node.file_threads, PooledThreads):
                await member.node.file_threads.wait_until_returned(until - time.monotonic())

    def _cancel_if_running(self) -> None:
        """Writes that the job is cancelled, if it still runs (after a timeout or Ctrl-C), so that its nodes end."""
        kv = next(iter(self.store.select(self.keys.status, prefix=False)), None)
        if kv is not None and StatusRecord.from_bytes(kv.value).state == JobStatus.RUNNING:
            cancelled = StatusRecord(state=JobStatus.CANCELLED, reason="it was ended while it ran", writer="launcher")
            self.store.execute(Txn(success=(Put(self.keys.status, cancelled.to_bytes()),)))


async def arun_inprocess(
    job: Job[T],
    *,
    timeout_s: float | None = None,
    on_event: Callable[[Event], None] | None = None,
    resume: Resume = False,
    fresh: bool = False,
) -> JobResult[T]:
    """Runs a job on as few nodes in this process as it allows. The arguments are those of `run`.

    One node has no backups, and needs none: they would fail with the same process. So every task is set up once.
    """
    cluster = InProcessCluster(job, on_event=on_event, endless_leases=True)
    try:
        nodes = max(job.min_nodes, job.settings.min_in_sync)
        with searching_garbage_less_often():
            await cluster.start(nodes, resume=resume, fresh=fresh, timeout_s=timeout_s)
            return await cluster.result(timeout_s)
    except (JobFailed, asyncio.CancelledError) as error:
        # An error that names the checkpoint says that it cannot be used.
        if (left := cluster.checkpoint()) is not None and left.name not in str(error):
            error.add_note(resume_hint(left, cluster.spec.unit))
        raise
    finally:
        await cluster.stop()
