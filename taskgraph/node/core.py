"""The core that every part of a node uses: identity, etcd, peers, clock, and asyncio tasks that end with it.

The core knows no other part; `node.py` puts the parts together.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, NotRequired, TypedDict, TypeVar

from taskgraph.coordination.api import Coordinator
from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import TaskGraphError, Unavailable, message_text
from taskgraph.jobs import Job
from taskgraph.node.membership.failing import failure_record
from taskgraph.node.router import Router
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.node.usercode.threads import PooledThreads, Threads
from taskgraph.node.writes import EtcdWrites
from taskgraph.observe.events import EventLog
from taskgraph.observe.trace import Tracing
from taskgraph.protocol import transactions
from taskgraph.protocol.kv import Compare, Txn
from taskgraph.protocol.records import ENDED_ITSELF, GoneRecord, RunningCode, StatusRecord
from taskgraph.system.host import boot_id
from taskgraph.transport.api import Transport

__all__ = ["CoreArguments", "NodeCore", "Point", "ended_itself_text"]

T = TypeVar("T")
Point = Callable[[str, int, int], Awaitable[None]]
"""(stage, task, epoch) -> None: called at named moments of an epoch, at which tests kill nodes."""

_RETRY_S = 0.05
"""Pause before a failed call or transaction is repeated."""
_LEFT = "it left"
_WHY_CHARS = 2000


class CoreArguments(TypedDict):
    """Keyword arguments of `NodeCore`."""

    spec: JobSpec
    job: Job
    coordinator: Coordinator
    transport: Transport
    name: str
    node_id: str
    events: EventLog
    devices: NotRequired[int]
    host: NotRequired[str | None]
    threads: NotRequired[Threads | None]
    point: NotRequired[Point | None]
    own_process: NotRequired[bool]


class NodeCore:
    """One node of one job, as its parts see it.

    Attributes:
        paused: the node cannot prove its lease. Set by `Registration`.
        node_revision: revision of its key in etcd; 0: it is not registered. Set by `Registration`.
        draining: the node was asked to leave. Set by `Draining`.
        announce: writes `draining` to the node's key. Set by `Registration`.
        suspects: nodes suspected dead. Set by `Suspicion`.
        gone: nodes that are gone, as read from etcd. Set by `Suspicion`.
        injects: True if `point` has an effect: callers skip it otherwise, since it is called five times per epoch.
        injects_held: True if `point` also knows stages that `tg.testing` lacks, as in nodes with their own process.
    """

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
        devices: int = 0,
        host: str | None = None,
        threads: Threads | None = None,
        point: Point | None = None,
        own_process: bool = False,
    ) -> None:
        self.id = node_id
        self.name = name
        self.host = host or socket.gethostname()
        self.machine = boot_id() if host is None else ""
        self.spec = spec
        self.job = job
        self.settings = job.settings
        self.devices = devices
        self.own_process = own_process
        self.coordinator = coordinator
        self.transport = transport
        self.events = events
        self.tracing = Tracing()
        self.log = logging.getLogger("taskgraph.node")
        self.keeper = ViewKeeper(coordinator, spec.name, refresh_s=self.settings.refresh_s, one_run=True)
        self.router = Router(transport, self.keeper)
        self.writes = EtcdWrites(coordinator)
        self.threads = threads or PooledThreads(f"{name}-task", limit=max(64, 2 * job.all_tasks))
        self.injects = point is not None
        self.injects_held = self.injects and own_process
        self.paused = True
        self.node_revision = 0
        self.draining = False
        self.announce: Callable[[], Coroutine[Any, Any, None]]
        self.suspects: frozenset[str] = frozenset()
        self.gone: frozenset[str] = frozenset()
        self.started_at = 0.0
        self._point = point
        self._unpaused = asyncio.Event()
        self._write_numbers = itertools.count(1)
        self._group: asyncio.TaskGroup | None = None
        self._leaving = False
        self._owned: dict[asyncio.Task[None], None] = {}
        self._failure: asyncio.Future[None] | None = None
        self._first_error: BaseException | None = None  # the first error of its asyncio tasks
        self._why_left = _LEFT
        self._ran_code: tuple[RunningCode, ...] = ()

    # -- where it is ------------------------------------------------------------------------------

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def running(self) -> bool:
        """True while the node accepts work; a leaving node still answers for a moment."""
        return self._group is not None and not self._leaving and self._first_error is None

    @property
    def leaving(self) -> bool:
        """True while the node ends its work; nothing new may begin."""
        return self._leaving

    def emits_for_all(self) -> bool:
        """True if this node emits the events about changes that all nodes see: the living node with the least id."""
        return min(self.keeper.view.live_nodes(self.spec.run), default="") == self.id

    @property
    def epoch(self) -> int:
        """The epoch at work in the view; -1: none yet."""
        return self.keeper.view.stamp.epoch if self.keeper.view.stamp else -1

    def set_paused(self, paused: bool) -> None:
        """Pauses or resumes the node: it is paused while it cannot prove its lease."""
        self.paused = paused
        if paused:
            self._unpaused.clear()
        else:
            self._unpaused.set()

    async def wait_while_paused(self) -> None:
        """Waits until the node is not paused."""
        await self._unpaused.wait()

    async def short_pause(self) -> None:
        """Sleeps 50 ms, before a failed call is repeated."""
        await asyncio.sleep(_RETRY_S)

    async def point(self, stage: str, task: int, epoch: int) -> None:
        """Marks a moment of an epoch: calls the function that a test gave (`Point`), which may kill the node here."""
        if self._point is not None:
            await self._point(stage, task, epoch)

    @property
    def place_text(self) -> str:
        """The node's host and working directory, for errors that depend on them; "" if the node shares its process."""
        if not self.own_process:
            return ""
        try:
            directory = os.getcwd()
        except OSError:
            directory = "one that is removed"
        return f" (host {self.host}, working directory {directory})"

    # -- etcd -------------------------------------------------------------------------------------

    def new_writer(self) -> str:
        """Returns a unique name for one write, by which a later read recognizes the value as this write's."""
        return f"{self.id}:{next(self._write_numbers)}"

    async def retry_until_answered(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """Repeats a call until etcd answers, and returns the answer; None if the node is asked to leave first."""
        logged = False
        while not self.draining:
            try:
                return await call()
            except Unavailable as error:
                if not logged:
                    self.log.warning("waiting for etcd: %s", error)
                    logged = True
                await self.short_pause()
        return None

    async def transact(self, txn: Txn, *, key: str, writer: str) -> int | None:
        """Executes a transaction until its outcome is known; returns its revision, or None if its comparisons
        failed.
        """
        return await self.writes.transact(txn, key=key, writer=writer)

    # -- work that ends with the node -------------------------------------------------------------

    def own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Starts a coroutine as an asyncio task of this node, which cancels the task at its end."""
        if self._group is None:
            work.close()
            raise RuntimeError("the node is not running")
        task = self._child(self._group, work, name)
        self._owned[task] = None
        task.add_done_callback(lambda done: self._owned.pop(done, None))
        return task

    def run_to_end(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Starts a coroutine that runs to its end, also when the node ends; if the node has not begun, does not start
        it.
        """
        if self._group is None:
            work.close()
        else:
            self._child(self._group, work, name)

    def _child(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Starts a coroutine in the node's group, in which the first error ends the node."""
        task = group.create_task(work, name=name)
        task.add_done_callback(self._note_error)
        return task

    def _note_error(self, task: asyncio.Task[None]) -> None:
        if self._first_error is None and not task.cancelled():
            self._first_error = task.exception()

    # -- the end of the job, and of the node ------------------------------------------------------

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
        """Fails the job with an error. Returns False if a fence failed, or the job had ended already.

        Args:
            also: text to add to the error's.
            finished: True to fail even a job whose epochs are all committed (for a `result()` that raises).
        """
        writer = self.new_writer()
        status = failure_record(
            error, task, epoch, writer, also, node=f"{self.name}{self.place_text}" if self.place_text else ""
        )
        view = self.keeper.view
        if view.status is None or not (view.running or (finished and view.finished)):
            return False
        if view.finished:  # collected results stay valid, even if code raises later
            fences = (*fences, Compare(view.keys.collected, 0))
        if not await self.write_failure(transactions.fail(view, status, fences), status):
            await self.keeper.refresh()
            return False
        return True

    async def write_failure(self, txn: Txn, status: StatusRecord) -> bool:
        """Executes `txn`, which fails the job with `status`, and emits the event. Returns False if a comparison
        failed.
        """
        keeper = self.keeper
        try:
            revision = await self.transact(txn, key=keeper.view.keys.status, writer=status.writer)
            if revision is None:
                return False
        except asyncio.CancelledError:
            # The view may show the write before its answer comes, and then this node ends.
            found = keeper.view.status
            if found is not None and found.record.writer == status.writer:
                self._emit_failed(status)
            raise
        self._emit_failed(status)
        await keeper.wait_for_revision(revision)
        return True

    def _emit_failed(self, status: StatusRecord) -> None:
        self.events.emit("failed", status.reason, task=status.task, epoch=status.epoch)

    def end_with(self, error: TaskGraphError, ran: tuple[RunningCode, ...] = ()) -> None:
        """Begins to end this node with an error, since it cannot go on. Only the first call counts.

        Args:
            ran: the code that caused this, if it may end other nodes, too: then this end counts as a death.
        """
        if self._failure is not None and not self._failure.done():
            self._why_left, self._ran_code = ended_itself_text(error), ran
            self._failure.set_exception(error)
            self._failure.exception()  # so that asyncio does not log it if the node is ending for another reason

    def gone_record(self) -> GoneRecord:
        """Returns the record of this node's end for etcd."""
        return GoneRecord(reason=self._why_left, running_code=self._ran_code, writer=self.new_writer())


def ended_itself_text(error: BaseException) -> str:
    """Returns the reason, for etcd, why a node ended itself with an error."""
    return f"{ENDED_ITSELF}: {message_text(error)}"[:_WHY_CHARS]
