"""Maps: pieces a second, what sharing costs, and a ledger under kills; beside Dask and Ray.

    python benchmarks/maps.py                               # all parts; --only NAME picks some
    python benchmarks/maps.py --peers ~/peers/bin/python    # also Dask's distributed and Ray of that environment

Parts:

    short     10,000 pieces of 1 ms on 2 nodes: the share of the ideal time, once the nodes compute
    empty     100,000 empty pieces on 2 nodes: pieces a second
    kills     100 kills at random among 4 nodes, the most senior one too: every piece has its result
    slow      4 nodes, one of which takes 4 times as long: time over that of ideal sharing

Times are from the first result to the last, scaled to all pieces, so the start of nodes does not count; of peers, too.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
SHORT_S, SHORT, EMPTY, SLOW_S, SLOW = 0.001, 10_000, 100_000, 0.02, 400


def spin(_: Any) -> None:
    """Computes for a millisecond."""
    until = time.perf_counter() + SHORT_S
    while time.perf_counter() < until:
        pass


def nothing(piece: int) -> int:
    return piece


def lasting(piece: int) -> tuple[int, float]:
    """Sleeps; one of the nodes sleeps 4 times as long. Returns the process, and how long the piece took."""
    began = time.perf_counter()
    slow = Path(os.environ["MAPS_SLOW"])
    try:
        os.close(os.open(slow, os.O_CREAT | os.O_EXCL))
        slow.write_text(str(os.getpid()))
    except FileExistsError:
        pass
    time.sleep(SLOW_S * (4 if slow.read_text() == str(os.getpid()) else 1))
    return os.getpid(), time.perf_counter() - began


def marked(piece: int) -> tuple[int, int]:
    time.sleep(0.02)
    return piece, os.getpid()


def timed(results: Iterator[Any], pieces: int) -> float:
    """Returns the time that all pieces take at the pace between the first tenth and the end."""
    began, first = 0.0, pieces // 10
    for count, _ in enumerate(results, 1):
        if count == first:
            began = time.perf_counter()
    return (time.perf_counter() - began) * pieces / (pieces - first)


# -- ours --------------------------------------------------------------------------------------------------------------


def ours(function: Callable[[Any], Any], pieces: int, nodes: int) -> Iterator[tuple[int, Any]]:
    import taskgraph as tg

    return tg.imap(function, range(pieces), nodes=nodes, name=f"maps-{os.getpid()}")


def kills(count: int) -> dict[str, Any]:
    """Kills nodes at random until `count` are dead, and looks at all results."""
    rng, killed, over, known = random.Random(0), [0], threading.Event(), set[int]()

    def killer() -> None:
        while killed[0] < count and not over.wait(rng.expovariate(2.0)):
            if known:
                pid = rng.choice(sorted(known))
                known.discard(pid)
                try:
                    os.kill(pid, signal.SIGKILL)
                    killed[0] += 1
                except ProcessLookupError:
                    pass

    threading.Thread(target=killer, daemon=True).start()
    pieces, found, times = 0, Counter[int](), 0
    began = time.perf_counter()
    while killed[0] < count:  # a node may die more often than it is replaced: then a further map goes on
        times += 1
        for number, (piece, pid) in ours(marked, 2000, 4):
            assert number == piece
            found[times * 2000 + piece] += 1
            known.add(pid)
        pieces += 2000
    over.set()
    exact = len(found) == pieces and set(found.values()) == {1}
    return {"kills": killed[0], "pieces": pieces, "exact": exact, "took_s": round(time.perf_counter() - began, 1)}


def slow() -> dict[str, Any]:
    """Compares with the time if the pieces, as long as they were, had been shared by the nodes' pace without a rest."""
    path = Path(os.environ.setdefault("MAPS_SLOW", f"/dev/shm/maps-slow-{os.getpid()}"))
    took: dict[int, list[float]] = {}

    def noted() -> Iterator[None]:
        for _, (pid, piece_s) in ours(lasting, SLOW, 4):
            took.setdefault(pid, []).append(piece_s)
            yield

    try:
        took_s = timed(noted(), SLOW)
    finally:
        path.unlink(missing_ok=True)
    ideal_s = SLOW / sum(1 / statistics.median(each) for each in took.values())
    return {"took_s": round(took_s, 3), "ideal_s": round(ideal_s, 3), "over": round(took_s / ideal_s - 1, 3)}


# -- peers, in a Python of their own -----------------------------------------------------------------------------------


def dask(function: Callable[[Any], Any], pieces: int, nodes: int) -> Iterator[Any]:
    from dask.distributed import Client, as_completed

    with Client(n_workers=nodes, threads_per_worker=1, dashboard_address=None) as client:
        yield from as_completed(client.map(function, range(pieces), pure=False))


def ray(function: Callable[[Any], Any], pieces: int, nodes: int) -> Iterator[Any]:
    import ray as ray_of_peer

    ray_of_peer.init(num_cpus=nodes, include_dashboard=False, log_to_driver=False)
    remote = ray_of_peer.remote(function)
    waiting = [remote.remote(piece) for piece in range(pieces)]
    while waiting:
        done, waiting = ray_of_peer.wait(waiting, num_returns=min(100, len(waiting)))
        yield from ray_of_peer.get(done)


def row(name: str, function: Callable[[Any], Any], pieces: int, who: str) -> dict[str, Any]:
    run = {"ours": ours, "dask": dask, "ray": ray}[who]
    took_s = timed(iter(run(function, pieces, 2)), pieces)
    found = {"work": name, "who": who, "pieces_per_s": round(pieces / took_s)}
    if function is spin:
        found["of_ideal"] = round(pieces * SHORT_S / 2 / took_s, 3)
    return found


WORKS = {
    "short": functools.partial(row, "short", spin, SHORT),
    "empty": functools.partial(row, "empty", nothing, EMPTY),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[*WORKS, "kills", "slow"])
    parser.add_argument("--peers", metavar="PYTHON", help="a Python with dask[distributed] and ray")
    parser.add_argument("--peer", nargs=2, metavar=("WORK", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("--kills", type=int, default=100)
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(WORKS[options.peer[0]](options.peer[1])), flush=True)
        return
    for work in options.only or [*WORKS, "kills", "slow"]:
        if work == "kills":
            print(json.dumps({"work": "kills", **kills(options.kills)}), flush=True)
        elif work == "slow":
            print(json.dumps({"work": "slow", **slow()}), flush=True)
        else:
            print(json.dumps(WORKS[work]("ours")), flush=True)
            for peer in ("dask", "ray") if options.peers else ():
                subprocess.run([options.peers, str(HERE), "--peer", work, peer], check=False, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    main()
