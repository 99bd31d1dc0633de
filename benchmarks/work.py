"""What all contenders share: the tree, the check, how long to measure, how to print a figure.

A contender is a script: it runs the work for a while and prints one JSON line, {"rate": epochs per second, ...}. Where
nothing else is said, task 0, the root, is the script's own process, and every other task has one that ends with it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "LEAST_EPOCHS",
    "WARM_EPOCHS",
    "WARM_PART",
    "Array",
    "Meter",
    "arguments",
    "check",
    "children",
    "die_with_parent",
    "parent",
    "plan",
    "tasks_of",
    "tell",
]

Array = NDArray[np.float64]

WARM_EPOCHS = 3
WARM_PART = 0.25
LEAST_EPOCHS = 3
"""Epochs that are measured at least, however slow they are."""


def parent(task: int) -> int:
    return (task - 1) // 2


def children(task: int, tasks: int) -> list[int]:
    return [child for child in (2 * task + 1, 2 * task + 2) if child < tasks]


def check(total: Array, tasks: int, number: int) -> None:
    """Ends the program if the sum that reached the root is not exactly that of all tasks."""
    expected = float(number) * sum(range(tasks))
    if not np.all(total == expected):
        raise SystemExit(f"epoch {number}: the sum is {total}, not {expected}")


class Meter:
    """Counts epochs from the end of a warm-up on, until enough time was measured."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._created = time.monotonic()
        self._began = self._last = 0.0
        self._seen = self.epochs = 0

    def again(self) -> bool:
        """To be called whenever an epoch was checked: whether there should be another."""
        now = time.monotonic()
        self._seen += 1
        if not self._began:
            if self._seen >= WARM_EPOCHS and now - self._created >= self._seconds * WARM_PART:
                self._began = self._last = now
            return True
        self.epochs += 1
        self._last = now
        return self.epochs < LEAST_EPOCHS or now - self._began < self._seconds

    @property
    def figures(self) -> dict[str, float]:
        elapsed = self._last - self._began
        return {"rate": self.epochs / elapsed, "epochs": self.epochs, "seconds": elapsed}


def plan(seconds: float, warmed: int, elapsed: float) -> int:
    """How many epochs take about so long, after some that took `elapsed`: for tasks that all count themselves."""
    return max(LEAST_EPOCHS, round(seconds * warmed / elapsed))


def tell(figures: dict[str, float]) -> None:
    print(json.dumps(figures), flush=True)


def arguments(
    description: str | None, extra: Callable[[argparse.ArgumentParser], object] | None = None
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--tasks", type=int, default=7)
    parser.add_argument("--n", type=int, default=1, help="float64 values an item")
    parser.add_argument("--seconds", type=float, default=2.0, help="measured, after a warm-up")
    if extra is not None:
        extra(parser)
    return parser.parse_args()


def die_with_parent() -> None:
    """Linux kills this process when the one that started it ends, however that ends."""
    if sys.platform == "linux":
        above = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != above:
            os._exit(1)


def _task(run: Callable[..., None], arguments: tuple[object, ...]) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the root's matter
    run(*arguments)


@contextlib.contextmanager
def tasks_of(run: Callable[..., None], tasks: int, *arguments: object) -> Iterator[None]:
    """`run(task, *arguments)` in a process each, for all tasks but the root; they are ended with the context."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_task, args=(run, (task, *arguments)), daemon=True) for task in range(1, tasks)]
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
