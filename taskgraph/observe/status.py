"""The status of a node, and of its replicas, as the control service carries it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from taskgraph.errors import PeerLost, first_lines
from taskgraph.observe.queues import QueueStatus
from taskgraph.observe.usage import Usage
from taskgraph.protocol.cycles import describe_waiter
from taskgraph.protocol.messages import Encoded

__all__ = ["NoAnswer", "NodeStatus", "ReplicaStatus", "ReportRow", "TaskResult", "waits_text"]


class NoAnswer(PeerLost):
    """A node did not answer in time. It may be busy: a failover of hundreds of tasks takes seconds.

    Attributes:
        within_s: how long the caller waited.
    """

    def __init__(self, message: str, within_s: float) -> None:
        super().__init__(message)
        self.within_s = within_s


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica on a node.

    Attributes:
        role: "primary", "backup" or "setup".
        boundary: number of the committed boundary that the replica has, or None.
        processor: user code that runs, or "".
        running_s: for how long this code has run.
        waits: each thing that the replica waits for.
        in_sync: members of the in-sync set, as its primary knows; 0 on backups.
    """

    task: int
    role: str
    term: int
    boundary: int | None
    processor: str
    running_s: float
    waits: tuple[str, ...]
    in_sync: int


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node.

    Attributes:
        stamp: (attempt, epoch), read from etcd at `revision`; of a worker of an elastic job: (attempt, step at work);
            None: not known yet.
        waits: what the node itself, and the leader on it, wait for.
        queues: the queues and maps whose pieces this node deals.
    """

    node: str
    name: str
    host: str
    pid: int
    paused: bool
    draining: bool
    stamp: tuple[int, int] | None
    revision: int
    leader: bool
    replicas: tuple[ReplicaStatus, ...]
    waits: tuple[str, ...]
    usage: Usage
    queues: tuple[QueueStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportRow:
    """The numbers that one task reported in one committed epoch."""

    epoch: int
    task: int
    numbers: dict[str, float]


@dataclass(frozen=True, slots=True)
class TaskResult:
    """A task's part of the job's result, made at boundary `epoch` in `attempt`, with reports.

    Attributes:
        reports: the task's reports of the last epoch.
        log: for task 0, the reports of all tasks in earlier epochs, packed (`node/reports.py`).
        lasted_s: how long the task's node had run by then, by the clock of that node.
    """

    task: int
    epoch: int
    attempt: int
    value: Encoded | None
    reports: tuple[ReportRow, ...]
    log: tuple[bytes, ...] = ()
    lasted_s: float = 0.0


_MAX_LINES = 8
"""Lines to show."""


def waits_text(statuses: Iterable[NodeStatus], *, elastic: bool = False) -> str:
    """Says what a job that did not end in time waits for.

    Running user code comes first, since other waits may depend on it. Then come the leader's findings, or if there are
    none, the waits of the primaries.
    """
    statuses = tuple(statuses)
    replicas = [replica for status in statuses for replica in status.replicas]
    found = [line for status in statuses for line in status.waits]
    lines = [
        f"task {r.task} runs {r.processor!r} for {r.running_s:.1f} s"
        for r in replicas
        if r.processor
        and not any(line.startswith(f"task {r.task} {describe_waiter(r.processor)} is running") for line in found)
    ]
    lines += found or [f"task {r.task}: {w}" for r in replicas if r.role == "primary" for w in r.waits]
    if lines:
        return "it waits: " + "; ".join(first_lines(tuple(dict.fromkeys(lines)), _MAX_LINES))
    if not statuses:
        return "no node had registered yet"
    if paused := [status.name for status in statuses if status.paused]:
        return f"it waits: {', '.join(paused)} paused, since etcd did not renew the lease"
    if not elastic and not any(replica.role == "primary" for replica in replicas):
        return "none of its tasks had a primary"
    epochs = [status.stamp[1] for status in statuses if status.stamp is not None]
    unit = "step" if elastic else "epoch"
    return f"it was still computing, in {unit} {max(epochs)}" if epochs else "it was still computing"
