"""Messages survive the wire exactly, and the tables follow the dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport_kit import EXCHANGES, encoded

from taskgraph.errors import DecodeError
from taskgraph.protocol import messages as m
from taskgraph.transport import wire
from taskgraph.transport._proto import frame_pb2

int64 = st.integers(-(2**63), 2**63 - 1)
sums = st.integers(0, 2**128 - 1)
text = st.text(st.characters(exclude_categories=("Cs",)))
stamps = st.builds(m.Stamp, int64, int64)
numbers = st.none() | st.dictionaries(text, st.floats(allow_nan=False), max_size=4)
values = st.builds(lambda meta, bulk: encoded(meta, *bulk), st.binary(), st.lists(st.binary(), max_size=3))
parts = st.tuples(int64, st.integers(0, 2**32 - 1), st.binary(min_size=16, max_size=16))
entries = st.builds(m.LedgerEntry, st.booleans(), text, int64, int64, text, st.binary())
waits = st.builds(
    m.Wait, text, text, int64, text, st.floats(allow_nan=False), st.lists(st.tuples(text, int64), max_size=3).map(tuple)
)
reports = st.builds(m.Report, stamps, int64, int64, st.booleans(), int64, sums, sums, st.booleans(), numbers, numbers)
written = st.builds(m.Written, stamps, int64, int64, text)
BY_HINT: dict[Any, st.SearchStrategy[Any]] = {
    int: int64,
    bool: st.booleans(),
    str: text,
    m.Stamp: stamps,
    m.Encoded: values,
    Mapping[str, float] | None: numbers,
    tuple[m.LedgerEntry, ...]: st.lists(entries, max_size=3).map(tuple),
    tuple[tuple[int, int, bytes], ...]: st.lists(parts, min_size=1, max_size=3).map(tuple),
    tuple[m.Report, ...]: st.lists(reports, min_size=1, max_size=3).map(tuple),
    tuple[m.Written, ...]: st.lists(written, min_size=1, max_size=3).map(tuple),
    tuple[m.Wait, ...]: st.lists(waits, max_size=3).map(tuple),
}


def strategy(cls: type) -> st.SearchStrategy[Any]:
    import typing

    hints = typing.get_type_hints(cls)
    fields = {f.name: BY_HINT[hints[f.name]] for f in dataclasses.fields(cls)}
    if cls is m.Report:
        fields["sent"] = fields["received"] = sums
    return st.builds(cls, **fields)


def round_trip(message: m.Message) -> m.Message:
    return wire.parse_header(wire.to_header(message)).message(wire.value_of(message))


@pytest.mark.parametrize("cls", (*wire.CALLS, *wire.REPLIES), ids=lambda cls: cls.__name__)
def test_every_message_survives(cls: type) -> None:
    @given(strategy(cls))
    def survives(message: m.Message) -> None:
        assert repr(round_trip(message)) == repr(message)  # repr: tells -0.0 from 0.0, and the order of numbers
        assert round_trip(message) == message

    survives()


def test_every_field_of_every_message_is_in_the_proto() -> None:
    for cls in (*wire.CALLS, *wire.REPLIES, m.LedgerEntry, m.Wait):
        declared = set(getattr(frame_pb2, cls.__name__).DESCRIPTOR.fields_by_name)
        assert declared == {field.name for field in dataclasses.fields(cls)}, cls
    slots = {field.message_type.name for field in frame_pb2.Header.DESCRIPTOR.fields}
    assert slots == {cls.__name__ for cls in (*wire.CALLS, *wire.REPLIES)}
    assert set(wire.REPLY_OF) == set(wire.CALLS)


@pytest.mark.parametrize("sum_", [-1, 2**128])
def test_a_sum_out_of_range_is_an_error_where_it_is_made(sum_: int) -> None:
    with pytest.raises(OverflowError):
        wire.to_header(m.Report(m.Stamp(0, 0), 0, 0, False, 0, sum_, 0))


def test_headers_that_lack_something_are_refused() -> None:
    broken: list[Any] = [
        frame_pb2.Header(),
        frame_pb2.Header(item=frame_pb2.Item(stamp=frame_pb2.Stamp())),
        frame_pb2.Header(item=frame_pb2.Item(value=frame_pb2.Encoded(digest=b"short"))),
        frame_pb2.Header(pull=frame_pb2.Pull()),
        frame_pb2.Header(report=frame_pb2.Report(stamp=frame_pb2.Stamp(), sent=b"1")),
    ]
    for header in broken:
        with pytest.raises(DecodeError):
            wire.parse_header(header.SerializeToString()).message(None)


@given(st.binary(max_size=200))
def test_garbage_is_a_decode_error(data: bytes) -> None:
    try:
        parsed = wire.parse_header(data)
        parsed.message(None if parsed.digest is None else encoded())
    except DecodeError:
        pass


@given(st.sampled_from(EXCHANGES), st.data())
def test_damaged_headers_are_messages_or_decode_errors(pair: tuple[m.Call, m.Reply], data: st.DataObject) -> None:
    header = bytearray(wire.to_header(pair[data.draw(st.integers(0, 1))]))
    for _ in range(data.draw(st.integers(1, 3))):
        if header:
            header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        parsed = wire.parse_header(bytes(header))
        parsed.message(None if parsed.digest is None else encoded())
    except DecodeError:
        pass


def test_what_an_exception_said_travels_though_it_cannot_be_encoded() -> None:
    refusal, asked = m.Refusal(m.Reason.USER_ERROR, "f\udcff"), m.RequestRestart(m.Stamp(1, 2), 3, "f\udcff")
    assert wire.parse_header(wire.to_header(refusal)).message(None) == dataclasses.replace(refusal, text="f\\udcff")
    assert wire.parse_header(wire.to_header(asked)).message(None) == dataclasses.replace(asked, why="f\\udcff")


def test_a_value_knows_its_size_also_where_its_buffers_came_later() -> None:
    whole, bare = encoded(b"meta", bytes(10), bytes(5)), encoded(b"meta")
    assert (whole.size_bytes, bare.size_bytes) == (19, 4)
    late = m.Encoded(b"meta", (), whole.digest)
    late.complete(whole.buffers)
    assert late == whole and late.size_bytes == 19 and hash(late) == hash(whole)
    assert m.EncodedOnDevice(whole.meta, whole.buffers, whole.digest) != whole
    for other in (m.Encoded(b"atem", whole.buffers, whole.digest), m.Encoded(b"meta", (), whole.digest), bare, 7):
        assert late != other
