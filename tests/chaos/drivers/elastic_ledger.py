"""An elastic job whose value says how often its steps have read each row. Its bits depend on the order of adding."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import taskgraph as tg

ROWS = 120


@tg.elastic(checkpoint=os.environ.get("LEDGER_CHECKPOINT"), checkpoint_every_s=0.2)
def ledger(run: tg.Run, steps: int = 0, pace_s: float = 0.0, finish: str = "", ballast: int = 1) -> Any:
    """Args:
    steps: to be made; 0: until the file `finish` is there.
    pace_s: time that a part takes.
    ballast: the numbers of a sum that is sent with each part, beside the small ones.
    """
    x = np.random.default_rng(0).normal(size=(ROWS, 5)).astype(np.float32)
    y = x @ np.arange(5, dtype=np.float32)
    s = run.state(w=np.zeros(5, np.float32), read=np.zeros(ROWS, np.int64))
    for step in run.steps(rows=ROWS, batch=40, parts=12):
        for part in step:
            errors = x[part.rows] @ s.w - y[part.rows]
            part.add(gradient=x[part.rows].T @ errors, ballast=np.full(ballast, errors[0], np.float32))
            part.collect(rows=part.rows)
            time.sleep(pace_s)
        s.w -= np.float32(0.001) * (step["gradient"] + step["ballast"][-1])
        for rows in step.all("rows"):
            s.read[rows] += 1
        over = step.number + 1 == steps if steps else run.once(Path(finish).exists)
        if over:
            break
    return {"w": s.w, "read": s.read, "steps": step.number + 1}
