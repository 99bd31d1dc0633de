"""Strict mode: replays every epoch of a task on a fresh object that is restored from its snapshot.

Two mistakes show only after a failure, and then as wrong numbers: state that changes outside a sync point, and state
that `snapshot()` forgets. Strict mode finds both without a failure.

- While an epoch runs, `recording.py` compares the state before and after each processor and handler.
- After the epoch, `setup` makes a fresh object, which is restored from the snapshot before the epoch. It runs the
  recorded steps one after another, with the recorded inputs and replies (`replaying.py`). Its items, messages, replies
  and state must be equal. Reported numbers and `epoch.finish()` may depend on a clock: a difference in these counts
  only if an attribute explains it.
- In the first epochs, the fresh object begins the epoch, is restored and runs it again, as when an epoch restarts.
- Epoch 0 also runs on an object that is not restored: every primary restores boundary 0, which separates the state from
  objects that `setup` made of it, such as a view of an array.
- Methods that are marked `@tg.stateless` run on an object on which only `setup` has run (`stateless.py`).
- After the last epoch, `result()` is called on a fresh object restored from the last snapshot.

An epoch is skipped if code of the task ran while other code of it waited: the order of their effects is unknown. The
log says so, once per task.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from logging import Logger
from typing import Any

import numpy as np

from taskgraph.errors import StateError, class_name
from taskgraph.node.epochs.differing import (
    Digests,
    attributes_of,
    changed_names,
    differing_attributes,
    incomparable_attributes,
    pickled,
    read_values,
    sharing_attributes,
    state_of,
)
from taskgraph.node.epochs.recording import Recording, WatchedItem
from taskgraph.node.epochs.replaying import ReplayResult, differing_reports, replay, replay_from_snapshot
from taskgraph.node.epochs.stateless import check_stateless
from taskgraph.node.replica import Replica
from taskgraph.node.snapshots import encode_fields, named_fields
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.protocol.boundaries import Boundary
from taskgraph.protocol.messages import Encoded, Stamp
from taskgraph.task import Task

__all__ = ["StrictMode"]

_RESTARTED_EPOCHS = 3
"""The number of first epochs that are also begun, restored and run again."""
_NAMES = 5
"""Names in a message, at most."""
_NUMBERS = (int, float, np.number)


class StrictMode:
    """Replays the epochs of one task, on its primary, and raises StateError if a replay differs."""

    def __init__(self, replica: Replica, log: Logger) -> None:
        self._replica = replica
        self._log = log
        self._skipped = False
        self._watched_items: list[WatchedItem] = []

    def new_recording(self, stamp: Stamp) -> Recording:
        """Makes the recording of an attempt that begins."""
        return Recording(self._replica, stamp, self._watched_items)

    @contextlib.asynccontextmanager
    async def _fresh_replica(self) -> AsyncIterator[Replica]:
        """Makes a replica with an object of the task on which only `setup` has run; after the block runs `teardown`."""
        fresh = self._replica.twin()
        await fresh.set_up()
        fresh.user_task.primary = True
        try:
            yield fresh
        finally:
            await fresh.tear_down()

    # -- an epoch ---------------------------------------------------------------------------------

    async def check(self, recording: Recording) -> None:
        """Replays an epoch that the task has just run; skips it if code ran while other code of the task waited.

        Raises:
            StateError: the replay differs from the epoch.
            UserCodeError: user code failed in the replay.
        """
        if recording.interleaved:
            self._log_skipped(recording)
            return
        replica, boundary = self._replica, self._replica.boundaries.committed
        assert boundary is not None
        after, cut_off = await state_of(replica), None
        if recording.stamp.epoch == 0 and recording.before:
            cut_off = await self._check_as_set_up(recording, after)
        await self._check_replay(recording, boundary, after)
        if cut_off is not None:  # two restored objects agree
            raise cut_off

    def _log_skipped(self, recording: Recording) -> None:
        if not self._skipped:
            self._skipped = True
            self._log.warning(
                "task %d, epoch %d: strict mode skips this epoch and others like it: code of the task ran while other "
                "code of it waited, and cannot be replayed. State that snapshot() forgets is not found there",
                self._replica.task,
                recording.stamp.epoch,
            )

    async def _check_replay(self, recording: Recording, boundary: Boundary, after: Digests) -> None:
        """Replays the epoch, one of the first also as in a restart; raises StateError if a replay differs."""
        first_try = recording.stamp.epoch < _RESTARTED_EPOCHS
        async with self._fresh_replica() as fresh:
            if fresh.shape.in_flight:
                await check_stateless(recording, fresh)
            restarted = await replay_from_snapshot(fresh, recording, boundary, after, first_try=first_try)
            if not first_try or not restarted.differing:
                await self._check_result_of_replay(recording, boundary, after, fresh, restarted)
                return
        async with self._fresh_replica() as fresh:
            replayed = await replay_from_snapshot(fresh, recording, boundary, after)
            if replayed.differing:
                await self._check_result_of_replay(recording, boundary, after, fresh, replayed)
                return
        here = f" (here: {_join_first(restarted.left)})" if restarted.left else ", or the task is not deterministic"
        raise _state_error(
            recording,
            f"a restart of the epoch comes out differently ({_join_first(restarted.differing)}): the first try left "
            f"something in an attribute{here}; keep what belongs to one try in epoch.scratch, or reset it in restore()",
        )

    async def _check_result_of_replay(
        self, recording: Recording, boundary: Boundary, after: Digests, fresh: Replica, replayed: ReplayResult
    ) -> None:
        """Raises StateError, with the likely reason, if the replay on `fresh` differs from the epoch."""
        replica, differing = self._replica, replayed.differing
        reports = differing_reports(recording, replayed)
        if not differing and not reports:
            return
        suspects = await differing_attributes(replica, fresh, after)
        if not differing and (named := _explain_reports(reports, suspects, replica, fresh)):
            async with self._fresh_replica() as other:  # what depends on a clock differs in each replay
                again = await replay_from_snapshot(other, recording, boundary, after)
            differing = [name for name in named if again.reports.get(name) == replayed.reports.get(name)]
        if not differing or (not suspects and recording.requests and not replica.threads.in_step):
            return  # on a busy node a reply may come later than it did
        why = await _explain_encoding(replica, fresh, differing) or await self._find_lost_by_restore(boundary)
        if not why and not suspects:
            why = await self._find_changed_between_epochs(recording, boundary) or _find_shared_memory(
                replica, after, replayed
            )
        if not why:
            why = (
                f"snapshot() forgets state, or the task is not deterministic{await _hint(replica, suspects, after)}; "
                f"add what the task remembers to `state=[...]`, and draw random numbers from epoch.rng"
            )
        raise _state_error(
            recording, f"replayed from its snapshot, the epoch came out differently ({_join_first(differing)}): {why}"
        )

    async def _find_lost_by_restore(self, boundary: Boundary) -> str:
        """Returns text about state that `snapshot()` returns and `restore()` does not set; "" if there is none."""
        if "restore" not in self._replica.shape.overrides:
            return ""
        async with self._fresh_replica() as fresh:
            await fresh.restore(boundary)
            lost = changed_names(await self._state_in(boundary), await state_of(fresh))
        if not lost:
            return ""
        return (
            f"restore() does not take back what snapshot() returned ({', '.join(lost)}): where state is declared, "
            f"super().restore(state) sets its attributes"
        )

    async def _find_changed_between_epochs(self, recording: Recording, boundary: Boundary) -> str:
        """Returns text about state that changed between its snapshot and the epoch's beginning; "" if none did."""
        if not (moved := changed_names(recording.before, await self._state_in(boundary))):
            return ""
        hooks = [hook for hook in ("on_commit", "on_event") if hook in self._replica.shape.overrides]
        return (
            f"state ({', '.join(moved)}) had changed after its snapshot, when the epoch began: in "
            f"{' or '.join([*hooks, 'what goes on beside the epochs'])}; change state only in a processor without "
            f"outbound channels"
        )

    async def _state_in(self, boundary: Boundary) -> Digests:
        """Returns digests of the state in a boundary, by the names that `state_of` uses."""
        replica = self._replica
        if not replica.stateful:
            return {}
        state = await replica.state_in(boundary)
        encoded = await read_values(replica, partial(encode_fields, state, replica.task))
        return {name: value.digest for name, value in encoded.items()}

    # -- on an object that is not restored --------------------------------------------------------

    async def _check_as_set_up(self, recording: Recording, after: Digests) -> StateError | None:
        """Runs epoch 0 on an object on which only `setup` has run.

        Returns:
            The error, if the epoch differs. None also if it failed, since `restore` may make what the epoch needs, or
            if `setup` makes another state each time.
        """
        async with self._fresh_replica() as fresh:
            if recording.before != await state_of(fresh):
                return None
            pairs = sharing_attributes(vars(fresh.user_task), recording.before)
            of_class = [name for name in recording.before if name not in vars(fresh.user_task)]
            try:
                replayed = await replay(fresh, recording, after)
            except UserCodeError:
                return None
            differing = replayed.differing
            encoded = differing and await _explain_encoding(self._replica, fresh, differing)
            if not differing and pairs:  # a later epoch may read it
                cut_off = {name for name, _ in pairs} & {*await differing_attributes(self._replica, fresh, after)}
                differing = [f"self.{name}" for name in sorted(cut_off)]
        if not differing:
            return None
        here = f" (here: {_pairs_text(pairs)})" if pairs else ""
        why = encoded or (
            f"every primary restores the state of setup() before epoch 0, which cuts off what setup() made of it: a "
            f"view, an optimizer that has it, another name of the array{here}; make that in restore(), after "
            f"super().restore(state)"
        )
        for name in of_class:
            if f"state {name!r}" in differing:
                why = f"self.{name} is an attribute of the class, which all its objects share; make it in setup()"
        text = f"without a restore after setup(), the epoch comes out differently ({_join_first(differing)}): {why}"
        return _state_error(recording, text)

    # -- the result -------------------------------------------------------------------------------

    async def check_result(self, boundary: Boundary, value: Encoded | None) -> None:
        """Compares `result()` of a fresh object, restored from the last boundary, with `value`.

        Raises:
            StateError: it differs, though the task itself returns the same result twice.
        """
        replica = self._replica
        async with self._fresh_replica() as fresh:
            await fresh.restore(boundary)
            try:
                other = await fresh.result()
            except UserCodeError as error:
                what = f"fails ({error})"
            else:
                if _are_equal(other, value):
                    return
                what = "is another one"
            state = await state_of(replica)
            suspects = await differing_attributes(replica, fresh, state)
        try:
            if not _are_equal(await replica.result(), value):
                return
        except UserCodeError:
            return  # it can be asked for once only
        raise StateError(
            f"task {replica.task}, 'result': on an object restored from the last snapshot, as after a failure, it "
            f"{what}: snapshot() forgets state{await _hint(replica, suspects, state)}; add what the task remembers to "
            f"`state=[...]`"
        )


def _state_error(recording: Recording, text: str) -> StateError:
    return StateError(f"task {recording.replica.task}, epoch {recording.stamp.epoch}: {text}")


def _join_first(names: list[str]) -> str:
    return ", ".join(names[:_NAMES])


def _pairs_text(pairs: list[tuple[str, str]]) -> str:
    return _join_first([f"self.{one} and self.{other}" for one, other in pairs])


def _are_equal(one: Encoded | None, other: Encoded | None) -> bool:
    return (one.digest if one is not None else None) == (other.digest if other is not None else None)


def _explain_reports(
    reports: dict[str, tuple[float | None, float | None]], suspects: list[str], replica: Replica, fresh: Replica
) -> list[str]:
    """Returns the differing reports that a differing attribute explains, and an `epoch.finish()` that differs."""
    mine, others = vars(replica.user_task), vars(fresh.user_task)
    pairs = [(mine.get(name), others.get(name)) for name in suspects]
    pairs = [pair for pair in pairs if all(issubclass(type(value), _NUMBERS) for value in pair)]
    ends: Any = "epoch.finish()" if suspects else None
    return [name for name, pair in reports.items() if pair in pairs or (name == ends and pair[0])]


def _find_shared_memory(replica: Replica, after: Digests, replayed: ReplayResult) -> str:
    """Returns text about two attributes of the state that are one array or object, if one of them differs; else ""."""
    state = {name: value for name, value in vars(replica.user_task).items() if name in after}
    pairs = sharing_attributes(state, changed_names(after, replayed.state))
    if not pairs:
        return ""
    return (
        f"{_pairs_text(pairs)} are one object, and two once they are restored; "
        f"give each attribute of state its own copy"
    )


async def _hint(replica: Replica, suspects: list[str], state: Digests) -> str:
    """Returns text about the attributes that may be the forgotten state; "" if there are none."""
    if suspects:
        return f"; attributes that differ and are not in the snapshot: {', '.join(suspects)}"
    if unknown := incomparable_attributes(replica, {*state, *await attributes_of(replica)}):
        return f"; it may be an attribute that is not in the snapshot and cannot travel: {_join_first(unknown)}"
    return ""


async def _explain_encoding(replica: Replica, fresh: Replica, differing: list[str]) -> str:
    """Returns text if only the encoding of the state differs, and its values are equal, as far as pickle can tell; else
    "".
    """

    def values_of(task: Task) -> dict[str, object]:
        return {f"state {name!r}": value for name, value in named_fields(task.snapshot()).items()}

    mine = await replica.actor.call("snapshot", values_of, replica.user_task)
    others = await fresh.actor.call("snapshot", values_of, fresh.user_task)

    def equal() -> bool:
        try:
            return all(name in mine and pickled(mine[name]) == pickled(others[name]) for name in differing)
        except Exception:  # user objects may raise anything
            return False

    if not await read_values(replica, equal):
        return ""
    types = ", ".join(dict.fromkeys(class_name(type(mine[name])) for name in differing))
    return (
        f"it is equal, and a codec, of {types} or of something in it, gives other bytes for equal values, as pickle "
        f"does; let the codec encode the parts, or pickle with Pickler.fast = True"
    )
