"""Why values of a task came out differently, as far as the values tell: for what strict mode says.

What is looked at may be anything that an object of users has, and its `__class__` be code: its type is asked instead.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Container, Iterable, Mapping
from typing import Any

import numpy as np

from taskgraph.errors import class_name
from taskgraph.graph import dtypes
from taskgraph.graph.values import encode
from taskgraph.protocol.deviceloss import device_error

__all__ = ["digest", "equal_unlike", "made_of_state", "padding_of", "pickled", "shared_state"]

_UNCHANGING = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, np.generic)
"""Values that nobody writes to: to have one of them twice is no mistake."""
_DEEP = 5
"""Containers within one another that are looked into for a hint: users' may contain themselves."""


def digest(value: object) -> bytes | None:
    """What tells whether a value is what it was; None where it cannot travel."""
    try:
        return encode(value, what="").digest
    except Exception as error:  # a codec, or a metaclass, raises what it likes where a value cannot travel
        if isinstance(error, MemoryError) or device_error(error) is not None:
            raise
        return None


def shared_state(
    attributes: Mapping[str, object], state: Container[str], differing: Iterable[str]
) -> tuple[str, str, str] | None:
    """An attribute of state that came out differently, one that is in the same memory, and what they are."""
    held = {name: value for name, value in attributes.items() if name in state}
    for one in differing:
        for other, value in held.items():
            if one in held and one != other and _are_one(value, held[one]):
                return one, other, "array" if issubclass(type(value), np.ndarray) else class_name(type(value))
    return None


def made_of_state(attributes: Mapping[str, object], state: Iterable[str]) -> list[str]:
    """Attributes that are one with another attribute, which is state, as far as that can be seen."""
    held = [name for name in state if name in attributes]
    return [
        f"self.{name} and self.{other}"
        for other in held
        for name, value in attributes.items()
        if (name not in held or name > other) and _are_one(value, attributes[other])
    ]


def _are_one(value: Any, other: Any) -> bool:
    """Whether who writes to one writes to the other."""
    if issubclass(type(value), _UNCHANGING):
        return False
    if issubclass(type(value), np.ndarray) and issubclass(type(other), np.ndarray):
        return np.may_share_memory(value, other)  # by their ends alone, which is quick: it is a hint
    return value is other


def padding_of(attributes: Mapping[str, object]) -> str:
    """What to say where attributes are, or hold, arrays with padding; else nothing.

    It may be why something came out differently: digests are without it, and restored arrays have zeros there.
    """
    found = [f"self.{name}" for name, value in attributes.items() if _has_padding(value, _DEEP)]
    if not found:
        return ""
    return (
        f"; if the task reads the padding of {', '.join(found[:5])}, as tobytes() and views of bytes do: that is no "
        f"part of a value, and zeros once restored; read the fields, or give it a dtype without padding "
        f"(numpy.lib.recfunctions.repack_fields)"
    )


def _has_padding(value: Any, deep: int) -> bool:
    kind = type(value)
    if issubclass(kind, np.ndarray | np.generic):
        return dtypes.padding(value.dtype) is not None
    inner = value.values() if issubclass(kind, dict) else value if issubclass(kind, list | tuple) else ()
    return deep > 0 and any(_has_padding(part, deep - 1) for part in inner)


def equal_unlike(one: object, other: object) -> bool:
    """Whether two values are equal, as far as pickle can tell, and are encoded otherwise.

    It writes whatever is there twice as often. How arrays lie in memory makes no difference to either.
    """
    try:
        return encode(one, what="").digest != encode(other, what="").digest and pickled(one) == pickled(other)
    except Exception:  # user classes raise what they like where they cannot be pickled
        return False


def pickled(value: object) -> bytes:
    """A value in bytes that do not tell which of its parts are one object; raises what its class raises."""
    pickled = io.BytesIO()
    pickler = pickle.Pickler(pickled, protocol=5)
    pickler.fast = True
    pickler.dump(value)
    return pickled.getvalue()
