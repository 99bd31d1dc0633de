"""Runs coroutines of user code step by step: in their task's turn, with its stream, and with a limit once cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from types import CoroutineType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from taskgraph.errors import JobError
from taskgraph.node.usercode import forks
from taskgraph.signatures import returns_coroutine

if TYPE_CHECKING:
    from taskgraph.device.api import Device, Stream
    from taskgraph.node.usercode.actor import Actor, CallOwner

__all__ = [
    "CancelledByUserCode",
    "CoroutineDriver",
    "CoroutineOnStream",
    "is_async",
    "refuse_coroutine",
    "uncancel_caller",
]

R = TypeVar("R")

_COROUTINE = inspect.CO_COROUTINE
_FUTURE = asyncio.Future


class CancelledByUserCode(BaseException):
    """User code cancelled the asyncio task that it was called in, `times` times, and has ended."""

    def __init__(self, times: int) -> None:
        self.times = times


class CoroutineDriver:
    """Runs a coroutine from its first await to its end; before each step waits until no thread holds the task's turn.

    A cancelled coroutine may clean up, or catch the cancellation and go on, for `cancel_s`; then StuckError is raised.

    Args:
        context: the context of the coroutine's steps.
        awaited: the future that the coroutine awaits first.
        turn: the task's turn; None: the coroutine does not wait for it.
        own_cancellations: how often the coroutine has cancelled its own asyncio task. It may take that back with
            `uncancel`, as `asyncio.timeout` does; if the number is above 0 at its end, CancelledByUserCode is raised.
        attempt: the work that the coroutine belongs to, if any. `uncancel` does not undo the end of that work.
    """

    def __init__(
        self,
        actor: Actor,
        where: str,
        coroutine: Coroutine[Any, Any, R],
        context: Context,
        awaited: Any,
        turn: asyncio.Lock | None,
        own_cancellations: int,
        attempt: CallOwner | None,
    ) -> None:
        self._actor = actor
        self._where = where
        self._coroutine = coroutine
        self._context = context
        self._awaited = awaited
        self._turn = turn
        self._own_cancellations = own_cancellations
        self._attempt = attempt
        self._task = _current_task()
        self._grace_timer: asyncio.TimerHandle | None = None  # runs since it was cancelled
        self._grace_passed = False  # the grace period has passed

    def __await__(self) -> Generator[Any, Any, Any]:
        actor, coroutine, waited, turn = self._actor, self._coroutine, self._awaited, self._turn
        run = self._context.run
        cancelling, times = self._task.cancelling, self._own_cancellations
        try:
            while True:
                error: BaseException | None = None
                try:
                    if type(waited) is not _FUTURE and isinstance(waited, _FUTURE):
                        yield from self._wait_until_done(waited, times)
                    else:
                        yield waited
                except asyncio.CancelledError as cancelled:
                    self._on_cancelled(times)
                    error = cancelled
                except BaseException as raised:
                    error = raised
                while turn is not None and actor.in_threads and turn.locked():
                    try:
                        yield from turn.acquire().__await__()
                    except asyncio.CancelledError as cancelled:
                        self._on_cancelled(times)
                        error = cancelled  # it is raised in the coroutine, at its turn
                    else:
                        turn.release()
                before, ended = cancelling(), True
                try:
                    try:
                        waited = run(coroutine.send, None) if error is None else run(coroutine.throw, error)
                        ended = False
                    finally:
                        if forks.count != actor.forks:
                            actor.end_child(self._where)
                        times = max(0, times + cancelling() - before)  # it may take back cancellations of others, too
                        if times and ended:
                            raise CancelledByUserCode(times)
                except StopIteration as stop:
                    return stop.value
                if self._grace_timer is not None and cancelling() <= times and not self._is_attempt_over():
                    self._stop_grace()  # its own code cancelled it, and took that back
        finally:
            self._stop_grace()
            if not self._grace_passed:
                run(coroutine.close)

    def _wait_until_done(self, awaited: asyncio.Future[Any], own_cancellations: int) -> Generator[Any, Any, None]:
        """Waits for an asyncio task of user code; once cancelled, it may go on, too, for `grace_s`."""
        awaited._asyncio_future_blocking = False  # `self` waits for it, not asyncio
        while not awaited.done():
            ended: asyncio.Future[None] = self._task.get_loop().create_future()
            awaited.add_done_callback(functools.partial(_wake, ended))
            try:
                yield from ended
            except asyncio.CancelledError:
                if self._grace_passed:
                    raise
                self._start_grace_if_cancelled(own_cancellations)
                awaited.cancel()

    def _on_cancelled(self, own_cancellations: int) -> None:
        """Handles a cancellation: starts the grace period, or raises StuckError if that has passed."""
        if self._grace_passed:
            self._task.uncancel()  # `_give_up` cancelled it
            self._abandon()
        self._start_grace_if_cancelled(own_cancellations)

    def _start_grace_if_cancelled(self, own_cancellations: int) -> None:
        """Starts the grace period, if the framework has cancelled the coroutine and none runs."""
        if self._grace_timer is None and self._task.cancelling() > own_cancellations:
            self._grace_timer = self._task.get_loop().call_later(self._actor.grace_s, self._give_up)

    def _is_attempt_over(self) -> bool:
        """Returns True if the coroutine belongs to work that is over."""
        return self._attempt is not None and self._attempt.cancelled

    def _stop_grace(self) -> None:
        if self._grace_timer is not None:
            self._grace_timer.cancel()
            self._grace_timer = None

    def _give_up(self) -> None:
        """Notes that the grace period has passed, and cancels the coroutine again."""
        self._grace_passed = True
        self._task.cancel()

    def _abandon(self) -> NoReturn:
        """Closes the coroutine, and raises StuckError."""
        self._actor.abandoned = True
        stuck_error = self._actor.stuck_error(self._where)
        try:
            self._context.run(self._coroutine.close)
        except BaseException as error:  # the coroutine refuses to close
            raise stuck_error from error
        raise stuck_error


def _wake(waiting: asyncio.Future[None], _: asyncio.Future[Any]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def uncancel_caller(itself: CancelledByUserCode) -> None:
    """Undoes the cancellations of the caller that user code made.

    Raises:
        CancelledError: the framework cancelled the caller, too.
    """
    caller = _current_task()
    for _ in range(itself.times):
        caller.uncancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)  # Python before 3.13 raises it nevertheless
    if caller.cancelling():
        raise asyncio.CancelledError from itself


class CoroutineOnStream(Coroutine[Any, Any, R]):
    """A coroutine whose steps run with a stream as the current one.

    A stream that the coroutine itself makes current is current until its next await.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, R], device: Device, stream: Stream) -> None:
        self._coroutine = coroutine
        self._device = device
        self._stream = stream

    def _step(self, step: Callable[..., Any], *args: Any) -> Any:
        """Runs one step of the coroutine, with the stream as the current one."""
        with self._device.on(self._stream):
            return step(*args)

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *args: Any) -> Any:
        return self._step(self._coroutine.throw, *args)

    def close(self) -> None:
        self._step(self._coroutine.close)

    def __await__(self) -> Generator[Any, Any, R]:
        raise NotImplementedError("call send() and throw()")


_ASYNC: weakref.WeakKeyDictionary[FunctionType, bool] = weakref.WeakKeyDictionary()
"""Results of `_looks_async`, which takes longer than many a compute."""


def is_async(function: Callable[..., Any]) -> bool:
    """True if a call of the function, `functools.partial` or callable object returns a coroutine."""
    plain = function.__func__ if type(function) is MethodType else function
    if type(plain) is not FunctionType:
        return returns_coroutine(function)
    if plain.__code__.co_flags & _COROUTINE:
        return True
    if not plain.__dict__:  # no mark of a decorator
        return False
    known = _ASYNC.get(plain)
    if known is None:
        known = _ASYNC[plain] = returns_coroutine(function)
    return known


def refuse_coroutine(function: Callable[..., Any], coroutine: CoroutineType[Any, Any, Any]) -> NoReturn:
    """Raises JobError: a plain function returned a coroutine, which would never run."""
    coroutine.close()  # or Python warns that it was never awaited
    raise JobError(
        f"{getattr(function, '__qualname__', function)} is a plain function and returned a coroutine, of which nothing "
        f"ran: what wraps an `async def` (a decorator, a lambda) must be an `async def` itself, and await it"
    )
