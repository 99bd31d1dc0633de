"""Defines the values of a job's keys in etcd: small JSON objects that a person can read with `etcdctl get`.

A record names its writer, `node:n`. So a node recognizes its own write if the outcome was unknown.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple, Self, cast

import msgspec
from msgspec import Struct

from taskgraph.errors import DecodeError

__all__ = [
    "OUT_OF_MEMORY",
    "CheckpointRecord",
    "EpochRecord",
    "GoneRecord",
    "JobStatus",
    "MemberRecord",
    "NodeRecord",
    "PrimaryRecord",
    "Record",
    "RunningCode",
    "StatusRecord",
    "WorkersRecord",
    "name_of",
]


class Record(Struct, frozen=True, kw_only=True):
    """The value of a key. `writer` is the node and a number, `node:n`, or "launcher"."""

    writer: str = ""

    def to_bytes(self) -> bytes:
        try:
            return msgspec.json.encode(self)
        except UnicodeEncodeError:
            # Texts of exceptions may have lone surrogates, as some file names do.
            return msgspec.json.encode(_escaped(msgspec.to_builtins(self)))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads a record. Unknown fields are ignored, so that an older node reads the record of a newer one.

        Raises:
            DecodeError: a field is missing or has another type, or the data is not JSON.
        """
        try:
            return cast(Self, _decoder(cls).decode(data))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise DecodeError(f"not a {cls.__name__}: {data[:200]!r} ({error})") from error


_decoder = cache(msgspec.json.Decoder)


def _escaped(value: object) -> object:
    """Returns a copy of a value with escapes in place of half surrogate pairs in all texts."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _escaped(each) for key, each in value.items()}
    return [_escaped(each) for each in value] if isinstance(value, list | tuple) else value


class EpochRecord(Record, frozen=True, kw_only=True):
    """The value of `epoch`: the epoch at work, which is also the number of the committed boundary, and its attempt.

    Attributes:
        lineage: the attempt that began with the last roll-back, or with a resumed run; else 0. Boundaries of earlier
            attempts were undone, except `base`.
        base: the boundary at which this lineage began: that of the checkpoint, or 0.
    """

    epoch: int
    attempt: int
    lineage: int = 0
    base: int = 0


class WorkersRecord(Record, frozen=True, kw_only=True):
    """`workers`: the view of an elastic job; see `elastic.views.View`.

    Attributes:
        workers: (node, number of the view by which it entered) of each worker, the most senior one first.
        returns: the lineages in a row, this one included, that began after at most `returned_to` totals, since workers'
            processes had died.
        returned_to: the number of totals after which the first of these lineages began.
    """

    number: int
    lineage: int
    workers: tuple[tuple[str, int], ...]
    returns: int = 0
    returned_to: int = 0


class CheckpointRecord(Record, frozen=True, kw_only=True):
    """The value of `checkpoint`: the newest complete checkpoint of the current lineage.

    Attributes:
        epoch, attempt: its boundary, and the attempt that computed it.
        name: the name of its folder in the job's place for checkpoints.
        before: names of earlier complete checkpoints that are kept, newest first.
        term: the term of the leader that completed it, or that led at the roll-back to it; 0: no leader of this run.
    """

    epoch: int
    attempt: int
    name: str
    before: tuple[str, ...] = ()
    term: int = 0


class JobStatus:
    """The values of `StatusRecord.state`."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class StatusRecord(Record, frozen=True, kw_only=True):
    """The value of `status`: the state of the job. The fields after `reason` say where a failure happened."""

    state: str
    reason: str = ""
    task: int | None = None
    epoch: int | None = None
    where: str = ""
    traceback: str = ""
    piece: int | None = None
    """The piece of a map or queue whose code raised too often, and the node that tried it last."""
    node: str = ""


class NodeRecord(Record, frozen=True, kw_only=True):
    """The value of `nodes/{node}`, a member's registration. No other keys have a lease.

    Attributes:
        name: the node's name for people. The id of the node is the name and a uuid.
        run: the run id of the spec. Nodes of other runs do not count.
        host: the name of the node's host or container.
        machine: equal for all containers of a host; "": `host` is used. Placement puts replicas of a task on different
            machines if it can.
        endpoints: see `transport.api.Peer`.
        control: where the control service listens.
        devices: number of CUDA devices.
        device_ids: the ids of these devices, as in `CUDA_VISIBLE_DEVICES`.
        draining: the node gets no more tasks, hands its tasks over, and then leaves.
        token_mark: a public fingerprint of the token; "" if all nodes are in one process.
        arithmetic: what decides the last bits of results: Python, numpy, PyTorch, the processor, ...
    """

    name: str
    run: str
    host: str
    pid: int
    endpoints: tuple[str, ...]
    control: str
    fingerprint: str
    lease: int
    devices: int = 0
    device_ids: tuple[str, ...] = ()
    draining: bool = False
    token_mark: str = ""
    arithmetic: tuple[str, ...] = ()
    machine: str = ""


def name_of(node: str) -> str:
    """Returns the name of a node: its id without the uuid."""
    return node.rpartition("-")[0] or node


class RunningCode(NamedTuple):
    """User code that a process runs, or ran when it died: the hook, processor or handler, its task and epoch.

    The epoch is -1 in a replica that was never primary, as in `setup` of a backup.
    """

    where: str
    task: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.where!r} of task {self.task}"


ENDED_ITSELF: Final = "ended itself"
"""The start of the reason in the record of a node that could not continue."""
OUT_OF_MEMORY: Final = "as memory was used up"
"""The end of the reason that a launcher writes if the kernel killed a node for lack of memory."""


class GoneRecord(Record, frozen=True, kw_only=True):
    """The value of `gone/{node}`: its launcher saw the process end, others missed it for too long, or it wrote this.

    Attributes:
        running_code: the user code that was running when the process ended, if its launcher knows.
        at: the line of Python at which the process crashed (`FILE, line N`); "": unknown.
        intended: a command ended the process, so its code is not to blame.
        task, epoch: whose code met the error of a CUDA device for which the node ended; None: another reason.
    """

    reason: str
    running_code: tuple[RunningCode, ...] = ()
    at: str = ""
    intended: bool = False
    task: int | None = None
    epoch: int | None = None

    @property
    def running(self) -> tuple[str, ...]:
        """Texts that describe `running_code`, equal ones once."""
        return tuple(dict.fromkeys(map(str, self.running_code)))

    @property
    def died(self) -> bool:
        """True if the launcher saw the process die. False: the node left, ended itself, or was absent for too long."""
        return self.reason.startswith(("killed", "exited"))

    @property
    def ended_itself(self) -> bool:
        """True if the node could not continue, and ended itself."""
        return self.reason.startswith(ENDED_ITSELF)

    @property
    def out_of_memory(self) -> bool:
        """True if the kernel killed the node for lack of memory, as far as its launcher knows."""
        return OUT_OF_MEMORY in self.reason

    @property
    def how_it_ended(self) -> str:
        """The predicate after the name of the node, e.g. "was killed by SIGKILL"."""
        verb = "was " if self.reason.startswith("killed") else ""
        ran = f" while it ran {' and '.join(self.running)}" if self.running else ""
        at = f" at {self.at}" if self.at else ""
        return verb + self.reason + ran + at + (" (it was told to end)" if self.intended else "")


class PrimaryRecord(Record, frozen=True, kw_only=True):
    """The value of `tasks/{t}/primary`, without a lease, so that terms only grow.

    Attributes:
        stateful: the task has state apart from `shared`.
        failovers: counts takeovers by backups whose primary failed.
        shared: the names of its shared state, sorted (`protocol.shared`).
    """

    node: str
    term: int
    stateful: bool
    failovers: int = 0
    shared: tuple[str, ...] = ()


class MemberRecord(Record, frozen=True, kw_only=True):
    """The value of `tasks/{t}/members/{node}`: the node is, or was, in sync.

    Attributes:
        until: None: a member. Otherwise the node was evicted: it certainly has boundary `until`, and no later one.
        attempt: the attempt at the eviction. After a roll-back, the number `until` means another boundary.
    """

    until: int | None = None
    attempt: int = 0
