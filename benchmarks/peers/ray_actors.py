"""Ray actors: every task an actor, results passed on as object refs, so that data moves between actors only.

With `--ahead`, calls of that many epochs are queued before the first one's sum is asked for.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import ray

sys.path.insert(0, str(Path(__file__).parents[1]))

from work import Array, Meter, arguments, check, children, tell


@ray.remote(num_cpus=0)
class Task:
    def __init__(self, task: int) -> None:
        self.id = task

    def relay(self, x: Array) -> Array:
        return x

    def add(self, x: Array, *sums: Array) -> Array:
        total = x * float(self.id)
        for one in sums:
            np.add(total, one, out=total)
        return total


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ahead", type=int, default=1, help="epochs that are under way at once")


def begin(actors: dict[int, Any], tasks: int, x: Any) -> list[Any]:
    """Queues one epoch's calls; returns refs of the sums that reach the root."""

    def below(task: int, x: Any) -> Any:
        inner = children(task, tasks)
        relayed = actors[task].relay.remote(x) if inner else None
        return actors[task].add.remote(x, *[below(child, relayed) for child in inner])

    return [below(child, x) for child in children(0, tasks)]


def main(tasks: int, n: int, seconds: float, ahead: int) -> None:
    actors = {task: Task.remote(task) for task in range(1, tasks)}  # the driver is the root
    ray.get([actor.relay.remote(None) for actor in actors.values()])
    meter, number, under_way = Meter(seconds), 0, deque()
    while True:
        while len(under_way) < ahead:
            under_way.append((number, begin(actors, tasks, ray.put(np.full(n, float(number))))))
            number += 1
        epoch, refs = under_way.popleft()
        check(sum(ray.get(refs)), tasks, epoch)
        if not meter.again():
            break
    tell(meter.figures)


if __name__ == "__main__":
    given = arguments(__doc__, options)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        _temp_dir=os.environ.get("TMPDIR"),
        object_store_memory=4 << 30,
    )
    try:
        main(given.tasks, given.n, given.seconds, given.ahead)
    finally:
        ray.shutdown()
