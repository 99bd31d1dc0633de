"""Deletes what etcd keeps of a job that has ended.

A job that ends leaves its keys for `status`, `events` and `result`. The next job of its name deletes them; without
one they would stay forever.
"""

from __future__ import annotations

import asyncio

from taskgraph.coordination.api import Coordinator
from taskgraph.errors import JobError, OutcomeUnknown, UnknownJob
from taskgraph.launch.submit import UNKNOWN_PAUSE_S, UNKNOWN_TRIES
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Compare, Delete, Txn
from taskgraph.protocol.records import JobStatus, StatusRecord
from taskgraph.protocol.view import decode_key

__all__ = ["forget"]


async def forget(coordinator: Coordinator, name: str) -> int:
    """Deletes all keys of a job that has ended, in one transaction; returns their number.

    If another run of this name is submitted meanwhile, nothing of it is deleted: the keys are read again.

    Raises:
        UnknownJob: there are no keys.
        JobError: the job has not ended, or has nodes, which may keep its results.
        Unavailable: etcd cannot be reached.
        OutcomeUnknown: etcd does not say what becomes of its writes.
    """
    keys, unknown, found = Keys(name), 0, 0
    while True:
        items = {kv.key: kv for kv in (await coordinator.list(keys.root)).items}
        if not items and unknown:
            return found  # an earlier try, whose answer was lost, deleted them
        if not items:
            raise UnknownJob(f"nothing is kept in etcd of a job {name!r}")
        found, status = len(items), items.get(keys.status)
        state = decode_key(StatusRecord.from_bytes, status, keys).state if status is not None else ""
        if state == JobStatus.RUNNING:
            raise JobError(f"job {name!r} is running: end it first, with `taskgraph shutdown {name}`")
        if any(key.startswith(keys.nodes) for key in items):
            if state == JobStatus.FINISHED and keys.collected not in items:
                raise JobError(
                    f"job {name!r} has finished, and its nodes keep its results, which were not collected: take them "
                    f"first, with `taskgraph result {name}`"
                )
            raise JobError(f"job {name!r} has ended, and its nodes are about to leave: try again in a moment")
        as_read = tuple(
            Compare(key, items[key].mod_revision if key in items else 0) for key in (keys.spec, keys.status)
        )
        try:
            if (await coordinator.txn(Txn(as_read, (Delete(keys.root, prefix=True),)))).succeeded:
                return found
        except OutcomeUnknown:  # the next round shows it
            if (unknown := unknown + 1) == UNKNOWN_TRIES:
                raise
            await asyncio.sleep(UNKNOWN_PAUSE_S)
