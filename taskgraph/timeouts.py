"""Timeouts that hold while a task that was cancelled puts things in order, in Pythons before 3.11.3.

There (Debian 12 has 3.11.2) a timeout that expires in such a task raises CancelledError instead of TimeoutError: what
does not end in time is not ended by force then, e.g. an etcd after Ctrl-C. Later ones compare the cancellations that
are outstanding with those that there were when the timeout began, and so it is done here.
"""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType

__all__ = ["correct"]

_BEFORE = "_cancelling_before"


def correct(kind: type[asyncio.Timeout]) -> None:
    """Has timeouts of that class do as those of later Pythons do, which are left as they are by it."""
    enter, leave = kind.__aenter__, kind.__aexit__

    async def __aenter__(self: asyncio.Timeout) -> asyncio.Timeout:
        task = asyncio.current_task()
        setattr(self, _BEFORE, task.cancelling() if task is not None else 0)
        return await enter(self)

    async def __aexit__(
        self: asyncio.Timeout,
        raised: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await leave(self, raised, error, trace)  # it takes back the cancellation that is its own
        task = asyncio.current_task()
        others = task is None or task.cancelling() > getattr(self, _BEFORE)
        if self.expired() and isinstance(error, asyncio.CancelledError) and not others:
            raise TimeoutError from error

    kind.__aenter__, kind.__aexit__ = __aenter__, __aexit__  # type: ignore[assignment, method-assign]


if sys.version_info < (3, 11, 3):
    correct(asyncio.Timeout)
