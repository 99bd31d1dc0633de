"""Detects edges of an epoch whose ends disagree, by two sums per task.

A task has a ledger of everything it sent and received in one attempt and term: items, flags, requests with effects,
and answers. An entry has an identity (kind, sender, receiver, name) and a digest. Both ends of an edge hash these
fields to the same 128-bit number. The task reports the sum of all that it sent, and of all that it received, mod
2**128. Over all tasks

    sum of sent == sum of received   <=>   every edge has both ends, with equal content

except with a probability of about 2**-128. A sum does not depend on order or place, so no pairs are compared. An
identity is added once, however often its message was sent.

If the sums differ, the leader asks for the entries, and `explain` names the edges that disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal

from xxhash import xxh3_128_intdigest

from taskgraph.errors import TaskGraphError, first_lines
from taskgraph.protocol.messages import LedgerEntry

__all__ = [
    "ITEM",
    "REQUEST",
    "ContentConflict",
    "Kind",
    "MessageLedger",
    "decode_sum",
    "encode_sum",
    "entry_hash",
    "explain",
    "total",
]

Kind = Literal["item", "flag", "request", "answer"]
"""The kind of an entry. Both ends must use the same word, or the sums differ.

The name of an item is its tag. The name of a flag contains its digest: the same flag twice is one entry, two different
flags are two. The name of a request contains the method and its number. Its answer has the same name, with sender and
receiver exchanged."""

ITEM: Final[Kind] = "item"
REQUEST: Final[Kind] = "request"

_MASK = (1 << 128) - 1  # the width of the hash


_Key = tuple[str, int, int, str]
"""Identity of an entry: kind, sender, receiver, name."""
Counts = Callable[[_Key, bool, bool], bool]
"""(identity, was sent, was received) -> whether `explain` reports the edge, whose ends disagree."""
_encoded_identities: Final[dict[_Key, bytes]] = {}
"""Caches, by identity of an item, the bytes that are hashed before its digest."""
_CACHED_HEADERS: Final = 4096


class ContentConflict(TaskGraphError):
    """One identity has two contents, so the attempt cannot commit.

    Attributes:
        sent: the task of the ledger sent the entry; else it received it.
        kind, sender, receiver, name: the identity.
        known: the digest that the ledger counted.
        other: the new digest, which it did not count.
    """

    def __init__(
        self, sent: bool, kind: str, sender: int, receiver: int, name: str, known: bytes, other: bytes
    ) -> None:
        super().__init__(
            f"task {sender} sent task {receiver} two different contents of {kind} {name!r} in one attempt "
            f"({known.hex()[:8]} and {other.hex()[:8]}): the epoch must restart"
        )
        self.sent = sent
        self.kind = kind
        self.sender = sender
        self.receiver = receiver
        self.name = name
        self.known = known
        self.other = other


def entry_hash(kind: str, sender: int, receiver: int, name: str, digest: bytes) -> int:
    """Returns the number that both ends of an edge add to their sums: xxh3-128 of the entry's fields.

    The fields are encoded with their lengths, so different entries have different encodings.
    """
    key = (kind, sender, receiver, name)
    return xxh3_128_intdigest((_encoded_identities.get(key) or _encode_identity(key)) + digest)


def _encode_identity(key: _Key) -> bytes:
    """Returns the bytes that are hashed before a digest; caches those of items."""
    kind, sender, receiver, name = key
    kind_bytes = kind.encode()
    name_bytes = name.encode("utf-8", "surrogatepass")  # tags may be any str
    header = b"%d %d %d %d\n" % (sender, receiver, len(kind_bytes), len(name_bytes)) + kind_bytes + name_bytes
    # Items have the same headers in every epoch; other kinds do not.
    if kind == ITEM:
        if len(_encoded_identities) >= _CACHED_HEADERS:
            _encoded_identities.clear()
        _encoded_identities[key] = header
    return header


def total(sums: Iterable[int]) -> int:
    """Returns the sum of all `sums`, mod 2**128."""
    return sum(sums) & _MASK


def encode_sum(total: int) -> bytes:
    """Encodes a sum for a message."""
    return total.to_bytes(16, "big")


decode_sum: Final = int.from_bytes
"""Decodes a sum from a message."""


class MessageLedger:
    """All that a task sent and received in one attempt and one term. A restart or a takeover begins a new ledger."""

    # Defaults on the class make a ledger cheap: every task has one in every epoch.
    sent_sum = 0
    received_sum = 0
    _sent: dict[_Key, bytes] | None = None
    _received: dict[_Key, bytes] | None = None

    def count_sent(self, kind: Kind, sender: int, receiver: int, name: str, digest: bytes) -> bool:
        """Counts an entry that this task sent. Returns False if it was counted before.

        Raises:
            ContentConflict: it was counted before with another digest. The sums stay as they were.
        """
        key = (kind, sender, receiver, name)
        if self._sent is None:
            self._sent = {}
        elif (known := self._sent.get(key)) is not None:
            return _check_same_digest(True, key, known, digest)
        self._sent[key] = digest
        header = _encoded_identities.get(key) or _encode_identity(key)  # as `entry_hash`
        self.sent_sum = (self.sent_sum + xxh3_128_intdigest(header + digest)) & _MASK
        return True

    def count_received(self, kind: Kind, sender: int, receiver: int, name: str, digest: bytes) -> bool:
        """Counts an entry that this task received. Returns False if it was counted before.

        Raises:
            ContentConflict: it was counted before with another digest. The sums stay as they were.
        """
        key = (kind, sender, receiver, name)
        if self._received is None:
            self._received = {}
        elif (known := self._received.get(key)) is not None:
            return _check_same_digest(False, key, known, digest)
        self._received[key] = digest
        header = _encoded_identities.get(key) or _encode_identity(key)  # as `entry_hash`
        self.received_sum = (self.received_sum + xxh3_128_intdigest(header + digest)) & _MASK
        return True

    def has_received(self, kind: Kind, sender: int, receiver: int, name: str) -> bool:
        """True if the identity was received before, so its effect must not happen again."""
        return self._received is not None and (kind, sender, receiver, name) in self._received

    def entries(self) -> tuple[LedgerEntry, ...]:
        """Returns all entries, for the leader's audit."""
        sent = [LedgerEntry(True, *key, digest) for key, digest in (self._sent or {}).items()]
        received = [LedgerEntry(False, *key, digest) for key, digest in (self._received or {}).items()]
        return (*sent, *received)


def _check_same_digest(sent: bool, key: _Key, known: bytes, digest: bytes) -> bool:
    """Returns False: the entry was counted before. Raises ContentConflict if it was counted with another digest."""
    if known != digest:
        raise ContentConflict(sent, *key, known, digest)
    return False


def explain(
    pages: Mapping[int, Sequence[LedgerEntry]], limit: int = 20, *, counts: Counts = lambda edge, sent, received: True
) -> list[str]:
    """Describes the edges that disagree.

    Args:
        pages: task -> the entries of its ledger. Edges of missing tasks are skipped.
        limit: the most lines; a last line counts the rest.
        counts: (identity, was sent, was received) -> False for edges to leave out.

    Returns:
        One line per edge, in the order of sender, receiver and name.
    """
    sent: dict[_Key, bytes] = {}
    received: dict[_Key, bytes] = {}
    lines: list[str] = []
    for task, page in sorted(pages.items()):
        for e in page:
            if task != (e.sender if e.sent else e.receiver):
                lines.append(
                    f"the ledger of task {task} has an entry of another task: {e.kind} {e.name!r} from task "
                    f"{e.sender} to task {e.receiver} (this is a bug in taskgraph)"
                )
                continue
            (sent if e.sent else received)[(e.kind, e.sender, e.receiver, e.name)] = e.digest
    # There may be hundreds of thousands of edges, so only differing ones are sorted.
    differing = [key for key, digest in sent.items() if received.get(key) != digest]
    differing += [key for key in received if key not in sent]
    for key in sorted(differing, key=lambda k: (k[1], k[2], k[0], k[3])):
        kind, sender, receiver, name = key
        if sender not in pages or receiver not in pages or not counts(key, key in sent, key in received):
            continue
        if key not in received:
            lines.append(_describe_not_received(kind, sender, receiver, name))
        elif key not in sent:
            lines.append(_describe_not_sent(kind, sender, receiver, name))
        else:
            lines.append(f"task {sender} sent another {_describe(kind, name)} than task {receiver} has")
    return first_lines(lines, limit)


def _describe(kind: str, name: str) -> str:
    return repr(name) if kind == ITEM else f"{kind} {name!r}"


def _describe_not_received(kind: str, sender: int, receiver: int, name: str) -> str:
    if kind == ITEM:
        return (
            f"task {sender} put {name!r} for task {receiver}, which does not take it "
            "(declare it as inbound of one of its processors)"
        )
    return f"task {sender} sent {kind} {name!r} to task {receiver}, which did not count it"


def _describe_not_sent(kind: str, sender: int, receiver: int, name: str) -> str:
    if kind == ITEM:
        return (
            f"task {receiver} took {name!r} from task {sender}, which does not put it "
            "(declare it as outbound of one of its processors)"
        )
    return f"task {receiver} counted {kind} {name!r} from task {sender}, which did not send it"
