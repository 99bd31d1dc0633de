"""`asyncio.timeout` and `timeout_at`, which hold in Pythons before 3.11.3 too.

There (Debian 12 has 3.11.2) a timeout that expires in a task that was cancelled, and is putting things in order, raises
CancelledError instead of TimeoutError: what does not end in time is not ended by force then, e.g. an etcd after Ctrl-C.
Later ones compare the cancellations that are outstanding with those that there were when the timeout began, and so it
is done here. The package uses no other timeouts; those of user code are Python's own.
"""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType

__all__ = ["corrected", "timeout", "timeout_at"]


def corrected(kind: type[asyncio.Timeout]) -> type[asyncio.Timeout]:
    """A class of timeouts like `kind`, an early Python's, that does as those of later Pythons do."""

    class Timeout(kind):  # type: ignore[misc, valid-type]  # nobody else is to derive from it
        async def __aenter__(self) -> asyncio.Timeout:
            task = asyncio.current_task()
            self._cancelling_before = task.cancelling() if task is not None else 0
            entered: asyncio.Timeout = await super().__aenter__()
            return entered

        async def __aexit__(
            self,
            raised: type[BaseException] | None,
            error: BaseException | None,
            trace: TracebackType | None,
        ) -> None:
            await super().__aexit__(raised, error, trace)  # it takes back the cancellation that is its own
            task = asyncio.current_task()
            others = task is None or task.cancelling() > self._cancelling_before
            if self.expired() and isinstance(error, asyncio.CancelledError) and not others:
                raise TimeoutError from error

    return Timeout


if sys.version_info >= (3, 11, 3):
    timeout, timeout_at = asyncio.timeout, asyncio.timeout_at
else:
    timeout_at = corrected(asyncio.Timeout)

    def timeout(delay: float | None) -> asyncio.Timeout:
        """A timeout `delay` seconds from now; None: never."""
        return timeout_at(None if delay is None else asyncio.get_running_loop().time() + delay)
