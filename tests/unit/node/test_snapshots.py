"""Shared state is encoded apart: its digest is the same on the keeper, on other tasks, and after a restore."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from taskgraph.errors import StateError, ValueNotEncodable
from taskgraph.graph.values import decode
from taskgraph.node.snapshots import Snapshot, decode_boundary, encode_snapshot, shared_digest, shared_in
from taskgraph.protocol.boundaries import Boundary
from taskgraph.protocol.messages import Stamp

BIG = np.arange(60_000.0)

VALUES: dict[str, Any] = {
    "small": np.arange(3.0),
    "large": BIG,
    "fortran": np.asfortranarray(BIG.reshape(200, 300)),
    "axes": BIG.reshape(20, 30, 100).transpose(2, 0, 1),
    "reversed": BIG[::-1],
    "strided": BIG[::3],
    "broadcast": np.broadcast_to(np.arange(300.0), (200, 300)),
    "whole": np.float32(2.5),
    "none": np.empty((0, 3)),
    "tree": {"w": [BIG, BIG], 3: ("text", None, 1 << 80), "b": {"z": 1, "a": np.nan}},
}


def taken(state: Any, shared: tuple[str, ...], *, keeps: bool) -> Snapshot:
    return encode_snapshot(state, {}, {}, task=1, shared=shared, keeps=keeps, allocate=lambda nbytes: None)


def boundary(snapshot: Snapshot) -> Boundary:
    return Boundary(Stamp(1, 3), 1, snapshot.value, shared=snapshot.shared)


@pytest.mark.parametrize("name", VALUES)
def test_digest_survives_the_keeper(name: str) -> None:
    state = {"own": np.ones(5), "theta": VALUES[name], "bias": 1}
    kept, other = (boundary(taken(state, ("bias", "theta"), keeps=keeps)) for keeps in (True, False))
    assert kept.shared is None and other.shared is not None
    assert shared_digest(kept) == shared_digest(other) == decode(other.value)["shared"] != b""
    assert sorted(decode(kept.value)["state"]) == ["bias", "own", "theta"] and [*decode(other.value)["state"]] == [
        "own"
    ]
    given = shared_in(kept, ("bias", "theta"), None)
    assert given.digest == shared_digest(other), "what the keeper gives is what the other had"
    restored = decode_boundary(Boundary(Stamp(1, 3), 1, other.value, shared=given), writable=True)["state"]
    again = taken(restored, ("bias", "theta"), keeps=False)
    assert again.digest == shared_digest(other), "also once it was restored"


def test_order_of_declaration_does_not_matter() -> None:
    one = taken({"a": 1, "b": 2}, ("a", "b"), keeps=False)
    other = taken({"b": 2, "a": 1}, ("a", "b"), keeps=True)
    assert one.digest == other.digest


def test_without_shared_state_nothing_is_added() -> None:
    snapshot = taken({"x": 1}, (), keeps=True)
    assert decode(snapshot.value) == {"state": {"x": 1}, "numbers": {}, "log": {}}
    assert (snapshot.shared, snapshot.digest) == (None, b"")
    assert shared_digest(boundary(snapshot)) == b""


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(ValueNotEncodable, match="state 'theta' of task 1"):
        taken({"theta": object(), "x": 1}, ("theta",), keeps=False)
    with pytest.raises(StateError, match="lacks 'theta'"):
        taken([1], ("theta",), keeps=True)
