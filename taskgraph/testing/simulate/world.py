"""Holds everything that one seed simulates: an etcd, a network, a job, and its nodes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import taskgraph as tg
from taskgraph.checkpoint.manifest import CheckpointName, ExpectedJob
from taskgraph.checkpoint.store import CheckpointStore
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import CheckpointError, CoordinationError, JobError, TaskGraphError, Unavailable
from taskgraph.launch.collect import assemble, is_complete
from taskgraph.launch.resuming import begin, plan
from taskgraph.launch.submit import StartPoint, submit
from taskgraph.node.membership.failed_setups import SetUpFailed
from taskgraph.node.node import Node, Point
from taskgraph.observe.events import Event, EventLog
from taskgraph.observe.status import TaskResult
from taskgraph.protocol import transactions
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import KeyEvent, Put, Txn
from taskgraph.protocol.messages import Encoded, Stamp
from taskgraph.protocol.records import CheckpointRecord, GoneRecord, JobStatus, StatusRecord
from taskgraph.testing.simulate.client import SimCoordinator
from taskgraph.testing.simulate.disk import FileThreads, NodeDisk, SimDisk, launcher_uses
from taskgraph.testing.simulate.etcd import SimEtcd, SimStore
from taskgraph.testing.simulate.executions import TaskExecutions, Violation
from taskgraph.testing.simulate.invariants import Invariants, kind_of
from taskgraph.testing.simulate.loop import Process, SimLoop, outside
from taskgraph.testing.simulate.network import SimNetwork, SimTransport
from taskgraph.testing.simulate.pace import Pace
from taskgraph.testing.simulate.shared import Sharing
from taskgraph.testing.simulate.threads import InlineThreads
from taskgraph.testing.simulate.transcript import Transcript
from taskgraph.testing.simulate.workload import Workload

__all__ = ["SimNode", "World"]

_MESSAGE_OF_BATCH = {"Reports": "Report", "Offers": "Offer", "WrittenFiles": "WrittenFile"}
"""Maps a kind of batch to the kind of its messages: moments of a message occur for its batches, too."""


class MomentHook(Protocol):
    """Called with the name of a moment (see `drawing`), and the one or two nodes that it concerns ("" for none)."""

    def __call__(self, name: str, node: str, peer: str = "") -> None: ...


@dataclasses.dataclass(eq=False)
class SimNode:
    """One node's process, from its start to its end."""

    id: str
    name: str
    run_name: str
    process: Process
    threads: Process
    coordinator: SimCoordinator
    disk: NodeDisk
    node: Node
    run: asyncio.Task[None]
    dead: bool = False  # a fault killed it
    draining: bool = False
    declared_gone: bool = False  # a launcher declared it gone although it lives

    @property
    def exists(self) -> bool:
        """True until the process is killed or ends by itself."""
        return not self.dead and not self.run.done()


@dataclasses.dataclass
class _RunState:
    """One run of the job's name: its job, its records and its invariants."""

    workload: Workload
    runs: TaskExecutions
    job: tg.Job
    spec: JobSpec
    invariants: Invariants


class World:
    """One simulation: its etcd, network, nodes and checks.

    Args:
        rng: draws delays. Faults are injected by the caller.
        disk_rng: draws delays and faults of the disk for checkpoints; jobs without checkpoints do not depend on it.
        pace: delays that are not failures; by default there are none.

    Attributes:
        moment: called at every named moment, with the nodes that it concerns.
    """

    def __init__(
        self,
        workload: Workload,
        settings: tg.Settings,
        min_nodes: int,
        rng: random.Random,
        disk_rng: random.Random,
        pace: Pace | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self.loop = loop
        self.settings = settings
        self.transcript = Transcript(lambda: loop.at)
        self._min_nodes = min_nodes
        self._switch_to_run(self._create_run("run", workload))
        self._submitted_run: _RunState | None = None  # the run that is being submitted under the same name
        self.keys = Keys(self.spec.name)
        self._absent_since: dict[str, float] = {}  # node whose key was deleted -> when
        self._gone_before: set[str] = set()  # nodes that were gone at a later submission
        self._evictions: dict[str, Txn] = {}  # member key -> the last eviction sent
        self.shut_down = False  # a user cancelled the job
        self.moment: MomentHook = lambda name, node, peer="": None
        self.nodes: dict[str, SimNode] = {}
        self._disk_rng = disk_rng
        self.pace = pace or Pace.none()
        self.pace.slow_actors.on_slow = self._on_slow_actor
        self.disk = SimDisk(
            random.Random(disk_rng.getrandbits(64)),
            lambda name, node: self.moment(name, node),
            self._check_manifest,
            self._check_removal,
        )
        self._pointer_names: set[str] = set()  # names of all checkpoints that the pointer has ever named
        self.failed: asyncio.Future[None] = loop.create_future()
        speed = rng.choice((0.0003, 0.001, 0.001, 0.005))
        self.compute_s = rng.choice((0.0, 0.002, 0.01, 0.03, 0.1))
        self._etcd_timeout_s = rng.choice((0.3, 1.0, 3.0))
        self._rng = random.Random(rng.getrandbits(64))
        self.etcd = SimEtcd(
            SimStore(self._on_write),
            random.Random(rng.getrandbits(64)),
            delay_s=speed,
            lag_s=rng.choice((0.002, 0.02, 0.2)),
        )
        self.network = SimNetwork(
            random.Random(rng.getrandbits(64)),
            settings,
            delay_s=speed,
            in_order=rng.choice((0.5, 1.0)),
            on_message=self._on_message,
            on_call=self._on_call,
            call_faults=self.pace.call_faults,
            slow_actors=self.pace.slow_actors,
            memory=self.pace.memory_shortage,
            links=self.pace.slow_link,
        )
        self.launcher = SimCoordinator(
            self.etcd, Process("launcher"), Process("launcher"), on_txn=self._on_txn, timeout_s=3.0
        )
        self._name_count = 0
        self._incarnations: dict[str, int] = {}
        self._over = False

    # -- runs -------------------------------------------------------------------------------------

    def _create_run(self, run: str, workload: Workload) -> _RunState:
        """Creates the job, records and invariants of a run."""
        runs = TaskExecutions(
            lambda: self.transcript.count_state("epochs in flight"),
            lambda: self.transcript.count_state("torn down"),
            revision=lambda: self.invariants.view.revision,
        )
        job = workload.job(runs, self.settings, self._min_nodes)
        spec = dataclasses.replace(JobSpec.local(job), run=run)
        invariants = Invariants(
            spec.name,
            workload.tasks,
            runs,
            {task: workload.initial_state(task) for task in range(workload.tasks)},
            living=self._living_nodes,
            expected=None if workload.erratic or workload.moody is not None else workload.expected(),
            without_state=workload.without_state,
            sharing=workload.sharing or Sharing(workload.seed),
            listening=workload.listening,
            files=self._checkpoint_values,
            ahead=self.settings.epochs_ahead,
            epochs=None if workload.finishes else workload.epochs,
            min_in_sync=self.settings.min_in_sync,
        )
        return _RunState(workload, runs, job, spec, invariants)

    def _switch_to_run(self, made: _RunState) -> None:
        """Makes this run the one that new nodes join, and that the checks follow."""
        self.workload, self.runs, self.job = made.workload, made.runs, made.job
        self.spec, self.invariants = made.spec, made.invariants

    async def submit_again(self, run: str, workload: Workload, nodes: int, *, resume: bool) -> None:
        """Submits the job's name again, anew or from the newest checkpoint, and starts nodes.

        Nodes of the earlier run may still exist and write.

        Raises:
            JobRunning: the earlier run rolled back to a checkpoint, so it is not over.
        """
        made = self._submitted_run = self._create_run(run, workload)
        spec = dataclasses.replace(made.spec, expected_nodes=nodes)
        with launcher_uses(self.disk, random.Random(self._disk_rng.getrandbits(64)), self.pace.timing):
            try:
                spec, beginning = await self._plan(spec, resume=resume)
            except CheckpointError as error:  # no checkpoint is usable: begin anew
                self.transcript.add("launcher", "refused", str(error))
                if not (self.disk.damaged or self.disk.lists_late):
                    raise Violation(f"a job with checkpoints cannot be resumed: {error}") from error
                spec, beginning = await self._plan(spec, resume=False)
            made.spec = spec
            while True:
                try:
                    await begin(self.launcher, spec, beginning)
                    break
                except Unavailable:  # a launcher tries again
                    await asyncio.sleep(0.1)
        self.transcript.count_state("submitted again" if beginning.checkpoint is None else "went on from a checkpoint")
        self._name_count = 0
        for _ in range(nodes):
            self.add()

    async def _plan(self, spec: JobSpec, *, resume: bool) -> tuple[JobSpec, StartPoint]:
        """Calls `plan`, with retries while etcd is unavailable."""
        while True:
            try:
                return await plan(self.launcher, spec, resume=resume, fresh=not resume)
            except Unavailable:
                await asyncio.sleep(0.1)

    # -- life -------------------------------------------------------------------------------------

    async def start(self, nodes: int) -> None:
        """Submits the job, and starts this many nodes."""
        self.spec = dataclasses.replace(self.spec, expected_nodes=nodes)
        await submit(self.launcher, self.spec)
        for _ in range(nodes):
            self.add()

    def add(self, name: str = "") -> SimNode:
        """Starts a node: a new one, or a new process of an existing name."""
        if not name:
            self._name_count += 1
            name = f"n{self._name_count}"
        self._incarnations[name] = self._incarnations.get(name, 0) + 1
        node_id = f"{name}-{self._incarnations[name]}"
        process, threads = Process(node_id, self._step_timer(node_id)), Process(node_id)
        coordinator = SimCoordinator(
            self.etcd,
            process,
            threads,
            on_txn=self._on_txn,
            timeout_s=self._etcd_timeout_s,
            lag=self._rng.choice((1.0, 1.0, 1.0, 0.0, 10.0)),
            call_faults=self.pace.call_faults,
            slow_actors=self.pace.slow_actors,
        )
        disk = self.disk.for_node(node_id)
        events = EventLog(name)
        events.listen(lambda event: self._on_event(node_id, event))
        host = f"h{self._rng.randrange(1, 4)}"
        process.clock = threads.clock = self.pace.host_clocks.clock_of(host)
        making = partial(
            Node,
            spec=self.spec,
            job=self.job,
            coordinator=coordinator,
            transport=SimTransport(self.network, process),
            name=name,
            node_id=node_id,
            events=events,
            host=host,
            devices=0,
            threads=InlineThreads(
                random.Random(self._rng.getrandbits(64)),
                self.compute_s,
                self.pace.timing,
                self._slow_actor_delay("code", node_id),
            ),
            file_threads=FileThreads(
                random.Random(self._disk_rng.getrandbits(64)),
                disk,
                self.pace.timing,
                self._slow_actor_delay("files", node_id),
            ),
            place=disk,
            point=self._stage_hook(node_id),
        )
        node: Node = process.new_context().run(making)  # in its context, since it reads its clock
        node.failed_set_ups.alone = True  # as in a process of its own
        run = self.loop.create_task(self._run_node(node), name=f"node {name}", context=process.new_context())
        known = self.nodes[node_id] = SimNode(
            node_id, name, self.spec.run, process, threads, coordinator, disk, node, run
        )
        return known

    def _slow_actor_delay(self, what: str, node_id: str) -> Callable[[], float]:
        """Returns the function that draws a delay in seconds if `what` of the node is a slow actor."""
        return lambda: self.pace.slow_actors.late_s(what, f"{what} of {node_id}")

    def _step_timer(self, node_id: str) -> Callable[[], float] | None:
        """Returns the function that draws how long a step of the node's loop takes; None if steps take no time."""
        steps = self.pace.step_times
        if not steps.active:
            return None

        def draw_step() -> float:
            self.moment("step", node_id)
            return steps.step_s() + self.pace.slow_actors.late_s(f"steps of {node_id}") / 10

        return draw_step

    def _on_slow_actor(self, name: str, late_s: float, for_s: float) -> None:
        """Logs that an actor becomes slow for a time."""
        self.transcript.add("world", "comes last", f"{name}: up to {late_s:.3f} s, for {for_s:.3f} s")
        self.transcript.count_state("comes last")

    async def _run_node(self, node: Node) -> None:
        """Runs a node until it ends. Ending by an error is a violation, unless a fault explains the error."""
        try:
            await asyncio.sleep(self._rng.uniform(0.0, 0.05))
            await node.run()
        except CoordinationError as error:  # a node that cannot reach etcd when it starts ends; its launcher sees that
            known = self.nodes[node.id]
            if not known.dead:
                self.transcript.add(node.id, "ended", str(error))
                self.declare_gone(node.id, "it ended")
        except SetUpFailed as error:
            self.transcript.add(node.id, "ended", str(error))
            self.transcript.count_state("a node ended that could not set up a backup")
            mistake = self.workload.mistake
            if mistake is None or not mistake.raised:
                self.fail(Violation(f"{node.id} ended: {error}"))
            elif not self._over and len(self.existing()) - 1 <= self.settings.min_in_sync:  # it is still one of them
                self.add()
        except TaskGraphError as error:
            known = self.nodes[node.id]
            if known.dead:
                return
            self.transcript.add(node.id, "ended", str(error))
            self.transcript.count_state("a node ended itself")
            late = known.run_name != self.spec.run and isinstance(error, JobError) and "submitted anew" in str(error)
            if not self._gone(node.id) and not late:
                self.fail(Violation(f"{node.id} ended: {error}"))
            elif not self._over and len(self.existing()) - 1 <= self.settings.min_in_sync:
                self.add()  # it was thawed as all failures ended, and counted as one of those that go on
        except Exception as error:  # a bug, also in a process that is being killed
            self.fail(Violation(f"{node.id} broke down: {error!r}"))
        finally:
            await self.nodes[node.id].coordinator.close()

    def _gone(self, node_id: str) -> bool:
        """True if the node was ever declared gone, also in an earlier run."""
        return node_id in self._gone_before or node_id in self.invariants.view.gone

    def fail(self, error: Exception) -> None:
        """Fails the simulation with the violation of an invariant."""
        if not self.failed.done():
            self.transcript.add("check", "VIOLATION", str(error))
            self.failed.set_exception(error)

    def declare_gone(self, node_id: str, why: str) -> None:
        """Declares a node gone, as a launcher does."""

        def declare() -> None:
            if self.nodes[node_id].run_name == self.spec.run:
                record = GoneRecord(reason=why, writer="launcher")
                self.etcd.store.execute(transactions.declare_gone(self.invariants.view, node_id, record))

        self.etcd.arrive(declare)

    def collect(self) -> None:
        """Collects the results of a finished run, as a launcher does, so that its nodes may leave."""

        def put() -> None:
            if self.invariants.view.finished:
                self.etcd.store.execute(Txn(success=(Put(self.keys.collected, b"{}"),)))

        self.etcd.arrive(put)

    def cancel_job(self) -> None:
        """Cancels the job if it runs, as a user does."""

        def cancel() -> None:
            if self.invariants.view.running:
                self.shut_down = True
                record = StatusRecord(state=JobStatus.CANCELLED, reason="shut down", writer="launcher")
                self.etcd.store.execute(transactions.fail(self.invariants.view, record))

        self.etcd.arrive(cancel)

    # -- the end ----------------------------------------------------------------------------------

    async def final_status(self) -> StatusRecord:
        """Waits until the job has ended. Returns its status."""
        while True:
            view = self.invariants.view
            if view.status is not None and view.status.record.state != JobStatus.RUNNING:
                return view.status.record
            await asyncio.sleep(0.02)

    async def result(self) -> tg.JobResult | None:
        """Waits until all tasks agree on the results. Returns them; None if the job failed after all."""
        while True:
            status = self.invariants.view.status
            if status is None or status.record.state not in (JobStatus.FINISHED, JobStatus.RUNNING):
                return None
            found: list[TaskResult] = []
            for known in self.existing():
                try:
                    async with asyncio.timeout(0.2):  # one that starts or is frozen does not answer
                        found += await known.node.results()
                except TimeoutError:
                    continue
            if is_complete(found, self.workload.tasks):
                return assemble(self.spec.name, found, self.invariants.view.primaries.values(), 0.0)
            await asyncio.sleep(0.02)

    def all_ended(self) -> bool:
        """True if every node that was not killed has ended.

        Raises:
            Violation: a node ended without tearing down one of its tasks.
        """
        for known in self.nodes.values():
            if known.exists:
                return False
            for task, replica in known.node.roles.replicas.items():
                if not known.dead and replica.ready and not replica.actor.abandoned:
                    raise Violation(f"{known.id} ended, and did not tear down task {task}")
        return True

    def check_no_node_keys_left(self) -> None:
        """Raises Violation if a node's key is left in etcd. Call this some time after all nodes have ended."""
        if found := self.etcd.store.select(self.keys.nodes, prefix=True):
            raise Violation(f"all nodes have ended, and there is {found[0].key}")

    async def stop(self) -> None:
        """Ends every node, also stuck ones."""
        self._over = True
        self.etcd.store.execute(Txn(success=(Put(self.keys.collected, b"{}"),)))
        self.etcd.wake()
        runs = [known.run for known in self.nodes.values()]
        _, late = await asyncio.wait(runs, timeout=self.settings.call_s) if runs else (set(), set())
        for known in self.nodes.values():
            if known.run in late:
                known.run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        await self.launcher.close()

    # -- what happens ----------------------------------------------------------------------------

    def existing(self) -> list[SimNode]:
        """Returns the run's nodes whose process exists, in the order of their start."""
        return [known for known in self.nodes.values() if known.run_name == self.spec.run and known.exists]

    def active_members(self, task: int) -> list[str]:
        """Returns the members of a task, without those that are evicted, or will be by a transaction under way."""
        sent = {
            node: self._evictions.get(self.keys.member(task, node))
            for node in self.invariants.view.active_members(task)
        }
        return [node for node, txn in sent.items() if txn is None or not self.etcd.store.would_succeed(txn)]

    def _living_nodes(self) -> dict[str, Node]:
        return {known.id: known.node for known in self.existing()}

    def _checkpoint_values(self, record: CheckpointRecord) -> dict[int, Encoded] | None:
        """Reads a checkpoint: task -> value. Returns None if the disk damaged it."""
        expected = ExpectedJob(job=self.spec.name, fingerprint=self.spec.fingerprint, tasks=self.spec.tasks)
        store = CheckpointStore("file:///simulated", expected, place=self.disk.for_node("the checks"))
        try:
            manifest = store.open(record.name)
            read = {info.task: store.read(manifest, info.task) for info in manifest.files}
        except CheckpointError as error:
            if any(record.name in path for path in self.disk.damaged):
                return None
            raise Violation(f"a checkpoint is complete, and cannot be used: {error}") from error
        return {task: value for task, value in read.items() if value is not None}

    def _on_event(self, node_id: str, event: Event) -> None:
        """Logs an event of a node. If the event says that a lease ended, checks that it did."""
        self.transcript.add(node_id, event.kind, event.text)
        self.transcript.count_state(event.kind)
        if (lease := event.fields.get("lease")) is not None:
            self.transcript.count_state("lease ended")
            # The node asked at most a second ago, and the lease had less than a second left, by the node's clock.
            if not outside(self.etcd.store.has_ended, int(lease), 2.0 * self.pace.host_clocks.drift):
                self.fail(Violation(f"{node_id} says too early: {event.text}"))

    def _stage_hook(self, node_id: str) -> Point:
        """Returns the function that a node calls at each stage of an epoch; it signals the moments "point ..."."""

        async def at(stage: str, task: int, epoch: int) -> None:
            self.moment(f"point {stage}", node_id)
            if epoch + 1 == self.workload.epochs:
                self.moment(f"last {stage}", node_id)

        return at

    def _on_message(self, sender: str, receiver: str, message: object) -> None:
        """Logs a message that arrives. Signals a moment with the receiver as its node, and one with the sender."""
        kind = type(message).__name__
        self.transcript.add("net", kind, f"{sender} > {receiver}")
        moment = _MESSAGE_OF_BATCH.get(kind, kind)
        if moment is not kind:
            self.transcript.count_state(f"several in {kind}")
        self.moment(f"message {moment}", receiver, sender)
        self.moment(f"answer {moment}", sender, receiver)

    def _on_call(self, sender: str, receiver: str, message: object) -> None:
        """Signals that a node is about to send a message."""
        kind = type(message).__name__
        self.moment(f"sending {_MESSAGE_OF_BATCH.get(kind, kind)}", sender, receiver)

    def _on_txn(self, process: Process, txn: Txn, when: str) -> None:
        """Signals the moment of a write: `when` is "sending", or "before" the server executes it."""
        puts = [(op.key, op.value) for op in txn.success if isinstance(op, Put)]
        kind = kind_of(self.invariants.view, puts) if puts else ""
        if kind:
            member = puts[0][0].rpartition("/")[2] if kind in ("admit", "evict") else ""
            if (when, kind) == ("sending", "evict"):
                self._evictions[puts[0][0]] = txn
            self.moment(f"{when} {kind}", process.name, member)

    def _on_write(self, revision: int, events: tuple[KeyEvent, ...]) -> None:
        """Logs and checks a write to etcd, within the write. A violation fails the simulation."""
        if self._over:
            return
        puts = [(e.kv.key, e.kv.value) for e in events if e.kind == "put"]
        kind = kind_of(self.invariants.view, puts)
        made, self._submitted_run = self._submitted_run, None if kind == "submit" else self._submitted_run
        view, root = self.invariants.view, len(self.keys.root)
        if kind == "restart" and view.stamp is not None:
            terms = {task: known.record.term for task, known in view.primaries.items()}
            if self.runs.has_several_under_way(view.stamp, terms):
                self.transcript.count_state("restart in flight")
        for event in events:
            key = event.kv.key[root:]
            if key != "spec":
                self.transcript.add(
                    "etcd", f"[{revision}] {event.kind}", f"{key} {_format_record(key, event.kv.value)}"
                )
        try:
            self._check_leases(events)
            self._check_absent_long_enough(events)
            if kind == "submit" and made is not None:
                before = self.invariants
                self._gone_before |= {node for node in self.nodes if self._gone(node)}
                self._switch_to_run(made)
                self.invariants.check_resubmission(
                    before, revision, self.etcd.store.select(self.keys.root, prefix=True)
                )
            else:
                self.invariants.check_write(revision, events)
            self._check_writers(events)
            self.invariants.check_commit_calls()
            if self.invariants.view.checkpoint is not None:
                self._pointer_names.add(self.invariants.view.checkpoint.record.name)
        except Violation as error:
            self.fail(error)
        self.etcd.wake()
        if kind:
            self.transcript.count_state(f"wrote {kind}")
            self.etcd.later(0.0, self.moment, f"after {kind}", self._writer_of(puts))

    def _check_leases(self, events: tuple[KeyEvent, ...]) -> None:
        """Checks that no node relies on its lease after its key expired, even if it is frozen."""
        for event in events:
            node_id = event.kv.key.removeprefix(self.keys.nodes)
            known, registered = self.nodes.get(node_id), self.invariants.view.nodes.get(node_id)
            if event.kind == "delete" and known is not None and known.exists and registered is not None:
                if known.declared_gone or self.etcd.store.has_lease(registered.record.lease):
                    continue  # the key or lease was deleted, and did not expire
                counts_until = known.process.clock.time_of(known.coordinator.lease_valid_until(registered.record.lease))
                late_s = counts_until - self.loop.at
                if late_s > 1e-6 + self.pace.host_clocks.drift * self.settings.lease_ttl_s:
                    raise Violation(f"{known.id} counts on its lease for {late_s:.3f} s after it expired")

    def _check_manifest(self, path: str, node_id: str) -> None:
        """Checks that a final manifest is written only after the pointer named it: a resumed job relies on that."""
        *_, name, file = path.split("/")
        if file == "manifest.json" and name not in self._pointer_names:
            self.fail(Violation(f"{node_id} writes {path}, and the pointer never named that checkpoint"))

    def _check_removal(self, path: str, node_id: str) -> None:
        """Checks that no node, however stale its view, removes the newest checkpoint, or files of the last commit,
        which may become the newest."""
        view, names = self.invariants.view, {part: CheckpointName.parse(part) for part in path.split("/")}
        pointer = view.checkpoint.record.name if view.checkpoint is not None else ""
        if pointer in names:
            self.fail(Violation(f"{node_id} removes {path}, of the newest checkpoint"))
        for text, name in names.items():
            if name is None or name.run != self.spec.run[:8] or text in self._pointer_names:
                continue
            if self.invariants.is_of_last_commit(Stamp(name.attempt, name.epoch)):
                self.fail(Violation(f"{node_id} removes {path}, which may still become a checkpoint"))

    def _check_absent_long_enough(self, events: tuple[KeyEvent, ...]) -> None:
        """Checks that a node declared gone for an absent key had had no key for `lost_after_s`."""
        now, absent = self.loop.at, self._absent_since
        for event in events:
            key = event.kv.key
            if key.startswith(self.keys.nodes):
                node_id = key.removeprefix(self.keys.nodes)
                if event.kind == "delete":
                    absent[node_id] = now
                else:
                    absent.pop(node_id, None)
            elif event.kind == "put" and key.startswith(self.keys.gone_nodes):
                node_id, record = key.removeprefix(self.keys.gone_nodes), GoneRecord.from_bytes(event.kv.value)
                for_s = now - absent.get(node_id, -math.inf)
                least_s = self.settings.lost_after_s * (1.0 - self.pace.host_clocks.drift)
                if record.reason.startswith("its key was absent") and for_s < least_s:
                    raise Violation(f"{node_id} is gone since {record.reason}, and it was for {for_s:.3f} s")

    def _check_writers(self, events: tuple[KeyEvent, ...]) -> None:
        """Checks that nodes of an earlier run write only events and their own keys."""
        for event in events:
            key = event.kv.key
            if event.kind == "put" and not key.startswith((self.keys.events, self.keys.nodes)):
                known = self.nodes.get(self._writer_of([(key, event.kv.value)]))
                if known is not None and known.run_name != self.spec.run:
                    raise Violation(f"{known.id} is of a run before, and wrote {key}")

    def _writer_of(self, puts: list[tuple[str, bytes]]) -> str:
        """Returns the node that wrote these keys; "" if it is unknown."""
        for _, value in puts:
            try:
                writer = json.loads(value).get("writer", "")
            except (ValueError, AttributeError):
                continue
            node = str(writer).rpartition(":")[0]
            if node in self.nodes:
                return node
        return ""


def _format_record(key: str, value: bytes) -> str:
    """Formats a record, without empty fields and fields that differ between processes."""
    if not value or key == "generation":
        return value.decode()
    raw = json.loads(value)
    if key.startswith("nodes/"):
        raw = {name: raw[name] for name in ("writer", "host", "lease", "draining")}
    return ", ".join(f"{name} {given}" for name, given in raw.items() if given not in ("", None, False))


def discard(_: object) -> None:
    """Does nothing with a result."""


@contextlib.contextmanager
def errors_as_violations(loop: SimLoop, fail: Callable[[Exception], None]) -> Iterator[None]:
    """Turns exceptions that the loop meets, and errors in the framework's log, into violations."""
    loop.set_exception_handler(
        lambda _, context: fail(Violation(f"not handled: {context.get('message')} {context.get('exception')!r}"))
    )
    handler = _ErrorLogHandler(fail)
    logger = logging.getLogger("taskgraph")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


class _ErrorLogHandler(logging.Handler):
    """Hands each error in the log to `fail`, as a violation."""

    def __init__(self, fail: Callable[[Exception], None]) -> None:
        super().__init__(logging.ERROR)
        self._fail = fail

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
        self._fail(Violation(f"logged as an error: {text}"))
