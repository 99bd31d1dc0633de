"""Children that user code forks end where they come back to us.

They have what their parent has: its sockets, what wakes its event loop and its threads. One that went on beside it
would answer for it, and take what it was to read. One that runs another program, or ends by itself as those of
`multiprocessing` do, is left alone.

A signal to a child is the child's: it has its parent's handlers and what these write to, so that the SIGTERM with which
a pool of `multiprocessing` ends its workers would tell the node to leave, and end no worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from typing import NoReturn

__all__ = ["count", "end_child", "kept_from_children"]

count = 0
"""How many forks lie between this process and the first one that imported this: dearer to ask for is its number."""

_loops: list[tuple[asyncio.AbstractEventLoop, int]] = []
"""Event loops that nodes run in, and their threads."""

_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""What event loops that nodes run in may have handlers for."""

_masks: dict[int, set[int | signal.Signals]] = {}
"""Of threads that are about to fork: the signals that they had blocked before."""


def end_child(who: str, error: BaseException | None = None) -> NoReturn:
    """In a child: ends it, and says so. What cleans up at a process's end is its parent's."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        os._exit(error.code or 0)
    said = "".join(traceback.format_exception(error)) if error is not None else ""
    text = f"{said}{who}: a function forked this process, and the child came back from it: the child ends here\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))  # `sys.stderr` may be locked by a thread that is the parent's alone
    os._exit(1)


@contextlib.contextmanager
def kept_from_children() -> Iterator[None]:
    """Within, a child ends where it comes to the running event loop: also one of what user code starts there itself.

    What `Actor` calls is looked at where it comes back, which is before.
    """
    mine = (asyncio.get_running_loop(), threading.get_ident())
    _loops.append(mine)
    try:
        yield
    finally:
        _loops.remove(mine)


def _before_fork() -> None:
    # A child may get its signal before it has come to `_after_fork`: it waits until then.
    if _loops:
        _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _unblock() -> None:
    mask = _masks.pop(threading.get_ident(), None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork() -> None:
    global count
    count += 1
    for loop, thread in _loops:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        if thread == threading.get_ident():
            _end_in(loop)
            break  # it may be the loop of several nodes
    _unblock()


def _end_in(loop: asyncio.AbstractEventLoop) -> None:
    """In a child: it ends when its task returns or awaits something, before the loop reads what is its parent's.

    A task that ends calls its callbacks soon; one that awaits nothing in particular goes on soon; a future that it
    awaits is cancelled, since it is itself, and calls its callbacks soon. What is no task ends one turn later.
    """
    loop.call_soon(_came_back)
    loop.call_soon = _came_back  # type: ignore[method-assign]
    task = asyncio.current_task(loop)
    if task is not None:
        task.add_done_callback(_came_back)
        task.cancel()


def _came_back(*_: object, **__: object) -> NoReturn:
    end_child("the event loop")


os.register_at_fork(before=_before_fork, after_in_parent=_unblock, after_in_child=_after_fork)
