"""What replicas say to each other.

Every message is one frozen dataclass. A *call* has exactly one reply: the type named in its docstring, or a
`Refusal`, which `Transport.call` raises as `errors.Refused`. Of a *quiet* call, which `Report` and `Reports` are as a
rule, an `Accepted` at once is not told. How a message travels is the transport's business; in one process it travels
as the object it is.

`Stamp` orders everything: attempt first, then epoch. The term is compared per sending task.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Final, NamedTuple

from taskgraph.errors import DecodeError
from taskgraph.protocol.frozen import frozen

__all__ = [
    "Accepted",
    "Answer",
    "Audit",
    "Encoded",
    "Flag",
    "HandOver",
    "Item",
    "LedgerEntry",
    "LedgerPage",
    "Message",
    "Offer",
    "Offers",
    "Pull",
    "Reason",
    "Refusal",
    "Release",
    "Report",
    "Reports",
    "Request",
    "RequestRestart",
    "Seal",
    "Stamp",
    "Wait",
    "Waits",
    "WaitsPage",
    "Written",
    "WrittenFiles",
    "stamp_of",
]


class Stamp(NamedTuple):
    """Where in the job's history something belongs. Tuples compare as the protocol orders: attempt, then epoch."""

    attempt: int
    epoch: int


stamp_of: Final = partial(tuple.__new__, Stamp)
"""The stamp of an (attempt, epoch). For what makes many: a named tuple's own constructor is a Python function."""


class Encoded:
    """A value as bytes: immutable, digested, ready for a socket or for a reader in the same process.

    Attributes:
        meta: the structure (types, shapes, small values); decoded by `taskgraph.graph.values`.
        buffers: the bulk, each a C-contiguous read-only buffer of bytes, in the order meta names them.
        digest: of meta and buffers, 16 bytes; what it is, `taskgraph.graph.digests` says.
        size_bytes: of meta and buffers. Taken once: it is asked for many times an epoch.
    """

    __slots__ = ("buffers", "digest", "meta", "size_bytes")

    def __init__(self, meta: bytes, buffers: tuple[memoryview, ...], digest: bytes) -> None:
        self.meta: Final = meta
        self.buffers = buffers
        self.digest: Final = digest
        size = len(meta)
        for buffer in buffers:
            size += buffer.nbytes
        self.size_bytes = size

    def complete(self, buffers: tuple[memoryview, ...]) -> None:
        """These are the buffers of a value that was made without any, and that nobody has seen yet."""
        self.buffers = buffers
        for buffer in buffers:
            self.size_bytes += buffer.nbytes

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return (self.digest, self.meta, self.buffers) == (other.digest, other.meta, other.buffers)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(meta={self.meta!r}, buffers={self.buffers!r}, digest={self.digest!r})"


class EncodedOnDevice(Encoded):
    """A value some of whose `buffers` are in a device's memory: each is a `taskgraph.device.buffers.DeviceBuffer`.

    Only items are, and only within a process: what leaves it is made by `taskgraph.graph.values.hosted`, but for what
    another process copies within the device (`taskgraph.transport.devicelending`). Meta and digest are those of the
    same value on the host.
    """

    __slots__ = ()


class Reason:
    """Why a peer says no. Plain strings, since they travel."""

    NOT_PRIMARY = "not primary"  # ask the view again; the task has, or will have, another primary
    NOT_HERE = "not here"  # this node holds no replica of that task
    STALE = "stale"  # the sender's stamp or term is behind: it must read etcd
    ATTEMPT_GONE = "attempt gone"  # the receiver's attempt ended while the call was parked
    NOT_OFFERED = "not offered"  # a channel the producer does not declare in this epoch: the job's bug
    MOVED_ON = "moved on"  # a seal whose version is no longer the task's
    DONE = "done"  # the task is done with that epoch and takes nothing more of it
    CONFLICT = "conflict"  # same identity, other content: the epoch must restart
    PAUSED = "paused"  # the node cannot prove its lease: try again later
    USER_ERROR = "user error"  # the receiver's user code raised: the job is failing
    BAD_MESSAGE = "bad message"  # not something this receiver understands
    NOT_COPIED = "not copied"  # there is no copy of it on the host, and no device is to blame: there will be none
    DEVICE_ERROR = "device error"  # there is no copy of it on the host, since its device failed
    NO_MEMORY = "no memory"  # whoever was to get it, a call or a reply, has none for it; there may be some later
    CLOSING = "closing"  # the node is shutting down


@frozen
class Refusal:
    """Reply to any call: no, and why."""

    reason: str
    text: str = ""


@frozen
class Accepted:
    """Reply: done as asked. `term` is the answering task's term where one answers, else 0."""

    term: int = 0


@frozen
class Pull:
    """Consumer to producer: the item of `tag` for me. Waits at the producer until it exists. Reply: `Item`.

    With `count` it stands for as many calls (see `Transport.calls_now`): of this epoch and of those that follow it in
    the same attempt. What serves a call sees each of them by itself.
    """

    stamp: Stamp
    sender: int  # the consuming task
    sender_term: int
    task: int  # the producing task
    tag: str
    count: int = 1

    def each(self, number: int) -> Pull:
        """The one of the `number`-th epoch, counted from 0."""
        stamp = Stamp(self.stamp.attempt, self.stamp.epoch + number)
        return Pull(stamp, self.sender, self.sender_term, self.task, self.tag)


@frozen
class Item:
    """Reply to `Pull`. `term` is the producer's."""

    stamp: Stamp
    term: int
    tag: str
    value: Encoded


@frozen
class Flag:
    """Task to task: a mark with a value. The same flag twice in an epoch is one. Reply: `Accepted`."""

    stamp: Stamp
    sender: int
    sender_term: int
    task: int
    value: Encoded


@frozen
class Request:
    """Task to task: call a handler. Identity: (stamp, sender, task, method, number). Reply: `Answer`."""

    stamp: Stamp
    sender: int
    sender_term: int
    task: int
    method: str
    number: int
    value: Encoded


@frozen
class Answer:
    """Reply to `Request`. `term` is the answering task's; `pure` says that the handler promised no effects."""

    stamp: Stamp
    term: int
    pure: bool
    value: Encoded


@frozen
class Offer:
    """Primary to member or candidate: hold this boundary. Reply: `Accepted` once it is held.

    `stamp.epoch` is the boundary's number; `committed` says whether the primary read it as committed;
    `candidate` says that the receiver is being admitted, and must set its replica up before it accepts.
    `invitation` numbers the times this primary invited the node: what is held under it stays held until a `Release`
    of that number, or until another term began.
    """

    stamp: Stamp
    term: int
    task: int
    committed: bool
    candidate: bool
    invitation: int
    value: Encoded


@frozen
class Offers:
    """Primary to member: hold these boundaries, pending ones of one attempt. Reply: `Accepted` once all are held.

    Small ones that nobody waits for are gathered, and travel together.

    Attributes:
        stamp: of the first one.
        invitation: as in `Offer`.
        parts: of each boundary its number, the bytes that are its own in `value`, and its digest. None are its own
            where it is the same value as the one before.
        value: all of them (`taskgraph.graph.values.joined`).
    """

    stamp: Stamp
    term: int
    task: int
    invitation: int
    parts: tuple[tuple[int, int, bytes], ...]
    value: Encoded

    # As every `Offer` of such a one has it.
    committed: ClassVar[bool] = False
    candidate: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.parts:
            raise DecodeError("offers, and none of them")


@frozen
class Release:
    """Primary to a former candidate or member: what you hold under this invitation is not needed. Reply: `Accepted`.

    `revision` is of the primary's view, which holds whatever was written about that node: the receiver's view must
    have come that far first, or it could drop what its own member key, not seen yet, says it holds.
    """

    task: int
    term: int
    invitation: int
    revision: int


@frozen
class Report:
    """Primary to leader: where my task is in the epoch. Reply: `Accepted`.

    Attributes:
        done: final; else the task is idle and waits for the seal.
        version: grows with every message an idle task takes.
        sent, received: the two sums, mod 2**128.
        finish: some processor of the task asked for the end of the job.
        numbers: what `epoch.report` collected in this epoch, or None while not done.
        previous: the same of the epoch before, for a leader that does not have it yet.
        ahead: the task goes on with the next epoch and does not wait for this one's commit.
    """

    stamp: Stamp
    task: int
    term: int
    done: bool
    version: int
    sent: int
    received: int
    finish: bool = False
    numbers: Mapping[str, float] | None = None
    previous: Mapping[str, float] | None = None
    ahead: bool = False


@frozen
class Reports:
    """Several reports of one task, which went on without the commit of their epochs. Reply: `Accepted`.

    Attributes:
        reports: at least one, in the order of their epochs.
    """

    reports: tuple[Report, ...]

    def __post_init__(self) -> None:
        if not self.reports:
            raise DecodeError("reports, and none of them")

    @property
    def stamp(self) -> Stamp:
        """Of the last one."""
        return self.reports[-1].stamp

    @property
    def task(self) -> int:
        return self.reports[-1].task


@frozen
class Seal:
    """Leader to primary: everything is quiet; if your version is still this one, run your sync points.

    Reply: `Accepted`, or `Refusal(MOVED_ON)`.
    """

    stamp: Stamp
    task: int
    version: int


@frozen
class RequestRestart:
    """Anyone to the leader: the attempt at this stamp cannot be completed. Reply: `Accepted` (heard, or moot)."""

    stamp: Stamp
    task: int
    why: str


@frozen
class HandOver:
    """Primary to an in-sync backup, right after a commit: take over now. Reply: `Accepted` once tried."""

    stamp: Stamp
    task: int
    term: int


@frozen
class Written:
    """A task's file of the checkpoint of a boundary.

    `stamp.epoch` is the boundary's number, `stamp.attempt` the attempt it was made in. A size of 0, which no file has,
    says that it could not be written, and will not be.
    """

    stamp: Stamp
    task: int
    size: int
    digest: str


@frozen
class WrittenFiles:
    """Primary to leader: these files of mine are written. Reply: `Accepted`.

    Attributes:
        files: at least one, in the order in which they were written.
    """

    files: tuple[Written, ...]

    def __post_init__(self) -> None:
        if not self.files:
            raise DecodeError("files that were written, and none of them")

    @property
    def task(self) -> int:
        return self.files[0].task


@frozen
class Audit:
    """Leader to primary, after unequal sums: show every entry of yours. Reply: `LedgerPage`."""

    stamp: Stamp
    task: int


@frozen
class LedgerEntry:
    """One identity in a task's sums, e.g. kind "item", sender 3, receiver 1, name "grad"."""

    sent: bool
    kind: str
    sender: int
    receiver: int
    name: str
    digest: bytes


@frozen
class LedgerPage:
    """Reply to `Audit`."""

    term: int
    entries: tuple[LedgerEntry, ...]


@frozen
class Waits:
    """Leader to primary, when an epoch stands still: what does each processor wait for? Reply: `WaitsPage`."""

    stamp: Stamp
    task: int


@frozen
class Wait:
    """One thing an unfinished processor of a task waits for.

    Attributes:
        processor: the waiting processor or handler; "" with "outside".
        kind: "item" (from `task`, named `name`), "order" (an earlier processor `name` of the same task),
            "reply" (of `task` to method `name`), "turn" (a handler that may run when `name` of the same task returns or
            waits for a reply), "turn of asking" (the same, where `name` has sent requests), "running" (it waits for
            nothing but itself), "outside" (the primary waits, not user code: `name` says for what).
        provides: (tag, consumer) pairs that this processor will put when it runs.
    """

    processor: str
    kind: str
    task: int
    name: str
    since_s: float
    provides: tuple[tuple[str, int], ...] = ()


@frozen
class WaitsPage:
    """Reply to `Waits`."""

    term: int
    waits: tuple[Wait, ...]


Call = (
    Pull
    | Flag
    | Request
    | Offer
    | Offers
    | Release
    | Report
    | Reports
    | Seal
    | RequestRestart
    | HandOver
    | WrittenFiles
    | Audit
    | Waits
)
Reply = Item | Answer | Accepted | LedgerPage | WaitsPage | Refusal
Message = Call | Reply
