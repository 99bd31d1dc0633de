"""Strict mode: every epoch is watched, and replayed from its snapshot on a fresh object.

Two mistakes of a task show only after a failure, and then as wrong numbers: state that changes outside a sync point,
and state that `snapshot()` forgets. Strict mode finds both without a failure: it compares the state before and after
every processor and handler, and after the epoch it builds the task anew, restores the boundary, runs the same code
with the same inputs, and compares what comes out; after the last epoch it compares what `result()` returns. A third
one shows without a failure, and as wrong numbers, too: what `setup()` made of the state, a view of it say, is cut off
from it when boundary 0 is restored, which every primary does before epoch 0. So the first epochs also run on an object
as `setup` left it, which was not restored. What is marked `@tg.stateless` it runs before it restores anything, where
it must do the same and leave the object as it was: epochs in flight rest on that.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol, TypeVar

from taskgraph.channels import Inputs, Outputs
from taskgraph.epoch import Epoch, Scratch
from taskgraph.errors import StateError, class_name
from taskgraph.graph.blocks import Block
from taskgraph.graph.compose import Composition, Processor
from taskgraph.graph.values import encode, separate, untouched, verify
from taskgraph.node.epochs.differing import equal_unlike, made_of_state, padding_of, shared_state
from taskgraph.node.epochs.given import Given
from taskgraph.node.epochs.twins import BY_NODE
from taskgraph.node.replica import Replica, encode_fields, named_fields
from taskgraph.node.usercode.coroutines import is_async
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.protocol.deviceloss import device_error
from taskgraph.protocol.messages import Encoded, EncodedOnDevice, Stamp
from taskgraph.shape import is_stateless
from taskgraph.task import Task

__all__ = ["Recording", "check_as_left", "check_replay", "check_result", "left_by", "seen"]

R = TypeVar("R")

Fields = dict[str, bytes]
_PURE_CALLS = 4
"""So many calls of a pure handler are looked at in an epoch: all of `epoch.scratch` is, before and after each."""
_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
"""Types of what cannot travel and is no state."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One piece of user code that ran: a processor, or a handler with what it was given."""

    processor: Processor | None
    where: str
    method: str = ""
    sender: int = 0
    payload: Encoded | None = None


class Recording:
    """What one task did in one attempt, and whether its state stayed as it was until the sync points."""

    def __init__(self, replica: Replica, stamp: Stamp) -> None:
        self._replica = replica
        self._stamp = stamp
        self.before: Fields = {}
        self.composed: tuple[Processor, ...] = ()
        self.steps: list[_Step] = []
        self.answers: dict[tuple[str, int, str, int], Encoded] = {}
        self.asked: dict[tuple[str, int, str, bytes], list[int]] = {}  # by payload, which of its kind each request was
        self.items: dict[tuple[str, int], Encoded] = {}
        self.puts: dict[tuple[str, int], Encoded] = {}
        self.filled: dict[tuple[str, int], str] = {}  # by whom: what was computed into the memory that is sent
        self.left: dict[str, tuple[Fields, Fields]] = {}  # processor -> what there was before and after it, but items
        self._open = 0
        self.interleaved = False
        self._written: Given | None = None
        self._looked: Counter[str] = Counter()

    def looks_at(self, method: str) -> bool:
        """Whether a call of this pure handler is looked at: the first ones are, which tell what it does."""
        self._looked[method] += 1
        return self._looked[method] <= _PURE_CALLS

    async def begin(self) -> None:
        """The epoch begins: the state is the boundary's."""
        self.before = await fields_of(self._replica)

    def started(self, where: str, processor: Processor | None = None, **given: Any) -> None:
        """User code starts."""
        self.interleaved |= self._open > 0
        self._open += 1
        self.steps.append(_Step(processor, where, **given))

    async def finished(self, where: str, *, sync: bool = False, looked: bool = False) -> None:
        """User code returned; only a sync point may have changed the state.

        Args:
            looked: what `watched` gave was called.

        Raises:
            StateError: something else did, or what others read, too, was written to.
        """
        self._open -= 1
        await self._check_given(where, looked)
        await seen(self._replica, partial(self._check_filled, where))
        if not sync:
            await self.check(where)

    async def given(self, processor: Processor) -> Mapping[tuple[str, int], Encoded]:
        """The items as they are given to a processor.

        Others may read, and look at, the same memory before it is looked at what a coroutine did: one is given a copy.
        """
        items = self.items
        for tag, producers in processor.inbound.items():
            for producer in producers:
                value = self.items[(tag, producer)]
                if type(value) is EncodedOnDevice:
                    own = value
                    if is_async(processor.compute):
                        own = await seen(self._replica, partial(separate, value))
                        items = {**items, (tag, producer): own}
                    self._replica.given.append(Given(own, tag, producer, processor.name, self._stamp.epoch))
        return items

    def closes(self, name: str, outputs: Outputs) -> None:
        """Where a processor ran, right after it: what it filled in place is sent, and nobody may write to it then."""
        self.filled |= dict.fromkeys(outputs.filled, name)
        outputs.close()

    def watched(self, processor: Processor, close: Callable[[], None]) -> Callable[[], None]:
        """What to do where a processor ran, right after it: `close`, and a look at what the task was given.

        The first who looks after a write is who wrote, then.
        """
        if not self._replica.given or is_async(processor.compute):
            return close  # what a coroutine did is looked at later: here it would stop the event loop

        def look() -> None:
            close()
            self._look_at_given()

        return look

    def _look_at_given(self) -> None:
        """In a thread, on the task's stream."""
        for given in self._replica.given:
            if self._written is None and not untouched(given.value):
                self._written = given

    async def _check_given(self, where: str, looked: bool) -> None:
        """Raises StateError where user code wrote to what others read, too."""
        replica = self._replica
        if replica.given:
            if not looked:
                await seen(replica, self._look_at_given)
            replica.given = [given for given in replica.given if given.viewed]
        if (given := self._written) is not None:
            raise StateError(
                f"task {replica.task}, epoch {self._stamp.epoch}: {where!r} wrote to what {given.tag!r} of task "
                f"{given.producer} brought to {given.processor!r} in epoch {given.epoch}: an array on a device is the "
                f"memory that was put, and others read it, too; write to a copy of it"
            )

    def _check_filled(self, where: str) -> None:
        """Raises StateError where what was sent was written to: a view that user code kept of it is still writable."""
        for channel, processor in self.filled.items():
            value = self.puts.get(channel)
            if value is not None and value.buffers and not verify(value):
                raise StateError(
                    f"task {self._replica.task}, epoch {self._stamp.epoch}: what {processor!r} sent as {channel[0]!r} "
                    f"was written to after that, when {where!r} had run at the latest: the array of outs.empty, and "
                    f"every view of it, is the memory that others read; do not keep it, write to a copy"
                )

    async def check(self, where: str) -> None:
        """Raises StateError where the state is not what it was when the epoch began."""
        if not self.before:
            return
        if changed := _changed(self.before, await fields_of(self._replica)):
            raise StateError(
                f"task {self._replica.task}, epoch {self._stamp.epoch}: {where!r} changed state "
                f"({', '.join(changed)}) outside a sync point; change state only in a processor without outbound "
                f"channels, and hand values there through epoch.scratch"
            )


async def fields_of(replica: Replica) -> Fields:
    """Digests of what `snapshot()` returns, by name where it is a dict."""
    if not replica.stateful:
        return {}
    task = replica.user_task

    def take() -> Fields:
        return {name: value.digest for name, value in encode_fields(task.snapshot(), replica.task).items()}

    return await replica.actor.call("snapshot", take)


async def check_replay(replica: Replica, fresh: Replica, boundary: Encoded, recording: Recording, stamp: Stamp) -> None:
    """Runs the epoch again on `fresh`, as `setup` left it, restored from `boundary`; compares what it puts, and its
    state after it.

    Raises:
        StateError: something came out differently: state that `snapshot()` does not hold, or that is not restored.
    """
    if fresh.shape.in_flight:
        await _check_stateless(replica, fresh, recording, stamp)
    await fresh.restore(boundary)
    before = await fields_of(replica)
    differing, after = await _run_again(fresh, before, recording, stamp)
    if differing:
        mine = vars(replica.user_task)
        suspects = await _suspects(replica, fresh, before)
        if suspects:
            hint = f"; attributes that differ and are not in the snapshot: {', '.join(suspects)}"
        elif unknown := await _incomparable(replica, before):
            hint = f"; it may be an attribute that is not in the snapshot and cannot travel: {', '.join(unknown[:5])}"
        else:
            hint = ""
        why = (
            f"snapshot() forgets state, or the task is not deterministic{hint}; add what the task remembers to "
            f"`state=[...]`, and draw random numbers from epoch.rng{'' if suspects else padding_of(mine)}"
        )
        if unlike := await _encoded_unlike(replica, fresh, differing):
            why = unlike
        elif not suspects and (shared := shared_state(mine, before, _changed(before, after))):
            one, other, kind = shared
            why = (
                f"self.{one} and self.{other} are two attributes of state that are one {kind}, and two once they are "
                f"restored; give each its own, as in self.{one} = self.{other}.copy()"
            )
        raise StateError(
            f"task {replica.task}, epoch {stamp.epoch}: replayed from its snapshot, the epoch came out differently "
            f"({', '.join(differing[:5])}): {why}"
        )


async def check_as_left(replica: Replica, twin: Replica, recording: Recording, stamp: Stamp) -> StateError | None:
    """Runs the epoch again on `twin`, as `setup` or the epoch before left it: it does what the restored object did.

    Returns:
        The error, where something came out differently. Nothing is said where `setup` makes another state each time.

    Raises:
        UserCodeError: it cannot tell: what `restore` makes it may lack.
    """
    if not recording.before or recording.before != await fields_of(twin):
        return None
    shared = made_of_state(vars(twin.user_task), recording.before)
    differing, _ = await _run_again(twin, await fields_of(replica), recording, stamp)
    if not differing:
        return None
    hint = f" (here: {', '.join(shared[:5])})" if shared else ""
    why = await _encoded_unlike(replica, twin, differing) or (
        f"before epoch 0 every primary restores the state that setup() made, as after a failure, and so cuts off what "
        f"setup() made of it: a view, an optimizer that holds it, the same array under another name{hint}; make that "
        f"in restore(), after super().restore(state){'' if shared else padding_of(vars(twin.user_task))}"
    )
    return StateError(
        f"task {replica.task}, epoch {stamp.epoch}: on the object as setup() left it, the epoch comes out differently "
        f"({', '.join(differing[:5])}): {why}"
    )


async def _run_again(twin: Replica, after: Fields, recording: Recording, stamp: Stamp) -> tuple[list[str], Fields]:
    """Runs the epoch on a twin, with the same inputs.

    Args:
        after: the state after the epoch, as it was.

    Returns:
        What it put otherwise, and which state it left otherwise; its state after it.
    """
    work = _Replay(twin, recording, stamp)
    work.composing = Composition(twin.task, stamp.epoch)
    await twin.actor.call("compose", twin.user_task.compose, Epoch(work, "compose"))
    composition, work.composing = work.composing, None
    by_name = {processor.name: processor for processor in composition.graph().processors}
    for step in recording.steps:
        await _run_step(twin, work, step, by_name)
    differing = [
        f"{tag!r} to task {to}"
        for (tag, to), value in recording.puts.items()
        if work.digests.get((tag, to)) != value.digest
    ]
    found = await fields_of(twin)
    return differing + [f"state {name!r}" for name in after if after[name] != found.get(name)], found


async def _encoded_unlike(replica: Replica, twin: Replica, differing: list[str]) -> str:
    """What to say where all that differs is state that is equal, and encoded otherwise; else nothing."""

    def values_of(task: Task) -> dict[str, object]:
        return {f"state {name!r}": value for name, value in named_fields(task.snapshot()).items()}

    mine = await replica.actor.call("snapshot", values_of, replica.user_task)
    others = await twin.actor.call("snapshot", values_of, twin.user_task)

    def look() -> bool:
        return all(name in mine and name in others and equal_unlike(mine[name], others[name]) for name in differing)

    if not await seen(replica, look):
        return ""
    kinds = ", ".join(dict.fromkeys(class_name(type(mine[name])) for name in differing))
    return (
        f"it is equal, and encoded otherwise: a codec, that of {kinds} or of something in there, gives other bytes for "
        f"equal values, as one of pickle does, which tells what is one object; let it encode the parts, or pickle with "
        f"Pickler.fast = True"
    )


async def check_result(replica: Replica, fresh: Replica, boundary: Encoded, value: Encoded | None) -> None:
    """Asks `fresh`, as `setup` left it, restored from the last boundary, for its result; compares it with `value`.

    Raises:
        StateError: it is another one, and attributes that `snapshot()` does not hold differ. Without these it may well
            be another one each time, as one that tells how long something took.
    """
    await fresh.restore(boundary)
    try:
        other = await fresh.result()
    except UserCodeError as error:
        what = f"fails ({error})"
    else:
        if (other.digest if other is not None else None) == (value.digest if value is not None else None):
            return
        what = "is another one"
    if suspects := await _suspects(replica, fresh, await fields_of(replica)):
        raise StateError(
            f"task {replica.task}, 'result': on an object restored from the last snapshot, as after a failure, it "
            f"{what}: snapshot() forgets state; attributes that differ and are not in the snapshot: "
            f"{', '.join(suspects)}; add what the task remembers to `state=[...]`"
        )


async def _check_stateless(replica: Replica, fresh: Replica, recording: Recording, stamp: Stamp) -> None:
    """Runs `compose` and what may run early, on the object as `setup` made it.

    Raises:
        StateError: it came out differently, failed, or changed the object.
    """
    work = _Replay(fresh, recording, stamp)
    work.composing = composition = Composition(fresh.task, stamp.epoch)
    compose = fresh.actor.call("compose", fresh.user_task.compose, Epoch(work, "compose"))
    await _stateless(replica, fresh, stamp, "compose", compose)
    work.composing = None
    here = {processor.name: processor for processor in composition.graph().processors}
    if [_graph_of(p) for p in here.values()] != [_graph_of(p) for p in recording.composed]:
        raise await _not_stateless(replica, fresh, stamp, "compose", "declares another graph")
    for step in recording.steps:
        if step.processor is None or not is_stateless(step.processor.compute):
            if step.processor is not None and step.processor.parallel:
                continue  # nobody waits for it
            return  # what follows is not run early
        had = await seen(fresh, partial(left_by, work))
        await _stateless(replica, fresh, stamp, step.where, _run_step(fresh, work, step, here))
        for (tag, to), digest in work.digests.items():
            if recording.puts[(tag, to)].digest != digest:
                raise await _not_stateless(replica, fresh, stamp, step.where, f"puts another {tag!r} to task {to}")
        left, (before, then) = await seen(fresh, partial(left_by, work)), recording.left[step.where]
        # What something beside it left, that is not run here, is not its doing.
        names = {*_changed(had, left), *_changed(before, then)}
        if differing := sorted(name for name in names if left.get(name) != then.get(name)):
            raise await _not_stateless(replica, fresh, stamp, step.where, f"leaves another {differing[0]}")


def _changed(before: Fields, after: Fields) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


async def _stateless(
    replica: Replica, fresh: Replica, stamp: Stamp, where: str, call: Coroutine[Any, Any, object]
) -> None:
    before = await _attributes(fresh)
    try:
        await call
    except UserCodeError as error:
        raise await _not_stateless(replica, fresh, stamp, where, f"fails ({error})") from error
    after = await _attributes(fresh)
    if changed := _changed(before, after):
        raise StateError(
            f"task {replica.task}, epoch {stamp.epoch}: {where!r} is marked @tg.stateless, and changed "
            f"{', '.join(f'self.{name}' for name in changed)}: another epoch may run between this and who reads it; "
            f"hand values on through epoch.scratch, make what stays in setup(), or leave the mark out"
        )


async def _not_stateless(replica: Replica, fresh: Replica, stamp: Stamp, where: str, what: str) -> StateError:
    differing = _changed(await _attributes(fresh), await _attributes(replica))
    hint = f"; since setup() changed: {', '.join(f'self.{name}' for name in differing[:5])}" if differing else ""
    return StateError(
        f"task {replica.task}, epoch {stamp.epoch}: {where!r} is marked @tg.stateless, but on the object as setup() "
        f"makes it, it {what}: it reads what other methods change{hint}; leave the mark out"
    )


def _graph_of(processor: Processor) -> tuple[object, ...]:
    return (processor.name, processor.inbound, processor.outbound, processor.parallel)


async def _attributes(replica: Replica) -> Fields:
    """Digests of the user object's attributes, as far as they can travel."""
    found = {name: v for name, v in vars(replica.user_task).items() if name not in BY_NODE}
    return await seen(replica, partial(_digests, found))


async def seen(replica: Replica, look: Callable[[], R]) -> R:
    """What a look at values of user code finds. It waits for a device, if there is one: in a thread, then."""
    return look() if replica.device is None else await replica.actor.call("strict mode", look, alone=False)


def _digests(values: Mapping[str, object]) -> Fields:
    digests = {}
    for name, value in values.items():
        try:
            digests[name] = encode(value, what="").digest
        except Exception as error:  # a codec, or a metaclass, raises what it likes where a value cannot travel
            if isinstance(error, MemoryError) or device_error(error) is not None:
                raise
    return digests


class _Leaves(Protocol):
    """What an epoch's processors hand on, besides what they put: of an attempt, or of its replay."""

    @property
    def scratch(self) -> Scratch: ...
    @property
    def numbers(self) -> Mapping[str, float]: ...
    @property
    def finishing(self) -> bool: ...


def left_by(work: _Leaves) -> Fields:
    """Digests of what an epoch's processors hand on so far, besides what they put."""
    left: dict[str, object] = {f"epoch.scratch.{name}": value for name, value in vars(work.scratch).items()}
    left |= {f"reported {name!r}": number for name, number in work.numbers.items()}
    if work.finishing:
        left["epoch.finish()"] = True
    return _digests(left)


async def _run_step(fresh: Replica, work: _Replay, step: _Step, by_name: dict[str, Processor]) -> None:
    if step.processor is None:
        assert step.payload is not None
        function = fresh.user_task.on_flag if step.method == "on_flag" else getattr(fresh.user_task, step.method)
        payload = await fresh.arrived(step.payload)
        await fresh.actor.call(step.where, function, Epoch(work, step.where), step.sender, payload)
        return
    processor = by_name.get(step.processor.name)
    if processor is None:
        return  # compose came out differently, which what was not put will show
    inputs = Inputs(work, processor, recording_items(work))
    outputs = Outputs(work, processor, inputs)
    if processor.sync:
        await work.quiet()
    await fresh.actor.call(step.where, processor.compute, Epoch(work, step.where, sync=processor.sync), inputs, outputs)
    await fresh.actor.call(step.where, outputs.close)


def recording_items(work: _Replay) -> dict[tuple[str, int], Encoded]:
    return work.recording.items


async def _suspects(replica: Replica, fresh: Replica, held: Fields) -> list[str]:
    """Attributes that the snapshot has not `held`, and that differ between the object that ran on and that restored."""
    found = set(_changed(await _attributes(fresh), await _attributes(replica)))
    mine, others = vars(replica.user_task), vars(fresh.user_task)
    for name, value in mine.items():  # what is likely to be forgotten, and cannot travel
        if issubclass(type(value), set | frozenset) and issubclass(type(others.get(name)), set | frozenset):
            with contextlib.suppress(Exception):  # users' elements compare as they like
                if value != others[name]:
                    found.add(name)
    return sorted(found - held.keys())


async def _incomparable(replica: Replica, held: Fields) -> list[str]:
    """Attributes that the snapshot has not `held`, and that cannot travel; a set may be equal after the replay only."""
    known = await _attributes(replica)
    return [
        f"{name} (of type {class_name(type(value))})"
        for name, value in sorted(vars(replica.user_task).items())
        if name not in (*known, *held, *BY_NODE) and not issubclass(type(value), _CODE)
    ]


class _Replay:
    """`taskgraph.epoch.Work` for a replay: inputs and answers come from the recording, outputs are compared."""

    def __init__(self, fresh: Replica, recording: Recording, stamp: Stamp) -> None:
        self.recording = recording
        self.task = fresh.task
        self.number = stamp.epoch
        self.attempt = stamp.attempt
        self.last = fresh.job.epochs is not None and stamp.epoch + 1 >= fresh.job.epochs
        self.seed = fresh.job.seed
        self.cancelled = False
        self.scratch = Scratch()
        self.device = fresh.device
        self.composing: Composition | None = None
        self.digests: dict[tuple[str, int], bytes] = {}
        self.numbers: dict[str, float] = {}
        self.finishing = False
        self._fresh = fresh
        self._counts: dict[tuple[str, int, str], int] = {}
        self._alike: dict[tuple[str, int, str, bytes], int] = {}
        self._holds: list[concurrent.futures.Future[None]] = []

    def neighbors(self, link: str) -> tuple[int, ...]:
        return self._fresh.topology.neighbors(link, self.task, self._fresh.job.tasks, self.number)

    def links(self) -> tuple[str, ...]:
        return tuple(self._fresh.topology)

    def tasks(self) -> int:
        return self._fresh.job.tasks

    def allocate(self, nbytes: int) -> Block | None:
        return None  # only digests are compared

    def put(self, tag: str, consumers: tuple[int, ...], value: Encoded) -> None:
        self.digests |= {(tag, consumer): value.digest for consumer in consumers}

    def flag(self, where: str, to: tuple[int, ...], value: Encoded) -> None:
        pass  # what it led to elsewhere is in the recording

    def request(self, where: str, to: int, method: str, value: Encoded) -> concurrent.futures.Future[Encoded]:
        number = self._counts[(where, to, method)] = self._counts.get((where, to, method), 0) + 1
        # All answers are there at once: of coroutines that each send one request after another, the second of one may
        # come before the first of another, as it did not before. So what is sent tells more than in which order.
        alike = (where, to, method, value.digest)
        nth = self._alike[alike] = self._alike.get(alike, 0) + 1
        if nth <= len(asked := self.recording.asked.get(alike, ())):
            number = asked[nth - 1]
        future: concurrent.futures.Future[Encoded] = concurrent.futures.Future()
        answer = self.recording.answers.get((where, to, method, number))
        if answer is None:
            future.set_exception(
                StateError(
                    f"task {self.task}, epoch {self.number}: replayed from its snapshot, {where!r} sent a request "
                    f"{method!r} to task {to} that it did not send before: snapshot() forgets state"
                )
            )
        else:
            future.set_result(answer)
        return future

    def wait_in_thread(self, future: concurrent.futures.Future[Encoded], timeout_s: float | None) -> Encoded:
        return future.result(timeout_s)

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
        if held:
            await asyncio.wait(held, timeout=self._fresh.job.settings.cancel_s)

    def report(self, where: str, numbers: dict[str, float]) -> None:
        self.numbers |= numbers

    def finish(self, where: str) -> None:
        self.finishing = True
