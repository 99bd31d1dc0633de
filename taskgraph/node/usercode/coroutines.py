"""Coroutines of user code, driven by hand: in their task's turn, with its stream, for a limited time once cancelled."""

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

if TYPE_CHECKING:
    from taskgraph.device.api import Device, Stream
    from taskgraph.node.usercode.actor import Actor, Ends

__all__ = ["CancelledItself", "OnStream", "Resumed", "is_async", "refuse_coroutine", "take_back"]

R = TypeVar("R")

_COROUTINE = inspect.CO_COROUTINE
_FUTURE = asyncio.Future


class CancelledItself(BaseException):
    """User code that has ended had cancelled the asyncio task it was called in. `times`: as often as it did."""

    def __init__(self, times: int) -> None:
        self.times = times


class Resumed:
    """Drives a coroutine on from its first await. It holds the task's turn while it runs, and not while it awaits.

    A coroutine that was cancelled may clean up, and may catch it and go on: for `cancel_s`.

    Args:
        context: what it runs in.
        waited: what it awaits.
        turn: None where it needs none. Only threads hold one for longer than it takes the event loop to notice.
        times: how often it has cancelled the asyncio task it runs in. It hears of that at its await, cleans up, and may
            take it back, as `asyncio.timeout` does; what counts is what is left when it ends.
        attempt: what it is part of, if any: the end of that cannot be taken back.
    """

    def __init__(
        self,
        actor: Actor,
        where: str,
        coroutine: Coroutine[Any, Any, R],
        context: Context,
        waited: Any,
        turn: asyncio.Lock | None,
        times: int,
        attempt: Ends | None,
    ) -> None:
        self._actor = actor
        self._where = where
        self._coroutine = coroutine
        self._context = context
        self._waited = waited
        self._turn = turn
        self._times = times
        self._attempt = attempt
        self._task = _current_task()
        self._limit: asyncio.TimerHandle | None = None  # since it was cancelled
        self._over = False  # that time is over

    def __await__(self) -> Generator[Any, Any, Any]:
        actor, coroutine, waited, turn = self._actor, self._coroutine, self._waited, self._turn
        run = self._context.run
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
                        waited = run(coroutine.send, None) if error is None else run(coroutine.throw, error)
                        ended = False
                    finally:
                        if forks.count != actor.forks:
                            actor.end_child(self._where)
                        times = max(0, times + cancelling() - before)  # it may take back what others did, too
                        if times and ended:
                            raise CancelledItself(times)
                except StopIteration as stop:
                    return stop.value
                if self._limit is not None and cancelling() <= times and not self._ends():
                    self._unlimited()  # it was something of its own that cancelled it, which has taken that back
        finally:
            self._unlimited()
            if not self._over:
                run(coroutine.close)

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

    def _ends(self) -> bool:
        return self._attempt is not None and self._attempt.cancelled

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
            self._context.run(self._coroutine.close)
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


async def take_back(itself: CancelledItself) -> None:
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


class OnStream(Coroutine[Any, Any, R]):
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


def refuse_coroutine(function: Callable[..., Any], coroutine: CoroutineType[Any, Any, Any]) -> NoReturn:
    """A plain function made a coroutine: nothing of that ran, and nobody would miss it where nothing is put."""
    coroutine.close()  # else Python warns that it was never awaited, too
    raise JobError(
        f"{getattr(function, '__qualname__', function)} is a plain function and returned a coroutine, of which nothing "
        f"ran: what wraps an `async def` (a decorator, a lambda) must be an `async def` itself, and await it"
    )
