"""A timeout holds while a task that was cancelled puts things in order: on Python 3.11.2, too, as Debian 12 has it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import pytest

from taskgraph.timeouts import correct


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


async def tidied(timeouts: type[asyncio.Timeout], *, again: bool = False) -> str:
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
    correct(Early)
    assert await tidied(Early) == "TimeoutError"
    assert await tidied(Early, again=True) == "CancelledError"
    with pytest.raises(TimeoutError):
        async with Early(asyncio.get_running_loop().time()):
            await asyncio.Event().wait()
    async with Early(None) as one:
        pass
    assert not one.expired()


@pytest.mark.parametrize("entry", ["launch.run", "node.process", "commands.common", "testing", "coordination.embedded"])
def test_wherever_it_begins_timeouts_hold(entry: str) -> None:
    code = f"""
import asyncio, sys, taskgraph.{entry}
assert "taskgraph.timeouts" in sys.modules
sys.path.append({str(Path(__file__).parent)!r})
from test_timeouts import tidied
print(asyncio.run(tidied(asyncio.Timeout)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("TimeoutError\n", "")
