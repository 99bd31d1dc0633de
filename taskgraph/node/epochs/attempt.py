"""One attempt of one epoch on a task's primary: compose, pull, compute, become idle, be sealed, run the sync points.

    composing ──► working ──► idle ──(seal, if the task can take messages)──► closing ──► finished

An attempt ends when it has finished, or is cancelled. Its items and messages belong to no other attempt. `Primary`
runs it; calls from other tasks (pulls, seals, flags and requests) arrive through `Serving`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from taskgraph.channels import Inputs, Outputs
from taskgraph.epoch import AttemptEnded, ComposeEpoch, Epoch, MapCall, QueueState, Scratch, place_text
from taskgraph.errors import GraphError, Refused
from taskgraph.graph.compose import Composition, Graph, Processor
from taskgraph.node.epochs.activity import Activity
from taskgraph.node.epochs.differing import read_values
from taskgraph.node.epochs.inbound import Inbound, raise_in_attempt
from taskgraph.node.epochs.messenger import Messenger
from taskgraph.node.epochs.outbound import Outbound
from taskgraph.node.epochs.recording import RecordedCall, Recording, SideEffects, side_effects_of
from taskgraph.node.epochs.turns import EpochTurns
from taskgraph.node.usercode.errors import cancelled_by_user_error
from taskgraph.observe.trace import clock
from taskgraph.protocol.cycles import HANDLER
from taskgraph.protocol.messages import Call, Encoded, Reason, Reply, Stamp, Wait
from taskgraph.protocol.sums import MessageLedger
from taskgraph.queues.composing import map_pieces, queue_state
from taskgraph.queues.plan import DEAL, call_name
from taskgraph.shape import is_stateless
from taskgraph.tables.client import open_table

if TYPE_CHECKING:
    from taskgraph.node.epochs.dealing import Dealers
    from taskgraph.node.epochs.primary_interface import PrimaryInterface
    from taskgraph.queues.pieces import PieceResult
    from taskgraph.tables.interface import EpochTable

__all__ = ["Attempt"]

R = TypeVar("R")

_MAX_WAITING = 2_000
"""The most coroutines of one task that may wait for replies in a test: handlers that send each other requests without
end fail at this number, instead of running for minutes."""
_REASON_CHARS = 200
"""The most characters of a hold's reason, which is written to etcd."""


class Attempt:
    """One attempt of one epoch, on one task; implements `taskgraph.epoch.Work` for user code.

    Args:
        group: for asyncio tasks of the attempt; an error in one ends all of them.
        recording: of strict mode; None: the epoch is not recorded.
        turns: the order of epochs in flight: code that is not stateless waits for the turn of its epoch. None: one
            epoch runs at a time.
        traced: True if the epoch is in a trace.
    """

    # One is made for every epoch. An object with more than 30 attributes has them in a dictionary, unless in slots.
    __slots__ = (
        "_began",
        "_group",
        "_loop",
        "_messenger",
        "_primary",
        "_ready",
        "_states",
        "_thread",
        "_tracing",
        "_turns",
        "activity",
        "allocate",
        "attempt",
        "cancelled",
        "committed",
        "composing",
        "dealers",
        "device",
        "finished",
        "finishing",
        "graph",
        "inbound",
        "ledger",
        "number",
        "numbers",
        "out",
        "put_bytes",
        "recording",
        "replica",
        "scratch",
        "snapshot_bytes",
        "stamp",
        "task",
        "term",
        "traced",
    )

    # Since it is composed:
    out: Outbound
    _states: dict[str, str]

    def __init__(
        self,
        primary: PrimaryInterface,
        stamp: Stamp,
        *,
        group: asyncio.TaskGroup,
        recording: Recording | None = None,
        turns: EpochTurns | None = None,
        traced: bool = False,
    ) -> None:
        replica = primary.replica
        self._primary = primary
        self.replica = replica
        self.stamp = stamp
        self.term = primary.term
        self.task = replica.task
        self._tracing = replica.tracing
        self.traced = traced
        self.number = stamp.epoch
        self.attempt = stamp.attempt
        self.cancelled = False
        self.finished = False  # all code has run
        self.committed = False  # known when it was dropped
        self.scratch = Scratch()
        self.device = replica.device
        self.allocate = replica.router.allocate
        self.ledger = MessageLedger()
        self.put_bytes = 0  # bytes of items, each value once
        self.snapshot_bytes = 0
        self._messenger: Messenger | None = None  # made when needed
        self.dealers: Dealers | None = None  # of the maps whose pieces this task deals
        self.numbers: dict[str, float] = {}
        self.finishing = False
        self.recording = recording
        self._turns = turns
        self._loop = primary.loop
        self._thread = primary.thread
        self._group: asyncio.TaskGroup | None = group  # None when the attempt is over
        self.composing: Composition | None = None
        self.graph: Graph | None = None  # stays when the attempt is over
        self._ready: asyncio.Future[None] | None = None  # made by the first call that waits for the graph
        self.inbound = Inbound(primary, stamp, self.ledger, recording)
        self.activity = Activity()
        self._began = self._loop.time()

    @property
    def last(self) -> bool:
        epochs = self.replica.job.epochs
        return epochs is not None and self.number + 1 >= epochs

    @property
    def seed(self) -> int:
        return self.replica.job.seed

    # -- the run ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Composes the graph, runs its processors in order (parallel ones beside them), waits for the seal if the task
        takes messages, and runs the sync points.

        Raises:
            UserCodeError, GraphError, ValueNotEncodable: the job's own errors.
            AttemptEnded: user code unwound because the attempt is over.
        """
        primary, inbound, activity = self._primary, self.inbound, self.activity
        injects = primary.node.injects
        try:
            if injects:
                await primary.node.point("compose", self.task, self.number)
            state = primary.unsaved.capture_state()
            graph = self.replica.constant_graph
            if graph is None:
                graph = await self._compose()
            self._set_graph(graph)
            parallel = [self._create_task(self._run_processor(p)) for p in graph.parallel] if graph.parallel else ()
            deriving: list[asyncio.Task[None]] = []
            run_deriving = partial(self._begin_deriving, deriving)
            inbound.pull(graph, self._create_task, run_deriving, self.traced and clock())
            if injects:
                await primary.node.point("processor", self.task, self.number)
            for processor in graph.ordered:
                await self._run_processor(processor)
            for work in parallel:
                await work
            if inbound.open:
                await inbound.wait_for_all_items()
            for work in deriving:  # each has supplied its item; strict mode still checks the state after it
                await work
            if self.replica.shape.receives:
                await activity.wait_until_sealed(partial(primary.report_idle, self))
            else:
                if activity.busy or activity.open_holds:
                    await activity.wait_until_idle()
                activity.closed = True
            if injects:
                await primary.node.point("sync", self.task, self.number)
            if state is not None:
                primary.unsaved.emit_if_state_changed_early(state, self.number)
            for processor in graph.sync_points:
                await self._run_processor(processor)
            if activity.busy or activity.open_holds:
                await activity.wait_until_idle()
            self.finished = True
        except BaseException:
            self._wake_threads()
            raise
        finally:
            self._group = None
            inbound.end()
            if self._ready is not None:
                self._ready.cancel()  # calls still wait for a graph that was never composed

    async def call(self, to: int, message: Callable[[], Call], what: str, lost: str) -> Reply:
        """Calls the primary of a task for this attempt, as `PrimaryInterface.call`."""
        return await self._primary.call(self.stamp, to, message, what, lost)

    async def _compose(self) -> Graph:
        """Calls `compose`. Keeps the graph for later epochs if they would compose the same graph.

        They would if `compose` is stateless and used nothing of its epoch that may differ in another epoch.
        """
        if self.recording is not None:
            await self.recording.take_state_digests()
        replica = self.replica
        composition = self.composing = Composition(self.task, self.number, replica.graph, replica.topology.constant)
        replica.actor.stamp = self.stamp
        epoch = ComposeEpoch(self) if replica.graph_may_be_constant else Epoch(self, "compose")
        try:
            await replica.actor.call("compose", replica.user_task.compose, epoch, attempt=self)
        finally:
            self.composing = None
        graph = composition.graph()
        replica.graph = graph if graph.declarations else None
        if isinstance(epoch, ComposeEpoch) and replica.graph_may_be_constant:
            replica.graph_may_be_constant = not epoch.asked and graph.is_reusable(replica.user_task)
            if replica.graph_may_be_constant:
                replica.constant_graph = graph
        if self.recording is not None:
            self.recording.composed = graph.processors
            await self.recording.check_state("compose")
        return graph

    def _set_graph(self, graph: Graph) -> None:
        """Sets the composed graph, and answers the pulls that waited for it."""
        self.out = Outbound(self.stamp, self.term, graph.channels_out)
        self._states = dict.fromkeys(graph.names, "waiting")
        self.graph = graph
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)
        self._primary.attempts.answer_waiting_pulls(self)

    def _begin_deriving(self, deriving: list[asyncio.Task[None]], processor: Processor) -> None:
        """Starts a processor that derives a local channel, and adds its asyncio task to `deriving`."""
        deriving.append(self._create_task(self._run_processor(processor)))

    async def _run_processor(self, processor: Processor) -> None:
        """Runs one processor: waits for its items (not optional ones), and for its epoch's turn unless it is stateless;
        then calls its compute.
        """
        name, items = processor.name, self.inbound.items
        if processor.takes and (lacking := set(processor.takes).difference(items)):
            waiting = self.traced and clock()
            await self.inbound.wait_for_items(lacking)
            if waiting:
                self._tracing.add("wait", waiting, self.task, self.stamp, self.term, name)
        if self._turns is not None and not is_stateless(processor.compute):
            await self.wait_for_turn(name)
        self._states[name] = "running"
        epoch = Epoch(self, name, processor.sync)
        if self.recording is not None:
            await self._run_recorded(self.recording, processor, epoch)
        else:
            inputs = Inputs(self, processor, items)
            outputs = Outputs(self, processor, inputs)
            actor, compute, alone = self.replica.actor, processor.compute, not processor.parallel
            actor.stamp = self.stamp
            await actor.call(name, compute, epoch, inputs, outputs, alone=alone, after=outputs.close, attempt=self)
        self._states[name] = "done"

    async def _run_recorded(self, recording: Recording, processor: Processor, epoch: Epoch) -> None:
        """Calls a processor in strict mode, which records its inputs and its effects."""
        name, replica, alone = processor.name, self.replica, not processor.parallel
        items = self.inbound.items if self.device is None else await recording.items_for(processor)
        inputs = Inputs(self, processor, items)
        outputs = Outputs(self, processor, inputs)
        compute = recording.wrap(RecordedCall(processor, name), processor.compute)
        close = partial(recording.close_outputs, name, outputs)
        after = recording.checked_close(processor, close)
        switches = recording.switches
        before = await read_values(replica, partial(side_effects_of, self)) if replica.shape.in_flight else {}
        replica.actor.stamp = self.stamp
        await replica.actor.call(name, compute, epoch, inputs, outputs, alone=alone, after=after, attempt=self)
        if replica.shape.in_flight:
            side_effects, alone_ran = (
                await read_values(replica, partial(side_effects_of, self)),
                recording.switches - switches == 2,
            )
            recording.side_effects[name] = SideEffects(before, side_effects, alone_ran)
        await recording.check_step(name, sync=processor.sync, looked=after is not close)

    async def wait_for_turn(self, where: str) -> None:
        """Waits until the snapshots of all earlier epochs are taken, since the code `where` may use the state."""
        if self._turns is None or self._turns.at >= self.number:
            return
        waiting = self.traced and clock()
        await self._turns.wait(self.number)
        if waiting:
            self._tracing.add("turn", waiting, self.task, self.stamp, self.term, where)

    def check_open(self) -> None:
        """Raises Refused if the epoch is closed for messages."""
        if self.activity.closed:
            raise Refused(Reason.DONE, f"task {self.task} is done with epoch {self.number}")

    def spawn(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Starts a coroutine of the attempt; until it ends, the task is not idle. Raises Refused if it is too late."""
        if self._group is None or self.cancelled:
            work.close()
            raise Refused(Reason.ATTEMPT_GONE, f"attempt {self.attempt} of epoch {self.number} is over")
        self.activity.call_began()
        task = self._create_task(work)
        task.add_done_callback(lambda _: self.activity.call_ended())
        return task

    def _create_task(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Runs a coroutine as an asyncio task of the attempt's group; an error in it ends the attempt."""
        assert self._group is not None
        task = self._group.create_task(work)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, done: asyncio.Task[Any]) -> None:
        """Wakes threads if user code failed; ends the attempt if it cancelled its own asyncio task, which a TaskGroup
        would ignore.
        """
        if not done.cancelled():
            if done.exception() is not None:
                self._wake_threads()
        elif self._group is not None and not self.cancelled:
            self._create_task(raise_in_attempt(cancelled_by_user_error(f"task {self.task}, epoch {self.number}: ")))

    def _wake_threads(self) -> None:
        """Marks the attempt as cancelled, and makes its threads stop waiting for replies: its end waits for them."""
        self.cancelled = self.inbound.over = True
        if self._messenger is not None:
            self._messenger.raise_in_waiting_threads()

    # -- for other tasks --------------------------------------------------------------------------

    @property
    def messenger(self) -> Messenger:
        """The attempt's flags and requests."""
        if self._messenger is None:
            self._messenger = Messenger(self)
        return self._messenger

    @property
    def depends_on(self) -> Mapping[int, int]:
        """Task -> term of its primary that acknowledged a flag of this attempt, or answered a request with effects."""
        return self._messenger.terms if self._messenger is not None else {}

    async def wait_until_composed(self) -> None:
        """Waits until the graph is composed. Raises Refused if the attempt ends before."""
        if self.graph is not None:
            return
        if self._ready is None:
            self._ready = self._loop.create_future()
            if self.cancelled or self._group is None:
                self._ready.cancel()
        try:
            await asyncio.shield(self._ready)
        except asyncio.CancelledError:
            if self._ready.cancelled():
                raise Refused(Reason.ATTEMPT_GONE, f"attempt {self.attempt} is over") from None
            raise

    def drop(self) -> None:
        """Frees all values of the attempt, since a later epoch committed or the attempt was cancelled."""
        self.cancelled = True
        # An object that still refers to this attempt must not keep its values: their memory is used again.
        if self.graph is not None:
            self.out.drop()
        elif self._ready is not None:
            self._ready.cancel()
        if not self.finished or self.recording is not None:  # otherwise `Inbound.end` has freed the items
            self.inbound.drop()
        if self._messenger is not None:
            self._messenger.drop()
            self._messenger = None  # they refer to each other
        self.dealers = None

    # -- `Work`: for user code, in any thread -----------------------------------------------------

    def _call_on_loop(self, function: Callable[..., object], *args: object) -> None:
        """Calls a function on the event loop: at once in the loop's thread, and soon from another thread."""
        if threading.get_ident() == self._thread:
            function(*args)
        else:
            self.replica.threads.post(function, *args)

    def end_error(self) -> AttemptEnded:
        """Makes the exception to raise in user code of this attempt once the attempt is over."""
        return AttemptEnded(held=self.activity.open_holds is not None and not self.finished)

    def neighbors(self, link: str, task: int | None = None) -> tuple[int, ...]:
        replica = self.replica
        tasks, of = replica.job.tasks, self.task if task is None else task
        known = replica.topology.cached.get((link, of, tasks))
        return replica.topology.neighbors(link, of, tasks, self.number) if known is None else known

    def links(self) -> tuple[str, ...]:
        return tuple(self.replica.topology)

    def tasks(self) -> int:
        return self.replica.job.tasks

    def service(self, title: str) -> tuple[int, ...]:
        return self.replica.job.service(title)

    def table(self, epoch: Epoch, name: str) -> EpochTable:
        return open_table(epoch, name, self.replica.job)

    def map(self, epoch: Epoch, call: MapCall) -> None:
        map_pieces(epoch, call, self.replica.job)

    def ask_queue_progress(self, epoch: Epoch, name: str) -> QueueState:
        return queue_state(epoch, name)

    def kept_results(self, tag: str) -> dict[int, PieceResult]:
        committed = self.replica.boundaries.committed
        return self.replica.kept_results.of(tag, self.number, committed.stamp.epoch if committed is not None else 0)

    @property
    def node_name(self) -> str:
        return self._primary.node.name

    def run_in_thread(self, function: Callable[[], None]) -> asyncio.Future[None]:
        return self.replica.threads.run(function)

    def run_beside(self, where: str, function: Callable[[], Any]) -> asyncio.Task[None]:
        """Starts a call of user code that does not take the task's turn: in a thread, or an `async def` on the loop.
        Its error, a `UserCodeError`, stays in the returned asyncio task.
        """
        call = self._loop.create_task(self._call_beside(where, function), name=where)
        call.add_done_callback(_retrieve_error)
        return call

    async def _call_beside(self, where: str, function: Callable[[], Any]) -> None:
        actor = self.replica.actor
        actor.stamp = self.stamp
        await actor.call(where, function, alone=False, attempt=self)

    def go_on_without(self, call: asyncio.Task[None]) -> None:
        """Lets the epoch go on without a late call for pieces, which from now on only the end of the node cancels."""
        late, node = self.replica.late_calls, self._primary.node
        late.add(call)
        call.add_done_callback(late.discard)
        node.log.info("task %d goes on without %r, which is late", self.task, call.get_name())
        node.own(_wait_for_late_call(call), f"{call.get_name()} of task {self.task}")

    @property
    def late_calls(self) -> Collection[asyncio.Task[None]]:
        return self.replica.late_calls

    def fetch(self, channels: tuple[tuple[str, int], ...]) -> asyncio.Future[None]:
        return self.inbound.pull_optional(channels)

    def supply(self, tag: str, value: Encoded) -> None:
        """Gives a local channel the value that its processor derived, from any thread."""
        self._call_on_loop(self.inbound.supply, (tag, self.task), value)

    def put(self, tag: str, consumers: tuple[int, ...], value: Encoded) -> None:
        """Puts an item for each consumer, from any thread, and counts it. Raises AttemptEnded if it is too late."""
        if self.cancelled:
            raise self.end_error()
        if threading.get_ident() != self._thread:
            self.replica.threads.post(self._put_from_thread, tag, consumers, value)
            return
        size = value.size_bytes
        kept, now = 0, self.traced and clock()  # before the item leaves: no pull of it ends earlier
        for consumer in consumers:
            if not self.out.put(tag, consumer, value):
                continue  # the attempt is over
            self.ledger.count_sent("item", self.task, consumer, tag, value.digest)
            kept = size
            if now:
                self._tracing.keep("put", tag, consumer, now, now, self.task, self.stamp, self.term, size)
            if self.recording is not None:
                self.recording.puts[(tag, consumer)] = value
        self.put_bytes += kept

    def _put_from_thread(self, tag: str, consumers: tuple[int, ...], value: Encoded) -> None:
        """Puts an item, on the event loop, for a thread, unless the attempt has ended meanwhile."""
        if not self.cancelled:
            self.put(tag, consumers, value)

    def _check_not_closed(self, where: str, what: str) -> None:
        """Raises GraphError if the epoch is closed for messages, and fails the job: user code may ignore the error.

        A restart would not help: the message would be too late in every attempt.
        """
        if self.cancelled and not self.finished:
            raise self.end_error()
        if self.activity.closed:
            error = self._too_late_error(where, what)
            self._call_on_loop(self._fail_job, error)
            raise self.end_error() if self.cancelled else error

    def _too_late_error(self, where: str, what: str) -> GraphError:
        return GraphError(
            f"task {self.task}, epoch {self.number}, {place_text(where)}: a {what} that is sent when all that the task "
            f'runs has ended comes too late: who sends it beside that keeps the epoch open, with epoch.hold("why")'
        )

    def _fail_job(self, error: GraphError) -> None:
        """Fails the job with an error: by this attempt while it runs, or by the primary after it has finished."""
        if self._group is not None and not self.cancelled:
            self._create_task(raise_in_attempt(error))
        elif self.finished:
            self._primary.fail_for_late_message(self, error)

    def flag(self, where: str, to: tuple[int, ...], value: Encoded) -> None:
        self._check_not_closed(where, "flag")
        for task in to:
            self._call_on_loop(
                self._send, where, "flag", lambda task=task: self.messenger.send_flag(where, task, value)
            )

    def request(self, where: str, to: int, method: str, value: Encoded) -> concurrent.futures.Future[Encoded]:
        self._check_not_closed(where, "request")
        if self.replica.threads.in_step and self._has_too_many_waits():
            raise GraphError(
                f"task {self.task}, epoch {self.number}, {place_text(where)}: request {method!r} to task {to}: "
                f"{_MAX_WAITING} coroutines of the task wait for replies already, and a test takes no more; does a "
                f"handler ask for ever, itself or in a circle?"
            )
        future: concurrent.futures.Future[Encoded] = concurrent.futures.Future()

        def start() -> None:
            if not self._send(where, "request", lambda: self.messenger.request(where, to, method, value, future)):
                future.set_exception(self.end_error())

        self._call_on_loop(start)
        return future

    def _has_too_many_waits(self) -> bool:
        """True if, in a test, too many coroutines wait for replies. Other waits do not count."""
        if self._messenger is None or self.replica.actor.waiting <= _MAX_WAITING:
            return False
        return len(self._messenger.awaited) > _MAX_WAITING  # slow, so it comes last

    def _send(self, where: str, what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Starts `work`, which sends a message, on the loop. Returns False if the attempt is over: a user thread may
        call late.
        """
        if self.activity.closed:
            self._fail_job(self._too_late_error(where, what))
            return False
        if self._group is None or self.cancelled:
            return False
        self.spawn(work())
        return True

    def wait_in_thread(self, future: concurrent.futures.Future[Encoded], timeout_s: float | None) -> Encoded:
        return self.replica.actor.wait_in_thread(future, timeout_s)

    def hold(self, where: str, why: str) -> Callable[[], None]:
        self._check_not_done()
        mark = object()
        text = f"{place_text(where)}: {str(why)[:_REASON_CHARS]}"
        shown = text.encode("utf-8", "backslashreplace").decode()  # any text must travel
        self._call_on_loop(self.activity.hold, mark, shown)
        return lambda: self._call_on_loop(self.activity.release, mark)

    def report(self, numbers: dict[str, float]) -> None:
        self._check_not_done()
        self._call_on_loop(self.numbers.update, numbers)

    def finish(self) -> None:
        self._check_not_done()
        self.finishing = True
        self._primary.note_job_ends()

    def _check_not_done(self) -> None:
        """Raises AttemptEnded if the attempt is over or finished: its report may be on its way to the leader."""
        if self.cancelled or self._group is None:
            raise self.end_error()

    # -- waits, for `status` and the leader -------------------------------------------------------

    def waits(self) -> tuple[Wait, ...]:
        """Returns what every unfinished processor and handler waits for, and the open holds."""
        since = self._loop.time() - self._began
        graph = self.graph
        if graph is None:
            return (Wait("compose", "running", self.task, "compose", since),)
        found: list[Wait] = []
        earlier: str | None = None
        deriving = [processor for _, processor in graph.derived.values() if self._states[processor.name] == "running"]
        replies = self._messenger.awaited if self._messenger is not None else []
        for processor in (*graph.ordered, *graph.sync_points, *graph.parallel, *deriving):
            if self._states[processor.name] == "done":
                continue
            gives = tuple((tag, to) for tag, ids in processor.outbound.items() for to in ids if self.out.lacks(tag, to))
            for kind, task, name in self._waits_of(processor, replies, earlier):
                found.append(Wait(processor.name, kind, task, name, since, gives))
            if not processor.parallel:
                earlier = processor.name
        asking = set()
        for where, to, method in replies:
            name = where if where in graph.names else HANDLER + where.split("/")[0]
            asking.add(name)
            if name is not where:
                found.append(Wait(name, "reply", to, method, since))
        # Of each handler that runs and waits for no reply, the oldest call.
        named = set(asking)
        for where, began in self.replica.actor.running:
            name = HANDLER + where if where == "on_flag" else where
            if name.startswith(HANDLER) and name not in named:
                named.add(name)
                found.append(Wait(name, "running", self.task, name, self._loop.time() - began))
        if holder := self.replica.actor.holder:
            kind = "turn of asking" if holder in asking else "turn"
            queued = sorted({where for where in self.replica.actor.queued if where.startswith(HANDLER)})
            found.extend(Wait(handler, kind, self.task, holder, since) for handler in queued)
        found.extend(Wait("hold", "running", self.task, why, since) for why in self.activity.holds)
        return tuple(found)

    def _waits_of(
        self, processor: Processor, replies: list[tuple[str, int, str]], earlier: str | None
    ) -> Iterator[tuple[str, int, str]]:
        """Yields (kind, task, name) of each thing that an unfinished processor waits for.

        Args:
            replies: (where, task, method) of every pending request.
            earlier: the last unfinished processor before this one.
        """
        if self._states[processor.name] == "running":
            pieces = call_name(processor.name, self.number)
            computes = any(call.where == pieces for call in self.replica.actor.running)
            asked = [
                ("reply", to, method)
                for where, to, method in replies
                if where == processor.name and not (computes and method == DEAL)
            ]
            yield from asked or [("running", self.task, processor.name)]
        for tag, producers in processor.inbound.items():
            for producer in producers:
                lacking, task = self.inbound.source_of(tag, producer)
                if self.inbound.lacks(lacking, task):
                    yield "item", task, lacking
        if earlier is not None and not processor.parallel:
            yield "order", self.task, earlier


def _retrieve_error(call: asyncio.Task[None]) -> None:
    """Keeps asyncio from logging the error of a call whose caller has ended."""
    if not call.cancelled():
        call.exception()


async def _wait_for_late_call(call: asyncio.Task[None]) -> None:
    """Waits for a call that its epoch has left behind; cancels the call if the node ends first."""
    try:
        await asyncio.wait([call])
    except asyncio.CancelledError:
        call.cancel()
        await asyncio.wait([call])
        raise
