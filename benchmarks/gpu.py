"""What the framework costs on a CUDA device: an epoch, an array on its way, a snapshot, a failure.

    python benchmarks/gpu.py [overhead] [array] [network] [snapshot] [failover] [--rounds 3] [--seconds 5]
                             [--side 4096] [--compute-ms 10] [--mib 1024] [--host]

- overhead: epochs of matrix products for about `--compute-ms`, against the same loop in plain CuPy, in turns.
- array: `--mib` MiB from `outs.put` in one process to a compute in another on the same device that has read them.
- network: the same between processes that are to each other as on two hosts, over TCP, in turns with arrays of numpy.
- snapshot: epochs of ten times `--compute-ms` of products that change a state of `--mib` MiB, with a backup on another
  node, against the same where the array is no state, in turns.
- failover: from `kill -9` of a primary to the next commit, of tasks whose arrays are on the device and of the same with
  numpy, in turns.

Without a device nothing is measured; `--host` does the same with numpy, to see that it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from failover import fail, replace
from running import RunningJob

import taskgraph as tg
from taskgraph.device.cuda import array_module, device_count
from taskgraph.transport import endpoints

CASES = ("overhead", "array", "network", "snapshot", "failover")
_WARM_S = 1.0
_MIB = 1 << 20
_APART = "TASKGRAPH_BENCH_APART"
if _APART in os.environ:  # in a node: no other one is on its host
    endpoints.can_dial = lambda endpoint: endpoint.startswith("tcp:")


def wait_for(array: Any) -> float:
    """Returns when the array is there: reading an element waits for the device."""
    return float(array.reshape(-1)[-1])


class Products:
    """Matrix products, one after another on the device."""

    def __init__(self, xp: Any, side: int) -> None:
        self._a = xp.ones((side, side), dtype=xp.float32)
        self._b = xp.full((side, side), 1.0 / side, dtype=xp.float32)

    def work(self, count: int) -> None:
        """Returns when they are done."""
        c = self._a
        for _ in range(count):
            c = c @ self._b
        wait_for(c)


class Computes(tg.Task):
    """One task by itself: all an epoch has besides its work is the framework's."""

    def __init__(self, side: int, count: int) -> None:
        self.size = side, count

    def setup(self) -> None:
        self.products = Products(self.xp, self.size[0])

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.work)

    def work(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.products.work(self.size[1])


class Changes(Computes):
    """Likewise, and an array changes that no snapshot has."""

    def __init__(self, side: int, count: int, mib: int) -> None:
        super().__init__(side, count)
        self.mib = mib

    def setup(self) -> None:
        super().setup()
        self.x = self.xp.zeros(self.mib * _MIB // 8)

    def work(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        super().work(epoch, ins, outs)
        self.x += 1


class Keeps(Changes, state=["x"]):
    """The array is the task's state: each epoch has a snapshot of it, which a backup holds."""


class Pipe(tg.Task):
    """Task 0 sends an array, task 1 reads it, and keeps what it measured outside of its state: its node lives to the
    end."""

    def __init__(self, mib: int, on_device: bool = True) -> None:
        self.mib = mib
        self.on_device = on_device
        self.took: list[float] = []
        self.sent: dict[str, Any] = {}

    def setup(self) -> None:
        self.sent["x"] = (self.xp if self.on_device else np).zeros(self.mib * _MIB // 8)

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 0:
            epoch.processor(self.send, outbound={"x": 1})
        else:
            epoch.processor(self.take, inbound={"x": 0})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        x = self.sent["x"]
        x += 1
        wait_for(x)  # what is measured is the way, not the work before it
        outs.put("x", {"put": time.monotonic(), "x": x})

    def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        value = ins["x"]
        last = wait_for(value["x"])
        self.took.append((time.monotonic() - value["put"]) * 1e3)
        if last != epoch.number + 1:
            raise ValueError(f"epoch {epoch.number}: {last}")

    def result(self) -> list[float] | None:
        return self.took[len(self.took) // 4 :] if self.task_id == 1 else None


class Relaxes(tg.Task, state=["row"]):
    """A ring whose rows even out."""

    def __init__(self, on_device: bool) -> None:
        self.on_device = on_device

    def setup(self) -> None:
        xp = self.xp if self.on_device else np
        self.row = xp.arange(1024.0) + self.task_id

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"row": "right"})
        epoch.processor(self.mix, inbound={"row": "left"})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("row", self.row)

    def mix(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.row = (self.row + ins["row"]) / 2


@tg.job
def gpu(
    kind: str = "computes", side: int = 4096, count: int = 1, mib: int = 1024, epochs: int = 1_000_000_000
) -> tg.Job:
    builders = {
        "computes": lambda _: Computes(side, count),
        "changes": lambda _: Changes(side, count, mib),
        "keeps": lambda _: Keeps(side, count, mib),
        "pipe": lambda _: Pipe(mib),
        "host pipe": lambda _: Pipe(mib, on_device=False),
        "on the device": lambda _: Relaxes(True),
        "on the host": lambda _: Relaxes(False),
    }
    tasks = {"pipe": 2, "host pipe": 2, "on the device": 4, "on the host": 4}.get(kind, 1)
    backups = int(kind not in ("computes", "pipe", "host pipe"))
    return tg.Job(tasks=tasks, epochs=epochs, builder=builders[kind], backups=backups, topology=tg.ring())


async def epochs_per_second(job: tg.Job, nodes: int, seconds: float) -> float:
    async with RunningJob(job, nodes=nodes) as running:
        await running.until_settled(nodes, timeout_s=120.0)
        await asyncio.sleep(min(_WARM_S, seconds))
        async with asyncio.timeout(seconds + 120.0):
            # From one commit to another: an epoch may take a good part of that time.
            while not running.commits:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            began, first = running.commits[-1]
            await asyncio.sleep(seconds)
            while running.committed == first:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        ended, last = running.commits[-1]
        return (last - first) / (ended - began)


def plain_per_second(products: Products, count: int, seconds: float) -> float:
    """The same work in a loop."""
    products.work(count)
    began, done = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        products.work(count)
        done += 1
    return done / (time.monotonic() - began)


def products_in(products: Products, ms: float) -> int:
    """How many take that long."""
    count = 1
    while True:
        products.work(count)
        began = time.monotonic()
        products.work(count)
        took_ms = (time.monotonic() - began) * 1e3
        if took_ms >= ms / 2:
            return max(1, round(count * ms / took_ms))
        count *= 2


def spread(values: list[float], digits: int) -> str:
    median, least, most = (f"{x:.{digits}f}" for x in (statistics.median(values), min(values), max(values)))
    return f"median {median}  ({least} to {most}, {len(values)})"


async def overhead(given: argparse.Namespace, products: Products, count: int) -> None:
    ratios, per_second = [], 0.0
    for _ in range(given.rounds):
        alone = plain_per_second(products, count, given.seconds)
        per_second = await epochs_per_second(gpu("computes", given.side, count), 1, given.seconds)
        ratios.append(alone / per_second)
    print(f"an epoch of {1e3 / per_second:.2f} ms, {count} products of {given.side} x {given.side}")
    print(f"  its time, of that of the same loop by itself (bar: 1.05): {spread(ratios, 3)}")


async def piped(kind: str, mib: int, epochs: int, listen: str = "") -> list[float]:
    """What an array took in each epoch, in ms."""
    job = gpu(kind, mib=mib, epochs=epochs)
    async with asyncio.timeout(300.0), RunningJob(job, nodes=2, listen=listen) as running:
        result = await running.result()
        view = running.view
        if view.primary_node(0) is not None and view.primary_node(0) == view.primary_node(1):
            raise SystemExit("both tasks are on one node: the figure would be of something else")
        return list(result.values[1])


async def array(given: argparse.Namespace) -> None:
    took = [ms for _ in range(given.rounds) for ms in await piped("pipe", given.mib, 40)]
    print(f"{given.mib} MiB from put to read in another process, ms (bar for 1,024 on a device: 2)")
    print(f"  {spread(took, 3)}")


async def network(given: argparse.Namespace) -> None:
    took: dict[str, list[float]] = {"pipe": [], "host pipe": []}
    os.environ[_APART] = "1"
    try:
        for _ in range(given.rounds):
            for kind, found in took.items():
                found += await piped(kind, given.mib, 12, listen="127.0.0.1")
    finally:
        del os.environ[_APART]
    print(f"{given.mib} MiB from put to read over TCP, within one host, ms")
    print(f"  arrays on the device: {spread(took['pipe'], 1)}")
    print(f"  arrays on the host: {spread(took['host pipe'], 1)}")


async def snapshot(given: argparse.Namespace, products: Products) -> None:
    count = products_in(products, 10 * given.compute_ms)
    ratios = []
    for _ in range(given.rounds):
        changes = await epochs_per_second(gpu("changes", given.side, count, given.mib), 2, given.seconds)
        keeps = await epochs_per_second(gpu("keeps", given.side, count, given.mib), 2, given.seconds)
        ratios.append(changes / keeps)
    print(f"an epoch of {1e3 / changes:.1f} ms that changes {given.mib} MiB")
    print(f"  its time where that is the task's state, of its time without (bar: 1.10): {spread(ratios, 3)}")


async def failover(given: argparse.Namespace) -> None:
    print("kill -9 of a primary until the next commit, ms")
    took: dict[str, list[float]] = {"on the device": [], "on the host": []}
    for _ in range(given.rounds):
        for kind, found in took.items():
            async with RunningJob(gpu(kind), nodes=3) as running:
                await running.until_settled(3, timeout_s=120.0)
                for task in (0, 1, 2):
                    found.append((await fail(running, task, signal.SIGKILL)).total_ms)
                    await replace(running, 3)
    for kind, found in took.items():
        print(f"  arrays {kind}: {spread(found, 1)}")


async def main(given: argparse.Namespace) -> None:
    devices = device_count()
    if not devices and not given.host:
        raise SystemExit(
            "no CUDA device can be used here (see docs/gpu.md), so nothing is measured; --host takes numpy"
        )
    if given.host:
        os.environ["CUDA_VISIBLE_DEVICES"], devices = "", 0  # of the nodes, too
    xp, _ = array_module(devices)
    name = xp.cuda.runtime.getDeviceProperties(0)["name"].decode() if devices else "numpy on the host"
    print(f"{name}, {os.cpu_count()} cores, Python {sys.version.split()[0]}")
    products = Products(xp, given.side)
    if "overhead" in given.what:
        await overhead(given, products, products_in(products, given.compute_ms))
    if "array" in given.what:
        await array(given)
    if "network" in given.what:
        await network(given)
    if "snapshot" in given.what:
        await snapshot(given, products)
    if "failover" in given.what:
        await failover(given)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; all of them without one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--side", type=int, default=4096, help="of the matrices, which are of float32")
    parser.add_argument("--compute-ms", type=float, default=10.0)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--host", action="store_true")
    given = parser.parse_args()
    if unknown := set(given.what).difference(CASES):
        parser.error(f"no case is called {min(unknown)!r}; cases are: {', '.join(CASES)}")
    given.what = given.what or CASES
    asyncio.run(main(given))
