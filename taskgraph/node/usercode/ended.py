"""Threads and coroutines that users start in a node: how those end whose attempt ended is no news.

They are ended by `AttemptEnded`, which nobody catches: a failover would print a traceback for each. Who held the epoch
open did what is asked for; of anything else Python tells as ever. What users set in its place is left alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from taskgraph.epoch import AttemptEnded

__all__ = ["as_expected", "pass_ended_threads_over", "passing_ended_threads_over"]


def as_expected(error: object) -> bool:
    """Whether it ended somebody who held the epoch open, as it should."""
    return isinstance(error, AttemptEnded) and error.held


def pass_ended_threads_over() -> None:
    """From now on, in this process; before code of users is loaded, which may have a hook of its own."""
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _tell


def _tell(args: threading.ExceptHookArgs) -> None:
    if not as_expected(args.exc_value):
        threading.__excepthook__(args)


@contextlib.contextmanager
def passing_ended_threads_over() -> Iterator[None]:
    """The same within a block, in a process that is the user's: its own hook is told of anything else."""
    before = threading.excepthook

    def tell(args: threading.ExceptHookArgs) -> None:
        if not as_expected(args.exc_value):
            before(args)

    threading.excepthook = tell
    try:
        yield
    finally:
        if threading.excepthook is tell:  # else somebody set another one meanwhile, who may go on to this one
            threading.excepthook = before
