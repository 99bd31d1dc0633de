"""An elastic job that reads lines of files, and counts words in a table: `reading` by lanes, `sharing` by shards."""

import time
import zlib
from pathlib import Path

import numpy as np

import taskgraph as tg


def ids_of(line: str) -> list[int]:
    return [zlib.crc32(word.encode()) for word in line.split()]


def wait(run: tg.Run, gate: str) -> None:
    """Says that this worker is here, and waits."""
    Path(f"{gate}-{run.worker}").touch()
    while not Path(gate).exists():
        time.sleep(0.005)


def linger(gate: str) -> None:
    """Takes time, until the test says that nothing has to happen before the end any longer."""
    until = time.monotonic() + 1.0
    while not Path(f"{gate}-hurry").exists() and time.monotonic() < until:
        time.sleep(0.005)


@tg.elastic(name="read")
def reading(run: tg.Run, url: str, gate: str, passes: int = 2):
    table = run.table("words", 2, init="zeros", optimizer="momentum")
    s = run.state(sum=0.0)
    for step in run.steps(tg.lines(url, size=20), batch=48, parts=8, passes=passes, buffer=5):
        for part in step:
            if step.number == 3:
                wait(run, gate)
            ids = [word for line in part.data for word in ids_of(line)]
            table.push(ids, np.outer(np.sin(ids), [1, 2]).astype(np.float32))
            part.add(sum=float(np.sin(ids).sum()))
            linger(gate)
        s.sum += step["sum"] * (step.number + 1)
    known = sorted({word for file in Path(url).parent.glob("*.txt") for word in ids_of(file.read_text())})
    return {"sum": s.sum, "rows": table.pull(known), "known": len(table)}


@tg.elastic(name="read")
def sharing(run: tg.Run, url: str, gate: str):
    table = run.table("words", 1, init="zeros", lr=1.0, dtype="float64")
    for lines in run.shards(tg.lines(url, size=2), shuffle=True):
        if len(table) > 20:
            wait(run, gate)
        ids = [word for line in lines for word in ids_of(line)]
        table.push(ids, -np.ones((len(ids), 1)))
        linger(gate)
    known = sorted({word for file in Path(url).parent.glob("*.txt") for word in ids_of(file.read_text())})
    return table.pull(known)[:, 0]
