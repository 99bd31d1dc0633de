"""Strict mode: runs a recorded epoch again on another object of the task.

The steps run one after another, in the order in which they began. Inputs and replies come from the recording, a reply
after the same time as in the epoch. The items, messages and replies of the task are compared.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from taskgraph.channels import Inputs, Outputs
from taskgraph.epoch import AttemptEnded, Epoch, MapCall, QueueState, Scratch, place_text
from taskgraph.errors import StateError
from taskgraph.graph.blocks import Block
from taskgraph.graph.compose import Composition, Processor
from taskgraph.graph.values import decode, encode
from taskgraph.node.epochs.differing import Digests, attributes_of, changed_names, read_values, state_of
from taskgraph.node.epochs.recording import RecordedCall, RecordedReply, Recording, RequestKind
from taskgraph.node.replica import Replica
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.protocol.boundaries import Boundary
from taskgraph.protocol.messages import Encoded
from taskgraph.queues.composing import map_pieces, queue_state
from taskgraph.queues.pieces import PieceResult
from taskgraph.queues.plan import DEAL
from taskgraph.tables.client import open_table
from taskgraph.tables.interface import EpochTable

__all__ = ["Replay", "ReplayResult", "differing_reports", "replay", "replay_from_snapshot"]

_THREADS_S = 2.0
"""Real seconds that user threads have in a test, in which the clock jumps over waits."""


@dataclass(slots=True)
class ReplayResult:
    """How a replay differs from the recorded epoch, and which state and numbers it ended with.

    Attributes:
        differing: texts that name the items, messages, replies and state that differ.
        state: digests of the state after the epoch.
        reports: the reported numbers; "epoch.finish()" is 1 if the task called it.
        left: names of attributes that a first try changed and `restore` did not reset; [] without a first try.
    """

    differing: list[str]
    state: Digests = field(default_factory=dict)
    reports: Mapping[str, float] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


class _StepNeverEnds(Exception):
    """A call does not end in the replay, though it ended in the recorded epoch."""


async def replay_from_snapshot(
    fresh: Replica, recording: Recording, boundary: Boundary, after: Digests, *, first_try: bool = False
) -> ReplayResult:
    """Restores a fresh object from the boundary and runs the epoch on it.

    Args:
        after: digests of the state after the recorded epoch.
        first_try: runs the epoch up to its sync points and restores again before the replay, as a restart does.

    Raises:
        UserCodeError: user code failed.
    """
    left: list[str] = []
    try:
        await fresh.restore(boundary)
        if first_try:
            restored = await attributes_of(fresh)
            with contextlib.suppress(_StepNeverEnds):  # if so, the second run does not end either
                await _run(fresh, recording, first_try=True)
            await fresh.restore(boundary)
            left = changed_names(restored, await attributes_of(fresh))
        found = await replay(fresh, recording, after)
    except UserCodeError as error:
        error.traceback_text += (
            "\nThis was raised where strict mode runs the epoch again, on an object that was made anew and restored, "
            "as after a failure.\n"
        )
        raise
    found.left = left
    return found


async def replay(fresh: Replica, recording: Recording, after: Digests) -> ReplayResult:
    """Runs a recorded epoch again on a task object as it is, without `restore`; returns what differs.

    `after` has the digests of the state after the epoch when it was recorded.
    """
    try:
        work = await _run(fresh, recording)
    except _StepNeverEnds as never:
        return ReplayResult([f"{str(never)!r} does not end"], after, _reports(recording))
    state = await state_of(fresh)
    differing = work.differing() + [f"state {name!r}" for name in after if after[name] != state.get(name)]
    return ReplayResult(differing, state, _reports(work))


def _reports(work: Recording | Replay) -> dict[str, float]:
    """Returns {name for errors: number} of what a task reported; "epoch.finish()" is 1 if the task called it."""
    reports = {f"reported {name!r}": number for name, number in work.numbers.items()}
    return reports | {"epoch.finish()": 1.0} if work.finishing else reports


def differing_reports(recording: Recording, replayed: ReplayResult) -> dict[str, tuple[float | None, float | None]]:
    """Returns {name: (recorded number, number in the replay)} of the reports that differ."""
    one, other = _reports(recording), replayed.reports
    pairs = {name: (one.get(name), other.get(name)) for name in {**one, **other}}
    return {name: (a, b) for name, (a, b) in pairs.items() if a != b and (a == a or b == b)}


async def _run(fresh: Replica, recording: Recording, *, first_try: bool = False) -> Replay:
    """Runs the steps of a recorded epoch on `fresh`; with `first_try` those before its first sync point."""
    work = Replay(fresh, recording)
    processors = await work.compose()
    for step in recording.steps:
        if first_try and step.processor is not None and step.processor.sync:
            break
        if fresh.threads.in_step:
            await _run_to_end(work, step, processors)
        else:  # a node's clock is real: the step takes as long as when it was recorded
            await work.run(step, processors)
    await work.wait_until_released()
    return work


async def _run_to_end(work: Replay, step: RecordedCall, processors: Mapping[str, Processor]) -> None:
    """Runs a recorded call in a test; cancels it and raises _StepNeverEnds after `_THREADS_S` of real time."""
    running = asyncio.create_task(work.run(step, processors))
    until = time.monotonic() + _THREADS_S
    try:
        while not (await asyncio.wait([running], timeout=work.fresh.job.settings.cancel_s))[0]:
            if time.monotonic() >= until:
                raise _StepNeverEnds(step.name)
        running.result()
    finally:
        if not running.done():
            work.wake_threads()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


class Replay:
    """`taskgraph.epoch.Work` for a replay: takes inputs and replies from the recording, and notes the outputs."""

    def __init__(self, fresh: Replica, recording: Recording) -> None:
        stamp = recording.stamp
        self.fresh = fresh
        self.task = fresh.task
        self.number = stamp.epoch
        self.attempt = stamp.attempt + 1  # as after a restart
        self.last = fresh.job.epochs is not None and stamp.epoch + 1 >= fresh.job.epochs
        self.seed = fresh.job.seed
        self.cancelled = False
        self.scratch = Scratch()
        self.device = fresh.device
        self.composing: Composition | None = None
        self.digests: dict[tuple[str, int], bytes] = {}
        self.numbers: dict[str, float] = {}
        self.finishing = False
        self._recording = recording
        self._answered: dict[str, bytes] = {}
        self._flags: set[tuple[int, bytes]] = set()
        self._requests: Counter[tuple[RequestKind, bytes]] = Counter()
        self._replies = {kind: list(replies) for kind, replies in recording.replies.items()}
        self._pending: set[concurrent.futures.Future[Encoded]] = set()
        self._holds: list[concurrent.futures.Future[None]] = []
        self._lock = threading.Lock()  # user threads send requests, too
        self._loop_thread = threading.get_ident()

    async def compose(self) -> dict[str, Processor]:
        """Calls `compose` of the fresh object; returns the declared processors by name."""
        self.composing = composition = Composition(self.task, self.number)
        await self.fresh.actor.call("compose", self.fresh.user_task.compose, Epoch(self, "compose"))
        self.composing = None
        return {processor.name: processor for processor in composition.graph().processors}

    async def run(self, step: RecordedCall, processors: Mapping[str, Processor]) -> None:
        """Runs one recorded call of user code with its input; skips a processor that `compose` did not declare now."""
        fresh = self.fresh
        if step.processor is None:
            assert step.payload is not None
            function = getattr(fresh.user_task, step.method)
            payload = await fresh.decode_value(step.payload)
            answer = await fresh.actor.call(step.name, function, Epoch(self, step.where), step.sender, payload)
            if step.method != "on_flag":
                self._answered[step.where] = await read_values(fresh, lambda: encode(answer, what="").digest)
            return
        processor = processors.get(step.processor.name)
        if processor is None:
            return  # `compose` declared other processors: the missing puts will show that
        inputs = Inputs(self, processor, self._recording.items)
        outputs = Outputs(self, processor, inputs)
        if processor.sync:
            await self.wait_until_released()
        epoch, alone = Epoch(self, step.where, sync=processor.sync), not processor.parallel
        await fresh.actor.call(step.where, processor.compute, epoch, inputs, outputs, alone=alone)
        await fresh.actor.call(step.where, outputs.close)

    def differing(self) -> list[str]:
        """Returns texts that name the items, messages and replies that differ from the recording."""
        recording = self._recording
        found = [
            f"{tag!r} to task {to}"
            for (tag, to), value in recording.puts.items()
            if self.digests.get((tag, to)) != value.digest
        ]
        for where, digest in recording.answered.items():
            if self._answered.get(where) != digest:
                method, sender, _ = where.rsplit("/", 2)
                found.append(f"the answer of {method!r} to task {sender}")
        requests = (self._without_pieces(recording.requests) - self._requests) + (self._requests - recording.requests)
        found += sorted({f"the request {method!r} to task {to}" for (_, to, method), _ in requests})
        return found + sorted({f"the flag to task {to}" for to, _ in recording.flags ^ self._flags})

    def _without_pieces(self, requests: Counter[tuple[RequestKind, bytes]]) -> Counter[tuple[RequestKind, bytes]]:
        """Returns the requests without those of maps: pieces that failed, or whose results were dropped, do not run."""
        maps = {where for where, _, method in self._recording.replies if method == DEAL}
        return Counter({sent: count for sent, count in requests.items() if sent[0][0] not in maps})

    # -- Work -------------------------------------------------------------------------------------

    def neighbors(self, link: str, task: int | None = None) -> tuple[int, ...]:
        of = self.task if task is None else task
        return self.fresh.topology.neighbors(link, of, self.fresh.job.tasks, self.number)

    def links(self) -> tuple[str, ...]:
        return tuple(self.fresh.topology)

    def tasks(self) -> int:
        return self.fresh.job.tasks

    def service(self, title: str) -> tuple[int, ...]:
        return self.fresh.job.service(title)

    def table(self, epoch: Epoch, name: str) -> EpochTable:
        return open_table(epoch, name, self.fresh.job)

    def map(self, epoch: Epoch, call: MapCall) -> None:
        map_pieces(epoch, call, self.fresh.job)

    def ask_queue_progress(self, epoch: Epoch, name: str) -> QueueState:
        return queue_state(epoch, name)

    def kept_results(self, tag: str) -> dict[int, PieceResult]:
        return {}

    @property
    def node_name(self) -> str:
        return ""

    def allocate(self, nbytes: int) -> Block | None:
        return None  # only digests are compared

    def run_in_thread(self, function: Callable[[], None]) -> asyncio.Future[None]:
        return self.fresh.threads.run(function)

    def run_beside(self, where: str, function: Callable[[], Any]) -> asyncio.Task[None]:
        return asyncio.create_task(self.fresh.actor.call(where, function, alone=False))

    def go_on_without(self, call: asyncio.Task[None]) -> None:
        raise AssertionError("no other task computes pieces in a replay")

    late_calls = ()

    async def fetch(self, channels: tuple[tuple[str, int], ...]) -> None:
        pass  # the recording has what came

    def supply(self, tag: str, value: Encoded) -> None:
        pass

    def put(self, tag: str, consumers: tuple[int, ...], value: Encoded) -> None:
        self.digests |= {(tag, consumer): value.digest for consumer in consumers}

    def flag(self, where: str, to: tuple[int, ...], value: Encoded) -> None:
        self._flags |= {(task, value.digest) for task in to}

    def request(self, where: str, to: int, method: str, value: Encoded) -> concurrent.futures.Future[Encoded]:
        future: concurrent.futures.Future[Encoded] = concurrent.futures.Future()
        if method == DEAL:  # who computes what differs each time: the last answer says what counts of this task
            answers = reversed(self._replies[(where, to, method)])
            future.set_result(next(answer.value for answer in answers if decode(answer.value).get("over")))
            return future
        with self._lock:
            self._requests[((where, to, method), value.digest)] += 1
            reply = self._take_reply((where, to, method), value.digest)
            if reply is not None:
                self._pending.add(future)
        if reply is not None and threading.get_ident() == self._loop_thread:
            self._reply_later(future, reply)
        elif reply is not None:
            self.fresh.threads.post(self._reply_later, future, reply)
        else:
            future.set_exception(
                StateError(
                    f"task {self.task}, epoch {self.number}: replayed from its snapshot, {place_text(where)} sent a "
                    f"request {method!r} to task {to} that it did not send before: snapshot() forgets state, or the "
                    f"task is not deterministic"
                )
            )
        return future

    def _take_reply(self, kind: RequestKind, asked: bytes) -> RecordedReply | None:
        """Takes the recorded reply to this request; if it differs from all, the first remaining reply of this kind;
        None: none remains.
        """
        replies = self._replies.get(kind, [])
        same = (at for at, reply in enumerate(replies) if reply.asked == asked)
        return replies.pop(next(same, 0)) if replies else None

    def _reply_later(self, future: concurrent.futures.Future[Encoded], reply: RecordedReply) -> None:
        asyncio.get_running_loop().call_later(reply.delay_s, self._reply, future, reply.value)

    def _reply(self, future: concurrent.futures.Future[Encoded], value: Encoded) -> None:
        self._pending.discard(future)
        if not future.done():  # a timeout may have cancelled it
            future.set_result(value)

    def wake_threads(self) -> None:
        """Raises AttemptEnded in threads that still wait for replies."""
        for future in tuple(self._pending):
            if not future.done():
                future.set_exception(AttemptEnded(held=True))

    def wait_in_thread(self, future: concurrent.futures.Future[Encoded], timeout_s: float | None) -> Encoded:
        return future.result() if future.done() else self.fresh.actor.wait_in_thread(future, timeout_s)

    def hold(self, where: str, why: str) -> Callable[[], None]:
        released: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._holds.append(released)

        def release() -> None:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # releasing twice is no error
                released.set_result(None)

        return release

    async def wait_until_released(self) -> None:
        """Waits until user code has released its holds, `cancel_s` or `_THREADS_S` at most: a replay may keep one."""
        held = [asyncio.wrap_future(released) for released in self._holds]
        until = time.monotonic() + _THREADS_S
        while held:
            await asyncio.wait(held, timeout=self.fresh.job.settings.cancel_s)
            held = [released for released in held if not released.done()] if time.monotonic() < until else []

    def report(self, numbers: dict[str, float]) -> None:
        self.numbers |= numbers

    def finish(self) -> None:
        self.finishing = True
