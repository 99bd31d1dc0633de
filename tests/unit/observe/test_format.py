"""Status and values as text for people, and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from taskgraph.errors import PeerLost
from taskgraph.observe.format import (
    fitted,
    ids_text,
    kept_json,
    lacking_text,
    nobody_text,
    status_json,
    status_text,
    table,
)
from taskgraph.observe.status import NoAnswer, NodeStatus, ReplicaStatus
from taskgraph.observe.usage import Usage
from taskgraph.observe.values_text import values_text
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import KeyValue
from taskgraph.protocol.records import (
    CheckpointRecord,
    EpochRecord,
    GoneRecord,
    MemberRecord,
    NodeRecord,
    PrimaryRecord,
    Record,
    State,
    StatusRecord,
)
from taskgraph.protocol.view import JobView


def node(name: str, pid: int) -> NodeRecord:
    return NodeRecord(name=name, run="r", host="h", pid=pid, endpoints=(), control="", fingerprint="f", lease=1)


@pytest.fixture
def view() -> JobView:
    """Two tasks on n1 (leader) and n2; task 1's backup is gone; n2 does not answer."""
    keys = Keys("fit")
    values: dict[str, Record] = {
        keys.epoch: EpochRecord(epoch=7, attempt=2),
        keys.status: StatusRecord(state=State.RUNNING),
        keys.node("n1-aa"): node("n1", 11),
        keys.node("n2-bb"): node("n2", 22),
        keys.primary(0): PrimaryRecord(node="n1-aa", term=1, stateful=True),
        keys.primary(1): PrimaryRecord(node="n2-bb", term=3, stateful=True),
        keys.member(0, "n1-aa"): MemberRecord(),
        keys.member(0, "n2-bb"): MemberRecord(),
        keys.member(1, "n2-bb"): MemberRecord(),
    }
    made = JobView("fit")
    made.reset(9, [KeyValue(key, value.to_bytes(), i, i) for i, (key, value) in enumerate(values.items(), 1)])
    return made


def status() -> NodeStatus:
    return NodeStatus(
        node="n1-aa",
        name="n1",
        host="h",
        pid=11,
        paused=False,
        draining=False,
        stamp=(2, 7),
        revision=9,
        leader=True,
        replicas=(ReplicaStatus(0, "primary", 1, 7, "update", 12.34, (), 2),),
        waits=("task 1, whose primary does not answer",),
        usage=Usage(memory_bytes=93 << 20, files=20, threads=7, coroutines=30),
    )


def test_a_status_says_who_does_what_and_what_is_waited_for(view: JobView) -> None:
    lines = status_text("fit", 2, 40, view, {"n1-aa": status(), "n2-bb": PeerLost("no answer")}).splitlines()
    assert lines[0] == "job fit: running, epoch 7/39, attempt 2"
    rows = {line.split()[0]: line.split() for line in lines if line}
    assert rows["n1"] == ["n1", "h", "11", "93", "MiB", "leader", "0", "-"]
    assert rows["n2"] == ["n2", "h", "22", "-", "does", "not", "answer", "1", "0"]
    assert "n2: no answer" in lines
    assert rows["0"] == ["0", "n1", "1", "2", "n2", "update", "for", "12.3", "s"]
    assert rows["1"] == ["1", "n2", "3", "1", "-", "-"]
    assert lines[-2:] == ["waits:", "  task 1, whose primary does not answer"]


def test_of_a_node_that_left_a_task_for_want_of_memory_that_is_said(view: JobView) -> None:
    """It is given no task any more that another can lead, and nothing said why."""
    known = view.nodes["n1-aa"]
    view.nodes["n1-aa"] = dataclasses.replace(known, record=msgspec.structs.replace(known.record, left=(1,)))
    lines = status_text("fit", 2, 40, view, {"n1-aa": status(), "n2-bb": status()}).splitlines()
    rows = {line.split()[0]: line for line in lines if line}
    assert "  leader, short of memory  " in rows["n1"] and "memory" not in rows["n2"]


def test_a_node_that_gives_no_answer_in_time_may_be_busy(view: JobView) -> None:
    """In a failover of hundreds of tasks the nodes that took them over were told as those that do not answer."""
    said = {name: NoAnswer(f"the node at {name} did not answer Status within 2 s", 2.0) for name in ("n1-aa", "n2-bb")}
    lines = status_text("fit", 2, 40, view, said).splitlines()
    assert [line.split()[4:9] for line in lines[3:5]] == [["no", "answer", "in", "2", "s"]] * 2
    assert lines[5].startswith("n1, n2: busy (a failover of many tasks takes seconds), or stopped, or ")
    nodes = status_json("fit", 2, 40, view, said)["nodes"]
    assert [node["why_not"] for node in nodes] == [str(error) for error in said.values()]


def test_on_a_screen_a_nodes_state_is_seen_with_however_many_tasks() -> None:
    """It was the last column, after that of the tasks it is backup of: 270 characters wide where there are 200."""
    keys, held = Keys("fit"), {}
    for task in (task for task in range(400) if task.bit_count() % 2):  # no series, for `1,3,5..399` is short
        held[keys.primary(task)] = PrimaryRecord(node="n1-aa", term=1, stateful=True)
        held[keys.member(task, "n1-aa")] = held[keys.member(task, "n2-bb")] = MemberRecord()
    values: dict[str, Record] = {keys.node("n1-aa"): node("n1", 11), keys.node("n2-bb"): node("n2", 22), **held}
    made = JobView("fit")
    made.reset(9, [KeyValue(key, value.to_bytes(), i, i) for i, (key, value) in enumerate(values.items(), 1)])
    errors = {name: PeerLost("its control service\n\nis silent") for name in ("n1-aa", "n2-bb")}
    lines = fitted(status_text("fit", 400, None, made, errors), 80, 40).splitlines()
    assert max(map(len, status_text("fit", 400, None, made, errors).splitlines())) > 400
    assert "STATE" in lines[2] and all("does not answer" in line for line in lines[3:5])
    assert lines[5] == "n1, n2: its control service is silent"


HIGH = "\n\n".join(
    (
        "job fit: running, epoch 3",
        "NODE  HOST\nn1    here",
        "\n".join(("TASK  DOING", *(f"{task}     add waits for a long time" for task in range(20)))),
        "tasks 0-19 have no backup",
    )
)


def test_what_is_high_and_wide_fits_the_screen_with_its_head_and_its_end() -> None:
    assert fitted(HIGH, 80, 40) == HIGH
    text = fitted(HIGH, 16, 16)
    lines = text.splitlines()
    assert len(lines) == 16 and max(map(len, lines)) == 16
    assert lines[:6] == ["job fit: running", "", "NODE  HOST", "n1    here", "", "TASK  DOING"]
    assert lines[12:] == ["6     add waits ", "... 13 more", "", "tasks 0-19 have "]
    assert fitted(HIGH, 80, 28) == HIGH
    assert "\n... 2 more\n" in fitted(HIGH, 80, 27)


@pytest.mark.parametrize("rows", range(1, 30))
def test_it_is_never_higher_than_the_screen(rows: int) -> None:
    lines = fitted(HIGH, 80, rows).splitlines()
    assert len(lines) <= rows and lines[0] == "job fit: running, epoch 3"
    shown = sum(1 for line in lines if line.endswith("a long time"))
    left_out = [int(line.split()[1]) for line in lines if line.startswith("...")]
    assert rows < 10 or shown + sum(left_out) == 20


def test_a_job_that_ended_and_that_all_nodes_left_has_no_tables(view: JobView) -> None:
    keys = Keys("fit")
    done = JobView("fit")
    values = {
        keys.epoch: EpochRecord(epoch=40, attempt=1),
        keys.status: StatusRecord(state=State.FINISHED),
        keys.primary(0): PrimaryRecord(node="n1-aa", term=1, stateful=True),
    }
    done.reset(9, [KeyValue(key, value.to_bytes(), i, i) for i, (key, value) in enumerate(values.items(), 1)])
    assert status_text("fit", 2, 40, done, {}) == "job fit: finished, 40 epochs\n\nno nodes are registered"


def test_the_same_for_programs(view: JobView) -> None:
    found = json.loads(json.dumps(status_json("fit", 2, 40, view, {"n1-aa": status(), "n2-bb": PeerLost("lost\n n2")})))
    assert (found["state"], found["epoch"], found["attempt"], found["epochs"]) == ("running", 7, 2, 40)
    assert [(n["name"], n["pid"], n["answers"]) for n in found["nodes"]] == [("n1", 11, True), ("n2", 22, False)]
    n1, n2 = found["nodes"]
    assert (n1["leader"], n1["paused"], n2["why_not"]) == (True, False, "lost n2")
    task = found["tasks"][0]
    assert (task["primary"], task["term"], task["in_sync"]) == ("n1", 1, ["n1", "n2"])
    assert (task["processor"], task["running_s"]) == ("update", 12.34)
    assert found["waits"] == ["task 1, whose primary does not answer"]


def test_the_fields_for_programs_are_always_the_same_and_on_the_page_of_commands(view: JobView) -> None:
    """`tasks` was not there once a job had ended, and no page said what there is."""
    rows = (Path(__file__).parents[3] / "docs" / "commands.md").read_text().partition("## What `status --json` has")[2]
    told = {name for row in rows.splitlines() if row.startswith("| `") for name in re.findall(r"`(\w+)`", row)}
    running = status_json("fit", 2, 40, view, {"n1-aa": status(), "n2-bb": PeerLost("no answer")})
    n1, n2 = running["nodes"]
    assert n1.keys() == n2.keys()
    assert {*running, *n1, *running["tasks"][0]} <= told
    failed = StatusRecord(state=State.FAILED, reason="no", task=1, epoch=3, where="update", traceback="Traceback")
    ended = [kept_json("fit", failed, None), kept_json("fit", None, None), kept_json("fit", failed, {"epochs": 4})]
    assert all(kept.keys() == running.keys() for kept in ended)
    assert [kept["epoch"] for kept in ended] == [3, None, 4]
    assert (ended[0]["state"], ended[0]["task"], ended[0]["tasks"]) == ("failed", 1, [])


def test_a_job_that_nobody_works_on_yet() -> None:
    view = JobView("fit")
    text = status_text("fit", 1, None, view, {})
    assert "no nodes are registered" in text and "job fit: unknown, no epoch" in text


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], "-"),
        ([5], "5"),
        ([7, 3, 1, 2], "1-3 7"),
        (range(0, 9, 2), "0 2 4 6 8"),
        ([*range(20), 22, 301], "0-19 22 301"),
    ],
)
def test_task_ids_are_written_as_ranges(ids: list[int], text: str) -> None:
    assert ids_text(ids) == text


def test_columns_are_aligned() -> None:
    assert table([["A", "LONG"], ["abc", "d"]]) == ["A    LONG", "abc  d"]


def test_one_value_is_printed_alone_several_with_their_task() -> None:
    assert values_text({0: 3.5}) == "3.5"
    assert values_text({0: 3.5, 4: "done"}) == "task 0: 3.5\ntask 4: done"
    assert values_text({0: [0, 105, 210]}) == "0\n105\n210"
    assert values_text({0: [1, 2], 1: {"loss": 0.5}}) == "task 0:\n  1\n  2\ntask 1:\n  loss: 0.5"


def test_short_arrays_are_whole_and_long_ones_abbreviated() -> None:
    assert values_text({0: np.arange(3.0)}) == "[0., 1., 2.]"
    assert "..." not in values_text({0: np.zeros(200)})
    long = values_text({0: np.zeros((1000, 1000))})
    assert "..." in long and len(long) < 2000
    listed = values_text({0: list(range(100_000))}).splitlines()
    assert len(listed) == 5001 and (listed[0], listed[2500], listed[-1]) == ("0", "... (95000 more)", "99999")
    assert len(values_text({0: {1: "x" * 100_000}})) < 21_000


async def test_usage_is_of_this_process() -> None:
    before = Usage.now()
    assert before.memory_bytes > 10 << 20 and before.threads >= 1 and before.coroutines == 1
    one, other = os.pipe()
    assert Usage.now().files == before.files + 2
    os.close(one)
    os.close(other)


def of_members(members: dict[int, list[str]], nodes: int) -> JobView:
    """Tasks with these members, the first of them primary, and so many nodes."""
    keys = Keys("fit")
    values: dict[str, Record] = {
        keys.epoch: EpochRecord(epoch=7, attempt=1),
        keys.status: StatusRecord(state=State.RUNNING),
        **{keys.node(f"n{n}-a"): node(f"n{n}", n) for n in range(1, nodes + 1)},
        **{keys.primary(t): PrimaryRecord(node=f"{m[0]}-a", term=1, stateful=True) for t, m in members.items()},
        **{keys.member(t, f"{name}-a"): MemberRecord() for t, m in members.items() for name in m},
    }
    made = JobView("fit")
    made.reset(9, [KeyValue(key, value.to_bytes(), i, i) for i, (key, value) in enumerate(values.items(), 1)])
    return made


@pytest.mark.parametrize(
    ("members", "nodes", "backups", "words"),
    [
        ({0: ["n1", "n2"], 1: ["n2", "n1"]}, 2, 1, ""),
        ({0: ["n1"]}, 2, 0, "the job asked for no backups (backups=0): what a node holds is lost when it dies"),
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
def test_a_status_says_which_tasks_lack_backups_and_why(
    members: dict[int, list[str]], nodes: int, backups: int, words: str
) -> None:
    view = of_members(members, nodes)
    assert lacking_text(view, "fit", len(members), backups) == words
    assert words in status_text("fit", len(members), None, view, {}, backups)


def of_nobody(
    epoch: int = 7, *, checkpoint: int = 0, gone: tuple[str, ...] = (), stateful: bool = True, tasks: int = 3
) -> JobView:
    """A job that runs, whose tasks were each held by two of three nodes; none is registered now."""
    keys = Keys("fit")
    values: dict[str, Record] = {
        keys.epoch: EpochRecord(epoch=epoch, attempt=1),
        keys.status: StatusRecord(state=State.RUNNING),
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
def test_who_holds_the_state_and_is_not_gone_may_come_back(view: JobView, after: str) -> None:
    """It advised to start nodes, which take these for gone: a job fails of that whose nodes are cut off from etcd."""
    lines = nobody_text(view, "fit", launcher=7, lost_after_s=20.0).splitlines()
    assert lines[0] == "no nodes are registered: the keys of n1, n2, n3, which hold the state, have vanished."
    assert lines[1].startswith("Who is only cut off from etcd comes back by itself")
    assert "for gone after 20 s (lost_after_s), and what those hold is lost:" in lines[2]
    assert lines[3].startswith(after)


def test_of_many_nodes_some_are_named_and_of_one_it_alone() -> None:
    view = of_nobody(gone=("n1", "n2"))
    assert "the key of n3, which holds the state, has vanished" in nobody_text(view, "fit")
    view.members[0] = {f"n{n}-a": view.members[0]["n1-a"] for n in range(10, 30)}
    assert "the keys of n10, n11, n12, n13, n14, n15, n16, n17 and 13 more, which" in nobody_text(view, "fit")


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
            "If that has ended: `taskgraph launch fit` starts some",
        ),
    ],
)
def test_where_nobody_holds_anything_nodes_are_started_by_whoever_does_it(
    view: JobView, expected: int, launcher: int | None, words: str
) -> None:
    assert nobody_text(view, "fit", expected=expected, launcher=launcher) == f"no nodes are registered{words}"


def test_a_status_of_a_job_that_finished_counts_its_epochs(view: JobView) -> None:
    record = StatusRecord(state=State.FINISHED).to_bytes()
    keys = Keys("fit")
    held = [
        KeyValue(keys.epoch, EpochRecord(epoch=40, attempt=1).to_bytes(), 1, 1),
        KeyValue(keys.status, record, 2, 2),
    ]
    view.reset(10, held)
    assert status_text("fit", 2, 40, view, {}).splitlines()[0] == "job fit: finished, 40 epochs"
