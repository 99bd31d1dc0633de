"""Ends child processes that user code forks when they return into the framework.

A child has its parent's sockets and event loop: it would answer calls in its parent's place, and read its parent's
messages. A child that runs another program, or ends by itself as those of `multiprocessing` do, is left alone.

A child also inherits signal handlers, which write to its parent's event loop: the SIGTERM by which a pool of
`multiprocessing` ends its workers would make the node leave. So the handlers are removed in the child.
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

__all__ = ["count", "end_child", "ending_forked_children"]

count = 0
"""The number of forks between this process and the one that imported this module: faster to read than a process id."""

_loops: list[tuple[asyncio.AbstractEventLoop, int]] = []
"""Event loops of nodes, and their threads."""

_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that the event loop of a node may handle."""

_masks: dict[int, set[int | signal.Signals]] = {}
"""Thread that forks -> the signals that it had blocked before."""


def end_child(who: str, error: BaseException | None = None) -> NoReturn:
    """Ends this process, a forked child: prints why, unless `error` is SystemExit, and runs no exit handlers, which are
    its parent's.
    """
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        os._exit(error.code or 0)
    said = "".join(traceback.format_exception(error)) if error is not None else ""
    text = f"{said}{who}: a function forked this process, and the child returned from it: the child ends here\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))  # a thread of the parent may hold the lock of `sys.stderr`
    os._exit(1)


@contextlib.contextmanager
def ending_forked_children() -> Iterator[None]:
    """Within the block, a forked child ends when it reaches the running event loop, also in a user's asyncio task.

    Children of code that `Actor` calls end earlier: when that code returns.
    """
    mine = (asyncio.get_running_loop(), threading.get_ident())
    _loops.append(mine)
    try:
        yield
    finally:
        _loops.remove(mine)


def _before_fork() -> None:
    """Blocks the signals that a node handles, in the thread that is about to fork."""
    # A signal that reaches the child before `_after_in_child` must wait until then.
    if _loops:
        _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _unblock() -> None:
    """Restores the signals that `_before_fork` blocked in this thread."""
    mask = _masks.pop(threading.get_ident(), None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_in_child() -> None:
    """In the child: removes the loop's signal handlers, and makes the child end if it was forked in the loop's
    thread.
    """
    global count
    count += 1
    for loop, thread in _loops:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        if thread == threading.get_ident():
            _end_child_in(loop)
            break  # several nodes may share the loop
    _unblock()


def _end_child_in(loop: asyncio.AbstractEventLoop) -> None:
    """Makes this child process end when its asyncio task returns or awaits, before it reads its parent's messages.

    Both make the loop call `call_soon`: for callbacks of the task, its next step, or a cancelled future that it awaits.
    """
    loop.call_soon(_end_returned_child)
    loop.call_soon = _end_returned_child  # type: ignore[method-assign]
    task = asyncio.current_task(loop)
    if task is not None:
        task.add_done_callback(_end_returned_child)
        task.cancel()


def _end_returned_child(*_: object, **__: object) -> NoReturn:
    end_child("the event loop")


os.register_at_fork(before=_before_fork, after_in_parent=_unblock, after_in_child=_after_in_child)
