"""What a launcher says of a job that it could not follow to its end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from taskgraph.driver import JobSpec
from taskgraph.errors import PeerLost
from taskgraph.jobs import Job
from taskgraph.launch import supervise
from taskgraph.launch.runtime import JobEntry
from taskgraph.launch.supervise import Hooks, Supervisor, end_reason
from taskgraph.task import Task

SPEC = JobSpec.local(Job(tasks=1, builder=lambda task_id: Task(), epochs=1, name="fit"))
ENTRY = JobEntry(name="fit", etcd="a:1", token="", pid=0, embedded=True, tls={})


def supervisor(*, finished: bool, unreachable: PeerLost | None = None) -> Supervisor:
    follower: Any = SimpleNamespace(view=SimpleNamespace(finished=finished), unreachable=unreachable)
    return Supervisor(SPEC, ENTRY, coordinator=None, follower=follower, hooks=Hooks())  # type: ignore[arg-type]


async def test_of_a_job_that_had_finished_a_timeout_says_that_its_results_were_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = "its epochs were done, and its results not yet here: "
    assert (
        await supervisor(finished=True)._waits()
        == f"{done}`result()` of some task was still at work, or they were on their way"
    )
    assert await supervisor(finished=True, unreachable=PeerLost("n1 is away"))._waits() == f"{done}n1 is away"

    async def statuses(*_: object) -> dict[str, Any]:
        return {"n1-1": PeerLost("n1 is away")}

    monkeypatch.setattr(supervise, "node_statuses", statuses)
    assert await supervisor(finished=False)._waits() == "none of its nodes answers: n1 is away"


def test_why_a_job_ended_is_what_ended_its_launcher() -> None:
    assert end_reason(asyncio.CancelledError()) == end_reason(KeyboardInterrupt()) == "interrupted"
    assert end_reason(PeerLost("away")) == "its launcher could not go on: PeerLost: away"
