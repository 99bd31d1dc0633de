"""The one tree of errors.

Every error says whose fault it was (its class), what happened and where (its fields and message), and what to
do about it (the end of its message). `str(error)` is what a user reads.

    TaskGraphError
    ├── JobError            the job or the call is wrong: fix the driver, the graph, or the arguments
    │   ├── GraphError          a channel, neighbor, processor or put that does not fit the graph
    │   ├── ValueNotEncodable   a value that cannot travel
    │   ├── StateError          state changed outside a sync point, or forgotten by snapshot()
    │   ├── FingerprintMismatch a node runs another driver, or another version of it
    │   └── JobRunning          a job of that name is running already
    ├── JobFailed           the job ended without a result; carries the user's own traceback
    │   ├── JobCancelled        somebody ended it
    │   └── JobTimeout          the job did not end within timeout_s
    ├── UnknownJob          no job of that name is known
    ├── CoordinationError   etcd cannot be reached, refuses, or cannot be started
    │   ├── Unavailable         nothing was done: safe to try again
    │   ├── OutcomeUnknown      a write may or may not have happened: re-read before anything else
    │   └── LeaseGone           a put on a lease that does not exist any more: nothing was done, take a new one
    ├── TransportError      a peer cannot be reached or a session broke: safe to try again
    │   ├── PeerGone            its port refuses: the process does not exist any more
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
    "Refused",
    "StateError",
    "TaskGraphError",
    "TransportError",
    "Unavailable",
    "UnknownJob",
    "ValueNotEncodable",
]


_name_of: Final = type.__dict__["__name__"].__get__


def class_name(kind: type) -> str:
    """What a class statement called it: no code of the user's is asked."""
    name: str = _name_of(kind)
    return name


def said(error: BaseException) -> str:
    """What a user's exception says, also where its `__str__`, which is code of theirs, fails."""
    try:
        return str(error)
    except BaseException as failed:  # whatever it is, it is not what we were asked to tell of
        return f"(its __str__ raises {kind_of(failed)})"


def kind_of(error: BaseException) -> str:
    """The name of its class, whatever a metaclass of the user's says of it."""
    return class_name(type(error))


def worded(error: BaseException) -> str:
    """The same behind its type: `ValueError: what it says`."""
    text = said(error)
    return f"{kind_of(error)}: {text}" if text else kind_of(error)


def first_of(lines: Sequence[str], most: int) -> list[str]:
    """So many of them, and a last one that counts the rest: of a thousand tasks each may have one."""
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


def named(names: Sequence[str], most: int) -> str:
    """So many of them in one text, and how many more there are: `a, b and 3 more`."""
    return " ".join([", ".join(names[:most]), *first_of(names, most)[most:]])


USED_UP: Final = (
    "a limit of this process (`ulimit -u`, `-v`, `-d`) or of its container (processes, memory) is used up; raise it"
)
"""Where it is not told which of them."""


def no_thread(error: BaseException) -> str:
    """What to say where the system lets a process start no thread; "" where that is not the error."""
    if not isinstance(error, RuntimeError) or said(error) != "can't start new thread":
        return ""
    return f"can't start new thread: {USED_UP}"


def no_process(error: OSError) -> str:
    """What to say where the system lets no process be started; "" where that is not the error."""
    if error.errno not in (errno.EAGAIN, errno.ENOMEM) or error.filename is not None:
        return ""
    return f"no process can be started ({error.strerror}): {USED_UP}"


class TaskGraphError(Exception):
    """The root of everything this package raises on purpose."""


class JobError(TaskGraphError):
    """The job, its graph, or a call is wrong. Trying again without a change gives the same error.

    Raised within a job, it fails the job: who runs that gets a JobFailed, with its text.
    """


class GraphError(JobError):
    """A channel, neighbor, processor or put that does not fit the epoch's graph."""


class ValueNotEncodable(JobError):
    """A value of a type that cannot travel over a channel or be kept in a snapshot."""


class StateError(JobError):
    """State that changed outside a sync point, or that snapshot() forgot."""


class FingerprintMismatch(JobError):
    """A node whose driver is not the one the job was submitted with."""


class JobRunning(JobError):
    """A job of that name is running already."""


class UnknownJob(TaskGraphError):
    """No job of that name is known at that etcd or on this host."""


class JobFailed(TaskGraphError):
    """The job ended without a result.

    Attributes:
        job: the job's name.
        task: the task whose code raised, or None where no single task is to blame.
        epoch: the epoch it happened in, or None before the first.
        where: the processor, handler or hook, e.g. `"update"`, or "".
        traceback_text: the user code's own traceback as text, or "".
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


class JobCancelled(JobFailed):
    """Somebody ended the job before it was finished: by `taskgraph shutdown`, or with Ctrl-C at its launcher."""


class JobTimeout(JobFailed):
    """The job did not end within `timeout_s`; or, in a test, a call of its code did not within `stuck_s`."""


class CoordinationError(TaskGraphError):
    """etcd cannot be reached, refuses, or cannot be started."""


class Unavailable(CoordinationError):
    """The coordinator did not execute the call: it is safe to try again."""


class OutcomeUnknown(CoordinationError):
    """A write was sent and no answer came: re-read linearizably before anything else happens."""


class LeaseGone(CoordinationError):
    """A put named a lease that does not exist (any more). Nothing was done."""


class TransportError(TaskGraphError):
    """A message could not be delivered or answered."""


class PeerGone(TransportError):
    """The peer's port refuses connections: its process does not exist any more."""


class PeerLost(TransportError):
    """The connection to the peer broke, could not be made, or no answer came in time.

    Attributes:
        connected: where a peer was dialled, whether a connection was made, so that what failed came after it.
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
    """A checkpoint, or a file of one, that is torn, corrupt, foreign (another job's) or missing. Names the file."""


class DecodeError(TaskGraphError):
    """Bytes that are not a value, a frame or a record of ours."""
