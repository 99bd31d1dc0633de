"""Errors that end threads and asyncio tasks of user code, which Python prints only.

When an attempt ends, `AttemptEnded` ends threads that hold its epoch open. That is expected, and not printed, or a
failover would print a traceback for each. Other errors are printed by Python, and a node emits an event, too: a hold of
such a thread would stay open for ever, and nothing else would say why. A hook that users set in place of Python's
stays.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from taskgraph.driver.loading import place_of
from taskgraph.epoch import AttemptEnded
from taskgraph.errors import worded

__all__ = ["as_expected", "pass_ended_threads_over", "passing_ended_threads_over", "tell_unnoticed", "unnoticed"]

_MAX_PLACES = 20
"""Places in user code that a node reports, at most: a thread may raise in each epoch."""
_on_unnoticed: Callable[[str], object] | None = None
_places: set[str] = set()


def as_expected(error: object) -> bool:
    """True if the error ended code that held an epoch open, when its attempt ended."""
    return isinstance(error, AttemptEnded) and error.held


def tell_unnoticed(tell: Callable[[str], object] | None) -> None:
    """Sets what is called, in any thread, with errors that no code handles; None for nothing."""
    global _on_unnoticed
    _on_unnoticed = tell
    _places.clear()


def unnoticed(error: object, what: str) -> None:
    """Reports an error that ended a thread or asyncio task of user code, once per place in that code.

    SystemExit is not reported, as Python does not print it.

    Args:
        what: what ended, in words.
    """
    if _on_unnoticed is None or not isinstance(error, BaseException) or isinstance(error, AttemptEnded | SystemExit):
        return
    place = place_of(error)
    if place and place not in _places and len(_places) < _MAX_PLACES:
        _places.add(place)
        _on_unnoticed(
            f"{what} of the job's own code ended with {worded(error)}{place}: what waits for it, as a hold, waits on; "
            f"the log of this node has the traceback"
        )


def pass_ended_threads_over() -> None:
    """Silences expected ends of threads in this process; called before user code is loaded, which may set a hook."""
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _tell


def _tell(args: threading.ExceptHookArgs) -> None:
    if not as_expected(args.exc_value):
        threading.__excepthook__(args)
        unnoticed(args.exc_value, "a thread")


class _Passing:
    """A hook for all blocks of `passing_ended_threads_over`, which calls the hook before it."""

    def __init__(self, before: Callable[[threading.ExceptHookArgs], object]) -> None:
        self.before = before
        self.blocks = 0

    def __call__(self, args: threading.ExceptHookArgs) -> None:
        if not as_expected(args.exc_value):
            self.before(args)


_hooking = threading.Lock()


@contextlib.contextmanager
def passing_ended_threads_over() -> Iterator[None]:
    """Silences expected ends of threads within the block, in a process of the user; its hook gets all others.

    Blocks in several threads share one hook, since they end in any order.
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
            if not hook.blocks and threading.excepthook is hook:  # otherwise a later hook may call this one
                threading.excepthook = hook.before
