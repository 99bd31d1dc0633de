"""Objects for the replays of strict mode: for each epoch one as `setup` leaves it, where nothing ran on it before.

A `setup` that takes long would make most of a test: it would run once for each epoch. What it left of the first such
object is kept pickled, and the others are made of that. Pickled, since it refuses what copies would share, such as
closures, and so never hides state: then `setup` runs each time, as it does where there is a `teardown` to go with it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

from taskgraph.errors import StateError
from taskgraph.node.replica import Replica
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.task import Task

__all__ = ["BY_NODE", "Twins"]

_WORTH_S = 0.02
"""A `setup` that is over sooner is called again: most take less time than to look for what they left."""
_AS_LEFT = 2
"""So many epochs also run on an object that was not restored: what one wrote, the next one may be the first to read."""
BY_NODE = ("log", "primary", "xp")
"""Attributes that are given to each object, whatever `setup` does."""


class Twins:
    """Makes the twins of one replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._kept: bytes | None = None
        self._looked = False
        self._as_left: Replica | None = None

    async def fresh(self) -> Replica:
        """One on which `setup` ran."""
        twin, clock = self._replica.twin(), self._replica.threads.clock
        began = clock()
        await twin.set_up()
        twin.user_task.primary = True
        if not self._looked and clock() - began >= _WORTH_S:
            self._looked = True
            if "teardown" not in twin.shape.overrides:
                self._kept = await twin.actor.call("strict mode", lambda: _pickled(twin.user_task))
        return twin

    async def copied(self) -> Replica | None:
        """One with what `setup` left of another one; None where that cannot be, or is not worth it."""
        kept = self._kept
        if kept is None:
            return None
        twin = self._replica.twin()
        await twin.build()
        task = twin.user_task
        found = await twin.actor.call("strict mode", lambda: _Unpickler(kept, task).load())
        vars(task).update(found)
        task.primary = True
        return twin

    async def check_as_left(
        self, epoch: int, compare: Callable[[Replica], Awaitable[StateError | None]]
    ) -> StateError | None:
        """What `compare` says of a twin which is not restored: in epoch 0 as `setup` left it, then as `compare` did.

        It is no copy: of arrays that share memory a copy has two. It is not asked again where its code raised, which
        may be for want of what `restore` makes, nor where there is a `teardown`.
        """
        twin, self._as_left = (await self.fresh() if epoch == 0 else self._as_left), None
        if twin is None:
            return None
        try:
            found = await compare(twin)
        except UserCodeError:
            return None
        finally:
            await twin.tear_down()
        if epoch + 1 < _AS_LEFT and "teardown" not in twin.shape.overrides:
            self._as_left = twin
        return found

    async def check(self, compare: Callable[[Replica], Awaitable[None]]) -> None:
        """Calls `compare` with a twin; it raises where that differs from what ran.

        A twin whose `setup` ran elsewhere may differ due to that: what is told is what differs of one where it ran, and
        from then on all are such.
        """
        try:
            copy = await self.copied()
            if copy is not None:
                await compare(copy)
                return
        except (StateError, UserCodeError):
            self._kept = None
        fresh = await self.fresh()
        try:
            await compare(fresh)
        finally:
            await fresh.tear_down()


def _pickled(task: Task) -> bytes | None:
    """The attributes of a task; None where some cannot be pickled."""
    kept = io.BytesIO()
    try:
        _Pickler(kept, task).dump({name: value for name, value in vars(task).items() if name not in BY_NODE})
    except Exception:  # user classes raise what they like where they cannot be
        return None
    return kept.getvalue()


class _Pickler(pickle.Pickler):
    """Of what refers to its task, as a bound method does, the copy refers to the copy."""

    def __init__(self, file: io.BytesIO, task: Task) -> None:
        super().__init__(file, protocol=5)
        self._task = task

    def persistent_id(self, obj: Any) -> str | None:
        return "task" if obj is self._task else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, kept: bytes, task: Task) -> None:
        super().__init__(io.BytesIO(kept))
        self._task = task

    def persistent_load(self, pid: Any) -> Task:
        return self._task
