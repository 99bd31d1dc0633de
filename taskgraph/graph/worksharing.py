"""Passes over large memory, shared block by block with threads on cores that are idle.

The caller works on the pass itself. Where the kernel says that cores are idle, a few helper threads of the
process take blocks from the same queue. Which thread took which block makes no difference to the result.

The caller waits for blocks that helpers have taken, and never for a helper: one that has not begun has taken none, and
finds none left when it comes. So with no core to spare the caller does all of it alone, or nearly all, where a core
that was idle a moment ago is not. A helper that loses its core in the middle of a block delays the caller until it has
one again, and by the rest of that block: on a busy machine some milliseconds, so helpers are not called there.

What is done with a block must release the interpreter's lock: numpy's copies do, and xxhash's digests of more than
100 kB. It should do so rarely, since each time two threads may have to wait for each other, for as long as it takes to
copy 256 KiB.
"""

from __future__ import annotations

import _thread
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from taskgraph.system.host import cores

__all__ = ["LEAST_BYTES", "for_each"]

LEAST_BYTES: Final = 16 << 20
"""Less is not worth sharing. Measured with a core to spare, a copy with its digest: 16 MiB gain a seventh of the time,
8 MiB a fiftieth, and 2 MiB lose by waking a helper."""
_MOST_HELPERS: Final = 3
"""A few cores use up what memory gives."""
_IDLE_S: Final = 1.0
"""How long a helper waits for the next pass before it ends."""

_LOOK_BLOCKS: Final = 8
"""After how many blocks the caller looks again for an idle core: an epoch begins with a rush on all nodes."""
_RUNNING: Final = "/proc/loadavg"
_MACHINE: Final = os.cpu_count() or 1

Work = Callable[[int], object]


def for_each(work: Work, blocks: int) -> None:
    """Calls `work` with each number below `blocks`, in this thread and in helpers, and returns when all have returned.

    Raises:
        what `work` raised first, wherever it did; blocks that no thread had taken by then are left out.
    """
    helpers = min(blocks - 1, cores() - 1, _MOST_HELPERS)
    if helpers > 0:
        _team.share(work, blocks, helpers)
    else:
        for block in range(blocks):
            work(block)


def idle() -> int:
    """Returns the number of idle cores of the machine; all but one if the kernel does not say."""
    try:
        fd = os.open(_RUNNING, os.O_RDONLY)
        try:
            running = int(os.read(fd, 128).split()[3].partition(b"/")[0])  # "0.20 0.18 0.12 1/80 11206": 1, this thread
        finally:
            os.close(fd)
    except (OSError, IndexError, ValueError):
        running = 1
    return _MACHINE - running


class _Pass:
    """One pass: the blocks that no thread has taken yet, and those that helpers have finished.

    A helper refers to `work` within a block only: what it works on is free as soon as the pass is over.
    """

    __slots__ = ("_blocks", "_count", "_ended", "_error", "_work")

    def __init__(self, work: Work, blocks: int) -> None:
        self._work: Work | None = work
        self._count = blocks
        self._blocks = deque(range(blocks))
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()  # an entry for each block of a helper
        self._error: BaseException | None = None

    def make(self, call: Callable[[], bool]) -> None:
        """Works on blocks in the caller's thread until all are done. `call` calls helpers, if there are idle cores."""
        mine, called = 0, False
        try:
            while self._blocks:
                if not called and mine % _LOOK_BLOCKS == 0:
                    called = call()
                mine += self._next()
            for _ in range(self._count - mine):
                self._ended.get()
        finally:
            self._work = None
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame

    def help(self) -> None:
        """Works on blocks in a helper's thread, until none is left."""
        while self._next():
            self._ended.put(None)

    def _next(self) -> bool:
        """Takes a block, if one is left, and works on it."""
        try:
            block = self._blocks.popleft()
        except IndexError:
            return False
        work = self._work
        if self._error is None and work is not None:
            try:
                work(block)
            except BaseException as error:
                self._error = self._error or error
        return True


class _Team:
    """The helpers of this process. They are daemons, and end when there was nothing to help with for a while."""

    def __init__(self) -> None:
        self._open: dict[_Pass, None] = {}
        self._waiting: deque[_thread.LockType] = deque()  # one of each helper that may be called: held until it is
        self._counting = threading.Lock()
        self._helpers = 0

    def share(self, work: Work, blocks: int, most: int) -> None:
        shared = _Pass(work, blocks)
        self._open[shared] = None  # before the call: a late helper must find this pass, and no older one
        try:
            shared.make(partial(self._call, most))
        finally:
            del self._open[shared]

    def _call(self, most: int) -> bool:
        helpers = min(most, idle())
        if helpers <= 0:
            return False
        # No lock that a helper may hold while it has no core: a thread too few, or a call too many, does no harm.
        if self._helpers < helpers and self._counting.acquire(blocking=False):
            try:
                while self._helpers < helpers:
                    _thread.start_new_thread(self._start, (f"taskgraph-helper_{self._helpers}",))
                    self._helpers += 1
            except RuntimeError:
                pass  # the system starts no more threads: the caller works alone
            finally:
                self._counting.release()
        for _ in range(helpers):
            try:
                call = self._waiting.popleft()  # the oldest: the helper called last may still work on another pass
            except IndexError:
                break  # the others look for themselves, before they wait
            call.release()
        return True

    def _start(self, name: str) -> None:
        """Starts a helper. Runs in a thread of its own, since `Thread.start` waits until the new thread has a core."""
        try:
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        except RuntimeError:
            self._ended()

    def _ended(self) -> None:
        with self._counting:
            self._helpers -= 1

    def _serve(self) -> None:
        # Not a queue that all of them wait at: up to Python 3.12 a `SimpleQueue.get` whose item went to another one
        # just before its timeout waits for ever.
        call = _thread.allocate_lock()
        call.acquire()
        while True:
            self._waiting.append(call)  # before it looks: who opens a pass after that calls it
            for shared in tuple(self._open):
                shared.help()
            if not call.acquire(timeout=_IDLE_S):
                try:
                    self._waiting.remove(call)
                except ValueError:
                    call.acquire()  # it is being called at this moment
                else:
                    self._ended()
                    return


_team = _Team()


def _after_fork() -> None:
    """A child has none of the helpers, and a lock of theirs may be held for ever."""
    global _team
    _team = _Team()


os.register_at_fork(after_in_child=_after_fork)
