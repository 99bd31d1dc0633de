"""Small texts that several commands share, and the status of a job as JSON."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from taskgraph.errors import TaskGraphError
from taskgraph.observe.screen import cut, one_line, pad, width
from taskgraph.observe.status import NodeStatus, ReplicaStatus
from taskgraph.observe.usage import Usage
from taskgraph.protocol.records import StatusRecord, name_of
from taskgraph.protocol.view import JobView

__all__ = [
    "clock_text",
    "counted",
    "cut_lines",
    "ended_status_json",
    "few_nodes_text",
    "fit_screen",
    "holders",
    "ids_text",
    "last_epoch_text",
    "reason_text",
    "split_services",
    "status_json",
    "table",
    "tasks_text",
]


def clock_text(at: float) -> str:
    """Formats a unix time as the local time of day, to the millisecond."""
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at * 1000) % 1000:03d}"


def counted(count: int, noun: str) -> str:
    """Formats a count with its noun: `1 task`, `1,000 tasks`."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats rows as lines with left-aligned columns."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(width(row[i]) for row in cells) for i in range(len(cells[0]))]
    return ["  ".join(map(pad, row, widths)).rstrip() for row in cells]


def holders(view: JobView, task: int) -> list[str]:
    """Returns the nodes whose replica of a task counts: in sync, not evicted, and the node registered and not gone."""
    return [n for n in view.active_members(task) if n in view.nodes and n not in view.gone]


def cut_lines(lines: Sequence[str], columns: int) -> list[str]:
    return [cut(line, columns) for line in lines]


def fit_screen(text: str, columns: int, rows: int) -> str:
    """Fits a text to a screen: cuts wide lines, and leaves the last lines out."""
    lines = cut_lines(text.split("\n"), columns)
    if len(lines) > rows:
        lines = [*lines[: max(1, rows - 1)], f"... {len(lines) - rows + 1} more lines"][:rows]
    return "\n".join(lines)


def last_epoch_text(epochs: int | None) -> str:
    """Formats the number of a job's last epoch, counted from 0: `/39`; "" if the job has no last epoch."""
    return f"/{epochs - 1}" if epochs is not None else ""


def few_nodes_text(name: str, nodes: int, backups: int) -> str:
    """Returns the warning that too few nodes are left for the backups that the job asks for."""
    what = "no task has a backup" if nodes <= 1 else f"tasks have fewer than {backups} backups"
    then = "another failure ends the job" if nodes <= 1 else f"{backups + 1} nodes are needed, and {nodes} are left"
    return f"! {what}: {then}. Start a node: taskgraph launch {name}"


def reason_text(error: TaskGraphError) -> str:
    """Formats an error as one line."""
    return one_line(" ".join(str(error).split()))


def ids_text(ids: Sequence[int]) -> str:
    """Formats task ids as ranges: 1 2 3 7 as `1-3 7`."""
    runs: list[list[int]] = []
    for i in sorted(set(ids)):
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "-"


def split_services(ids: Collection[int], tasks: int, services: Mapping[str, int]) -> tuple[list[int], list[str]]:
    """Splits task ids into the user's own, and names of the services (queues, tables) that the others are part of.

    Args:
        tasks: how many tasks the job has, with those of services, whose ids come last.
        services: how many tasks each service has, by its title.
    """
    at = tasks - sum(services.values())
    own, names = [task for task in ids if task < at], []
    for title, count in services.items():
        if found := sum(at <= task < at + count for task in ids):
            names.append(title if found == count else f"part of {title}")
        at += count
    return own, names


def tasks_text(ids: Collection[int], tasks: int, services: Mapping[str, int]) -> str:
    """Formats how many tasks these are, as `3 tasks and queue images`. The arguments are those of `split_services`."""
    own, names = split_services(ids, tasks, services)
    return " and ".join([*([counted(len(own), "task")] if own or not names else []), *names])


def status_json(
    name: str,
    tasks: int,
    epochs: int | None,
    view: JobView,
    statuses: Mapping[str, NodeStatus | TaskGraphError],
    *,
    services: Mapping[str, int] | None = None,
    elastic: bool = False,
) -> dict[str, Any]:
    """Returns a job's status for programs. An ended job has the same keys (docs/commands.md)."""
    said = {node: status for node, status in statuses.items() if isinstance(status, NodeStatus)}
    replicas = {(node, replica.task): replica for node, status in said.items() for replica in status.replicas}
    titles = [title for title, count in (services or {}).items() for _ in range(count)]
    service_of = dict(enumerate(titles, tasks - len(titles)))
    return {
        **_end_json(name, view.status.record if view.status else None),
        "epoch": view.stamp.epoch if view.stamp and not elastic else None,
        "attempt": view.stamp.attempt if view.stamp else None,
        "epochs": epochs,
        "step": max((s.stamp[1] for s in said.values() if s.stamp is not None), default=None) if elastic else None,
        "sums": view.stamp.epoch if elastic and view.stamp and view.finished else None,
        "workers": [name_of(worker) for worker, _ in view.workers.record.workers] if view.workers is not None else [],
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
        "tasks": [
            {**_task_json(task, view, replicas), "service": service_of.get(task)}
            for task in range(0 if elastic else tasks)
        ],
        "waits": [wait for status in said.values() for wait in status.waits],
        "result": None,
    }


def ended_status_json(
    name: str, record: StatusRecord | None, result: dict[str, Any] | None, *, elastic: bool = False
) -> dict[str, Any]:
    """Returns the status of an ended job from its kept record and result, with the keys of `status_json`."""
    at = result["epochs"] if result is not None else record.epoch if record is not None else None
    return {
        **_end_json(name, record),
        "epoch": None if elastic else at,
        "attempt": None,
        "epochs": None,
        "step": None,
        "sums": at if elastic else None,
        "workers": [],
        "nodes": [],
        "tasks": [],
        "waits": [],
        "result": result,
    }


def _end_json(name: str, record: StatusRecord | None) -> dict[str, Any]:
    """Returns how the job ended, and where it failed; None: that is not known."""
    return {
        "name": name,
        "state": record.state if record is not None else "unknown",
        "reason": record.reason if record is not None else "",
        "task": record.task if record is not None else None,
        "where": record.where if record is not None else "",
        "traceback": record.traceback if record is not None else "",
    }


def _answer_json(said: NodeStatus | TaskGraphError | None) -> dict[str, Any]:
    """Returns what a node answered, or why it did not answer; None: it was not asked."""
    if isinstance(said, NodeStatus):
        usage: dict[str, Any] = dataclasses.asdict(said.usage)
        return {"answers": True, "why_not": "", "leader": said.leader, "paused": said.paused, **usage}
    usage = {field.name: None for field in dataclasses.fields(Usage)}
    return {"answers": False, "why_not": reason_text(said) if said else "", "leader": None, "paused": None, **usage}


def _task_json(task: int, view: JobView, replicas: Mapping[tuple[str, int], ReplicaStatus]) -> dict[str, Any]:
    """Returns what is known of one task."""
    holder = view.primary_node(task)
    replica = replicas.get((holder or "", task))
    return {
        "task": task,
        "primary": name_of(holder) if holder else None,
        "term": view.term(task),
        "in_sync": [name_of(n) for n in holders(view, task)],
        "processor": replica.processor if replica else "",
        "running_s": round(replica.running_s, 3) if replica else 0.0,
        "waits": list(replica.waits) if replica else [],
    }
