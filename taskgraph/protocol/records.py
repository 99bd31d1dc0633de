"""The values of the keys of a job: small JSON objects that a person can read with `etcdctl get`.

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
    "MemberRecord",
    "NodeRecord",
    "PrimaryRecord",
    "RanCode",
    "Record",
    "State",
    "StatusRecord",
    "name_of",
]


class Record(Struct, frozen=True, kw_only=True):
    """The value of a key."""

    writer: str = ""

    def to_bytes(self) -> bytes:
        try:
            return msgspec.json.encode(self)
        except UnicodeEncodeError:
            # Texts of exceptions may hold half a surrogate pair, as some file names do.
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
    """Replaces half surrogate pairs in all texts of a value by their escapes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _escaped(each) for key, each in value.items()}
    return [_escaped(each) for each in value] if isinstance(value, list | tuple) else value


class EpochRecord(Record, frozen=True, kw_only=True):
    """`epoch`: the number of the epoch at work, which is also the committed boundary, and the attempt.

    Attributes:
        lineage: the attempt that began with the last roll-back, or with a resumed run; else 0. Boundaries of earlier
            attempts were undone, except `base`.
        base: the boundary at which this lineage began: of the checkpoint, or 0.
    """

    epoch: int
    attempt: int
    lineage: int = 0
    base: int = 0


class CheckpointRecord(Record, frozen=True, kw_only=True):
    """`checkpoint`: the newest complete checkpoint of the current lineage.

    Attributes:
        epoch, attempt: its boundary, and the attempt that made it.
        name: of its folder in the job's place.
        before: names of earlier complete checkpoints that are kept, newest first.
        term: of the leader that completed it, or that led when the job went back to it; 0: none of this run.
    """

    epoch: int
    attempt: int
    name: str
    before: tuple[str, ...] = ()
    term: int = 0


class State:
    """`status.state`."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class StatusRecord(Record, frozen=True, kw_only=True):
    """`status`: the state of the job. The fields after `reason` say where a failure happened."""

    state: str
    reason: str = ""
    task: int | None = None
    epoch: int | None = None
    where: str = ""
    traceback: str = ""


class NodeRecord(Record, frozen=True, kw_only=True):
    """`nodes/{node}`, the only leased key.

    Attributes:
        name: its name for people. The id of the node is the name and a uuid.
        run: the run id of the spec. Nodes of other runs do not count.
        host: the name of its host or container.
        machine: equal for all containers of a host; "" if host names are enough. Placement puts replicas of a task on
            different machines if it can.
        endpoints: see `transport.api.Peer`.
        control: where the control service listens.
        devices: number of CUDA devices.
        device_ids: of these devices, as in `CUDA_VISIBLE_DEVICES`.
        draining: it leaves: it gets no more tasks, and hands its tasks over.
        token_mark: a public fingerprint of the token; "" if all nodes are in one process.
        arithmetic: versions that decide the last bits of results: Python, numpy, the processor.
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
    """The name of a node: its id without the uuid."""
    return node.rpartition("-")[0] or node


class RanCode(NamedTuple):
    """User code that ran when its process died: the hook, processor or handler, its task, and the epoch at work.

    The epoch is -1 in a replica that never was primary, as in `setup` of a backup.
    """

    where: str
    task: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.where!r} of task {self.task}"


ENDED_ITSELF: Final = "ended itself"
"""The reason of a node that had to end begins with this."""
OUT_OF_MEMORY: Final = "as memory was used up"
"""A launcher adds this to SIGKILL if the kernel ran out of memory."""


class GoneRecord(Record, frozen=True, kw_only=True):
    """`gone/{node}`: the launcher saw the process end, or the node was absent for too long.

    Attributes:
        ran: the user code that ran when the process ended, if its launcher knows.
        at: the line of Python at which it crashed (`FILE, line N`); "": unknown.
        intended: the process was told to end, so its code is not to blame.
        task, epoch: the process ended after an error of a CUDA device in this code; None: another reason.
    """

    reason: str
    ran: tuple[RanCode, ...] = ()
    at: str = ""
    intended: bool = False
    task: int | None = None
    epoch: int | None = None

    @property
    def running(self) -> tuple[str, ...]:
        """Describes `ran`, each code once."""
        return tuple(dict.fromkeys(map(str, self.ran)))

    @property
    def died(self) -> bool:
        """True if the launcher saw the process die. False: the node left, or was absent for too long."""
        return self.reason.startswith(("killed", "exited"))

    @property
    def ended_itself(self) -> bool:
        """The node could not continue, and said why."""
        return self.reason.startswith(ENDED_ITSELF)

    @property
    def out_of_memory(self) -> bool:
        """The kernel killed it for lack of memory, if its launcher knows."""
        return OUT_OF_MEMORY in self.reason

    @property
    def how_it_ended(self) -> str:
        """The predicate after the name of the node, e.g. "was killed by SIGKILL"."""
        verb = "was " if self.reason.startswith("killed") else ""
        ran = f" while it ran {' and '.join(self.running)}" if self.running else ""
        at = f" at {self.at}" if self.at else ""
        return verb + self.reason + ran + at + (" (it was told to end)" if self.intended else "")


class PrimaryRecord(Record, frozen=True, kw_only=True):
    """`tasks/{t}/primary`. Never leased: terms only grow. `failovers` counts the terms of backups that took over."""

    node: str
    term: int
    stateful: bool
    failovers: int = 0


class MemberRecord(Record, frozen=True, kw_only=True):
    """`tasks/{t}/members/{node}`: the node is in sync.

    Attributes:
        until: None: a member. Otherwise it was evicted: it has boundary `until`, and no later one.
        attempt: the attempt at which it was evicted. After a roll-back, boundary `until` is another one.
    """

    until: int | None = None
    attempt: int = 0
