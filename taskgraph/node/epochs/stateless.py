"""Strict mode: checks that methods marked `@tg.stateless` depend on no state, and change none.

Marked methods run again on an object on which only `setup` has run. They must do there what they did in the epoch, and
leave the object unchanged: epochs in flight depend on that.
"""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from typing import Any

from taskgraph.errors import StateError
from taskgraph.graph.compose import Processor
from taskgraph.node.epochs.differing import attributes_of, changed_names, read_values
from taskgraph.node.epochs.recording import RecordedCall, Recording, side_effects_of
from taskgraph.node.epochs.replaying import Replay
from taskgraph.node.replica import Replica
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.shape import is_stateless

__all__ = ["check_stateless"]

_NAMES = 5


async def check_stateless(recording: Recording, fresh: Replica) -> None:
    """Runs the marked methods of a recorded epoch on `fresh`, an object on which only `setup` has run.

    Raises:
        StateError: a method had another outcome, failed, or changed the object.
    """
    work = Replay(fresh, recording)
    processors: dict[str, Processor] = {}

    async def compose() -> None:
        processors.update(await work.compose())

    await _check_object_unchanged(recording, fresh, "compose", compose())
    if [_graph_of(p) for p in processors.values()] != [_graph_of(p) for p in recording.composed]:
        raise await _wrong_mark_error(recording, fresh, "compose", "declares another graph")
    waited_for = False
    for step in recording.steps:
        if step.processor is None:
            return  # what follows a message is not run early
        parallel = step.processor.parallel
        if not is_stateless(step.processor.compute):
            waited_for |= not parallel
        elif parallel or not waited_for:
            await _check_step(recording, fresh, work, step, processors)


async def _check_step(
    recording: Recording, fresh: Replica, work: Replay, step: RecordedCall, processors: dict[str, Processor]
) -> None:
    """Runs a marked method on `fresh`; raises StateError if it puts or leaves something else than in the epoch."""
    before = await read_values(fresh, partial(side_effects_of, work))
    await _check_object_unchanged(recording, fresh, step.where, work.run(step, processors))
    for (tag, to), digest in work.digests.items():
        if recording.puts[(tag, to)].digest != digest:
            raise await _wrong_mark_error(recording, fresh, step.where, f"puts another {tag!r} to task {to}")
    after, recorded = await read_values(fresh, partial(side_effects_of, work)), recording.side_effects[step.where]
    names = set(changed_names(before, after))
    if recorded.alone:  # otherwise what other code handed on is among the recorded changes
        names.update(changed_names(recorded.before, recorded.after))
    if differing := sorted(name for name in names if after.get(name) != recorded.after.get(name)):
        raise await _wrong_mark_error(recording, fresh, step.where, f"leaves another {differing[0]}")


async def _check_object_unchanged(
    recording: Recording, fresh: Replica, where: str, call: Coroutine[Any, Any, None]
) -> None:
    """Awaits a call of a marked method; raises StateError if it fails, or changes an attribute of the object."""
    before = await attributes_of(fresh)
    try:
        await call
    except UserCodeError as error:
        raise await _wrong_mark_error(recording, fresh, where, f"fails ({error})") from error
    if written := changed_names(before, await attributes_of(fresh)):
        raise StateError(
            f"task {fresh.task}, epoch {recording.stamp.epoch}: {where!r} is marked @tg.stateless, and changed "
            f"{', '.join(f'self.{name}' for name in written)}: another epoch may run between this and who reads it; "
            f"hand values on through epoch.scratch, make what stays in setup(), or leave the mark out"
        )


async def _wrong_mark_error(recording: Recording, fresh: Replica, where: str, what: str) -> StateError:
    differing = changed_names(await attributes_of(fresh), await attributes_of(recording.replica))
    names = ", ".join(f"self.{name}" for name in differing[:_NAMES])
    hint = f"; since setup() changed: {names}" if differing else ""
    return StateError(
        f"task {fresh.task}, epoch {recording.stamp.epoch}: {where!r} is marked @tg.stateless, but on the object as "
        f"setup() makes it, it {what}: it reads what other methods change{hint}; leave the mark out"
    )


def _graph_of(processor: Processor) -> tuple[object, ...]:
    return (processor.name, processor.inbound, processor.outbound, processor.parallel)
