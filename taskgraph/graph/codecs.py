"""Declarations that make users' own types travel: `message` for dataclasses, `codec` for any other type.

A declaration holds in the process that made it, so drivers declare when they are imported: every node imports them.
Names on the wire do not hold the module, since the same file is `__main__` in one process and a module in another.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar, dataclass_transform, overload

from taskgraph.errors import JobError
from taskgraph.signatures import declares_fields, signature

__all__ = [
    "Codec",
    "Message",
    "bind",
    "codec",
    "codec_named",
    "codec_of",
    "message",
    "message_named",
    "message_of",
    "named",
    "reserve",
]

C = TypeVar("C", bound=type[Any])
X = TypeVar("X")


@dataclass(frozen=True, slots=True)
class Codec:
    """The functions that turn values of one type into values that can travel."""

    name: str
    type: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Message:
    """A dataclass that travels.

    Attributes:
        fields: the names of its fields.
        init: those its constructor takes.
        runs_code: its constructor runs code of the user's, which may change what it is given.
    """

    name: str
    type: type
    fields: tuple[str, ...]
    init: frozenset[str]
    runs_code: bool


_codecs: Final[dict[type, Codec]] = {}
_codecs_by_name: Final[dict[str, Codec]] = {}
_messages: Final[dict[type, Message]] = {}
_messages_by_name: Final[dict[str, Message]] = {}
_reserved: Final[set[type]] = set()

codec_of = _codecs.get
codec_named = _codecs_by_name.get
message_of = _messages.get
message_named = _messages_by_name.get
reserve = _reserved.update


def codec(type: type[X], encode: Callable[[X], Any], decode: Callable[[Any], X], *, name: str | None = None) -> None:
    """Makes values of a type travel. Call it where the driver is imported.

    It holds for exactly this type, not for its subclasses: what arrives is of the type that was sent.

    Args:
        type: the class.
        encode: turns one into a value that travels, the same one for equal values.
        decode: turns that back. Arrays in what it gets are read-only, unless a state is restored.
        name: what the type is called between nodes; default its qualified name.

    Raises:
        JobError: the type travels anyway, or another type has that name.
    """
    if not isinstance(type, builtins.type) or not callable(encode) or not callable(decode):
        raise JobError(
            f"tg.codec takes a class and two functions, as in tg.codec(Fraction, encode, decode), not "
            f"({type!r:.50}, {encode!r:.50}, {decode!r:.50})"
        )
    name = type.__qualname__ if name is None else name
    if type in _reserved or type in _messages:
        raise JobError(f"{type.__qualname__} travels without a codec: remove tg.codec({type.__qualname__}, ...)")
    known = _codecs_by_name.get(name)
    if known is not None and not _same_class(known.type, type):
        raise JobError(
            f"two types have a codec called {name!r} ({_at(known.type)} and {_at(type)}): "
            f"give one of them tg.codec(..., name='...')"
        )
    _codecs[type] = _codecs_by_name[name] = Codec(name, type, encode, decode)


def named(name: str, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> Codec:
    """A codec for a type that is not known yet; `bind` adds the type."""
    made = _codecs_by_name[name] = Codec(name, object, encode, decode)
    return made


bind = _codecs.__setitem__
"""From now on values of a type travel by a codec."""


@overload
def message(cls: C) -> C: ...
@overload
def message(*, name: str | None = None) -> Callable[[C], C]: ...
@dataclass_transform(field_specifiers=(dataclasses.field,))
def message(cls: Any = None, *, name: str | None = None) -> Any:
    """Class decorator: a dataclass that travels, field by field. Makes a dataclass of a class that is none yet.

    What arrives was made by calling the class with its fields, and then has exactly the fields that were sent,
    whatever `__post_init__` made of them. Subclasses are declared on their own.

    Args:
        name: what the class is called between nodes; default its qualified name.

    Raises:
        JobError: another class has that name, or the class cannot be called with its fields.
    """

    def declare(target: Any) -> Any:
        made = _dataclass_of(target)
        wire_name = made.__qualname__ if name is None else name
        known = _messages_by_name.get(wire_name)
        if known is not None and not _same_class(known.type, made):
            raise JobError(
                f"two messages are called {wire_name!r} ({_at(known.type)} and {_at(made)}): "
                f"declare one with @tg.message(name='...')"
            )
        fields = dataclasses.fields(made)
        init = frozenset(f.name for f in fields if f.init)
        _check_callable(made, init)
        found = Message(wire_name, made, tuple(f.name for f in fields), init, _runs_code(made))
        _messages[made] = _messages_by_name[wire_name] = found
        return made

    return declare if cls is None else declare(cls)


def _dataclass_of(target: Any) -> Any:
    if not isinstance(target, type):
        raise JobError(f"@tg.message goes on a class, not on {target!r:.100}")
    name = target.__qualname__
    if target in _codecs:
        raise JobError(f"{name} has a codec already: remove it, or @tg.message")
    if target in _reserved:
        raise JobError(f"{name} travels as it is: remove @tg.message")
    if "__dataclass_fields__" in vars(target):
        return target
    if issubclass(target, enum.Enum | tuple | list | dict | set | frozenset | str | bytes | int | float | complex):
        raise JobError(
            f"@tg.message is for dataclasses, whose fields travel one by one, and {name} is another kind of class: "
            f"tg.codec({name}, encode, decode) says how it travels"
        )
    if "__init__" in vars(target) and not declares_fields(target) and not dataclasses.is_dataclass(target):
        raise JobError(
            f"@tg.message: {name} declares no fields, so nothing of it would travel: annotate them instead of writing "
            f"__init__, as in `theta: np.ndarray`; or use tg.codec({name}, encode, decode)"
        )
    try:
        return dataclass(target)
    except TypeError as error:
        raise JobError(
            f"@tg.message: {name} cannot be a dataclass ({error}); use tg.codec, or send its parts"
        ) from error


def _runs_code(cls: Any) -> bool:
    code = getattr(cls.__init__, "__code__", None)
    return hasattr(cls, "__post_init__") or code is None or code.co_filename != "<string>"  # where dataclass wrote it


def _check_callable(cls: type, init: frozenset[str]) -> None:
    try:
        signature(cls).bind(**dict.fromkeys(init))
    except TypeError as error:
        raise JobError(
            f"message {cls.__qualname__} cannot be called with its fields ({error}), so it could not be made where it "
            f"arrives: let dataclass make its __init__, give InitVars a default, or use tg.codec"
        ) from error


def _same_class(one: type, other: type) -> bool:
    """True if both are one class of the source, perhaps made twice: a cell run again, a driver loaded as a module
    and as `__main__`."""
    return one.__qualname__ == other.__qualname__ and _source(one) == _source(other)


def _source(cls: type) -> str:
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__


def _at(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
