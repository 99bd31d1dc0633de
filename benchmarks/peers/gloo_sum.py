"""Gloo's allreduce of one array between processes of this host. Prints one JSON line: milliseconds of each."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from work import tasks_of


def run(rank: int, given: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=given.workers, timeout=limit)
    ones, times = torch.ones(given.n, dtype=torch.float64), []
    for _ in range(given.steps):
        began = time.monotonic()
        total = ones.clone()
        dist.all_reduce(total)
        times.append((time.monotonic() - began) * 1e3)
    if rank == 0:
        print(json.dumps(times), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--n", type=int, default=8192, help="float64 values")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tasks_of(run, given.workers, given, f"{folder}/store"):
        run(0, given, f"{folder}/store")
