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

from taskgraph.errors import JobError, no_thread_text
from taskgraph.node.usercode import forks

__all__ = ["CallInThread", "FutureCall", "PooledThreads", "Threads"]

R = TypeVar("R")


class CallInThread(Protocol[R]):
    """A call of a function in a thread, as the event loop sees it."""

    over: bool
    """True if the function returned before `start` did, and all its calls of `post` are done."""
    took_s: float
    """How long the function ran, once it has returned."""

    def result(self) -> R:
        """Returns the function's result, or raises its error. To be called once, if `over`."""

    def future(self) -> asyncio.Future[R]:
        """Makes a future of the result. Cancelling it does not stop the function; then another may be made."""


class Threads(Protocol):
    """Runs functions in threads; in `taskgraph.testing`, in lock-step with the event loop."""

    in_step: bool
    """True if threads run in lock-step with the event loop, so that a run is deterministic."""
    context: Context
    """The context in which the node was made, after the driver was imported."""

    def clock(self) -> float:
        """Returns the time in seconds, by the clock that measures how long functions in these threads run."""

    def start(self, function: Callable[[], R], *, brief: bool) -> CallInThread[R]:
        """Starts `function` in a thread.

        Args:
            brief: the function is expected to take no longer than a hop to a thread: the event loop waits for it.
        """

    def run(self, function: Callable[[], R]) -> asyncio.Future[R]:
        """Starts `function` in a thread. Cancelling the future stops nothing that has begun."""

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Calls `function` on the event loop, from any thread, in the order of the calls of `post`.

        Calls that a function made are done before its result is known on the loop.
        """

    def block(self, future: concurrent.futures.Future[R], timeout_s: float | None) -> R:
        """Waits for `future` in a worker thread. All waits of worker threads are made here."""

    def cancel_futures(self) -> None:
        """Cancels the futures of functions that have not returned; the functions go on."""

    def close(self) -> None:
        """Refuses further work, and ends idle threads."""


class FutureCall(Generic[R]):
    """A `CallInThread` of the threads in tests: an asyncio future, never `over`."""

    over = False
    took_s = 0.0

    def __init__(self, future: asyncio.Future[R]) -> None:
        self._future = future

    def result(self) -> R:
        return self._future.result()

    def future(self) -> asyncio.Future[R]:
        return asyncio.shield(self._future)


_BRIEF_WAIT_S = 200e-6
"""How long the event loop waits for a brief function: 100 us for the function, the rest for a thread to wake up."""
_SETTLED_S = 0.005
"""Interval of checks, at a job's end, whether all functions have returned."""

_WAKE_BYTES = (1).to_bytes(8, sys.byteorder)
"""The number that wakes a thread which reads its eventfd."""


class PooledThreads:
    """A pool of threads, which are made when needed.

    They are daemons: the interpreter joins those of `concurrent.futures` at its exit, and a compute that never returns
    must not keep the process.

    A hop to a thread and back costs thread switches, many of them to a thread that only waits for the GIL. So an idle
    thread waits in `read`, and is woken by a `write`, which releases the GIL. And the event loop waits for a brief
    function, with the GIL free, for `_BRIEF_WAIT_S` at most: that saves a future and a round of the loop.

    If no thread can be made, work waits until a thread is free. If all threads wait for replies, they may wait for this
    very work, so it fails.
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
        self._blocked = 0  # threads in `block`, which do not count for the limit
        self._idle: list[_Thread] = []  # the last one has the warmest caches
        self._waiting: deque[_ThreadCall[Any]] = deque()  # for a thread
        self._why_none = ""  # the last reason why no thread could be made
        self._closed = False
        self.awaited: dict[_ThreadCall[Any], None] = {}  # whose future was made
        self._calls: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._call_scheduled = False  # the loop will call `_call_all`

    def run(self, function: Callable[[], R]) -> asyncio.Future[R]:
        work = self.start(function, brief=False)
        future = work.future()
        future.add_done_callback(work.on_future_done)
        return future

    def clock(self) -> float:
        return time.perf_counter()

    def start(self, function: Callable[[], R], *, brief: bool) -> _ThreadCall[R]:
        work = _ThreadCall(self, self._loop, function)
        with self._lock:
            if self._closed:
                raise RuntimeError("the node's threads are closed")
            thread = self._idle.pop() if self._idle else None
            if thread is None:
                if self._threads - self._blocked >= self._limit or not self._make_thread_for(work):
                    self._waiting.append(work)
                    self._fail_starved()
                return work
        if not brief:
            thread.wake(work)
            return work
        ended = work.ending = threading.Lock()
        ended.acquire()
        will_call, self._call_scheduled = self._call_scheduled, True
        try:
            thread.wake(work)
            over = ended.acquire(timeout=_BRIEF_WAIT_S)
        finally:
            self._call_scheduled = will_call  # the next `post` wakes the loop
        if self._calls:
            self._call_all()
        work.over = over
        return work

    def _make_thread_for(self, work: _ThreadCall[Any]) -> bool:
        """Makes another thread for this work. Returns False if the system allows none, but others may take the work."""
        try:
            _Thread(self._serve, f"{self._name}_{self._threads}", work)
        except (OSError, RuntimeError) as error:  # no thread can be made now
            if not self._threads:
                raise JobError(f"none of its code can run: {no_thread_text(error) or error}") from error
            self._why_none = str(error)
            return False
        self._threads += 1
        return True

    def _fail_starved(self) -> None:
        """Fails work that waits for a thread if all threads wait for replies."""
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

    def post(self, function: Callable[..., object], *args: object) -> None:
        self._calls.append((function, args))
        if not self._call_scheduled:
            self._call_scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._call_all)

    def _call_all(self) -> None:
        """Calls, on the loop, the functions that threads passed to `post`."""
        self._call_scheduled = False
        calls = self._calls
        while calls:
            function, args = calls.popleft()
            try:
                function(*args)
            except Exception as error:
                self._loop.call_exception_handler({"message": f"Exception in {function!r}", "exception": error})

    def _serve(self, thread: _Thread) -> None:
        """Runs work in this thread, and waits for more while idle, until the pool closes or has too many threads."""
        while (work := thread.work) is not None:
            thread.work = None
            work.run()
            if forks.count != self._forks:
                work.end_child()
            with self._lock:
                spare = self._threads - self._blocked > self._limit  # threads in `block` have come back
                idle = not self._waiting and not self._closed and not spare
                if idle and not thread.make_descriptor():
                    spare, idle = True, False
                if spare:
                    self._threads -= 1
                elif idle:
                    self._idle.append(thread)
                elif self._waiting:
                    thread.work = self._waiting.popleft()
            work.note_done()
            del work  # an idle thread must not keep values
            if idle:
                thread.wait()
        thread.close()

    def block(self, future: concurrent.futures.Future[R], timeout_s: float | None) -> R:
        with self._lock:
            self._blocked += 1
            if self._waiting:
                if self._make_thread_for(self._waiting[0]):  # `future` may wait for this very work
                    self._waiting.popleft()
                else:
                    self._fail_starved()
        try:
            return future.result(timeout_s)
        finally:
            with self._lock:
                self._blocked -= 1

    def cancel_futures(self) -> None:
        for work in tuple(self.awaited):
            work.cancel_future()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for thread in self._idle:  # the others end after their work
                thread.wake(None)
            self._idle.clear()

    async def wait_until_returned(self, timeout_s: float) -> None:
        """Waits until all functions have returned, also those whose future was cancelled; `timeout_s` at most."""
        until = time.monotonic() + timeout_s
        while self.awaited and time.monotonic() < until:  # noqa: ASYNC110 (an event would cost time in each call)
            await asyncio.sleep(_SETTLED_S)


class _Thread:
    """A thread, and the descriptor that wakes it: an eventfd on Linux, elsewhere a pipe.

    The descriptor is made when the thread is first idle: more threads than there are descriptors may wait for replies.
    """

    __slots__ = ("_read", "_write", "work")

    def __init__(self, serve: Callable[[_Thread], None], name: str, work: _ThreadCall[Any]) -> None:
        self.work: _ThreadCall[Any] | None = work
        self._read = self._write = -1
        threading.Thread(target=serve, args=(self,), name=name, daemon=True).start()

    def make_descriptor(self) -> bool:
        """Makes the descriptor that wakes this thread, unless it has one. False if the system has none left."""
        if self._read < 0:
            try:
                if sys.platform == "linux":
                    self._read = self._write = os.eventfd(0)
                else:
                    self._read, self._write = os.pipe()
            except OSError:
                return False
        return True

    def wake(self, work: _ThreadCall[Any] | None) -> None:
        """Gives work to an idle thread; None: it ends."""
        self.work = work
        os.write(self._write, _WAKE_BYTES)

    def wait(self) -> None:
        """Waits, in this thread, until another one calls `wake`."""
        os.read(self._read, len(_WAKE_BYTES))

    def close(self) -> None:
        for descriptor in {self._read, self._write} - {-1}:
            os.close(descriptor)


class _ThreadCall(Generic[R]):
    """One call of a function in a thread of the pool, whose result the event loop gets; implements `CallInThread`."""

    __slots__ = (
        "_cancelled",
        "_error",
        "_function",
        "_future",
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
        self._cancelled = False
        self.ending: threading.Lock | None = None
        """Released at the end of a brief function."""
        self.ended = False
        self.over = False
        self.took_s = 0.0

    # -- in the thread ----------------------------------------------------------------------------

    def run(self) -> None:
        """Calls the function, in a thread, and keeps its result or error."""
        if self._cancelled:
            return  # before it began
        began = time.perf_counter()
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error
        self.took_s = time.perf_counter() - began

    def end_child(self) -> NoReturn:
        """Ends a child process that the function forked, and in which it returned, too."""
        forks.end_child(threading.current_thread().name, self._error)

    def note_done(self) -> None:
        """Notes that the function has returned or cannot run: has the loop settle the future; releases `ending`."""
        self.ended = True
        if self._future is not None:  # otherwise `future` sees `ended`
            self._pool.post(self._settle)
        if self.ending is not None:
            self.ending.release()

    def fail(self, error: Exception) -> None:
        """Fails the work, since no thread can run it. May be called in any thread."""
        self._error = error
        self.note_done()

    # -- on the loop ------------------------------------------------------------------------------

    def result(self) -> R:
        if self._error is not None:
            error, self._error = self._error, None  # its traceback refers to this frame
            raise error
        return self._result  # type: ignore[return-value]  # `typing.cast` is a call

    def future(self) -> asyncio.Future[R]:
        future = self._future = self._loop.create_future()
        self._pool.awaited[self] = None
        if self._cancelled:
            self._settle()
        elif self.ended:
            self._pool.post(self._settle)  # after its calls of `post`
        return future

    def _settle(self) -> None:
        """Settles the future, on the event loop, with the function's result or error."""
        self._pool.awaited.pop(self, None)
        future = self._future
        if future is None or future.done():
            return
        if self._cancelled:
            future.cancel()
        elif self._error is not None:
            error, self._error = self._error, None
            future.set_exception(error)
        else:
            future.set_result(self._result)  # type: ignore[arg-type]

    def on_future_done(self, future: asyncio.Future[R]) -> None:
        """Notes that the only future was cancelled: a function that has not begun need not begin."""
        if future.cancelled():
            self._cancelled = True

    def cancel_future(self) -> None:
        """Cancels the future, though the function may still run."""
        self._cancelled = True
        self._settle()
