"""The transactions of elastic jobs, as data; see `taskgraph.protocol.transactions`.

A view follows exactly one other: each write compares the mod revision of the view before. The writer's own key must
exist, so a node that others have called lost proposes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from msgspec import structs

from taskgraph.protocol.elastic.succession import count_returns
from taskgraph.protocol.elastic.views import View
from taskgraph.protocol.kv import Compare, Put, Txn
from taskgraph.protocol.records import CheckpointRecord, EpochRecord, JobStatus, StatusRecord, WorkersRecord
from taskgraph.protocol.view import JobView

__all__ = ["compare_without_state", "finish", "point_to_checkpoint", "propose", "return_alone"]


def propose(job: JobView, view: View, *, node: str, node_revision: int, writer: str) -> Txn:
    """Puts the view that follows the one of `job`, or the first one."""
    record = view.record(writer)
    if job.workers is not None:
        record = structs.replace(record, returns=job.workers.record.returns, returned_to=job.workers.record.returned_to)
    return _put(job, record, node, node_revision)


def _put(job: JobView, record: WorkersRecord, node: str, node_revision: int) -> Txn:
    """Puts a view's record, fenced by the view before, the key of `node`, which writes, and the run."""
    return Txn(
        compares=(
            Compare(job.keys.workers, job.workers.mod_revision if job.workers else 0),
            Compare(job.keys.node(node), node_revision),
            Compare(job.keys.spec, job.spec_revision),
        ),
        success=(Put(job.keys.workers, record.to_bytes()),),
    )


def return_alone(
    job: JobView, view: View, gone: Iterable[str], proposer: tuple[str, int], *, sums: int, writer: str
) -> Txn:
    """Puts the first view of a lineage, since no worker of the view of `job` holds all totals.

    It compares the absence of the keys of the `gone` nodes, so none of them came back, and the checkpoint, so the new
    lineage begins from the newest one.

    Args:
        proposer: its node id, and the revision of its key.
        sums: the number of totals after which the lineage begins.

    Raises:
        LookupError: there is no view.
    """
    if job.workers is None:
        raise LookupError("there is no view")
    returns, returned_to = count_returns(job, sums)
    record = structs.replace(view.record(writer), returns=returns, returned_to=returned_to)
    txn = _put(job, record, *proposer)
    absent = tuple(Compare(job.keys.node(worker), 0) for worker in gone)
    checkpoint = Compare(job.keys.checkpoint, job.checkpoint.mod_revision if job.checkpoint else 0)
    return replace(txn, compares=(*txn.compares, *absent, checkpoint))


def compare_without_state(job: JobView) -> tuple[Compare, Compare]:
    """Returns comparisons that hold while no view follows the one of `job`, and there is no checkpoint.

    The last worker of the view may have completed a checkpoint just before its end.

    Raises:
        LookupError: there is no view.
    """
    if job.workers is None:
        raise LookupError("there is no view")
    return Compare(job.keys.workers, job.workers.mod_revision), Compare(job.keys.checkpoint, 0)


def finish(job: JobView, *, sums: int, node: str, node_revision: int, writer: str) -> Txn:
    """Ends the job as finished, once the last total is stable in the view of `job`.

    Args:
        sums: the number of totals; the job's epochs, for people.

    Raises:
        LookupError: the job does not run, or has no view.
    """
    if job.workers is None or job.status is None or job.epoch is None or not job.running:
        raise LookupError("the job does not run")
    epoch = EpochRecord(epoch=sums, attempt=job.epoch.record.attempt, writer=writer)
    return Txn(
        compares=(
            Compare(job.keys.workers, job.workers.mod_revision),
            Compare(job.keys.node(node), node_revision),
            Compare(job.keys.status, job.status.mod_revision),
        ),
        success=(
            Put(job.keys.epoch, epoch.to_bytes()),
            Put(job.keys.status, StatusRecord(state=JobStatus.FINISHED, writer=writer).to_bytes()),
        ),
    )


def point_to_checkpoint(job: JobView, record: CheckpointRecord, *, node: str, node_revision: int) -> Txn:
    """Makes a checkpoint, of the lineage of `job`'s view, the job's checkpoint.

    Raises:
        LookupError: the job does not run, or the checkpoint is not later than the current one.
    """
    if job.workers is None or not job.running:
        raise LookupError("the job does not run")
    if job.checkpoint is not None and record.epoch <= job.checkpoint.record.epoch:
        raise LookupError(f"the checkpoint of {record.epoch} sums is not later than the current one")
    return Txn(
        compares=(
            Compare(job.keys.workers, job.workers.mod_revision),
            Compare(job.keys.node(node), node_revision),
            Compare(job.keys.checkpoint, job.checkpoint.mod_revision if job.checkpoint else 0),
        ),
        success=(Put(job.keys.checkpoint, record.to_bytes()),),
    )
