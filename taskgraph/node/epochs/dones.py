"""Epochs that a task has worked through and that are not done yet, while it works on the next ones.

There are two reasons. A boundary may not be whole yet: that of task 0 carries what all tasks reported in the epoch
before, and theirs may be gathered somewhere (`node/primary/reporter.py`), which must not hold up the task that all
others may wait for; and a snapshot may still be on its device. And a boundary that is whole may not be held yet by all
members.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskgraph.node.epochs.attempt import Attempt
from taskgraph.node.usercode.errors import StuckError
from taskgraph.protocol.messages import Encoded, Stamp

if TYPE_CHECKING:
    from taskgraph.node.reports import Rows

__all__ = ["Dones", "Worked"]


@dataclass(slots=True, eq=False)
class Worked:
    """An attempt whose processors have all run.

    Attributes:
        following: the stamp of the next epoch, and of the boundary before it.
        value: its snapshot; maybe still on a device.
        numbers: what the task reported in this epoch, as it is in the snapshot.
        finishing: it said by then that the job ends with it.
        previous: what the task reported in the epoch before.
        rows: the reports that travel in the snapshot; None: they are not there yet.
        since: when it was offered, where somebody traces the epoch; else 0.
    """

    attempt: Attempt
    following: Stamp
    value: Encoded
    numbers: Mapping[str, float]
    finishing: bool
    previous: Mapping[str, float]
    rows: Rows | None = None
    since: int = 0


class Dones:
    """Brings one epoch after the other to its done, in their order.

    Args:
        finish: what is left to do for one.
        failed: called once where `finish` raised; the rest is not done then.
    """

    def __init__(self, finish: Callable[[Worked], Awaitable[None]], failed: Callable[[], None]):
        self._finish = finish
        self._failed = failed
        self.error: BaseException | None = None
        self.open: deque[Worked] = deque()
        """Those that are not done."""
        self._finishing: asyncio.Task[None] | None = None

    def add(self, worked: Worked) -> None:
        """It is finished after those before it; nobody waits for that here. After one that cannot be, it is not."""
        self.open.append(worked)
        if self._finishing is None and self.error is None:
            self._begin()

    def _begin(self) -> None:
        self._finishing = asyncio.get_running_loop().create_task(self._finish_all())
        self._finishing.add_done_callback(self._ended)

    async def all(self) -> None:
        """Returns when all of them are done; where one cannot be, when that is known."""
        while self._finishing is not None:
            await asyncio.wait([self._finishing])

    async def end(self) -> None:
        """The attempt is over: what is not done by now will not be.

        Raises:
            StuckError: a thread does not return.
        """
        while self._finishing is not None:
            self._finishing.cancel()
            await asyncio.wait([self._finishing])
        self.open.clear()
        error, self.error = self.error, None
        if isinstance(error, StuckError):
            raise error

    async def _finish_all(self) -> None:
        while self.open:
            await self._finish(self.open[0])
            self.open.popleft()

    def _ended(self, finishing: asyncio.Task[None]) -> None:
        self._finishing = None
        if finishing.cancelled():
            return
        if (error := finishing.exception()) is not None:
            self.error = error
            self._failed()
        elif self.open:  # added when the last one was done, and this was not known yet
            self._begin()
