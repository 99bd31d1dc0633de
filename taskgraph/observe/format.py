"""Status and values as text for people."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from taskgraph.errors import FingerprintMismatch, TaskGraphError, named
from taskgraph.observe.screen import cut, one_line, padded, printable, width
from taskgraph.observe.status import NoAnswer, NodeStatus, ReplicaStatus
from taskgraph.observe.usage import Usage
from taskgraph.protocol.records import NodeRecord, State, StatusRecord, name_of
from taskgraph.protocol.view import JobView
from taskgraph.settings import Settings

__all__ = [
    "clock_text",
    "counted",
    "few_nodes_text",
    "fitted",
    "holders",
    "ids_text",
    "kept_json",
    "lacking_text",
    "last_text",
    "nobody_text",
    "status_json",
    "status_text",
    "table",
]

_LONG_S = 0.1
"""What runs for less is not worth a number."""
_ID = len("GPU-8932f937")
"""Of a device's UUID as many characters as CUDA, too, takes for a name."""
_TASKS = 2
"""Which part of the status is of tasks: after the job, and its nodes."""
_NAMED = 8
"""Nodes that a line names."""
_SILENT = "busy (a failover of many tasks takes seconds), or stopped, or not to be reached from here"
"""Of nodes that are registered and gave no answer in time."""
_SERIES = 5
"""So many numbers at equal distances are told as a series."""
_STEPS = 16
"""Distances that are tried: where tasks are dealt, the next of a series is one of the next few numbers."""


def clock_text(at: float) -> str:
    """The time of day here, to the millisecond."""
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at * 1000) % 1000:03d}"


def counted(count: int, noun: str) -> str:
    """`1 task`, `1,000 tasks`."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns, left-aligned; the first row is the head."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(width(row[i]) for row in cells) for i in range(len(cells[0]))]
    return ["  ".join(map(padded, row, widths)).rstrip() for row in cells]


def holders(view: JobView, task: int) -> list[str]:
    """Nodes that hold a task's state and will hold the next: in sync, registered, and not evicted."""
    return [n for n in view.staying(task) if n in view.nodes and n not in view.gone]


def status_text(
    name: str,
    tasks: int,
    epochs: int | None,
    view: JobView,
    statuses: Mapping[str, NodeStatus | TaskGraphError],
    backups: int = 0,
    nobody: str = "no nodes are registered",
) -> str:
    """Everything about a job on one page.

    Args:
        nobody: what to say where no node is registered: `nobody_text`.
    """
    lines = _head(name, epochs, view)
    lines += ["", *_node_table(tasks, view, statuses), *_unanswered(view, statuses)] if view.nodes else ["", nobody]
    if view.status and not view.running and not view.nodes:
        return "\n".join(lines)  # nobody holds anything any more
    lines += ["", *_task_table(tasks, view, statuses)]
    if view.running and view.nodes and (lacking := lacking_text(view, name, tasks, backups)):
        lines += ["", lacking]
    waits = [w for said in statuses.values() if isinstance(said, NodeStatus) for w in said.waits]
    if waits:
        lines += ["", "waits:", *(f"  {one_line(w)}" for w in waits)]
    return "\n".join(lines)


def _head(name: str, epochs: int | None, view: JobView) -> list[str]:
    state = view.status.record.state if view.status else "unknown"
    at = f"epoch {view.stamp.epoch}{last_text(epochs)}" if view.stamp else "no epoch"
    if view.stamp and state == State.FINISHED:
        at = f"{view.stamp.epoch} epochs"
    attempt = f", attempt {view.stamp.attempt}" if view.stamp and view.stamp.attempt > 1 else ""
    reason = view.status.record.reason if view.status else ""
    return [f"job {name}: {state}, {at}{attempt}", *([f"  {printable(reason)}"] if reason else [])]


def _node_table(tasks: int, view: JobView, statuses: Mapping[str, NodeStatus | TaskGraphError]) -> list[str]:
    some = any(v.record.devices for v in view.nodes.values())  # no column for what nobody has
    # The lists last: with many tasks they are wider than a screen.
    rows = [["NODE", "HOST", "PID", "MEMORY", *(["DEVICES"] if some else []), "STATE", "PRIMARY OF", "BACKUP OF"]]
    for node, versioned in sorted(view.nodes.items()):
        record = versioned.record
        said = statuses.get(node)
        primary = [t for t, p in view.primaries.items() if p.record.node == node]
        backup = [t for t in range(tasks) if node in holders(view, t) and t not in primary]
        rows.append(
            [
                record.name,
                record.host,
                str(record.pid),
                f"{said.usage.memory_bytes >> 20} MiB" if isinstance(said, NodeStatus) else "-",
                *([" ".join(i[:_ID] for i in record.device_ids) or "-"] if some else []),
                _node_state(said, record),
                ids_text(primary),
                ids_text(backup),
            ]
        )
    return table(rows)


def _task_table(tasks: int, view: JobView, statuses: Mapping[str, NodeStatus | TaskGraphError]) -> list[str]:
    rows = [["TASK", "PRIMARY", "TERM", "IN SYNC", "BACKUPS", "DOING"]]
    for task in range(tasks):
        holder = view.primary_node(task)
        held = holders(view, task)
        rows.append(
            [
                str(task),
                name_of(holder) if holder else "-",
                str(view.term(task)),
                str(len(held)),
                " ".join(name_of(n) for n in held if n != holder) or "-",
                _doing(_replica(statuses.get(holder or ""), task)),
            ]
        )
    return table(rows)


def fitted(text: str, columns: int, rows: int) -> str:
    """The status on a screen of that size: what is wider is cut, and of the tasks as many are left out as needed."""
    sections = [[cut(line, columns) for line in part.split("\n")] for part in text.split("\n\n")]
    excess = sum(map(len, sections)) + len(sections) - 1 - rows
    if excess > 0 and len(sections) > _TASKS:
        tasks = sections[_TASKS]
        left_out = min(excess + 1, len(tasks) - 1)  # one line says so, and the head of the table stays
        if left_out > 1:
            tasks[-left_out:] = [f"... {left_out} more"]
    return "\n".join("\n\n".join("\n".join(section) for section in sections).split("\n")[:rows])


def last_text(epochs: int | None) -> str:
    """`/39`: the number of the last epoch, since the one it follows is a number from 0, too; "" where none is known."""
    return f"/{epochs - 1}" if epochs is not None else ""


def nobody_text(
    view: JobView,
    name: str,
    *,
    expected: int = 0,
    launcher: int | None = None,
    lost_after_s: float = Settings().lost_after_s,
) -> str:
    """That no node is registered, why that may be so, and what to do.

    Args:
        expected: how many were started with the job.
        launcher: the process of this host that launches nodes for it, if one does.
    """
    none = "no nodes are registered"
    if not view.running:
        return none
    holders = {
        node
        for task, primary in view.primaries.items()
        if primary.record.stateful
        for node in view.in_sync(task)
        if node not in view.gone
    }
    if holders:
        names = sorted(map(name_of, holders))
        told = named(names, _NAMED)
        whose = f"key of {told}, which holds" if len(names) == 1 else f"keys of {told}, which hold"
        return (
            f"{none}: the {whose} the state, {'has' if len(names) == 1 else 'have'} vanished.\n"
            "Who is only cut off from etcd comes back by itself: see first which of them live.\n"
            f"A node that you launch takes who is absent for gone after {lost_after_s:g} s (lost_after_s), and what "
            f"those hold is lost:\n{_after_loss(view, name)}"
        )
    begun = bool(view.primaries)
    many = "nodes" if begun or not expected else f"{expected} node{'s' * (expected > 1)}"
    if launcher is not None:
        return f"{none} yet: its launcher (process {launcher}) is starting {many}"
    if expected and not begun:
        return (
            f"{none} yet: it was submitted by a run that starts {many}, on another host or here.\n"
            f"If that has ended: `taskgraph launch {name}` starts some"
        )
    return f"{none}: start some with `taskgraph launch {name}`"


def _after_loss(view: JobView, name: str) -> str:
    """What becomes of a job without all who hold its state, and what to do where they are dead."""
    at, checkpoint = view.stamp.epoch if view.stamp else 0, view.checkpoint
    if at and (checkpoint is None or checkpoint.record.epoch > at):
        return f"the job fails then. If all are dead: `taskgraph shutdown {name}` ends it"
    what = f"goes on from its checkpoint of epoch {checkpoint.record.epoch}" if at and checkpoint else "begins anew"
    return f"the job {what}. If all are dead: `taskgraph launch {name}`"


def few_nodes_text(name: str, nodes: int, backups: int) -> str:
    """The warning that too few nodes are left for the backups that the job asks for."""
    what = "no task has a backup" if nodes <= 1 else f"tasks have fewer than {backups} backups"
    then = "another failure ends the job" if nodes <= 1 else f"{backups + 1} nodes are needed, and {nodes} are left"
    return f"! {what}: {then}. Start a node: taskgraph launch {name}"


def lacking_text(view: JobView, name: str, tasks: int, backups: int) -> str:
    """Which tasks have fewer backups than the job asks for, and whether that will pass; "" where none lacks any."""
    have = {task: len(holders(view, task)) - (view.primary_node(task) in holders(view, task)) for task in range(tasks)}
    bare = [task for task, count in have.items() if count == 0]
    lacking = [task for task, count in have.items() if count < backups]
    nodes = sum(1 for node, v in view.nodes.items() if node not in view.gone and not v.record.draining)
    if backups == 0:
        return "the job asked for no backups (backups=0): what a node holds is lost when it dies"
    if not lacking:
        return ""
    whose = f"{'task' if len(lacking) == 1 else 'tasks'} {ids_text(lacking)} {'has' if len(lacking) == 1 else 'have'}"
    what = "no backup" if bare == lacking else f"fewer than {backups} backups"
    if nodes <= backups:
        there = f"there {'is' if nodes == 1 else 'are'} {nodes}"
        return f"{whose} {what}: that takes {backups + 1} nodes, and {there}: start more with `taskgraph launch {name}`"
    return f"{whose} {what} at the moment: more are made as soon as a node can take them"


def _unanswered(view: JobView, statuses: Mapping[str, NodeStatus | TaskGraphError]) -> list[str]:
    """Why nodes do not answer: one line for each reason."""
    whose: dict[str, list[str]] = {}
    for node, said in sorted(statuses.items()):
        if isinstance(said, TaskGraphError) and node in view.nodes:
            why = _SILENT if isinstance(said, NoAnswer) else _reason(said)
            whose.setdefault(why, []).append(view.nodes[node].record.name)
    return [f"{', '.join(names)}: {why}" for why, names in whose.items()]


def _reason(error: TaskGraphError) -> str:
    return one_line(" ".join(str(error).split()))


def _node_state(said: NodeStatus | TaskGraphError | None, record: NodeRecord) -> str:
    if isinstance(said, FingerprintMismatch):
        return "not asked"
    if isinstance(said, NoAnswer):
        return f"no answer in {said.within_s:g} s"
    if isinstance(said, TaskGraphError):
        return "does not answer"
    words = [word for word, on in (("leader", said and said.leader), ("paused", said and said.paused)) if on]
    words += [word for word, on in (("draining", record.draining), ("short of memory", record.left)) if on]
    return ", ".join(words) or "ok"


def _replica(said: NodeStatus | TaskGraphError | None, task: int) -> ReplicaStatus | None:
    if not isinstance(said, NodeStatus):
        return None
    return next((r for r in said.replicas if r.task == task), None)


def _doing(replica: ReplicaStatus | None) -> str:
    if replica is None:
        return "-"
    if replica.processor:
        return replica.processor + (f" for {replica.running_s:.1f} s" if replica.running_s >= _LONG_S else "")
    return "; ".join(replica.waits[:2]) or "-"


def ids_text(ids: Sequence[int]) -> str:
    """1 2 3 7 as `1-3 7`."""
    runs: list[list[int]] = []
    for i in sorted(set(ids)):
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "-"


def status_json(
    name: str, tasks: int, epochs: int | None, view: JobView, statuses: Mapping[str, NodeStatus | TaskGraphError]
) -> dict[str, Any]:
    """The same for programs. The keys are always the same ones, of an ended job too: docs/commands.md has them."""
    return {
        **_ended_as(name, view.status.record if view.status else None),
        "epoch": view.stamp.epoch if view.stamp else None,
        "attempt": view.stamp.attempt if view.stamp else None,
        "epochs": epochs,
        "nodes": [
            {
                "name": v.record.name,
                "node": node,
                "host": v.record.host,
                "pid": v.record.pid,
                "draining": v.record.draining,
                "devices": v.record.devices,
                "device_ids": list(v.record.device_ids),
                **_answer_json(statuses.get(node)),
            }
            for node, v in sorted(view.nodes.items())
        ],
        "tasks": [_task_json(task, view, statuses) for task in range(tasks)],
        "waits": [w for said in statuses.values() if isinstance(said, NodeStatus) for w in said.waits],
        "result": None,
    }


def kept_json(name: str, record: StatusRecord | None, result: dict[str, Any] | None) -> dict[str, Any]:
    """Of a job that has ended, from what was kept of it."""
    epoch = record.epoch if record is not None else None
    return {
        **_ended_as(name, record),
        "epoch": epoch if result is None else result["epochs"],
        "attempt": None,
        "epochs": None,
        "nodes": [],
        "tasks": [],
        "waits": [],
        "result": result,
    }


def _ended_as(name: str, record: StatusRecord | None) -> dict[str, Any]:
    """What became of it; and where, of one that failed."""
    return {
        "name": name,
        "state": record.state if record is not None else "unknown",
        "reason": record.reason if record is not None else "",
        "task": record.task if record is not None else None,
        "where": record.where if record is not None else "",
        "traceback": record.traceback if record is not None else "",
    }


def _answer_json(said: NodeStatus | TaskGraphError | None) -> dict[str, Any]:
    """What a node says of itself, or why it says nothing."""
    if isinstance(said, NodeStatus):
        usage: dict[str, Any] = dataclasses.asdict(said.usage)
        return {"answers": True, "why_not": "", "leader": said.leader, "paused": said.paused, **usage}
    usage = {field.name: None for field in dataclasses.fields(Usage)}
    return {"answers": False, "why_not": _reason(said) if said else "", "leader": None, "paused": None, **usage}


def _task_json(task: int, view: JobView, statuses: Mapping[str, NodeStatus | TaskGraphError]) -> dict[str, Any]:
    holder = view.primary_node(task)
    replica = _replica(statuses.get(holder or ""), task)
    return {
        "task": task,
        "primary": name_of(holder) if holder else None,
        "term": view.term(task),
        "in_sync": [name_of(n) for n in holders(view, task)],
        "processor": replica.processor if replica else "",
        "running_s": round(replica.running_s, 3) if replica else 0.0,
        "waits": list(replica.waits) if replica else [],
    }
