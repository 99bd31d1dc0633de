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

__all__ = ["StuckError", "UserCodeError", "cancelled_by_user_error", "cuda_error", "definition_text", "user_frames"]

_PACKAGE_DIR = f"{Path(__file__).resolve().parents[2]}{os.sep}"  # all of the package


class UserCodeError(Exception):
    """An error of user code. `where` is the hook, processor or handler; `traceback_text` begins in user code."""

    epoch: int | None = None
    """The epoch of the error, if it is not the epoch at work: `on_commit` belongs to an earlier epoch."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__(error_text(error))
        self.where = where
        self.error = error
        self.traceback_text = _user_traceback(error)


class StuckError(Exception):
    """User code did not return within `cancel_s` after its attempt ended, or at its task's end.

    Only the end of the process ends such code.
    """


def cancelled_by_user_error(of: str) -> JobError:
    """Returns the error for user code that cancelled an asyncio task of the framework."""
    return JobError(
        f"{of}code of the job cancelled the asyncio task it runs in, which is not its own (as "
        f"asyncio.current_task().cancel() does, a cancel of all tasks, or sys.exit in another one): to end a processor "
        f"return from it, to fail the job raise"
    )


def would_block_error() -> JobError:
    """Returns the error for a coroutine that calls `reply.wait()`."""
    return JobError("reply.wait() would block the event loop: in an `async def`, write `await reply`")


def cuda_error(error: BaseException | None) -> BaseException | None:
    """Returns the CUDA device error among an error and its causes; None: there is none."""
    return device_error(error.error if isinstance(error, UserCodeError) else error)


def definition_text(function: Callable[..., Any]) -> str:
    """Returns text on where a handler is defined, in the form of a traceback; "" if it has no Python code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    frame = traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)
    return "\n\nThe handler is defined here:\n" + "".join(traceback.format_list([frame])).rstrip()


def _user_traceback(error: BaseException) -> str:
    """Formats an error's traceback, from its first frame in user code on."""
    try:
        summary = traceback.TracebackException.from_exception(error)
        _remove_framework_frames(summary)
        return "".join(summary.format())
    except Exception as failed:  # e.g. a class whose __str__ raises, or groups nested too deeply
        return f"(its traceback cannot be shown: {error_text(failed)})\n{error_text(error)}\n"


def _remove_framework_frames(summary: traceback.TracebackException) -> None:
    """Removes the framework's leading frames from each exception of a chain, or all if the framework raised it."""
    chain = [summary]
    while chain:
        at = chain.pop()
        chain += [before for before in (at.__cause__, at.__context__) if before is not None]
        users = user_frames(at.stack)
        ours = users and users[0].filename.startswith(_PACKAGE_DIR)
        at.stack[:] = [] if ours and at.__cause__ is not None else users


def user_frames(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Returns the frames from the first frame in user code on; all frames if none is in user code."""
    users = (i for i, frame in enumerate(frames) if not frame.filename.startswith(_PACKAGE_DIR))
    return frames[next(users, 0) :]
