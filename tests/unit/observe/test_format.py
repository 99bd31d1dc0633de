"""Small texts, values as text, and the status of a job as JSON."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from taskgraph.errors import PeerLost
from taskgraph.observe.format import ended_status_json, fit_screen, ids_text, status_json, table
from taskgraph.observe.status import NodeStatus, ReplicaStatus
from taskgraph.observe.usage import Usage
from taskgraph.observe.values_text import values_text
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import KeyValue
from taskgraph.protocol.records import (
    EpochRecord,
    JobStatus,
    MemberRecord,
    NodeRecord,
    PrimaryRecord,
    Record,
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
        keys.status: StatusRecord(state=JobStatus.RUNNING),
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


def test_text_fits_a_screen() -> None:
    high = "\n".join(["fit  running", *(f"{task}     add waits for a long time" for task in range(20))])
    assert fit_screen(high, 80, 40) == fit_screen(high, 80, 21) == high
    lines = fit_screen(high, 16, 10).splitlines()
    assert len(lines) == 10 and max(map(len, lines[:-1])) == 16
    assert lines[0] == "fit  running" and lines[-1] == "... 12 more lines"
    assert fit_screen(high, 80, 1) == "fit  running"


def test_status_as_json(view: JobView) -> None:
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
    failed = StatusRecord(state=JobStatus.FAILED, reason="no", task=1, epoch=3, where="update", traceback="Traceback")
    ended = [
        ended_status_json("fit", failed, None),
        ended_status_json("fit", None, None),
        ended_status_json("fit", failed, {"epochs": 4}),
    ]
    assert all(kept.keys() == running.keys() for kept in ended)
    assert [kept["epoch"] for kept in ended] == [3, None, 4]
    assert (ended[0]["state"], ended[0]["task"], ended[0]["tasks"]) == ("failed", 1, [])


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
    assert values_text({0: 1.5, 4: 1.5}) == "all 2 tasks: 1.5"
    assert values_text({0: 1, 4: 1.0}) == "task 0: 1\ntask 4: 1.0"
    assert values_text({0: [0, 105, 210]}) == "0\n105\n210"
    assert values_text({0: [1, 2], 1: {"loss": 0.5}}) == "task 0:\n  1\n  2\ntask 1:\n  loss: 0.5"


def test_short_arrays_are_whole_and_long_ones_abbreviated() -> None:
    assert values_text({0: np.arange(3.0)}) == "[0., 1., 2.]"
    assert "..." not in values_text({0: np.zeros(200)})
    long = values_text({0: np.zeros((1000, 1000))})
    assert "..." in long and len(long) < 2000
    torch = pytest.importorskip("torch")
    weights = {"w": torch.zeros(2, 3), "bias": torch.zeros(400, dtype=torch.bfloat16)}
    assert values_text({0: weights}) == (
        "w:\n  tensor([[0., 0., 0.],\n          [0., 0., 0.]])\nbias: tensor([0., 0., 0., ..., 0., 0., 0.])"
    )
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
