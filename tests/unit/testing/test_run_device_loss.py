"""If a CUDA device fails in nodes that share a process, the job fails, and the process goes on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import taskgraph as tg

OutOfMemoryError = type("OutOfMemoryError", (MemoryError,), {"__module__": "cupy.cuda.memory"})


class Hungry(tg.Task):
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.fit)

    def fit(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.task_id == 1:
            raise OutOfMemoryError("1 TiB")


@pytest.mark.parametrize("run", [tg.testing.run, partial(tg.run, nodes=0)])
def test_the_job_fails_with_the_error(run: Callable[[tg.Job], Any]) -> None:
    with pytest.raises(tg.JobFailed, match=r"task 1, epoch 0, 'fit': OutOfMemoryError: 1 TiB") as failed:
        run(tg.Job(tasks=2, epochs=2, builder=Hungry))
    assert 'raise OutOfMemoryError("1 TiB")' in str(failed.value)
