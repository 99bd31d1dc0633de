"""Ray actors as a parameter server: two with half of the rows each, and two that pull and push batches.

The servers have all rows from the beginning, and apply SGD to what comes, in any order. There are no backups. A worker
asks both servers at once, and waits until both have applied its gradients before its next batch.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from typing import Any

import numpy as np
import ray

SERVERS, WORKERS = 2, 2
WARM_S = 2.0


@ray.remote(num_cpus=0)
class Server:
    """Has every second row in one array, which needs no look-up."""

    def __init__(self, rows: int, width: int) -> None:
        self.rows = np.random.default_rng(0).normal(scale=0.01, size=(rows, width)).astype(np.float32)

    def pull(self, ids: Any) -> Any:
        return self.rows[ids // SERVERS]

    def push(self, ids: Any, gradients: Any) -> None:
        np.subtract.at(self.rows, ids // SERVERS, np.float32(0.1) * gradients)


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self, number: int, servers: list[Any], rows: int, size: int) -> None:
        self.servers, self.rows, self.size = servers, rows, size
        self.rng = np.random.default_rng(number)

    def work(self, seconds: float) -> float:
        """Returns the rows pulled and pushed per second."""
        began, done = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            ids = self.rng.integers(0, self.rows, self.size)
            mine = [np.flatnonzero(ids % SERVERS == server) for server in range(SERVERS)]
            asked = [server.pull.remote(ids[one]) for server, one in zip(self.servers, mine, strict=True)]
            rows = ray.get(asked)
            pushed = [
                server.push.remote(ids[one], got * np.float32(0.01))
                for server, one, got in zip(self.servers, mine, rows, strict=True)
            ]
            ray.get(pushed)
            done += self.size
        return done / (time.monotonic() - began)


def main(given: argparse.Namespace) -> None:
    servers = [Server.remote(given.rows // SERVERS + 1, given.width) for _ in range(SERVERS)]
    workers = [Worker.remote(number, servers, given.rows, given.size) for number in range(WORKERS)]
    ray.get([worker.work.remote(WARM_S) for worker in workers])
    rates = ray.get([worker.work.remote(given.seconds) for worker in workers])
    print(json.dumps({"rows_per_s": sum(rates)}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--size", type=int, default=1000)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        _temp_dir=os.environ.get("TMPDIR"),
        object_store_memory=1 << 30,
    )
    try:
        main(parser.parse_args())
    finally:
        ray.shutdown()
