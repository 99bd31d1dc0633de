"""An elastic job that counts, for each pass and piece of `run.shards`, how often it counted."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import taskgraph as tg


class Counts:
    """What counts so far, as a table keeps its rows."""

    bound = 0

    def __init__(self) -> None:
        self.found: Counter[tuple[int, int]] = Counter()

    def end_piece(self, ticket: Any, *, counts: bool) -> Any:
        return ticket.piece if counts else None

    def apply_effects(self, ticket: Any, effects: Any) -> None:
        assert effects == ticket.piece
        self.found[ticket.pass_number, ticket.piece] += 1

    def captured(self) -> Any:
        return [[*key, count] for key, count in self.found.items()]

    def load(self, captured: Any) -> None:
        self.found = Counter({(number, piece): count for number, piece, count in captured})

    def digests(self) -> dict[str, bytes]:
        return {}


@tg.elastic
def sharded(
    run: tg.Run, pieces: int = 200, passes: int = 2, pace_s: float = 0.01, gate: str = "", finish: str = ""
) -> list[int]:
    """Args:
    gate: a worker has begun a piece once `{gate}-{worker}` is there, and goes on once `gate` is.
    finish: until this file is there, each of the last pieces takes a second: newcomers enter between pieces.
    """
    counts = Counts()
    run.effects = run.progress.carried["counts"] = counts
    for _ in run.shards(range(pieces), passes=passes, shuffle=True):
        if gate:
            Path(f"{gate}-{run.worker}").touch()
            while not Path(gate).exists():
                time.sleep(0.005)
        time.sleep(pace_s)
        until = time.monotonic() + 1.0
        while finish and counts.found.total() > 300 and not Path(finish).exists() and time.monotonic() < until:
            time.sleep(pace_s)
    return [len(counts.found), max(counts.found.values())]
