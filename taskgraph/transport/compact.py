"""Short headers of the messages that every epoch has many of: `Pull`, `Item`, `Offer`, `Offers`, `Report`, `Reports`,
`Accepted`.

A fixed struct in place of protobuf: a tenth of the time, for what is most of the work in epochs of small items. They
begin with a byte 0, which no protobuf message does, and the message's number. Whatever does not fit (numbers beyond
64 bits, names beyond 64 KiB) travels as protobuf, like all other messages.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from weakref import WeakValueDictionary

from taskgraph.errors import DecodeError
from taskgraph.protocol.messages import Accepted, Encoded, Item, Message, Offer, Offers, Pull, Report, Reports, stamp_of
from taskgraph.protocol.numbers import FEW, Names, Numbers

__all__ = ["MARK", "PACK", "UNPACK", "unpack"]

MARK = 0
"""The first byte of a compact header."""

_PULL, _ITEM, _REPORT, _ACCEPTED, _REPORTS, _OFFER, _OFFERS = 1, 2, 3, 4, 5, 6, 7
_PULL_HEAD = struct.Struct("!BBqqqqqH")  # attempt, epoch, sender, sender_term, task, count; then the tag
_ITEM_HEAD = struct.Struct("!BBqqq16s")  # attempt, epoch, term, digest; then the tag
_ITEM_HEAD_BYTES = _ITEM_HEAD.size
_REPORT_HEAD = struct.Struct("!BBqqqqBq16s16s")  # attempt, epoch, task, term, flags, version, sent, received; numbers
_REPORT_HEAD_BYTES = _REPORT_HEAD.size
_REPORTS_HEAD = struct.Struct("!BB")  # then each as if it travelled alone
_COUNT = struct.Struct("!H")  # of named numbers; then the numbers, the sizes of their names, and the names
_ACCEPTED_HEAD = struct.Struct("!BBq")  # term
_OFFER_HEAD = struct.Struct("!BBqqqqBq16s")  # attempt, epoch, term, task, flags, invitation, digest
_OFFERS_HEAD = struct.Struct("!BBqqqqqH16s")  # attempt, epoch, term, task, invitation, count, digest; then each
_OFFERS_PART = struct.Struct("!qI16s")  # epoch, size, digest
_COMMITTED, _CANDIDATE = 1, 2
_DONE, _FINISH = 1, 2
_NUMBERS, _PREVIOUS = 4, 8  # they are a mapping, where they are None otherwise
_NAMED, _NAMED_PREVIOUS = 16, 32  # which is not empty, and stands behind the head
_AHEAD = 64
_OF_MOST = _DONE | _FINISH | _NUMBERS | _PREVIOUS | _AHEAD  # what is said by the flag alone
_KNOWN = _OF_MOST | _NAMED | _NAMED_PREVIOUS


def unpack(data: bytes) -> tuple[Message, Encoded | None]:
    """The message, and the value in it where it has one, of which the digest alone is known.

    Raises:
        DecodeError: not a header that one of `PACK` makes.
    """
    read = UNPACK.get(data[:2])
    if read is None:
        raise DecodeError(f"a compact header of unknown kind {data[1:2].hex()}")
    try:
        return read(data, b"")
    except (struct.error, UnicodeDecodeError) as error:
        raise DecodeError(f"a compact header of kind {data[1]} that cannot be read: {error}") from None


def _pack_pull(message: Pull) -> bytes:
    (attempt, epoch), whose = message.stamp, (message.sender, message.sender_term, message.task)
    return _PULL_HEAD.pack(MARK, _PULL, attempt, epoch, *whose, message.count) + message.tag.encode()


def _unpack_pull(data: bytes, _: bytes) -> tuple[Pull, None]:
    _, _, attempt, epoch, sender, sender_term, task, count = _PULL_HEAD.unpack_from(data)
    tag = data[_PULL_HEAD.size :].decode()
    return Pull(stamp_of((attempt, epoch)), sender, sender_term, task, tag, count), None


def _pack_item(message: Item) -> bytes:
    (attempt, epoch), tag = message.stamp, message.tag.encode()
    return _ITEM_HEAD.pack(MARK, _ITEM, attempt, epoch, message.term, message.value.digest) + tag


def _unpack_item(data: bytes, meta: bytes) -> tuple[Item, Encoded]:
    _, _, attempt, epoch, term, digest = _ITEM_HEAD.unpack_from(data)
    value = Encoded(meta, (), digest)
    return Item(stamp_of((attempt, epoch)), term, data[_ITEM_HEAD_BYTES:].decode(), value), value


def _pack_report(message: Report) -> bytes:
    return _pack_each((message,))


def _pack_each(reports: Sequence[Report]) -> bytes:
    """Reports, one behind the other, each as if it travelled alone."""
    packed, head = [], _REPORT_HEAD.pack
    for message in reports:
        (attempt, epoch), numbers, previous = message.stamp, message.numbers, message.previous
        flags = (
            (_DONE if message.done else 0)
            | (_FINISH if message.finish else 0)
            | (0 if numbers is None else _NAMED | _NUMBERS if numbers else _NUMBERS)
            | (0 if previous is None else _NAMED_PREVIOUS | _PREVIOUS if previous else _PREVIOUS)
            | (_AHEAD if message.ahead else 0)
        )
        sent, received = message.sent.to_bytes(16, "big"), message.received.to_bytes(16, "big")
        whose = message.task, message.term, flags, message.version
        packed.append(head(MARK, _REPORT, attempt, epoch, *whose, sent, received))
        if numbers:
            packed.append(_pack_numbers(numbers))
        if previous:
            packed.append(_pack_numbers(previous))
    return b"".join(packed)


def _unpack_report(data: bytes, _: bytes) -> tuple[Report, None]:
    reports = _read_reports(data, 0)
    if len(reports) != 1:
        raise DecodeError(f"{len(reports)} reports in place of one")
    return reports[0], None


def _pack_reports(message: Reports) -> bytes:
    return _REPORTS_HEAD.pack(MARK, _REPORTS) + _pack_each(message.reports)


def _unpack_reports(data: bytes, _: bytes) -> tuple[Reports, None]:
    return Reports(tuple(_read_reports(data, _REPORTS_HEAD.size))), None


def _read_reports(data: bytes, at: int) -> list[Report]:
    """The reports that lie one behind the other from there on, up to the end."""
    reports, size, number = [], len(data), int.from_bytes
    last: Mapping[str, float] | None = None  # of the epoch before, as a rule: it is not held twice
    last_data = b""
    while at < size:
        mark, kind, attempt, epoch, task, term, flags, version, sent, received = _REPORT_HEAD.unpack_from(data, at)
        at += _REPORT_HEAD_BYTES
        if mark != MARK or kind != _REPORT:
            raise DecodeError(f"something of kind {kind} among reports")
        numbers: Mapping[str, float] | None = {} if flags & _NUMBERS else None
        previous: Mapping[str, float] | None = {} if flags & _PREVIOUS else None
        if flags & ~_OF_MOST:
            if flags & ~_KNOWN:
                raise DecodeError(f"a report with unknown flags {flags}")
            if (numbers is None and flags & _NAMED) or (previous is None and flags & _NAMED_PREVIOUS):
                raise DecodeError("a report with numbers that are none")
            before, before_data = last, last_data
            if flags & _NAMED:
                start = at
                numbers, at = _unpack_numbers(data, start)
                last, last_data = numbers, data[start:at]
            if flags & _NAMED_PREVIOUS:
                if before is not None and data.startswith(before_data, at):
                    previous = before
                    at += len(before_data)
                else:
                    previous, at = _unpack_numbers(data, at)
        report = Report(
            stamp_of((attempt, epoch)),
            task,
            term,
            flags & _DONE != 0,
            version,
            number(sent, "big"),
            number(received, "big"),
            flags & _FINISH != 0,
            numbers,
            previous,
            flags & _AHEAD != 0,
        )
        reports.append(report)
    if at != size:
        raise DecodeError(f"reports in {size} bytes; they have {at}")
    return reports


def _pack_numbers(numbers: Mapping[str, float]) -> bytes:
    names = [name.encode() for name in numbers]
    count = len(names)
    if type(numbers) is Numbers:
        return b"".join([_COUNT.pack(count), numbers.packed, struct.pack(f"!{count}H", *map(len, names)), *names])
    sizes = struct.pack(f"!{count}d{count}H", *numbers.values(), *map(len, names))
    return _COUNT.pack(count) + sizes + b"".join(names)


_known: Final[WeakValueDictionary[bytes, Names]] = WeakValueDictionary()
"""Sizes and names, as they travel -> these names, where somebody holds numbers of theirs: not read in every report."""


def _unpack_numbers(data: bytes, start: int) -> tuple[Mapping[str, float], int]:
    """Named numbers that begin at `start`, and where they end."""
    (count,) = _COUNT.unpack_from(data, start)
    if not count:
        raise DecodeError("a report with numbers that are none")
    start += _COUNT.size
    if count > FEW:
        return _unpack_many(data, start, count)
    into: dict[str, float] = {}
    read = struct.Struct(f"!{count}d{count}H")
    found = read.unpack_from(data, start)
    start += read.size
    for number, size in zip(found[:count], found[count:], strict=True):
        into[data[start : start + size].decode()] = number
        start += size
    if len(into) != count:
        raise DecodeError("a report with a name twice")
    return into, start


def _unpack_many(data: bytes, start: int, count: int) -> tuple[Numbers, int]:
    middle = start + 8 * count
    sizes = struct.unpack_from(f"!{count}H", data, middle)
    end = middle + 2 * count + sum(sizes)
    block = data[middle:end]
    names = _known.get(block)
    if names is None:
        found, at = [], 2 * count
        for size in sizes:
            found.append(block[at : at + size].decode())
            at += size
        if len(set(found)) != count:
            raise DecodeError("a report with a name twice")
        names = _known[block] = Names.of(tuple(found))
    return Numbers(names, data[start:middle]), end


def _pack_accepted(message: Accepted) -> bytes:
    return _ACCEPTED_HEAD.pack(MARK, _ACCEPTED, message.term)


def _unpack_accepted(data: bytes, _: bytes) -> tuple[Accepted, None]:
    return Accepted(_ACCEPTED_HEAD.unpack(data)[2]), None


def _pack_offer(message: Offer) -> bytes:
    (attempt, epoch), flags = message.stamp, 0
    flags |= _COMMITTED if message.committed else 0
    flags |= _CANDIDATE if message.candidate else 0
    whose = message.term, message.task, flags, message.invitation
    return _OFFER_HEAD.pack(MARK, _OFFER, attempt, epoch, *whose, message.value.digest)


def _unpack_offer(data: bytes, meta: bytes) -> tuple[Offer, Encoded]:
    _, _, attempt, epoch, term, task, flags, invitation, digest = _OFFER_HEAD.unpack(data)
    if flags & ~(_COMMITTED | _CANDIDATE):
        raise DecodeError(f"an offer with unknown flags {flags}")
    committed, candidate = bool(flags & _COMMITTED), bool(flags & _CANDIDATE)
    value = Encoded(meta, (), digest)
    return Offer(stamp_of((attempt, epoch)), term, task, committed, candidate, invitation, value), value


def _pack_offers(message: Offers) -> bytes:
    (attempt, epoch), count = message.stamp, len(message.parts)
    whose = message.term, message.task, message.invitation, count
    head = _OFFERS_HEAD.pack(MARK, _OFFERS, attempt, epoch, *whose, message.value.digest)
    return head + b"".join([_OFFERS_PART.pack(*part) for part in message.parts])


def _unpack_offers(data: bytes, meta: bytes) -> tuple[Offers, Encoded]:
    _, _, attempt, epoch, term, task, invitation, count, digest = _OFFERS_HEAD.unpack_from(data)
    if len(data) != _OFFERS_HEAD.size + count * _OFFERS_PART.size:
        raise DecodeError(f"{count} offers in {len(data)} bytes")
    value, parts = Encoded(meta, (), digest), tuple(_OFFERS_PART.iter_unpack(data[_OFFERS_HEAD.size :]))
    return Offers(stamp_of((attempt, epoch)), term, task, invitation, parts, value), value


PACK: Final[dict[type, Callable[..., bytes]]] = {
    Pull: _pack_pull,
    Item: _pack_item,
    Report: _pack_report,
    Reports: _pack_reports,
    Accepted: _pack_accepted,
    Offer: _pack_offer,
    Offers: _pack_offers,
}
"""What makes the header of a message of that class; it raises `struct.error` where something does not fit."""

UNPACK: Final[dict[bytes, Callable[[bytes, bytes], tuple[Message, Encoded | None]]]] = {
    bytes((MARK, _PULL)): _unpack_pull,
    bytes((MARK, _ITEM)): _unpack_item,
    bytes((MARK, _REPORT)): _unpack_report,
    bytes((MARK, _REPORTS)): _unpack_reports,
    bytes((MARK, _ACCEPTED)): _unpack_accepted,
    bytes((MARK, _OFFER)): _unpack_offer,
    bytes((MARK, _OFFERS)): _unpack_offers,
}
"""By the first two bytes of a header, what reads it. It raises `struct.error` and `UnicodeDecodeError`, too."""
