"""Runs jobs in users' own tests: in one process, with failures and shuffled schedules; or one processor alone.

    result = tg.testing.run(fit(tasks=7, epochs=5), kills={(0, 2): "processor"}, order=3)
    values = tg.testing.compute(task.update, ins={"grad": {1: g}})

It runs the real node logic on an in-process coordinator and transport. It must not know what a task computes.
"""

from taskgraph.testing.alone import compute
from taskgraph.testing.cluster import STAGES, WORKER_STAGES, run

__all__ = ["STAGES", "WORKER_STAGES", "compute", "run"]
