"""What a node answers to tools and launchers: its status, and after the last commit its tasks' results."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from taskgraph.graph.values import decode
from taskgraph.node.epochs.dealing import Dealers, queue_statuses
from taskgraph.observe.status import NodeStatus, ReplicaStatus, ReportRow, TaskResult
from taskgraph.observe.usage import Usage

if TYPE_CHECKING:
    from taskgraph.coordination.viewkeeper import ViewKeeper
    from taskgraph.node.core import NodeCore
    from taskgraph.node.primary.primary import Primary
    from taskgraph.node.replica import Replica
    from taskgraph.node.roles import Roles
    from taskgraph.protocol.view import JobView

__all__ = ["node_status", "task_results"]


def node_status(node: NodeCore, roles: Roles, waits: Iterable[str]) -> NodeStatus:
    """Returns a node's status: what runs here, and what it waits for.

    Args:
        waits: what the node waits for apart from its tasks.
    """
    view = node.keeper.view
    return NodeStatus(
        node=node.id,
        name=node.name,
        host=node.host,
        pid=os.getpid(),
        paused=node.paused,
        draining=node.draining,
        stamp=(view.stamp.attempt, view.stamp.epoch) if view.stamp else None,
        revision=view.revision,
        leader=roles.leader is not None,
        replicas=tuple(_replica_status(node, r, roles.primaries.get(t)) for t, r in sorted(roles.replicas.items())),
        waits=tuple(waits),
        usage=Usage.now(),
        queues=tuple(
            status
            for _, primary in sorted(roles.primaries.items())
            if hasattr(primary.replica, "user_task")
            for status in queue_statuses(primary.replica, _dealers(primary), node.now())
        ),
    )


def _dealers(primary: Primary) -> Dealers | None:
    """Returns the dealers of the epoch at work; None: the task deals no pieces, or the epoch is closed, and the queue's
    ledger counts its pieces.
    """
    attempt = primary.attempt
    return None if attempt is None or attempt.activity.closed else attempt.dealers


def _replica_status(node: NodeCore, replica: Replica, primary: Primary | None) -> ReplicaStatus:
    view = node.keeper.view
    late = replica.late_names
    running = [call for call in replica.running if call.where not in late]
    committed = replica.boundaries.committed
    waits: list[str] = []
    if primary is not None:
        if primary.waiting_for:
            waits.append(primary.waiting_for)
        # Of the earliest waiting epoch: later epochs may wait for that one.
        open_waits = (attempt.waits() for attempt in primary.attempts if not attempt.cancelled)
        waits += [
            f"{w.processor} waits for {w.name!r} from task {w.task}"
            for w in next(filter(None, open_waits), ())
            if w.kind in ("item", "reply")
        ]
    waits += [f"{name!r} still runs; the epoch went on without it" for name in sorted(late)]
    return ReplicaStatus(
        task=replica.task,
        role="primary" if primary else ("backup" if replica.ready else "setup"),
        term=primary.term if primary else view.term(replica.task),
        boundary=committed.stamp.epoch if committed else None,
        processor=running[-1].where if running else "",
        running_s=node.now() - running[-1].since if running else 0.0,
        waits=tuple(dict.fromkeys(waits)),  # a handler may have many equal waits
        in_sync=primary.backups.in_sync_count if primary else 0,
    )


async def task_results(keeper: ViewKeeper, primaries: Mapping[int, Primary]) -> list[TaskResult]:
    """Waits until the primaries here have computed their results, after the last commit; returns them."""

    def all_final(view: JobView) -> bool:
        return not view.running and all(primary.final is not None for primary in primaries.values())

    while not all_final(keeper.view):  # this node may have taken over another task since it was woken
        await keeper.wait_until(all_final)
    found = []
    for task, primary in sorted(primaries.items()):
        assert primary.final is not None
        stamp, value = primary.final
        committed = primary.replica.boundaries.committed
        assert committed is not None
        last = decode(committed.value)["numbers"]
        rows = (ReportRow(stamp.epoch - 1, task, last),) if last else ()
        log = tuple(primary.replica.log.packed()) if task == 0 else ()
        found.append(TaskResult(task, stamp.epoch, stamp.attempt, value, rows, log, primary.lasted_s))
    return found
