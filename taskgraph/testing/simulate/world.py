"""Simulates what one seed needs: an etcd, a network, a job, and nodes that come and go."""

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
from unittest import mock

import taskgraph as tg
from taskgraph.checkpoint.manifest import Name, Origin
from taskgraph.checkpoint.store import Store
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import CheckpointError, CoordinationError, JobError, TaskGraphError, Unavailable
from taskgraph.launch import resuming
from taskgraph.launch.collect import assemble, complete
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
from taskgraph.protocol.records import CheckpointRecord, GoneRecord, State, StatusRecord
from taskgraph.testing.simulate.client import SimCoordinator
from taskgraph.testing.simulate.etcd import SimEtcd, SimStore
from taskgraph.testing.simulate.invariants import Invariants, kind_of
from taskgraph.testing.simulate.loop import Process, SimLoop, outside
from taskgraph.testing.simulate.network import SimNetwork, SimTransport
from taskgraph.testing.simulate.pace import Pace
from taskgraph.testing.simulate.place import FileThreads, NodePlace, SimPlace
from taskgraph.testing.simulate.runs import Runs, Violation
from taskgraph.testing.simulate.threads import InlineThreads
from taskgraph.testing.simulate.transcript import Transcript
from taskgraph.testing.simulate.workload import Workload

__all__ = ["SimNode", "World"]

_OF_ONE = {"Reports": "Report", "Offers": "Offer", "WrittenFiles": "WrittenFile"}
"""Messages that are several of another kind: whatever is to happen with one may happen with several."""


class Moment(Protocol):
    """Called with a named moment, and with the nodes that it concerns ("" for none)."""

    def __call__(self, name: str, node: str, peer: str = "") -> None: ...


@dataclasses.dataclass(eq=False)
class SimNode:
    """One node's process, from its start to its end."""

    id: str
    name: str
    of: str  # the run
    process: Process
    threads: Process
    coordinator: SimCoordinator
    place: NodePlace
    node: Node
    run: asyncio.Task[None]
    dead: bool = False  # killed
    draining: bool = False
    called_gone: bool = False  # its launcher declared it gone, wrongly

    @property
    def exists(self) -> bool:
        return not self.dead and not self.run.done()


@dataclasses.dataclass
class _Made:
    """One run of the job's name."""

    workload: Workload
    runs: Runs
    job: tg.Job
    spec: JobSpec
    invariants: Invariants


class World:
    """One simulation.

    Args:
        rng: draws delays; the caller decides what fails.
        keeps: draws what concerns checkpoints only, so that jobs without checkpoints do not depend on it.
        pace: delays that are no failures; by default there are none.
        moment: called at every named moment, with the node that it concerns ("" for none).
    """

    def __init__(
        self,
        workload: Workload,
        settings: tg.Settings,
        min_nodes: int,
        rng: random.Random,
        keeps: random.Random,
        pace: Pace | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self.loop = loop
        self.settings = settings
        self.transcript = Transcript(lambda: loop.at)
        self._min_nodes = min_nodes
        self._take(self._made("run", workload))
        self._next: _Made | None = None  # the run that is being submitted under the same name
        self.keys = Keys(self.spec.name)
        self._absent_since: dict[str, float] = {}  # node whose key was deleted -> when
        self._gone_before: set[str] = set()  # nodes that were gone when their job's name was submitted again
        self._evictions: dict[str, Txn] = {}  # member key -> the last eviction that was sent
        self.shut_down = False  # a user ended the run by a command
        self.moment: Moment = lambda name, node, peer="": None
        self.nodes: dict[str, SimNode] = {}
        self._keeps = keeps
        self.pace = pace or Pace.none()
        self.pace.starving.on_last = self._comes_last
        self.place = SimPlace(
            random.Random(keeps.getrandbits(64)),
            lambda name, node: self.moment(name, node),
            self._check_manifest,
            self._check_removal,
        )
        self._pointed_to: set[str] = set()  # checkpoints that the pointer has named at any time
        self.failed: asyncio.Future[None] = loop.create_future()
        speed = rng.choice((0.0003, 0.001, 0.001, 0.005))
        self.compute_s = rng.choice((0.0, 0.002, 0.01, 0.03, 0.1))
        self._etcd_timeout_s = rng.choice((0.3, 1.0, 3.0))
        self._rng = random.Random(rng.getrandbits(64))
        self.etcd = SimEtcd(
            SimStore(self._wrote),
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
            slips=self.pace.slips,
            starving=self.pace.starving,
            memory=self.pace.memory,
            links=self.pace.links,
        )
        self.launcher = SimCoordinator(
            self.etcd, Process("launcher"), Process("launcher"), on_txn=self._on_txn, timeout_s=3.0
        )
        self._names = 0
        self._incarnations: dict[str, int] = {}
        self._over = False

    # -- runs -------------------------------------------------------------------------------------

    def _made(self, run: str, workload: Workload) -> _Made:
        """Prepares a run of the job's name: its code and its invariants."""
        runs = Runs(
            lambda: self.transcript.state("epochs in flight"),
            lambda: self.transcript.state("torn down"),
            revision=lambda: self.invariants.view.revision,
        )
        job = workload.job(runs, self.settings, self._min_nodes)
        spec = dataclasses.replace(JobSpec.local(job), run=run)
        invariants = Invariants(
            spec.name,
            workload.tasks,
            runs,
            {task: workload.first(task) for task in range(workload.tasks)},
            living=self._living,
            expected=None if workload.erratic or workload.moody is not None else workload.expected(),
            without_state=workload.without_state,
            listening=workload.listening,
            files=self._files,
            ahead=self.settings.epochs_ahead,
            epochs=None if workload.finishes else workload.epochs,
            min_in_sync=self.settings.min_in_sync,
        )
        return _Made(workload, runs, job, spec, invariants)

    def _take(self, made: _Made) -> None:
        self.workload, self.runs, self.job = made.workload, made.runs, made.job
        self.spec, self.invariants = made.spec, made.invariants

    async def submit_again(self, run: str, workload: Workload, nodes: int, *, resume: bool) -> None:
        """Submits the job's name again, with other states or from the newest checkpoint, and starts nodes.

        Nodes of the run before may still exist and write.

        Raises:
            JobRunning: the run before went back to a checkpoint, so it is not over.
        """
        made = self._next = self._made(run, workload)
        spec = dataclasses.replace(made.spec, expected_nodes=nodes)
        with self._planning():
            try:
                spec, beginning = await self._planned(spec, resume=resume)
            except CheckpointError as error:  # no checkpoint can be used, so the launcher begins anew
                self.transcript.add("launcher", "refused", str(error))
                if not (self.place.spoilt or self.place.late):
                    raise Violation(f"a job with checkpoints cannot be resumed: {error}") from error
                spec, beginning = await self._planned(spec, resume=False)
            made.spec = spec
            while True:
                try:
                    await begin(self.launcher, spec, beginning)
                    break
                except Unavailable:  # a launcher tries again
                    await asyncio.sleep(0.1)
        self.transcript.state("submitted again" if beginning.checkpoint is None else "went on from a checkpoint")
        self._names = 0
        for _ in range(nodes):
            self.add()

    async def _planned(self, spec: JobSpec, *, resume: bool) -> tuple[JobSpec, StartPoint]:
        """Returns what `plan` returns, and tries again while etcd is away."""
        while True:
            try:
                return await plan(self.launcher, spec, resume=resume, fresh=not resume)
            except Unavailable:
                await asyncio.sleep(0.1)

    @contextlib.contextmanager
    def _planning(self) -> Iterator[None]:
        """The launcher sees the simulated place, and waits for it as nodes do."""
        place = self.place.seen_by("launcher")
        threads = FileThreads(random.Random(self._keeps.getrandbits(64)), place, self.pace.ends, lambda: 0.0)
        with (
            mock.patch.object(resuming, "Store", partial(Store, place=place)),
            mock.patch.object(resuming, "PooledThreads", lambda name, limit: threads),
        ):
            yield

    # -- life -------------------------------------------------------------------------------------

    async def start(self, nodes: int) -> None:
        self.spec = dataclasses.replace(self.spec, expected_nodes=nodes)
        await submit(self.launcher, self.spec)
        for _ in range(nodes):
            self.add()

    def add(self, name: str = "") -> SimNode:
        """Starts a node: a new one, or another process of the same name."""
        if not name:
            self._names += 1
            name = f"n{self._names}"
        self._incarnations[name] = self._incarnations.get(name, 0) + 1
        node_id = f"{name}-{self._incarnations[name]}"
        process, threads = Process(node_id, self._stepped(node_id)), Process(node_id)
        coordinator = SimCoordinator(
            self.etcd,
            process,
            threads,
            on_txn=self._on_txn,
            timeout_s=self._etcd_timeout_s,
            lag=self._rng.choice((1.0, 1.0, 1.0, 0.0, 10.0)),
            slips=self.pace.slips,
            starving=self.pace.starving,
        )
        place = self.place.seen_by(node_id)
        events = EventLog(name)
        events.listen(lambda event: self._on_event(node_id, event))
        host = f"h{self._rng.randrange(1, 4)}"
        process.clock = threads.clock = self.pace.clocks.of(host)
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
                random.Random(self._rng.getrandbits(64)), self.compute_s, self.pace.ends, self._late("code", node_id)
            ),
            file_threads=FileThreads(
                random.Random(self._keeps.getrandbits(64)), place, self.pace.ends, self._late("files", node_id)
            ),
            place=place,
            point=self._point(node_id),
        )
        node: Node = process.fresh().run(making)  # it looks at its clock
        node.failed_set_ups.alone = True  # as in a process of its own
        run = self.loop.create_task(self._run(node), name=f"node {name}", context=process.fresh())
        known = self.nodes[node_id] = SimNode(
            node_id, name, self.spec.run, process, threads, coordinator, place, node, run
        )
        return known

    def _late(self, what: str, node_id: str) -> Callable[[], float]:
        return lambda: self.pace.starving.late_s(what, f"{what} of {node_id}")

    def _stepped(self, node_id: str) -> Callable[[], float] | None:
        """Returns the function that draws how long a step of the node's loop takes; None if steps take no time."""
        steps = self.pace.steps
        if not steps.drawn:
            return None

        def stepped() -> float:
            self.moment("step", node_id)
            return steps.step_s() + self.pace.starving.late_s(f"steps of {node_id}") / 10

        return stepped

    def _comes_last(self, name: str, late_s: float, for_s: float) -> None:
        self.transcript.add("world", "comes last", f"{name}: up to {late_s:.3f} s, for {for_s:.3f} s")
        self.transcript.state("comes last")

    async def _run(self, node: Node) -> None:
        try:
            await asyncio.sleep(self._rng.uniform(0.0, 0.05))
            await node.run()
        except CoordinationError as error:  # a node that cannot reach etcd when it starts ends; its launcher sees that
            known = self.nodes[node.id]
            if not known.dead:
                self.transcript.add(node.id, "ended", str(error))
                self.say_gone(node.id, "it ended")
        except SetUpFailed as error:
            self.transcript.add(node.id, "ended", str(error))
            self.transcript.state("a node ended that could not set up a backup")
            mistake = self.workload.mistake
            if mistake is None or not mistake.raised:
                self.violated(Violation(f"{node.id} ended: {error}"))
            elif not self._over and len(self.existing()) - 1 <= self.settings.min_in_sync:  # it is still one of them
                self.add()
        except TaskGraphError as error:
            known = self.nodes[node.id]
            if known.dead:
                return
            self.transcript.add(node.id, "ended", str(error))
            self.transcript.state("a node ended itself")
            late = known.of != self.spec.run and isinstance(error, JobError) and "submitted anew" in str(error)
            if not self._gone(node.id) and not late:
                self.violated(Violation(f"{node.id} ended: {error}"))
            elif not self._over and len(self.existing()) - 1 <= self.settings.min_in_sync:
                self.add()  # it was thawed as all failures ended, and counted as one of those that go on
        except Exception as error:  # a bug, also in a process that is being killed
            self.violated(Violation(f"{node.id} broke down: {error!r}"))
        finally:
            await self.nodes[node.id].coordinator.close()

    def _gone(self, node_id: str) -> bool:
        """True if the node's run has ever declared it gone."""
        return node_id in self._gone_before or node_id in self.invariants.view.gone

    def violated(self, error: Exception) -> None:
        """Ends the run, since an invariant broke."""
        if not self.failed.done():
            self.transcript.add("check", "VIOLATION", str(error))
            self.failed.set_exception(error)

    def say_gone(self, node_id: str, why: str) -> None:
        """A launcher declares the node gone."""

        def say() -> None:
            if self.nodes[node_id].of == self.spec.run:
                record = GoneRecord(reason=why, writer="launcher")
                self.etcd.store.execute(transactions.declare_gone(self.invariants.view, node_id, record))

        self.etcd.arrive(say)

    def collect(self) -> None:
        """A launcher collects the results of the run, if it has finished, and its nodes may leave."""

        def tell() -> None:
            if self.invariants.view.finished:
                self.etcd.store.execute(Txn(success=(Put(self.keys.collected, b"{}"),)))

        self.etcd.arrive(tell)

    def shut(self) -> None:
        """A user ends the job, if it runs."""

        def end() -> None:
            if self.invariants.view.running:
                self.shut_down = True
                record = StatusRecord(state=State.CANCELLED, reason="shut down", writer="launcher")
                self.etcd.store.execute(transactions.fail(self.invariants.view, record))

        self.etcd.arrive(end)

    # -- the end ----------------------------------------------------------------------------------

    async def status(self) -> StatusRecord:
        """The job's status, once it does not run."""
        while True:
            view = self.invariants.view
            if view.status is not None and view.status.record.state != State.RUNNING:
                return view.status.record
            await asyncio.sleep(0.02)

    async def result(self) -> tg.JobResult | None:
        """The results, once all tasks agree; None if the job failed after all."""
        while True:
            status = self.invariants.view.status
            if status is None or status.record.state not in (State.FINISHED, State.RUNNING):
                return None
            found: list[TaskResult] = []
            for known in self.existing():
                try:
                    async with asyncio.timeout(0.2):  # one that starts or is frozen does not answer
                        found += await known.node.results()
                except TimeoutError:
                    continue
            if complete(found, self.workload.tasks):
                return assemble(self.spec.name, found, self.invariants.view.primaries.values(), 0.0)
            await asyncio.sleep(0.02)

    def left(self) -> bool:
        """True if every node that was not killed has ended.

        Raises:
            Violation: one did, and something of a task there did not.
        """
        for known in self.nodes.values():
            if known.exists:
                return False
            for task, replica in known.node.roles.replicas.items():
                if not known.dead and replica.ready and not replica.actor.abandoned:
                    raise Violation(f"{known.id} ended, and did not tear down task {task}")
        return True

    def check_left(self) -> None:
        """Call this some time after all nodes have ended. Raises Violation if a node's key is left."""
        if found := self.etcd.store.select(self.keys.nodes, prefix=True):
            raise Violation(f"all nodes have ended, and there is {found[0].key}")

    async def stop(self) -> None:
        """Ends every node, stuck ones too."""
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
        """Nodes of the run whose process exists, in the order in which they started."""
        return [known for known in self.nodes.values() if known.of == self.spec.run and known.exists]

    def active_members(self, task: int) -> list[str]:
        """Members of a task that are not evicted, also not by a transaction on its way."""
        sent = {
            node: self._evictions.get(self.keys.member(task, node))
            for node in self.invariants.view.active_members(task)
        }
        return [node for node, txn in sent.items() if txn is None or not self.etcd.store.would_succeed(txn)]

    def _living(self) -> dict[str, Node]:
        return {known.id: known.node for known in self.existing()}

    def _files(self, record: CheckpointRecord) -> dict[int, Encoded] | None:
        """task -> its value in a checkpoint; None if the disk lied."""
        origin = Origin(job=self.spec.name, fingerprint=self.spec.fingerprint, tasks=self.spec.tasks)
        store = Store("file:///simulated", origin, place=self.place.seen_by("the checks"))
        try:
            manifest = store.open(record.name)
            read = {info.task: store.read(manifest, info.task) for info in manifest.files}
        except CheckpointError as error:
            if any(record.name in path for path in self.place.spoilt):
                return None
            raise Violation(f"a checkpoint is complete, and cannot be used: {error}") from error
        return {task: value for task, value in read.items() if value is not None}

    def _on_event(self, node_id: str, event: Event) -> None:
        self.transcript.add(node_id, event.kind, event.text)
        self.transcript.state(event.kind)
        if (lease := event.fields.get("lease")) is not None:
            self.transcript.state("lease ended")
            # The lease had less than a second left at most a second before, by the clock of the asking node.
            if not outside(self.etcd.store.ended, int(lease), 2.0 * self.pace.clocks.drift):
                self.violated(Violation(f"{node_id} says too early: {event.text}"))

    def _point(self, node_id: str) -> Point:
        async def at(stage: str, task: int, epoch: int) -> None:
            self.moment(f"point {stage}", node_id)
            if epoch + 1 == self.workload.epochs:
                self.moment(f"last {stage}", node_id)

        return at

    def _on_message(self, sender: str, receiver: str, message: object) -> None:
        kind = type(message).__name__
        self.transcript.add("net", kind, f"{sender} > {receiver}")
        moment = _OF_ONE.get(kind, kind)
        if moment is not kind:
            self.transcript.state(f"several in {kind}")
        self.moment(f"message {moment}", receiver, sender)
        self.moment(f"answer {moment}", sender, receiver)

    def _on_call(self, sender: str, receiver: str, message: object) -> None:
        kind = type(message).__name__
        self.moment(f"sending {_OF_ONE.get(kind, kind)}", sender, receiver)

    def _on_txn(self, process: Process, txn: Txn, when: str) -> None:
        puts = [(op.key, op.value) for op in txn.success if isinstance(op, Put)]
        kind = kind_of(self.invariants.view, puts) if puts else ""
        if kind:
            member = puts[0][0].rpartition("/")[2] if kind in ("admit", "evict") else ""
            if (when, kind) == ("sending", "evict"):
                self._evictions[puts[0][0]] = txn
            self.moment(f"{when} {kind}", process.name, member)

    def _wrote(self, revision: int, events: tuple[KeyEvent, ...]) -> None:
        if self._over:
            return
        puts = [(e.kv.key, e.kv.value) for e in events if e.kind == "put"]
        kind = kind_of(self.invariants.view, puts)
        made, self._next = self._next, None if kind == "submit" else self._next
        view, root = self.invariants.view, len(self.keys.root)
        if kind == "restart" and view.stamp is not None:
            terms = {task: known.record.term for task, known in view.primaries.items()}
            if self.runs.several_under_way(view.stamp, terms):
                self.transcript.state("restart in flight")
        for event in events:
            key = event.kv.key[root:]
            if key != "spec":
                self.transcript.add("etcd", f"[{revision}] {event.kind}", f"{key} {_brief(key, event.kv.value)}")
        try:
            self._check_leases(events)
            self._check_absence(events)
            if kind == "submit" and made is not None:
                before = self.invariants
                self._gone_before |= {node for node in self.nodes if self._gone(node)}
                self._take(made)
                self.invariants.submitted_after(before, revision, self.etcd.store.select(self.keys.root, prefix=True))
            else:
                self.invariants.wrote(revision, events)
            self._check_run(events)
            self.invariants.check_commit_calls()
            if self.invariants.view.checkpoint is not None:
                self._pointed_to.add(self.invariants.view.checkpoint.record.name)
        except Violation as error:
            self.violated(error)
        self.etcd.wake()
        if kind:
            self.transcript.state(f"wrote {kind}")
            self.etcd.later(0.0, self.moment, f"after {kind}", self._whose(puts))

    def _check_leases(self, events: tuple[KeyEvent, ...]) -> None:
        """A node must not count on its lease after its key expired, however frozen it is."""
        for event in events:
            node_id = event.kv.key.removeprefix(self.keys.nodes)
            known, registered = self.nodes.get(node_id), self.invariants.view.nodes.get(node_id)
            if event.kind == "delete" and known is not None and known.exists and registered is not None:
                if known.called_gone or self.etcd.store.holds(registered.record.lease):
                    continue  # somebody deleted it, or its lease
                counts_until = known.process.clock.when(known.coordinator.counts_on(registered.record.lease))
                late_s = counts_until - self.loop.at
                if late_s > 1e-6 + self.pace.clocks.drift * self.settings.lease_ttl_s:
                    raise Violation(f"{known.id} counts on its lease for {late_s:.3f} s after it expired")

    def _check_manifest(self, path: str, node_id: str) -> None:
        """The final manifest follows the pointer: a resumed job believes it."""
        *_, name, file = path.split("/")
        if file == "manifest.json" and name not in self._pointed_to:
            self.violated(Violation(f"{node_id} writes {path}, and the pointer never named that checkpoint"))

    def _check_removal(self, path: str, node_id: str) -> None:
        """Whatever a node may be behind with, two checkpoints stay: the newest, and one of the last commit, which may
        still become the newest."""
        view, names = self.invariants.view, {part: Name.parse(part) for part in path.split("/")}
        pointer = view.checkpoint.record.name if view.checkpoint is not None else ""
        if pointer in names:
            self.violated(Violation(f"{node_id} removes {path}, of the newest checkpoint"))
        for text, name in names.items():
            if name is None or name.run != self.spec.run[:8] or text in self._pointed_to:
                continue
            if self.invariants.is_of_last_commit(Stamp(name.attempt, name.epoch)):
                self.violated(Violation(f"{node_id} removes {path}, which may still become a checkpoint"))

    def _check_absence(self, events: tuple[KeyEvent, ...]) -> None:
        """A node that was declared gone without a launcher had no key for long enough."""
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
                least_s = self.settings.lost_after_s * (1.0 - self.pace.clocks.drift)
                if record.reason.startswith("its key was absent") and for_s < least_s:
                    raise Violation(f"{node_id} is gone since {record.reason}, and it was for {for_s:.3f} s")

    def _check_run(self, events: tuple[KeyEvent, ...]) -> None:
        """A node of an earlier run may only write events and its own key."""
        for event in events:
            key = event.kv.key
            if event.kind == "put" and not key.startswith((self.keys.events, self.keys.nodes)):
                known = self.nodes.get(self._whose([(key, event.kv.value)]))
                if known is not None and known.of != self.spec.run:
                    raise Violation(f"{known.id} is of a run before, and wrote {key}")

    def _whose(self, puts: list[tuple[str, bytes]]) -> str:
        """The node that wrote."""
        for _, value in puts:
            try:
                writer = json.loads(value).get("writer", "")
            except (ValueError, AttributeError):
                continue
            node = str(writer).rpartition(":")[0]
            if node in self.nodes:
                return node
        return ""


def _brief(key: str, value: bytes) -> str:
    """A record as text, without empty fields and fields that differ between processes."""
    if not value or key == "generation":
        return value.decode()
    raw = json.loads(value)
    if key.startswith("nodes/"):
        raw = {name: raw[name] for name in ("writer", "host", "lease", "draining")}
    return ", ".join(f"{name} {given}" for name, given in raw.items() if given not in ("", None, False))


def void(_: object) -> None:
    """Ignores a result."""


class Errors(logging.Handler):
    """An error in the framework's own log is a violation: nothing that may happen is logged as an error."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
        self._world.violated(Violation(f"logged as an error: {text}"))
