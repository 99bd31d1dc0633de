"""One attempt of one epoch on a task's primary: compose, pull, compute, grow quiet, be sealed, run the sync points.

    composing ──► working ──► quiet ──(seal, where the task can take messages)──► closing ──► finished

An attempt ends by finishing or by being cancelled; what it made belongs to it and to no other. It is driven by
`Primary`; calls from other tasks (`pull`, `seal`, flags and requests) come in through `Serving`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from taskgraph.channels import Inputs, Outputs
from taskgraph.epoch import AttemptEnded, ComposeEpoch, Epoch, Scratch, in_words
from taskgraph.errors import GraphError, Refused
from taskgraph.graph.compose import Composition, Graph, Processor
from taskgraph.node.epochs.differing import look
from taskgraph.node.epochs.inbound import Inbound, raised
from taskgraph.node.epochs.items import Items
from taskgraph.node.epochs.mailbox import Mailbox
from taskgraph.node.epochs.quiet import Quiet
from taskgraph.node.epochs.recording import HandedOn, Recording, Step, handed_on_by
from taskgraph.node.epochs.turns import Turns
from taskgraph.node.usercode.errors import cancelled_by_users
from taskgraph.observe.trace import clock
from taskgraph.protocol.cycles import HANDLER
from taskgraph.protocol.messages import Call, Encoded, Reason, Reply, Stamp, Wait
from taskgraph.protocol.sums import Ledger
from taskgraph.shape import is_stateless

if TYPE_CHECKING:
    from taskgraph.node.epochs.term import Term

__all__ = ["Attempt"]

R = TypeVar("R")

_MOST_IN_STEP = 2_000
"""Coroutines of a task that wait for replies, in a test: where handlers ask each other without an end, there are more
and more of them, and the run takes minutes to say that it hangs."""
_LONG = 200
"""Characters of why an epoch is held that are told: they go to etcd each time that is said."""


class Attempt:
    """The attempt at work of one task; implements `taskgraph.epoch.Work` for user code.

    Args:
        group: where what runs beside it belongs; there, too, an error ends all of it.
        turns: of the task's epochs, where several are in flight: what is not stateless waits for that of this one.
        traced: whether somebody looks at this epoch.
    """

    # One is made for every epoch. Without slots, more than 30 attributes are kept in a dictionary of each one's own.
    __slots__ = (
        "_began",
        "_group",
        "_loop",
        "_mailbox",
        "_primary",
        "_ready",
        "_states",
        "_thread",
        "_tracing",
        "_turns",
        "allocate",
        "attempt",
        "cancelled",
        "committed",
        "composing",
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
        "quiet",
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
    out: Items
    _states: dict[str, str]

    def __init__(
        self,
        primary: Term,
        stamp: Stamp,
        *,
        group: asyncio.TaskGroup,
        recording: Recording | None = None,
        turns: Turns | None = None,
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
        self.finished = False  # all that it runs has ended, as it should
        self.committed = False  # as far as the primary knew when it was dropped
        self.scratch = Scratch()
        self.device = replica.device
        self.allocate = replica.router.allocate
        self.ledger = Ledger()
        self.put_bytes = 0  # what is kept for those who pull it, until it commits: each value once
        self.snapshot_bytes = 0  # and for the backups
        self._mailbox: Mailbox | None = None  # most epochs have none
        self.numbers: dict[str, float] = {}
        self.finishing = False
        self.recording = recording
        self._turns = turns
        self._loop = primary.loop
        self._thread = primary.thread
        self._group: asyncio.TaskGroup | None = group  # until the attempt is over
        self.composing: Composition | None = None
        self.graph: Graph | None = None  # once there is one it can say what it offers, also when it is over
        self._ready: asyncio.Future[None] | None = None  # for who waits for that, which hardly anybody does
        self.inbound = Inbound(primary, stamp, self.ledger, recording)
        self.quiet = Quiet()
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
        """Runs the attempt to its end: every processor and sync point of the task has run.

        Raises:
            UserCodeError, GraphError, ValueNotEncodable: the job's own errors.
            AttemptEnded: user code unwound because the attempt is over.
        """
        primary, inbound, quiet = self._primary, self.inbound, self.quiet
        injects = primary.node.injects
        try:
            if injects:
                await primary.node.point("compose", self.task, self.number)
            state = primary.unheld.state_now()
            graph = self.replica.standing
            if graph is None:
                graph = await self._compose()
            self._has_composed(graph)
            parallel = [self._beside(self._process(p)) for p in graph.parallel] if graph.parallel else ()
            inbound.pull(graph, self._beside, self.traced and clock())
            if injects:
                await primary.node.point("processor", self.task, self.number)
            for processor in graph.ordered:
                await self._process(processor)
            for work in parallel:
                await work
            if inbound.open:
                await inbound.until_all()
            if self.replica.shape.receives:
                await quiet.until_sealed(partial(primary.report_idle, self))
            else:
                if quiet.busy or quiet.held:
                    await quiet.until_calm()
                quiet.closed = True
            if injects:
                await primary.node.point("sync", self.task, self.number)
            if state is not None:
                primary.unheld.look_at_state(state, self.number)
            for processor in graph.sync_points:
                await self._process(processor)
            if quiet.busy or quiet.held:
                await quiet.until_calm()
            self.finished = True
        except BaseException:
            self._unwind()
            raise
        finally:
            self._group = None
            inbound.end()
            if self._ready is not None:
                self._ready.cancel()  # it never composed, where somebody waits still

    async def call(self, to: int, message: Callable[[], Call], what: str, lost: str) -> Reply:
        """As `Term.call`, of this attempt."""
        return await self._primary.call(self.stamp, to, message, what, lost)

    async def _compose(self) -> Graph:
        """Calls `compose`.

        Where that is marked stateless, and asked the epoch for nothing that another epoch may answer otherwise, what it
        declared stands for all epochs of the attempt at work: called again it would declare the same.
        """
        if self.recording is not None:
            await self.recording.begin()
        replica = self.replica
        composition = self.composing = Composition(self.task, self.number, replica.graph, replica.topology.lasting)
        replica.actor.stamp = self.stamp
        epoch = ComposeEpoch(self) if replica.may_stand else Epoch(self, "compose")
        try:
            await replica.actor.call("compose", replica.user_task.compose, epoch, attempt=self)
        finally:
            self.composing = None
        graph = composition.graph()
        replica.graph = graph if graph.declarations else None
        if isinstance(epoch, ComposeEpoch) and replica.may_stand:
            replica.may_stand = not epoch.asked and graph.lasts(replica.user_task)
            if replica.may_stand:
                replica.standing = graph
        if self.recording is not None:
            self.recording.composed = graph.processors
            await self.recording.check_state("compose")
        return graph

    def _has_composed(self, graph: Graph) -> None:
        """It can say what it offers."""
        self.out = Items(self.stamp, self.term, graph.channels_out)
        self._states = dict.fromkeys(graph.names, "waiting")
        self.graph = graph
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)
        self._primary.attempts.composed(self)

    async def _process(self, processor: Processor) -> None:
        name, items = processor.name, self.inbound.items
        if processor.takes and (lacking := set(processor.takes).difference(items)):
            waiting = self.traced and clock()
            await self.inbound.until_here(lacking)
            if waiting:
                self._tracing.add("wait", waiting, self.task, self.stamp, self.term, name)
        if self._turns is not None and not is_stateless(processor.compute):
            await self.turn(name)
        self._states[name] = "running"
        epoch = Epoch(self, name, processor.sync)
        if self.recording is not None:
            await self._process_recorded(self.recording, processor, epoch)
        else:
            inputs = Inputs(self, processor, items)
            outputs = Outputs(self, processor, inputs)
            actor, compute, alone = self.replica.actor, processor.compute, not processor.parallel
            actor.stamp = self.stamp
            await actor.call(name, compute, epoch, inputs, outputs, alone=alone, after=outputs.close, attempt=self)
        self._states[name] = "done"

    async def _process_recorded(self, recording: Recording, processor: Processor, epoch: Epoch) -> None:
        """Calls a processor in strict mode: what it is given, and what it leaves, is looked at."""
        name, replica, alone = processor.name, self.replica, not processor.parallel
        items = self.inbound.items if self.device is None else await recording.items_for(processor)
        inputs = Inputs(self, processor, items)
        outputs = Outputs(self, processor, inputs)
        compute = recording.records(Step(processor, name), processor.compute)
        close = partial(recording.closes, name, outputs)
        after = recording.watches(processor, close)
        switches = recording.switches
        before = await look(replica, partial(handed_on_by, self)) if replica.shape.in_flight else {}
        replica.actor.stamp = self.stamp
        await replica.actor.call(name, compute, epoch, inputs, outputs, alone=alone, after=after, attempt=self)
        if replica.shape.in_flight:
            handed_on, alone_ran = await look(replica, partial(handed_on_by, self)), recording.switches - switches == 2
            recording.handed_on[name] = HandedOn(before, handed_on, alone_ran)
        await recording.returned(name, sync=processor.sync, looked=after is not close)

    async def turn(self, where: str) -> None:
        """Returns when all earlier epochs are snapshotted: `where` rests on the state, or changes it."""
        if self._turns is None or self._turns.at >= self.number:
            return
        waiting = self.traced and clock()
        await self._turns.wait(self.number)
        if waiting:
            self._tracing.add("turn", waiting, self.task, self.stamp, self.term, where)

    def check_open(self) -> None:
        """Raises Refused where the task takes no message any more."""
        if self.quiet.closed:
            raise Refused(Reason.DONE, f"task {self.task} is done with epoch {self.number}")

    def spawn(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Runs something of the attempt: while that goes on the task is not idle, and nobody cancels it."""
        if self._group is None or self.cancelled:
            work.close()
            raise Refused(Reason.ATTEMPT_GONE, f"attempt {self.attempt} of epoch {self.number} is over")
        self.quiet.busier()
        task = self._beside(work)
        task.add_done_callback(lambda _: self.quiet.calmer())
        return task

    def _beside(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Runs something beside the attempt that ends it where it raises."""
        assert self._group is not None
        task = self._group.create_task(work)
        task.add_done_callback(self._look_at)
        return task

    def _look_at(self, done: asyncio.Task[Any]) -> None:
        """Nobody of ours cancels it while the attempt goes on: where users do, a group takes no notice of it."""
        if not done.cancelled():
            if done.exception() is not None:
                self._unwind()
        elif self._group is not None and not self.cancelled:
            self._beside(raised(cancelled_by_users(f"task {self.task}, epoch {self.number}: ")))

    def _unwind(self) -> None:
        """Something of the attempt raised: it waits for its threads now, and they must not wait for its answers."""
        self.cancelled = self.inbound.over = True
        if self._mailbox is not None:
            self._mailbox.end()

    # -- asked by other tasks ---------------------------------------------------------------------

    @property
    def mailbox(self) -> Mailbox:
        """Its flags and requests. Made when first asked for."""
        if self._mailbox is None:
            self._mailbox = Mailbox(self)
        return self._mailbox

    @property
    def rests_on(self) -> Mapping[int, int]:
        """task -> term of whoever acknowledged a flag of it, or answered with effects."""
        return self._mailbox.terms if self._mailbox is not None else {}

    async def ready(self) -> None:
        """Returns when compose has run; raises Refused where the attempt ended before."""
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
        """Nothing of this attempt is needed any more: a later epoch was read, or it was cancelled."""
        self.cancelled = True
        # Whatever still refers to this attempt must not keep its values: their memory takes those of the next one.
        if self.graph is not None:
            self.out.drop()
        elif self._ready is not None:
            self._ready.cancel()
        if not self.finished or self.recording is not None:  # else there is nothing left of what it took
            self.inbound.drop()
        if self._mailbox is not None:
            self._mailbox.drop()
            self._mailbox = None  # they refer to each other

    # -- Work: asked by user code, from any thread ------------------------------------------------

    def _on_loop(self, function: Callable[..., object], *args: object) -> None:
        if threading.get_ident() == self._thread:
            function(*args)
        else:
            self.replica.threads.tell(function, *args)

    def ended(self) -> AttemptEnded:
        """What ends code that goes on with this attempt, which is over."""
        return AttemptEnded(held=self.quiet.held is not None and not self.finished)

    def neighbors(self, link: str) -> tuple[int, ...]:
        replica = self.replica
        tasks = replica.job.tasks
        known = replica.topology.known.get((link, self.task, tasks))
        return replica.topology.neighbors(link, self.task, tasks, self.number) if known is None else known

    def links(self) -> tuple[str, ...]:
        return tuple(self.replica.topology)

    def tasks(self) -> int:
        return self.replica.job.tasks

    def put(self, tag: str, consumers: tuple[int, ...], value: Encoded) -> None:
        if self.cancelled:
            raise self.ended()
        if threading.get_ident() != self._thread:
            self.replica.threads.tell(self._put_told, tag, consumers, value)
            return
        size = value.size_bytes
        kept, now = 0, self.traced and clock()  # before it goes: no pull of it ends before
        for consumer in consumers:
            if not self.out.put(tag, consumer, value):
                continue  # the attempt is over
            self.ledger.sent("item", self.task, consumer, tag, value.digest)
            kept = size
            if now:
                self._tracing.keep("put", tag, consumer, now, now, self.task, self.stamp, self.term, size)
            if self.recording is not None:
                self.recording.puts[(tag, consumer)] = value
        self.put_bytes += kept

    def _put_told(self, tag: str, consumers: tuple[int, ...], value: Encoded) -> None:
        """What a thread put, which does not hear any more that the attempt is over."""
        if not self.cancelled:
            self.put(tag, consumers, value)

    def _check_not_quiet(self, where: str, what: str) -> None:
        """Raises where nothing may be sent any more; it fails the job, too, since nobody may look at who sends then.

        Its receiver may have been sealed. A restart would not help: it would be too late in every attempt.
        """
        if self.cancelled and not self.finished:
            raise self.ended()
        if self.quiet.closed:
            error = self._too_late(where, what)
            self._on_loop(self._end_by, error)
            raise self.ended() if self.cancelled else error

    def _too_late(self, where: str, what: str) -> GraphError:
        return GraphError(
            f"task {self.task}, epoch {self.number}, {in_words(where)}: a {what} that is sent when all that the task "
            f'runs has ended comes too late: who sends it beside that keeps the epoch open, with epoch.hold("why")'
        )

    def _end_by(self, error: GraphError) -> None:
        if self._group is not None and not self.cancelled:
            self._beside(raised(error))
        elif self.finished:
            self._primary.missed(self, error)

    def flag(self, where: str, to: tuple[int, ...], value: Encoded) -> None:
        self._check_not_quiet(where, "flag")
        for task in to:
            self._on_loop(self._send, where, "flag", lambda task=task: self.mailbox.send_flag(where, task, value))

    def request(self, where: str, to: int, method: str, value: Encoded) -> concurrent.futures.Future[Encoded]:
        self._check_not_quiet(where, "request")
        if self.replica.threads.in_step and self._asks_without_end():
            raise GraphError(
                f"task {self.task}, epoch {self.number}, {in_words(where)}: request {method!r} to task {to}: "
                f"{_MOST_IN_STEP} coroutines of the task wait for replies already, and a test takes no more; does a "
                f"handler ask for ever, itself or in a circle?"
            )
        future: concurrent.futures.Future[Encoded] = concurrent.futures.Future()

        def start() -> None:
            if not self._send(where, "request", lambda: self.mailbox.request(where, to, method, value, future)):
                future.set_exception(self.ended())

        self._on_loop(start)
        return future

    def _asks_without_end(self) -> bool:
        """In a test. Where many handlers wait for something else, such as an event, or one asks many, it does not."""
        if self._mailbox is None or self.replica.actor.waiting <= _MOST_IN_STEP:
            return False
        return len(self._mailbox.awaited) > _MOST_IN_STEP  # it lists them: not at each of many requests

    def _send(self, where: str, what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """On the loop, where a thread of the user's own may be too late that was not when it asked."""
        if self.quiet.closed:
            self._end_by(self._too_late(where, what))
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
        text = f"{in_words(where)}: {str(why)[:_LONG]}"
        shown = text.encode("utf-8", "backslashreplace").decode()  # it travels, and whatever it is
        self._on_loop(self.quiet.hold, mark, shown)
        return lambda: self._on_loop(self.quiet.release, mark)

    def report(self, numbers: dict[str, float]) -> None:
        self._check_not_done()
        self._on_loop(self.numbers.update, numbers)

    def finish(self) -> None:
        self._check_not_done()
        self.finishing = True
        self._primary.finishing()

    def _check_not_done(self) -> None:
        """Raises where it is over, or done though not committed: its report may be on its way to the leader."""
        if self.cancelled or self._group is None:
            raise self.ended()

    # -- what it waits for ------------------------------------------------------------------------

    def waits(self) -> tuple[Wait, ...]:
        """What every unfinished processor, handler and hold waits for."""
        since = self._loop.time() - self._began
        graph = self.graph
        if graph is None:
            return (Wait("compose", "running", self.task, "compose", since),)
        found: list[Wait] = []
        earlier: str | None = None
        replies = self._mailbox.awaited if self._mailbox is not None else []
        for processor in (*graph.ordered, *graph.sync_points, *graph.parallel):
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
        # What runs and asks nobody, of each handler the oldest: where the task has not reported anything yet, nothing
        # else tells of it.
        told = set(asking)
        for where, began in self.replica.actor.running:
            name = HANDLER + where if where == "on_flag" else where
            if name.startswith(HANDLER) and name not in told:
                told.add(name)
                found.append(Wait(name, "running", self.task, name, self._loop.time() - began))
        if holder := self.replica.actor.holder:
            kind = "turn of asking" if holder in asking else "turn"
            queued = sorted({where for where in self.replica.actor.queued if where.startswith(HANDLER)})
            found.extend(Wait(handler, kind, self.task, holder, since) for handler in queued)
        found.extend(Wait("hold", "running", self.task, why, since) for why in self.quiet.holds)
        return tuple(found)

    def _waits_of(
        self, processor: Processor, replies: list[tuple[str, int, str]], earlier: str | None
    ) -> Iterator[tuple[str, int, str]]:
        """Of which kind, task and name is what one that is not done waits for.

        Args:
            replies: (where, task, method) of every request without an answer.
            earlier: the last one before it that is not done.
        """
        if self._states[processor.name] == "running":
            asked = [("reply", to, method) for where, to, method in replies if where == processor.name]
            yield from asked or [("running", self.task, processor.name)]
        for tag, producers in processor.inbound.items():
            for producer in producers:
                if (tag, producer) not in self.inbound.items:
                    yield "item", producer, tag
        if earlier is not None and not processor.parallel:
            yield "order", self.task, earlier
