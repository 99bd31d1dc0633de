"""The same MLP on DDP over Gloo: a process for each worker, which accumulates its parts under `no_sync`.

No fault tolerance. Prints one JSON line: milliseconds of each step, and CPU time of a step, of all processes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

from fit import HIDDEN, ROWS, data, net
from work import tasks_of


def run(rank: int, given: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=given.workers, timeout=limit)
    model = DistributedDataParallel(net(HIDDEN[given.model]), gradient_as_bucket_view=True)
    images, labels = data()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    share = given.parts // given.workers
    mine = torch.arange(given.batch).chunk(given.workers)[rank].chunk(share)
    ends, cpu = [], []
    for step in range(given.steps):
        begin = step * given.batch % ROWS
        optimizer.zero_grad()
        for number, rows in enumerate(mine):
            with contextlib.nullcontext() if number == share - 1 else model.no_sync():
                (cross_entropy(model(images[begin + rows]), labels[begin + rows]) / share).backward()
        optimizer.step()
        ends.append(time.monotonic())
        cpu.append(time.process_time())
    half = given.steps // 2
    used = torch.tensor((cpu[-1] - cpu[half]) / (given.steps - 1 - half) * 1e3)
    dist.all_reduce(used)
    if rank == 0:
        print(json.dumps([[(b - a) * 1e3 for a, b in itertools.pairwise(ends)], used.item()]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--model", default="0.27M", choices=HIDDEN)
    parser.add_argument("--parts", type=int, default=24, help="of all workers")
    parser.add_argument("--batch", type=int, default=240, help="rows of a step")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tasks_of(run, given.workers, given, f"{folder}/store"):
        run(0, given, f"{folder}/store")
