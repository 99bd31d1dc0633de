"""The work on our own framework: a job on node processes of this host, its commits counted as they are read from etcd.

    python benchmarks/ours.py [--tasks 7] [--n 1] [--nodes 7] [--backups 0] [--threads] [--in-flight 1]
                              [--wait-ms 0] [--seconds 2]

Prints one JSON line: committed epochs per second, microseconds per task and epoch, and the most memory a node held.
The root checks every sum; an epoch that is wrong fails the job, and with it the benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from running import RunningJob
from tree import tree
from work import LEAST_EPOCHS, WARM_EPOCHS, WARM_PART, arguments, tell

_NEVER = 1_000_000_000


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=0, help="0: one for every task")
    parser.add_argument("--backups", type=int, default=0)
    parser.add_argument("--threads", action="store_true", help="computes are `def`, in worker threads")
    parser.add_argument("--in-flight", type=int, default=1, help="epochs of a task that are under way at once")
    parser.add_argument("--wait-ms", type=float, default=0.0, help="each task's sum waits that long, as for a device")
    parser.add_argument("--settle-s", type=float, default=60.0, help="how long the first epoch may take to commit")


def peak_mib(pid: int) -> float:
    """The most memory that a process has held at once, shared memory and all (Linux)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"/proc/{pid}/status does not tell a peak")


def largest_node_mib(given: argparse.Namespace, nodes: int) -> float:
    """What one epoch's items take on a node: x, its sum and its children's, each once, of every task it holds."""
    of_a_task = (1 + 1 + 2) * 8 * int(given.n) / 2**20
    return -(-int(given.tasks) // nodes) * of_a_task


async def main(given: argparse.Namespace) -> None:
    nodes = given.nodes or given.tasks
    job = tree(
        tasks=given.tasks,
        epochs=_NEVER,
        n=given.n,
        backups=given.backups,
        threads=given.threads,
        in_flight=given.in_flight,
        wait_ms=given.wait_ms,
    )
    async with RunningJob(job, nodes=nodes) as running:
        await running.until_settled(nodes, timeout_s=given.settle_s)
        view = running.view
        if nodes == given.tasks and len({view.primary_node(task) for task in range(given.tasks)}) < nodes:
            raise SystemExit("two tasks are on one node: the figure would be of something else")
        figures = await measure(running, given.seconds)
        if sys.platform == "linux":
            figures["peak_mib"] = max(peak_mib(node.record.pid) for node in running.view.nodes.values())
            figures["peak_of_bound"] = figures["peak_mib"] / (3 * largest_node_mib(given, nodes) + 150)
        figures["us_per_task"] = 1e6 / (figures["rate"] * given.tasks)
    tell(figures)


async def measure(running: RunningJob, seconds: float) -> dict[str, float]:
    """Commits per second, after a warm-up. Several may be read at once: we note how far the job was, and when."""
    created, done = time.monotonic(), asyncio.Event()
    first: tuple[float, int] | None = None
    last = (created, running.committed)

    def changed() -> None:
        nonlocal first, last
        if not running.view.running:
            done.set()
        stamp = running.view.stamp
        if done.is_set() or stamp is None or stamp.epoch <= last[1]:
            return
        last = (time.monotonic(), stamp.epoch)
        if first is None:
            if stamp.epoch >= WARM_EPOCHS and last[0] - created >= WARM_PART * seconds:
                first = last
        elif last[1] - first[1] >= LEAST_EPOCHS and last[0] - first[0] >= seconds:
            done.set()

    stop = running.follower.keeper.on_change(changed)
    try:
        async with asyncio.timeout(60.0 + 20.0 * seconds):
            await done.wait()
    except TimeoutError:
        raise SystemExit(f"at epoch {last[1]} after {60.0 + 20.0 * seconds:g} s: too slow to be measured") from None
    finally:
        stop()
    status = running.view.status
    if first is None or (status is not None and not running.view.running):
        raise SystemExit(f"the job {status.record.state if status else ''}: {status.record.reason if status else ''}")
    epochs, elapsed = last[1] - first[1], last[0] - first[0]
    return {"rate": epochs / elapsed, "epochs": epochs, "seconds": elapsed}


if __name__ == "__main__":
    asyncio.run(main(arguments(__doc__, options)))
