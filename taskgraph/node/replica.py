"""One task on this node: the user's object, its set-up, and its boundaries.

build ──► set up ──► backup: stores boundaries as bytes, does not touch the user's object
               └───► primary: restores the object from a boundary; sync points change it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from taskgraph.errors import DecodeError, JobError
from taskgraph.graph.blocks import block_behind
from taskgraph.graph.compose import Graph
from taskgraph.graph.values import copy_to_host, decode, encode, verify
from taskgraph.jobs import Job
from taskgraph.node.reports import PlainRows, ReportLog, Rows, add_reports, reports_in
from taskgraph.node.snapshots import Snapshot, decode_boundary, encode_snapshot, shared_in
from taskgraph.node.usercode.actor import Actor, RunningCall
from taskgraph.node.usercode.errors import StuckError, UserCodeError, cuda_error
from taskgraph.node.usercode.threads import Threads
from taskgraph.observe.queues import Rate
from taskgraph.observe.trace import Tracing
from taskgraph.protocol.boundaries import Boundaries, Boundary
from taskgraph.protocol.messages import Encoded
from taskgraph.protocol.numbers import compact
from taskgraph.protocol.records import EpochRecord
from taskgraph.queues.pieces import KeptResults
from taskgraph.queues.plan import processor_of
from taskgraph.shape import FRAMEWORK_ATTRIBUTES, TaskShape, check_attributes
from taskgraph.task import Task, shape_of
from taskgraph.topology import Topology, as_topology

if TYPE_CHECKING:
    from taskgraph.device.api import Device
    from taskgraph.node.router import Router
    from taskgraph.task import Event

__all__ = ["COPIES", "Replica", "is_intact"]

R = TypeVar("R")

_LOGGERS: Final = "taskgraph.task."
"""Prefix of the tasks' loggers."""
COPIES: Final = "snapshot to the host"
"""The name, in errors, of the call that copies a snapshot to the host. It runs no user code, but may meet the device
error of a compute."""
_SPOILER_S: Final = 0.2
"""Pause before a device error in such a copy is reported, so that the compute that caused it fails first
(`DeviceLoss`)."""


def _check_reserved(task: Task, **numbers: int) -> None:
    """Raises JobError if `__init__` set an attribute that the framework sets, other than to None."""
    own = vars(task)
    for name in FRAMEWORK_ATTRIBUTES:
        value, number = own.get(name), numbers.get(name)
        if value is None:
            continue
        if number is not None:
            fits = isinstance(value, int | np.integer) and int(value) == number
        else:
            fits = isinstance(value, {"log": logging.Logger, "xp": ModuleType}.get(name, bool))
        if not fits:
            raise _reserved_error(task, "__init__", name)


def _reserved_error(task: Task, where: str, name: str) -> JobError:
    return JobError(
        f"{type(task).__name__}: {where} set self.{name}, to a value of type {type(vars(task)[name]).__name__}; that "
        f"is set by the framework, as are {', '.join(other for other in FRAMEWORK_ATTRIBUTES if other != name)}: give "
        f"yours another name"
    )


class Replica:
    """A task's replica on this node, with what the attempts of its task need: `router`, `job`, `topology`, ..."""

    def __init__(
        self,
        task: int,
        job: Job,
        router: Router,
        threads: Threads,
        *,
        xp: ModuleType,
        device: Device | None,
        tracing: Tracing | None = None,
    ) -> None:
        self.task = task
        self.job = job
        self.router = router
        self.topology: Topology = as_topology(job.topology)
        self.device = device
        self.threads = threads
        self.tracing = tracing or Tracing()
        self.actor = Actor(threads, task=task, cancel_s=job.settings.cancel_s, tracing=self.tracing, device=device)
        self.boundaries = Boundaries()
        self.log = ReportLog()
        self.previous: Mapping[str, float] = {}  # the numbers that the task reported in the previous epoch
        self.graph: Graph | None = None
        """The last composed graph, if the next epoch may compose the same."""
        self.constant_graph: Graph | None = None
        """The graph of every epoch until the next restart, once known: see `Attempt._compose`."""
        self.graph_may_be_constant = False
        """True if `constant_graph` may become known before the next restart."""
        self.kept_results = KeptResults()
        self.queue_rates: dict[str, Rate] = {}
        self.late_calls: set[asyncio.Task[None]] = set()
        """Calls for pieces that outlast their epochs."""
        self._xp = xp
        self.user_task: Task
        """The user's object, and its shape, after `build`."""
        self.shape: TaskShape
        self._built = False
        self._building = asyncio.Lock()
        self._set_up: asyncio.Task[None] | None = None
        self.ready = False
        self._is_twin = False
        self.keeps_shared = True
        """False once it is known that another task keeps the shared state."""
        self._promise = (0, 0)
        self._lineage = 0

    @property
    def late_names(self) -> frozenset[str]:
        """The names (`RunningCall.where`) of calls for pieces that an epoch went on without, and that still run."""
        return frozenset(call.get_name() for call in self.late_calls)

    @property
    def running(self) -> list[RunningCall]:
        """User code that runs; of a map the call that computes, and not its processor, which waits for that call."""
        running = self.actor.running
        wait = {processor_of(call.where) for call in running}
        return [call for call in running if call.where not in wait]

    def follow(self, record: EpochRecord) -> None:
        """Brings boundaries and reports in line with a new `epoch` record.

        A roll-back drops the boundaries of earlier attempts, and reports from its epoch on. A commit frees the
        boundaries before it, and keeps their reports.
        """
        if record.lineage > self._lineage:
            self._lineage = record.lineage
            self.boundaries.roll_back(record.lineage)
            self.log.cut(record.base)
        committed = self.boundaries.committed
        if committed is None or committed.stamp.epoch < record.epoch:
            self.set_committed_epoch(record.epoch)

    def promise(self, term: int, invitation: int) -> None:
        """Notes that this replica acknowledged to the primary of `term`: it stays until that primary releases it."""
        self._promise = max(self._promise, (term, invitation))

    def release(self, term: int, invitation: int) -> None:
        """Notes that the primary of `term` no longer needs what this replica acknowledged up to `invitation`."""
        if self._promise <= (term, invitation):
            self._promise = (0, 0)

    def is_unneeded(self, term: int) -> bool:
        """True if no primary of this or a later `term` was promised this replica's boundaries."""
        return self._promise[0] < term

    def twin(self) -> Replica:
        """Makes a replica of the same task with a user object of its own, on which strict mode replays."""
        twin = Replica(self.task, self.job, self.router, self.threads, xp=self._xp, device=self.device)
        twin._is_twin = True
        return twin

    async def build(self) -> None:
        """Calls the task builder, once."""
        async with self._building:
            if not self._built:
                context = self.actor.contexts.new_context()
                task = await self.actor.call("task builder", self._build, context=context)
                self.actor.contexts.set_task_context(context)
                self.shape, self.user_task = shape_of(type(task)), task
                self._built = True

    def _build(self) -> Task:
        """Calls the task builder, checks the object that it returns, and sets the framework's attributes."""
        task = self.job.build(self.task)
        if not isinstance(task, Task):
            raise JobError(
                f"the task builder returned {type(task).__name__} for task {self.task}; it must return a tg.Task"
            )
        if getattr(vars(task).get("log"), "name", "").startswith(_LOGGERS):  # two replicas must not share an object
            raise JobError(
                f"the task builder returned an object for task {self.task} that it had returned before: make one each "
                f"time it is called, as in builder=lambda task_id: {type(task).__name__}(...)"
            )
        _check_reserved(task, task_id=self.task, tasks=self.job.tasks)
        check_attributes(task, shape_of(type(task)))
        task.task_id = self.task
        task.tasks = self.job.tasks
        task.log = logging.getLogger(f"{_LOGGERS}{self.task}")
        task.primary = False
        task.xp = self._xp
        return task

    @property
    def setting_up(self) -> asyncio.Task[None] | None:
        """The asyncio task of the set-up while it runs; None otherwise."""
        return None if self._set_up is None or self._set_up.done() else self._set_up

    @property
    def set_up_began(self) -> bool:
        """True once `set_up` was called."""
        return self._set_up is not None

    async def set_up(self) -> None:
        """Builds the user's object and runs `setup()`, once: all callers wait for that run, and get its error."""
        if self._set_up is None:
            self._set_up = asyncio.create_task(self._run_setup())
        await asyncio.shield(self._set_up)

    async def _run_setup(self) -> None:
        """Builds the user's object and calls `setup()`; then the replica is ready."""
        await self.build()
        if "setup" in self.shape.overrides:
            context = self.actor.contexts.new_context()
            await self.actor.call("setup", self.user_task.setup, after=self._check_attributes, context=context)
            self.actor.contexts.set_task_context(context)
        self.ready = True

    def _check_attributes(self) -> None:
        """Raises JobError if `setup()` set an attribute that the framework sets, or one that hides a hook."""
        check_attributes(self.user_task, self.shape)
        if not isinstance(self.user_task.primary, bool):
            raise _reserved_error(self.user_task, "setup", "primary")

    @property
    def stateful(self) -> bool:
        return self.shape.stateful

    @property
    def holds_state(self) -> bool:
        """True if a boundary of the task has state, which is not so if all of it is kept by another task."""
        return self.shape.own or (bool(self.shape.shared) and self.keeps_shared)

    async def snapshot(self, numbers: dict[str, float], rows: dict[int, PlainRows], *, stays: bool = False) -> Snapshot:
        """Encodes the task's state as a boundary, with the reports that travel in it.

        Args:
            stays: copies device memory on the device only; `copy_to_host` then completes the boundary.
        """
        task, shape = self.user_task, self.shape

        def encode_state() -> Snapshot:
            check_attributes(task, shape)  # also after the last epoch, whose state gives the result
            return encode_snapshot(
                task.snapshot() if shape.stateful else None,
                numbers,
                rows,
                task=self.task,
                shared=shape.shared,
                keeps=self.keeps_shared,
                allocate=self.router.allocate,
                on_device=self.device is not None,
                stays=stays and self.device is not None,
            )

        if _is_small_snapshot(task, shape):
            return await self.actor.call_framework_on_loop("snapshot", encode_state)
        return await self.actor.call("snapshot", encode_state)

    async def copy_to_host(self, snapshot: Snapshot) -> Snapshot:
        """Copies a snapshot that stayed on the device to the host, while the task computes on."""

        def copy() -> Snapshot:
            parts = [
                None if part is None else copy_to_host(part, allocate=self.router.allocate)
                for part in (snapshot.value, snapshot.shared)
            ]
            assert parts[0] is not None
            return Snapshot(parts[0], parts[1], snapshot.digest)

        try:
            return await self.actor.call(COPIES, copy, alone=False)
        except UserCodeError as error:
            if cuda_error(error) is not None:
                await asyncio.sleep(_SPOILER_S)
            raise

    async def restore(self, boundary: Boundary) -> None:
        """Restores the user's object from a boundary, which it decodes anew."""
        task = self.user_task

        def put() -> Mapping[str, float]:
            if not all(is_intact(part) for part in (boundary.value, boundary.shared) if part is not None):
                raise DecodeError(
                    f"the boundary of task {self.task} lies in memory shared with other processes of this host, and "
                    "differs from its snapshot: native code wrote where it should not"
                )
            raw = decode_boundary(boundary, writable=True, device=self.device)
            if self.stateful:
                task.restore(raw["state"])
            return compact(raw["numbers"])

        self.previous = await self.actor.call("restore", put)

    def set_committed_epoch(self, epoch: int) -> None:
        """Makes boundary `epoch` the committed one: frees earlier boundaries, and keeps the reports in them."""
        passed = self.boundaries.committing_at(epoch) if self.task == 0 else ()
        if self.boundaries.note_committed(epoch) is not None:
            for boundary in passed:
                self.log.fold(boundary.log if boundary.log is not None else reports_in(boundary.value))

    async def read_reports(self, value: Encoded) -> dict[int, Rows] | ReportLog:
        """Reads the reports in a boundary of task 0, for `log.fold`, a large one in a thread; {} for other tasks."""
        if self.task != 0:
            return {}
        return await self.in_thread_if_large(partial(reports_in, value), value.size_bytes)

    async def with_all_reports(self, value: Encoded) -> Encoded:
        """Returns the boundary with all reports added, for a replica without any; a large one is made in a thread."""
        log = self.log.packed() if self.task == 0 else []
        if not log:
            return value
        return await self.in_thread_if_large(partial(add_reports, value, log), value.size_bytes + sum(map(len, log)))

    async def in_thread_if_large(self, function: Callable[[], R], size_bytes: int) -> R:
        """Runs a function of the framework whose time grows with `size_bytes`; in a thread if that is large."""
        return function() if size_bytes <= _SMALL_BYTES else await self.threads.run(function)

    def bind_all_reports(self, value: Encoded) -> Callable[[], Encoded]:
        """Returns a function, to be called in any thread, that adds all reports as of now to a boundary."""
        log = self.log.packed() if self.task == 0 else []
        return partial(add_reports, value, log) if log else lambda: value

    async def with_reports(self, value: Encoded, rows: dict[int, PlainRows]) -> Encoded:
        """Returns the boundary with these reports in place of those that it has; a large one is made in a thread."""
        add = partial(add_reports, value, rows)
        return add() if value.size_bytes <= _SMALL_BYTES else await self.actor.call("reports", add, alone=False)

    async def on_commit(self, number: int, boundary: Boundary) -> None:
        """Calls the task's `on_commit` for epoch `number`, with this boundary's state."""
        if "on_commit" not in self.shape.overrides:
            return
        state = await self.state_in(boundary)
        try:
            await self.actor.call("on_commit", self.user_task.on_commit, number, state)
        except UserCodeError as error:
            error.epoch = number
            raise

    async def decode_value(self, value: Encoded) -> Any:
        """Decodes the value of a message for the task's code; in a thread if the node has a device."""
        read = partial(decode, value, device=self.device)
        if self.device is None:
            return read()
        return await self.actor.call("arrival", read, alone=False)

    async def state_in(self, boundary: Boundary) -> Any:
        """Decodes the state in a boundary, with the shared state, for the task's code, which may write to it."""
        read = partial(decode_boundary, boundary, writable=True, device=self.device)
        size = boundary.value.size_bytes + (boundary.shared.size_bytes if boundary.shared is not None else 0)
        if self.device is None and size <= _SMALL_BYTES:
            return read()["state"]
        return (await self.actor.call("arrival", read, alone=False))["state"]

    async def shared_in(self, boundary: Boundary) -> Encoded:
        """Returns the shared state of a boundary, encoded, for another task that shares it."""
        read = partial(shared_in, boundary, self.shape.shared, self.device)
        if self.device is None:
            return await self.in_thread_if_large(read, boundary.value.size_bytes)
        return await self.actor.call("shared state", read, alone=False)

    async def notify(self, event: Event) -> None:
        """Calls the task's `on_event` with an event, if the task has one."""
        if "on_event" in self.shape.overrides:
            await self.actor.call("on_event", self.user_task.on_event, event)

    async def result(self) -> Encoded | None:
        """Calls `result()` and returns its value encoded; None if it returned None."""
        task, what = self.user_task, f"result of task {self.task}"

        def encode_result() -> Encoded | None:
            value = task.result()
            return None if value is None else encode(value, what=what)

        return await self.actor.call("result", encode_result)

    async def tear_down(self) -> None:
        """Runs `teardown()` of a replica that was set up. No set-up may be running.

        Raises:
            UserCodeError: `teardown()` raised; or, of a twin, did not return within `cancel_s`: the node goes on.
            StuckError: `teardown()` did not return within `cancel_s`.
        """
        try:
            if self.ready and "teardown" in self.shape.overrides and not self.actor.abandoned:
                await self.actor.last_call("teardown", self.user_task.teardown)
        except StuckError as stuck:
            if self._is_twin:
                raise UserCodeError("teardown", JobError(f"task {self.task}: {stuck} (cancel_s)")) from None
            raise
        finally:
            self.ready = False


_SMALL_BYTES = 16 << 10


def _is_small_snapshot(task: Task, shape: TaskShape) -> bool:
    """True if a snapshot runs no user code and takes microseconds, so that the event loop can take it."""
    if not shape.stateful:
        return True
    if "snapshot" in shape.overrides:
        return False
    has = vars(task)
    for name in type(task).__taskgraph_state__:
        if name not in has:
            return False
        value = has[name]
        if type(value) is np.ndarray:  # the usual case
            if value.nbytes > _SMALL_BYTES or value.dtype.kind not in "biufc":
                return False
        elif not _is_small(value):
            return False
    return True


def _is_small(value: Any) -> bool:
    kind = type(value)  # compared by identity: `==` may be code of a metaclass
    if kind is str or kind is bytes:
        return len(value) <= _SMALL_BYTES
    return kind is float or kind is bool or value is None or (kind is int and value.bit_length() <= 64)


def is_intact(value: Encoded) -> bool:
    """True if a boundary was not borrowed from another process, or still has its digest.

    The lender could write to the shared memory while it lived. Takeovers depend on boundaries, so these are verified
    when they are read.
    """
    return all(block_behind(buffer) is None for buffer in value.buffers) or verify(value)
