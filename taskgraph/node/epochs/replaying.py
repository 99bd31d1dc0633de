"""Strict mode: an epoch again, on another object of the task, with the inputs and answers that were recorded.

Steps begin, get the answers to their requests, and end in the order in which they did. What coroutines that ran into
each other did in between at what moment, nobody knows.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from taskgraph.channels import Inputs, Outputs
from taskgraph.epoch import AttemptEnded, Epoch, Scratch, in_words
from taskgraph.errors import StateError
from taskgraph.graph.blocks import Block
from taskgraph.graph.compose import Composition, Processor
from taskgraph.graph.values import encode
from taskgraph.node.epochs.recording import Fields, Moment, Recording, RequestKey, Step, fields_of, seen
from taskgraph.node.replica import Replica
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.protocol.messages import Encoded, Stamp

__all__ = ["FINISHES", "Again", "Replay", "Stands", "Told", "run_again", "run_in_part", "run_step"]

_TURNS = 10
"""Turns of the event loop that a coroutine has, after it began or got an answer, to come to its next wait."""
_TIE_S = 1e-6
"""How much earlier, or later, than they came answers come: else one and a timer may be due at the same moment."""
_OWN_THREADS_S = 2.0
"""Real time that threads of users have, in a test whose clock leaps over waits."""
FINISHES: Final = "epoch.finish()"
"""Among what is told: the job is to end with this epoch, 1.0, or not."""
Told = tuple[str, float | None, float | None]
"""What was told of an epoch: its name, what the task told, and what it told when the epoch was run again."""


class Stands(Exception):
    """A step, by its name, that ended and does not when it is run again."""


@dataclass(frozen=True, slots=True)
class Again:
    """What came of an epoch that was run again.

    Attributes:
        differing: what it put, sent, or answered otherwise, and which state it left otherwise, in words.
        state: its state after it.
        numbers: what it reported.
        finishing: whether it finished the job.
        stands: it did not come to its end.
        failed: code raised that ran into other code.
    """

    differing: list[str]
    state: Fields
    numbers: Mapping[str, float]
    finishing: bool
    stands: bool = False
    failed: bool = False

    def told(self, what: str) -> float | None:
        return _told(self).get(what)

    def told_unlike(self, recording: Recording) -> list[Told]:
        """What it reported otherwise, and whether it finished the job otherwise."""
        before, now = _told(recording), _told(self)
        told = [(what, before.get(what), now.get(what)) for what in before | now]
        return [(what, one, other) for what, one, other in told if one != other and not (one != one and other != other)]


def _told(work: Recording | Again) -> dict[str, float]:
    return {f"reported {name!r}": number for name, number in work.numbers.items()} | {FINISHES: float(work.finishing)}


async def run_again(twin: Replica, after: Fields, recording: Recording, stamp: Stamp, *, late: bool = False) -> Again:
    """Runs the epoch on a twin, with the same inputs.

    Args:
        after: the state after the epoch, as it was.
        late: answers come after what else was due at the same moment, and not before.

    Raises:
        UserCodeError: it failed, where no coroutines ran into each other.
        Stands: it did not come to its end.
    """
    work, by_name = await _composed(twin, recording, stamp)
    failed: list[str] = []
    try:
        await _run(work, by_name, late=late)
    except UserCodeError as error:
        if not recording.interleaved:
            raise
        failed.append(f"{error.where!r} fails: {error}")
    await work.quiet()
    found = await fields_of(twin)
    differing = [*failed, *work.differing(), *(f"state {name!r}" for name in after if after[name] != found.get(name))]
    return Again(differing, found, work.numbers, work.finishing, failed=bool(failed))


async def run_in_part(twin: Replica, recording: Recording, stamp: Stamp) -> None:
    """Runs the epoch on a twin up to its sync points, as where it starts again."""
    work, by_name = await _composed(twin, recording, stamp)
    try:
        await _run(work, by_name, in_part=True)
    except UserCodeError:
        if not recording.interleaved:
            raise
    await work.quiet()


async def _composed(twin: Replica, recording: Recording, stamp: Stamp) -> tuple[Replay, dict[str, Processor]]:
    work = Replay(twin, recording, stamp)
    work.composing = composition = Composition(twin.task, stamp.epoch)
    await twin.actor.call("compose", twin.user_task.compose, Epoch(work, "compose"))
    work.composing = None
    return work, {processor.name: processor for processor in composition.graph().processors}


async def _run(work: Replay, by_name: dict[str, Processor], *, in_part: bool = False, late: bool = False) -> None:
    """Runs the steps. Raises Stands where one does not end."""
    recording, moments = work.recording, work.recording.moments
    if in_part:
        moments = list(itertools.takewhile(lambda moment: not _begins_sync(recording, moment), moments))
    if recording.answers or recording.interleaved:
        await _run_in_order(work, moments, by_name, _TIE_S if late else -_TIE_S)
        return
    for moment in moments:
        if moment[0] == "began":
            step = recording.steps[moment[1]]
            if work.fresh.threads.in_step:
                await _run_to_end(work, step, by_name)
            else:  # it may compute for as long as it did
                await run_step(work, step, by_name)


async def _run_to_end(work: Replay, step: Step, by_name: dict[str, Processor]) -> None:
    running = asyncio.create_task(run_step(work, step, by_name))
    try:
        if not await _ends(running, work.fresh.job.settings.cancel_s):
            raise Stands(step.called)
        running.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _begins_sync(recording: Recording, moment: Moment) -> bool:
    if moment[0] != "began":
        return False
    processor = recording.steps[moment[1]].processor
    return processor is not None and processor.sync


async def _run_in_order(work: Replay, moments: list[Moment], by_name: dict[str, Processor], later_s: float) -> None:
    """Runs steps of which some may go on beside others: they begin, get answers and end when they did.

    Args:
        later_s: how much later than they did answers come.
    """
    loop, limit_s = asyncio.get_running_loop(), work.fresh.job.settings.cancel_s
    running: dict[int, asyncio.Task[None]] = {}
    shift_s = loop.time() - moments[0][2] if moments else 0.0
    work.gate()
    try:
        for moment in moments:
            at = moment[2] + shift_s + (later_s if moment[0] == "answered" else 0.0)
            if (ahead_s := at - loop.time()) > 0:
                await asyncio.sleep(ahead_s)  # what code does may rest on which answers are there by then
            match moment:
                case "answered", key, _:
                    work.answer(key)
                case "began", step, _:
                    running[step] = asyncio.create_task(run_step(work, work.recording.steps[step], by_name))
                case "ended", step, _:
                    if not await _ends(running[step], limit_s):
                        work.open()  # what comes out differently may wait for another answer
                        if not await _ends(running[step], limit_s):
                            raise Stands(work.recording.steps[step].called)
                    running.pop(step).result()
                    continue
            for _ in range(_TURNS):
                await asyncio.sleep(0)
    finally:
        work.end()
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)


async def _ends(task: asyncio.Task[None], limit_s: float) -> bool:
    """Whether it ends in time. In a test, whose clock leaps over waits, what runs beside it takes real time."""
    until = time.monotonic() + _OWN_THREADS_S
    while not (await asyncio.wait([task], timeout=limit_s))[0]:
        if time.monotonic() >= until:
            return False
    return True


async def run_step(work: Replay, step: Step, by_name: dict[str, Processor]) -> None:
    """Runs one piece of user code with what it was given."""
    fresh = work.fresh
    if step.processor is None:
        assert step.payload is not None
        function = fresh.user_task.on_flag if step.method == "on_flag" else getattr(fresh.user_task, step.method)
        payload = await fresh.arrived(step.payload)
        answer = await fresh.actor.call(step.called, function, Epoch(work, step.where), step.sender, payload)
        if step.method != "on_flag":
            work.answered[step.where] = await seen(fresh, lambda: encode(answer, what="").digest)
        return
    processor = by_name.get(step.processor.name)
    if processor is None:
        return  # compose came out differently, which what was not put will show
    inputs = Inputs(work, processor, work.recording.items)
    outputs = Outputs(work, processor, inputs)
    if processor.sync:
        await work.quiet()
    epoch, alone = Epoch(work, step.where, sync=processor.sync), not processor.parallel
    await fresh.actor.call(step.where, processor.compute, epoch, inputs, outputs, alone=alone)
    await fresh.actor.call(step.where, outputs.close)


class Replay:
    """`taskgraph.epoch.Work` for a replay: inputs and answers come from the recording, outputs are compared."""

    def __init__(self, fresh: Replica, recording: Recording, stamp: Stamp) -> None:
        self.recording = recording
        self.task = fresh.task
        self.number = stamp.epoch
        self.attempt = stamp.attempt + 1  # as where it starts again
        self.last = fresh.job.epochs is not None and stamp.epoch + 1 >= fresh.job.epochs
        self.seed = fresh.job.seed
        self.cancelled = False
        self.scratch = Scratch()
        self.device = fresh.device
        self.composing: Composition | None = None
        self.digests: dict[tuple[str, int], bytes] = {}
        self.answered: dict[str, bytes] = {}
        self.numbers: dict[str, float] = {}
        self.finishing = False
        self.fresh = fresh
        self._flagged: set[tuple[int, bytes]] = set()
        self._counts: dict[tuple[str, int, str], int] = {}
        self._alike: dict[tuple[str, int, str, bytes], int] = {}
        self._holds: list[concurrent.futures.Future[None]] = []
        self._lock = threading.Lock()  # of what requests wait for: threads of users send them, too
        self._known: set[RequestKey] | None = None  # whose answers are there; None: all
        self._waiting: dict[RequestKey, concurrent.futures.Future[Encoded]] = {}

    def differing(self) -> list[str]:
        """What was put, sent and answered otherwise, in words."""
        recording = self.recording
        found = [
            f"{tag!r} to task {to}"
            for (tag, to), value in recording.puts.items()
            if self.digests.get((tag, to)) != value.digest
        ]
        for where, digest in recording.answered.items():
            if self.answered.get(where) != digest:
                method, sender, _ = where.rsplit("/", 2)
                found.append(f"the answer of {method!r} to task {sender}")
        asked = {alike: len(counts) for alike, counts in recording.asked.items()}
        sent = {alike for alike in asked.keys() | self._alike.keys() if asked.get(alike) != self._alike.get(alike)}
        found += sorted({f"the request {method!r} to task {to}" for _, to, method, _ in sent})
        return found + sorted({f"the flag to task {to}" for to, _ in recording.flagged ^ self._flagged})

    # -- when answers come ------------------------------------------------------------------------

    def gate(self) -> None:
        """Answers come when `answer` says so, and not at once."""
        self._known = set()

    def answer(self, key: RequestKey) -> None:
        with self._lock:
            if self._known is not None:
                self._known.add(key)
            future = self._waiting.pop(key, None)
        if future is not None and not future.done():  # a timeout may have cancelled it
            future.set_result(self.recording.answers[key])

    def open(self) -> None:
        """All answers are there from now on."""
        for key in self._ungated():
            self.answer(key)

    def end(self) -> None:
        """Nobody waits for an answer any more."""
        for key in self._ungated():
            if not (future := self._waiting.pop(key)).done():
                future.set_exception(AttemptEnded(held=True))

    def _ungated(self) -> list[RequestKey]:
        """Requests that wait; none will from now on."""
        with self._lock:
            self._known = None
            return list(self._waiting)

    # -- Work -------------------------------------------------------------------------------------

    def neighbors(self, link: str) -> tuple[int, ...]:
        return self.fresh.topology.neighbors(link, self.task, self.fresh.job.tasks, self.number)

    def links(self) -> tuple[str, ...]:
        return tuple(self.fresh.topology)

    def tasks(self) -> int:
        return self.fresh.job.tasks

    def allocate(self, nbytes: int) -> Block | None:
        return None  # only digests are compared

    def put(self, tag: str, consumers: tuple[int, ...], value: Encoded) -> None:
        self.digests |= {(tag, consumer): value.digest for consumer in consumers}

    def flag(self, where: str, to: tuple[int, ...], value: Encoded) -> None:
        self._flagged |= {(task, value.digest) for task in to}  # what it led to elsewhere is in the recording

    def request(self, where: str, to: int, method: str, value: Encoded) -> concurrent.futures.Future[Encoded]:
        future: concurrent.futures.Future[Encoded] = concurrent.futures.Future()
        with self._lock:
            key = self._key(where, to, method, value)
            answer = self.recording.answers.get(key)
            if answer is not None and self._known is not None and key not in self._known:
                self._waiting[key] = future
                return future
        if answer is None:
            future.set_exception(
                StateError(
                    f"task {self.task}, epoch {self.number}: replayed from its snapshot, {in_words(where)} sent a "
                    f"request {method!r} to task {to} that it did not send before: snapshot() forgets state, or the "
                    f"task is not deterministic"
                )
            )
        else:
            future.set_result(answer)
        return future

    def _key(self, where: str, to: int, method: str, value: Encoded) -> RequestKey:
        number = self._counts[(where, to, method)] = self._counts.get((where, to, method), 0) + 1
        # Of coroutines that each send one request after another, the second of one may come before the first of
        # another, as it did not before. So what is sent tells more than in which order.
        alike = (where, to, method, value.digest)
        nth = self._alike[alike] = self._alike.get(alike, 0) + 1
        if nth <= len(asked := self.recording.asked.get(alike, ())):
            number = asked[nth - 1]
        return (where, to, method, number)

    def wait_in_thread(self, future: concurrent.futures.Future[Encoded], timeout_s: float | None) -> Encoded:
        return future.result() if future.done() else self.fresh.actor.wait_in_thread(future, timeout_s)

    def hold(self, where: str, why: str) -> Callable[[], None]:
        released: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._holds.append(released)

        def release() -> None:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # twice is no error
                released.set_result(None)

        return release

    async def quiet(self) -> None:
        """Waits for what coroutines and threads of the user's do under a hold: sync points came after it.

        One that came out differently may never end, as the comparison shows: it gets as long as a restart would wait.
        """
        held = [asyncio.wrap_future(released) for released in self._holds]
        until = time.monotonic() + _OWN_THREADS_S
        while held:
            await asyncio.wait(held, timeout=self.fresh.job.settings.cancel_s)
            held = [released for released in held if not released.done()] if time.monotonic() < until else []

    def report(self, numbers: dict[str, float]) -> None:
        self.numbers |= numbers

    def finish(self) -> None:
        self.finishing = True
