"""How many rows of a table two workers pull and push in a second, with backups; Ray actors do the same in turns.

    python benchmarks/tables.py [--seconds 5] [--rounds 3] [--ray PYTHON]

Two workers pull a batch of random rows from two servers, and push a gradient for each, again and again. A row that was
pulled and pushed counts once. Ours: two nodes with all tasks and their backups, an etcd of its own, and an epoch counts
when its commit is read from etcd. Ray (`peers/ray_table.py`): actors with an array each that apply what comes, without
backups, order or any promise about failures. `--ray` is the Python of an environment with Ray; without it only ours
runs. Prints a line of JSON for each turn; of ours also the processor time of both nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from running import RunningJob
from work import tell

import taskgraph as tg

_WARM_S = 2.0


class Worker(tg.Task):
    """Pulls and pushes some batches in each epoch."""

    def __init__(self, rows: int, size: int, batches: int) -> None:
        self.rows, self.size, self.batches = rows, size, batches

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.flag(self.task_id)

    async def on_flag(self, epoch: tg.Epoch, sender: int, meta: None) -> None:
        table = epoch.table("rows")
        rng = np.random.default_rng([self.task_id, epoch.number])
        for _ in range(self.batches):
            ids = rng.integers(0, self.rows, self.size)
            rows = await table.apull(ids)
            table.push(ids, rows * np.float32(0.01))


@tg.job
def table_rate(
    workers: int = 2,
    servers: int = 2,
    rows: int = 100_000,
    width: int = 64,
    size: int = 1000,
    batches: int = 1,
    backups: int = 1,
    optimizer: str = "sgd",
) -> tg.Job:
    """Workers that pull and push random rows.

    Args:
        rows: ids are below this number
        width: numbers in a row
        size: rows in a batch
        batches: batches of a worker in an epoch
    """
    table = tg.Table(width, servers=servers, optimizer=optimizer)  # type: ignore[arg-type]  # a text here
    return tg.Job(
        tasks=workers,
        builder=lambda _: Worker(rows, size, batches),
        tables={"rows": table},
        backups=backups,
    )


async def ours(given: argparse.Namespace) -> dict[str, float]:
    job = table_rate(
        rows=given.rows, width=given.width, size=given.size, batches=given.batches, optimizer=given.optimizer
    )
    async with asyncio.timeout(60.0 + 2 * given.seconds), RunningJob(job, nodes=given.nodes) as running:
        await running.until("the first epochs", lambda view: view.stamp is not None and view.stamp.epoch > 3)
        await running.until_settled(given.nodes)
        await asyncio.sleep(_WARM_S)
        used = _used_s(running)
        began, first = running.commits[-1]
        while time.monotonic() - began < given.seconds:
            await asyncio.sleep(0.05)
            if not running.view.running:
                raise SystemExit(str(running.view.status))
        ended, last = running.commits[-1]
        used = _used_s(running) - used
    rate = (last - first) * job.tasks * given.size * given.batches / (ended - began)
    epochs = last - first
    return {"rows_per_s": rate, "epochs_per_s": epochs / (ended - began), "processor_ms_per_epoch": used * 1e3 / epochs}


def _used_s(running: RunningJob) -> float:
    """Returns the processor time that the nodes have used, without etcd's and the driver's."""
    ticks = 0
    for node in running.view.nodes.values():
        fields = Path(f"/proc/{node.record.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def theirs(given: argparse.Namespace) -> dict[str, float]:
    script = Path(__file__).parent / "peers" / "ray_table.py"
    figures = [f"--{name}={getattr(given, name)}" for name in ("seconds", "rows", "width", "size")]
    done = subprocess.run([given.ray, str(script), *figures], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"Ray ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(given: argparse.Namespace) -> None:
    for number in range(given.rounds):
        tell({"round": number, "who": "ours", **asyncio.run(ours(given))})  # type: ignore[dict-item]
        if given.ray:
            tell({"round": number, "who": "Ray actors", **theirs(given)})  # type: ignore[dict-item]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="measured in each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--size", type=int, default=1000, help="rows in a batch")
    parser.add_argument("--batches", type=int, default=1, help="batches of a worker in an epoch (ours)")
    parser.add_argument("--optimizer", default="sgd", help="of ours; Ray's is SGD")
    parser.add_argument("--ray", default="", help="the Python of an environment with Ray")
    main(parser.parse_args())
