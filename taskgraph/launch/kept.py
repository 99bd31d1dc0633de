"""The one form in which a job that has ended is kept: in etcd, and on the hosts of its launchers."""

from __future__ import annotations

import json
from typing import Any

from taskgraph.errors import JobCancelled, JobFailed, PieceFailed, UnknownJob
from taskgraph.observe.events import Event, readable_events
from taskgraph.protocol.kv import KeyValue
from taskgraph.protocol.records import CheckpointRecord, JobStatus, Record, StatusRecord
from taskgraph.protocol.view import Versioned

__all__ = ["KeptJob", "collected_record", "job_failed", "lost_text", "resume_hint", "status_of"]


class KeptJob(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What is kept of a job that has ended. In etcd, `collected` has its `result`, `not_kept` and `writer`.

    Attributes:
        writer: the node that gave up results that were not collected; "": no node did.
        run: the id of its run; "": not known.
        status: how it ended; None: unknown, because its keys were deleted from etcd.
        result: as JSON; "": not kept.
        not_kept: why the result, or a part of it, is not kept; "": all of it is, or the reason is unknown.
        event_lines: its events as JSON, the oldest first.
        elastic: it was an elastic job.
    """

    run: str = ""
    status: StatusRecord | None = None
    result: str = ""
    not_kept: str = ""
    event_lines: tuple[str, ...] = ()
    elastic: bool = False

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(readable_events(line.encode() for line in self.event_lines))

    @property
    def state(self) -> str:
        """How the job ended; "": unknown."""
        return self.status.state if self.status is not None else ""

    @property
    def parsed_result(self) -> dict[str, Any]:
        """The kept result as a dict; `left_out` in it says which part is missing, if one is."""
        found: dict[str, Any] = json.loads(self.result)
        return {**found, "left_out": self.not_kept} if self.not_kept else found

    def require_result(self, name: str) -> dict[str, Any]:
        """Returns the kept result, parsed.

        Args:
            name: the job's name, for errors.

        Raises:
            UnknownJob: the job finished, and its values are not kept.
            JobFailed: the job ended otherwise, or has not finished.
        """
        if self.result:
            return self.parsed_result
        if self.state == JobStatus.FINISHED:  # the launcher of another host may have collected them
            why = self.not_kept or "the process that collected them has them, if one did"
            raise UnknownJob(f"the job finished, but its values are not kept: {why}")
        raise job_failed(name, self.status or StatusRecord(state=JobStatus.CANCELLED))


def collected_record(collected: KeyValue | None) -> KeptJob:
    """Reads the value of etcd's key `collected`; None: returns a record that says that nothing was collected."""
    if collected is None:
        why = "they have not been collected (`taskgraph result` does that, while the job's nodes are there)"
        return KeptJob(not_kept=why)
    return KeptJob.from_bytes(collected.value)


def job_failed(name: str, status: StatusRecord) -> JobFailed:
    """Makes the error for a job that did not finish."""
    if status.piece is not None:
        failed = PieceFailed(status.reason, piece=status.piece, node=status.node, traceback=status.traceback, job=name)
        failed.task, failed.epoch, failed.where = status.task, status.epoch, status.where
        return failed
    kind = JobCancelled if status.state == JobStatus.CANCELLED else JobFailed
    return kind(
        status.reason or f"job {name!r} was {status.state}",
        job=name,
        task=status.task,
        epoch=status.epoch,
        where=status.where,
        traceback_text=status.traceback,
    )


def status_of(error: JobFailed) -> StatusRecord:
    """Makes the status of a job from its error: the reverse of `job_failed`."""
    return StatusRecord(
        state=JobStatus.CANCELLED if isinstance(error, JobCancelled) else JobStatus.FAILED,
        reason=str(error.args[0]),
        task=error.task,
        epoch=error.epoch,
        where=error.where,
        traceback=error.traceback_text,
        piece=error.piece if isinstance(error, PieceFailed) else None,
        node=error.node if isinstance(error, PieceFailed) else "",
    )


def resume_hint(checkpoint: CheckpointRecord, unit: str) -> str:
    """Returns how a job that did not finish goes on from its checkpoint.

    Args:
        unit: `JobSpec.unit`.
    """
    return (
        f"its checkpoint of {unit} {checkpoint.epoch} is complete: go on from there with --resume (--resume-changed if "
        f"you change the driver)"
    )


def lost_text(name: str, checkpoint: Versioned[CheckpointRecord] | None, unit: str) -> str:
    """Returns why the values of a finished job are lost, and how to compute them again from its checkpoint."""
    why = "its last node left before anyone collected them"
    if checkpoint is None:
        return why
    return f"{why}; {resume_hint(checkpoint.record, unit)}, or with new nodes for this run (`taskgraph launch {name}`)"
