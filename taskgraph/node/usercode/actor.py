"""Where user code is called: every hook, compute and handler of one task goes through `Actor.call`.

Two pieces of user code of one task never run at the same time. A plain `def` runs in a worker thread and holds the
task until it returns, or until it waits for a reply. An `async def` runs on the event loop and holds the task only
between its awaits. What user code raises comes out as `UserCodeError`, with its own traceback as text.

Where the node has a device, a task has a stream of its own on it, which is the current one wherever its code runs: in
a thread, and around each step of a coroutine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import os
import sys
import threading
import traceback
import weakref
from asyncio import current_task
from collections.abc import Callable, Coroutine, Generator
from contextvars import copy_context
from pathlib import Path
from types import CodeType, CoroutineType, FrameType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeVar, cast

from taskgraph.device.afterwards import Aside
from taskgraph.epoch import AttemptEnded
from taskgraph.errors import GraphError, JobError, worded
from taskgraph.node.usercode import forks, lastwords
from taskgraph.node.usercode.threads import Threads
from taskgraph.observe.trace import NO_STAMP, Tracing, clock

if TYPE_CHECKING:
    from taskgraph.device.api import Device, Stream
    from taskgraph.protocol.messages import Stamp

__all__ = [
    "Actor",
    "Running",
    "StuckError",
    "UserCodeError",
    "call_under_way",
    "cancelled_by_users",
    "defined_at",
    "is_async",
]

R = TypeVar("R")

_COROUTINE = inspect.CO_COROUTINE
_FUTURE = asyncio.Future
_BRIEF_S = 100e-6
"""What takes no longer takes no longer than a hop to a thread and back: beside others it would gain nothing."""
_BRIEF_NAMES = 1000
"""So many functions are known to be brief, at most."""
_BRIEF_FOR = 3
"""A function that was brief is not once it took long so many times in a row."""


class UserCodeError(Exception):
    """User code raised. `where` is the hook, processor or handler; `traceback_text` begins in user code."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__(worded(error))
        self.where = where
        self.error = error
        self.traceback_text = _user_traceback(error)


class StuckError(Exception):
    """User code did not return within `cancel_s` after its attempt ended, or at its task's end.

    Only the end of the process frees it.
    """


class _CancelledItself(BaseException):
    """User code that has ended had cancelled the asyncio task it was called in. `times`: as often as it did."""

    def __init__(self, times: int) -> None:
        self.times = times


class Ends(Protocol):
    """What user code may be part of."""

    cancelled: bool
    """Whether it is over: what runs of it unwinds."""


class Running(NamedTuple):
    """User code at work: what, and since when (loop time, seconds)."""

    where: str
    since: float


class Actor:
    """Calls one task's user code."""

    stamp: Stamp | None = None
    """What the next call is of, and in which term, for who traces and for last words. A call keeps what was there."""
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
        self._device = device
        self._streams: Aside | None = None  # made where the task's code runs first, which is in a thread
        self._tracing = tracing or Tracing()
        self._threads = threads
        self._cancel_s = cancel_s
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self.forks = forks.count
        self._turn = asyncio.Lock()
        self.in_threads = 0
        """Calls in threads that hold the turn or wait for it. Without one it is free: no coroutine keeps it."""
        self._in_turn = threading.local()
        self._running: dict[int, tuple[str, float]] = {}
        self._calls = 0
        self._brief: dict[str, int] = {}  # what is brief, and how often it may take long before it is not
        self._ends_at: float | None = None  # where its last call is under way
        self.abandoned = False

    @property
    def running(self) -> tuple[Running, ...]:
        """User code that has begun and not returned, oldest first, but for what the event loop runs just now."""
        return tuple([Running(where, since) for where, since in self._running.values()])

    async def call(
        self,
        where: str,
        function: Callable[..., R],
        *args: Any,
        alone: bool = True,
        after: Callable[[], object] | None = None,
        attempt: Ends | None = None,
    ) -> R:
        """Calls user code and returns its result.

        Args:
            alone: hold the task meanwhile; False for processors that declared `parallel=True`.
            after: called right after it returned, where it ran; what that raises counts as raised by user code.
            attempt: what it is part of. Code that is part of none, or of one that goes on, has no reason to unwind.

        Raises:
            UserCodeError: it raised.
            AttemptEnded: it unwound because its attempt is over.
            StuckError: cancelled, and it did not return in time.
        """
        stamp = self.stamp
        try:
            code = getattr(function, "__code__", None)
            if (type(code) is not CodeType or not code.co_flags & _COROUTINE) and not is_async(function):
                return await self._call_thread(where, function, args, alone, after)
            if self.in_threads and alone and self._turn.locked():
                await self._turn_free()
            coroutine: Coroutine[Any, Any, R] = function(*args)  # type: ignore[assignment]
            if self._device is not None:
                coroutine = _OnStream(coroutine, self._device, self._stream_of(self._device))
            words, began = lastwords.here, self._tracing.on and self._tracing.began(stamp)
            if words is not None:
                words.runs(self.task, stamp, where)
            cancelling = current_task(self._loop).cancelling  # type: ignore[union-attr]  # it is one that awaits this
            try:
                before, ended = cancelling(), True
                try:
                    try:
                        waited = coroutine.send(None)
                        ended = False
                    finally:
                        if forks.count != self.forks:
                            self.end_child(where)
                        times = cancelling() - before  # by the code itself: we do not run meanwhile
                        if times > 0 and ended:
                            raise _CancelledItself(times)
                except StopIteration as returned:  # without a wait, as most do
                    result: R = returned.value
                else:
                    turn = self._turn if alone else None
                    result = await self._resumed(where, stamp, coroutine, waited, turn, times)
                if after is not None:
                    after()
                return result
            finally:
                if words is not None:
                    words.running[:] = lastwords.NOTHING  # as `words.ran`, without a call
                if began:
                    self._tracing.keep("code", where, "", began, clock(), self.task, stamp or NO_STAMP, self.term, -1)
        except AttemptEnded as ended:
            if attempt is None or not attempt.cancelled:
                raise self._stale(where, stamp, ended) from None
            raise
        except StuckError:
            raise
        except _CancelledItself as itself:
            await _take_back(itself)
            epoch = f", epoch {stamp.epoch}" if stamp is not None else ""
            raise UserCodeError(where, cancelled_by_users(f"task {self.task}{epoch}, {where!r}: ")) from itself
        except asyncio.CancelledError as error:
            caller = asyncio.current_task()
            if not is_async(function) or (caller is not None and caller.cancelling()):
                raise
            raise UserCodeError(where, error) from error  # of something of its own: nobody cancelled the call
        except BaseException as error:
            raise UserCodeError(where, error) from error

    async def last_call(self, where: str, function: Callable[[], object]) -> None:
        """Calls the last of a task's code. It has `cancel_s` to return, cancelled or not.

        Raises:
            UserCodeError: it raised.
            StuckError: it did not return in time.
        """
        self._ends_at = self._loop.time() + self._cancel_s
        try:
            async with asyncio.timeout_at(self._ends_at):
                await self.call(where, function)
        except TimeoutError:
            raise self.stuck(where) from None

    async def here(self, where: str, function: Callable[[], R]) -> R:
        """Calls something of ours in the task's turn, on the event loop: for what is done in microseconds."""
        stamp = self.stamp
        if self.in_threads and self._turn.locked():
            await self._turn_free()
        began = self._tracing.on and self._tracing.began(stamp)
        try:
            return function()
        except Exception as error:
            raise UserCodeError(where, error) from error
        finally:
            if began:
                self._tracing.keep("code", where, "", began, clock(), self.task, stamp or NO_STAMP, self.term, -1)

    def _stale(self, where: str, stamp: Stamp | None, ended: AttemptEnded) -> UserCodeError:
        """It used the `epoch` of another attempt, which is over."""
        epoch = f", epoch {stamp.epoch}" if stamp is not None else ""
        error = GraphError(
            f"task {self.task}{epoch}, {where!r}: it uses an `epoch` that is over. What it is given may be used "
            f"until it returns; keep what you need of it (its number, a value), not the epoch itself"
        )
        return UserCodeError(where, error.with_traceback(ended.__traceback__))

    async def _turn_free(self) -> None:
        """Returns when no thread holds the task. Nothing else takes it before the next await of who called this."""
        async with self._turn:
            pass

    async def _resumed(
        self,
        where: str,
        stamp: Stamp | None,
        coroutine: Coroutine[Any, Any, R],
        waited: Any,
        turn: asyncio.Lock | None,
        times: int,
    ) -> R:
        """Drives a coroutine on that awaits something: from now on others can see that it is under way."""
        words = lastwords.here
        mark = self._begin(where, stamp)
        if words is not None:
            words.ran()
        try:
            result: R = await _Resumed(self, where, coroutine, waited, turn, times)
            return result
        finally:
            if words is not None:
                words.runs(self.task, stamp, where)
            self._end(mark)

    def end_child(self, where: str) -> NoReturn:
        """In a child that a coroutine forked, and that came back from it or awaits something."""
        error = sys.exception()
        forks.end_child(f"task {self.task}, {where!r}", None if isinstance(error, StopIteration) else error)

    async def _call_thread(
        self,
        where: str,
        function: Callable[..., R],
        args: tuple[Any, ...],
        alone: bool,
        after: Callable[[], object] | None,
    ) -> R:
        stamp = self.stamp
        if alone:
            self.in_threads += 1
            try:
                await self._turn.acquire()
            except BaseException:
                self.in_threads -= 1
                raise
        began, mark = self._tracing.on and self._tracing.began(stamp), 0
        call = functools.partial(self._in_thread, where, alone, function, args, after)
        if self._device is not None:
            call = functools.partial(self._on_stream, self._device, call)
        try:
            if where in self._brief:
                words = lastwords.here
                if words is not None:
                    words.runs(self.task, stamp, where)
                try:
                    work = self._threads.start(call, brief=True)
                finally:
                    if words is not None:
                        words.running[:] = lastwords.NOTHING
                if not work.over:
                    mark = self._begin(where, stamp)
            else:
                mark = self._begin(where, stamp)
                work = self._threads.start(call, brief=False)
            try:
                result = work.result() if work.over else await work.future()
            except asyncio.CancelledError:
                await self._outlast(work.future(), where)
                raise
            if work.took_s > _BRIEF_S or self._brief.get(where) != _BRIEF_FOR:
                self._took(where, work.took_s)
            return result
        finally:
            if mark:
                self._end(mark)
            if began:
                self._tracing.keep("code", where, "", began, clock(), self.task, stamp or NO_STAMP, self.term, -1)
            if alone:
                self.in_threads -= 1
                self._turn.release()

    def _took(self, where: str, took_s: float) -> None:
        """What ran briefly is taken to do so again; a few may take long before it is not, as on a busy machine."""
        if took_s <= _BRIEF_S:
            if len(self._brief) == _BRIEF_NAMES:
                self._brief.clear()  # processors may have other names in every epoch
            self._brief[where] = _BRIEF_FOR
        elif (left := self._brief.pop(where, 0)) > 1:
            self._brief[where] = left - 1

    def _in_thread(
        self,
        where: str,
        alone: bool,
        function: Callable[..., R],
        args: tuple[Any, ...],
        after: Callable[[], object] | None,
    ) -> R:
        self._in_turn.held = alone
        try:
            # In a context of its own: what it sets there (decimal's precision, what numpy does at a division by zero)
            # would else hold for whatever of whichever task runs in this thread next.
            result = copy_context().run(function, *args)
            if result is not None and type(result) is CoroutineType:
                _refuse_coroutine(function, cast(Any, result))
            if after is not None:
                after()
            return result
        except (StopIteration, asyncio.CancelledError) as error:  # no future can carry it as what it is
            raise RuntimeError(f"{type(error).__name__} left the function") from error

    def _stream_of(self, device: Device) -> Stream:
        if self._streams is None:
            self._streams = Aside([device.stream()])
        stream: Stream = self._streams.things[0]
        return stream

    def _on_stream(self, device: Device, call: Callable[[], R]) -> R:
        """In a thread: with the task's stream as the current one."""
        with device.on(self._stream_of(device)):
            return call()

    async def _outlast(self, future: asyncio.Future[R], where: str) -> None:
        """The caller was cancelled; the thread cannot be. The task stays held until it returns or is left behind."""
        # What comes out of a dead attempt is retrieved, and of no interest.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        waiting = asyncio.ensure_future(asyncio.wait([future], timeout=self.grace_s))
        while not waiting.done():
            with contextlib.suppress(asyncio.CancelledError):  # being told again changes nothing
                await asyncio.shield(waiting)
        if future.cancelled() or not future.done():
            self.abandoned = True  # its thread runs on: nothing else of the task may run any more
        if not future.done():
            raise self.stuck(where)

    @property
    def grace_s(self) -> float:
        """How long what is cancelled now may go on."""
        return self._cancel_s if self._ends_at is None else max(0.0, self._ends_at - self._loop.time())

    def stuck(self, where: str) -> StuckError:
        after = " after its attempt ended" if self._ends_at is None else ""
        return StuckError(f"{where} did not return within {self._cancel_s:g} s{after}")

    def wait_in_thread(self, future: concurrent.futures.Future[R], timeout_s: float | None) -> R:
        """In a worker thread: waits for a reply while other hooks of the task may run."""
        if threading.get_ident() == self._loop_thread:
            raise JobError("reply.wait() would block the event loop: in an `async def`, write `await reply`")
        if not getattr(self._in_turn, "held", False):
            return self._threads.block(future, timeout_s)
        self._threads.tell(self._turn.release)
        try:
            return self._threads.block(future, timeout_s)
        finally:
            self._threads.block(asyncio.run_coroutine_threadsafe(self._turn.acquire(), self._loop), None)

    def _begin(self, where: str, stamp: Stamp | None) -> int:
        self._calls += 1
        self._running[self._calls] = where, self._loop.time()
        if lastwords.here is not None:
            epoch = stamp.epoch if stamp is not None else -1
            lastwords.here.began((id(self), self._calls), self.task, epoch, lastwords.named(where))
        return self._calls

    def _end(self, mark: int) -> None:
        self._running.pop(mark, None)
        if lastwords.here is not None:
            lastwords.here.ended((id(self), mark))


def call_under_way(innermost: FrameType) -> tuple[int, str, str] | None:
    """Which user code a thread runs just now: its task, its hook, processor or handler, and its stack as text.

    Read off the thread's stack, which costs nothing before somebody asks.
    """
    stack = [frame for frame, _ in traceback.walk_stack(innermost)]
    for depth, frame in enumerate(stack):
        if frame.f_code in (Actor._in_thread.__code__, Actor.call.__code__):
            actor, where = frame.f_locals["self"], frame.f_locals["where"]
            below = traceback.StackSummary.extract((f, f.f_lineno) for f in reversed(stack[:depth]))
            text = "".join(traceback.format_list(_from_users(below)))
            return actor.task, where, f"Stack of its thread (most recent call last):\n{text}"
    return None


class _Resumed:
    """Drives a coroutine on from its first await. It holds the task's turn while it runs, and not while it awaits.

    A coroutine that was cancelled may clean up, and may catch it and go on: for `cancel_s`.

    Args:
        waited: what it awaits.
        turn: None where it needs none. Only threads hold one for longer than it takes the event loop to notice.
        times: how often it has cancelled the asyncio task it runs in. It hears of that at its await, cleans up, and may
            take it back, as `asyncio.timeout` does; what counts is what is left when it ends.
    """

    def __init__(
        self,
        actor: Actor,
        where: str,
        coroutine: Coroutine[Any, Any, R],
        waited: Any,
        turn: asyncio.Lock | None,
        times: int,
    ) -> None:
        self._actor = actor
        self._where = where
        self._coroutine = coroutine
        self._waited = waited
        self._turn = turn
        self._times = times
        self._task = _current_task()
        self._limit: asyncio.TimerHandle | None = None  # since it was cancelled
        self._over = False  # that time is over

    def __await__(self) -> Generator[Any, Any, Any]:
        actor, coroutine, waited, turn = self._actor, self._coroutine, self._waited, self._turn
        cancelling, times = self._task.cancelling, self._times
        try:
            while True:
                error: BaseException | None = None
                try:
                    if type(waited) is not _FUTURE and isinstance(waited, _FUTURE):
                        yield from self._until(waited, times)
                    else:
                        yield waited
                except asyncio.CancelledError as cancelled:
                    self._hear(times)
                    error = cancelled
                except BaseException as raised:
                    error = raised
                while turn is not None and actor.in_threads and turn.locked():
                    try:
                        yield from turn.acquire().__await__()
                    except asyncio.CancelledError as cancelled:
                        self._hear(times)
                        error = cancelled  # before its turn came: it must hear of it, at its turn
                    else:
                        turn.release()
                before, ended = cancelling(), True
                try:
                    try:
                        waited = coroutine.send(None) if error is None else coroutine.throw(error)
                        ended = False
                    finally:
                        if forks.count != actor.forks:
                            actor.end_child(self._where)
                        times = max(0, times + cancelling() - before)  # it may take back what others did, too
                        if times and ended:
                            raise _CancelledItself(times)
                except StopIteration as stop:
                    return stop.value
                if self._limit is not None and cancelling() <= times:
                    self._unlimited()  # it was something of its own that cancelled it, which has taken that back
        finally:
            self._unlimited()
            if not self._over:
                coroutine.close()

    def _until(self, waited: asyncio.Future[Any], times: int) -> Generator[Any, Any, None]:
        """Returns when a task of the user's has ended, or several: when they are cancelled, they may go on, too."""
        waited._asyncio_future_blocking = False  # it is us who wait for it
        while not waited.done():
            ended: asyncio.Future[None] = self._task.get_loop().create_future()
            waited.add_done_callback(functools.partial(_wake, ended))
            try:
                yield from ended
            except asyncio.CancelledError:
                if self._over:
                    raise
                self._limited(times)
                waited.cancel()

    def _hear(self, times: int) -> None:
        """It was cancelled, or what it awaits. Raises StuckError where it was long ago, and has not ended."""
        if self._over:
            self._task.uncancel()  # that was us
            self._leave_behind()
        self._limited(times)

    def _limited(self, times: int) -> None:
        if self._limit is None and self._task.cancelling() > times:
            self._limit = self._task.get_loop().call_later(self._actor.grace_s, self._give_up)

    def _unlimited(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _give_up(self) -> None:
        self._over = True
        self._task.cancel()

    def _leave_behind(self) -> NoReturn:
        self._actor.abandoned = True
        stuck = self._actor.stuck(self._where)
        try:
            self._coroutine.close()
        except BaseException as error:  # it goes on after that, too, or unwound
            raise stuck from error
        raise stuck


def _wake(waiting: asyncio.Future[None], _: asyncio.Future[Any]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def _take_back(itself: _CancelledItself) -> None:
    """The caller goes on as if it had not been cancelled: who awaits it would else take it for one that was given up.

    Raises:
        CancelledError: we cancelled it, too.
    """
    caller = _current_task()
    for _ in range(itself.times):
        caller.uncancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)  # where Python before 3.13 raises it nevertheless
    if caller.cancelling():
        raise asyncio.CancelledError from itself


def cancelled_by_users(of: str) -> JobError:
    """What to say where an asyncio task of ours was cancelled, and not by us."""
    return JobError(
        f"{of}code of the job cancelled the asyncio task it runs in, which is not its own (as "
        f"asyncio.current_task().cancel() does, a cancel of all tasks, or sys.exit in another one): to end a processor "
        f"return from it, to fail the job raise"
    )


class _OnStream(Coroutine[Any, Any, R]):
    """A coroutine that is driven with a stream as the current one.

    What it left as the current one itself is not kept over an await: others run there meanwhile.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, R], device: Device, stream: Stream) -> None:
        self._coroutine = coroutine
        self._device = device
        self._stream = stream

    def _step(self, step: Callable[..., Any], *args: Any) -> Any:
        with self._device.on(self._stream):
            return step(*args)

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *args: Any) -> Any:
        return self._step(self._coroutine.throw, *args)

    def close(self) -> None:
        self._step(self._coroutine.close)

    def __await__(self) -> Generator[Any, Any, R]:
        raise NotImplementedError("it is driven by hand")


_ASYNC: weakref.WeakKeyDictionary[FunctionType, bool] = weakref.WeakKeyDictionary()
"""What was found of functions before: looking at one takes longer than many a compute."""


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine; looks through functools.partial and callable objects."""
    plain = function.__func__ if type(function) is MethodType else function
    if type(plain) is not FunctionType:
        return _looks_async(function)
    if plain.__code__.co_flags & _COROUTINE:
        return True
    if not plain.__dict__:  # where a decorator's mark would be
        return False
    known = _ASYNC.get(plain)
    if known is None:
        known = _ASYNC[plain] = _looks_async(function)
    return known


def _looks_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _refuse_coroutine(function: Callable[..., Any], coroutine: CoroutineType[Any, Any, Any]) -> NoReturn:
    """A plain function made a coroutine: nothing of that ran, and nobody would miss it where nothing is put."""
    coroutine.close()  # else Python warns that it was never awaited, too
    raise JobError(
        f"{getattr(function, '__qualname__', function)} is a plain function and returned a coroutine, of which nothing "
        f"ran: what wraps an `async def` (a decorator, a lambda) must be an `async def` itself, and await it"
    )


def defined_at(function: Callable[..., Any]) -> str:
    """Where a function is defined, in the form of a traceback, to follow a message; "" where it is no plain one."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    frame = traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)
    return "\n\nThe handler is defined here:\n" + "".join(traceback.format_list([frame])).rstrip()


_OURS = f"{Path(__file__).resolve().parents[2]}{os.sep}"  # all of the package


def _user_traceback(error: BaseException) -> str:
    """The traceback without our frames at its beginning: it starts where user code does, if it comes to that."""
    try:
        summary = traceback.TracebackException.from_exception(error)
        _without_ours(summary)
        return "".join(summary.format())
    except Exception as failed:  # what is told of may be of any kind: too deep a nest of groups, a class that raises
        return f"(its traceback cannot be told: {worded(failed)})\n{worded(error)}\n"


def _without_ours(summary: traceback.TracebackException) -> None:
    """The same of each exception of a chain. One that is ours says what became of the user's: it has no place there."""
    chain = [summary]
    while chain:
        at = chain.pop()
        chain += [before for before in (at.__cause__, at.__context__) if before is not None]
        users = _from_users(at.stack)
        ours = users and users[0].filename.startswith(_OURS)
        at.stack[:] = [] if ours and at.__cause__ is not None else users


def _from_users(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    users = (i for i, frame in enumerate(frames) if not frame.filename.startswith(_OURS))
    return frames[next(users, 0) :]
