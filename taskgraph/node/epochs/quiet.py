"""How the work of an attempt comes to rest: what still runs or is held, and the seal after which nothing is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Quiet"]


class Quiet:
    """One task's part in finding out that nothing of an epoch runs, waits or travels any more.

    `version` grows with everything that begins. What the leader seals is a version: a task that has moved on since it
    said that it was idle refuses. Lives on the event loop; the attempt alone waits for it, in one place at a time.
    """

    # One is made for every epoch, and hardly any is told anything: what has not changed is that of the class.
    version = 0
    closed = False
    """The task takes no message of this epoch any more."""
    busy = 0
    """How much runs that keeps the task from being idle."""
    held: dict[object, str] | None = None
    """Why user code keeps the epoch open, by what stands for each hold, oldest first; None: it never did."""
    _told = -1
    """The version at which it was told last that the task is idle."""
    _waiter: asyncio.Future[None] | None = None

    @property
    def holds(self) -> tuple[str, ...]:
        """Why user code keeps the epoch open, oldest first."""
        return tuple(self.held.values()) if self.held else ()

    def busier(self) -> None:
        """Something began that keeps the task from being idle; `calmer` follows."""
        self.busy += 1
        self.version += 1

    def calmer(self) -> None:
        self.busy -= 1
        if not self.busy:
            self._wake()

    def hold(self, mark: object, why: str) -> None:
        if self.held is None:
            self.held = {}
        self.held[mark] = why
        self.version += 1

    def release(self, mark: object) -> None:
        if self.held is not None:
            self.held.pop(mark, None)
        if not self.held:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _until_woken(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    async def until_calm(self) -> None:
        """Returns when nothing runs and nothing is held; either may begin again."""
        while self.busy or self.held:
            await self._until_woken()

    async def until_sealed(self, on_idle: Callable[[int], None]) -> None:
        """Returns when the leader has found everybody idle.

        Args:
            on_idle: is told the version, each time that the task is idle at another one.
        """
        while not self.closed:
            await self.until_calm()
            if self._told != self.version:
                self._told = self.version
                on_idle(self.version)
            if not self.closed:
                await self._until_woken()

    def seal(self, version: int) -> bool:
        """The leader found everything quiet. True if the task is still at `version`: it takes nothing more."""
        if not self.closed and self._told == self.version == version:
            self.closed = True
            self._wake()
        return self.closed and self.version == version
