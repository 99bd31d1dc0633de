"""The same MLP on torchft, which survives deaths: SIGKILL of one replica, until all others have committed a step.

Every replica is a process of its own, which adds up its parts and calls `Manager.allreduce` once a step (torchft's DDP
fails with its `no_sync` when a peer dies). Prints one JSON line: milliseconds of
undisturbed steps, and of each kill. A killed replica is not replaced: each kill has replicas of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.nn.functional import cross_entropy
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.optim import OptimizerWrapper

sys.path.insert(0, str(Path(__file__).parents[1]))

from fit import HIDDEN, ROWS, data, net
from work import tasks_of

_WARM = 15


def run(replica: int, given: argparse.Namespace, lighthouse: str, folder: str) -> None:
    torch.set_num_threads(1)
    inner, (images, labels) = net(HIDDEN[given.model]), data()
    plain = torch.optim.SGD(inner.parameters(), 0.01, momentum=0.9)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        inner.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load,
        state_dict=lambda: {"model": inner.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=2,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica{replica}",
    )
    optimizer = OptimizerWrapper(manager, plain)
    share = given.parts // given.workers
    mine = torch.arange(given.batch).chunk(given.workers)[replica - 1].chunk(share)
    with (Path(folder) / f"{replica}.log").open("w", buffering=1) as log:
        while True:
            step = manager.current_step()
            optimizer.zero_grad()
            for rows in mine:
                chosen = (step * given.batch % ROWS) + rows
                (cross_entropy(inner(images[chosen]), labels[chosen]) / share).backward()
            gradients = [p.grad for p in inner.parameters() if p.grad is not None]
            flat = torch.cat([gradient.view(-1) for gradient in gradients])
            manager.allreduce(flat).wait()
            for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(mean.view_as(gradient))
            optimizer.step()
            if manager.current_step() > step:
                print(time.monotonic_ns(), file=log)


def ends(folder: str, replica: int) -> list[int]:
    path = Path(folder) / f"{replica}.log"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def one_kill(given: argparse.Namespace) -> tuple[list[float], float]:
    """Returns milliseconds of undisturbed steps, and from the kill until all others have committed a step."""
    lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=2, join_timeout_ms=1000)
    replicas = range(1, given.workers + 1)
    with (
        tempfile.TemporaryDirectory() as folder,
        tasks_of(run, given.workers + 1, given, lighthouse.address(), folder),
    ):
        began = time.monotonic()
        while any(len(ends(folder, replica)) < 60 for replica in replicas):
            if time.monotonic() > began + 90:
                raise SystemExit("torchft: no 60 steps within 90 s")
            time.sleep(0.1)
        victim = random.choice(multiprocessing.active_children())
        time.sleep(0.2 * random.random())
        at = time.monotonic_ns()
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        time.sleep(given.wait_s)
        logs = [ends(folder, replica) for replica in replicas]
    lighthouse.shutdown()
    before = [end for end in logs[0] if end < at][_WARM:]
    # The stall may begin one step later, if the victim had given all to the one at work: the longest gap counts.
    stalls = []
    for log in logs:
        after = [end for end in log if end > at]
        if after and after[-1] > at + (given.wait_s - 2) * 1e9:  # it goes on
            _, resumed = max((b - a, b) for a, b in itertools.pairwise([at, *after]))
            stalls.append((resumed - at) / 1e6)
    if len(stalls) != given.workers - 1:
        raise SystemExit(f"torchft: {len(stalls)} replicas went on within {given.wait_s} s")
    return [(b - a) / 1e6 for a, b in itertools.pairwise(before)], max(stalls)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--model", default="0.27M", choices=HIDDEN)
    parser.add_argument("--parts", type=int, default=24)
    parser.add_argument("--batch", type=int, default=240)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--wait_s", type=float, default=20.0, help="after a kill")
    given = parser.parse_args()
    steps: list[float] = []
    kills: list[float] = []
    for _ in range(given.kills):
        undisturbed, kill = one_kill(given)
        steps += undisturbed
        kills.append(kill)
    print(json.dumps([steps, kills]), flush=True)
