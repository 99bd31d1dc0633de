"""Splits passes over large memory into blocks, and shares the blocks with threads on idle cores.

The calling thread works on the pass, too. If the kernel reports idle cores, a few helper threads of the process take
blocks from the same queue. Which thread took which block makes no difference to the result.

The caller waits for blocks that helpers have taken, never for a helper: a helper that starts late finds no block left.
So on a busy machine the caller does nearly all the work alone. A helper that loses its core in the middle of a block
delays the caller by some milliseconds, so helpers are not called where no core is idle.

The work on a block must release the interpreter's lock: numpy's copies do, and xxhash's digests of more than 100 kB. It
should release the lock rarely, since at each release two threads may wait for each other for the time of a copy of
256 KiB.
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
"""Smaller passes are not shared. Measured with an idle core, a copy with its digest: 16 MiB gain a seventh of the time,
8 MiB a fiftieth, and 2 MiB lose by waking a helper."""
_MOST_HELPERS: Final = 3
"""A few cores use up the memory bandwidth."""
_IDLE_S: Final = 1.0
"""How long a helper waits for the next pass before it ends."""

_RECHECK_BLOCKS: Final = 8
"""Blocks after which the caller looks for idle cores again: an epoch begins with a rush on all nodes."""
_LOADAVG_PATH: Final = "/proc/loadavg"
_MACHINE_CORES: Final = os.cpu_count() or 1

Work = Callable[[int], object]


def for_each(work: Work, blocks: int) -> None:
    """Calls `work` with each number below `blocks`, in this thread and in helpers, and returns when all have returned.

    Raises:
        the first exception of `work` in any thread; blocks that no thread had taken by then are skipped.
    """
    helpers = min(blocks - 1, cores() - 1, _MOST_HELPERS)
    if helpers > 0:
        _team.share(work, blocks, helpers)
    else:
        for block in range(blocks):
            work(block)


def idle_cores() -> int:
    """Returns the number of idle cores of the machine; all but one if the kernel does not say."""
    try:
        fd = os.open(_LOADAVG_PATH, os.O_RDONLY)
        try:
            running = int(os.read(fd, 128).split()[3].partition(b"/")[0])  # "0.20 0.18 0.12 1/80 11206": 1, this thread
        finally:
            os.close(fd)
    except (OSError, IndexError, ValueError):
        running = 1
    return _MACHINE_CORES - running


class _Pass:
    """The state of one pass: blocks that no thread has taken yet, and blocks that helpers have finished.

    A helper refers to `work` only within a block, so that the memory of a pass is free as soon as the pass is over.
    """

    __slots__ = ("_block_count", "_blocks", "_error", "_finished_by_helpers", "_work")

    def __init__(self, work: Work, blocks: int) -> None:
        self._work: Work | None = work
        self._block_count = blocks
        self._blocks = deque(range(blocks))
        self._finished_by_helpers: queue.SimpleQueue[None] = queue.SimpleQueue()  # an entry for each block of a helper
        self._error: BaseException | None = None

    def run(self, call: Callable[[], bool]) -> None:
        """Works on blocks in the caller's thread until all are done, then raises the first error of any thread.

        Args:
            call: wakes helpers; returns False if no core is idle.
        """
        mine, called = 0, False
        try:
            while self._blocks:
                if not called and mine % _RECHECK_BLOCKS == 0:
                    called = call()
                mine += self._work_on_next_block()
            for _ in range(self._block_count - mine):
                self._finished_by_helpers.get()
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
        while self._work_on_next_block():
            self._finished_by_helpers.put(None)

    def _work_on_next_block(self) -> bool:
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


class _HelperThreads:
    """The helper threads of this process: daemons that end after `_IDLE_S` without work."""

    def __init__(self) -> None:
        self._open_passes: dict[_Pass, None] = {}
        self._idle_helper_locks: deque[_thread.LockType] = deque()  # to release one wakes its helper
        self._helpers_lock = threading.Lock()
        self._helpers = 0

    def share(self, work: Work, blocks: int, most: int) -> None:
        """Works on a pass with helpers, `most` at most. Returns when all its blocks are done."""
        shared = _Pass(work, blocks)
        self._open_passes[shared] = None  # before the call: a late helper must find this pass, and no older one
        try:
            shared.run(partial(self._wake_helpers, most))
        finally:
            del self._open_passes[shared]

    def _wake_helpers(self, most: int) -> bool:
        """Wakes or starts a helper for each idle core, `most` at most. Returns False if no core is idle."""
        helpers = min(most, idle_cores())
        if helpers <= 0:
            return False
        # Never wait for a lock that a helper without a core may have: a helper too few, or too many, does no harm.
        if self._helpers < helpers and self._helpers_lock.acquire(blocking=False):
            try:
                while self._helpers < helpers:
                    _thread.start_new_thread(self._start_helper, (f"taskgraph-helper_{self._helpers}",))
                    self._helpers += 1
            except RuntimeError:
                pass  # the system starts no more threads: the caller works alone
            finally:
                self._helpers_lock.release()
        for _ in range(helpers):
            try:
                call = self._idle_helper_locks.popleft()  # the oldest: the newest may still work on another pass
            except IndexError:
                break  # busy helpers look for open passes themselves before they wait
            call.release()
        return True

    def _start_helper(self, name: str) -> None:
        """Starts a helper. Runs in its own thread, since `Thread.start` waits until the new thread has a core."""
        try:
            threading.Thread(target=self._helper_loop, name=name, daemon=True).start()
        except RuntimeError:
            self._count_helper_down()

    def _count_helper_down(self) -> None:
        """Notes that a helper has ended."""
        with self._helpers_lock:
            self._helpers -= 1

    def _helper_loop(self) -> None:
        """Works on all open passes, again and again; ends after `_IDLE_S` without a call. Runs in a helper."""
        # A lock for each helper, not a shared queue: up to Python 3.12 `SimpleQueue.get` waits for ever if another
        # thread takes the item just before the timeout.
        call = _thread.allocate_lock()
        call.acquire()
        while True:
            self._idle_helper_locks.append(
                call
            )  # before looking for passes: a caller that opens a pass later wakes this helper
            for shared in tuple(self._open_passes):
                shared.help()
            if not call.acquire(timeout=_IDLE_S):
                try:
                    self._idle_helper_locks.remove(call)
                except ValueError:
                    call.acquire()  # it is being called at this moment
                else:
                    self._count_helper_down()
                    return


_team = _HelperThreads()


def _replace_team_after_fork() -> None:
    """Replaces the team in a forked child, which has no helper threads, and maybe locks that no thread will release."""
    global _team
    _team = _HelperThreads()


os.register_at_fork(after_in_child=_replace_team_after_fork)
