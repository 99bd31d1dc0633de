"""Calls user code: every hook, compute and handler of one task goes through `Actor.call`.

Two pieces of user code of one task never run at the same time. A plain `def` runs in a worker thread and holds the
task's turn until it returns, or waits for a reply. An `async def` runs on the event loop and holds the turn only
between its awaits. An exception of user code becomes a `UserCodeError`, with its own traceback as text.

On a node with a device, each task has a stream of its own. It is the current stream wherever the task's code runs: in
a thread, and around each step of a coroutine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import sys
import threading
import traceback
from asyncio import current_task
from collections.abc import Callable, Coroutine
from contextvars import Context
from types import CodeType, CoroutineType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeVar, cast

from taskgraph.device.afterwards import OffLoopFinalizer
from taskgraph.epoch import AttemptEnded
from taskgraph.errors import GraphError
from taskgraph.node.usercode import forks, lastwords
from taskgraph.node.usercode.contexts import Contexts
from taskgraph.node.usercode.coroutines import (
    CancelledByUserCode,
    CoroutineDriver,
    CoroutineOnStream,
    is_async,
    refuse_coroutine,
    uncancel_caller,
)
from taskgraph.node.usercode.errors import (
    StuckError,
    UserCodeError,
    cancelled_by_user_error,
    user_frames,
    would_block_error,
)
from taskgraph.node.usercode.threads import Threads
from taskgraph.observe.trace import Tracing

if TYPE_CHECKING:
    from taskgraph.device.api import Device, Stream
    from taskgraph.protocol.messages import Stamp

__all__ = ["Actor", "RunningCall", "call_under_way", "in_user_code"]

R = TypeVar("R")

_COROUTINE = inspect.CO_COROUTINE
_BRIEF_S = 100e-6
"""A call of at most this time is brief. A hop to a thread and back takes as long, so the event loop waits for it."""
_BRIEF_NAMES = 1000
"""The most functions that are known to be brief."""
_LONG_CALLS = 3
"""Long calls in a row after which a function is no longer brief."""


class CallOwner(Protocol):
    """The attempt, or other work, that a call of user code belongs to."""

    cancelled: bool
    """True if the work is over, so that its code must end."""


class RunningCall(NamedTuple):
    """A call of user code that has not returned, and when it began (loop time, seconds)."""

    where: str
    since: float


class Actor:
    """Calls one task's user code."""

    stamp: Stamp | None = None
    """The epoch and attempt of the next call, for traces and last words."""
    term = 0

    def __init__(
        self,
        threads: Threads,
        *,
        task: int,
        cancel_s: float,
        tracing: Tracing | None = None,
        device: Device | None = None,
    ) -> None:
        self.task = task
        self.contexts = Contexts(threads.context)
        self._device = device
        self._streams: OffLoopFinalizer | None = None  # made in a thread, by the first call
        self._tracing = tracing or Tracing()
        self._threads = threads
        self._cancel_s = cancel_s
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self.forks = forks.count
        self._turn = asyncio.Lock()
        self.in_threads = 0
        """Calls in threads that hold the turn or wait for it. If there are none, the turn is free."""
        self.queued: list[str] = []
        """Names of the calls that wait for the turn."""
        self._holder = ""
        self._in_turn = threading.local()
        self._running: dict[int, tuple[str, float]] = {}
        self._calls = 0
        self._brief: dict[str, int] = {}  # brief functions -> long calls until they are not
        self._ends_at: float | None = None  # during the last call
        self.waiting = 0
        """Coroutines that await something. asyncio tasks that they started run outside of turns."""
        self.abandoned = False

    @property
    def running(self) -> tuple[RunningCall, ...]:
        """Calls that have not returned, oldest first, without the one that the event loop runs now."""
        return tuple([RunningCall(where, since) for where, since in self._running.values()])

    async def call(
        self,
        where: str,
        function: Callable[..., R],
        *args: Any,
        alone: bool = True,
        after: Callable[[], object] | None = None,
        attempt: CallOwner | None = None,
        context: Context | None = None,
    ) -> R:
        """Calls user code and returns its result.

        Args:
            alone: takes the task's turn; False for processors that declared `parallel=True`.
            after: called right after `function`, in the same thread; its errors count as errors of user code.
            attempt: the work that the call belongs to. While it goes on, AttemptEnded is an error of user code.
            context: run in this context instead of a fresh one.

        Raises:
            UserCodeError: user code raised.
            AttemptEnded: user code ended because its attempt is over.
            StuckError: user code was cancelled, and did not return in time.
        """
        stamp = self.stamp
        try:
            code = getattr(function, "__code__", None)
            if (type(code) is not CodeType or not code.co_flags & _COROUTINE) and not is_async(function):
                return await self._call_thread(where, function, args, alone, after, context)
            if self.in_threads and alone and self._turn.locked():
                await self._wait_until_turn_free(where)
            coroutine: Coroutine[Any, Any, R] = function(*args)  # type: ignore[assignment]
            if self._device is not None:
                coroutine = CoroutineOnStream(coroutine, self._device, self._task_stream(self._device))
            words, began = lastwords.here, self._tracing.on and self._tracing.begin(stamp)
            if words is not None:
                words.note_on_loop(self.task, stamp, where)
            cancelling = current_task(self._loop).cancelling  # type: ignore[union-attr]  # an asyncio task awaits this
            if context is None:  # an empty one is false
                context = self.contexts.new_context()
            try:
                before, ended = cancelling(), True
                try:
                    try:
                        waited = context.run(coroutine.send, None)
                        ended = False
                    finally:
                        if forks.count != self.forks:
                            self.end_child(where)
                        times = cancelling() - before  # cancelled by user code
                        if times > 0 and ended:
                            raise CancelledByUserCode(times)
                except StopIteration as returned:  # without a wait, as most do
                    result: R = returned.value
                else:
                    turn = self._turn if alone else None
                    result = await self._drive_on(where, stamp, coroutine, context, waited, turn, times, attempt)
                    if attempt is not None and attempt.cancelled:
                        # It caught the cancellation; its attempt ends nevertheless.
                        raise asyncio.CancelledError
                if after is not None:
                    after()
                return result
            finally:
                if words is not None:
                    words.running[:] = lastwords.NOTHING  # as `words.clear_on_loop`, without a call
                if began:
                    self._tracing.add("code", began, self.task, stamp, self.term, where)
        except AttemptEnded as ended:
            if attempt is None or not attempt.cancelled:
                raise self._stale_epoch_error(where, stamp, ended) from None
            raise
        except (StuckError, UserCodeError):  # of a call that `function` made
            raise
        except CancelledByUserCode as itself:
            await uncancel_caller(itself)
            epoch = f", epoch {stamp.epoch}" if stamp is not None else ""
            raise UserCodeError(where, cancelled_by_user_error(f"task {self.task}{epoch}, {where!r}: ")) from itself
        except asyncio.CancelledError as error:
            caller = asyncio.current_task()
            over = attempt is not None and attempt.cancelled
            if over or not is_async(function) or (caller is not None and caller.cancelling()):
                raise
            raise UserCodeError(where, error) from error  # user code awaited something that was cancelled
        except BaseException as error:
            raise UserCodeError(where, error) from error

    async def last_call(self, where: str, function: Callable[[], object]) -> None:
        """Makes the last call of a task, which must return within `cancel_s`.

        Raises:
            UserCodeError: user code raised.
            StuckError: user code did not return in time.
        """
        self._ends_at = self._loop.time() + self._cancel_s
        try:
            async with asyncio.timeout_at(self._ends_at):
                await self.call(where, function)
        except TimeoutError:
            raise self.stuck_error(where) from None

    async def call_framework_on_loop(self, where: str, function: Callable[[], R]) -> R:
        """Calls a function of the framework on the event loop, while no thread has the turn. It takes microseconds."""
        stamp = self.stamp
        if self.in_threads and self._turn.locked():
            await self._wait_until_turn_free(where)
        began = self._tracing.on and self._tracing.begin(stamp)
        try:
            return function()
        except Exception as error:
            raise UserCodeError(where, error) from error
        finally:
            if began:
                self._tracing.add("code", began, self.task, stamp, self.term, where)

    def _stale_epoch_error(self, where: str, stamp: Stamp | None, ended: AttemptEnded) -> UserCodeError:
        """Returns the error for code that used the `epoch` of another attempt."""
        epoch = f", epoch {stamp.epoch}" if stamp is not None else ""
        error = GraphError(
            f"task {self.task}{epoch}, {where!r}: it uses an `epoch` that is over. What it is given may be used "
            f"until it returns; keep what you need of it (its number, a value), not the epoch itself"
        )
        return UserCodeError(where, error.with_traceback(ended.__traceback__))

    async def _wait_until_turn_free(self, where: str) -> None:
        """Waits until no thread holds the turn, which then stays free until the caller's next await."""
        await self._take_turn(where)
        self._turn.release()

    async def _take_turn(self, where: str) -> None:
        """Acquires the turn. The call is listed in `queued` while it waits."""
        self.queued.append(where)
        try:
            await self._turn.acquire()
        finally:
            self.queued.remove(where)

    @property
    def holder(self) -> str:
        """The call that holds the turn in a thread; "" if none does."""
        return self._holder if self.in_threads and self._turn.locked() else ""

    async def _drive_on(
        self,
        where: str,
        stamp: Stamp | None,
        coroutine: Coroutine[Any, Any, R],
        context: Context,
        awaited: Any,
        turn: asyncio.Lock | None,
        own_cancellations: int,
        attempt: CallOwner | None,
    ) -> R:
        """Runs a coroutine from its first await to its end, and lists it in `running` meanwhile."""
        words = lastwords.here
        mark = self._list_call(where, stamp)
        self.waiting += 1
        if words is not None:
            words.clear_on_loop()
        try:
            result: R = await CoroutineDriver(
                self, where, coroutine, context, awaited, turn, own_cancellations, attempt
            )
            return result
        finally:
            if words is not None:
                words.note_on_loop(self.task, stamp, where)
            self.waiting -= 1
            self._unlist_call(mark)

    def end_child(self, where: str) -> NoReturn:
        """Ends this process, a child that a coroutine forked; called when the coroutine returns or awaits there."""
        error = sys.exception()
        forks.end_child(f"task {self.task}, {where!r}", None if isinstance(error, StopIteration) else error)

    async def _call_thread(
        self,
        where: str,
        function: Callable[..., R],
        args: tuple[Any, ...],
        alone: bool,
        after: Callable[[], object] | None,
        context: Context | None,
    ) -> R:
        """Calls a plain function in a thread, with the task's turn if `alone`, and returns its result."""
        stamp = self.stamp
        if alone:
            self.in_threads += 1
            try:
                await (self._take_turn(where) if self._turn.locked() else self._turn.acquire())
            except BaseException:
                self.in_threads -= 1
                raise
        began, mark = self._tracing.on and self._tracing.begin(stamp), 0
        call = functools.partial(self._run_in_thread, where, alone, function, args, after, context)
        if self._device is not None:
            call = functools.partial(self._on_stream, self._device, call)
        try:
            if where in self._brief:
                words = lastwords.here
                if words is not None:
                    words.note_on_loop(self.task | lastwords.IN_THREAD, stamp, where)
                try:
                    work = self._threads.start(call, brief=True)
                finally:
                    if words is not None:
                        words.running[:] = lastwords.NOTHING
                if not work.over:
                    mark = self._list_call(where, stamp)
            else:
                mark = self._list_call(where, stamp)
                work = self._threads.start(call, brief=False)
            try:
                result = work.result() if work.over else await work.future()
            except asyncio.CancelledError:
                await self._wait_after_cancel(work.future(), where)
                raise
            if work.took_s > _BRIEF_S or self._brief.get(where) != _LONG_CALLS:
                self._note_duration(where, work.took_s)
            return result
        finally:
            if mark:
                self._unlist_call(mark)
            if began:
                self._tracing.add("code", began, self.task, stamp, self.term, where)
            if alone:
                self.in_threads -= 1
                self._turn.release()

    def _note_duration(self, where: str, took_s: float) -> None:
        """Notes how long a call took, to learn for which functions the event loop waits while a thread runs them.

        One brief call adds a function; three long calls in a row remove it.
        """
        if took_s <= _BRIEF_S:
            if len(self._brief) == _BRIEF_NAMES:
                self._brief.clear()  # processors may have new names in every epoch
            self._brief[where] = _LONG_CALLS
        elif (left := self._brief.pop(where, 0)) > 1:
            self._brief[where] = left - 1

    def _run_in_thread(
        self,
        where: str,
        alone: bool,
        function: Callable[..., R],
        args: tuple[Any, ...],
        after: Callable[[], object] | None,
        context: Context | None,
    ) -> R:
        """Calls a function and then `after`, in a thread and in a context of the task."""
        self._in_turn.held = where if alone else ""
        if alone:
            self._holder = where
        try:
            if context is None:  # an empty one is false
                context = self.contexts.new_context()
            result = context.run(function, *args)
            if result is not None and type(result) is CoroutineType:
                refuse_coroutine(function, cast(Any, result))
            if after is not None:
                after()
            return result
        except (StopIteration, GeneratorExit, asyncio.CancelledError) as error:
            # No future can carry these: a GeneratorExit would close the coroutine that awaits it.
            raise RuntimeError(f"{type(error).__name__} left the function") from error

    def _task_stream(self, device: Device) -> Stream:
        """Returns the one stream of the task, which the first call makes on `device`."""
        if self._streams is None:
            self._streams = OffLoopFinalizer([device.new_stream()])
        stream: Stream = self._streams.things[0]
        return stream

    def _on_stream(self, device: Device, call: Callable[[], R]) -> R:
        """Runs `call` in a thread, with the task's stream as the current one."""
        with device.on(self._task_stream(device)):
            return call()

    async def _wait_after_cancel(self, future: asyncio.Future[R], where: str) -> None:
        """Waits for the thread of a call that was cancelled, `grace_s` at most. The caller keeps the turn meanwhile.

        Raises:
            StuckError: the thread did not return in time. It is abandoned.
        """
        # Retrieves the result, so that asyncio does not log it.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        waiting = asyncio.ensure_future(asyncio.wait([future], timeout=self.grace_s))
        while not waiting.done():
            with contextlib.suppress(asyncio.CancelledError):  # a second cancellation changes nothing
                await asyncio.shield(waiting)
        if future.cancelled() or not future.done():
            self.abandoned = True  # its thread runs on: no other code of the task may run
        if not future.done():
            raise self.stuck_error(where)

    @property
    def grace_s(self) -> float:
        """How long code that is cancelled now may run."""
        return self._cancel_s if self._ends_at is None else max(0.0, self._ends_at - self._loop.time())

    def stuck_error(self, where: str) -> StuckError:
        """Makes the error for user code that did not return in time."""
        after = " after its attempt ended" if self._ends_at is None else ""
        return StuckError(f"{where} did not return within {self._cancel_s:g} s{after}")

    def wait_in_thread(self, future: concurrent.futures.Future[R], timeout_s: float | None) -> R:
        """Waits for a reply in a worker thread, and releases the task's turn meanwhile."""
        if threading.get_ident() == self._loop_thread:
            raise would_block_error()
        held: str = getattr(self._in_turn, "held", "")
        if not held:
            return self._threads.block(future, timeout_s)
        self._threads.post(self._turn.release)
        try:
            return self._threads.block(future, timeout_s)
        finally:
            self._threads.block(asyncio.run_coroutine_threadsafe(self._turn.acquire(), self._loop), None)
            self._holder = held

    def _list_call(self, where: str, stamp: Stamp | None) -> int:
        """Lists a call in `running` and in the last words; returns the mark by which `_unlist_call` takes it out."""
        self._calls += 1
        self._running[self._calls] = where, self._loop.time()
        if lastwords.here is not None:
            epoch = stamp.epoch if stamp is not None else -1
            lastwords.here.note_call((id(self), self._calls), self.task, epoch, lastwords.encoded_name(where))
        return self._calls

    def _unlist_call(self, mark: int) -> None:
        """Takes a call out of `running` and of the last words."""
        self._running.pop(mark, None)
        if lastwords.here is not None:
            lastwords.here.clear_call((id(self), mark))


_CALLS = (Actor._run_in_thread.__code__, Actor.call.__code__)


def in_user_code(innermost: FrameType) -> bool:
    """True if a thread, by its innermost frame, runs user code or is about to."""
    return any(frame.f_code in _CALLS for frame, _ in traceback.walk_stack(innermost))


def call_under_way(innermost: FrameType) -> tuple[int, str, str] | None:
    """Returns (task, name of the call, stack as text) of a thread's user code, by its innermost frame; None: none."""
    stack = [frame for frame, _ in traceback.walk_stack(innermost)]
    for depth, frame in enumerate(stack):
        if frame.f_code in _CALLS:
            actor, where = frame.f_locals["self"], frame.f_locals["where"]
            below = traceback.StackSummary.extract((f, f.f_lineno) for f in reversed(stack[:depth]))
            text = "".join(traceback.format_list(user_frames(below)))
            return actor.task, where, f"Stack of its thread (most recent call last):\n{text}"
    return None
