"""Worker threads for plain `def` hooks, computes and handlers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from taskgraph.errors import JobError, no_thread
from taskgraph.node.usercode import forks

__all__ = ["Begun", "PooledThreads", "Threads", "Work"]

R = TypeVar("R")


class Work(Protocol[R]):
    """A function on its way through a thread and back. For the event loop's thread."""

    over: bool
    """It ended before `start` returned, and all that it told was done by then."""
    took_s: float
    """How long it ran; of one that ended."""

    def result(self) -> R:
        """What it returned, or raises what it raised; of one that is over, once."""

    def future(self) -> asyncio.Future[R]:
        """Has its result once it ends. Cancelling that stops nothing: there may be another future then."""


class Threads(Protocol):
    """Runs functions outside the event loop. `taskgraph.testing` has one that runs them in lock-step with it."""

    in_step: bool
    """Whether it does: what is run again happens at the same moments then."""
    context: Context
    """The context in which the node was made, after the driver was imported."""

    def clock(self) -> float:
        """Seconds, by the clock that what runs in them takes its time of."""

    def start(self, function: Callable[[], R], *, brief: bool) -> Work[R]:
        """Starts `function` in a thread.

        Args:
            brief: it seems to take no longer than the way to a thread and back: the event loop waits for it for a
                moment, and may find it over.
        """

    def run(self, function: Callable[[], R]) -> asyncio.Future[R]:
        """Starts `function` in a thread. Cancelling the future stops nothing that has begun."""

    def tell(self, function: Callable[..., object], *args: object) -> None:
        """In any thread: calls `function` on the event loop, in the order told.

        What is told before a function ends is done before anybody hears of its end.
        """

    def block(self, future: concurrent.futures.Future[R], timeout_s: float | None) -> R:
        """In a worker thread: waits for `future`. Every wait of a worker thread goes through here."""

    def abandon(self) -> None:
        """Cancels the futures of functions that have not ended: whoever waits for them leaves them behind."""

    def close(self) -> None:
        """No more work is accepted; idle threads end."""


class Begun(Generic[R]):
    """`Work` that a future stands for."""

    over = False
    took_s = 0.0

    def __init__(self, future: asyncio.Future[R]) -> None:
        self._future = future

    def result(self) -> R:
        return self._future.result()

    def future(self) -> asyncio.Future[R]:
        return asyncio.shield(self._future)


_GIVES_WAY_S = 200e-6
"""How long the event loop waits for a brief function. Some of it is for a thread that wakes up on another processor."""
_SETTLED_S = 0.005
"""How often it is looked, at a job's end, whether all has ended: a file on a disk takes about as long."""

_WAKES = (1).to_bytes(8, sys.byteorder)
"""What an eventfd takes: a number. Written once for each time that it is read."""


class PooledThreads:
    """Threads that are made when needed and reused.

    They are daemons, unlike those of `concurrent.futures`, which the interpreter joins at its exit: a compute that
    never returns must not keep the process.

    A hop to a thread and back is switches between threads, and many of these are of one that wakes up only to wait for
    the GIL. So an idle thread waits in `read`, and is woken by a `write`, which leaves it the GIL. And the event loop
    waits for a brief function, with the GIL free: that saves a future and a round of the loop, and what the function
    told is done at once. It waits for `_GIVES_WAY_S` at most: of what is not over by then, it hears as of any other.

    Where no thread can be made, work waits for one to come back. Where all there are wait for replies, it may be what
    they wait for, and fails.
    """

    in_step = False

    def __init__(self, name: str, limit: int) -> None:
        self.context = copy_context()
        self._name = name
        self._limit = limit
        self._forks = forks.count
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._threads = 0
        self._blocked = 0  # threads that wait for what others are to do: they do not count
        self._idle: list[_Thread] = []  # the last is the one whose memory is warm
        self._waiting: deque[_Work[Any]] = deque()  # for a thread
        self._why_none = ""  # why no more threads could be made, when that was so last
        self._closed = False
        self.awaited: dict[_Work[Any], None] = {}  # of which somebody waits for a future
        self._told: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._heard = False  # the loop is about to look at what is told

    def run(self, function: Callable[[], R]) -> asyncio.Future[R]:
        work = self.start(function, brief=False)
        future = work.future()
        future.add_done_callback(work.waited)
        return future

    def clock(self) -> float:
        return time.perf_counter()

    def start(self, function: Callable[[], R], *, brief: bool) -> _Work[R]:
        work = _Work(self, self._loop, function)
        with self._lock:
            if self._closed:
                raise RuntimeError("the node's threads are closed")
            thread = self._idle.pop() if self._idle else None
            if thread is None:
                if self._threads - self._blocked >= self._limit or not self._made_for(work):
                    self._waiting.append(work)
                    self._fail_starved()
                return work
        if not brief:
            thread.wake(work)
            return work
        ended = work.ending = threading.Lock()
        ended.acquire()
        heard, self._heard = self._heard, True
        try:
            thread.wake(work)
            over = ended.acquire(timeout=_GIVES_WAY_S)
        finally:
            self._heard = heard  # from now on, who tells something wakes the loop again
        if self._told:
            self._hear()
        work.over = over
        return work

    def _made_for(self, work: _Work[Any]) -> bool:
        """Whether there is another thread now, which does this."""
        try:
            _Thread(self._serve, f"{self._name}_{self._threads}", work)
        except (OSError, RuntimeError) as error:  # no thread is to be had at the moment
            if not self._threads:
                raise JobError(f"none of its code can run: {no_thread(error) or error}") from error
            self._why_none = str(error)
            return False
        self._threads += 1
        return True

    def _fail_starved(self) -> None:
        """Work that waits for a thread fails where none is left that could come to it."""
        if self._blocked < self._threads:
            return
        while self._waiting:
            self._waiting.popleft().fail(
                JobError(
                    f"it cannot run: {self._blocked} functions (`def`) wait for replies here, in a thread each, and no "
                    f"more threads can be made ({self._why_none}); make handlers that wait `async def`, and `await` "
                    "the reply there in place of reply.wait()"
                )
            )

    def tell(self, function: Callable[..., object], *args: object) -> None:
        self._told.append((function, args))
        if not self._heard:
            self._heard = True
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
                self._loop.call_soon_threadsafe(self._hear)

    def _hear(self) -> None:
        """On the loop."""
        self._heard = False
        told = self._told
        while told:
            function, args = told.popleft()
            try:
                function(*args)
            except Exception as error:
                self._loop.call_exception_handler({"message": f"Exception in {function!r}", "exception": error})

    def _serve(self, thread: _Thread) -> None:
        """In the thread."""
        while (work := thread.work) is not None:
            thread.work = None
            work.do()
            if forks.count != self._forks:
                work.end_child()
            with self._lock:
                spare = self._threads - self._blocked > self._limit  # those that it stood in for are back
                idle = not self._waiting and not self._closed and not spare
                if idle and not thread.can_wait():
                    spare, idle = True, False
                if spare:
                    self._threads -= 1
                elif idle:
                    self._idle.append(thread)
                elif self._waiting:
                    thread.work = self._waiting.popleft()
            work.end()
            del work  # an idle thread keeps nothing of what it did
            if idle:
                thread.wait()
        thread.close()

    def block(self, future: concurrent.futures.Future[R], timeout_s: float | None) -> R:
        with self._lock:
            self._blocked += 1
            if self._waiting:
                if self._made_for(self._waiting[0]):  # it may be the very one that is waited for
                    self._waiting.popleft()
                else:
                    self._fail_starved()
        try:
            return future.result(timeout_s)
        finally:
            with self._lock:
                self._blocked -= 1

    def abandon(self) -> None:
        for work in tuple(self.awaited):
            work.give_up()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for thread in self._idle:  # one at work ends after what was accepted
                thread.wake(None)
            self._idle.clear()

    async def settled(self, timeout_s: float) -> None:
        """Waits until what was run has ended, also what nobody waits for any more; not longer than that."""
        until = time.monotonic() + timeout_s
        while self.awaited and time.monotonic() < until:  # noqa: ASYNC110 (whose end tells that is on the hot path)
            await asyncio.sleep(_SETTLED_S)


class _Thread:
    """A thread, and what wakes it: an eventfd, which is one descriptor; elsewhere than on Linux a pipe.

    That is made when it is first idle: of threads that wait for replies there may be more than descriptors.
    """

    __slots__ = ("_read", "_write", "work")

    def __init__(self, serve: Callable[[_Thread], None], name: str, work: _Work[Any]) -> None:
        self.work: _Work[Any] | None = work
        self._read = self._write = -1
        threading.Thread(target=serve, args=(self,), name=name, daemon=True).start()

    def can_wait(self) -> bool:
        """Whether it can be woken from now on: False where there is no descriptor for that."""
        if self._read < 0:
            try:
                if sys.platform == "linux":
                    self._read = self._write = os.eventfd(0)
                else:
                    self._read, self._write = os.pipe()
            except OSError:
                return False
        return True

    def wake(self, work: _Work[Any] | None) -> None:
        """It is idle, and has this to do."""
        self.work = work
        os.write(self._write, _WAKES)

    def wait(self) -> None:
        os.read(self._read, len(_WAKES))

    def close(self) -> None:
        for descriptor in {self._read, self._write} - {-1}:
            os.close(descriptor)


class _Work(Generic[R]):
    __slots__ = (
        "_error",
        "_function",
        "_future",
        "_given_up",
        "_loop",
        "_pool",
        "_result",
        "ended",
        "ending",
        "over",
        "took_s",
    )

    def __init__(self, pool: PooledThreads, loop: asyncio.AbstractEventLoop, function: Callable[[], R]) -> None:
        self._pool = pool
        self._loop = loop
        self._function = function
        self._result: R | None = None
        self._error: BaseException | None = None
        self._future: asyncio.Future[R] | None = None
        self._given_up = False
        self.ending: threading.Lock | None = None
        """Released at the end, where the loop gives way to it."""
        self.ended = False
        self.over = False
        self.took_s = 0.0

    # -- in the thread ----------------------------------------------------------------------------

    def do(self) -> None:
        if self._given_up:
            return  # before its turn came
        began = time.perf_counter()
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error
        self.took_s = time.perf_counter() - began

    def end_child(self) -> NoReturn:
        """The function forked, and returned in the child, too, which has what wakes the threads."""
        forks.end_child(threading.current_thread().name, self._error)

    def end(self) -> None:
        self.ended = True
        if self._future is not None:  # else who makes one sees that it ended
            self._pool.tell(self._settle)
        if self.ending is not None:
            self.ending.release()

    def fail(self, error: Exception) -> None:
        """In any thread, in place of the other two: there is no thread for it."""
        self._error = error
        self.end()

    # -- on the loop ------------------------------------------------------------------------------

    def result(self) -> R:
        if self._error is not None:
            error, self._error = self._error, None  # its traceback refers to us
            raise error
        return self._result  # type: ignore[return-value]  # `typing.cast` is a call

    def future(self) -> asyncio.Future[R]:
        future = self._future = self._loop.create_future()
        self._pool.awaited[self] = None
        if self._given_up:
            self._settle()
        elif self.ended:
            self._pool.tell(self._settle)  # after what it told before
        return future

    def _settle(self) -> None:
        self._pool.awaited.pop(self, None)
        future = self._future
        if future is None or future.done():
            return
        if self._given_up:
            future.cancel()
        elif self._error is not None:
            error, self._error = self._error, None
            future.set_exception(error)
        else:
            future.set_result(self._result)  # type: ignore[arg-type]

    def waited(self, future: asyncio.Future[R]) -> None:
        """Nobody asks for another future: if this one was cancelled, it need not begin any more."""
        if future.cancelled():
            self._given_up = True

    def give_up(self) -> None:
        self._given_up = True
        self._settle()
