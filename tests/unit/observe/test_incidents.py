"""What a failure cost, put together from the events of all nodes."""

from __future__ import annotations

import pytest

from taskgraph.observe.events import Event
from taskgraph.observe.incidents import Incidents
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import KeyValue
from taskgraph.protocol.records import EpochRecord, GoneRecord, MemberRecord, NodeRecord, PrimaryRecord, StatusRecord
from taskgraph.protocol.view import JobView

TASKS = 3


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def view_of(nodes: tuple[str, ...], members: dict[int, tuple[str, ...]], **gone: str) -> JobView:
    """A running job. The first member of each task is its primary."""
    keys = Keys("fit")
    values = {
        keys.status: StatusRecord(state="running").to_bytes(),
        keys.epoch: EpochRecord(epoch=5, attempt=1, writer="w").to_bytes(),
    }
    for node in nodes:
        record = NodeRecord(
            name=node, run="r", host="h", pid=1, endpoints=(), control="", fingerprint="f", lease=1, writer="w"
        )
        values[keys.node(node)] = record.to_bytes()
    for task, holders in members.items():
        values[keys.primary(task)] = PrimaryRecord(node=holders[0], term=2, stateful=True, writer="w").to_bytes()
        values |= {keys.member(task, node): MemberRecord(writer="w").to_bytes() for node in holders}
    for node, reason in gone.items():
        values[keys.gone(node)] = GoneRecord(reason=reason, writer="w").to_bytes()
    view = JobView("fit")
    view.reset(9, [KeyValue(key, value, 1, 1, 0) for key, value in values.items()])
    return view


BEFORE = view_of(("n1", "n2", "n3"), {0: ("n1", "n2"), 1: ("n1", "n3"), 2: ("n2", "n1")})
AFTER = view_of(
    ("n2", "n3"), {0: ("n2", "n3"), 1: ("n3", "n2"), 2: ("n2", "n3")}, n1="killed by SIGKILL", n4="exited with code 3"
)
ALONE = view_of(("n3",), {0: ("n3",), 1: ("n3",), 2: ("n3",)}, n2="killed by SIGKILL")


def lost(node: str, at: float, **fields: int) -> Event:
    return Event(at, "n3", "lost", f"{node} died: its port refuses connections", fields={"lost": node, **fields})


def takeover(by: str, of: str, at: float, tasks: str = "0") -> Event:
    return Event(at, by, "takeover", "...", fields={"from": of, "tasks": tasks, "until": at})


def admitted(at: float) -> Event:
    return Event(at, "n2", "admitted", "...", fields={"of": "n3", "count": 2, "until": at})


def finished(incidents: Incidents, clock: Clock, view: JobView) -> list[str]:
    """The texts of the next 20 s."""
    found = []
    for _ in range(200):
        clock.now += 0.1
        found += [event.text for event in incidents.take_finished(view)]
    return found


def test_failure_is_one_event_with_its_cost() -> None:
    clock = Clock()
    incidents = Incidents(TASKS, 1, clock)
    incidents.note_commit(9.9)
    for event in (lost("n1", 10.02), takeover("n2", "n1", 10.04), lost("n1", 10.0), takeover("n3", "n1", 10.05, "1")):
        incidents.note_event(event)
    incidents.note_event(Event(10.06, "n2", "restart", "epoch 5 starts again", epoch=5))
    incidents.note_commit(10.07)
    incidents.note_commit(10.20)
    incidents.note_event(admitted(10.32))
    assert incidents.take_finished(AFTER) == [], "events of other nodes may still come"
    clock.now += 2
    (event,) = incidents.take_finished(AFTER)
    assert event.text == (
        "n1 died (SIGKILL): 2 tasks moved to n2 n3; next commit after 0.07 s, 1 epoch redone; "
        "all tasks backed up again after 0.32 s"
    )
    assert event.kind == "failover" and event.at == 10.0
    assert event.fields == {
        "node": "n1",
        "cause": "its port refuses connections",
        "tasks": 2,
        "epochs_redone": 1,
        "takeover_ms": 50,
        "next_commit_ms": 70,
        "backed_up_ms": 320,
    }
    assert not incidents.any_open


def test_commits_before_the_job_was_followed_are_not_guessed() -> None:
    """A launcher's pod that was started again just after a node was killed."""
    clock = Clock()
    incidents = Incidents(4, 1, clock)
    incidents.note_event(lost("a", 10.0))
    incidents.note_event(takeover("b", "a", 10.05))
    incidents.note_commit(13.3, 250)
    incidents.note_commit(13.4, 251)
    incidents.note_event(admitted(11.5))
    view = view_of(("b", "c"), dict.fromkeys(range(4), ("b", "c")), a="killed by SIGKILL")
    (text,) = finished(incidents, clock, view)
    assert text == "a died (SIGKILL): 1 task moved to b; all tasks backed up again after 1.50 s"


def test_roll_back_counts_the_epochs_computed_again() -> None:
    clock = Clock()
    incidents = Incidents(TASKS, 1, clock)
    for event in (
        lost("n2", 10.0),
        takeover("n3", "n2", 10.1, "0-2"),
        Event(10.1, "n3", "rolled back", "...", epoch=20, fields={"until": 43}),
    ):
        incidents.note_event(event)
    incidents.note_commit(10.3)
    (text,) = finished(incidents, clock, ALONE)
    assert "next commit after 0.30 s, 23 epochs redone" in text


def test_failure_is_not_over_before_its_tasks_go_on() -> None:
    clock = Clock()
    incidents = Incidents(TASKS, 1, clock)
    incidents.note_event(lost("n1", 10.0, lease=7))
    slow, last = finished(incidents, clock, BEFORE)
    assert slow == "n1 does not answer (its lease ended): some of its tasks have not moved yet"
    assert last == "n1 does not answer (its lease ended); no commit yet"


def test_failure_between_slow_commits_is_reported_without_one() -> None:
    clock = Clock()
    incidents = Incidents(TASKS, 1, clock)
    for event in (lost("n1", 10.0), takeover("n2", "n1", 10.1, "0 2"), admitted(10.3)):
        incidents.note_event(event)
    assert finished(incidents, clock, AFTER) == [
        "n1 died (SIGKILL): 2 tasks moved to n2; no commit yet; all tasks backed up again after 0.30 s"
    ]


def test_failure_that_leaves_one_node_counts_tasks_without_backup() -> None:
    clock = Clock()
    incidents = Incidents(TASKS, 1, clock)
    incidents.note_event(lost("n2", 10.0))
    incidents.note_event(takeover("n3", "n2", 10.1, "0-2"))
    incidents.note_commit(10.17)
    assert finished(incidents, clock, ALONE) == [
        "n2 died (SIGKILL): 3 tasks moved to n3; next commit after 0.17 s; 3 tasks without a backup"
    ]


@pytest.mark.parametrize("moved", [0, 2])
def test_node_that_leaves_at_the_end_is_no_failure(moved: int) -> None:
    incidents = Incidents(TASKS, 1, Clock())
    incidents.note_event(lost("n4", 10.0))
    if moved:
        incidents.note_event(takeover("n2", "n4", 10.1, "0-1"))
    assert [event.text for event in incidents.take_finished(AFTER, over=True)] == [
        "n4 died (exit code 3): 2 tasks moved to n2"
    ][:moved]


def test_failure_reported_by_another_follower_is_closed() -> None:
    clock = Clock()
    incidents = Incidents(TASKS, 1, clock)
    incidents.note_event(lost("n1", 10.0))
    incidents.note_event(Event(10.0, "launcher", "failover", "n1 died (SIGKILL)", fields={"node": "n1"}))
    assert finished(incidents, clock, AFTER) == []


def test_late_report_of_a_failure_is_no_second_one() -> None:
    """A node that was frozen or busy reports seconds later that it lost the node."""
    clock = Clock()
    incidents = Incidents(TASKS, 1, clock)
    for event in (lost("n1", 10.0), takeover("n2", "n1", 10.1, "0 2"), admitted(10.3)):
        incidents.note_event(event)
    incidents.note_commit(10.4)
    assert len(finished(incidents, clock, AFTER)) == 1
    incidents.note_event(lost("n1", 15.0))
    incidents.note_commit(15.1)
    assert finished(incidents, clock, AFTER) == []


def test_late_report_after_another_follower_reported_the_failure() -> None:
    clock = Clock()
    incidents = Incidents(TASKS, 1, clock)
    incidents.note_event(Event(10.0, "launcher", "failover", "n1 died (SIGKILL)", fields={"node": "n1"}))
    incidents.note_event(lost("n1", 15.0))
    incidents.note_commit(15.1)
    assert finished(incidents, clock, AFTER) == []


def test_node_that_came_back_may_fail_again() -> None:
    clock = Clock()
    incidents = Incidents(TASKS, 1, clock)
    incidents.note_event(Event(10.0, "launcher", "failover", "n1 does not answer", fields={"node": "n1"}))
    incidents.note_event(Event(12.0, "n2", "admitted", "...", fields={"of": "n1"}))
    incidents.note_event(lost("n1", 15.0))
    incidents.note_commit(15.1)
    assert len(finished(incidents, clock, AFTER)) == 1


def test_services_are_no_tasks_of_the_user() -> None:
    incidents = Incidents(TASKS, 1, Clock(), {"queue images": 1})
    for event in (lost("n1", 10.0), takeover("n2", "n1", 10.1, "0 2")):
        incidents.note_event(event)
    (event,) = incidents.take_finished(AFTER, over=True)
    assert event.text == "n1 died (SIGKILL): 1 task and queue images moved to n2"
