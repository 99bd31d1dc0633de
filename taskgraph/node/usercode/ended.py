"""Threads and coroutines that users start in a node: how those end whose attempt ended is no news; of others it is.

They are ended by `AttemptEnded`, which nobody catches: a failover would print a traceback for each. Who held the epoch
open did what is asked for; of anything else Python tells as ever, in the node's log. A node tells it as an event, too:
what waits for such a thread (a hold) waits for ever, and nothing else says why. What users set in the place of Python's
hook is left alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from taskgraph.driver.loading import place_of
from taskgraph.epoch import AttemptEnded
from taskgraph.errors import worded

__all__ = ["as_expected", "pass_ended_threads_over", "passing_ended_threads_over", "tell_unnoticed", "unnoticed"]

_MOST = 20
"""Places in code of users of which a node tells: a thread may raise in each epoch."""
_tell_of: Callable[[str], object] | None = None
_places: set[str] = set()


def as_expected(error: object) -> bool:
    """Whether it ended somebody who held the epoch open, as it should."""
    return isinstance(error, AttemptEnded) and error.held


def tell_unnoticed(tell: Callable[[str], object] | None) -> None:
    """What nobody took notice of is told here, too, from now on, in whatever thread that is; None: nowhere else."""
    global _tell_of
    _tell_of = tell
    _places.clear()


def unnoticed(error: object, what: str) -> None:
    """An error ended something that code of users started, as `what` says; of one that met no such code, it did not.

    Who calls `sys.exit` in a thread wants it to end: Python says nothing of that, either.
    """
    if _tell_of is None or not isinstance(error, BaseException) or isinstance(error, AttemptEnded | SystemExit):
        return
    place = place_of(error)
    if place and place not in _places and len(_places) < _MOST:
        _places.add(place)
        _tell_of(
            f"{what} of the job's own code ended with {worded(error)}{place}: what waits for it, as a hold, waits on; "
            f"the log of this node has the traceback"
        )


def pass_ended_threads_over() -> None:
    """From now on, in this process; before code of users is loaded, which may have a hook of its own."""
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _tell


def _tell(args: threading.ExceptHookArgs) -> None:
    if not as_expected(args.exc_value):
        threading.__excepthook__(args)
        unnoticed(args.exc_value, "a thread")


class _Passing:
    """A hook that goes on to the one before, for as long as there are blocks that want it."""

    def __init__(self, before: Callable[[threading.ExceptHookArgs], object]) -> None:
        self.before = before
        self.blocks = 0

    def __call__(self, args: threading.ExceptHookArgs) -> None:
        if not as_expected(args.exc_value):
            self.before(args)


_hooking = threading.Lock()


@contextlib.contextmanager
def passing_ended_threads_over() -> Iterator[None]:
    """The same within a block, in a process that is the user's: its own hook is told of anything else.

    Blocks of several threads have one hook between them: they do not end in the order in which they began.
    """
    with _hooking:
        hook = threading.excepthook
        if not isinstance(hook, _Passing):
            hook = threading.excepthook = _Passing(hook)
        hook.blocks += 1
    try:
        yield
    finally:
        with _hooking:
            hook.blocks -= 1
            if not hook.blocks and threading.excepthook is hook:  # else somebody set one that may go on to this one
                threading.excepthook = hook.before
