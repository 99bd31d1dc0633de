"""Start-up: what `import taskgraph` adds to `import numpy`, and `taskgraph run` until its first epoch, in seconds.

python benchmarks/starting.py --what import|run [--nodes 4]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from work import arguments, tell

_IMPORT = """
import numpy, time
began = time.perf_counter()
import taskgraph as tg
print(time.perf_counter() - began)
tg.Task, tg.Job, tg.job, tg.tree, tg.run
print(time.perf_counter() - began)
"""
_TIMES = 5


def importing() -> dict[str, float]:
    """In a fresh interpreter each, the first not counted: it may compile.

    `s`: the import; `used_s`: names are imported when they are first used, so with those that a driver uses.
    """
    runs = []
    for _ in range(_TIMES + 1):
        said = subprocess.check_output([sys.executable, "-c", _IMPORT], text=True, timeout=60)
        runs.append([float(line) for line in said.split()])
    plain, used = zip(*runs[1:], strict=True)
    return {"s": statistics.median(plain), "used_s": statistics.median(used)}


def running(nodes: int) -> dict[str, float]:
    """From before the command starts to when the root's first epoch begins to compute."""
    driver = f"{Path(__file__).with_name('tree.py')}:tree"
    command = [
        sys.executable,
        "-m",
        "taskgraph",
        "run",
        driver,
        "-o",
        "epochs=1",
        "--nodes",
        str(nodes),
        "--json",
        "--name",
        f"start-{os.getpid()}",
    ]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise SystemExit(done.stderr[-500:])
    count, first = json.loads(done.stdout.splitlines()[-1])["values"]["0"]
    if count != 1:
        raise SystemExit(f"{count} epochs were checked, not one")
    return {"s": first - began}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--what", choices=["import", "run"], required=True)
    parser.add_argument("--nodes", type=int, default=4)


if __name__ == "__main__":
    given = arguments(__doc__, options)
    tell(importing() if given.what == "import" else running(given.nodes))
