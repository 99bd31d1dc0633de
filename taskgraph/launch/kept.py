"""Reads the remains of a job that has ended: on this host, and in etcd."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from taskgraph.coordination.api import Coordinator
from taskgraph.errors import DecodeError, JobCancelled, JobFailed, UnknownJob
from taskgraph.observe.events import Event, readable_events
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import KeyValue
from taskgraph.protocol.records import CheckpointRecord, State, StatusRecord
from taskgraph.protocol.view import Versioned

__all__ = [
    "KeptJob",
    "job_failed",
    "kept_in_etcd",
    "kept_record",
    "lost_text",
    "status_of",
    "way_on",
    "why_given_up",
    "why_not_kept",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptJob:
    """A job that has ended.

    Attributes:
        run: the id of its run; "": not known.
        status: how it ended; None: unknown, because its keys were deleted from etcd.
        result: parsed from JSON; None: not kept.
        not_kept: why the result is not kept; "": unknown.
        events: the oldest first.
    """

    run: str = ""
    status: StatusRecord | None = None
    result: dict[str, Any] | None = None
    not_kept: str = ""
    events: tuple[Event, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> KeptJob:
        """Reads what a host keeps: a `kept_record` with a result. Unknown fields are ignored.

        Raises:
            DecodeError: the text is no such record.
        """
        try:
            raw = json.loads(text)
            status, events = raw["status"], [json.dumps(event).encode() for event in raw.get("events", ())]
            return cls(
                run=raw.get("run", ""),
                status=StatusRecord.from_bytes(json.dumps(status).encode()) if status != {} else None,
                result=raw["result"],
                not_kept=raw.get("not_kept", ""),
                events=tuple(readable_events(events)),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DecodeError(f"not what is kept of a job: {text[:200]!r} ({error})") from error

    @property
    def state(self) -> str:
        """Says how it ended; "": unknown."""
        return self.status.state if self.status is not None else ""

    def result_of(self, name: str) -> dict[str, Any]:
        """Returns the result.

        Args:
            name: of the job, for errors.

        Raises:
            UnknownJob: the job finished, and its values are not kept.
            JobFailed: the job ended otherwise, or has not finished.
        """
        if self.result is not None:
            return self.result
        if self.state == State.FINISHED:  # the launcher of another host may have collected them
            why = self.not_kept or "the process that collected them has them, if one did"
            raise UnknownJob(f"the job finished, but its values are not kept: {why}")
        raise job_failed(name, self.status or StatusRecord(state=State.CANCELLED))


def kept_record(run: str, status: StatusRecord | None, not_kept: str, events: Iterable[Event]) -> dict[str, Any]:
    """Makes the record that a host keeps of a job beside its result.

    Args:
        not_kept: why the result is not kept; "": it is.
    """
    return {
        "run": run,
        "status": json.loads(status.to_bytes()) if status else {},
        "not_kept": not_kept,
        "events": [json.loads(event.to_bytes()) for event in events],
    }


async def kept_in_etcd(coordinator: Coordinator, name: str) -> KeptJob | None:
    """Returns what etcd has of a job, without its events, also while it runs; None: there is no such job."""
    keys = Keys(name)
    status, result = await coordinator.get(keys.status), await coordinator.get(keys.result)
    collected = await coordinator.get(keys.collected)
    if status is None:
        return None
    return KeptJob(
        status=StatusRecord.from_bytes(status.value),
        result=json.loads(result.value) if result is not None else None,
        not_kept=why_not_kept(collected),
    )


def why_not_kept(collected: KeyValue | None) -> str:
    """Says why etcd has no values of a job; "": unknown."""
    if collected is None:
        return "they have not been collected (`taskgraph result` does that, while the job's nodes are there)"
    return str(json.loads(collected.value).get("not_kept", ""))


def why_given_up(collected: KeyValue | None) -> str:
    """Says why nodes gave up values that were not collected; "": they did not."""
    if collected is None or "writer" not in (said := json.loads(collected.value)):  # only nodes write that
        return ""
    return str(said["not_kept"])


def job_failed(name: str, status: StatusRecord) -> JobFailed:
    """Makes the error for a job that did not finish."""
    kind = JobCancelled if status.state == State.CANCELLED else JobFailed
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
        state=State.CANCELLED if isinstance(error, JobCancelled) else State.FAILED,
        reason=str(error.args[0]),
        task=error.task,
        epoch=error.epoch,
        where=error.where,
        traceback=error.traceback_text,
    )


def way_on(checkpoint: CheckpointRecord) -> str:
    """Returns how a job that did not finish goes on from its checkpoint."""
    return (
        f"its checkpoint of epoch {checkpoint.epoch} is complete: go on from there with --resume (--resume-changed if "
        f"you change the driver)"
    )


def lost_text(name: str, checkpoint: Versioned[CheckpointRecord] | None) -> str:
    """Returns why the values of a finished job are lost, and how to compute them again from its checkpoint."""
    why = "its last node left before anyone collected them"
    if checkpoint is None:
        return why
    return f"{why}; {way_on(checkpoint.record)}, or with new nodes for this run (`taskgraph launch {name}`)"
