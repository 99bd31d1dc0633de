"""What an allreduce costs by each way: on one host, and on hosts that a network of 1 Gbit/s joins.

    python benchmarks/collectives.py --tasks 4 --sizes 1,64,1024,16384             # KiB; one host
    sudo python benchmarks/collectives.py --hosts --rate 1gbit --via tree,ring     # a network namespace for each node

Each task has a node of its own. The ways take turns. It prints, for each size and way, the milliseconds of an epoch
(the median of task 0), and the processor time of all nodes. Hosts are network namespaces of this one: a link of each to
a bridge, with a token bucket at both ends. They need root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import taskgraph as tg
from taskgraph.coordination.embedded import find_etcd

HERE = Path(__file__).resolve()
NET = "198.18.77"
WARM = 5
PYTHON = [sys.executable, "-m", "taskgraph"]


class Sums(tg.Task, state=["count"]):
    """Adds up an array in each epoch, and keeps the times of its sync points."""

    def __init__(self, via: Any, size: int) -> None:
        self.via, self.size = via, size

    def setup(self) -> None:
        self.count = 0
        self.array = np.full(self.size // 8, float(self.task_id))
        self.times: list[tuple[float, float]] = []  # of this process: no state

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.allreduce("sum", self.value, self.then, via=self.via)

    def value(self, epoch: tg.Epoch, ins: tg.Inputs) -> Any:
        return self.array

    def then(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        assert ins["sum"][0] == sum(range(self.tasks))
        self.count += 1
        self.times.append((time.monotonic(), time.process_time()))

    def result(self) -> tuple[float, float]:
        times = self.times[WARM:]
        gaps = [after - before for (before, _), (after, _) in itertools.pairwise(times)]
        return statistics.median(gaps), (times[-1][1] - times[0][1]) / len(gaps)


@tg.job
def sums(tasks: int = 4, epochs: int = 30, via: str = "tree", size: int = 1024) -> tg.Job:
    return tg.Job(tasks=tasks, epochs=epochs, builder=lambda _: Sums(via, size))


def _sh(script: str) -> None:
    subprocess.run(["sh", "-ec", script], check=True)


@contextlib.contextmanager
def hosts(count: int, rate: str) -> Iterator[str]:
    """Makes network namespaces and an etcd in the first one; yields etcd's endpoint."""
    names = [f"tgsum{host}" for host in range(1, count + 1)]
    bucket = f"root tbf rate {rate} burst 128kb latency 100ms"
    script = ["ip link add tgsum type bridge", "ip link set tgsum up"]
    for host, name in enumerate(names, start=1):
        script += [
            f"ip netns add {name}",
            f"ip link add {name} type veth peer name eth0 netns {name}",
            f"ip link set {name} master tgsum up",
            f"ip -n {name} link set lo up",
            f"ip -n {name} addr add {NET}.{host}/24 dev eth0",
            f"ip -n {name} link set eth0 up",
            f"tc qdisc add dev {name} {bucket}",
            f"tc -n {name} qdisc add dev eth0 {bucket}",
        ]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        gone = [f"ip link del {name} || true; ip netns del {name} || true" for name in names]
        stack.callback(_sh, "\n".join([*gone, "ip link del tgsum || true"]))
        _sh("\n".join(script))
        address = f"http://{NET}.1:2379"
        etcd = [find_etcd(), "--data-dir", folder, "--log-level", "error", "--unsafe-no-fsync"]
        etcd += ["--listen-client-urls", address, "--advertise-client-urls", address]
        running = subprocess.Popen(["ip", "netns", "exec", names[0], *etcd])
        stack.callback(running.wait)
        stack.callback(running.terminate)
        yield address


def measure(given: argparse.Namespace, etcd: str, via: str, size: int) -> tuple[float, float]:
    """Runs a job; returns the seconds of an epoch, and the processor seconds of all nodes."""
    name = f"sums-{via}-{time.monotonic_ns()}"
    run = [*PYTHON, "run", str(HERE), "--json", "--fresh", "--name", name]
    for option in f"tasks={given.tasks}", f"epochs={given.epochs + WARM + 1}", f"via={via}", f"size={size}":
        run += ["-o", option]
    others: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        if not etcd:
            run += ["--nodes", str(given.tasks)]
        else:
            joined = ["--etcd", etcd, "--token-file", f"{folder}/token", "--insecure-listen", "--listen"]
            run = [*_on(1), *run, "--nodes", "1", "--min-nodes", str(given.tasks), *joined, f"{NET}.1"]
            Path(f"{folder}/token").write_text(os.urandom(32).hex())
            Path(f"{folder}/token").chmod(0o600)
            for host in range(2, given.tasks + 1):
                node = [*_on(host), *PYTHON, "node", "--job", name, *joined, f"{NET}.{host}"]
                others.append(subprocess.Popen(node, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        try:
            done = subprocess.run(run, check=False, capture_output=True, text=True)
        finally:
            for other in others:
                other.terminate()
                other.wait()
    if done.returncode:
        raise SystemExit(done.stderr + done.stdout)
    values = json.loads(done.stdout.splitlines()[-1])["values"]
    return values["0"][0], sum(cpu for _, cpu in values.values())


def _on(host: int) -> list[str]:
    return ["ip", "netns", "exec", f"tgsum{host}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--sizes", default="1,64,1024,4096,16384", help="KiB")
    parser.add_argument("--via", default="tree,ring,auto")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--hosts", action="store_true", help="a network namespace for each task")
    parser.add_argument("--rate", default="1gbit", help="of each host's link")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes the hosts
    with hosts(given.tasks, given.rate) if given.hosts else contextlib.nullcontext("") as etcd:
        for size in map(int, given.sizes.split(",")):
            found: dict[str, list[tuple[float, float]]] = {}
            for _ in range(given.turns):
                for via in given.via.split(","):
                    found.setdefault(via, []).append(measure(given, etcd, via, size << 10))
            for via, all_found in found.items():
                wall, cpu = (1e3 * min(each) for each in zip(*all_found, strict=True))
                print(f"{given.tasks} tasks, {size:6} KiB, {via}: {wall:8.2f} ms, processor {cpu:8.2f} ms", flush=True)


if __name__ == "__main__":
    main()
