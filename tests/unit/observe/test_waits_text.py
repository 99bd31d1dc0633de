"""What a job waits for that did not end in time."""

from __future__ import annotations

import dataclasses

from taskgraph.observe.status import NodeStatus, ReplicaStatus, waits_text
from taskgraph.observe.usage import Usage


def replica(task: int, processor: str = "", waits: tuple[str, ...] = ()) -> ReplicaStatus:
    return ReplicaStatus(task, "primary", 1, 0, processor, 3.0, waits, 1)


def status(*replicas: ReplicaStatus, waits: tuple[str, ...] = (), paused: bool = False) -> NodeStatus:
    return NodeStatus("n", "n1", "h", 1, paused, False, (1, 0), 1, bool(waits), replicas, waits, Usage(0, 0, 0, 0))


def test_of_many_tasks_what_runs_is_told_first_and_some_of_those_that_wait() -> None:
    waiting = [replica(task, waits=(f"'add' waits for 'sum' from task {task + 1}",)) for task in range(200)]
    text = waits_text([status(*waiting), status(replica(200, "add"))])
    assert text.startswith("it waits: task 200 runs 'add' for 3.0 s; task 0: 'add' waits for 'sum' from task 1; ")
    assert text.endswith("; and 193 more") and len(text) < 500


def test_what_the_leader_found_is_not_told_again_by_the_primaries() -> None:
    found = ("task 1 'add' waits for 'sum' from task 2, 1.0 s",)
    text = waits_text([status(replica(1, waits=("add waits for 'sum' from task 2",)), waits=found)])
    assert text == f"it waits: {found[0]}"
    found = ("task 2 'add' is running, 2.9 s", *found)
    assert waits_text([status(replica(2, "add"), waits=found)]) == "it waits: " + "; ".join(found)
    found = ("task 2 handler 'pull' is running, 2.9 s", *found[1:])
    assert waits_text([status(replica(2, "handler pull"), waits=found)]) == "it waits: " + "; ".join(found)


def test_it_computes_where_there_is_somebody_to_compute_and_nothing_else_to_tell() -> None:
    """That was said of a job that had not begun, too."""
    assert waits_text([]) == "no node had registered yet"
    assert waits_text([status()]) == "none of its tasks had a primary"
    behind, ahead = status(), dataclasses.replace(status(replica(0)), stamp=(1, 7))
    assert waits_text([behind, ahead]) == "it was still computing, in epoch 7"  # it may be one without an end
    assert waits_text([dataclasses.replace(ahead, stamp=None)]) == "it was still computing"
    assert waits_text([status(replica(0)), status(paused=True)]).startswith("it waits: n1 paused")
