"""Messages as bytes: every message survives, and damaged bytes are refused."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport_kit import EXCHANGES, encoded

from taskgraph.errors import DecodeError
from taskgraph.protocol import messages as m
from taskgraph.transport import wire

int64 = st.integers(-(2**63), 2**63 - 1)
text = st.text(st.characters(exclude_categories=("Cs",)))
values = st.builds(lambda meta, bulk: encoded(meta, *bulk), st.binary(), st.lists(st.binary(), max_size=3))
BY_HINT: dict[Any, st.SearchStrategy[Any]] = {
    int: int64,
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: text,
    bytes: st.binary(),
    m.Sum: st.binary(min_size=16, max_size=16),
    m.Stamp: st.builds(m.Stamp, int64, int64),
    m.Encoded: values,
    m.KeptBuffers | None: st.none()
    | st.builds(m.KeptBuffers, st.binary(), st.lists(int64, max_size=3).map(tuple), st.binary()),
    Mapping[str, float] | None: st.none() | st.dictionaries(text, st.floats(allow_nan=False), max_size=9),
}


def strategy(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type; of a class of messages, messages."""
    if hint in BY_HINT:
        return BY_HINT[hint]
    if typing.get_origin(hint) is Annotated:  # at least one
        return strategy(typing.get_args(hint)[0]).filter(bool)
    if typing.get_origin(hint) is tuple:
        first, *others = typing.get_args(hint)
        if others == [...]:
            return st.lists(strategy(first), max_size=3).map(tuple)
        return st.tuples(*map(strategy, (first, *others)))
    hints = typing.get_type_hints(hint, include_extras=True)
    return st.builds(hint, **{name: strategy(hints[name]) for name in hint.__struct_fields__})


def round_trip(message: m.Message) -> m.Message:
    read = wire.from_header(wire.to_header(message))
    if value := wire.value_of(message):
        received = wire.value_of(read)
        assert received is not None and received.digest == value.digest
        received.complete(value.meta, value.buffers)
    return read


def read_damaged(header: bytes) -> None:
    """Another message, or a `DecodeError`."""
    try:
        read = wire.from_header(header)
    except DecodeError:
        return
    assert isinstance(read, (*wire.CALLS, *wire.REPLIES))


@pytest.mark.parametrize("cls", (*wire.CALLS, *wire.REPLIES), ids=lambda cls: cls.__name__)
def test_every_message_survives(cls: type) -> None:
    @given(strategy(cls))
    def survives(message: m.Message) -> None:
        read = round_trip(message)
        assert repr(read) == repr(message)  # repr: tells -0.0 from 0.0, and the order of numbers
        assert read == message

    survives()


def test_every_call_has_a_reply() -> None:
    assert set(wire.REPLY_OF) == set(wire.CALLS)
    assert set(wire.REPLY_OF.values()) | {m.Refusal} == set(wire.REPLIES)


@pytest.mark.parametrize("sum_", [b"", bytes(17)])
def test_sum_of_other_width_is_refused(sum_: bytes) -> None:
    with pytest.raises(DecodeError):
        wire.from_header(wire.to_header(m.Report(m.Stamp(0, 0), 0, 0, False, 0, sum_, bytes(16))))


STAMP = [1, 2]
DIGEST = bytes(16)


@pytest.mark.parametrize(
    "parts",
    [
        ["Seal", STAMP, 3],  # a field is missing
        ["Seal", STAMP, 3, 4, 5],  # one too many
        ["Seal", STAMP, "3", 4],  # another type
        ["Seal", [1], 3, 4],
        ["Nothing", STAMP],
        ["Item", STAMP, 1, "tag", b"short"],
        ["Item", STAMP, 1, "tag", [[]]],
        ["Item", STAMP, 1, "tag", [[[]]] * 9],
        ["Report", STAMP, 3, 4, True, 5, b"short", DIGEST],
        ["Report", STAMP, 3, 4, True, 5, 7, DIGEST],
        ["Report", STAMP, 3, 4, True, 5, DIGEST, DIGEST, False, {"loss": "low"}],
        ["Reports", []],
        ["WrittenFiles", []],
        ["Offers", STAMP, 3, 4, 5, [], DIGEST],
        {"Seal": STAMP},
        None,
    ],
)
def test_malformed_header_is_refused(parts: Any) -> None:
    with pytest.raises(DecodeError):
        wire.from_header(msgspec.msgpack.encode(parts))


@pytest.mark.parametrize("array", [b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"])
def test_nested_or_promised_arrays_are_refused(array: bytes) -> None:
    head = wire.to_header(m.Item(m.Stamp(1, 2), 3, "tag", encoded()))[:-18]
    for header in (array, head + array, wire.to_header(m.Accepted()) + array):
        with pytest.raises(DecodeError):
            wire.from_header(header)


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    read_damaged(data)


@given(st.sampled_from(EXCHANGES), st.data())
def test_damaged_header_is_another_message_or_refused(pair: tuple[m.Call, m.Reply], data: st.DataObject) -> None:
    header = bytearray(wire.to_header(pair[data.draw(st.integers(0, 1))]))
    for _ in range(data.draw(st.integers(1, 3))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    read_damaged(bytes(header[: len(header) - data.draw(st.integers(0, 5))]))


def test_text_of_an_exception_may_hold_half_a_character() -> None:
    refusal, asked = m.Refusal(m.Reason.USER_ERROR, "f\udcff"), m.RequestRestart(m.Stamp(1, 2), 3, "f\udcff")
    assert round_trip(refusal) == m.Refusal(m.Reason.USER_ERROR, "f\\udcff")
    assert round_trip(asked) == m.RequestRestart(m.Stamp(1, 2), 3, "f\\udcff")
    with pytest.raises(UnicodeEncodeError):
        wire.to_header(m.Pull(m.Stamp(1, 2), 3, 4, 5, "tag\udcff"))


def test_completed_value_equals_the_original() -> None:
    whole, bare = encoded(b"meta", bytes(10), bytes(5)), encoded(b"meta")
    assert (whole.size_bytes, bare.size_bytes) == (19, 4)
    late = m.Encoded(b"", (), whole.digest)
    late.complete(whole.meta, whole.buffers)
    assert late == whole and late.size_bytes == 19 and hash(late) == hash(whole)
    assert m.EncodedOnDevice(whole.meta, whole.buffers, whole.digest) != whole
    for other in (m.Encoded(b"atem", whole.buffers, whole.digest), m.Encoded(b"meta", (), whole.digest), bare, 7):
        assert late != other
