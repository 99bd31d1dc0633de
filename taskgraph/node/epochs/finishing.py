"""Epochs whose code has run and that are not reported yet, while the task works on the next ones.

There are three reasons. The boundary of task 0 lacks reports of the previous epoch, which other nodes still gather
(`node/primary/reporter.py`). The snapshot is still on its device. Or not all members have acknowledged the boundary.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskgraph.node.epochs.attempt import Attempt
from taskgraph.node.snapshots import Snapshot
from taskgraph.node.usercode.errors import StuckError
from taskgraph.protocol.messages import Stamp

if TYPE_CHECKING:
    from taskgraph.node.reports import Rows

__all__ = ["FinishQueue", "FinishedEpoch"]


@dataclass(slots=True, eq=False)
class FinishedEpoch:
    """An attempt whose processors have all run.

    Attributes:
        following: the stamp of the next epoch, and of the boundary before it.
        snapshot: perhaps still on a device.
        numbers: the numbers that the task reported in this epoch, as in the snapshot.
        finishing: the task asked for the end of the job.
        previous: the numbers that the task reported in the previous epoch.
        rows: all tasks' reports of the previous epoch, which task 0 adds to its snapshot; {}: none; None: some are
            missing.
        since: when the boundary was offered, if the epoch is traced; otherwise 0.
    """

    attempt: Attempt
    following: Stamp
    snapshot: Snapshot
    numbers: Mapping[str, float]
    finishing: bool
    previous: Mapping[str, float]
    rows: Rows | None = None
    since: int = 0


class FinishQueue:
    """A queue of epochs that are finished one after another, in their order.

    Args:
        finish: does the remaining work for one epoch.
        on_failure: called once if `finish` raised; `error` then has the exception, and later epochs are not finished.
    """

    def __init__(self, finish: Callable[[FinishedEpoch], Awaitable[None]], on_failure: Callable[[], None]):
        self._finish = finish
        self._on_failure = on_failure
        self.error: BaseException | None = None
        self.pending: deque[FinishedEpoch] = deque()
        self._running: asyncio.Task[None] | None = None

    def add(self, finished: FinishedEpoch) -> None:
        """Queues an epoch, without waiting for it."""
        self.pending.append(finished)
        if self._running is None and self.error is None:
            self._start()

    def _start(self) -> None:
        self._running = asyncio.get_running_loop().create_task(self._finish_all())
        self._running.add_done_callback(self._on_end)

    async def wait_until_empty(self) -> None:
        """Waits until all epochs are finished, or one has failed."""
        while self._running is not None:
            await asyncio.wait([self._running])

    async def end(self) -> None:
        """Cancels the work for the oldest epoch, and drops the others, since the attempt is over.

        Raises:
            StuckError: a thread does not return.
        """
        while self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        self.pending.clear()
        error, self.error = self.error, None
        if isinstance(error, StuckError):
            raise error

    async def _finish_all(self) -> None:
        while self.pending:
            await self._finish(self.pending[0])
            self.pending.popleft()

    def _on_end(self, running: asyncio.Task[None]) -> None:
        self._running = None
        if running.cancelled():
            return
        if (error := running.exception()) is not None:
            self.error = error
            self._on_failure()
        elif self.pending:  # added after the last one, before this callback
            self._start()
