"""An elastic job whose totals PyTorch's Gloo makes; 4 MB of gradients, so that most of a step is the sum.

From step 20 on each step takes half a second until the file `{log}-hurry` is there."""

import hashlib
import os
import time
from pathlib import Path

import numpy as np

import taskgraph as tg


@tg.elastic(communicator="gloo")
def fit(run, steps: int = 40, pause_s: float = 0.002, log: str = ""):
    s = run.state(w=np.zeros(1_000_000, np.float32))
    for step in run.steps(rows=8, batch=8, parts=8, passes=steps):
        for part in step:
            part.add(w=np.full(len(s.w), 0.1 * part.number, np.float32), rows=1)
            time.sleep(pause_s)
        s.w += step["w"]
        assert step["rows"] == 8
        with Path(f"{log}-{run.worker}-{os.getpid()}").open("a") as file:
            print(step.number, time.time(), file=file, flush=True)
        until = time.monotonic() + 0.5
        while step.number >= 20 and not Path(f"{log}-hurry").exists() and time.monotonic() < until:
            time.sleep(0.01)
    return hashlib.sha256(s.w.tobytes()).hexdigest(), float(s.w[0])
