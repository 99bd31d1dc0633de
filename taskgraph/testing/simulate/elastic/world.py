"""Holds everything that one seed of an elastic job simulates: an etcd, a network, the job, and its nodes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import taskgraph as tg
from taskgraph.checkpoint.manifest import ExpectedJob
from taskgraph.checkpoint.store import CheckpointStore
from taskgraph.driver.spec import JobSpec
from taskgraph.elastic_jobs.node import ElasticNode
from taskgraph.errors import CheckpointError, TaskGraphError, Unavailable
from taskgraph.graph.values import decode
from taskgraph.launch.collect import assemble, is_complete
from taskgraph.launch.resuming import begin, plan
from taskgraph.launch.submit import submit
from taskgraph.observe.events import Event, EventLog
from taskgraph.observe.status import TaskResult
from taskgraph.protocol import transactions
from taskgraph.protocol.elastic.worker import Phase
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import KeyEvent, Put, Txn
from taskgraph.protocol.records import EpochRecord, GoneRecord, JobStatus, StatusRecord
from taskgraph.protocol.view import JobView
from taskgraph.testing.simulate.client import SimCoordinator
from taskgraph.testing.simulate.disk import FileThreads, NodeDisk, SimDisk, launcher_uses
from taskgraph.testing.simulate.elastic.checks import Checks
from taskgraph.testing.simulate.elastic.threads import SteppedThreads
from taskgraph.testing.simulate.elastic.workload import PLACE, Workload
from taskgraph.testing.simulate.etcd import SimEtcd, SimStore
from taskgraph.testing.simulate.executions import Violation
from taskgraph.testing.simulate.loop import Process, SimLoop
from taskgraph.testing.simulate.network import SimNetwork, SimTransport
from taskgraph.testing.simulate.pace import Pace
from taskgraph.testing.simulate.transcript import Transcript
from taskgraph.testing.simulate.world import MomentHook

__all__ = ["ElasticProcess", "ElasticWorld"]

R = TypeVar("R")


@dataclasses.dataclass(eq=False)
class ElasticProcess:
    """One node's process, from its start to its end."""

    id: str
    name: str
    process: Process
    threads: Process
    coordinator: SimCoordinator
    disk: NodeDisk
    node: ElasticNode
    run: asyncio.Task[None]
    dead: bool = False  # a fault killed it
    draining: bool = False
    declared_gone: bool = False  # a launcher declared it gone although it lives

    @property
    def exists(self) -> bool:
        """True until the process is killed or ends by itself."""
        return not self.dead and not self.run.done()


class ElasticWorld:
    """One simulation: its etcd, network, nodes and checks.

    Args:
        rng: draws delays. Faults are injected by the caller.
        pace: delays that are not failures.
        disk_rng: draws delays and faults of the disk.

    Attributes:
        view: of etcd, after its last write.
        moment: called at every named moment, with the nodes that it concerns.
        failed: has the first violation as its error.
    """

    def __init__(
        self, workload: Workload, settings: tg.Settings, rng: random.Random, pace: Pace, disk_rng: random.Random
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self.loop, self.workload, self.settings, self.pace = loop, workload, settings, pace
        self.transcript = Transcript(lambda: loop.at)
        self.nodes: dict[str, ElasticProcess] = {}
        self.view = JobView("job")
        self.keys = Keys("job")
        self.checks = Checks(workload, self.view, living=self._living, fail=self.fail)
        self.job = workload.job(self.checks, settings)
        self.spec = dataclasses.replace(JobSpec.local(self.job), run="run")
        self.moment: MomentHook = lambda name, node, peer="": None
        self.failed: asyncio.Future[None] = loop.create_future()
        self._disk_rng = disk_rng
        self.disk = SimDisk(
            random.Random(disk_rng.getrandbits(64)),
            lambda name, node: self.moment(name, node),
            on_write=lambda path, node: None,
            on_remove=lambda path, node: None,
        )
        self.whole_at_failure: list[str] = []  # workers of the view that could have gone on when the job failed
        speed = rng.choice((0.0003, 0.001, 0.001, 0.005))
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
            on_call=lambda sender, to, message: self.moment(f"sending {type(message).__name__}", sender, to),
            call_faults=pace.call_faults,
            slow_actors=pace.slow_actors,
            links=pace.slow_link,
        )
        self.launcher = SimCoordinator(
            self.etcd, Process("launcher"), Process("launcher"), on_txn=self._on_txn, timeout_s=3.0
        )
        self._incarnations: dict[str, int] = {}
        self._over = False

    # -- life -------------------------------------------------------------------------------------

    async def start(self, nodes: int) -> None:
        self.spec = dataclasses.replace(self.spec, expected_nodes=nodes)
        await submit(self.launcher, self.spec)
        for _ in range(nodes):
            self.add()

    async def start_again(self, nodes: int) -> None:
        """Kills all nodes, ends the job, and runs it again from its newest checkpoint, on another number of nodes."""
        for known in self.existing():
            self.kill(known, host=False)
        ended = StatusRecord(state=JobStatus.FAILED, reason="shut down")
        self.etcd.store.execute(Txn(success=(Put(self.keys.status, ended.to_bytes()),)))
        spec = dataclasses.replace(self.spec, run="again", expected_nodes=nodes)
        with launcher_uses(self.disk, random.Random(self._disk_rng.getrandbits(64)), self.pace.timing):
            self.spec, beginning = await self._retry(partial(plan, self.launcher, spec, resume=True))
        await self._retry(partial(begin, self.launcher, self.spec, beginning))
        position = beginning.epoch.epoch
        self.transcript.add("launcher", "resume", f"{nodes} nodes go on after {position} totals")
        self.checks.note_return(position)
        for _ in range(nodes):
            self.add()

    async def _retry(self, call: Callable[[], Awaitable[R]]) -> R:
        """Calls a function of the launcher until etcd is available. Returns its result."""
        while True:
            try:
                return await call()
            except Unavailable:
                await asyncio.sleep(0.1)

    def add(self, name: str = "") -> ElasticProcess:
        """Starts a node: a new one, or a new process of an existing name."""
        name = name or f"n{len(self._incarnations) + 1}"
        self._incarnations[name] = self._incarnations.get(name, 0) + 1
        node_id = f"{name}-{self._incarnations[name]}"
        self.workload.slow[node_id] = self._rng.choice((1.0, 1.0, 1.0, 0.1, 10.0))
        process, threads = Process(node_id, self._step_timer(node_id)), Process(node_id)
        host = f"h{self._rng.randrange(1, 4)}"
        process.clock = threads.clock = self.pace.host_clocks.clock_of(host)
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

        def make() -> ElasticNode:
            return ElasticNode(
                spec=self.spec,
                job=self.job,
                coordinator=coordinator,
                transport=SimTransport(self.network, process),
                name=name,
                node_id=node_id,
                events=events,
                host=host,
                devices=0,
                threads=SteppedThreads(process, self.loop),
                file_threads=FileThreads(
                    random.Random(self._disk_rng.getrandbits(64)), disk, self.pace.timing, lambda: 0.0
                ),
                place=disk,
            )

        node = process.new_context().run(make)  # in its context, since it reads its clock
        self.checks.watch(node)
        run = self.loop.create_task(self._run_node(node), name=f"node {name}", context=process.new_context())
        known = self.nodes[node_id] = ElasticProcess(node_id, name, process, threads, coordinator, disk, node, run)
        return known

    def _step_timer(self, node_id: str) -> Callable[[], float] | None:
        """Returns the function that draws how long a step of the node's loop takes; None if steps take no time."""
        steps = self.pace.step_times
        if not steps.active:
            return None
        return lambda: steps.step_s() + self.pace.slow_actors.late_s(f"steps of {node_id}") / 10

    async def _run_node(self, node: ElasticNode) -> None:
        """Runs a node until it ends. Ending by an error while it is a worker of the view is a violation."""
        known = None
        try:
            await asyncio.sleep(self._rng.uniform(0.0, 0.05))
            known = self.nodes[node.id]
            await node.run()
        except TaskGraphError as error:
            assert known is not None
            if known.dead:
                return
            self.transcript.add(node.id, "ended", str(error))
            self.transcript.count_state("a node ended itself")
            if self._is_worker(node):
                self.fail(Violation(f"{node.id} ended, and is in the view: {error}"))
            self.declare_gone(node.id, "it ended")
        except Exception as error:  # a bug, also in a process that is being killed
            self.fail(Violation(f"{node.id} broke down: {error!r}"))
        finally:
            await self.nodes[node.id].coordinator.close()

    def kill(self, known: ElasticProcess, *, host: bool) -> None:
        """Kills a node like `kill -9`; with `host`, like a host that loses power."""
        known.dead = True
        known.coordinator.crash()
        self.network.crash(known.id, host=host)
        known.run.cancel()
        known.process.thaw(self.loop)
        known.threads.thaw(self.loop)

    def fail(self, error: Exception) -> None:
        """Fails the simulation with the violation of an invariant."""
        if not self.failed.done() and not self._over:
            self.transcript.add("check", "VIOLATION", str(error))
            self.failed.set_exception(error)

    def declare_gone(self, node_id: str, why: str) -> None:
        """Declares a node gone, as a launcher does."""

        def declare() -> None:
            record = GoneRecord(reason=why, writer="launcher")
            self.etcd.store.execute(transactions.declare_gone(self.view, node_id, record))

        self.etcd.arrive(declare)

    # -- the end ----------------------------------------------------------------------------------

    async def final_status(self) -> StatusRecord | None:
        """Waits until the job has ended, and returns its status; None if all its processes have ended."""
        while self.existing():
            known = self.view.status
            if known is not None and known.record.state != JobStatus.RUNNING:
                return known.record
            await asyncio.sleep(0.02)
        return None

    async def result(self) -> tg.JobResult | None:
        """Waits for the result. Returns None if all processes that could give it have ended."""
        while self.existing():
            found: list[TaskResult] = []
            for known in self.existing():
                try:
                    async with asyncio.timeout(0.2):  # one that starts or is frozen does not answer
                        found += await known.node.results()
                except TimeoutError:
                    continue
            if is_complete(found, 1):
                return assemble(self.spec.name, found, (), 0.0)
            await asyncio.sleep(0.02)
        return None

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
        for known in self.nodes.values():
            known.node.threads.close()
        await self.launcher.close()

    # -- what happens -----------------------------------------------------------------------------

    def existing(self) -> list[ElasticProcess]:
        """Returns the nodes whose process exists, in the order of their start."""
        return [known for known in self.nodes.values() if known.exists]

    def _living(self) -> list[ElasticNode]:
        return [known.node for known in self.existing()]

    @property
    def workers(self) -> list[str]:
        """The workers of the newest view, by seniority."""
        return [] if self.view.workers is None else [worker for worker, _ in self.view.workers.record.workers]

    def _is_worker(self, node: ElasticNode) -> bool:
        """True if the newest view has the node, the node is not gone, and it regards itself as a worker."""
        there = node.id in self.workers and node.id not in self.view.gone
        return there and node.engine.core.phase != Phase.OUTSIDE

    def whole_workers(self) -> list[ElasticProcess]:
        """Returns the existing workers of the newest view that hold all its totals; without a view, all nodes."""
        if self.view.workers is None:
            return self.existing()
        return [known for known in self.existing() if self._is_worker(known.node) and known.node.engine.core.whole]

    def _on_event(self, node_id: str, event: Event) -> None:
        self.transcript.add(node_id, event.kind, event.text)
        self.transcript.count_state(event.kind)

    def _on_message(self, sender: str, receiver: str, message: object) -> None:
        kind = type(message).__name__
        self.transcript.add("net", kind, f"{sender} > {receiver}")
        self.checks.compare_totals()
        self.moment(f"message {kind}", receiver, sender)
        self.moment(f"answer {kind}", sender, receiver)

    def _on_txn(self, process: Process, txn: Txn, when: str) -> None:
        if kind := self._kind_of([op.key for op in txn.success if isinstance(op, Put)]):
            self.moment(f"{when} {kind}", process.name)

    def _kind_of(self, keys: list[str]) -> str:
        """Returns the kind of a write, by the keys that it puts; "" for other keys."""
        for key, kind in (
            (self.keys.spec, "submit"),
            (self.keys.workers, "view"),
            (self.keys.checkpoint, "checkpoint"),
            (self.keys.status, "end"),
        ):
            if key in keys:
                return kind
        for key in keys:
            if key.startswith(self.keys.nodes):
                return "register"
            if key.startswith(self.keys.gone_nodes):
                return "gone"
        return ""

    def _on_write(self, revision: int, events: tuple[KeyEvent, ...]) -> None:
        """Logs and checks a write to etcd, within the write."""
        if self._over:
            return
        root = len(self.keys.root)
        for event in events:
            if event.kv.key != self.keys.spec:
                text = f"{event.kv.key[root:]} {_format_record(event.kv.key[root:], event.kv.value)}"
                self.transcript.add("etcd", f"[{revision}] {event.kind}", text)
        self.view.apply(revision, events)
        kind = self._kind_of([event.kv.key for event in events if event.kind == "put"])
        if kind == "end":
            self._check_end(events)
        elif kind == "view":
            self._note_return()
        elif kind == "checkpoint":
            self._check_checkpoint()
        self.checks.compare_totals()
        self.etcd.wake()
        if kind:
            self.transcript.count_state(f"wrote {kind}")
            self.etcd.later(0.0, self.moment, f"after {kind}", _writer_of(events))

    def _note_return(self) -> None:
        """Informs the checks if the newest view begins a lineage: it may undo totals that were given out."""
        assert self.view.workers is not None
        record = self.view.workers.record
        if record.lineage and record.lineage == record.number:
            node = self.nodes[record.workers[0][0]].node
            saved = self.view.checkpoint.record.epoch if self.view.checkpoint is not None else 0
            self.checks.note_return(node.engine.core.position if node.call.begun else saved)

    def _check_checkpoint(self) -> None:
        """Checks that the checkpoint which the pointer names has the state after totals that were given out (E3)."""
        assert self.view.checkpoint is not None
        record = self.view.checkpoint.record
        expected = ExpectedJob(job=self.spec.name, fingerprint=self.spec.fingerprint, tasks=self.spec.tasks)
        store = CheckpointStore(PLACE, expected, place=self.disk.for_node("the checks"))
        try:
            value = store.read(store.open(record.name), 0)
            assert value is not None
            read: Any = decode(value)
            self.checks.check_checkpoint(record.epoch, read["position"], read["state"]["state"]["weights"])
        except (CheckpointError, Violation) as error:
            self.fail(Violation(f"E3: the checkpoint {record.name}: {error}"))

    def _check_end(self, events: tuple[KeyEvent, ...]) -> None:
        """Checks the write that ends the job. If the job failed, notes the workers that could have gone on."""
        status = self.view.status
        if status is not None and status.record.state == JobStatus.FAILED:
            self.whole_at_failure = [known.id for known in self.whole_workers()]
        for event in events:
            if event.kv.key == self.keys.epoch and status is not None and status.record.state == JobStatus.FINISHED:
                try:
                    self.checks.check_finished(EpochRecord.from_bytes(event.kv.value).epoch)
                except Violation as error:
                    self.fail(error)


def _writer_of(events: tuple[KeyEvent, ...]) -> str:
    """Returns the node that wrote these keys; "" if it is unknown."""
    for event in events:
        if event.kind == "put":
            try:
                return str(json.loads(event.kv.value).get("writer", "")).rpartition(":")[0]
            except (ValueError, AttributeError):
                continue
    return ""


def _format_record(key: str, value: bytes) -> str:
    """Formats a record, without empty fields and fields that differ between processes."""
    if not value or key in ("generation", "collected"):
        return value.decode()
    raw = json.loads(value)
    if key.startswith("nodes/"):
        raw = {name: raw[name] for name in ("writer", "host", "lease", "draining")}
    return ", ".join(f"{name} {given}" for name, given in raw.items() if given not in ("", None, False))
