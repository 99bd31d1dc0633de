"""The text of a job's failure: the record in etcd, and how nodes died."""

from __future__ import annotations

from collections.abc import Mapping

from taskgraph.driver.loading import place_of
from taskgraph.errors import PieceFailed, TaskGraphError, error_text
from taskgraph.hints import hint
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.protocol.fatal import DeadlyCode
from taskgraph.protocol.records import GoneRecord, JobStatus, StatusRecord
from taskgraph.protocol.setups import NODE_DEPENDENT_CODE

__all__ = ["culprit_text", "deaths_text", "failure_record", "fatal_record", "memory_text"]

_MAX_REASON, _MAX_TRACEBACK = 10_000, 200_000
"""Bytes of a failure's text that are kept. A byte may take six in JSON; etcd refuses values of more than 1.5 MiB."""


def failure_record(
    error: UserCodeError | TaskGraphError,
    task: int | None,
    epoch: int | None,
    writer: str,
    also: str = "",
    *,
    node: str = "",
) -> StatusRecord:
    """Makes the record of a job that failed with `error`: place and traceback are those of user code.

    Args:
        also: text to add after the error; "": a hint about the error, if there is one.
        node: the node's name and place, for code that depends on what is there.
    """
    inner: BaseException = error
    where = traceback = ""
    if isinstance(error, UserCodeError):
        inner, where, traceback = error.error, error.where, error.traceback_text
        epoch = epoch if error.epoch is None else error.epoch
    piece, of_piece = None, ""
    if isinstance(inner, PieceFailed):
        reason, traceback, piece, of_piece = str(inner.args[0]), inner.traceback, inner.piece, inner.node
    elif isinstance(inner, TaskGraphError):
        reason, traceback = f"{inner}{place_of(inner)}", ""
    else:
        place = [f"task {task}"] if task is not None else []
        place += [f"epoch {epoch}"] if epoch is not None else []
        place += [f"{where!r}{f' on {node}' if node and where in NODE_DEPENDENT_CODE else ''}"] if where else []
        more = also or hint(inner)
        reason = f"{', '.join(place)}: {error_text(inner)}{'; ' if more else ''}{more}"
    return StatusRecord(
        state=JobStatus.FAILED,
        reason=_readable(reason)[:_MAX_REASON].decode(errors="ignore"),
        task=task,
        epoch=epoch,
        where=where,
        traceback=_readable(traceback)[-_MAX_TRACEBACK:].decode(errors="ignore"),  # the end says more than the middle
        piece=piece,
        node=of_piece,
        writer=writer,
    )


def _readable(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # lone surrogates can be neither printed nor sent


def fatal_record(found: DeadlyCode, names: Mapping[str, GoneRecord], limit: int, writer: str) -> StatusRecord:
    """Makes the record of a job that failed since one task's code ended the processes of the nodes `names`."""
    wheres = {ran.where for death in names.values() for ran in death.running_code if found.includes(ran)}
    reason = (
        f"task {found.task}, epoch {found.epoch}, {' or '.join(map(repr, sorted(wheres)))}: {len(names)} nodes died "
        f"while it ran (fatal_deaths={limit}), and the next would, too: {deaths_text(names)}. Look at that code; where "
        f"it is not to blame, a larger Settings(fatal_deaths=...) lets more nodes try"
    )
    return StatusRecord(
        state=JobStatus.FAILED,
        reason=reason[:_MAX_REASON],
        task=found.task,
        epoch=found.epoch,
        where=wheres.pop() if len(wheres) == 1 else "",
        writer=writer,
    )


def deaths_text(deaths: Mapping[str, GoneRecord]) -> str:
    """Returns text on how nodes died, and whether the same code may have killed them all; "" without nodes."""
    text = "; ".join(f"{name} {record.how_it_ended}" for name, record in deaths.items())
    return ". ".join(filter(None, (text, culprit_text(deaths), memory_text(deaths))))


def memory_text(deaths: Mapping[str, GoneRecord]) -> str:
    """Returns advice if the kernel killed nodes for lack of memory; "" otherwise."""
    if not any(record.out_of_memory for record in deaths.values()):
        return ""
    return (
        "Allow more memory where they ran (the limit of the container, the pod, the batch job or the service), or "
        "start fewer nodes there: more backups would take more"
    )


def culprit_text(deaths: Mapping[str, GoneRecord]) -> str:
    """Names the code that each of several nodes was running when it died, as takeovers run it again; "": none."""
    common = set.intersection(*(set(record.running) for record in deaths.values())) if len(deaths) > 1 else set()
    if not common:
        return ""
    if all(record.out_of_memory for record in deaths.values()):
        return f"{' and '.join(sorted(common))} ran each time: it may be what takes the memory"
    if all(record.ended_itself for record in deaths.values()):
        return f"{' and '.join(sorted(common))} ran each time, and each node said why it could not go on"
    may = (
        "unless somebody killed them, it may take more memory than there is: see the kernel's log (dmesg)"
        if all("SIGKILL" in record.reason for record in deaths.values())
        else "it may have ended the process itself, by os._exit or a crash in an extension"
    )
    return f"{' and '.join(sorted(common))} ran each time: {may}"
