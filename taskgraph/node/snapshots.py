"""A task's state as a boundary, and back. State that all tasks share is encoded apart (`protocol.shared`).

A boundary's value is {"state": ..., "numbers": ..., "log": ...}: the state, the numbers that the task reported, and
reports of all tasks in that of task 0. A task with shared state has two more rules:

- "shared" is the digest of the shared state, encoded alone as {name: value}, with the names in order. So equal shared
  state has an equal digest on all tasks. Types, the memory order of arrays and the order of keys of dicts count.
- "state" contains the shared state on the keeper alone. The primaries of other tasks have it beside the value, in
  `Boundary.shared`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from taskgraph.device.api import Device
from taskgraph.errors import StateError, ValueNotEncodable
from taskgraph.graph.blocks import Allocate
from taskgraph.graph.values import begin_copy_to_host, decode, encode
from taskgraph.node.reports import PlainRows
from taskgraph.protocol.boundaries import Boundary
from taskgraph.protocol.messages import Encoded, EncodedOnDevice

__all__ = [
    "Snapshot",
    "decode_boundary",
    "empty_snapshot",
    "encode_fields",
    "encode_snapshot",
    "named_fields",
    "shared_digest",
    "shared_in",
]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A task's state after an epoch, encoded.

    Attributes:
        value: the state; without the shared state if another task keeps that.
        shared: the shared state that `value` leaves out; None: it leaves out none.
        digest: of the shared state; b"": the task has none.
    """

    value: Encoded
    shared: Encoded | None = None
    digest: bytes = b""

    @property
    def size_bytes(self) -> int:
        return self.value.size_bytes + (self.shared.size_bytes if self.shared is not None else 0)

    @property
    def on_device(self) -> bool:
        """True if a part is still on a device."""
        return type(self.value) is EncodedOnDevice or type(self.shared) is EncodedOnDevice


def named_fields(state: Any) -> dict[str, Any]:
    """Returns {name: field} of a snapshot that is a dict with names as keys, and {"snapshot()": snapshot} of
    another.
    """
    return state if isinstance(state, dict) and all(isinstance(name, str) for name in state) else {"snapshot()": state}


def encode_fields(state: Any, task: int) -> dict[str, Encoded]:
    """Encodes a snapshot field by field.

    Raises:
        ValueNotEncodable: names the field that cannot travel.
    """
    fields = named_fields(state)
    if fields is not state:
        return {name: encode(state, what=f"snapshot of task {task}", ordered=True) for name in fields}
    return {name: encode(value, what=f"state {name!r} of task {task}", ordered=True) for name, value in fields.items()}


def encode_snapshot(
    state: Any,
    numbers: dict[str, float],
    rows: dict[int, PlainRows],
    *,
    task: int,
    shared: tuple[str, ...] = (),
    keeps: bool = True,
    allocate: Allocate,
    on_device: bool = False,
    stays: bool = False,
) -> Snapshot:
    """Encodes what `snapshot()` returned, before other code of the task runs: it may be the task's own arrays.

    Args:
        shared: the names of shared state.
        keeps: the task keeps the shared state for all: "state" contains it.
        on_device: the task may have arrays on a device.
        stays: copies device memory on the device only.

    Raises:
        ValueNotEncodable: names the field that cannot travel.
        StateError: a shared name is missing.
    """
    what = f"snapshot of task {task}"

    def encode_part(value: Any) -> Encoded:
        made = encode(value, what=what, allocate=allocate, stays=stays, ordered=True)
        if stays:  # before the next epoch computes, which would delay the copy
            begin_copy_to_host(made, allocate=allocate)
        return made

    try:
        if not shared:
            return Snapshot(encode_part({"state": state, "numbers": numbers, "log": rows}))
        own, common = _split(state, shared, task)
        # A value that stays in the process needs no memory that others can open.
        part = encode(common, what=what, allocate=allocate if keeps or stays else None, stays=stays, ordered=True)
        whole = {"state": own, "numbers": numbers, "log": rows, "shared": part.digest}
        if not keeps:
            if stays:
                begin_copy_to_host(part, allocate=allocate)
            return Snapshot(encode_part(whole), part, part.digest)
        # Decoded arrays are encoded without another copy; but they are on the host.
        whole["state"] = own | (common if on_device else decode(part))
        return Snapshot(encode_part(whole), None, part.digest)
    except ValueNotEncodable:
        encode_fields(state, task)  # raises with the name of the field
        raise


def empty_snapshot(task: int) -> Snapshot:
    """Encodes the boundary of a task whose state is all kept by another task."""
    whole: dict[str, Any] = {"state": {}, "numbers": {}, "log": {}}
    return Snapshot(encode(whole, what=f"snapshot of task {task}", ordered=True))


def _split(state: Any, shared: tuple[str, ...], task: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits the state of a task: (its own, the shared)."""
    missing = [name for name in shared if not isinstance(state, dict) or name not in state]
    if missing:
        raise StateError(
            f"task {task}: snapshot() must return a dict with all shared state; it lacks "
            f"{', '.join(map(repr, missing))}: begin with super().snapshot()"
        )
    return {name: state[name] for name in state if name not in shared}, {name: state[name] for name in shared}


def decode_boundary(boundary: Boundary, *, writable: bool = False, device: Device | None = None) -> Mapping[str, Any]:
    """Decodes a boundary: its "state" is whole, also of a task whose shared state another task keeps.

    Raises:
        DecodeError: the bytes are no boundary.
    """
    raw: dict[str, Any] = decode(boundary.value, writable=writable, device=device)
    if boundary.shared is not None:
        raw["state"] = raw["state"] | decode(boundary.shared, writable=writable, device=device)
    return raw


def shared_digest(boundary: Boundary) -> bytes:
    """Returns the digest of the shared state of a boundary; b"": it is not known."""
    if boundary.shared is not None:
        return boundary.shared.digest
    digest: bytes = decode(boundary.value).get("shared", b"")
    return digest


def shared_in(boundary: Boundary, names: tuple[str, ...], device: Device | None) -> Encoded:
    """Encodes the shared state of a boundary that contains it. Call it in a thread if it is large."""
    if boundary.shared is not None:
        return boundary.shared
    state = decode(boundary.value, device=device)["state"]
    return encode({name: state[name] for name in names}, what="shared state", ordered=True)
