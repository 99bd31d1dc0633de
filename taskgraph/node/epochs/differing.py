"""Strict mode: compares values, and the attributes of two objects of one task.

An attribute may hold an object of any class, and even its `__class__` may run user code: `type(value)` is used instead.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np

from taskgraph.errors import class_name
from taskgraph.graph.values import encode
from taskgraph.node.replica import Replica
from taskgraph.node.snapshots import encode_fields
from taskgraph.protocol.deviceloss import device_error
from taskgraph.shape import FRAMEWORK_ATTRIBUTES

__all__ = [
    "Digests",
    "attributes_of",
    "changed_names",
    "differing_attributes",
    "digest",
    "digests",
    "incomparable_attributes",
    "pickled",
    "read_values",
    "sharing_attributes",
    "state_of",
]

R = TypeVar("R")

Digests = dict[str, bytes]
"""Name -> digest of the value under that name."""

_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
"""Types of attributes that hold code: they cannot travel, and are no state."""
_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, np.generic)


def digest(value: object) -> bytes | None:
    """Returns the digest of a value's encoding; None if the value cannot travel."""
    try:
        return encode(value, what="").digest
    except Exception as error:  # a codec or a metaclass may raise anything
        if isinstance(error, MemoryError) or device_error(error) is not None:
            raise
        return None


def digests(values: Mapping[str, object]) -> Digests:
    """Returns the digests of those values that can travel."""
    return {name: found for name, value in values.items() if (found := digest(value)) is not None}


def changed_names(before: Digests, after: Digests) -> list[str]:
    """Returns the names whose digests differ, sorted."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


async def read_values(replica: Replica, function: Callable[[], R]) -> R:
    """Calls a function of the framework that reads user values; in a thread if that may wait for a device."""
    return function() if replica.device is None else await replica.actor.call("strict mode", function, alone=False)


async def state_of(replica: Replica) -> Digests:
    """Calls `snapshot()` and returns digests of its value: by name if it is a dict; {} for a task without state."""
    if not replica.stateful:
        return {}
    task = replica.user_task

    def take() -> Digests:
        return {name: value.digest for name, value in encode_fields(task.snapshot(), replica.task).items()}

    return await replica.actor.call("snapshot", take)


async def attributes_of(replica: Replica) -> Digests:
    """Returns digests of the task object's own attributes, as far as they can travel."""
    found = {name: value for name, value in vars(replica.user_task).items() if name not in FRAMEWORK_ATTRIBUTES}
    return await read_values(replica, partial(digests, found))


async def differing_attributes(one: Replica, other: Replica, state: Digests) -> list[str]:
    """Returns the attributes outside of `state` that differ between the objects of two replicas."""
    mine, others = await attributes_of(one), await attributes_of(other)
    found = set(changed_names(mine, others))
    values, other_values = vars(one.user_task), vars(other.user_task)
    for name in values.keys() & other_values.keys() - mine.keys() - others.keys() - set(
        FRAMEWORK_ATTRIBUTES
    ):  # they cannot travel
        with contextlib.suppress(Exception):  # comparing or pickling user objects may raise anything
            if _differ(values[name], other_values[name]):
                found.add(name)
    return sorted(found - state.keys())


def _differ(one: Any, other: Any) -> bool:
    """Returns True if two values that cannot travel differ; raises if they cannot be compared either."""
    if issubclass(type(one), _CODE):
        return False
    if issubclass(type(one), set | frozenset) and issubclass(type(other), set | frozenset):
        return bool(one != other)
    return pickled(one) != pickled(other)


def pickled(value: object) -> bytes:
    """Pickles a value so that the bytes do not depend on which of its parts are the same object."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5)
    pickler.fast = True
    pickler.dump(value)
    return file.getvalue()


def incomparable_attributes(replica: Replica, known: Iterable[str]) -> list[str]:
    """Returns the attributes, with their types, that strict mode cannot compare, without code and those in `known`."""
    return [
        f"{name} (of type {class_name(type(value))})"
        for name, value in sorted(vars(replica.user_task).items())
        if name not in {*known, *FRAMEWORK_ATTRIBUTES} and not issubclass(type(value), _CODE)
    ]


def sharing_attributes(attributes: Mapping[str, object], state: Iterable[str]) -> list[tuple[str, str]]:
    """Returns pairs of names of attributes that share memory or are one object, at least one of them in `state`."""
    kept = [name for name in state if name in attributes]
    return [
        (name, other)
        for other in kept
        for name, value in attributes.items()
        if (name not in kept or name > other) and _share_memory(value, attributes[other])
    ]


def _share_memory(value: Any, other: Any) -> bool:
    """Returns True if two mutable values are one object, or two arrays may overlap in memory."""
    if issubclass(type(value), _IMMUTABLE):
        return False
    if issubclass(type(value), np.ndarray) and issubclass(type(other), np.ndarray):
        return np.may_share_memory(value, other)  # compares bounds alone, which is fast: the result is a hint
    return value is other
