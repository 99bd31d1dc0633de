"""Finds when an attempt is idle: counts running code and open holds. After the seal no message is accepted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Activity"]


class Activity:
    """Counts the running calls and open holds of one task's epoch, so that the leader learns when all tasks are idle.

    `version` grows with each call or hold that begins. The leader seals a version: a task that has become active since
    it reported to be idle refuses the seal. Lives on the event loop; only the attempt waits for it, one wait at a time.
    """

    # One is made for every epoch, and most never change: defaults are attributes of the class.
    version = 0
    closed = False
    """True once the task no longer accepts messages of this epoch."""
    busy = 0
    """The number of running calls."""
    open_holds: dict[object, str] | None = None
    """Open holds, oldest first: mark -> reason of the user; None before the first hold."""
    _reported = -1
    """The version of the last report that the task is idle."""
    _waiter: asyncio.Future[None] | None = None

    @property
    def holds(self) -> tuple[str, ...]:
        """The reasons of the open holds, oldest first."""
        return tuple(self.open_holds.values()) if self.open_holds else ()

    def call_began(self) -> None:
        """Counts a call that begins. `call_ended` follows."""
        self.busy += 1
        self.version += 1

    def call_ended(self) -> None:
        self.busy -= 1
        if not self.busy:
            self._wake()

    def hold(self, mark: object, why: str) -> None:
        """Opens a hold: the task is not idle until `release` is called with the same mark."""
        if self.open_holds is None:
            self.open_holds = {}
        self.open_holds[mark] = why
        self.version += 1

    def release(self, mark: object) -> None:
        if self.open_holds is not None:
            self.open_holds.pop(mark, None)
        if not self.open_holds:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait_for_wake(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    async def wait_until_idle(self) -> None:
        """Waits until no call runs and no hold is open. A call or hold may begin right afterwards."""
        while self.busy or self.open_holds:
            await self._wait_for_wake()

    async def wait_until_sealed(self, on_idle: Callable[[int], None]) -> None:
        """Waits until the leader has sealed the epoch, since all tasks are idle.

        Args:
            on_idle: called with the version whenever the task becomes idle at a new version.
        """
        while not self.closed:
            await self.wait_until_idle()
            if self._reported != self.version:
                self._reported = self.version
                on_idle(self.version)
            if not self.closed:
                await self._wait_for_wake()

    def seal(self, version: int) -> bool:
        """Closes the epoch for messages if the task reported `version` as idle, and has not been active since.

        Returns True if it is sealed at this version, now or before.
        """
        if not self.closed and self._reported == self.version == version:
            self.closed = True
            self._wake()
        return self.closed and self.version == version
