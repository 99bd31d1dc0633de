"""Runs elastic jobs on nodes of one process."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

from taskgraph.elastic_jobs.job import elastic
from taskgraph.jobs import Job
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.observe.events import Event
from taskgraph.results import JobResult

_parts_while_joining: itertools.count[int] | None = None


def pause() -> None:
    """For parts: leaves a node that starts the time to join before the job is over, ever more of it."""
    joining = _parts_while_joining
    time.sleep(0.0002 if joining is None else min(0.005 * 1.1 ** next(joining), 0.5))


Scenario = tuple[int, str]

SCENARIOS: tuple[Scenario, ...] = ((1, ""), (3, ".K.+"), (1, "+"))
"""Nodes in the beginning, and events: `+` a node starts, `K` the newest node dies, `.` nothing happens."""


async def run_job(
    job: Job, scenario: Scenario = (1, ""), on_event: Callable[[Event], None] | None = None, *, traced: bool = False
) -> JobResult:
    """Runs a job. The events of the scenario happen after 2, 4, 6 ... totals. All nodes may be traced."""

    global _parts_while_joining

    def noted(event: Event) -> None:
        global _parts_while_joining
        if event.kind == "joined":
            _parts_while_joining = None
        if on_event is not None:
            on_event(event)

    def trace() -> None:
        for node in cluster.living if traced else ():
            if not node.tracing.on:
                node.tracing.start()

    nodes, events = scenario
    _parts_while_joining = None
    cluster = InProcessCluster(job, endless_leases=True, on_event=noted)
    try:
        await cluster.start(nodes)
        trace()
        for count, event in enumerate(events, 1):
            while all(node.engine.core.position < 2 * count for node in cluster.living):  # noqa: ASYNC110 (no event)
                await asyncio.sleep(0.001)
            if event == "+":
                _parts_while_joining = itertools.count()
                cluster.add()
                trace()
            elif event == "K":
                cluster.crash(cluster.living[-1].id)
        return await cluster.result(90)  # pauses take that long if nodes start slowly
    finally:
        await cluster.stop()
        _parts_while_joining = None


Body = Callable[[Any], Any]
"""A function of a run."""
_bodies: dict[str, Body] = {}


@elastic
def call_body(run: Any, body: str) -> Any:
    return _bodies[body](run)


def job_of(body: Body) -> Job:
    """Returns a function as a job."""
    _bodies[body.__qualname__] = body
    return call_body(body=body.__qualname__)


async def run_body(
    body: Body, scenario: Scenario = (1, ""), on_event: Callable[[Event], None] | None = None, *, traced: bool = False
) -> Any:
    """Runs a function as a job; returns its value."""
    return (await run_job(job_of(body), scenario, on_event, traced=traced)).values[0]
