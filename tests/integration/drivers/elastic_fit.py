"""An elastic job: a least-squares fit in float32, whose sums depend on their order."""

import time
from pathlib import Path

import numpy as np

from taskgraph.elastic_jobs.job import elastic


@elastic
def fit(run, passes: int = 40, pause_s: float = 0.004, gate: str = "", hurry: str = "", wrong: str = ""):
    """Until the file `hurry` is there, each part takes `pause_s`, and each step of the second half a second.

    The worker `wrong` makes another step 6 than the others.
    """
    x = np.random.default_rng(0).normal(size=(120, 5)).astype(np.float32)
    y = x @ np.arange(5, dtype=np.float32)
    s = run.state(w=np.zeros(5, np.float32))
    for step in run.steps(rows=120, batch=40, parts=8, passes=passes):
        for part in step:
            if step.number == 5 and gate:  # every worker says that it is here, and waits
                Path(f"{gate}-{run.worker}").touch()
                while not Path(gate).exists():
                    time.sleep(0.005)
            errors = x[part.rows] @ s.w - y[part.rows]
            part.add(gradient=x[part.rows].T @ errors, loss=float(errors @ errors))
            if not hurry or not Path(hurry).exists():
                time.sleep(pause_s)
        until = time.monotonic() + 1.0
        while hurry and step.number > 1.5 * passes and not Path(hurry).exists() and time.monotonic() < until:
            time.sleep(0.005)
        s.w -= np.float32(0.002 if step.number == 6 and run.worker == wrong else 0.001) * step["gradient"]
        step.report(loss=step["loss"])
    return s.w
