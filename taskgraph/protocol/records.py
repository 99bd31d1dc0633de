"""The values of a job's keys: small JSON objects, so that `etcdctl get` shows them to a person.

Every record that a node writes names its writer, `node:n`, so that a write whose outcome is unknown can be
recognised when it is read again.
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
    "ForgottenRecord",
    "GoneRecord",
    "MemberRecord",
    "NodeRecord",
    "PrimaryRecord",
    "Ran",
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
            texts = {name: text for name in self.__struct_fields__ if isinstance(text := getattr(self, name), str)}
            escaped = {name: text.encode("utf-8", "backslashreplace").decode() for name, text in texts.items()}
            return msgspec.json.encode(msgspec.structs.replace(self, **escaped))

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


class EpochRecord(Record, frozen=True, kw_only=True):
    """`epoch`: the boundary that is committed, which is also the number of the epoch at work, and the attempt.

    Attributes:
        lineage: the attempt that the last roll-back began, or a run that was resumed; 0 where there was none. What was
            made in an attempt before it belongs to epochs that were undone, but for boundary `base`.
        base: the boundary that this lineage began from: the checkpoint's, or 0.
    """

    epoch: int
    attempt: int
    lineage: int = 0
    base: int = 0


class CheckpointRecord(Record, frozen=True, kw_only=True):
    """`checkpoint`: the newest complete checkpoint of the current lineage.

    Attributes:
        epoch, attempt: the boundary that it holds, and the attempt that boundary was made in.
        name: where in the job's place its files are.
        before: names of the complete ones before it that are kept, the newest first.
        term: of the leader that made it complete, or that there was when the job went back to it; 0: none of this run.
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
    """`status`: what became of the job. The fields after `reason` say where a failure happened."""

    state: str
    reason: str = ""
    task: int | None = None
    epoch: int | None = None
    where: str = ""
    traceback: str = ""


class NodeRecord(Record, frozen=True, kw_only=True):
    """`nodes/{node}`, the only leased key.

    Attributes:
        name: what a person calls it; the node's id is the name plus the uuid of its process.
        run: the run id of the job's spec, so that a node of an earlier job of the same name counts for nothing.
        host: its host's name, of a container its own.
        machine: what all containers of a host have in common. Placement puts replicas of one task on different machines
            where it can; "" where they are told apart by their hosts' names.
        endpoints: see `transport.api.Peer`.
        control: where the control service listens.
        devices: number of CUDA devices.
        device_ids: what a person calls them, as `CUDA_VISIBLE_DEVICES` does.
        draining: it wants to leave: place nothing here, hand over what is here.
        token_mark: by which nodes see that they have the same token, without telling it; "" where they are one process.
        arithmetic: what decides the last bits of what it computes: Python, numpy, the processor.
        left: tasks that it left to others, since it had no memory for what they pull; each as often as it did.
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
    left: tuple[int, ...] = ()


def name_of(node: str) -> str:
    """What a person calls a node: its id without the uuid of its process."""
    return node.rpartition("-")[0] or node


class Ran(NamedTuple):
    """User code that ran when its process died: the hook, processor or handler, its task, and the epoch at work.

    The epoch is -1 in a replica that never was primary: a backup's `setup`, above all.
    """

    where: str
    task: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.where!r} of task {self.task}"


ENDED_ITSELF: Final = "ended itself"
"""How a node gives the reason for its end that could not go on."""
OUT_OF_MEMORY: Final = "as memory was used up"
"""What a launcher says beside the signal where the kernel sent it for that."""


class GoneRecord(Record, frozen=True, kw_only=True):
    """`gone/{node}`: whoever started the node's process saw it end, or its absence was long enough.

    Attributes:
        ran: the user code that ran when the process ended, as far as its launcher knows.
        at: the line of Python that a crash stopped (`FILE, line N`); "": unknown.
        meant: somebody said that the process was to end: what ran is not to blame.
        task, epoch: whose code met an error of its CUDA device, for which the process ended itself; None: another end.
    """

    reason: str
    ran: tuple[Ran, ...] = ()
    at: str = ""
    meant: bool = False
    task: int | None = None
    epoch: int | None = None

    @property
    def running(self) -> tuple[str, ...]:
        """`ran`, for people: each once, in however many epochs it ran."""
        return tuple(dict.fromkeys(map(str, self.ran)))

    @property
    def died(self) -> bool:
        """Whether its process was seen to end: it neither left nor was missed for too long."""
        return self.reason.startswith(("killed", "exited"))

    @property
    def ended_itself(self) -> bool:
        """Whether it could not go on, and said why."""
        return self.reason.startswith(ENDED_ITSELF)

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel killed it, as far as its launcher knows, since memory was used up."""
        return OUT_OF_MEMORY in self.reason

    @property
    def told(self) -> str:
        """After the node's name."""
        verb = "was " if self.reason.startswith("killed") else ""
        ran = f" while it ran {' and '.join(self.running)}" if self.running else ""
        at = f" at {self.at}" if self.at else ""
        return verb + self.reason + ran + at + (" (it was told to end)" if self.meant else "")


class ForgottenRecord(Record, frozen=True, kw_only=True):
    """`forgotten`: `gone/{node}` of nodes that nobody needs to know any more was deleted, as there are ever more.

    Attributes:
        revision: of the last of these keys, when they were written. Who has read of its own key since is none of them.
    """

    revision: int


class PrimaryRecord(Record, frozen=True, kw_only=True):
    """`tasks/{t}/primary`. Never leased: terms only grow. `failovers` counts the terms of backups that took over."""

    node: str
    term: int
    stateful: bool
    failovers: int = 0


class MemberRecord(Record, frozen=True, kw_only=True):
    """`tasks/{t}/members/{node}`: that node is in sync.

    Attributes:
        until: None, or evicted: it still counts as holding boundary `until`, and nothing after it.
        attempt: the attempt at work when it was evicted: after a roll-back, boundary `until` is another one.
    """

    until: int | None = None
    attempt: int = 0
