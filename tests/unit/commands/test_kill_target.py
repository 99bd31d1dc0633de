"""The node that `taskgraph kill` and `drain` choose, and the refusal of contradicting options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from signal import Signals

import msgspec
import pytest

from taskgraph.cli import parser
from taskgraph.commands.acting import _find_target, drain_risk, kill_risk
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import JobError, TransportError
from taskgraph.jobs import Job
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import KeyValue
from taskgraph.protocol.records import (
    CheckpointRecord,
    EpochRecord,
    MemberRecord,
    NodeRecord,
    PrimaryRecord,
    Record,
    name_of,
)
from taskgraph.protocol.view import JobView
from taskgraph.settings import Settings
from taskgraph.task import Task


def view(*tasks: tuple[str, ...], more: tuple[str, ...] = (), epoch: int = 0, checkpoint: int = 0) -> JobView:
    """A view of nodes n1 to n4: `tasks[i]` are the holders of task i, the primary first; `more` are further nodes."""
    keys, made = Keys("fit"), JobView("fit")
    records: list[tuple[str, Record]] = [(keys.epoch, EpochRecord(epoch=epoch, attempt=1))]
    if checkpoint:
        records.append((keys.checkpoint, CheckpointRecord(epoch=checkpoint, attempt=1, name="c")))
    for node in (*[f"{name}-7f" for name in ("n1", "n2", "n3", "n4")], *more):
        record = NodeRecord(
            name=name_of(node), run="r", host="h", pid=1, endpoints=(), control="", fingerprint="", lease=1
        )  # fmt: skip
        records.append((keys.node(node), record))
    for task, held in enumerate(tasks):
        if held:
            records.append((keys.primary(task), PrimaryRecord(node=f"{held[0]}-7f", term=1, stateful=True)))
        records += [(keys.member(task, f"{name}-7f"), MemberRecord(until=None, attempt=1)) for name in held]
    found = [
        KeyValue(key=key, value=record.to_bytes(), create_revision=i, mod_revision=i)
        for i, (key, record) in enumerate(records, start=1)
    ]
    made.reset(len(found), found)
    return made


VIEW = view(("n1", "n2", "n4"), ("n3",), ())


def target(*arguments: str, among: JobView = VIEW, backups: int = 2) -> tuple[str, str]:
    job = Job(tasks=3, builder=lambda task_id: Task(), name="fit", backups=backups)
    return _find_target(parser().parse_args(["kill", "fit", *arguments]), among, JobSpec.local(job))


@pytest.mark.parametrize(
    ("arguments", "node", "what"),
    [
        (("--task", "0"), "n1-7f", "the primary of task 0"),
        (("--task", "0", "--backup"), "n2-7f", "a backup of task 0"),
        (("--node", "n3"), "n3-7f", "primary of 1 task"),
        (("--task", "0", "--node", "n1"), "n1-7f", "the primary of task 0"),
        (("--task", "0", "--backup", "--node", "n4"), "n4-7f", "a backup of task 0"),
    ],
)
def test_target_of_kill(arguments: tuple[str, ...], node: str, what: str) -> None:
    assert target(*arguments) == (node, what)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("--task", "0", "--node", "n3"),
            "--task 0 and --node n3 contradict each other: n3 is not the primary of task 0: its primary is n1, its "
            "backups in sync are n2, n4; give --node alone to signal this node in any case",
        ),
        (
            ("--task", "0", "--node", "n2"),
            "its primary is n1, its backups in sync are n2, n4; add --backup",
        ),
        (("--task", "0", "--backup", "--node", "n1"), "n1 is not a backup in sync of task 0: its primary is n1"),
        (("--task", "1", "--backup", "--node", "n1"), "its primary is n3, it has no backup in sync"),
        (("--task", "2", "--node", "n1"), "it has no primary at the moment, it has no backup in sync"),
        (("--node", "n3", "--backup"), "--backup goes with --task T"),
        (("--backup",), "--backup goes with --task T"),
    ],
)
def test_contradicting_options(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(JobError) as refused:
        target(*arguments)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give --task T (its primary), --task T --backup, or --node NAME"),
        (("--task", "3"), "--task 3: the job has tasks 0 to 2"),
        (("--node", "n9"), "no node is called 'n9'; registered: n1, n2, n3, n4"),
        (("--task", "1", "--backup"), "task 1 has no backup in sync (the job has backups=0)"),
    ],
)
def test_unknown_target(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(JobError) as refused:
        target(*arguments, backups=0)
    assert str(refused.value) == says


def test_nodes_of_one_name_need_ids() -> None:
    twins = view(("n1", "n3"), more=("n3-8a",))
    with pytest.raises(JobError, match="several nodes are called 'n3': give the id, n3-7f or n3-8a"):
        target("--node", "n3", among=twins)
    for node, held in (("n3-7f", "primary of 0 tasks"), ("n3-8a", "primary of 0 tasks")):
        assert target("--node", node, among=twins) == (node, held)
    assert target("--task", "0", "--backup", "--node", "n3-7f", among=twins) == ("n3-7f", "a backup of task 0")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--task", "1", "--backup"), "task 1 has no backup in sync at the moment"),
        (("--task", "2"), "task 2 has no living primary at the moment"),
    ],
)
def test_target_missing_for_a_moment(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(TransportError, match=says):
        target(*arguments)


def drain_all(made: JobView, names: Iterable[str]) -> None:
    for name in names:
        versioned = made.nodes[f"{name}-7f"]
        made.nodes[f"{name}-7f"] = dataclasses.replace(
            versioned, record=msgspec.structs.replace(versioned.record, draining=True)
        )


def alone(*draining: str) -> str:
    """Returns the risk of draining n3, the only holder of task 1, while others leave."""
    made = view(("n1", "n2", "n4"), ("n3",), ())
    drain_all(made, draining)
    job = Job(tasks=3, builder=lambda task_id: Task(), epochs=1, name="fit", settings=Settings(drain_s=20))
    return drain_risk(made, dataclasses.replace(JobSpec.local(job), run="r"), "n3-7f")


def test_drain_with_other_nodes_is_safe() -> None:
    assert alone() == alone("n1", "n2") == ""


def test_drain_of_last_node_is_risky() -> None:
    assert alone("n1", "n2", "n4").startswith(
        "only n3 has task 1: the state is lost when the node leaves, after at most 20 s (drain_s)"
    )


def kill_of(
    node: str, number: int = 9, *, epoch: int = 7, checkpoint: int = 0, draining: tuple[str, ...] = ()
) -> tuple[str, bool]:
    """Returns the risk of a signal. n3 alone holds task 1; n5, which died, held task 2, too."""
    made = view(("n1", "n2", "n4"), ("n3",), ("n4", "n5"), epoch=epoch, checkpoint=checkpoint)
    drain_all(made, draining)
    job = Job(tasks=3, builder=lambda task_id: Task(), epochs=9, name="fit")
    return kill_risk(made, dataclasses.replace(JobSpec.local(job), run="r"), f"{node}-7f", Signals(number))


@pytest.mark.parametrize("number", [9, 3, 6, 11])
def test_kill_of_only_replica_fails_job(number: int) -> None:
    assert kill_of("n3", number) == ("only n3 has the state of task 1: the job fails", True)
    assert kill_of("n4", number)[0].startswith("only n4 has the state of task 2: ")


def test_kill_goes_back_to_checkpoint() -> None:
    text = "only n3 has the state of task 1: the job goes back to its checkpoint of epoch 4"
    assert kill_of("n3", checkpoint=4) == (f"{text} (it is at epoch 7)", False)


def test_kill_of_last_node_with_checkpoint() -> None:
    text, fails = kill_of("n3", checkpoint=4, draining=("n1", "n2", "n4"))
    assert text.endswith("once another node is there; without --replace its launcher fails the job")
    assert not fails


@pytest.mark.parametrize("number", [2, 15])
def test_second_drain_signal_is_a_kill(number: int) -> None:
    text = f"and the node is leaving: a second {Signals(number).name} may end it at once: the job fails"
    assert kill_of("n3", number, draining=("n3",)) == (f"only n3 has the state of task 1, {text}", True)
    assert kill_of("n1", number, draining=("n1",)) == ("", False)


def test_stop_of_only_replica_has_limit() -> None:
    text, fails = kill_of("n3", 19)
    assert "if the node is stopped for longer than 30 s (lost_after_s), the job fails" in text and not fails


def test_harmless_kill_is_silent() -> None:
    assert kill_of("n1") == kill_of("n2") == ("", False)
    assert kill_of("n3", epoch=0) == kill_of("n3", checkpoint=7) == ("", False)
    assert kill_of("n3", 18) == kill_of("n3", 15) == ("", False), "it goes on; it hands over to others"
