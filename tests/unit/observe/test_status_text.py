"""What `taskgraph status` prints: is the job fast, is it safe, what does it wait for."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

import pytest

from taskgraph.errors import PeerLost, TaskGraphError
from taskgraph.observe.events import Event
from taskgraph.observe.status import NoAnswer, NodeStatus, ReplicaStatus
from taskgraph.observe.status_text import StatusData, missing_backups_text, no_node_text, reason_lines, status_text
from taskgraph.observe.usage import Usage
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import KeyValue
from taskgraph.protocol.records import (
    CheckpointRecord,
    EpochRecord,
    GoneRecord,
    JobStatus,
    MemberRecord,
    NodeRecord,
    PrimaryRecord,
    Record,
    StatusRecord,
)
from taskgraph.protocol.view import JobView

NOW = 1_000_000.0


def node(name: str, pid: int) -> NodeRecord:
    return NodeRecord(name=name, run="r", host="h", pid=pid, endpoints=(), control="", fingerprint="f", lease=1)


def status(name: str, *replicas: ReplicaStatus, waits: tuple[str, ...] = (), leader: bool = False) -> NodeStatus:
    return NodeStatus(
        node=f"{name}-a",
        name=name,
        host="h",
        pid=11,
        paused=False,
        draining=False,
        stamp=(1, 7),
        revision=9,
        leader=leader,
        replicas=replicas,
        waits=waits,
        usage=Usage(memory_bytes=93 << 20, files=20, threads=7, coroutines=30),
    )


def at_work(task: int, seconds: float, processor: str = "add") -> ReplicaStatus:
    return ReplicaStatus(task, "primary", 1, 7, processor, seconds, (), 2)


def waiting(task: int, *waits: str) -> ReplicaStatus:
    return ReplicaStatus(task, "primary", 1, 7, "", 0.0, waits, 2)


def commits(*, rate: float, last: int = 7, **numbers: float) -> list[Event]:
    """Ten commits, the last of them just now."""
    return [
        Event(NOW - (last - epoch) / rate, "n1", "commit", "", epoch=epoch, fields=numbers)
        for epoch in range(last - 9, last + 1)
    ]


def of_members(members: dict[int, list[str]], nodes: int) -> JobView:
    """Tasks with these members, the first of them primary, and so many nodes."""
    keys = Keys("fit")
    values: dict[str, Record] = {
        keys.epoch: EpochRecord(epoch=7, attempt=1),
        keys.status: StatusRecord(state=JobStatus.RUNNING),
        **{keys.node(f"n{n}-a"): node(f"n{n}", n) for n in range(1, nodes + 1)},
        **{keys.primary(t): PrimaryRecord(node=f"{m[0]}-a", term=1, stateful=True) for t, m in members.items()},
        **{keys.member(t, f"{name}-a"): MemberRecord() for t, m in members.items() for name in m},
    }
    made = JobView("fit")
    made.reset(9, [KeyValue(key, value.to_bytes(), i, i) for i, (key, value) in enumerate(values.items(), 1)])
    return made


TWO = of_members({0: ["n1", "n2"], 1: ["n2", "n1"], 2: ["n1", "n2"]}, 2)
ANSWERS = {
    "n1-a": status("n1", at_work(0, 0.021), waiting(2, "add waits for 'sum' from task 0"), leader=True),
    "n2-a": status("n2", at_work(1, 1.26)),
}


def shown(
    view: JobView,
    statuses: Mapping[str, NodeStatus | TaskGraphError],
    *,
    tasks: int = 3,
    rows: tuple[int, ...] = (),
    **more: object,
) -> list[str]:
    picture = StatusData(name="fit", tasks=tasks, epochs=40, backups=1, view=view, statuses=statuses, now=NOW)
    return status_text(dataclasses.replace(picture, **more), rows).splitlines()  # type: ignore[arg-type]


def test_status_answers_in_its_first_lines() -> None:
    at = time.strftime("%H:%M:%S", time.localtime(NOW - 60))
    kept = [
        Event(NOW - 252, "n1", "began", "the job began"),
        Event(NOW - 60, "launcher", "failover", "n3 died", fields={"node": "n3", "next_commit_ms": 70}),
    ]
    lines = shown(TWO, ANSWERS, commits=commits(rate=4.0, loss=0.5, steps=3.0), kept=kept, etcd_s=0.0012, logs="/logs")
    assert lines == [
        "fit  running 4:12   epoch 7/39   4.0/s   left 0:08",
        f"loss 0.5  steps 3   1 failover, at {at}, 0.07 s",
        "ok   3/3 tasks backed up   2/2 nodes answer   etcd 1.2 ms",
        "NODE  STATE   MEMORY  PRIMARY  BACKUP  PID  HOST",
        "n1    leader  93 MiB  2        1       1    h",
        "n2    ok      93 MiB  1        2       2    h",
        "waits for  task 1 'add' on n2, running 1.3 s; 1 task wait",
        "slowest    1 (n2) 1.3 s   0 (n1) 21 ms",
        "more: --tasks, --task 3-7, --json; logs: /logs",
    ]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({0: "12", 1: "21", 2: "12", 3: "21"}, "2/2 tasks backed up, and table users"),
        ({0: "12", 1: "2", 2: "12", 3: "2"}, "1/2 tasks backed up, but not part of table users"),
        ({0: "12", 1: "21", 2: "1", 3: "2"}, "2/2 tasks backed up, but not table users"),
    ],
)
def test_services_are_named_and_not_counted(members: dict[int, str], words: str) -> None:
    view = of_members({task: [f"n{n}" for n in names] for task, names in members.items()}, 2)
    lines = shown(view, {}, tasks=4, services={"table users": 2}, rows=(1, 3))
    assert words in "\n".join(lines)
    assert [line.split("  ")[0] for line in lines if line[:1].isdecimal()] == ["1", "3 part of table users"]


def test_warning_names_the_services_without_backup() -> None:
    view = of_members({0: ["n1"], 1: ["n1"], 2: ["n1"]}, 1)
    text = missing_backups_text(view, "fit", 3, 1, services={"queue images": 1})
    assert text.startswith("tasks 0-1 and queue images have no backup: that takes 2 nodes")
    lone = of_members({0: ["n1", "n2"], 1: ["n1"]}, 2)
    assert missing_backups_text(lone, "fit", 2, 1, services={"queue images": 1}).startswith(
        "queue images has no backup"
    )


def test_status_of_1000_tasks_fits_a_screen() -> None:
    nodes, tasks = 20, 1000
    members = {task: [f"n{1 + task % nodes}", f"n{1 + (task + 7) % nodes}"] for task in range(tasks)}
    members[13] = ["n14"]
    work = {f"n{n}-a": status(f"n{n}", at_work(n, n / 100), waits=("x" * 200,) * 9) for n in range(1, nodes)}
    said: dict[str, NodeStatus | TaskGraphError] = {**work, f"n{nodes}-a": PeerLost("its port " + "refuses " * 30)}
    numbers = {f"a number with a long name {number}": 0.5 for number in range(50)}
    lines = shown(
        of_members(members, nodes), said, tasks=tasks, commits=commits(rate=0.2, **numbers), etcd_s=0.1, logs="/" * 70
    )
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert "   one in 5.0 s" in lines[0]
    assert "WARN 999/1,000 tasks backed up   19/20 nodes answer   etcd 100.0 ms" in lines
    assert any(line.startswith("n20   does not answer") for line in lines), "of many nodes the ill ones are shown"
    assert "... and 14 nodes more, which answer: --tasks, --json" in lines


def test_slow_job_says_when_it_last_committed() -> None:
    slow = [dataclasses.replace(event, at=event.at - 75) for event in commits(rate=0.1)]
    assert shown(TWO, ANSWERS, commits=slow)[0].endswith("one in 10.0 s   left 5:20   last commit 1:15 ago")


def test_rows_of_tasks_come_on_demand() -> None:
    lines = shown(TWO, ANSWERS, rows=(1, 2))
    assert lines[-4:] == [
        "",
        "TASK  PRIMARY  BACKUPS  TERM  DOING",
        "1     n2       n1       1     add, 1.3 s",
        "2     n1       n2       1     add waits for 'sum' from task 0",
    ]


def test_what_the_leader_found_comes_first() -> None:
    answers = {**ANSWERS, "n1-a": status("n1", at_work(0, 0.1), waits=("task 1 waits for task 0", "b", "c", "d"))}
    lines = shown(TWO, answers)
    at = lines.index("waits for  task 1 waits for task 0")
    assert lines[at + 1 : at + 3] == ["           b", "           and 2 more"]


def test_waiting_task_is_shown_if_none_runs() -> None:
    answers = {
        "n1-a": status("n1", waiting(0, "step waits for 'sum' from task 1"), waiting(2, "x")),
        "n2-a": status("n2"),
    }
    assert "waits for  task 0 on n1: step waits for 'sum' from task 1; 2 tasks wait" in shown(TWO, answers)


def test_node_that_does_not_answer_is_a_warning() -> None:
    late = {name: NoAnswer(f"the node at {name} did not answer within 2 s", 2.0) for name in ("n1-a", "n2-a")}
    lines = shown(TWO, late)
    assert lines[1:4] == [
        "WARN 3/3 tasks backed up   0/2 nodes answer",
        "     n1, n2: busy (a failover of many tasks takes seconds), stopped, or not",
        "     reachable from here",
    ]
    assert sum("no answer in 2 s" in line for line in lines) == 2


def test_ended_job_without_nodes_has_no_tables() -> None:
    keys, done = Keys("fit"), JobView("fit")
    values: dict[str, Record] = {
        keys.epoch: EpochRecord(epoch=40, attempt=1),
        keys.status: StatusRecord(state=JobStatus.FINISHED),
        keys.primary(0): PrimaryRecord(node="n1-aa", term=1, stateful=True),
    }
    done.reset(9, [KeyValue(key, value.to_bytes(), i, i) for i, (key, value) in enumerate(values.items(), 1)])
    assert shown(done, {}) == ["fit  finished   40 epochs", "", "no nodes are registered"]
    assert shown(JobView("fit"), {})[0] == "fit  unknown   no epoch"


@pytest.mark.parametrize(
    ("members", "nodes", "backups", "words"),
    [
        ({0: ["n1", "n2"], 1: ["n2", "n1"]}, 2, 1, ""),
        ({0: ["n1"]}, 2, 0, ""),
        (
            {0: ["n1"], 1: ["n1"]},
            1,
            1,
            "tasks 0-1 have no backup: that takes 2 nodes, and there is 1: start more with `taskgraph launch fit`",
        ),
        (
            {0: ["n1", "n2"], 1: ["n2", "n1"]},
            2,
            2,
            "tasks 0-1 have fewer than 2 backups: that takes 3 nodes, and there are 2: start more with "
            "`taskgraph launch fit`",
        ),
        (
            {0: ["n1"], 1: ["n2", "n1"]},
            2,
            2,
            "tasks 0-1 have fewer than 2 backups: that takes 3 nodes, and there are 2: start more with "
            "`taskgraph launch fit`",
        ),
        (
            {0: ["n1", "n2"], 1: ["n2"]},
            2,
            1,
            "task 1 has no backup at the moment: more are made as soon as a node can take them",
        ),
    ],
)
def test_tasks_without_backups_are_named(members: dict[int, list[str]], nodes: int, backups: int, words: str) -> None:
    view = of_members(members, nodes)
    assert missing_backups_text(view, "fit", len(members), backups) == words
    text = " ".join(" ".join(shown(view, {}, tasks=len(members), backups=backups)).split())
    assert words in text and ("WARN" in text) == bool(words)
    assert ("no backups (backups=0): the tasks of a node that dies are lost" in text) == (backups == 0)


def of_nobody(
    epoch: int = 7, *, checkpoint: int = 0, gone: tuple[str, ...] = (), stateful: bool = True, tasks: int = 3
) -> JobView:
    """A job that runs, whose tasks were each held by two of three nodes; none is registered now."""
    keys = Keys("fit")
    values: dict[str, Record] = {
        keys.epoch: EpochRecord(epoch=epoch, attempt=1),
        keys.status: StatusRecord(state=JobStatus.RUNNING),
        **{keys.gone(f"{name}-a"): GoneRecord(reason="killed") for name in gone},
        **({keys.checkpoint: CheckpointRecord(epoch=checkpoint, attempt=1, name="c")} if checkpoint else {}),
    }
    for task in range(tasks):
        values[keys.primary(task)] = PrimaryRecord(node=f"n{task % 3 + 1}-a", term=1, stateful=stateful)
        for name in (f"n{task % 3 + 1}-a", f"n{(task + 1) % 3 + 1}-a"):
            values[keys.member(task, name)] = MemberRecord()
    made = JobView("fit")
    made.reset(99, [KeyValue(key, value.to_bytes(), i, i) for i, (key, value) in enumerate(values.items(), 1)])
    return made


@pytest.mark.parametrize(
    ("view", "after"),
    [
        (of_nobody(), "the job fails then. If all are dead: `taskgraph shutdown fit` ends it"),
        (of_nobody(checkpoint=4), "the job goes on from its checkpoint of epoch 4. If all are dead: `taskgraph l"),
        (of_nobody(checkpoint=9), "the job fails then."),
        (of_nobody(0), "the job begins anew. If all are dead: `taskgraph launch fit`"),
    ],
    ids=["no checkpoint", "a checkpoint", "a checkpoint of a later epoch", "epoch 0"],
)
def test_absent_nodes_with_state_may_come_back(view: JobView, after: str) -> None:
    lines = no_node_text(view, "fit", launcher=7, lost_after_s=20.0).splitlines()
    assert lines[0].endswith("n1, n2, n3 had the state of the tasks, and have lost contact with etcd.")
    assert lines[1].startswith("A node that is only cut off comes back by itself")
    assert lines[2] == "If you launch new nodes, they give up absent ones after 20 s (lost_after_s), with their state:"
    assert lines[3].startswith(after)


def test_absent_nodes_are_named() -> None:
    view = of_nobody(gone=("n1", "n2"))
    assert "n3 had the state of the tasks, and has lost contact" in no_node_text(view, "fit")
    view.members[0] = {f"n{n}-a": view.members[0]["n1-a"] for n in range(10, 30)}
    assert "n10, n11, n12, n13, n14, n15, n16, n17 and 13 more had the state" in no_node_text(view, "fit")


@pytest.mark.parametrize(
    ("view", "expected", "launcher", "words"),
    [
        (of_nobody(gone=("n1", "n2", "n3")), 4, None, ": start some with `taskgraph launch fit`"),
        (of_nobody(stateful=False), 4, None, ": start some with `taskgraph launch fit`"),
        (of_nobody(gone=("n1", "n2", "n3")), 4, 77, " yet: its launcher (process 77) is starting nodes"),
        (of_nobody(tasks=0), 0, None, ": start some with `taskgraph launch fit`"),
        (of_nobody(tasks=0), 4, 77, " yet: its launcher (process 77) is starting 4 nodes"),
        (of_nobody(tasks=0), 1, 77, " yet: its launcher (process 77) is starting 1 node"),
        (of_nobody(tasks=0), 0, 77, " yet: its launcher (process 77) is starting nodes"),
        (
            of_nobody(tasks=0),
            4,
            None,
            " yet: it was submitted by a run that starts 4 nodes, on another host or here.\n"
            "If that run has ended: `taskgraph launch fit` starts some",
        ),
    ],
)
def test_job_without_nodes_says_what_starts_some(
    view: JobView, expected: int, launcher: int | None, words: str
) -> None:
    assert no_node_text(view, "fit", expected=expected, launcher=launcher) == f"no nodes are registered{words}"


def test_long_reason_has_two_ends() -> None:
    """As one with the ends of the logs of several nodes: the status of a job that failed fits a screen, too."""
    assert reason_lines("") == [] and reason_lines("why\n") == ["  why"]
    assert reason_lines("\n".join(map(str, range(8)))) == [f"  {number}" for number in range(8)]
    long = reason_lines("\n".join(map(str, range(60))))
    assert long == ["  0", "  ... 53 lines more: --json", *(f"  {number}" for number in range(54, 60))]
