"""Minutes of a random fault every few seconds: the results stay exact, and nothing grows.

    python benchmarks/soak.py [--minutes 30] [--every 4] [--seed 1]

A ring job runs on six nodes, with one backup per task. All but one of the nodes are killed, frozen past their lease
and woken up, drained or halted for a moment, in a random order, and others are started in their place. After every
fault the job is left alone until all replicas are in sync again, or two faults would at times take both replicas of a
task, which no backup can survive.

Every task folds all that it consumes into its state, so that one item lost, doubled or changed in any of the epochs
shows at the end. Memory, file descriptors, threads and coroutines of the node that no fault hits, of the driver's
process and of etcd are looked at all the time; the quarters of the run are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from running import RunningJob

import taskgraph as tg
from taskgraph.errors import TaskGraphError
from taskgraph.launch.follow import client_of
from taskgraph.observe.usage import Usage
from taskgraph.protocol.records import NodeRecord

_MASK = (1 << 64) - 1
_NODES = 6
_TASKS = 12
_FINISH = "finish"
_LEAST_SAMPLES = 8


def fold(state: int, number: int, sender: int, value: int) -> int:
    """Not commutative: what came, from whom, in which epoch, and in which order."""
    return (state * 6364136223846793005 + (number * 1000003 + sender) ^ value) & _MASK


class Chain(tg.Task, state=["folded"]):
    """Sends its state to both neighbors of the ring, and folds in what comes from them."""

    def __init__(self, stop: str) -> None:
        self._stop = stop

    def setup(self) -> None:
        self.folded = self.task_id + 1

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.tell, outbound={"state": ["left", "right"]})
        epoch.processor(self.take, inbound={"state": ["left", "right"]})

    def tell(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("state", self.folded)

    def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        for sender, value in ins.all("state").items():
            self.folded = fold(self.folded, epoch.number, sender, value)
        if self.task_id == 0 and os.path.exists(self._stop):
            epoch.finish()

    def result(self) -> int:
        return self.folded


def expected(tasks: int, epochs: int) -> dict[int, int]:
    """The same without a framework."""
    states = [task + 1 for task in range(tasks)]
    for number in range(epochs):
        before = list(states)
        for task in range(tasks):
            for sender in ((task - 1) % tasks, (task + 1) % tasks):
                states[task] = fold(states[task], number, sender, before[sender])
    return dict(enumerate(states))


@tg.job
def soak(stop: str = _FINISH) -> tg.Job:
    """Runs until the file `stop` exists."""
    return tg.Job(tasks=_TASKS, builder=lambda _: Chain(stop), topology=tg.ring(), backups=1)


class Meter:
    """What the lasting processes use, every few seconds."""

    def __init__(self, job: RunningJob, anchor: str) -> None:
        self._job = job
        self._anchor = anchor
        self.samples: list[dict[str, float]] = []

    async def run(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(2.0)

    async def sample(self) -> None:
        """Also of coroutines, though they come and go with every epoch: in a median of many that does not matter."""
        try:
            async with asyncio.timeout(5.0), client_of(self._record, self._job.token) as client:
                node = (await client.status()).usage
        except (TaskGraphError, TimeoutError) as error:  # etcd, or the node's own event loop, has had a bad moment
            print(f"  no sample: {error!r}", flush=True)
            return
        own = Usage.now()
        self.samples.append(
            {
                "node: memory, MiB": node.memory_bytes / (1 << 20),
                "node: files": node.files,
                "node: threads": node.threads,
                "node: coroutines": node.coroutines,
                "driver: memory, MiB": own.memory_bytes / (1 << 20),
                "driver: files": own.files,
                "driver: threads": own.threads,
                "driver: coroutines": own.coroutines,
                "etcd: memory, MiB": _memory_bytes(self._job.etcd_pid) / (1 << 20),
            }
        )

    @property
    def _record(self) -> NodeRecord:
        return self._job.view.nodes[self._anchor].record

    def table(self) -> tuple[list[str], list[str]]:
        """Medians of the quarters, and what grew. The first tenth is left out: imports, caches, buffers."""
        kept = self.samples[len(self.samples) // 10 :]
        if len(kept) < _LEAST_SAMPLES:
            return [f"  {len(kept)} samples are too few to tell what grew"], []
        cuts = [kept[i * len(kept) // 4 : (i + 1) * len(kept) // 4] for i in range(4)]
        lines, grew = [], []
        for name in kept[0]:
            medians = [statistics.median(sample[name] for sample in cut) for cut in cuts]
            lines.append(f"  {name:22}" + "".join(f"{median:10.1f}" for median in medians))
            if medians[3] > 1.1 * medians[0] + 3:
                grew.append(name)
        return lines, grew


def _memory_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) << 10


async def hit(job: RunningJob, rng: random.Random, anchor: str) -> str:
    """One fault, and the replacement of what it took; returns its name."""
    live = sorted(node for node in job.view.live_nodes(job.run) if node != anchor)
    leader = job.view.primary_node(0)
    victim = leader if leader in live and rng.random() < 0.3 else rng.choice(live)
    pid = job.view.nodes[victim].record.pid
    kind = rng.choice(("kill", "kill", "kill", "drain", "freeze", "halt"))
    if kind == "kill":
        os.kill(pid, signal.SIGKILL)
    elif kind == "drain":
        os.kill(pid, signal.SIGTERM)
    else:
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(tg.Settings().lease_ttl_s + 2 if kind == "freeze" else 1.0)
        os.kill(pid, signal.SIGCONT)
    if kind in ("kill", "drain"):
        await job.until(f"{victim} to be gone", lambda view: victim not in view.nodes, timeout_s=60)
        await job.start_another()
    return f"{kind} of the leader" if victim == leader else kind


async def main(minutes: float, every_s: float, seed: int) -> int:
    rng = random.Random(seed)
    stop = Path(os.environ.get("TMPDIR", "/tmp")) / f"taskgraph-soak-{os.getpid()}"
    faults: Counter[str] = Counter()
    began = time.monotonic()
    try:
        async with RunningJob(soak(stop=str(stop)), nodes=_NODES) as job:
            await job.until_settled(_NODES)
            anchor = sorted(job.view.live_nodes(job.run))[0]
            meter = Meter(job, anchor)
            measuring = asyncio.ensure_future(meter.run())
            try:
                while (left_s := began + minutes * 60 - time.monotonic()) > 0:
                    await asyncio.sleep(min(left_s, every_s * rng.uniform(0.5, 1.5)))
                    faults[await hit(job, rng, anchor)] += 1
                    await job.until_settled(_NODES)
                    if sum(faults.values()) % 20 == 0:
                        print(f"  {time.monotonic() - began:6.0f} s: {sum(faults.values())} faults", flush=True)
            finally:
                measuring.cancel()
                await asyncio.gather(measuring, return_exceptions=True)
            stop.touch()
            result = await job.result()
            attempts = result.restarts
    finally:
        with contextlib.suppress(FileNotFoundError):
            stop.unlink()
    wrong = {t: v for t, v in expected(_TASKS, result.epochs).items() if result.values.get(t) != v}
    lines, grew = meter.table()
    took_s = time.monotonic() - began
    print(f"{took_s / 60:.1f} minutes, {result.epochs} epochs, {sum(faults.values())} faults: {json.dumps(faults)}")
    print(f"failovers {result.failovers}, epochs that started again {attempts}, seed {seed}")
    print("median of each quarter:\n" + "\n".join(lines))
    print(f"every state exact: {'no: ' + str(wrong) if wrong else 'yes'}; grew: {', '.join(grew) or 'nothing'}")
    return 1 if wrong or grew else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between a recovery and the next fault, about")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    sys.exit(asyncio.run(main(given.minutes, given.every, given.seed)))
