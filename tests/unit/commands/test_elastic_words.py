"""What commands say of an elastic job: steps and sums, workers, and what its last worker alone has."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from signal import SIGKILL, SIGTERM

import pytest
from commands_kit import in_memory, options

import taskgraph as tg
from taskgraph.cli import main, parser
from taskgraph.commands.acting import _find_target, drain_text, kill_risk
from taskgraph.commands.looking import _status
from taskgraph.driver.spec import JobSpec
from taskgraph.launch.kept import resume_hint
from taskgraph.launch.submit import submit
from taskgraph.observe.format import ended_status_json, status_json
from taskgraph.observe.status import NodeStatus, waits_text
from taskgraph.observe.status_text import StatusData, no_node_text, status_text
from taskgraph.observe.usage import Usage
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import KeyValue
from taskgraph.protocol.records import (
    CheckpointRecord,
    EpochRecord,
    GoneRecord,
    NodeRecord,
    Record,
    StatusRecord,
    WorkersRecord,
)
from taskgraph.protocol.view import JobView


@tg.elastic(name="fit")
def fit(run: tg.Run) -> None:
    """Does nothing: the commands look at what etcd has."""


@tg.elastic
def says(run: tg.Run) -> None:
    run.log.info("said")


SPEC = JobSpec.local(fit())


def view(workers: str, *, nodes: str = "", gone: str = "", checkpoint: int = 0, state: str = "running") -> JobView:
    """A view of an elastic job: the letters are the workers of its view, its registered nodes, and nodes that ended."""
    keys = Keys("fit")
    records: dict[str, Record] = {
        keys.status: StatusRecord(state=state),
        keys.epoch: EpochRecord(epoch=31 if state == "finished" else 0, attempt=1),
        keys.workers: WorkersRecord(number=0, lineage=0, workers=tuple((f"{name}-7f", 0) for name in workers)),
        **{keys.gone(f"{name}-7f"): GoneRecord(reason="died") for name in gone},
    }
    for name in nodes:
        records[keys.node(f"{name}-7f")] = NodeRecord(
            name=name, run=SPEC.run, host="h", pid=7, endpoints=(), control="", fingerprint="", lease=1
        )
    if checkpoint:
        records[keys.checkpoint] = CheckpointRecord(epoch=checkpoint, attempt=1, name="c")
    made = JobView("fit")
    made.reset(9, [KeyValue(key, record.to_bytes(), i, i) for i, (key, record) in enumerate(records.items(), 1)])
    return made


def at_step(name: str, step: int, *waits: str) -> NodeStatus:
    return NodeStatus(
        node=f"{name}-7f",
        name=name,
        host="h",
        pid=7,
        paused=False,
        draining=False,
        stamp=(1, step),
        revision=9,
        leader=name == "a",
        replicas=(),
        waits=waits,
        usage=Usage(memory_bytes=93 << 20, files=20, threads=7, coroutines=30),
    )


def shown(view: JobView, *statuses: NodeStatus, silent: Mapping[str, tg.TaskGraphError] | None = None) -> list[str]:
    said = {status.node: status for status in statuses} | dict(silent or {})
    picture = StatusData(name="fit", tasks=1, epochs=None, backups=0, view=view, statuses=said, elastic=True)
    return status_text(picture).splitlines()


def test_status_shows_the_step_of_the_workers() -> None:
    lines = shown(view("ab", nodes="abc"), at_step("a", 12, "a waits for parts of b, in step 12"), at_step("b", 11))
    assert lines[0] == "fit  running   step 12"
    assert lines[1].startswith("ok   2 workers: each has the whole state")
    assert "waits for  a waits for parts of b, in step 12" in lines


def test_status_before_the_first_workers() -> None:
    before = JobView("fit")
    before.nodes.update(view("", nodes="a").nodes)
    waits = "the job waits for workers: 1 of at least 2 are here (min_workers)"
    lines = shown(before, at_step("a", -1, waits))
    assert lines[1] == "ok   no workers yet   1/1 nodes answer"
    assert lines[2].split() == ["NODE", "STATE", "MEMORY", "WORKER", "PID", "HOST"]
    assert lines[3].split() == ["a", "leader", "93", "MiB", "waits", "7", "h"]
    assert lines[4] == f"waits for  {waits}"


def test_status_without_workers_shows_where_new_ones_begin() -> None:
    assert shown(view("", checkpoint=31))[0] == "fit  running   checkpoint of sum 31"
    assert shown(view(""))[0] == "fit  running   no step yet"
    silent = {"a-7f": tg.TransportError("it refused the token")}
    assert shown(view("a"), silent=silent)[0] == "fit  running", "unknown, without an answer"
    assert shown(view("a", state="cancelled"))[0] == "fit  cancelled"
    assert shown(view("a", state="finished"))[0] == "fit  finished   31 sums"


async def test_submitted_job_has_no_epochs_and_tasks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await submit(in_memory(monkeypatch), SPEC)
    assert await _status(options("status")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fit  running   no step yet" and lines[-1] == "more: --json"
    for refused in (("--tasks",), ("--task", "3")):
        with pytest.raises(tg.JobError, match="the workers of an elastic job have no tasks; leave the option out"):
            await _status(options("status", *refused))


def test_status_as_json_has_steps_and_workers() -> None:
    found = status_json("fit", 1, None, view("ab", nodes="ab"), {"a-7f": at_step("a", 12)}, elastic=True)
    assert (found["step"], found["sums"], found["workers"]) == (12, None, ["a", "b"])
    assert (found["epoch"], found["epochs"], found["tasks"]) == (None, None, [])
    ended = status_json("fit", 1, None, view("ab", state="finished"), {}, elastic=True)
    assert (ended["step"], ended["sums"], ended["epoch"]) == (None, 31, None)
    kept = ended_status_json("fit", None, {"epochs": 31}, elastic=True)
    assert (kept["sums"], kept["epoch"]) == (31, None) and kept.keys() == found.keys()


@pytest.mark.parametrize(
    ("lost", "then"),
    [
        (view("ab", gone="ab"), "all workers have ended, and the state with them.|the job fails: no checkpoint"),
        (view("ab", gone="ab", checkpoint=31), "the job goes on from its checkpoint of sum 31"),
        (view("ab", gone="a"), "b had the state, and has lost contact with etcd.|after 20 s (lost_after_s), and the"),
    ],
    ids=["all died", "with a checkpoint", "one may live"],
)
def test_job_without_workers_says_what_new_ones_do(lost: JobView, then: str) -> None:
    text = no_node_text(lost, "fit", lost_after_s=20.0)
    assert all(part in text for part in ("no nodes are registered", "`taskgraph launch fit`", *then.split("|"))), text


def test_kill_of_the_only_worker() -> None:
    def risk(view: JobView, node: str = "a", number: int = SIGKILL) -> tuple[str, bool]:
        return kill_risk(view, SPEC, f"{node}-7f", SIGKILL if number == SIGKILL else SIGTERM)

    assert risk(view("a", nodes="ab")) == ("only a has the state: the job fails", True)
    assert risk(view("a", nodes="ab"), "b") == ("", False), "it has not entered"
    assert risk(view("ab", nodes="ab")) == risk(view("a", nodes="ab"), number=SIGTERM) == ("", False)
    back = "only a has the state: the job goes back to its checkpoint of sum 31"
    assert risk(view("ab", nodes="ac", gone="b", checkpoint=31)) == (back, False)


def test_target_of_kill_and_drain() -> None:
    def said(view: JobView, *arguments: str) -> str:
        return _find_target(parser().parse_args(["kill", "fit", *arguments]), view, SPEC)[1]

    before, entered = JobView("fit"), view("ab", nodes="abc")
    before.nodes.update(entered.nodes)
    assert said(entered, "--node", "a") == "one of 2 workers"
    assert said(entered, "--node", "c") == said(before, "--node", "a") == "which is no worker yet"
    for refused in ((), ("--task", "0"), ("--node", "a", "--backup")):
        with pytest.raises(tg.JobError, match="the workers of an elastic job have no tasks: give --node NAME alone"):
            said(before, *refused)
    assert drain_text(entered, SPEC, "a-7f") == "leaves before its next part"
    assert drain_text(view("a", nodes="ac"), SPEC, "a-7f").startswith("leaves once another worker has the state: start")
    kept = dataclasses.replace(SPEC, checkpoint="file:///kept")
    assert drain_text(view("a", nodes="ac"), kept, "a-7f") == (
        "leaves once a checkpoint is complete, or another worker has the state"
    )
    assert drain_text(before, SPEC, "a-7f") == drain_text(entered, SPEC, "c-7f") == "leaves: it is no worker yet"


def test_hint_names_sums() -> None:
    assert resume_hint(CheckpointRecord(epoch=31, attempt=1, name="c"), SPEC.unit).startswith(
        "its checkpoint of sum 31"
    )


def test_job_that_computes_says_in_which_step() -> None:
    assert waits_text([at_step("a", 3), at_step("b", 4)], elastic=True) == "it was still computing, in step 4"


def test_log_of_a_worker_is_output_of_user_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert main(["run", "--nodes", "0", "--logs"], says) == 0
    assert "taskgraph.task.n1 INFO said" in capsys.readouterr().err.splitlines()
