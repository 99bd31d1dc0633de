"""What a job that fails says of why: the record that everybody reads in etcd."""

from __future__ import annotations

from taskgraph.errors import TaskGraphError
from taskgraph.hints import hint
from taskgraph.node.actor import UserCodeError
from taskgraph.protocol.records import State, StatusRecord

__all__ = ["failure_record"]

_MAX_REASON, _MAX_TRACEBACK = 10_000, 200_000
"""Characters of a failure's text that are kept: etcd refuses values of more than 1.5 MiB."""


def failure_record(
    error: UserCodeError | TaskGraphError, task: int | None, epoch: int | None, writer: str
) -> StatusRecord:
    """Of user code the place and the traceback; an error of ours says both itself."""
    inner: BaseException = error
    where = traceback = ""
    if isinstance(error, UserCodeError):
        inner, where, traceback = error.error, error.where, error.traceback_text
    if isinstance(inner, TaskGraphError):
        reason, traceback = str(inner), ""
    else:
        place = [f"task {task}"] if task is not None else []
        place += [f"epoch {epoch}"] if epoch is not None else []
        place += [repr(where)] if where else []
        said = hint(inner)
        reason = f"{', '.join(place)}: {type(inner).__name__}: {inner}{'; ' if said else ''}{said}"
    return StatusRecord(
        state=State.FAILED,
        reason=reason[:_MAX_REASON],
        task=task,
        epoch=epoch,
        where=where,
        traceback=traceback[-_MAX_TRACEBACK:],  # the end of it says more than its middle
        writer=writer,
    )
