"""An elastic job whose workers die as soon as etcd names a checkpoint, before its final manifest is written."""

import os
import signal
import time

import numpy as np

from taskgraph.checkpoint.store import CheckpointStore
from taskgraph.elastic_jobs.job import elastic


@elastic(checkpoint_every_s=0.3)
def fit(run, checkpoint: str, dies: bool = False):
    if dies:
        CheckpointStore.finish = lambda store, name: os.kill(os.getpid(), signal.SIGKILL)
    s = run.state(w=np.zeros(3))
    for step in run.steps(rows=60, batch=12, parts=4, passes=30):
        for part in step:
            part.add(g=np.float64(part.rows.sum()))
            time.sleep(0.005)
        s.w += step["g"] / (step.number + 1)
    return s.w
