"""What goes wrong in user code, worded for who wrote it: with a traceback that begins in it."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taskgraph.errors import JobError, worded
from taskgraph.protocol.deviceloss import device_error

__all__ = ["StuckError", "UserCodeError", "cancelled_by_users", "defined_at", "from_users", "met"]

_OURS = f"{Path(__file__).resolve().parents[2]}{os.sep}"  # all of the package


class UserCodeError(Exception):
    """User code raised. `where` is the hook, processor or handler; `traceback_text` begins in user code."""

    epoch: int | None = None
    """Which one it is of, where that is not the one at work: `on_commit` is of one before."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__(worded(error))
        self.where = where
        self.error = error
        self.traceback_text = _user_traceback(error)


class StuckError(Exception):
    """User code did not return within `cancel_s` after its attempt ended, or at its task's end.

    Only the end of the process frees it.
    """


def cancelled_by_users(of: str) -> JobError:
    """What to say where an asyncio task of ours was cancelled, and not by us."""
    return JobError(
        f"{of}code of the job cancelled the asyncio task it runs in, which is not its own (as "
        f"asyncio.current_task().cancel() does, a cancel of all tasks, or sys.exit in another one): to end a processor "
        f"return from it, to fail the job raise"
    )


def would_block() -> JobError:
    """What to say where a coroutine of a user waits for a reply as a thread does."""
    return JobError("reply.wait() would block the event loop: in an `async def`, write `await reply`")


def met(error: BaseException | None) -> BaseException | None:
    """The error of a CUDA device that user code met, if it did."""
    return device_error(error.error if isinstance(error, UserCodeError) else error)


def defined_at(function: Callable[..., Any]) -> str:
    """Where a function is defined, in the form of a traceback, to follow a message; "" where it is no plain one."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    frame = traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)
    return "\n\nThe handler is defined here:\n" + "".join(traceback.format_list([frame])).rstrip()


def _user_traceback(error: BaseException) -> str:
    """The traceback without our frames at its beginning: it starts where user code does, if it comes to that."""
    try:
        summary = traceback.TracebackException.from_exception(error)
        _without_ours(summary)
        return "".join(summary.format())
    except Exception as failed:  # what is told of may be of any kind: too deep a nest of groups, a class that raises
        return f"(its traceback cannot be told: {worded(failed)})\n{worded(error)}\n"


def _without_ours(summary: traceback.TracebackException) -> None:
    """The same of each exception of a chain. One that is ours says what became of the user's: it has no place there."""
    chain = [summary]
    while chain:
        at = chain.pop()
        chain += [before for before in (at.__cause__, at.__context__) if before is not None]
        users = from_users(at.stack)
        ours = users and users[0].filename.startswith(_OURS)
        at.stack[:] = [] if ours and at.__cause__ is not None else users


def from_users(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """From the first frame on that is not ours; all where there is none."""
    users = (i for i, frame in enumerate(frames) if not frame.filename.startswith(_OURS))
    return frames[next(users, 0) :]
