"""The tree of errors.

The class of an error says whose fault it is, its fields and message what happened and where, and the end of its
message what to do. Users read `str(error)`.

    TaskGraphError
    ├── JobError            the job or the call is wrong: fix the driver, the graph, or the arguments
    │   ├── GraphError          a channel, neighbor, processor or put that does not fit the graph
    │   ├── ValueNotEncodable   a value that cannot travel
    │   ├── StateError          state changed outside a sync point, forgotten by snapshot(), or unlike that of others
    │   ├── StepError           a step of an elastic job whose parts, rounds or calls do not fit
    │   ├── TableError          ids, gradients or a call that do not fit a table
    │   ├── ViewChanged         an operation of `run.group()` is complete on no worker: try again
    │   ├── FingerprintMismatch a node runs another driver, or another version of it
    │   └── JobRunning          a job with that name is running already
    ├── JobFailed           the job ended without a result; has the traceback of the user's code
    │   ├── PieceFailed         user code raised too often in a piece of a map or a queue
    │   ├── JobCancelled        a user ended the job
    │   └── JobTimeout          the job did not end within timeout_s
    ├── UnknownJob          no job with that name is known
    ├── CoordinationError   etcd cannot be reached, refuses, or cannot be started
    │   ├── Unavailable         nothing was done: safe to try again
    │   ├── OutcomeUnknown      a write may or may not have happened: re-read before anything else
    │   └── LeaseGone           a put on a lease that no longer exists: nothing was done, take a new one
    ├── TransportError      a peer cannot be reached or a session broke: safe to try again
    │   ├── PeerGone            its port refuses connections: the process has ended
    │   ├── PeerLost            the connection broke, or no answer came in time
    │   └── Refused             the peer answered, and said no (with a reason)
    ├── CheckpointError     a checkpoint that is torn, corrupt, foreign or missing
    └── DecodeError         bytes that are not a value, a frame or a record of ours
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final

__all__ = [
    "CheckpointError",
    "CoordinationError",
    "DecodeError",
    "FingerprintMismatch",
    "GraphError",
    "JobCancelled",
    "JobError",
    "JobFailed",
    "JobRunning",
    "JobTimeout",
    "LeaseGone",
    "OutcomeUnknown",
    "PeerGone",
    "PeerLost",
    "PieceFailed",
    "Refused",
    "StateError",
    "StepError",
    "TableError",
    "TaskGraphError",
    "TransportError",
    "Unavailable",
    "UnknownJob",
    "ValueNotEncodable",
    "ViewChanged",
]


_name_of: Final = type.__dict__["__name__"].__get__


def class_name(kind: type) -> str:
    """Returns the name of a class, without running code of its metaclass."""
    name: str = _name_of(kind)
    return name


def message_text(error: BaseException) -> str:
    """Returns the text of a user's exception, also if its `__str__` fails."""
    try:
        return str(error)
    except BaseException as failed:  # less important than the error itself
        return f"(its __str__ raises {exception_name(failed)})"


def exception_name(error: BaseException) -> str:
    """Returns the name of an exception's class."""
    return class_name(type(error))


def error_text(error: BaseException) -> str:
    """Formats a user's exception with its class: `ValueError: no such key`."""
    text = message_text(error)
    return f"{exception_name(error)}: {text}" if text else exception_name(error)


def first_lines(lines: Sequence[str], most: int) -> list[str]:
    """Returns the first lines, and a last line that counts the others."""
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


def first_names(names: Sequence[str], most: int) -> str:
    """Formats the first names, and a count of the others: `a, b and 3 more`."""
    return " ".join([", ".join(names[:most]), *first_lines(names, most)[most:]])


USED_UP: Final = (
    "a limit of this process (`ulimit -u`, `-v`, `-d`) or of its container (processes, memory) is used up; raise it"
)
"""The advice if the system's error does not say which limit was reached."""


def no_thread_text(error: BaseException) -> str:
    """Returns the message for an error by which the system refused a thread; "" for any other error."""
    if not isinstance(error, RuntimeError) or message_text(error) != "can't start new thread":
        return ""
    return f"can't start new thread: {USED_UP}"


def no_process_text(error: OSError) -> str:
    """Returns the message for an error by which the system refused a process; "" for any other error."""
    if error.errno not in (errno.EAGAIN, errno.ENOMEM) or error.filename is not None:
        return ""
    return f"no process can be started ({error.strerror}): {USED_UP}"


class TaskGraphError(Exception):
    """The root of all errors that this package raises on purpose."""


class JobError(TaskGraphError):
    """The job, its graph, or a call is wrong. Trying again without a change gives the same error.

    If it is raised within a job, the job fails: `run` raises JobFailed with its text.
    """


class GraphError(JobError):
    """A channel, neighbor, processor or put that does not fit the epoch's graph."""


class ValueNotEncodable(JobError):
    """A value of a type that cannot travel over a channel or be kept in a snapshot."""


class StateError(JobError):
    """State that changed outside a sync point, that snapshot() forgot, or that is not equal where it must be."""


class StepError(JobError):
    """A step of an elastic job whose parts, rounds or calls do not fit: to each other, or on the workers."""


class TableError(JobError):
    """A table, or a pull or push, that does not fit: its ids, shapes or dtypes, or where it is called."""


class ViewChanged(JobError):
    """An operation of a group of workers (`run.group`) is complete on no worker, since workers left or entered.

    All workers raise it alike. What each of them contributed is still its own: call `run.group()` and try again.

    Attributes:
        left: the names of members that are gone.
        entered: the names of workers that are new.
    """

    def __init__(self, left: tuple[str, ...] = (), entered: tuple[str, ...] = ()) -> None:
        self.left = left
        self.entered = entered
        changes = [f"{', '.join(names)} {what}" for names, what in ((left, "left"), (entered, "entered")) if names]
        super().__init__(
            f"{' and '.join(changes) or 'the view changed'}: this operation is complete on no worker. Catch "
            f"tg.ViewChanged, call run.group(), and try again"
        )


class FingerprintMismatch(JobError):
    """A node's driver differs from the one that the job was submitted with."""


class JobRunning(JobError):
    """A job with that name is running already."""


class UnknownJob(TaskGraphError):
    """No job with that name is known at that etcd, or on this host."""


class JobFailed(TaskGraphError):
    """The job ended without a result.

    Attributes:
        job: the job's name.
        task: the task whose code raised; None: no single task is to blame.
        epoch: the epoch of the failure; None: before the first epoch.
        where: the processor, handler or hook, e.g. `"update"`, or "".
        traceback_text: the traceback of the user's code, or "".
    """

    def __init__(
        self,
        message: str,
        *,
        job: str = "",
        task: int | None = None,
        epoch: int | None = None,
        where: str = "",
        traceback_text: str = "",
    ) -> None:
        super().__init__(message)
        self.job = job
        self.task = task
        self.epoch = epoch
        self.where = where
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n\n{self.traceback_text.rstrip()}" if self.traceback_text else text


class PieceFailed(JobFailed):
    """User code raised in a piece of a map or a queue, as often as its `attempts` allow.

    Attributes:
        piece: the number of the piece, from 0.
        node: the name of the node that tried it last.
        traceback: of the last error, as a text.
    """

    def __init__(self, message: str, *, piece: int, node: str, traceback: str, job: str = "") -> None:
        super().__init__(message, job=job, traceback_text=traceback)
        self.piece = piece
        self.node = node
        self.traceback = traceback


class JobCancelled(JobFailed):
    """A user ended the job before it was finished: with `taskgraph shutdown`, or with Ctrl-C at its launcher."""


class JobTimeout(JobFailed):
    """The job did not end within `timeout_s`; or, in a test, a call of its code did not return within `stuck_s`."""


class CoordinationError(TaskGraphError):
    """etcd cannot be reached, refuses, or cannot be started."""


class Unavailable(CoordinationError):
    """The coordinator did not execute the call: it is safe to try again."""


class OutcomeUnknown(CoordinationError):
    """A write was sent and no answer came: read again, linearizably, before doing anything else."""


class LeaseGone(CoordinationError):
    """A put named a lease that does not exist. Nothing was done."""


class TransportError(TaskGraphError):
    """A message could not be delivered or answered."""


class PeerGone(TransportError):
    """The peer's port refuses connections: its process has ended."""


class PeerLost(TransportError):
    """The connection to the peer broke, could not be made, or no answer came in time.

    Attributes:
        connected: a connection was made, and failed later.
    """

    def __init__(self, message: str = "", *, connected: bool = False) -> None:
        super().__init__(message)
        self.connected = connected


class Refused(TransportError):
    """The peer answered and said no.

    Attributes:
        reason: one of the constants in `taskgraph.protocol.messages.Reason`.
    """

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class CheckpointError(TaskGraphError):
    """A checkpoint, or one of its files, is torn, corrupt, another job's, or missing. The message names the file."""


class DecodeError(TaskGraphError):
    """Bytes that are not a value, a frame or a record of ours."""
