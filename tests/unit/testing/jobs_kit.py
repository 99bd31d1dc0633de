"""Tasks of the kinds that users write, small, and how to run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.results import JobResult

#: No test here needs longer; a job that hangs fails early and says what it waits for.
TIMEOUT_S = 20.0


def run(job: tg.Job, **options: Any) -> JobResult:
    return tg.testing.run(job, **{"timeout_s": TIMEOUT_S, **options})


def fails(job: tg.Job, **options: Any) -> tg.JobFailed:
    """The error that the job ends with; a timeout is not taken for one."""
    with pytest.raises(tg.JobFailed) as caught:
        run(job, **options)
    assert not isinstance(caught.value, tg.JobTimeout), str(caught.value)
    return caught.value


def task(compose: Callable[..., None], **members: Any) -> type[tg.Task]:
    """A task class out of functions; `state` names its state, which begins as 0.

    Functions take `self` as methods do.
    """
    state = members.pop("state", ())

    def setup(self: tg.Task) -> None:
        for name in state:
            setattr(self, name, 0)

    return type(tg.Task)("Made", (tg.Task,), {"setup": setup, "compose": compose, **members}, state=list(state))


def job(builder: Any, **options: Any) -> tg.Job:
    return tg.Job(**{"tasks": 2, "epochs": 2, "builder": builder, "topology": tg.full(), **options})


def says(error: BaseException, *words: str) -> None:
    text = str(error)
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"


def no_op(epoch: Any, ins: Any, outs: Any) -> None:
    """A compute that does nothing."""


class Fit(tg.Task, state=["theta"]):
    """The README's: a regression by gradients that are summed up a tree."""

    rows = 40

    def setup(self) -> None:
        self.x = np.random.default_rng(self.task_id).normal(size=(self.rows, 3))
        self.y = self.x @ [1.0, 2.0, 3.0]
        self.theta = np.zeros(3)

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 0:
            epoch.processor(self.publish, outbound={"theta": "children"})
            epoch.processor(self.update, inbound={"grad": "children"})
        else:
            epoch.processor(self.relay, inbound={"theta": "parents"}, outbound={"theta": "children"})
            epoch.processor(self.add, inbound={"theta": "parents", "grad": "children"}, outbound={"grad": "parents"})

    def publish(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("theta", self.theta)

    def relay(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("theta", ins["theta"])

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("grad", self.grad(ins["theta"], ins))

    def grad(self, theta: Any, ins: tg.Inputs) -> Any:
        return self.x.T @ (self.x @ theta - self.y) + sum(ins.all("grad").values())

    def update(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        grad = self.grad(self.theta, ins)
        self.theta -= grad / (self.rows * self.tasks)
        epoch.report(slope=abs(grad).max(), epoch=epoch.number)

    def result(self) -> Any:
        return self.theta if self.task_id == 0 else None


def fit(**options: Any) -> tg.Job:
    return tg.Job(**{"tasks": 7, "epochs": 5, "builder": Fit, "topology": tg.tree(), **options})


def same(one: JobResult, other: JobResult) -> None:
    """Bit-equal values and equal reports."""
    assert one.values.keys() == other.values.keys()
    for number, value in one.values.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(other.values[number]))
    assert one.reports == other.reports
    assert one.epochs == other.epochs


Kills = Mapping[tuple[int, int], str]
