"""Messages as headers and back: protobuf, but for those that `compact` has a shorter form for.

The tables here are made from the dataclasses of `taskgraph.protocol.messages` when this module is imported: a new
field of a message needs one line in `frame.proto` of the same name, and nothing here. A field that cannot be
mapped fails the import, not the first message.

A value's bulk never enters protobuf: the header holds an `Encoded`'s digest only, its meta and buffers travel as the
frame's payload.
"""

from __future__ import annotations

import dataclasses
import struct
import types
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError as ProtobufError
from google.protobuf.message import Message as ProtobufMessage

from taskgraph.errors import DecodeError
from taskgraph.protocol import messages
from taskgraph.protocol.messages import Call, Encoded, Message, Reply, Stamp
from taskgraph.protocol.numbers import held
from taskgraph.transport import compact
from taskgraph.transport._proto import frame_pb2

__all__ = [
    "CALLS",
    "DIGEST_BYTES",
    "REPLIES",
    "REPLY_OF",
    "VALUE_FIELD",
    "ParsedHeader",
    "parse_header",
    "parse_whole",
    "to_header",
    "value_of",
]

CALLS: tuple[type, ...] = typing.get_args(Call)
REPLIES: tuple[type, ...] = typing.get_args(Reply)

#: What answers a call when it is not refused.
REPLY_OF: dict[type, type] = {
    messages.Pull: messages.Item,
    messages.Flag: messages.Accepted,
    messages.Request: messages.Answer,
    messages.Offer: messages.Accepted,
    messages.Offers: messages.Accepted,
    messages.Report: messages.Accepted,
    messages.Reports: messages.Accepted,
    messages.Seal: messages.Accepted,
    messages.RequestRestart: messages.Accepted,
    messages.HandOver: messages.Accepted,
    messages.Release: messages.Accepted,
    messages.WrittenFiles: messages.Accepted,
    messages.Audit: messages.LedgerPage,
    messages.Waits: messages.WaitsPage,
}

DIGEST_BYTES = 16  # xxh3-128
_SUM_BYTES = 16  # sums are mod 2**128

# Protobuf's classes are made at run time: `Any` is what they are to a type checker here.
_ToWire = Callable[[Any], Any]
_FromWire = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    name: str
    to_wire: _ToWire
    from_wire: _FromWire
    optional: bool  # None is left out
    required: bool  # a submessage that must be there
    value: bool  # an Encoded: its digest is here, the rest is payload


@dataclasses.dataclass(frozen=True, slots=True)
class _Codec:
    """How one dataclass becomes one protobuf message, field by field."""

    cls: type
    proto: type[ProtobufMessage]
    fields: tuple[_Field, ...]

    def to_wire(self, message: object) -> ProtobufMessage:
        present = {}
        for field in self.fields:
            value = getattr(message, field.name)
            if not (field.optional and value is None):
                present[field.name] = field.to_wire(value)
        return self.proto(**present)

    def from_wire(self, proto: Any, value: Encoded | None = None) -> object:
        found: dict[str, object] = {}
        for field in self.fields:
            if field.value:
                found[field.name] = value
            elif field.optional and not proto.HasField(field.name):
                found[field.name] = None
            elif field.required and not proto.HasField(field.name):
                raise DecodeError(f"a {self.cls.__name__} without {field.name}")
            else:
                found[field.name] = field.from_wire(getattr(proto, field.name))
        return self.cls(**found)


def _same(value: Any) -> Any:
    return value


def _text_to_wire(text: str) -> str:
    """What an exception said may hold half a surrogate pair, as some files' names do: escaped, it travels."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _sum_to_wire(value: int) -> bytes:
    return value.to_bytes(_SUM_BYTES, "big")


def _sum_from_wire(data: bytes) -> int:
    if len(data) != _SUM_BYTES:
        raise DecodeError(f"a sum of {len(data)} bytes; it has {_SUM_BYTES}")
    return int.from_bytes(data, "big")


def _stamp_to_wire(stamp: Stamp) -> ProtobufMessage:
    return frame_pb2.Stamp(attempt=stamp.attempt, epoch=stamp.epoch)


def _stamp_from_wire(proto: Any) -> Stamp:
    return Stamp(proto.attempt, proto.epoch)


def _digest_to_wire(value: Encoded) -> ProtobufMessage:
    return frame_pb2.Encoded(digest=value.digest)


def _numbers_to_wire(numbers: Mapping[str, float]) -> ProtobufMessage:
    entries = [frame_pb2.Number(name=name, value=value) for name, value in numbers.items()]
    return frame_pb2.Numbers(entries=entries)


def _numbers_from_wire(proto: Any) -> Mapping[str, float]:
    return held({entry.name: entry.value for entry in proto.entries})


def _pairs(field: FieldDescriptor) -> tuple[_ToWire, _FromWire]:
    """A tuple of tuples of scalars: each inner tuple is a message whose fields are its places, in order of number."""
    described = field.message_type
    assert described is not None
    inner: Any = getattr(frame_pb2, described.name)
    names = [f.name for f in sorted(described.fields, key=lambda f: f.number)]

    def to_wire(value: Any) -> Any:
        return [inner(**dict(zip(names, places, strict=True))) for places in value]

    def from_wire(protos: Any) -> Any:
        return tuple(tuple(getattr(proto, name) for name in names) for proto in protos)

    return to_wire, from_wire


def _many(codec: _Codec) -> tuple[_ToWire, _FromWire]:
    def to_wire(value: Any) -> Any:
        return [codec.to_wire(entry) for entry in value]

    def from_wire(protos: Any) -> Any:
        return tuple(codec.from_wire(proto) for proto in protos)

    return to_wire, from_wire


_FOR_PEOPLE = ("why", "text")
"""Fields that nobody compares: why something is asked for, or refused."""

_SCALARS = {
    int: FieldDescriptor.CPPTYPE_INT64,
    bool: FieldDescriptor.CPPTYPE_BOOL,
    str: FieldDescriptor.CPPTYPE_STRING,
    bytes: FieldDescriptor.CPPTYPE_STRING,
    float: FieldDescriptor.CPPTYPE_DOUBLE,
}


def _field(cls: type, name: str, hint: Any, field: FieldDescriptor) -> _Field:
    """The conversion of one field, from its type annotation and its protobuf field."""
    optional = False
    if isinstance(hint, types.UnionType) and type(None) in get_args(hint):
        optional = True
        (hint,) = (arg for arg in get_args(hint) if arg is not type(None))
    to_wire: _ToWire = _same
    from_wire: _FromWire = _same
    required = value = False
    if hint is Stamp:
        to_wire, from_wire, required = _stamp_to_wire, _stamp_from_wire, True
    elif hint is Encoded:
        to_wire, required, value = _digest_to_wire, True, True
    elif hint is str and name in _FOR_PEOPLE:
        to_wire = _text_to_wire
    elif hint is int and field.type == FieldDescriptor.TYPE_BYTES:
        to_wire, from_wire = _sum_to_wire, _sum_from_wire
    elif get_origin(hint) is Mapping and get_args(hint) == (str, float):
        to_wire, from_wire = _numbers_to_wire, _numbers_from_wire
    elif get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
        inner = get_args(hint)[0]
        to_wire, from_wire = _pairs(field) if get_origin(inner) is tuple else _many(_codec(inner))
    elif _SCALARS.get(hint) != field.cpp_type:
        raise TypeError(f"{cls.__name__}.{name}: {hint} cannot travel as frame.proto declares it")
    return _Field(name, to_wire, from_wire, optional, required, value)


def _codec(cls: type) -> _Codec:
    proto: Any = getattr(frame_pb2, cls.__name__)
    by_name = proto.DESCRIPTOR.fields_by_name
    hints = get_type_hints(cls)
    fields = []
    for name in (f.name for f in dataclasses.fields(cls)):
        if name not in by_name:
            raise TypeError(f"{cls.__name__}.{name} is missing in frame.proto")
        fields.append(_field(cls, name, hints[name], by_name[name]))
    return _Codec(cls, proto, tuple(fields))


def _slot(cls: type) -> str:
    """The name of a message in the header's oneof: `HandOver` -> `hand_over`."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in cls.__name__).lstrip("_")


_BY_CLASS: dict[type, tuple[str, _Codec]] = {cls: (_slot(cls), _codec(cls)) for cls in (*CALLS, *REPLIES)}
_BY_SLOT: dict[str, _Codec] = dict(_BY_CLASS.values())
VALUE_FIELD: dict[type, str | None] = {
    cls: next((f.name for f in codec.fields if f.value), None) for cls, (_, codec) in _BY_CLASS.items()
}
"""By class of message, the name of the field that holds its bulk, where it has one."""


def value_of(message: Message) -> Encoded | None:
    """The bulk a message carries, or None."""
    name = VALUE_FIELD[type(message)]
    return None if name is None else getattr(message, name)


def with_value(message: Message, value: Encoded) -> Message:
    """The same message with another value in place of the one it carries."""
    if type(message) is messages.Item:  # as a rule
        return messages.Item(message.stamp, message.term, message.tag, value)
    name = VALUE_FIELD[type(message)]
    assert name is not None
    changed: dict[str, Any] = {name: value}
    return dataclasses.replace(message, **changed)


def to_header(message: Message) -> bytes:
    """The header of `message`: everything but the meta and the buffers of its value.

    Raises:
        ValueError, TypeError: a field whose value does not fit its declared type.
    """
    cls = type(message)
    if cls in compact.PACK:
        try:
            return compact.PACK[cls](message)
        except struct.error:  # something does not fit: protobuf has room for it, or says what
            pass
    slot, codec = _BY_CLASS[cls]
    return frame_pb2.Header(**{slot: codec.to_wire(message)}).SerializeToString()  # type: ignore[arg-type]


@dataclasses.dataclass(slots=True)
class ParsedHeader:
    """A header that was read, waiting for the payload that completes it.

    Attributes:
        cls: the message's class.
        digest: of the value to come, or None where the message carries none.
    """

    cls: type
    digest: bytes | None
    _make: Callable[[Encoded | None], Any]

    def message(self, value: Encoded | None) -> Message:
        """The complete message. `value` must be given exactly where `digest` is not None."""
        if (value is None) != (self.digest is None):
            raise DecodeError(f"a {self.cls.__name__} with the wrong kind of payload")
        return self._make(value)  # type: ignore[no-any-return]


def parse_header(data: bytes | memoryview) -> ParsedHeader:
    """Reads a header that `to_header` made.

    Raises:
        DecodeError: anything else.
    """
    data = bytes(data)
    if data and data[0] == compact.MARK:
        message, bare = compact.unpack(data)
        return ParsedHeader(type(message), None if bare is None else bare.digest, partial(_with_value, message))
    try:
        header: Any = frame_pb2.Header.FromString(data)
    except ProtobufError as error:
        raise DecodeError(f"a frame's header is not one of ours: {error}") from None
    slot = header.WhichOneof("message")
    if slot is None:
        raise DecodeError("a frame's header names no message this version knows")
    codec = _BY_SLOT[slot]
    proto = getattr(header, slot)
    digest = None
    if (name := VALUE_FIELD[codec.cls]) is not None:
        if not proto.HasField(name):
            raise DecodeError(f"a {codec.cls.__name__} without {name}")
        digest = getattr(proto, name).digest
        if len(digest) != DIGEST_BYTES:
            raise DecodeError(f"a digest of {len(digest)} bytes; it has {DIGEST_BYTES}")
    return ParsedHeader(codec.cls, digest, partial(codec.from_wire, proto))


def _with_value(message: Any, value: Encoded | None) -> Message:
    return message if value is None else dataclasses.replace(message, value=value)  # type: ignore[no-any-return]


def parse_whole(header: bytes, meta: bytes) -> tuple[Message, Encoded | None]:
    """A message that came whole, and its value, if it has one: of nothing but `meta`, and with its digest unverified.

    Raises:
        DecodeError: not what `to_header` makes, or a payload where none belongs.
    """
    parsed = parse_header(header)
    value = None if parsed.digest is None else Encoded(meta, (), parsed.digest)
    if meta and value is None:
        raise DecodeError(f"a {parsed.cls.__name__} with a payload")
    return parsed.message(value), value
