"""A timeout holds while a task that was cancelled puts things in order: on Python 3.11.2, too, as Debian 12 has it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

import pytest

from taskgraph.system.timeouts import corrected, timeout, timeout_at


class Early(asyncio.Timeout):  # type: ignore[misc]  # nobody else is to derive from it
    """As that of Python 3.11.2, whatever the one here is."""

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        task = asyncio.current_task()
        try:
            await super().__aexit__(kind, error, trace)
        except TimeoutError:
            if task is None or not task.cancelling():
                raise


async def tidied(timeouts: Callable[[float], asyncio.Timeout], *, again: bool = False) -> str:
    """What becomes of a timeout in a task that was cancelled. `again`: and is cancelled once more meanwhile."""
    found = ""

    async def work() -> None:
        nonlocal found
        try:
            await asyncio.Event().wait()
        finally:
            try:
                async with timeouts(asyncio.get_running_loop().time() + (9 if again else 0)):
                    await asyncio.Event().wait()
            except BaseException as error:
                found = type(error).__name__

    task = asyncio.ensure_future(work())
    for _ in range(2 if again else 1):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait([task], timeout=10)
    assert task.cancelled()
    return found


async def test_a_timeout_of_an_early_python_is_put_right() -> None:
    assert await tidied(Early) == "CancelledError", "as it was"
    Later = corrected(Early)
    assert await tidied(Later) == "TimeoutError"
    assert await tidied(Later, again=True) == "CancelledError"
    with pytest.raises(TimeoutError):
        async with Later(asyncio.get_running_loop().time()):
            await asyncio.Event().wait()
    async with Later(None) as one:
        pass
    assert not one.expired()


async def test_timeouts_of_the_package_hold_whatever_python_this_is() -> None:
    assert await tidied(timeout_at) == "TimeoutError"
    assert await tidied(lambda when: timeout(when - asyncio.get_running_loop().time())) == "TimeoutError"
    assert await tidied(timeout_at, again=True) == "CancelledError"
    with pytest.raises(TimeoutError):
        async with timeout(0):
            await asyncio.Event().wait()
    async with timeout(None) as one:
        pass
    assert not one.expired()
