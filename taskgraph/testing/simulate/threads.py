"""Runs users' plain functions on the loop. Each takes some virtual time, and none can block.

A function may run at any moment of that time: a real thread may have finished a function that the loop cancels.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
from collections.abc import Callable
from contextvars import Context
from typing import Generic, TypeVar

from taskgraph.node.usercode.threads import CallInThread, FutureCall

__all__ = ["FunctionTiming", "InlineThreads"]

R = TypeVar("R")

_MAX_EXTRA_S = 2.0


class FunctionTiming:
    """Draws at which moment of its duration a function runs, and how long it takes. In most seeds it runs at the end.

    Args:
        share: share of the seeds with other moments and long durations.
    """

    def __init__(self, rng: random.Random, *, share: float) -> None:
        self._rng = rng
        self.active = rng.random() < share
        self._at_once_share = rng.choice((0.0, 0.5, 1.0))
        self._extra_share = rng.choice((0.0, 0.01, 0.03))

    def end(self) -> None:
        """Ends extra durations. Functions still run at any moment of their duration."""
        self._extra_share = 0.0

    def draw_at_once(self) -> bool:
        """Draws whether a brief function ends before `start` returns."""
        return self.active and self._rng.random() < self._at_once_share

    def share_before_run(self) -> float:
        """Draws the share of a function's duration that passes before it takes effect; the rest passes after that."""
        return self._rng.random() if self.active else 1.0

    def extra_s(self) -> float:
        """Draws an extra duration of a function, mostly 0."""
        return _MAX_EXTRA_S * self._rng.random() ** 2 if self.active and self._rng.random() < self._extra_share else 0.0


class _FinishedWork(Generic[R]):
    """A `CallInThread` whose function has already run."""

    over = True
    took_s = 0.0

    def __init__(self, function: Callable[[], R]) -> None:
        self._result: R | None = None
        self._error: BaseException | None = None
        try:
            self._result = function()
        except BaseException as error:
            self._error = error

    def result(self) -> R:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._result  # type: ignore[return-value]

    def future(self) -> asyncio.Future[R]:
        raise AssertionError("the function has ended")


class InlineThreads:
    """Implements `node/usercode/threads.py: Threads` on the loop: simulations run hundreds of thousands of computes."""

    in_step = True

    def __init__(
        self,
        rng: random.Random,
        compute_s: float,
        timing: FunctionTiming | None = None,
        late_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.context = Context()
        self._rng = rng
        self._compute_s = compute_s
        self._timing = timing
        self._late_s = late_s

    def clock(self) -> float:
        return asyncio.get_running_loop().time()

    def start(self, function: Callable[[], R], *, brief: bool) -> CallInThread[R]:
        if brief and self._timing is not None and self._timing.draw_at_once():
            return _FinishedWork(function)
        return FutureCall(self.run(function))

    def run(self, function: Callable[[], R]) -> asyncio.Future[R]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()

        def step() -> None:
            if future.cancelled():
                return
            result: R | None = None
            error: BaseException | None = None
            try:
                result = function()
            except BaseException as raised:
                error = raised
            if after_s > 0.0:
                loop.call_later(after_s, settle, result, error)
            else:
                settle(result, error)

        def settle(result: R | None, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        takes_s, share = self._compute_s * self._rng.random() ** 2 + self._late_s(), 1.0
        if self._timing is not None:
            takes_s, share = takes_s + self._timing.extra_s(), self._timing.share_before_run()
        after_s = takes_s * (1.0 - share)
        loop.call_later(takes_s * share, step)
        return future

    def post(self, function: Callable[..., object], *args: object) -> None:
        raise RuntimeError("there is no thread here but the event loop's")

    def block(self, future: concurrent.futures.Future[R], timeout_s: float | None) -> R:
        raise RuntimeError("a simulated thread cannot wait: write an `async def`")

    def cancel_futures(self) -> None:
        pass  # each function ends within a callback

    def close(self) -> None:
        pass
