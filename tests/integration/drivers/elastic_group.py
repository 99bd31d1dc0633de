"""An elastic job without steps: each worker draws rows of its own, and the workers average what they found."""

import time
from pathlib import Path

import numpy as np

import taskgraph as tg


@tg.elastic
def fit(run, turns: int = 20, pause_s: float = 0.01, gate: str = "", until: str = ""):
    s = run.state(w=np.ones(4), turn=0)
    while s.turn < turns or (until and not run.once(lambda: Path(until).exists())):
        group = run.group()

        def gradient(group=group):
            if s.turn == 5 and gate:  # every worker says that it is here, and waits
                Path(f"{gate}-{run.worker}").touch()
                while not Path(gate).exists():
                    time.sleep(0.005)
            time.sleep(pause_s)
            return {"w": 0.1 * s.w, "count": 1}

        try:
            total = group.allreduce(gradient)
        except tg.ViewChanged as change:
            print("changed", change.left, change.entered, flush=True)
            continue
        assert total["count"] == len(group)
        s.w -= total["w"] / len(group)
        s.turn += 1
        group.report(workers=len(group))
    return s.w, s.turn, group.broadcast(run.worker), group.members[0]
