"""The loggers that the main code of a node uses: what code of users does to logging must not end the node.

A handler of the root logger gets our lines, too, in the middle of ours, and so do filters and a factory of records.
What they raise in a call of `self.log` is an error of the task that calls it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from types import TracebackType
from typing import Any

from taskgraph.errors import class_name, worded

__all__ = ["guard_loggers"]

_OURS = ("taskgraph", "asyncio", "grpc")
_THEIRS = "taskgraph.task"
_told = False


class _Guarded(logging.Logger):
    def makeRecord(self, name: str, level: int, fn: str, lno: int, msg: object, *more: Any, **named: Any) -> Any:
        try:
            return super().makeRecord(name, level, fn, lno, msg, *more, **named)
        except (Exception, SystemExit) as error:
            _tell(error)
            args, exc_info, *_ = (*more, None)
            return logging.LogRecord(name, level, fn, lno, msg, args, exc_info)

    def handle(self, record: logging.LogRecord) -> None:
        try:
            super().handle(record)
        except (Exception, SystemExit) as error:
            _tell(error)


def guard_loggers() -> None:
    """Does so for all that there are: those of the modules that are loaded."""
    for name, logger in tuple(logging.root.manager.loggerDict.items()):
        first = name.partition(".")[0]
        if type(logger) is logging.Logger and first in _OURS and not f"{name}.".startswith(f"{_THEIRS}."):
            logger.__class__ = _Guarded


def _tell(error: BaseException) -> None:
    global _told
    if _told:
        return
    _told = True
    who = _who(error.__traceback__) or "what user code set logging up with"
    with contextlib.suppress(Exception):  # standard error may be anything by now
        where = "".join(traceback.format_exception(error))
        sys.stderr.write(f"taskgraph node: {who} raises {worded(error)}, and misses lines of the node's log:\n{where}")
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
