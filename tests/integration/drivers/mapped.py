"""A map: `mapped.py PIECES PAUSE_S [resume]`. Each piece leaves a file for each time that it was computed. The last 20
wait until the file `hurry` is there, which ends the pauses, too."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import taskgraph as tg

DONE = Path("computed")


def tripled(piece: tuple[int, float, bool]) -> int:
    number, pause_s, waits = piece
    while not Path("hurry").exists():
        time.sleep(pause_s)
        if not waits:
            break
    (DONE / f"{number}-{os.getpid()}-{time.time_ns()}").touch()
    return 3 * number


if __name__ == "__main__":
    DONE.mkdir(exist_ok=True)
    count = int(sys.argv[1])
    pieces = [(number, float(sys.argv[2]), number >= count - 20) for number in range(count)]
    print(sum(tg.map(tripled, pieces, nodes=3, resume="resume" in sys.argv)))
