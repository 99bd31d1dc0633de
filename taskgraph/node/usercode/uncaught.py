"""Reports errors that end threads and asyncio tasks of user code: Python only prints them.

When an attempt ends, `AttemptEnded` ends threads that hold its epoch open. That is expected, and not printed: a
failover would print a traceback for each thread. Other errors are printed by Python, and a node emits an event, too: a
hold of such a thread would stay open for ever, and nothing else would say why. A user's own `threading.excepthook`
stays.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from taskgraph.driver.loading import place_of
from taskgraph.epoch import AttemptEnded
from taskgraph.errors import error_text

__all__ = ["expected_ends_silenced", "is_expected_end", "report_uncaught", "set_reporter", "silence_expected_ends"]

_MAX_PLACES = 20
"""The most places in user code that a node reports: a thread may raise in each epoch."""
_report_error: Callable[[str], object] | None = None
_places: set[str] = set()


def is_expected_end(error: object) -> bool:
    """True if the error ended code that held an epoch open, when its attempt ended."""
    return isinstance(error, AttemptEnded) and error.held


def set_reporter(report: Callable[[str], object] | None) -> None:
    """Sets the function that `report_uncaught` calls with the text of an error, in any thread; None: no function."""
    global _report_error
    _report_error = report
    _places.clear()


def report_uncaught(error: object, what: str) -> None:
    """Reports an error that ended a thread or asyncio task of user code, once per place in that code.

    SystemExit is not reported, as Python does not print it.

    Args:
        what: names the thread or asyncio task that ended.
    """
    if _report_error is None or not isinstance(error, BaseException) or isinstance(error, AttemptEnded | SystemExit):
        return
    place = place_of(error)
    if place and place not in _places and len(_places) < _MAX_PLACES:
        _places.add(place)
        _report_error(
            f"{what} of the job's own code ended with {error_text(error)}{place}: what waits for it, as a hold, waits "
            f"on; the log of this node has the traceback"
        )


def silence_expected_ends() -> None:
    """Silences expected ends of threads in this process; called before user code is loaded, which may set a hook."""
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _report_unexpected


def _report_unexpected(args: threading.ExceptHookArgs) -> None:
    """Prints and reports an error that ended a thread, unless the end was expected."""
    if not is_expected_end(args.exc_value):
        threading.__excepthook__(args)
        report_uncaught(args.exc_value, "a thread")


class _ExpectedEndFilter:
    """The `threading.excepthook` of all `expected_ends_silenced` blocks: passes other errors to the earlier hook."""

    def __init__(self, before: Callable[[threading.ExceptHookArgs], object]) -> None:
        self.before = before
        self.blocks = 0

    def __call__(self, args: threading.ExceptHookArgs) -> None:
        if not is_expected_end(args.exc_value):
            self.before(args)


_hook_lock = threading.Lock()


@contextlib.contextmanager
def expected_ends_silenced() -> Iterator[None]:
    """Silences expected ends of threads within the block, in a process of the user; its hook gets all others.

    Blocks in several threads share one hook, since they end in any order.
    """
    with _hook_lock:
        hook = threading.excepthook
        if not isinstance(hook, _ExpectedEndFilter):
            hook = threading.excepthook = _ExpectedEndFilter(hook)
        hook.blocks += 1
    try:
        yield
    finally:
        with _hook_lock:
            hook.blocks -= 1
            if not hook.blocks and threading.excepthook is hook:  # otherwise a later hook may call this one
                threading.excepthook = hook.before
