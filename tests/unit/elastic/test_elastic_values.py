"""The value of an elastic job: that of the first worker of the view; values of others that differ are an event."""

from __future__ import annotations

import time
from typing import Any

from elastic_cluster import run_body

import taskgraph as tg
from taskgraph.elastic_jobs.job import elastic
from taskgraph.observe.events import Event


@elastic
def count(run: Any, rows: int = 12) -> int:
    total = 0
    for step in run.steps(rows=rows, batch=rows, parts=3, passes=1):
        for part in step:
            part.add(n=part.size)
        total += step["n"]
    return total


def test_value_of_a_run_in_this_process() -> None:
    result = tg.run(count(rows=6), nodes=0)
    assert result.value == 6 and result.values == {0: 6}


@elastic
def nothing(run: Any) -> None:
    count.__wrapped__(run)


def test_none_is_a_value() -> None:
    assert tg.run(nothing(), nodes=0).value is None


def own_name(run: Any) -> str:
    count.__wrapped__(run)
    time.sleep(0.02 * (run.worker == "n3"))
    return str(run.worker)


async def test_values_that_differ_are_an_event() -> None:
    events: list[Event] = []
    assert await run_body(own_name, (3, ""), events.append) == "n1"
    assert [event.text for event in events if event.kind == "values differ"] == [
        "the job has the value of n1, and n2, n3 returned another one: return what rests on totals and run.state alone"
    ]


async def test_equal_values_are_no_event() -> None:
    events: list[Event] = []
    assert await run_body(count.__wrapped__, (3, ""), events.append) == 12
    assert not [event for event in events if event.kind == "values differ"]
