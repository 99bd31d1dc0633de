"""Shared state of a simulated job: a number that follows from the epoch alone, equal on the tasks that declare it.

In some jobs one task makes another number in one epoch, which must not commit.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from taskgraph.graph.values import decode
from taskgraph.protocol.boundaries import Boundary
from taskgraph.protocol.messages import Encoded
from taskgraph.testing.simulate.violation import Violation

__all__ = ["Sharing", "with_shared"]

SHARE = 0.3
"""Share of the jobs with shared state."""
STRAY_SHARE = 0.2
"""Share of these in which it differs in one epoch."""
_SALT = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Sharing:
    """Which tasks share a number.

    Attributes:
        tasks: the tasks that declare it; the lowest, the keeper, has it in its snapshots.
        stray: (task, epoch): after this epoch the task has another number than the others; None: all agree.
    """

    seed: int
    tasks: frozenset[int] = frozenset()
    stray: tuple[int, int] | None = None

    @classmethod
    def draw(
        cls, rng: random.Random, seed: int, able: Collection[int], own_state: Collection[int], epochs: int
    ) -> Sharing:
        """Draws which of the tasks in `able` share the number. The keeper is a task in `own_state`."""
        if rng.random() >= SHARE:
            return cls(seed)
        tasks = {task for task in able if rng.random() < 0.85}
        while tasks and min(tasks) not in own_state:
            tasks.discard(min(tasks))
        stray = None
        if len(tasks) > 1 and rng.random() < STRAY_SHARE:
            stray = rng.choice(sorted(tasks)), rng.randrange(epochs)
        return cls(seed, frozenset(tasks), stray)

    @property
    def keeper(self) -> int | None:
        return min(self.tasks, default=None)

    def number(self, boundary: int) -> int:
        """Returns the shared number after this many epochs."""
        value = self.seed
        for epoch in range(boundary):
            value = self.next(value, epoch)
        return value

    def next(self, value: int, epoch: int) -> int:
        """Returns the shared number after epoch `epoch`, which began with `value`."""
        value = (value * _SALT + epoch + 1) & _MASK
        return value ^ (value >> 29)

    def is_failure_by_stray(self, reason: str) -> bool:
        """True if this reason of a job's failure says that the task of `stray` differs in its epoch."""
        if self.stray is None:
            return False
        task, epoch = self.stray
        named = f"epoch {epoch}: self.common is declared as shared, and differs between task "
        _, found, rest = reason.partition(named)
        return bool(found) and f"task {task}," in f"task {rest.partition(', after')[0]},".replace(" and ", ", ")

    def check_commit(self, epoch: int) -> None:
        """Raises Violation if this epoch, which has committed, is that of `stray`: one task had other shared state."""
        if self.stray is not None and self.stray[1] == epoch:
            raise Violation(f"epoch {epoch} committed, in which task {self.stray[0]} has other shared state")

    def check_boundary(self, task: int, boundary: Boundary, where: str) -> None:
        """Checks the shared number in a replica's committed boundary against the right one. `where`: for messages."""
        self.check_value(task, boundary.value, boundary.stamp.epoch, where)
        if boundary.shared is not None:
            self._check(int(decode(boundary.shared)["common"][0]), boundary.stamp.epoch, f"{where}, beside")

    def check_value(self, task: int, value: Encoded, epoch: int, where: str) -> None:
        """Checks a snapshot, of a boundary or a checkpoint: the keeper's has the right number, others have none."""
        if task not in self.tasks:
            return
        state = decode(value)["state"]
        if task == self.keeper:
            self._check(int(state["common"][0]), epoch, where)
        elif "common" in state:
            raise Violation(
                f"{where}: boundary {epoch} of task {task} has shared state, which task {self.keeper} keeps"
            )

    def _check(self, number: int, epoch: int, where: str) -> None:
        if number != self.number(epoch):
            raise Violation(f"{where}: the shared state is not that of boundary {epoch}")


def with_shared(kind: Any, sharing: Sharing) -> Any:
    """Returns a subclass of a task class, with the shared number: each sync point checks it, and makes the next one."""

    class Shared(kind, shared=["common"]):  # type: ignore[misc, call-arg]
        def setup(self) -> None:
            super().setup()
            self.common = np.array([sharing.number(0)], dtype=np.uint64)

        def _finish_epoch(self, epoch: Any, after: int) -> None:
            before = int(self.common[0])
            if before != sharing.number(epoch.number):
                raise Violation(f"task {self.task_id} has the shared state of another boundary in epoch {epoch.number}")
            self.common[0] = sharing.next(before, epoch.number) ^ (sharing.stray == (self.task_id, epoch.number))
            super()._finish_epoch(epoch, after)

    return Shared
