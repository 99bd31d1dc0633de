"""Defines the messages between nodes.

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
    DescribeShared                leader -> primary              SharedDigests
    FetchShared                   primary -> keeper's primary    SharedState
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
from typing import Annotated, ClassVar, Final, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from taskgraph.protocol.numbers import Numbers, compact

__all__ = [
    "Accepted",
    "Answer",
    "Audit",
    "DescribeShared",
    "Encoded",
    "FetchShared",
    "Flag",
    "HandOver",
    "Item",
    "KeptBuffers",
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
    "SharedDigests",
    "SharedState",
    "Stamp",
    "Wait",
    "Waits",
    "WaitsPage",
    "WrittenFile",
    "WrittenFiles",
    "stamp_of",
]


class Stamp(NamedTuple):
    """An attempt and an epoch: a place in the history of the job. Stamps are ordered by attempt, then by epoch."""

    attempt: int
    epoch: int


stamp_of: Final = partial(tuple.__new__, Stamp)
"""(attempt, epoch) -> `Stamp`. Faster than the named tuple's own constructor, which is a Python function."""

Sum = Annotated[bytes, Meta(min_length=16, max_length=16)]
"""A sum mod 2**128, big-endian: the integers of MessagePack have 64 bits."""

_AT_LEAST_ONE: Final = Meta(min_length=1)


class _Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The base of all messages: an array of fields on the wire, with the class name first where a tag is needed."""


class Encoded:
    """A value as bytes, immutable, with its digest.

    Attributes:
        meta: the structure (types, shapes, small values); decoded by `taskgraph.graph.values`.
        buffers: the bulk: C-contiguous read-only buffers of bytes, in the order of meta.
        digest: the digest of meta and buffers, 16 bytes; see `taskgraph.graph.digests`.
        size_bytes: bytes of meta and buffers.
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
        """Sets meta and buffers of a value that was created with its digest only, before the value is used."""
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
    """A value with buffers in the memory of a device (`taskgraph.device.buffers.DeviceBuffer`).

    Only items are such values, and only within a process. To leave it they are copied to the host
    (`taskgraph.graph.values.copy_to_host`) or lent (`taskgraph.transport.devicelending`). Meta and digest are those of
    the value on the host.
    """

    __slots__ = ()


class Reason:
    """The values of `Refusal.reason`."""

    NOT_PRIMARY = "not primary"  # the task has, or will have, another primary: look at the view again
    NOT_HERE = "not here"  # this node has no replica of that task
    STALE = "stale"  # the sender's stamp or term is behind: it must read etcd
    ATTEMPT_GONE = "attempt gone"  # the receiver's attempt ended while the call was parked
    NOT_OFFERED = "not offered"  # the task has no such channel in this epoch, or no such handler: a bug of the job
    MOVED_ON = "moved on"  # the version of the seal is not the current one of the task
    DONE = "done"  # the task is done with that epoch, and takes no more messages in it
    CONFLICT = "conflict"  # same identity, other content: the epoch must restart
    PAUSED = "paused"  # the node cannot prove its lease: try again later
    USER_ERROR = "user error"  # the receiver's user code raised: the job is failing
    BAD_MESSAGE = "bad message"  # the receiver does not understand it
    NOT_COPIED = "not copied"  # the value cannot be copied from the device to the host, and never will
    DEVICE_ERROR = "device error"  # the value cannot be copied to the host, since its device failed
    NO_MEMORY = "no memory"  # the receiver of the call or the reply has no memory; try again later
    CLOSING = "closing"  # the node is shutting down


class Refusal(_Message, frozen=True, tag=True):
    """Reply to any call: it is refused."""

    reason: str
    text: str = ""


class Accepted(_Message, frozen=True, tag=True):
    """Reply: the call succeeded. `term` is the term of the answering task; 0: no task answers."""

    term: int = 0


class Pull(_Message, frozen=True, tag=True):
    """Consumer to producer: asks for the item `tag`. The reply waits until the item exists.

    With `count` above 1 it stands for as many pulls: one for each of `count` epochs of the attempt, from `stamp` on.
    """

    stamp: Stamp
    sender: int  # the consuming task
    sender_term: int
    task: int  # the producing task
    tag: str
    count: int = 1

    def each(self, number: int) -> Pull:
        """Returns one of the `count` pulls that this one stands for: the pull for epoch `stamp.epoch + number`."""
        stamp = Stamp(self.stamp.attempt, self.stamp.epoch + number)
        return Pull(stamp, self.sender, self.sender_term, self.task, self.tag)


class Item(_Message, frozen=True, tag=True):
    """Reply to `Pull`. `term` is the term of the producer."""

    stamp: Stamp
    term: int
    tag: str
    value: Encoded


class Flag(_Message, frozen=True, tag=True):
    """Task to task: a value for `on_flag`; the reply has no value. Equal flags of one sender count once in an epoch."""

    stamp: Stamp
    sender: int
    sender_term: int
    task: int
    value: Encoded


class Request(_Message, frozen=True, tag=True):
    """Task to task: calls the handler `method` with `value`. Identity: (stamp, sender, task, method, number)."""

    stamp: Stamp
    sender: int
    sender_term: int
    task: int
    method: str
    number: int
    value: Encoded


class Answer(_Message, frozen=True, tag=True):
    """Reply to `Request`. `term` is the term of the answering task; `pure`: the handler has no effects."""

    stamp: Stamp
    term: int
    pure: bool
    value: Encoded


class KeptBuffers(NamedTuple):
    """Which buffers of a value are not sent, since the receiver has them in another value, the base.

    Attributes:
        base: the digest of the base.
        places: for each buffer of the whole value, its index in the base; -1: the buffer is sent.
        digest: that of the whole value.
    """

    base: bytes
    places: tuple[int, ...]
    digest: bytes


class Offer(_Message, frozen=True, tag=True):
    """Primary to backup or candidate: asks to store a boundary. Accepted once it is stored.

    Attributes:
        stamp: `epoch` is the number of the boundary, `attempt` the attempt that computed it.
        committed: the primary read it as committed.
        candidate: the receiver is being admitted, and sets its replica up before it accepts.
        invitation: how often this primary has invited the node. The receiver keeps the boundary until a `Release` with
            this number, or until another term begins.
        kept: `value` lacks these buffers of the boundary: the receiver takes them from one that it acknowledged. None:
            `value` is whole.
    """

    stamp: Stamp
    term: int
    task: int
    committed: bool
    candidate: bool
    invitation: int
    value: Encoded
    kept: KeptBuffers | None = None


class Offers(_Message, frozen=True, tag=True):
    """Primary to backup: asks to store small pending boundaries of one attempt. Accepted once all are stored.

    Attributes:
        stamp: the stamp of the first boundary.
        invitation: as in `Offer`.
        parts: (number, size in `value`, digest) of each boundary. A size of 0: the boundary equals the one before.
        value: all values (`taskgraph.graph.values.join_values`).
    """

    stamp: Stamp
    term: int
    task: int
    invitation: int
    parts: Annotated[tuple[tuple[int, int, bytes], ...], _AT_LEAST_ONE]
    value: Encoded

    # As in an `Offer` of a pending boundary to a member.
    committed: ClassVar[bool] = False
    candidate: ClassVar[bool] = False


class Release(_Message, frozen=True, tag=True):
    """Primary to a former candidate or backup: asks to drop the boundaries of an invitation (`Offer.invitation`).

    The receiver first waits until its view has `revision`, that of the primary's view: a member key that it has not
    read may say that it has the boundaries.
    """

    task: int
    term: int
    invitation: int
    revision: int


class Report(_Message, frozen=True, tag=True):
    """Primary to leader: the state of a task in an epoch.

    Attributes:
        done: all processors returned; otherwise the task is idle, and waits for the seal.
        version: grows whenever the task stops being idle.
        sent, received: the two sums of its ledger (`sums.encode_sum`).
        finish: a processor called `epoch.finish`.
        numbers: the numbers of `epoch.report` in this epoch; None while the task is not done.
        previous: the numbers of the epoch before, for a new leader; None: there are none.
        ahead: the task begins the next epoch without the commit of this one.
        shared: the digest of the shared state in the boundary that the epoch made; in epoch 0 after that of boundary 0.
            b"" while the task is not done, and without shared state.
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
    shared: bytes = b""

    def __post_init__(self) -> None:
        if self.numbers:
            force_setattr(self, "numbers", compact(self.numbers))
        if self.previous:
            force_setattr(self, "previous", compact(self.previous))


class Reports(_Message, frozen=True, tag=True):
    """Several reports of one task that works ahead, in the order of their epochs."""

    reports: Annotated[tuple[Report, ...], _AT_LEAST_ONE]

    def __post_init__(self) -> None:
        for before, report in pairwise(self.reports):
            if type(before.numbers) is Numbers and before.numbers.same(report.previous):
                force_setattr(report, "previous", before.numbers)  # the leader stores them once

    @property
    def stamp(self) -> Stamp:
        """The stamp of the last report."""
        return self.reports[-1].stamp

    @property
    def task(self) -> int:
        return self.reports[-1].task


class Seal(_Message, frozen=True, tag=True):
    """Leader to primary: all tasks are idle or done. Asks to run the sync points, unless the task has another version
    (`Report.version`) now."""

    stamp: Stamp
    task: int
    version: int


class RequestRestart(_Message, frozen=True, tag=True):
    """Any node to leader: `task` cannot complete the epoch in this attempt. Also accepted if the attempt is over."""

    stamp: Stamp
    task: int
    why: str


class HandOver(_Message, frozen=True, tag=True):
    """Primary to backup, right after a commit: asks to take the task over. Accepted once the receiver is primary."""

    stamp: Stamp
    task: int
    term: int


class WrittenFile(_Message, frozen=True):
    """The file of a task in the checkpoint of a boundary, with `stamp` as in `Offer`.

    A size of 0 means that the file cannot be written.
    """

    stamp: Stamp
    task: int
    size: int
    digest: str


class WrittenFiles(_Message, frozen=True, tag=True):
    """Primary to leader: these checkpoint files of a task were written, in this order."""

    files: Annotated[tuple[WrittenFile, ...], _AT_LEAST_ONE]

    @property
    def task(self) -> int:
        return self.files[0].task


class Audit(_Message, frozen=True, tag=True):
    """Leader to primary, after unequal sums: asks for all entries of a task's ledger."""

    stamp: Stamp
    task: int


class LedgerEntry(_Message, frozen=True):
    """An entry of a ledger in a message, e.g. kind "item", sender 3, receiver 1, name "grad"."""

    sent: bool
    kind: str
    sender: int
    receiver: int
    name: str
    digest: bytes


class LedgerPage(_Message, frozen=True, tag=True):
    """Reply to `Audit`: the entries of the task's ledger."""

    term: int
    entries: tuple[LedgerEntry, ...]


class Waits(_Message, frozen=True, tag=True):
    """Leader to primary, if an epoch makes no progress: asks what the processors of a task wait for."""

    stamp: Stamp
    task: int


class Wait(_Message, frozen=True):
    """A wait of an unfinished processor or handler.

    Attributes:
        processor: the waiting processor or handler; "" with "outside".
        kind: "item" (`name` from `task`), "order" (the earlier processor `name` of the same task), "reply" (of `task`
            to method `name`), "turn" (until `name` of the same task returns or waits for a reply), "turn of asking" (as
            "turn", and `name` has sent requests), "running" (it computes), "outside" (the primary waits for `name`, not
            user code).
        since_s: how long it has waited.
        provides: (tag, consumer) of each item that this processor has yet to put.
    """

    processor: str
    kind: str
    task: int
    name: str
    since_s: float
    provides: tuple[tuple[str, int], ...] = ()


class WaitsPage(_Message, frozen=True, tag=True):
    """Reply to `Waits`: what the task's processors wait for."""

    term: int
    waits: tuple[Wait, ...]


class FetchShared(_Message, frozen=True, tag=True):
    """New primary to the primary of its group's keeper: asks for the shared state of the committed boundary.

    `stamp` is the attempt and epoch at work in the caller's view. The call waits until the keeper has that boundary.
    """

    stamp: Stamp
    task: int  # the keeper


class SharedState(_Message, frozen=True, tag=True):
    """Reply to `FetchShared`: {name: value} of the boundary `stamp.epoch`."""

    stamp: Stamp
    term: int
    value: Encoded


class DescribeShared(_Message, frozen=True, tag=True):
    """Leader to primary, after unequal digests of shared state: asks for a digest of each shared attribute.

    `before`: as the attributes were before the epoch of `stamp`; otherwise as they are after it.
    """

    stamp: Stamp
    task: int
    before: bool


class SharedDigests(_Message, frozen=True, tag=True):
    """Reply to `DescribeShared`: (name, digest) of each attribute, sorted."""

    term: int
    digests: tuple[tuple[str, bytes], ...]


class WorkerReport(_Message, frozen=True, tag=True):
    """Worker to worker of an elastic job: what the sender held when it read this view.

    Attributes:
        number, lineage, workers: the view, for a receiver that has not read it.
        position, whole, held, begun: see `elastic.flush.FlushReport`.
    """

    number: int
    lineage: int
    workers: tuple[tuple[str, int], ...]
    position: int
    whole: bool
    held: tuple[tuple[int, int], ...]
    begun: tuple[int, ...]


class PartSums(_Message, frozen=True, tag=True):
    """Worker to worker: the sums of these spans (`elastic.actions.Contribution`).

    Attributes:
        value: the sums, in the order of `spans`.
        apart: the sums are not whole: `value` has the slice that the receiver owns, or no arrays if it owns none.
    """

    view: int
    position: int
    spans: tuple[tuple[int, int], ...]
    tag: bytes
    value: Encoded
    apart: bool = False


class SliceSum(_Message, frozen=True, tag=True):
    """Worker to worker: the sum of the slice that the sender owns, over all parts."""

    view: int
    position: int
    value: Encoded


class ComparedPart(_Message, frozen=True, tag=True):
    """Newcomer, or second worker, to the most senior worker, before the sums of a round: the digest of what a part
    contributes. The receiver computes that, too, and compares, if its user code is at the same call: `tag` is that of
    `PartSums`."""

    view: int
    position: int
    tag: bytes
    part: int
    digest: bytes


class Totals(_Message, frozen=True, tag=True):
    """Donor to a worker that lacks totals: those from position `position` on."""

    view: int
    position: int
    value: Encoded


class GroupKey(_Message, frozen=True, tag=True):
    """Worker to worker, if another communicator adds up: a key and value by which its processes find each other."""

    view: int
    key: str
    content: bytes


class CopyState(_Message, frozen=True, tag=True):
    """Newcomer to worker: asks for the worker's state between two steps, once the last total before it is stable."""


class StateCopy(_Message, frozen=True, tag=True):
    """Reply to `CopyState`.

    Attributes:
        step: the number of the step that comes next.
        position: the number of totals that the state rests on.
        tag: a digest of these totals.
        reports: the reports of the steps before, packed.
    """

    step: int
    position: int
    tag: bytes
    value: Encoded
    reports: tuple[bytes, ...] = ()


class DescribeState(_Message, frozen=True, tag=True):
    """Worker to worker whose tag differs: asks for the digests of its state."""


class StateDigests(_Message, frozen=True, tag=True):
    """Reply to `DescribeState`.

    Attributes:
        step: the step before which the digests were taken, at its check; -1: none yet.
        digests: (path, digest) of each leaf of the state.
        position: the position at which user code waits, or computes; -1: unknown.
        call: what user code asks for there, e.g. "round 2 of step 7".
    """

    step: int
    digests: tuple[tuple[str, bytes], ...]
    position: int = -1
    call: str = ""


class DescribeValue(_Message, frozen=True, tag=True):
    """First worker to another one, at the end of the job: asks for the digest of the other's result, once there."""


class ValueDigest(_Message, frozen=True, tag=True):
    """Reply to `DescribeValue`."""

    digest: bytes


class FollowTotals(_Message, frozen=True, tag=True):
    """Newcomer to worker: asks it to keep the totals from `position` on; with `send`, also to send the stable ones."""

    position: int
    send: bool


class TotalsPage(_Message, frozen=True, tag=True):
    """Reply to `FollowTotals`.

    Attributes:
        first: the first total that the worker keeps; the newcomer copies the state anew if it is behind that.
        count: the number of totals in `value`, from the asked-for position on.
        stable: all totals before this position are stable.
    """

    first: int
    count: int
    stable: int
    value: Encoded


class HoldsTotals(_Message, frozen=True, tag=True):
    """Worker to worker, after the last position: the sender holds all totals below `position`."""

    view: int
    position: int


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
    | FetchShared
    | DescribeShared
    | WorkerReport
    | PartSums
    | SliceSum
    | Totals
    | HoldsTotals
    | ComparedPart
    | GroupKey
    | CopyState
    | FollowTotals
    | DescribeState
    | DescribeValue
)
Reply = (
    Item
    | Answer
    | Accepted
    | LedgerPage
    | WaitsPage
    | SharedState
    | SharedDigests
    | StateCopy
    | TotalsPage
    | StateDigests
    | ValueDigest
    | Refusal
)
Message = Call | Reply
