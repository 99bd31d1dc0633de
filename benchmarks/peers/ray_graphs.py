"""Ray Compiled Graphs: the tree as one graph, compiled once, with as many executions in flight as asked for."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("RAY_CGRAPH_get_timeout", "60")  # the first 64 MiB take a busy machine more than 10 s

import ray
from ray.dag import InputNode, MultiOutputNode

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
    parser.add_argument("--in-flight", type=int, default=1)


def compiled(actors: dict[int, Any], tasks: int, n: int, in_flight: int) -> Any:
    def below(task: int, x: Any) -> Any:
        inner = children(task, tasks)
        relayed = actors[task].relay.bind(x) if inner else None
        return actors[task].add.bind(x, *[below(child, relayed) for child in inner])

    with InputNode() as x:
        graph = MultiOutputNode([below(child, x) for child in children(0, tasks)])
    size = max(1 << 20, 8 * n + (1 << 16))
    return graph.experimental_compile(_buffer_size_bytes=size, _max_inflight_executions=max(2, in_flight))


def main(tasks: int, n: int, seconds: float, in_flight: int) -> None:
    actors = {task: Task.remote(task) for task in range(1, tasks)}
    graph = compiled(actors, tasks, n, in_flight)
    meter, number, under_way = Meter(seconds), 0, deque()
    while True:
        while len(under_way) < in_flight:
            under_way.append((number, graph.execute(np.full(n, float(number)))))
            number += 1
        epoch, refs = under_way.popleft()
        check(sum(ray.get(refs)), tasks, epoch)
        if not meter.again():
            break
    tell(meter.figures)
    for _, refs in under_way:
        ray.get(refs)
    graph.teardown()  # does not return where actors hold views of what they read last: who runs us ends them


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
        main(given.tasks, given.n, given.seconds, given.in_flight)
    finally:
        ray.shutdown()
