"""Strict mode: every epoch is watched, and replayed from its snapshot on a fresh object.

Two mistakes of a task show only after a failure, and then as wrong numbers: state that changes outside a sync point,
and state that `snapshot()` forgets. Strict mode finds both without a failure: it compares the state before and after
every processor and handler, and after the epoch it builds the task anew, restores the boundary, runs the same code
with the same inputs, and compares what comes out: what it puts, sends and answers, and the state after it. What it
reports, and whether it finishes the job, may rest on a clock, so it is compared where an attribute may be why and two
such objects agree; after the last epoch what `result()` returns is, where it comes out the same twice. A third
one shows without a failure, and as wrong numbers, too: what `setup()` made of the state, a view of it say, is cut off
from it when boundary 0 is restored, which every primary does before epoch 0. So the first epochs also run on an object
as `setup` left it, which was not restored. What is marked `@tg.stateless` it runs before it restores anything, where
it must do the same and leave the object as it was: epochs in flight rest on that.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from taskgraph.epoch import Epoch
from taskgraph.errors import StateError, class_name
from taskgraph.graph.compose import Composition, Processor
from taskgraph.node.epochs.differing import equal_unlike, made_of_state, padding_of, pickled, shared_state
from taskgraph.node.epochs.recording import Fields, Recording, changed, digests, fields_of, left_by, seen
from taskgraph.node.epochs.replaying import FINISHES, Again, Replay, Stands, Told, run_again, run_in_part, run_step
from taskgraph.node.epochs.twins import BY_NODE
from taskgraph.node.replica import Replica, encode_fields, named_fields
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.protocol.messages import Encoded, Stamp
from taskgraph.shape import is_stateless
from taskgraph.task import Task

__all__ = ["WorkedEpoch", "check_result"]

_NUMBERS = (int, float, np.number)
_RESTARTED = 3
"""So many epochs are also begun, restored and run again."""
_WRITABLE = (list, dict, set, bytearray, np.ndarray)
"""Types of what a class may hold that its objects write to, and so share."""
_RANDOM = "the task is not deterministic: draw random numbers from epoch.rng, and add up in a fixed order"
_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
"""Types of what cannot travel and is no state."""


@dataclass(slots=True)
class WorkedEpoch:
    """An epoch that a task worked through, and what it takes to run it again.

    Attributes:
        boundary: the state before it.
        another: makes an object of the task as `setup` leaves it.
        after: the state after it, since a check began.
    """

    replica: Replica
    boundary: Encoded
    recording: Recording
    stamp: Stamp
    another: Callable[[], Awaitable[Replica]]
    after: Fields = field(default_factory=dict)

    async def again(self, twin: Replica, *, starts_again: bool = False, late: bool = False) -> Again:
        """Restores `twin` and runs the epoch on it.

        Args:
            starts_again: it is begun there before.
            late: answers come after what else was due at the same moment.
        """
        recording, stamp = self.recording, self.stamp
        try:
            await twin.restore(self.boundary)
            if starts_again:
                await run_in_part(twin, recording, stamp)
                await twin.restore(self.boundary)
            return await run_again(twin, self.after, recording, stamp, late=late)
        except Stands as where:
            standing = [f"{str(where)!r} does not end"]
            return Again(standing, self.after, recording.numbers, recording.finishing, stands=True)
        except UserCodeError as error:
            error.traceback_text += (
                "\nThis was raised where strict mode runs the epoch again, on an object that was made anew and "
                "restored, as after a failure.\n"
            )
            raise

    async def on_another(self, *, late: bool = False) -> Again:
        twin = await self.another()
        try:
            return await self.again(twin, late=late)
        finally:
            await twin.tear_down()

    async def restored(self) -> Fields:
        """The state of an object that took the boundary back."""
        twin = await self.another()
        try:
            await twin.restore(self.boundary)
            return await fields_of(twin)
        finally:
            await twin.tear_down()

    async def was_a_tie(self) -> bool:
        """Whether nothing differs once answers come after a timer that was due at the same moment."""
        if not self.recording.answers:
            return False
        try:
            found = await self.on_another(late=True)
        except UserCodeError:
            return False  # it fails either way, which the first way told
        return not found.differing and not found.told_unlike(self.recording)

    def error(self, text: str) -> StateError:
        return StateError(f"task {self.replica.task}, epoch {self.stamp.epoch}: {text}")

    # -- on an object that was restored -----------------------------------------------------------

    async def check_replay(self, fresh: Replica) -> None:
        """Runs the epoch again on `fresh`, as `setup` left it, restored from the boundary; compares what it puts, sends
        and answers, and its state after it.

        Raises:
            StateError: something came out differently: state that `snapshot()` does not hold, or that is not restored.
        """
        recording = self.recording
        if fresh.shape.in_flight:
            await self._check_stateless(fresh)
        self.after = await fields_of(self.replica)
        starts_again = self.stamp.epoch < _RESTARTED
        try:
            again = await self.again(fresh, starts_again=starts_again)
        except UserCodeError:
            if await self.was_a_tie():
                return
            raise
        if not starts_again or not again.differing:
            await self._judge(fresh, again)
            return
        other = await self.another()
        try:
            whole = await self.again(other)
            if not whole.differing:
                left = await self._left_by_first()
                if recording.interleaved and not left:
                    return  # in which order code went on after its waits may be why
                which = f" (here: {', '.join(left[:5])})" if left else f", or {_RANDOM}"
                raise self.error(
                    f"begun, restored and run again, as where an epoch starts again, it came out differently "
                    f"({', '.join(again.differing[:5])}): an attribute keeps what the first try left in it{which}; "
                    f"keep what belongs to one try in epoch.scratch, or make it anew in restore()"
                )
            await self._judge(other, whole)
        finally:
            await other.tear_down()

    async def _left_by_first(self) -> list[str]:
        """Attributes in which a first try of the epoch leaves something that `restore` does not take back."""
        begun, restored = await self.another(), await self.another()
        try:
            for twin in (begun, restored):
                await twin.restore(self.boundary)
            await run_in_part(begun, self.recording, self.stamp)
            await begun.restore(self.boundary)
            return await _suspects(begun, restored, self.after)
        except Stands:
            return []
        finally:
            await begun.tear_down()
            await restored.tear_down()

    async def _judge(self, fresh: Replica, again: Again) -> None:
        """Raises StateError where what came of the epoch on `fresh` shows that state is forgotten."""
        replica, recording, after = self.replica, self.recording, self.after
        differing, told = again.differing, again.told_unlike(recording)
        suspects = await _suspects(replica, fresh, after) if differing or told else []
        if recording.interleaved and not suspects:
            return  # in which order code went on after its waits may be why
        if not differing and suspects and (told := _told_of(suspects, replica, fresh, told)):
            third = await self.on_another()  # what rests on a clock two do not tell alike
            differing = [what for what, _, number in told if third.told(what) == number]
        if not differing or (not again.stands and await self.was_a_tie()):
            return
        mine = vars(replica.user_task)
        why = (
            f"snapshot() forgets state, or the task is not deterministic{await _hint(replica, suspects, after)}; add "
            f"what the task remembers to `state=[...]`, and draw random numbers from epoch.rng"
            f"{'' if suspects else padding_of(mine)}"
        )
        held = await _held_by(replica, self.boundary)
        if unlike := await _encoded_unlike(replica, fresh, differing):
            why = unlike
        elif "restore" in replica.shape.overrides and (lost := changed(held, await self.restored())):
            why = (
                f"restore() does not take back what snapshot() returned ({', '.join(lost)}): where state is declared, "
                f"super().restore(state) sets its attributes"
            )
        elif not suspects and (moved := changed(recording.before, held)):
            hooks = [hook for hook in ("on_commit", "on_event") if hook in replica.shape.overrides]
            why = (
                f"state ({', '.join(moved)}) had changed after its snapshot, when the epoch began: in "
                f"{' or '.join([*hooks, 'what goes on beside the epochs'])}; change state only in a processor without "
                f"outbound channels"
            )
        elif not suspects and (shared := shared_state(mine, after, changed(after, again.state))):
            one, other, kind = shared
            why = (
                f"self.{one} and self.{other} are two attributes of state that are one {kind}, and two once they are "
                f"restored; give each its own, as in self.{one} = self.{other}.copy()"
            )
        raise self.error(
            f"replayed from its snapshot, the epoch came out differently ({', '.join(differing[:5])}): {why}"
        )

    # -- on one that was not ----------------------------------------------------------------------

    async def check_as_left(self, twin: Replica) -> StateError | None:
        """Runs the epoch again on `twin`, as `setup` or the epoch before left it: it does what the restored object did.

        Returns:
            The error, where something came out differently. Nothing is said where `setup` makes another state each
            time.

        Raises:
            UserCodeError: it cannot tell: what `restore` makes it may lack.
        """
        recording = self.recording
        if not recording.before or recording.before != await fields_of(twin):
            return None
        shared = made_of_state(vars(twin.user_task), recording.before)
        of_class = _of_the_class(twin.user_task, recording.before)  # it may have attributes of its own afterwards
        had = await seen(twin, partial(digests, of_class))
        self.after = await fields_of(self.replica)
        try:
            again = await run_again(twin, self.after, recording, self.stamp)
        except Stands:
            return None  # the one that was restored will tell
        differing = again.differing
        if not differing or again.failed:
            return None
        hint = f" (here: {', '.join(shared[:5])})" if shared else ""
        made = (
            f"before epoch 0 every primary restores the state that setup() made, as after a failure, and so cuts off "
            f"what setup() made of it: a view, an optimizer that holds it, the same array under another name{hint}; "
            f"make that in restore(), after super().restore(state)"
            f"{'' if shared else f'. Or {_RANDOM}{padding_of(vars(twin.user_task))}'}"
        )
        written = changed(had, await seen(twin, partial(digests, of_class)))
        why = await _encoded_unlike(self.replica, twin, differing) or _shared_by_class(written)
        # In which order code went on after its waits may be why: a restored one tells.
        if recording.interleaved and (not (why or shared) or (await self.on_another()).differing):
            return None
        return self.error(
            f"on the object as setup() left it, the epoch comes out differently ({', '.join(differing[:5])}): "
            f"{why or made}"
        )

    async def _check_stateless(self, fresh: Replica) -> None:
        """Runs `compose` and what may run early, on the object as `setup` made it.

        Raises:
            StateError: it came out differently, failed, or changed the object.
        """
        recording, stamp = self.recording, self.stamp
        work = Replay(fresh, recording, stamp)
        work.composing = composition = Composition(fresh.task, stamp.epoch)
        compose = fresh.actor.call("compose", fresh.user_task.compose, Epoch(work, "compose"))
        await self._stateless(fresh, "compose", compose)
        work.composing = None
        here = {processor.name: processor for processor in composition.graph().processors}
        if [_graph_of(p) for p in here.values()] != [_graph_of(p) for p in recording.composed]:
            raise await self._not_stateless(fresh, "compose", "declares another graph")
        waited_for = False
        for step in recording.steps:
            if step.processor is None:
                return  # what follows is not run early
            parallel = step.processor.parallel
            if not is_stateless(step.processor.compute):
                waited_for |= not parallel
                continue
            if waited_for and not parallel:
                continue  # it is not run early
            had = await seen(fresh, partial(left_by, work))
            await self._stateless(fresh, step.where, run_step(work, step, here))
            for (tag, to), digest in work.digests.items():
                if recording.puts[(tag, to)].digest != digest:
                    raise await self._not_stateless(fresh, step.where, f"puts another {tag!r} to task {to}")
            left, was = await seen(fresh, partial(left_by, work)), recording.left[step.where]
            # What something beside it left is not its doing: what is not run here, or ran while it waited, or while it
            # had not begun yet.
            names = set(changed(had, left))
            if not (recording.interleaved or was.beside):
                names.update(changed(was.before, was.then))
            if differing := sorted(name for name in names if left.get(name) != was.then.get(name)):
                raise await self._not_stateless(fresh, step.where, f"leaves another {differing[0]}")

    async def _stateless(self, fresh: Replica, where: str, call: Coroutine[Any, Any, object]) -> None:
        before = await _attributes(fresh)
        try:
            await call
        except UserCodeError as error:
            raise await self._not_stateless(fresh, where, f"fails ({error})") from error
        after = await _attributes(fresh)
        if written := changed(before, after):
            raise self.error(
                f"{where!r} is marked @tg.stateless, and changed {', '.join(f'self.{name}' for name in written)}: "
                f"another epoch may run between this and who reads it; hand values on through epoch.scratch, make what "
                f"stays in setup(), or leave the mark out"
            )

    async def _not_stateless(self, fresh: Replica, where: str, what: str) -> StateError:
        differing = changed(await _attributes(fresh), await _attributes(self.replica))
        hint = f"; since setup() changed: {', '.join(f'self.{name}' for name in differing[:5])}" if differing else ""
        return self.error(
            f"{where!r} is marked @tg.stateless, but on the object as setup() makes it, it {what}: it reads what other "
            f"methods change{hint}; leave the mark out"
        )


async def _held_by(replica: Replica, boundary: Encoded) -> Fields:
    """The state in a boundary, as `fields_of` tells that of an object."""
    if not replica.stateful:
        return {}
    state = (await replica.arrived(boundary, writable=True))["state"]
    return await seen(
        replica, lambda: {name: value.digest for name, value in encode_fields(state, replica.task).items()}
    )


def _told_of(suspects: list[str], replica: Replica, fresh: Replica, told: list[Told]) -> list[Told]:
    """Of what was told otherwise that the job ends, and numbers that are an attribute, which is another one, too.

    Others may be how long something took. That the job does not end yet may rest on a clock as well, by which it is
    time when the epoch is run again.
    """
    mine, others = vars(replica.user_task), vars(fresh.user_task)
    pairs = [(mine.get(name), others.get(name)) for name in suspects]
    numbers = [pair for pair in pairs if all(issubclass(type(value), _NUMBERS) for value in pair)]
    return [
        (what, number, now)
        for what, number, now in told
        if (what == FINISHES and number) or any(one == number and other == now for one, other in numbers)
    ]


async def _hint(replica: Replica, suspects: list[str], held: Fields) -> str:
    """Which attributes may be what is forgotten."""
    if suspects:
        return f"; attributes that differ and are not in the snapshot: {', '.join(suspects)}"
    if unknown := await _incomparable(replica, held):
        return f"; it may be an attribute that is not in the snapshot and cannot travel: {', '.join(unknown[:5])}"
    return ""


def _of_the_class(task: Task, state: Fields) -> dict[str, object]:
    """The attributes of state that are a class's, and may be written to in place."""
    mine, kind = vars(task), type(task)
    found = {name: inspect.getattr_static(kind, name, None) for name in state if name not in mine}
    return {name: value for name, value in found.items() if issubclass(type(value), _WRITABLE)}


def _shared_by_class(written: list[str]) -> str:
    """What to say where such attributes were written to; else nothing."""
    if not written:
        return ""
    names = " and ".join(f"self.{name}" for name in written[:5])
    return (
        f"{names} {'is an attribute' if len(written) == 1 else 'are attributes'} of the class, which all its objects "
        f"share until they are restored; make {'it' if len(written) == 1 else 'them'} in setup()"
    )


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
        StateError: it is another one, though the task itself tells the same when it is asked again: a result that says
            how long something took may be another one each time.
    """
    await fresh.restore(boundary)
    try:
        other = await fresh.result()
    except UserCodeError as error:
        what = f"fails ({error})"
    else:
        if _same(other, value):
            return
        what = "is another one"
    held = await fields_of(replica)
    suspects = await _suspects(replica, fresh, held)
    try:
        if not _same(await replica.result(), value):
            return
    except UserCodeError:
        return  # it can be asked once only
    raise StateError(
        f"task {replica.task}, 'result': on an object restored from the last snapshot, as after a failure, it "
        f"{what}: snapshot() forgets state{await _hint(replica, suspects, held)}; add what the task remembers to "
        f"`state=[...]`"
    )


def _same(one: Encoded | None, other: Encoded | None) -> bool:
    return (one.digest if one is not None else None) == (other.digest if other is not None else None)


def _graph_of(processor: Processor) -> tuple[object, ...]:
    return (processor.name, processor.inbound, processor.outbound, processor.parallel)


async def _attributes(replica: Replica) -> Fields:
    """Digests of the user object's attributes, as far as they can travel."""
    found = {name: v for name, v in vars(replica.user_task).items() if name not in BY_NODE}
    return await seen(replica, partial(digests, found))


async def _suspects(replica: Replica, fresh: Replica, held: Fields) -> list[str]:
    """Attributes that the snapshot has not `held`, and that differ between the object that ran on and that restored."""
    known, here = await _attributes(fresh), await _attributes(replica)
    found = set(changed(known, here))
    mine, others = vars(replica.user_task), vars(fresh.user_task)
    for name in mine.keys() & others.keys() - known.keys() - here.keys() - set(BY_NODE):  # they cannot travel
        with contextlib.suppress(Exception):  # users' classes raise what they like where they are compared or pickled
            if _differ(mine[name], others[name]):
                found.add(name)
    return sorted(found - held.keys())


def _differ(one: Any, other: Any) -> bool:
    """Whether two values that cannot travel differ; raises where that cannot be told."""
    if issubclass(type(one), _CODE):
        return False
    if issubclass(type(one), set | frozenset) and issubclass(type(other), set | frozenset):
        return bool(one != other)
    return pickled(one) != pickled(other)


async def _incomparable(replica: Replica, held: Fields) -> list[str]:
    """Attributes that the snapshot has not `held`, and that cannot travel; a set may be equal after the replay only."""
    known = await _attributes(replica)
    return [
        f"{name} (of type {class_name(type(value))})"
        for name, value in sorted(vars(replica.user_task).items())
        if name not in (*known, *held, *BY_NODE) and not issubclass(type(value), _CODE)
    ]
