"""The node: what one process does for a job, from registering to leaving.

What it is to each task, and so what runs here, is in `roles.py`. Here is what holds that together: the parts of a node,
what they ask of each other, how its life begins, and when it is over.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from taskgraph.checkpoint.places import Place
from taskgraph.coordination.api import Coordinator
from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.device.visible import device_ids
from taskgraph.driver import JobSpec
from taskgraph.errors import (
    CoordinationError,
    FingerprintMismatch,
    JobError,
    TaskGraphError,
    Unavailable,
    said,
)
from taskgraph.jobs import Job
from taskgraph.node.membership.arithmetic import arithmetic
from taskgraph.node.membership.deviceloss import DeviceLoss
from taskgraph.node.membership.draining import Draining
from taskgraph.node.membership.failing import failure_record
from taskgraph.node.membership.fatal import FatalCode
from taskgraph.node.membership.noticing import Noticing
from taskgraph.node.membership.registration import Registration
from taskgraph.node.membership.suspicion import Suspicion
from taskgraph.node.membership.wishes import Wishes
from taskgraph.node.primary.checkpoints import FILES_AT_A_TIME, CheckpointReader
from taskgraph.node.primary.gathering import Gathering
from taskgraph.node.primary.takeovers import TakeOvers
from taskgraph.node.roles import Roles
from taskgraph.node.router import Router
from taskgraph.node.serving import Serving
from taskgraph.node.telling import node_status, task_results
from taskgraph.node.usercode import lastwords
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.node.usercode.forks import kept_from_children
from taskgraph.node.usercode.threads import PooledThreads, Threads
from taskgraph.node.writes import Writes
from taskgraph.observe.events import EventLog
from taskgraph.observe.status import NodeStatus, TaskResult
from taskgraph.observe.trace import Tracing
from taskgraph.protocol import transactions
from taskgraph.protocol.kv import Compare, Txn
from taskgraph.protocol.placement import Wish
from taskgraph.protocol.records import GoneRecord, NodeRecord, Ran, StatusRecord
from taskgraph.protocol.view import JobView
from taskgraph.transport.api import Transport

__all__ = ["Node", "Point"]

T = TypeVar("T")
Point = Callable[[str, int, int], Awaitable[None]]
"""(stage, task, epoch): called at named moments of an epoch; tests kill nodes there."""

_RETRY_S = 0.05
"""Pause before a failed call or transaction is tried again: long for a socket, short for a person."""

_LEFT = "it left"
_WHY_CHARS = 2000
_BESIDE = "asyncio tasks of its own"
_STOP_S = 0.5
"""A node that ends does not wait for running computes any longer."""
_STOP_TOLD = 10
"""After every so many of those it says what it still waits for."""


class Node:
    """One node of one job. `run` it once."""

    def __init__(
        self,
        *,
        spec: JobSpec,
        job: Job,
        coordinator: Coordinator,
        transport: Transport,
        name: str,
        node_id: str,
        events: EventLog,
        control: str = "",
        token_mark: str = "",
        devices: int = 0,
        host: str | None = None,
        threads: Threads | None = None,
        file_threads: Threads | None = None,
        place: Place | None = None,
        point: Point | None = None,
        own_process: bool = False,
        kept_on: bool = False,
    ) -> None:
        """Args:
        kept_on: results are kept for as long as it takes: whoever collects them has this node end with itself.
        """
        self.id = node_id
        self.name = name
        self.spec = spec
        self.job = job
        self.settings = job.settings
        self.coordinator = coordinator
        self.transport = transport
        self.events = events
        self.tracing = Tracing()
        self.log = logging.getLogger("taskgraph.node")
        self.keeper = ViewKeeper(coordinator, spec.name, refresh_s=self.settings.refresh_s)
        self.router = Router(transport, self.keeper)
        self.roles = Roles(self)
        # From the first read on: a node serves offers while it still registers, and what a roll-back undid has to go
        # before a boundary of after it is held.
        self._stop_following = self.keeper.on_change(self.roles.follow)
        self._control, self._token_mark, self.devices = control, token_mark, devices
        self.host = host or socket.gethostname()
        self.threads = threads or PooledThreads(f"{name}-task", limit=max(64, 2 * job.tasks))
        self._point = point
        self.injects = point is not None
        """Whether there is anything to call at `point`: an epoch comes by five of them."""
        self.injects_held = self.injects and own_process
        """Whether `held` is one of its stages: only for nodes that are processes of their own (`inject.STAGES`)."""
        self.takeovers = TakeOvers(self)
        # Threads of their own: a place that hangs must take none from user code.
        self._file_threads = file_threads or threads or PooledThreads(f"{name}-files", limit=FILES_AT_A_TIME)
        self.checkpoints = CheckpointReader(self, self._file_threads, place)
        self.noticing = Noticing(self)
        self.writes = Writes(coordinator)
        self.wishes = Wishes(self)
        self.device_loss = DeviceLoss(self, own_process)
        self.told_unheld: set[str] = set()
        """What was told of attributes that no snapshot holds (`Unheld`): of many tasks of a class it is the same."""
        self.own_process = own_process
        self._results_kept_s = None if kept_on else self.settings.results_kept_s
        self.fatal_code = FatalCode(self)
        self.gathering = Gathering(self)
        self._draining = Draining(self)
        self.serving = Serving(self)
        self.suspicion = Suspicion(self, self.roles.reconsider)
        self.router.on_gone = self._on_gone
        self.registration: Registration | None = None
        self.paused = True
        """Whether it cannot prove its lease just now, as `Registration` says; every message asks for it."""
        self._group: asyncio.TaskGroup | None = None
        self._leaving = False
        self._owned: dict[asyncio.Task[None], None] = {}
        self._failure: asyncio.Future[None] | None = None
        self._broken: BaseException | None = None  # what the first of its asyncio tasks raised that did
        self._why_left = _LEFT
        self._ran: tuple[Ran, ...] = ()
        self._writes = itertools.count(1)
        self._known_spec: bytes | None = None
        self.started_at = 0.0

    # -- small services for the other modules -----------------------------------------------------

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def writer(self) -> str:
        """A name for one write, never used again."""
        return f"{self.id}:{next(self._writes)}"

    @property
    def running(self) -> bool:
        """Whether it still takes on anything; a node that leaves answers for a moment longer."""
        return self._group is not None and not self._leaving

    @property
    def node_revision(self) -> int:
        return self.registration.node_revision if self.registration else 0

    @property
    def draining(self) -> bool:
        """Whether it was asked to leave."""
        return self._draining.asked

    def speaks(self) -> bool:
        """Whether this is the first of the nodes by name, which tells what all of them see."""
        return min(self.keeper.view.live_nodes(self.spec.run), default="") == self.id

    @property
    def gone(self) -> frozenset[str]:
        return self.suspicion.gone

    @property
    def suspects(self) -> frozenset[str]:
        return self.suspicion.suspects

    def wish(self, task: int) -> Wish | None:
        """Where placement wants the replicas of a task; None while nobody knows."""
        return self.wishes.of(task)

    async def while_paused(self) -> None:
        if self.registration is not None:
            await self.registration.while_paused()

    async def breathe(self) -> None:
        await asyncio.sleep(_RETRY_S)

    async def from_etcd(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """What a call to etcd returns, as soon as etcd answers; None where this node is asked to leave before."""
        told = False
        while not self.draining:
            try:
                return await call()
            except Unavailable as error:
                if not told:
                    self.log.warning("waiting for etcd: %s", error)
                    told = True
                await self.breathe()
        return None

    async def point(self, stage: str, task: int, epoch: int) -> None:
        if self._point is not None:
            await self._point(stage, task, epoch)

    def own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs something that lives as long as the node at most."""
        if self._group is None:
            work.close()
            raise RuntimeError("the node is not running")
        task = self._child(self._group, work, name)
        self._owned[task] = None
        task.add_done_callback(lambda done: self._owned.pop(done, None))
        return task

    def wait_for(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Runs something that is not cancelled when the node ends, but waited for."""
        if self._group is None:
            work.close()
        else:
            self._child(self._group, work, name)

    def _child(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = group.create_task(work, name=name)
        task.add_done_callback(self._note_error)
        return task

    def _note_error(self, task: asyncio.Task[None]) -> None:
        if self._broken is None and not task.cancelled():
            self._broken = task.exception()

    async def transact(self, txn: Txn, *, key: str, writer: str) -> int | None:
        """Executes a transaction until its outcome is known; see `Writes.transact`."""
        return await self.writes.transact(txn, key=key, writer=writer)

    async def fail_job(
        self,
        error: UserCodeError | TaskGraphError,
        task: int | None,
        epoch: int | None,
        fences: Iterable[Compare],
        *,
        finished: bool = False,
    ) -> bool:
        """Ends the job with an error. False where a fence broke, where it had ended already, and where this process
        ends instead, since its device cannot be used any more.

        Args:
            finished: also where its epochs are all committed (a `result()` that raises).
        """
        also: str | None = ""
        if task is not None:
            error, task, epoch = self.device_loss.behind(error, task, epoch)
            also = self.device_loss.why_fail(error, task, epoch or 0)
        return also is not None and await self.fail_with(error, task, epoch, fences, also, finished=finished)

    async def fail_with(
        self,
        error: UserCodeError | TaskGraphError,
        task: int | None,
        epoch: int | None,
        fences: Iterable[Compare],
        also: str,
        *,
        finished: bool = False,
    ) -> bool:
        """The same in any case; `also` is said besides."""
        writer = self.writer()
        status = failure_record(error, task, epoch, writer, also)
        view = self.keeper.view
        if view.status is None or not (view.running or (finished and view.finished)):
            return False
        if view.finished:  # once its results were collected they are there, whatever raises
            fences = (*fences, Compare(view.keys.collected, 0))
        if not await self.write_failed(transactions.fail(view, status, fences), status):
            await self.keeper.refresh()
            return False
        return True

    async def write_failed(self, txn: Txn, status: StatusRecord) -> bool:
        """Executes `txn`, which ends the job with `status`, and tells it. False where its comparisons failed."""
        keeper = self.keeper
        try:
            revision = await self.transact(txn, key=keeper.view.keys.status, writer=status.writer)
            if revision is None:
                return False
        except asyncio.CancelledError:
            # This node may read what it wrote before it hears that it did, and ends then.
            found = keeper.view.status
            if found is not None and found.record.writer == status.writer:
                self._tell_failed(status)
            raise
        self._tell_failed(status)
        await keeper.caught_up(revision)
        return True

    def _tell_failed(self, status: StatusRecord) -> None:
        self.events.emit("failed", status.reason, task=status.task, epoch=status.epoch)

    async def fail_early(self, error: UserCodeError | TaskGraphError, task: int, *, finished: bool = False) -> bool:
        """User code failed before there was a primary: this node's own key is the fence. Otherwise as `fail_job`."""
        view = self.keeper.view
        epoch = view.stamp.epoch if view.stamp and view.running else None  # of none: after the last
        fences = (Compare(view.keys.node(self.id), self.node_revision),)
        return await self.fail_job(error, task, epoch, fences, finished=finished)

    # -- life -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Takes part in the job until it ended, or until this node drained.

        Raises:
            TaskGraphError: the node cannot go on; the message says why.
        """
        self._failure = asyncio.get_running_loop().create_future()
        self.started_at = self.now()
        await self.transport.start(self.id, self.serving, self._on_lost)
        try:
            await self.from_etcd(self.keeper.load)
            if self.draining:
                return  # nobody knows of it yet
            self._check_spec()
            self.registration = Registration(self, self._record())
            await self.registration.register()
            if not self.registration.node_revision:
                return  # it drained before it might
            try:
                self.registration.check_reach()
                with kept_from_children():
                    await self._live()
            finally:
                await self.registration.leave()
        finally:
            self.threads.close()
            self._file_threads.close()
            await self.transport.close()

    async def _live(self) -> None:
        assert self.registration is not None
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                services = [
                    self._child(group, self.keeper.run(), "view"),
                    self._child(group, self.registration.run(), "lease"),
                    self._child(group, self.suspicion.watch_absent(), "absent nodes"),
                    self._child(group, self.suspicion.watch_leases(), "leases"),
                    self._child(group, self.noticing.watch(), "noticing"),
                    self._child(group, self.roles.run(), "reconcile"),
                ]
                if self.draining:
                    self._draining.announce()
                try:
                    await self._until_over()
                except asyncio.CancelledError:
                    if self._broken is not None:  # then it was the group that cancelled this
                        self._why_left = _ended_itself(self._broken)
                    elif self.own_process:
                        self._cut_off()
                    raise
                finally:
                    self._stop_following()
                    await self._stop_everything(services)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._group = None

    async def _stop_everything(self, services: list[asyncio.Task[None]]) -> None:
        self._leaving = True  # nobody would end what is begun from now on
        setups = [r.setting_up for r in self.roles.replicas.values() if r.setting_up is not None]
        tasks = [*services, *self._owned, *setups]
        pending, rounds = set(tasks), 0
        while pending:
            for task in pending:
                task.cancel()
            # They let a running compute return first; one that does not is left to the process's end.
            _, pending = await asyncio.wait(pending, timeout=_STOP_S)
            if pending:
                self.threads.abandon()
                rounds += 1
                if rounds % _STOP_TOLD == 0:
                    self.log.warning("still ending: %s", ", ".join(sorted(task.get_name() for task in pending)))
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.roles.end()

    def _record(self) -> NodeRecord:
        return NodeRecord(
            name=self.name,
            run=self.spec.run,
            host=self.host,
            pid=os.getpid(),
            endpoints=self.transport.endpoints,
            control=self._control,
            fingerprint=self.spec.fingerprint,
            lease=0,
            devices=self.devices,
            device_ids=device_ids(self.devices),
            token_mark=self._token_mark,
            arithmetic=arithmetic(),
        )

    def _check_spec(self) -> None:
        if self.keeper.view.spec is None:
            raise JobError(f"no job {self.spec.name!r} was submitted")
        submitted = JobSpec.from_bytes(self.keeper.view.spec)
        if submitted.fingerprint != self.spec.fingerprint:
            raise FingerprintMismatch(
                f"job {self.spec.name!r} was submitted with driver {submitted.fingerprint}, this node has "
                f"{self.spec.fingerprint}: start it with the same version of the driver"
            )
        if submitted.run != self.spec.run:
            raise JobError(f"job {self.spec.name!r} was submitted anew while this node started: start the node again")

    async def _until_over(self) -> None:
        """Returns when there is nothing left to do here; raises what makes going on impossible."""
        assert self._failure is not None
        over = asyncio.ensure_future(self._over())
        try:
            await asyncio.wait([over, self._failure], return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            await over
        finally:
            over.cancel()
            await asyncio.gather(over, return_exceptions=True)

    async def _over(self) -> None:
        view = self.keeper.view
        while True:
            await self._until_view(lambda v: not v.running or self._other_run())
            if self._draining.over or self._other_run() or not view.finished:
                return
            try:
                async with asyncio.timeout(self._results_kept_s):
                    await self._until_view(lambda v: v.collected or self._other_run() or not v.finished)
            except TimeoutError:
                if await self._gave_results_up():
                    return
                continue
            if not view.running:  # else what was lost with the results is computed again
                return

    async def _gave_results_up(self) -> bool:
        """Whether this node may leave a finished job whose results nobody wanted; False: look at the job again."""
        view, writer = self.keeper.view, self.writer()
        why = f"nobody collected them within {self.settings.results_kept_s:g} s (settings.results_kept_s)"
        txn = transactions.give_results_up(view, why, by=self.name, writer=writer)
        try:
            async with asyncio.timeout(self.settings.call_s):
                if await self.transact(txn, key=view.keys.collected, writer=writer) is None:
                    await self.keeper.refresh()
                    return False
        except (CoordinationError, TimeoutError) as error:  # while etcd is away nothing passes for lost either
            self.log.info("that nobody collected the results is not told: %s", str(error) or "no answer")
        self.log.warning("the results are given up: %s", why)
        return True

    async def _until_view(self, shows: Callable[[JobView], bool]) -> None:
        """Returns when the view `shows` it, by something else than `epoch`, or when this node has drained.

        Who still holds a boundary depends on the epoch; only a node that drains asks for that, at every commit.
        """
        await self.keeper.wait_until(lambda v: shows(v) or self._draining.asked, structure=True)
        await self.keeper.wait_until(lambda v: shows(v) or self._draining.over)

    def _other_run(self) -> bool:
        """Whether the job's name was given to another run, or deleted. A spec is decoded once."""
        spec = self.keeper.view.spec
        if spec is not None and spec is not self._known_spec and JobSpec.from_bytes(spec).run == self.spec.run:
            self._known_spec = spec
        return spec is None or spec is not self._known_spec

    def drain(self, why: str) -> None:
        """Asks the node to hand everything over and leave. Asking again changes nothing."""
        self._draining.begin(why)

    def _on_lost(self, node: str) -> None:
        if self.running:
            self.suspicion.lost(node)

    def _on_gone(self, node: str) -> None:
        if self.running:
            self.suspicion.uncallable(node)

    def end_with(self, error: TaskGraphError, ran: tuple[Ran, ...] = ()) -> None:
        """This node cannot go on.

        Args:
            ran: what it ends for, where that may end its successors, too: it counts as a death does.
        """
        if self._failure is not None and not self._failure.done():
            self._why_left, self._ran = _ended_itself(error) if ran else _LEFT, ran
            self._failure.set_exception(error)

    def farewell(self) -> GoneRecord:
        """What others read of this node's end."""
        return GoneRecord(reason=self._why_left, ran=self._ran, writer=self.writer())

    def _cut_off(self) -> None:
        """Somebody cancelled the node: in a process of its own, code of the user's, of which task is not known."""
        self._why_left = "was ended by user code (sys.exit in an asyncio task of its own, or a cancel of all)"
        begun = {task: primary.attempts.latest for task, primary in self.roles.primaries.items()}
        self._ran = tuple(Ran(_BESIDE, t, self.epoch if at is None else at.epoch) for t, at in begun.items())
        if lastwords.here is not None:  # it may come to tell nobody else
            for ran in self._ran:
                lastwords.here.began((ran.task, -1), ran.task, ran.epoch, lastwords.named(_BESIDE))
        self.log.error("this node %s", self._why_left)

    # -- what control and tests ask ---------------------------------------------------------------

    def status(self) -> NodeStatus:
        """What runs here, and what it waits for."""
        return node_status(self)

    @property
    def epoch(self) -> int:
        """The epoch at work as it was read; -1: none yet."""
        return self.keeper.view.stamp.epoch if self.keeper.view.stamp else -1

    @property
    def latest(self) -> int:
        """The latest epoch that a task here has begun, or the one at work; -1: none."""
        begun = (primary.attempts.latest for primary in self.roles.primaries.values())
        return max(self.epoch, *(stamp.epoch for stamp in begun if stamp is not None), -1)

    async def epoch_read(self, epoch: int) -> None:
        """Returns when the view has come to `epoch`, or the job does not run any more."""
        await self.keeper.wait_until(lambda v: not v.running or (v.stamp is not None and v.stamp.epoch >= epoch))

    async def results(self) -> list[TaskResult]:
        """After the last commit: what the primaries here return. Waits until they computed it."""
        return await task_results(self)


def _ended_itself(error: BaseException) -> str:
    return f"ended itself: {said(error)}"[:_WHY_CHARS]
