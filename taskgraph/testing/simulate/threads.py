"""Plain functions of users, run on the loop: each takes some virtual time, and none can block."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
from collections.abc import Callable
from typing import TypeVar

from taskgraph.node.usercode.threads import Begun

__all__ = ["InlineThreads"]

R = TypeVar("R")


class InlineThreads:
    """`node/usercode/threads.py: Threads` without threads: a simulation runs hundreds of thousands of computes."""

    in_step = True

    def __init__(self, rng: random.Random, compute_s: float) -> None:
        self._rng = rng
        self._compute_s = compute_s

    def clock(self) -> float:
        return asyncio.get_running_loop().time()

    def start(self, function: Callable[[], R], *, brief: bool) -> Begun[R]:
        return Begun(self.run(function))

    def run(self, function: Callable[[], R]) -> asyncio.Future[R]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()

        def step() -> None:
            if future.cancelled():
                return
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        loop.call_later(self._compute_s * self._rng.random() ** 2, step)
        return future

    def tell(self, function: Callable[..., object], *args: object) -> None:
        raise RuntimeError("there is no thread here but the event loop's")

    def block(self, future: concurrent.futures.Future[R], timeout_s: float | None) -> R:
        raise RuntimeError("a simulated thread cannot wait: write an `async def`")

    def abandon(self) -> None:
        pass  # no function outlasts the callback it is run in

    def close(self) -> None:
        pass
