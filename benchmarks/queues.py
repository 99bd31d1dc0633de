"""Work queues of task graphs: what sharing costs, empty pieces a second, and a ledger under kills.

    python benchmarks/queues.py             # all parts; --only NAME picks some

Parts:

    slow      4 tasks on 4 nodes, one of which takes 4 times as long: time over that of ideal sharing
    empty     100,000 empty pieces of a list on 2 nodes: pieces a second
    kills     kills at random among 4 nodes, and pauses of etcd: every piece counts once, with its result

Times are from the first piece to the last result, so the start of nodes does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import taskgraph as tg

HERE = Path(__file__).resolve()
TASKS, SLOWER, PIECE_S, PIECES = 4, 4, 0.01, 1000
EMPTY = 100_000
ROWS, UPTO = 20_000, 500
PAUSE_S = 0.5


class Timed(tg.Task, state=["count"]):
    """Maps pieces once; reports when its first piece began, and when all results were there."""

    def setup(self) -> None:
        self.count = 0
        self.began = 0.0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.map("pieces", range(PIECES), self.work, self.end)

    def work(self, epoch: tg.Epoch, piece: int) -> None:
        if not self.began:
            self.began = time.monotonic()
        time.sleep(PIECE_S * (SLOWER if self.task_id == TASKS - 1 else 1))

    def end(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        self.count += len(ins["pieces"])
        epoch.report(began=self.began, ended=time.monotonic())


class Empty(Timed):
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.map("pieces", range(EMPTY), self.work, self.end)

    def work(self, epoch: tg.Epoch, piece: int) -> None:
        self.began = self.began or time.monotonic()


class Rows(tg.Task, state=["sums", "counts"]):
    """Counts each piece of a queue, and what it drew."""

    def setup(self) -> None:
        self.counts = [0] * ROWS
        self.sums = 0.0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.map("work", "rows", self.work, self.keep, upto=UPTO)

    def work(self, epoch: tg.Epoch, piece: int) -> tuple[int, float]:
        time.sleep(0.001)
        return piece, epoch.rng.random()

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        for piece, drawn in ins["work"]:
            self.counts[piece] += 1
            self.sums += drawn
        if epoch.queue("rows").done:
            epoch.finish()

    def result(self) -> tuple[list[int], float]:
        return [piece for piece, count in enumerate(self.counts) if count != 1], self.sums


@tg.job
def slow() -> tg.Job:
    return tg.Job(tasks=TASKS, epochs=1, builder=Timed)


@tg.job
def empty() -> tg.Job:
    return tg.Job(tasks=2, epochs=1, builder=Empty)


@tg.job
def rows() -> tg.Job:
    return tg.Job(tasks=4, builder=Rows, queues={"rows": tg.WorkQueue(range(ROWS), shuffle=True)}, backups=2)


def lasted(result: tg.JobResult[Any]) -> float:
    numbers = [numbers for report in result.reports for numbers in report.by_task.values()]
    return max(n["ended"] for n in numbers) - min(n["began"] for n in numbers if n["began"])


def measure_slow(options: argparse.Namespace) -> dict[str, Any]:
    took = lasted(tg.run(slow(), nodes=TASKS))
    ideal = PIECES * PIECE_S / (TASKS - 1 + 1 / SLOWER)
    return {"seconds": took, "ideal": ideal, "over": took / ideal - 1}


def measure_empty(options: argparse.Namespace) -> dict[str, Any]:
    took = lasted(tg.run(empty(), nodes=2))
    return {"seconds": took, "pieces_per_s": EMPTY / took}


def measure_kills(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the queue again and again until there were enough kills. `expected` is a run without any."""
    expected = tg.run(rows(), nodes=4).value
    kills = pauses = runs = 0
    while kills < options.kills:
        with Mischief(random.Random(options.seed + runs), options.kills - kills) as mischief:
            found = tg.run(rows(), nodes=4, replace=True)
        runs, kills, pauses = runs + 1, kills + mischief.kills, pauses + mischief.pauses
        if found.value != expected or found.value[0]:
            raise SystemExit(f"the ledger is wrong: {found.value} in place of {expected}")
    return {"kills": kills, "pauses_of_etcd": pauses, "runs": runs, "pieces": runs * ROWS}


class Mischief:
    """Kills nodes of the job that runs here, and pauses its etcd, at random moments, in a thread."""

    def __init__(self, rng: random.Random, most: int) -> None:
        self._rng, self._most = rng, most
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.kills = self.pauses = 0

    def __enter__(self) -> Mischief:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        self._ended.wait(2.0)  # until the job has begun
        while not self._ended.wait(self._rng.uniform(0.5, 2.5)) and self.kills < self._most:
            if self._rng.random() < 0.2:
                self._pause_etcd()
            elif self._all_safe():
                self._kill_a_node()

    def _kill_a_node(self) -> None:
        nodes = [node for node in self._status()["nodes"] if node["answers"]]
        if nodes:
            with contextlib.suppress(ProcessLookupError):  # its job has just ended
                os.kill(self._rng.choice(nodes)["pid"], signal.SIGKILL)
                self.kills += 1

    def _pause_etcd(self) -> None:
        pids = [int(p.name) for p in Path("/proc").glob("[0-9]*") if _is_etcd_of(p, os.getpid())]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(PAUSE_S * (number == signal.SIGSTOP))
        self.pauses += bool(pids)

    def _all_safe(self) -> bool:
        """True if every task has two backups: three deaths at once would rightly end the job."""
        tasks = self._status()["tasks"]
        return bool(tasks) and all(len(task["in_sync"]) > 2 for task in tasks)

    def _status(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "taskgraph", "status", "rows", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
        return found if "nodes" in found else {"nodes": [], "tasks": []}


def _is_etcd_of(process: Path, ancestor: int) -> bool:
    """True if a process is an etcd that was started by this one, directly or not."""
    try:
        if (process / "comm").read_text().strip() != "etcd":
            return False
        while (parent := int((process / "stat").read_text().rpartition(")")[2].split()[1])) > 1:
            if parent == ancestor:
                return True
            process = process.parent / str(parent)
    except OSError:
        pass
    return False


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "slow": measure_slow,
    "empty": measure_empty,
    "kills": measure_kills,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; may be given several times")
    parser.add_argument("--kills", type=int, default=100, metavar="N", help="kills in all (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    options = parser.parse_args()
    os.environ.setdefault("TASKGRAPH_RUNTIME_DIR", tempfile.mkdtemp(prefix="tg-"))
    for part in options.only or PARTS:
        print(json.dumps({"part": part, **PARTS[part](options)}), flush=True)


if __name__ == "__main__":
    main()
