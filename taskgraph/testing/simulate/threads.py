"""Runs plain functions of users on the loop. Each takes some virtual time, and none can block.

A function may run at any moment of its time: a real thread may have finished a function that the loop gives up.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
from collections.abc import Callable
from contextvars import Context
from typing import Generic, TypeVar

from taskgraph.node.usercode.threads import FutureWork, Work

__all__ = ["Ends", "InlineThreads"]

R = TypeVar("R")

_LONG_S = 2.0


class Ends:
    """Draws when functions run within their time: in some seeds not only at its end.

    Args:
        late_s: how much later than it would a function ends.
    """

    def __init__(self, rng: random.Random, *, share: float) -> None:
        self._rng = rng
        self.drawn = rng.random() < share
        self._at_once = rng.choice((0.0, 0.5, 1.0))
        self._long = rng.choice((0.0, 0.01, 0.03))

    def end(self) -> None:
        self._long = 0.0

    def at_once(self) -> bool:
        """True if a brief function ends before its caller goes on."""
        return self.drawn and self._rng.random() < self._at_once

    def share(self) -> float:
        """The share of a function's time that passes before it runs; the rest, before the loop learns of its end."""
        return self._rng.random() if self.drawn else 1.0

    def long_s(self) -> float:
        """Returns how much longer than others a function takes."""
        return _LONG_S * self._rng.random() ** 2 if self.drawn and self._rng.random() < self._long else 0.0


class _Over(Generic[R]):
    """`Work` that ended before its caller went on."""

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
        raise AssertionError("it is over")


class InlineThreads:
    """`node/usercode/threads.py: Threads` without threads: a simulation runs hundreds of thousands of computes."""

    in_step = True

    def __init__(
        self,
        rng: random.Random,
        compute_s: float,
        ends: Ends | None = None,
        late_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.context = Context()
        self._rng = rng
        self._compute_s = compute_s
        self._ends = ends
        self._late_s = late_s

    def clock(self) -> float:
        return asyncio.get_running_loop().time()

    def start(self, function: Callable[[], R], *, brief: bool) -> Work[R]:
        if brief and self._ends is not None and self._ends.at_once():
            return _Over(function)
        return FutureWork(self.run(function))

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
        if self._ends is not None:
            takes_s, share = takes_s + self._ends.long_s(), self._ends.share()
        after_s = takes_s * (1.0 - share)
        loop.call_later(takes_s * share, step)
        return future

    def post(self, function: Callable[..., object], *args: object) -> None:
        raise RuntimeError("there is no thread here but the event loop's")

    def block(self, future: concurrent.futures.Future[R], timeout_s: float | None) -> R:
        raise RuntimeError("a simulated thread cannot wait: write an `async def`")

    def abandon(self) -> None:
        pass  # no function outlasts the callback it is run in

    def close(self) -> None:
        pass
