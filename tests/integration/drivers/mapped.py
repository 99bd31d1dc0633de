"""A map: `mapped.py PIECES PAUSE_S [resume]`. Each piece leaves a file for each time that it was computed."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import taskgraph as tg

DONE = Path("computed")


def tripled(piece: tuple[int, float]) -> int:
    number, pause_s = piece
    if not Path("hurry").exists():
        time.sleep(pause_s)
    (DONE / f"{number}-{os.getpid()}-{time.time_ns()}").touch()
    return 3 * number


if __name__ == "__main__":
    DONE.mkdir(exist_ok=True)
    pieces = [(number, float(sys.argv[2])) for number in range(int(sys.argv[1]))]
    print(sum(tg.map(tripled, pieces, nodes=3, resume="resume" in sys.argv)))
