"""torch.distributed with Gloo: a broadcast of x, a reduction of everybody's share to the root. No fault tolerance."""

from __future__ import annotations

import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from work import WARM_EPOCHS, WARM_PART, arguments, check, plan, tasks_of, tell


def epochs(task: int, x: torch.Tensor, first: int, count: int) -> None:
    """Runs the epochs, in buffers that stay."""
    total = torch.empty_like(x)
    tasks = dist.get_world_size()
    for number in range(first, first + count):
        if task == 0:
            x.fill_(float(number))
        dist.broadcast(x, 0)
        torch.mul(x, float(task), out=total)
        dist.reduce(total, 0)
        if task == 0:
            check(total.numpy(), tasks, number)


def run(task: int, tasks: int, n: int, seconds: float, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=task, world_size=tasks, timeout=timedelta(seconds=60))
    x, done, more = torch.empty(n, dtype=torch.float64), 0, torch.tensor([WARM_EPOCHS])
    began = time.monotonic()
    epochs(task, x, 0, WARM_EPOCHS)
    done += WARM_EPOCHS
    more[0] = plan(seconds * WARM_PART, WARM_EPOCHS, time.monotonic() - began)
    for _ in range(2):  # a longer warm-up, by which the root says how many are to be measured
        dist.broadcast(more, 0)
        count = int(more)
        began = time.monotonic()
        epochs(task, x, done, count)
        elapsed = time.monotonic() - began
        done += count
        more[0] = plan(seconds, count, elapsed)
    if task == 0:
        tell({"rate": count / elapsed, "epochs": count, "seconds": elapsed})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    given = arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        shared = (given.tasks, given.n, given.seconds, f"{folder}/store")
        with tasks_of(run, given.tasks, *shared):
            run(0, *shared)
