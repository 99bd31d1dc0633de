"""Errors of user code, with a traceback that begins in user code."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taskgraph.errors import JobError, error_text
from taskgraph.protocol.deviceloss import device_error

__all__ = ["StuckError", "UserCodeError", "cancelled_by_users", "cuda_error", "defined_at", "from_users"]

_OURS = f"{Path(__file__).resolve().parents[2]}{os.sep}"  # all of the package


class UserCodeError(Exception):
    """User code raised. `where` is the hook, processor or handler; `traceback_text` begins in user code."""

    epoch: int | None = None
    """The epoch, if it is not the one at work: `on_commit` belongs to an earlier one."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__(error_text(error))
        self.where = where
        self.error = error
        self.traceback_text = _user_traceback(error)


class StuckError(Exception):
    """User code did not return within `cancel_s` after its attempt ended, or at its task's end.

    Only the end of the process ends it.
    """


def cancelled_by_users(of: str) -> JobError:
    """Returns the error for user code that cancelled an asyncio task of the framework."""
    return JobError(
        f"{of}code of the job cancelled the asyncio task it runs in, which is not its own (as "
        f"asyncio.current_task().cancel() does, a cancel of all tasks, or sys.exit in another one): to end a processor "
        f"return from it, to fail the job raise"
    )


def would_block() -> JobError:
    """Returns the error for a coroutine that calls `reply.wait()`."""
    return JobError("reply.wait() would block the event loop: in an `async def`, write `await reply`")


def cuda_error(error: BaseException | None) -> BaseException | None:
    """Returns the error of a CUDA device that is the cause, if any."""
    return device_error(error.error if isinstance(error, UserCodeError) else error)


def defined_at(function: Callable[..., Any]) -> str:
    """Says where a function is defined, in the form of a traceback; "" if it has no code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    frame = traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)
    return "\n\nThe handler is defined here:\n" + "".join(traceback.format_list([frame])).rstrip()


def _user_traceback(error: BaseException) -> str:
    """Formats the traceback from its first frame in user code on."""
    try:
        summary = traceback.TracebackException.from_exception(error)
        _without_ours(summary)
        return "".join(summary.format())
    except Exception as failed:  # e.g. a class whose __str__ raises, or groups nested too deeply
        return f"(its traceback cannot be shown: {error_text(failed)})\n{error_text(error)}\n"


def _without_ours(summary: traceback.TracebackException) -> None:
    """Removes our leading frames from each exception of a chain, and all frames of exceptions that we raised."""
    chain = [summary]
    while chain:
        at = chain.pop()
        chain += [before for before in (at.__cause__, at.__context__) if before is not None]
        users = from_users(at.stack)
        ours = users and users[0].filename.startswith(_OURS)
        at.stack[:] = [] if ours and at.__cause__ is not None else users


def from_users(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Returns the frames from the first one in user code on; all if there is none."""
    users = (i for i, frame in enumerate(frames) if not frame.filename.startswith(_OURS))
    return frames[next(users, 0) :]
