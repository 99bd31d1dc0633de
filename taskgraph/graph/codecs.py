"""Declarations that make users' own types travel: `message` for dataclasses, `codec` for any other type.

A declaration holds in the process that made it, so drivers declare when they are imported: every node imports them.
Names on the wire do not hold the module, since the same file is `__main__` in one process and a module in another.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar, dataclass_transform, overload

from taskgraph.errors import JobError
from taskgraph.signatures import declares_fields, signature

__all__ = [
    "Codec",
    "DeclaredDataclass",
    "bind",
    "codec",
    "codec_named",
    "codec_of",
    "message",
    "message_named",
    "message_of",
    "register",
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
class DeclaredDataclass:
    """A dataclass declared with `@tg.message`.

    Attributes:
        fields: the names of its fields.
        init_fields: the names of the fields that its constructor takes.
        runs_user_code: the constructor runs user code, which may change its arguments.
    """

    name: str
    type: type
    fields: tuple[str, ...]
    init_fields: frozenset[str]
    runs_user_code: bool


_codecs: Final[dict[type, Codec]] = {}
_codecs_by_name: Final[dict[str, Codec]] = {}
_messages: Final[dict[type, DeclaredDataclass]] = {}
_messages_by_name: Final[dict[str, DeclaredDataclass]] = {}
_reserved: Final[set[type]] = set()

codec_of = _codecs.get
codec_named = _codecs_by_name.get
message_of = _messages.get
message_named = _messages_by_name.get
reserve = _reserved.update
"""Marks types that travel without a codec: declaring them is an error."""


def codec(type: type[X], encode: Callable[[X], Any], decode: Callable[[Any], X], *, name: str | None = None) -> None:
    """Makes values of a type travel. Call it where the driver is imported.

    The codec is for exactly this type, not for its subclasses: values arrive with the type they were sent with.

    Args:
        type: the class.
        encode: converts an instance to a value that travels; equal instances must give equal values.
        decode: converts that value back. Its arrays are read-only, unless a state is restored.
        name: the type's name between nodes; default its qualified name.

    Raises:
        JobError: the type travels without a codec, or another type has that name.
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
            f"two types have a codec called {name!r} ({_qualified_name(known.type)} and {_qualified_name(type)}): "
            f"give one of them tg.codec(..., name='...')"
        )
    _codecs[type] = _codecs_by_name[name] = Codec(name, type, encode, decode)


codec(OrderedDict, dict, OrderedDict)  # what a PyTorch module's state_dict() is


def register(name: str, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> Codec:
    """Registers a codec under a name, for types that `bind` adds later."""
    made = _codecs_by_name[name] = Codec(name, object, encode, decode)
    return made


bind = _codecs.__setitem__
"""Assigns a codec to a type: `bind(type, codec)`."""


@overload
def message(cls: C) -> C: ...
@overload
def message(*, name: str | None = None) -> Callable[[C], C]: ...
@dataclass_transform(field_specifiers=(dataclasses.field,))
def message(cls: Any = None, *, name: str | None = None) -> Any:
    """Class decorator: makes a dataclass travel field by field, and other classes dataclasses first.

    The receiver calls the class with the fields, then sets every field to the value that was sent, whatever
    `__post_init__` did. Each subclass needs its own declaration.

    Args:
        name: the class's name between nodes; default its qualified name.

    Raises:
        JobError: another class has that name, or the class cannot be called with its fields.
    """

    def declare(target: Any) -> Any:
        made = _as_dataclass(target)
        wire_name = made.__qualname__ if name is None else name
        known = _messages_by_name.get(wire_name)
        if known is not None and not _same_class(known.type, made):
            raise JobError(
                f"two messages are called {wire_name!r} ({_qualified_name(known.type)} and {_qualified_name(made)}): "
                f"declare one with @tg.message(name='...')"
            )
        fields = dataclasses.fields(made)
        init = frozenset(f.name for f in fields if f.init)
        _check_constructor(made, init)
        found = DeclaredDataclass(wire_name, made, tuple(f.name for f in fields), init, _runs_user_code(made))
        _messages[made] = _messages_by_name[wire_name] = found
        return made

    return declare if cls is None else declare(cls)


def _as_dataclass(target: Any) -> Any:
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


def _runs_user_code(cls: Any) -> bool:
    code = getattr(cls.__init__, "__code__", None)
    return hasattr(cls, "__post_init__") or code is None or code.co_filename != "<string>"  # dataclass's own


def _check_constructor(cls: type, init: frozenset[str]) -> None:
    try:
        signature(cls).bind(**dict.fromkeys(init))
    except TypeError as error:
        raise JobError(
            f"message {cls.__qualname__} cannot be called with its fields ({error}), so it could not be made where it "
            f"arrives: let dataclass make its __init__, give InitVars a default, or use tg.codec"
        ) from error


def _same_class(one: type, other: type) -> bool:
    """True if both come from one class statement, which may have run twice: a notebook cell that is run again, a
    driver that is loaded as a module and as `__main__`."""
    return one.__qualname__ == other.__qualname__ and _source_file(one) == _source_file(other)


def _source_file(cls: type) -> str:
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__


def _qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
