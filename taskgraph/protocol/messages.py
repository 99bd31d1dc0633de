"""The messages between nodes.

    call                          sender -> receiver             reply
    Pull                          consumer -> producer           Item
    Flag                          task -> task                   Accepted
    Request                       task -> task                   Answer
    Offer, Offers                 primary -> backup              Accepted: the boundary is stored
    Release                       primary -> former backup       Accepted
    Report, Reports               primary -> leader              Accepted
    WrittenFiles                  primary -> leader              Accepted
    RequestRestart                any node -> leader             Accepted
    Seal                          leader -> primary              Accepted, or a Refusal with MOVED_ON
    Audit                         leader -> primary              LedgerPage
    Waits                         leader -> primary              WaitsPage
    HandOver                      primary -> backup              Accepted

Rules:

1. Every call gets exactly one reply: the one in the table, or a `Refusal`, which `Transport.call` raises as
   `errors.Refused`. A *quiet* call, as most reports are, gets no reply if it is accepted at once.
2. Receivers compare stamps and terms. A message with an older stamp, or with an older term of the same sending task, is
   stale.
3. A call may arrive twice. Receivers compare identities, so the second one changes nothing.
4. Messages are immutable, and equal if their fields are.

`transport/wire.py` turns messages into bytes. Within one process they travel as objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from taskgraph.protocol.numbers import Numbers, held

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
"""(attempt, epoch) -> `Stamp`. Faster than the named tuple's own constructor, which is a Python function."""

if TYPE_CHECKING:
    Sum = int
else:

    class Sum(int):
        """A sum mod 2**128. A type of its own, since the integers of MessagePack have 64 bits."""


_AT_LEAST_ONE: Final = Meta(min_length=1)


class _Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The base of all messages: an array of fields on the wire, with the class name first where a tag is needed."""


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
        self.meta = meta
        self.buffers = buffers
        self.digest: Final = digest
        size = len(meta)
        for buffer in buffers:
            size += buffer.nbytes
        self.size_bytes = size

    def complete(self, meta: bytes, buffers: tuple[memoryview, ...]) -> None:
        """Sets meta and buffers of a value that was made with its digest only, before anything else uses it."""
        self.meta, self.buffers = meta, buffers
        self.size_bytes = len(meta) + sum([buffer.nbytes for buffer in buffers])

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


class Refusal(_Message, frozen=True, tag=True):
    """Reply to any call: no, and why."""

    reason: str
    text: str = ""


class Accepted(_Message, frozen=True, tag=True):
    """Reply: done as asked. `term` is the answering task's term where one answers, else 0."""

    term: int = 0


class Pull(_Message, frozen=True, tag=True):
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


class Item(_Message, frozen=True, tag=True):
    """Reply to `Pull`. `term` is the producer's."""

    stamp: Stamp
    term: int
    tag: str
    value: Encoded


class Flag(_Message, frozen=True, tag=True):
    """Task to task: a mark with a value. The same flag twice in an epoch is one. Reply: `Accepted`."""

    stamp: Stamp
    sender: int
    sender_term: int
    task: int
    value: Encoded


class Request(_Message, frozen=True, tag=True):
    """Task to task: call a handler. Identity: (stamp, sender, task, method, number). Reply: `Answer`."""

    stamp: Stamp
    sender: int
    sender_term: int
    task: int
    method: str
    number: int
    value: Encoded


class Answer(_Message, frozen=True, tag=True):
    """Reply to `Request`. `term` is the answering task's; `pure` says that the handler promised no effects."""

    stamp: Stamp
    term: int
    pure: bool
    value: Encoded


class Offer(_Message, frozen=True, tag=True):
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


class Offers(_Message, frozen=True, tag=True):
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
    parts: Annotated[tuple[tuple[int, int, bytes], ...], _AT_LEAST_ONE]
    value: Encoded

    # As every `Offer` of such a one has it.
    committed: ClassVar[bool] = False
    candidate: ClassVar[bool] = False


class Release(_Message, frozen=True, tag=True):
    """Primary to a former candidate or member: what you hold under this invitation is not needed. Reply: `Accepted`.

    `revision` is of the primary's view, which holds whatever was written about that node: the receiver's view must
    have come that far first, or it could drop what its own member key, not seen yet, says it holds.
    """

    task: int
    term: int
    invitation: int
    revision: int


class Report(_Message, frozen=True, tag=True):
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
    sent: Sum
    received: Sum
    finish: bool = False
    numbers: Mapping[str, float] | None = None
    previous: Mapping[str, float] | None = None
    ahead: bool = False

    def __post_init__(self) -> None:
        if type(self.sent) is not Sum or type(self.received) is not Sum:
            force_setattr(self, "sent", Sum(self.sent))
            force_setattr(self, "received", Sum(self.received))
        if self.numbers:
            force_setattr(self, "numbers", held(self.numbers))
        if self.previous:
            force_setattr(self, "previous", held(self.previous))


class Reports(_Message, frozen=True, tag=True):
    """Several reports of one task, which went on without the commit of their epochs. Reply: `Accepted`.

    Attributes:
        reports: at least one, in the order of their epochs.
    """

    reports: Annotated[tuple[Report, ...], _AT_LEAST_ONE]

    def __post_init__(self) -> None:
        for before, report in pairwise(self.reports):
            if isinstance(before.numbers, Numbers) and before.numbers.same(report.previous):
                force_setattr(report, "previous", before.numbers)  # the leader stores them once

    @property
    def stamp(self) -> Stamp:
        """Of the last one."""
        return self.reports[-1].stamp

    @property
    def task(self) -> int:
        return self.reports[-1].task


class Seal(_Message, frozen=True, tag=True):
    """Leader to primary: everything is quiet; if your version is still this one, run your sync points.

    Reply: `Accepted`, or `Refusal(MOVED_ON)`.
    """

    stamp: Stamp
    task: int
    version: int


class RequestRestart(_Message, frozen=True, tag=True):
    """Anyone to the leader: the attempt at this stamp cannot be completed. Reply: `Accepted` (heard, or moot)."""

    stamp: Stamp
    task: int
    why: str


class HandOver(_Message, frozen=True, tag=True):
    """Primary to an in-sync backup, right after a commit: take over now. Reply: `Accepted` once tried."""

    stamp: Stamp
    task: int
    term: int


class Written(_Message, frozen=True):
    """A task's file of the checkpoint of a boundary.

    `stamp.epoch` is the boundary's number, `stamp.attempt` the attempt it was made in. A size of 0, which no file has,
    says that it could not be written, and will not be.
    """

    stamp: Stamp
    task: int
    size: int
    digest: str


class WrittenFiles(_Message, frozen=True, tag=True):
    """Primary to leader: these files of mine are written. Reply: `Accepted`.

    Attributes:
        files: at least one, in the order in which they were written.
    """

    files: Annotated[tuple[Written, ...], _AT_LEAST_ONE]

    @property
    def task(self) -> int:
        return self.files[0].task


class Audit(_Message, frozen=True, tag=True):
    """Leader to primary, after unequal sums: show every entry of yours. Reply: `LedgerPage`."""

    stamp: Stamp
    task: int


class LedgerEntry(_Message, frozen=True):
    """One identity in a task's sums, e.g. kind "item", sender 3, receiver 1, name "grad"."""

    sent: bool
    kind: str
    sender: int
    receiver: int
    name: str
    digest: bytes


class LedgerPage(_Message, frozen=True, tag=True):
    """Reply to `Audit`."""

    term: int
    entries: tuple[LedgerEntry, ...]


class Waits(_Message, frozen=True, tag=True):
    """Leader to primary, when an epoch stands still: what does each processor wait for? Reply: `WaitsPage`."""

    stamp: Stamp
    task: int


class Wait(_Message, frozen=True):
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


class WaitsPage(_Message, frozen=True, tag=True):
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
