"""The short headers: the same message back, or protobuf where it does not fit; and nothing but a DecodeError."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskgraph.errors import DecodeError
from taskgraph.protocol.messages import (
    Accepted,
    Encoded,
    Item,
    Message,
    Offer,
    Offers,
    Pull,
    Report,
    Reports,
    Seal,
    Stamp,
)
from taskgraph.transport import compact, wire
from taskgraph.transport._proto import frame_pb2

INT = st.integers(-(2**63), 2**63 - 1)
STAMP = st.builds(Stamp, INT, INT)
SUM = st.integers(0, 2**128 - 1)
TAG = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUE = st.builds(lambda digest: Encoded(b"m", (), digest), st.binary(min_size=16, max_size=16))
NUMBERS = st.none() | st.dictionaries(TAG, st.floats(allow_nan=False), max_size=3)
BOOL = st.booleans()
REPORTS = st.builds(Report, STAMP, INT, INT, BOOL, INT, SUM, SUM, BOOL, NUMBERS, NUMBERS, BOOL)
PARTS = st.lists(
    st.tuples(INT, st.integers(0, 2**32 - 1), st.binary(min_size=16, max_size=16)), min_size=1, max_size=3
).map(tuple)
MESSAGES = st.one_of(
    st.builds(Pull, STAMP, INT, INT, INT, TAG),
    st.builds(Item, STAMP, INT, TAG, VALUE),
    st.builds(Accepted, INT),
    st.builds(Offer, STAMP, INT, INT, BOOL, BOOL, INT, VALUE),
    st.builds(Offers, STAMP, INT, INT, INT, PARTS, VALUE),
    REPORTS,
    st.builds(Reports, st.lists(REPORTS, min_size=1, max_size=3).map(tuple)),
)


@given(MESSAGES)
def test_the_same_message_comes_back(message: Message) -> None:
    header = wire.to_header(message)
    assert header[0] == compact.MARK
    parsed = wire.parse_header(header)
    value = message.value if isinstance(message, Item | Offer | Offers) else None
    assert parsed.cls is type(message)
    assert parsed.digest == (value.digest if value else None)
    assert parsed.message(value) == message


@pytest.mark.parametrize(
    "message",
    [
        Seal(Stamp(1, 2), 3, 4),
        Report(Stamp(1, 2), 3, 4, True, 5, 6, 7, numbers={"x" * 70_000: 0.5}),
        Report(Stamp(1, 2), 3, 4, True, 5, 6, 7, previous={str(n): 0.5 for n in range(70_000)}),
    ],
)
def test_others_travel_as_protobuf(message: Message) -> None:
    header = wire.to_header(message)
    assert header[0] != compact.MARK
    assert wire.parse_header(header).message(None) == message


def test_a_number_that_does_not_fit_is_an_error_as_before() -> None:
    with pytest.raises(ValueError, match="range"):
        wire.to_header(Accepted(2**63))


ONE = Report(Stamp(1, 2), 3, 4, True, 5, 6, 7, numbers={"a": 0.5, "b": -0.0}, previous={"c": 1.0})
REPORT = wire.to_header(ONE)
SEVERAL = wire.to_header(Reports((ONE, ONE)))


@given(
    st.sampled_from([REPORT, SEVERAL]),
    st.lists(st.tuples(st.integers(0, len(SEVERAL) - 1), st.integers(0, 255)), max_size=3),
    st.integers(0, 5),
)
def test_a_damaged_report_is_another_one_or_a_decode_error(
    whole: bytes, damage: list[tuple[int, int]], cut: int
) -> None:
    header = bytearray(whole[: len(whole) - cut])
    for place, byte in damage:
        header[place % len(header)] = byte
    try:
        parsed = wire.parse_header(bytes(header))
    except DecodeError:
        return
    if parsed.cls in (Report, Reports):
        assert wire.to_header(parsed.message(None)) == header


def test_reports_without_any_are_refused() -> None:
    for header in (SEVERAL[:2], frame_pb2.Header(reports=frame_pb2.Reports()).SerializeToString()):
        with pytest.raises(DecodeError, match="none of them"):
            wire.parse_header(header).message(None)


def test_offers_without_any_or_cut_short_are_refused() -> None:
    offers = wire.to_header(Offers(Stamp(1, 2), 3, 4, 5, ((2, 0, bytes(16)),), Encoded(b"", (), bytes(16))))
    for cut in range(1, 29):
        with pytest.raises(DecodeError):
            wire.parse_header(offers[:-cut])
    none = frame_pb2.Header(offers=frame_pb2.Offers(stamp=frame_pb2.Stamp(), value=frame_pb2.Encoded(digest=bytes(16))))
    with pytest.raises(DecodeError, match="none of them"):
        wire.parse_header(none.SerializeToString()).message(Encoded(b"", (), bytes(16)))


def test_nothing_else_travels_among_reports() -> None:
    with pytest.raises(DecodeError, match="among reports"):
        wire.parse_header(REPORT[:1] + SEVERAL[1:2] + wire.to_header(Accepted(3)) + bytes(100))


def test_an_offer_with_flags_nobody_knows_is_refused() -> None:
    offer = bytearray(wire.to_header(Offer(Stamp(1, 2), 3, 4, True, False, 5, Encoded(b"", (), bytes(16)))))
    assert offer[34] == 1
    for flags in (4, 129):
        offer[34] = flags
        with pytest.raises(DecodeError, match=f"unknown flags {flags}"):
            wire.parse_header(bytes(offer))


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(DecodeError, match="twice"):
        wire.parse_header(REPORT.replace(b"ab", b"aa"))


@given(st.binary(max_size=80))
def test_anything_else_is_a_decode_error(data: bytes) -> None:
    header = bytes([compact.MARK]) + data
    try:
        parsed = wire.parse_header(header)
    except DecodeError:
        return
    value = Encoded(b"", (), parsed.digest) if parsed.digest is not None else None
    assert wire.to_header(parsed.message(value)) == header


def test_a_value_is_asked_for_and_nothing_else() -> None:
    parsed = wire.parse_header(wire.to_header(Accepted(3)))
    with pytest.raises(DecodeError, match="wrong kind of payload"):
        parsed.message(Encoded(b"", (), bytes(16)))
