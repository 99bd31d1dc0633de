"""`@tg.elastic`: options of the decorator and of the function, and wrong uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import taskgraph as tg
from taskgraph.elastic_jobs.job import elastic
from taskgraph.elastic_jobs.reports import StableReports
from taskgraph.node.reports import ReportLog


@elastic(seed=3, min_workers=2, name="other", checkpoint="file:///somewhere", checkpoint_every_s=5)
def train(run: Any, lr: float = 0.1) -> None:
    """Trains."""


def test_options_of_the_decorator() -> None:
    job = train(lr=0.2)
    assert (job.seed, job.min_nodes, job.name, job.checkpoint) == (3, 2, "other", "file:///somewhere")
    assert job.elastic is not None and job.elastic.checkpoint_every_s == 5
    assert job.elastic.arguments == {"lr": 0.2}


@elastic(seed=3, checkpoint="file:///somewhere")
def sets_its_own(run: Any, seed: int = 7, checkpoint: str | None = None, min_workers: int = 1) -> None: ...


def test_parameters_that_are_options_of_the_decorator() -> None:
    job = sets_its_own()
    assert (job.seed, job.min_nodes, job.checkpoint) == (7, 1, "file:///somewhere")
    job = sets_its_own(seed=8, checkpoint="file:///elsewhere", min_workers=2)
    assert (job.seed, job.min_nodes, job.checkpoint) == (8, 2, "file:///elsewhere")
    assert job.elastic is not None and job.elastic.arguments["seed"] == 8


def test_options_of_the_function() -> None:
    assert list(train.options()) == ["lr"]
    with pytest.raises(tg.JobError, match="lr"):
        train(rate=0.1)


def test_name_is_that_of_the_function() -> None:
    assert elastic(named)().name == "named"


def named(run: Any) -> None: ...


def no_run() -> None: ...


def test_function_without_a_run() -> None:
    with pytest.raises(tg.JobError, match=r"no_run takes no run: def no_run\(run, ...\)"):
        elastic(no_run)


def test_function_in_a_function() -> None:
    with pytest.raises(tg.JobError, match=r"@tg\.elastic goes on a function at the top level"):
        elastic(lambda run: None)


def yielding(run: Any) -> Iterator[int]:
    yield 1


def test_function_with_a_yield() -> None:
    with pytest.raises(tg.JobError, match="yielding: a job function is a plain `def`, without async and yield"):
        elastic(yielding)


@pytest.mark.parametrize("every", [0, -1.0, "1", True, float("inf")])
def test_time_between_checkpoints(every: Any) -> None:
    with pytest.raises(tg.JobError, match=r"checkpoint_every_s=.*: must be a number of seconds above 0"):
        elastic(checkpoint_every_s=every)


def test_fewest_workers_are_named_as_they_were_given() -> None:
    with pytest.raises(tg.JobError, match=r"@tg\.elastic\(min_workers=0\): must be a whole number, 1 or more"):
        sets_its_own(min_workers=0)


def test_unknown_option() -> None:
    with pytest.raises(tg.JobError, match="checkpoints"):
        elastic(checkpoints=1)


def test_worker_that_begins_with_a_copy_reports_its_own_steps_alone() -> None:
    counted: list[int] = []
    others = StableReports(lambda step, _: None)
    for step in range(4):
        others.add(step, step, {"loss": 1.0})
    others.note_stable(4)  # the copy of the state before step 2 travels with the reports of all these steps
    reports = StableReports(lambda step, _: counted.append(step))
    reports.continue_from(others.packed(), 2)
    reports.add(3, 2, {"loss": 2.0})
    reports.note_stable(3)
    assert counted == [2]
    rows = dict(ReportLog.unpack(list(reports.packed())).rows())
    assert [rows[epoch][0]["loss"] for epoch in sorted(rows)] == [1.0, 1.0, 2.0]
