"""The loggers that our code uses: what code of users does to logging must end no node, and no launcher of theirs.

A handler of the root logger gets our lines, too, in the middle of ours, and so do filters and a factory of records.
What they raise in a call of `self.log` is an error of the task that calls it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from types import TracebackType
from typing import Any, ClassVar

from taskgraph.errors import class_name, worded

__all__ = ["guard_loggers", "guard_loggers_here"]

_OURS = ("taskgraph", "asyncio", "grpc")
_THEIRS = "taskgraph.task"
_told = False


class _Guarded(logging.Logger):
    caught: ClassVar[tuple[type[BaseException], ...]] = (Exception, SystemExit)
    whose: ClassVar[str] = "taskgraph node"

    def makeRecord(self, name: str, level: int, fn: str, lno: int, msg: object, *more: Any, **named: Any) -> Any:
        try:
            return super().makeRecord(name, level, fn, lno, msg, *more, **named)
        except self.caught as error:
            _tell(error, self.whose)
            args, exc_info, *_ = (*more, None)
            return logging.LogRecord(name, level, fn, lno, msg, args, exc_info)

    def handle(self, record: logging.LogRecord) -> None:
        try:
            super().handle(record)
        except self.caught as error:
            _tell(error, self.whose)


class _GuardedHere(_Guarded):
    """In a program of the user's, which may end itself in a handler."""

    caught = (Exception,)
    whose = "taskgraph"


def guard_loggers() -> None:
    """Does so in a node, for all that there are: those of the modules that are loaded."""
    _guard(_OURS, _Guarded)


def guard_loggers_here() -> None:
    """The same in a program of the user's, whose other loggers are none of our business."""
    _guard(_OURS[:1], _GuardedHere)


def _guard(names: tuple[str, ...], by: type[_Guarded]) -> None:
    for name, logger in tuple(logging.root.manager.loggerDict.items()):
        first = name.partition(".")[0]
        if type(logger) is logging.Logger and first in names and not f"{name}.".startswith(f"{_THEIRS}."):
            logger.__class__ = by


def _tell(error: BaseException, whose: str) -> None:
    global _told
    if _told:
        return
    _told = True
    who = _who(error.__traceback__) or "what user code set logging up with"
    with contextlib.suppress(Exception):  # standard error may be anything by now
        where = "".join(traceback.format_exception(error))
        sys.stderr.write(f"{whose}: {who} raises {worded(error)}, and misses lines that taskgraph logs:\n{where}")
        sys.stderr.flush()


def _who(trace: TracebackType | None) -> str:
    """The handler, or the filter, that raised."""
    found = ""
    while trace is not None:
        asked = trace.tb_frame.f_locals.get("self")
        if isinstance(asked, logging.Handler | logging.Filter):
            kind = "handler" if isinstance(asked, logging.Handler) else "filter"
            found = f"the logging {kind} {class_name(type(asked))}"
        trace = trace.tb_next
    return found
