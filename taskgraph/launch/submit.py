"""Submits a job: one transaction begins it, unless a job of that name is running."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from taskgraph.checkpoint.manifest import CheckpointName
from taskgraph.coordination.api import Coordinator, TooLarge
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import JobError, JobRunning, OutcomeUnknown
from taskgraph.launch.collect import mib
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Compare, Delete, Op, Put, Txn
from taskgraph.protocol.records import CheckpointRecord, EpochRecord, JobStatus, StatusRecord
from taskgraph.protocol.view import decode_key

__all__ = ["UNKNOWN_PAUSE_S", "UNKNOWN_TRIES", "StartPoint", "check_not_running", "submit"]

UNKNOWN_TRIES = 8
"""After this many writes of unknown outcome the command fails with the reason: an etcd whose space is used up answers
nothing else."""
UNKNOWN_PAUSE_S = 0.25


@dataclass(frozen=True, slots=True)
class StartPoint:
    """The first `epoch` of a run, and its `checkpoint`, if there is one.

    Attributes:
        refused: why newer checkpoints cannot be used, each by name.
        after: the revision of the run before when this was decided; 0: there was none. If another run came since, this
            start point is stale. None: this does not matter.
        over: the newest checkpoint of earlier series, if the run begins at epoch 0 all the same; see `begin`.
    """

    epoch: EpochRecord
    checkpoint: CheckpointRecord | None = None
    refused: tuple[str, ...] = ()
    after: int | None = None
    over: CheckpointName | None = None


async def submit(coordinator: Coordinator, spec: JobSpec, start_point: StartPoint | None = None) -> None:
    """Writes the job's first keys, and deletes those of an earlier job of that name.

    Args:
        start_point: None: at epoch 0.

    Raises:
        JobRunning: a job of that name is running.
        JobError: its arguments are too large for etcd; or another run came and went since `start_point` was decided.
        Unavailable: etcd cannot be reached.
        OutcomeUnknown: etcd does not say what becomes of its writes.
    """
    keys = Keys(spec.name)
    epoch = start_point.epoch if start_point is not None else EpochRecord(epoch=0, attempt=1, writer=spec.run)
    checkpoint: Op = Delete(keys.checkpoint)
    if start_point is not None and start_point.checkpoint is not None:
        checkpoint = Put(keys.checkpoint, start_point.checkpoint.to_bytes())
    unknown = 0
    while True:
        old_spec, old_status = await coordinator.get(keys.spec), await coordinator.get(keys.status)
        if old_spec is not None and decode_key(JobSpec.from_bytes, old_spec, keys).run == spec.run:
            return  # an earlier try whose answer was lost
        if old_status is not None and decode_key(StatusRecord.from_bytes, old_status, keys).state == JobStatus.RUNNING:
            raise JobRunning(await _running_text(coordinator, keys))
        if start_point is not None and start_point.after not in (None, old_spec.mod_revision if old_spec else 0):
            raise JobError(
                f"another run of job {spec.name!r} began and ended while its checkpoints were looked at: try again"
            )
        txn = Txn(
            compares=(
                Compare(keys.spec, old_spec.mod_revision if old_spec else 0),
                Compare(keys.status, old_status.mod_revision if old_status else 0),
            ),
            success=(
                Delete(keys.gone_nodes, prefix=True),
                Delete(keys.names),
                Delete(keys.tasks, prefix=True),
                Delete(keys.events, prefix=True),
                Delete(keys.collected),
                Delete(keys.workers),
                checkpoint,
                Put(keys.spec, spec.to_bytes()),
                Put(keys.epoch, epoch.to_bytes()),
                Put(keys.generation, spec.run.encode()),
                Put(keys.status, StatusRecord(state=JobStatus.RUNNING, writer=spec.run).to_bytes()),
            ),
        )
        try:
            if (await coordinator.txn(txn)).succeeded:
                return
        except OutcomeUnknown:  # the run id tells whether it was written
            if (unknown := unknown + 1) == UNKNOWN_TRIES:
                raise
            await asyncio.sleep(UNKNOWN_PAUSE_S)
        except TooLarge as error:
            raise JobError(
                f"job {spec.name!r} takes {mib(len(spec.to_bytes()))} with its arguments, and etcd 1.5 MiB, unless its "
                f"--max-request-bytes says otherwise: pass the name of a file that every node can read"
            ) from error


async def check_not_running(coordinator: Coordinator, keys: Keys) -> None:
    """Raises JobRunning if the job is running."""
    status = await coordinator.get(keys.status)
    if status is not None and decode_key(StatusRecord.from_bytes, status, keys).state == JobStatus.RUNNING:
        raise JobRunning(await _running_text(coordinator, keys))


async def _running_text(coordinator: Coordinator, keys: Keys) -> str:
    """Says that the job is running, and what the user can do."""
    name, pointer = keys.job, await coordinator.get(keys.checkpoint)
    if (await coordinator.list(keys.nodes)).items:
        return (
            f"a job {name!r} is running already: follow it with `taskgraph status {name} --watch`, end it with "
            f"`taskgraph shutdown {name}`, or give this one another name with --name"
        )
    none = "it has no nodes"
    started = await coordinator.get(keys.primary(0)) or await coordinator.get(keys.workers)
    if started is None:  # they load their driver, and what it imports, before
        none += " yet (or they are starting)"
    if pointer is None:
        return (
            f"a job {name!r} is running already, but {none}: start some with `taskgraph launch {name}`, end it with "
            f"`taskgraph shutdown {name}`, or give this one another name with --name"
        )
    epoch, spec = CheckpointRecord.from_bytes(pointer.value).epoch, await coordinator.get(keys.spec)
    unit = decode_key(JobSpec.from_bytes, spec, keys).unit if spec is not None else "epoch"
    return (
        f"a job {name!r} is running already, but {none}: those that you start with `taskgraph launch {name}` go on "
        f"from its checkpoint of {unit} {epoch}; or end it with `taskgraph shutdown {name}`, and resume it then"
    )
