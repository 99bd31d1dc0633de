"""Arrays of a state lie in memory as they did: what adds them up has the same last bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from softdevice import SoftDevice

from taskgraph.graph.orders import order_of, restore_order
from taskgraph.graph.outline import outline
from taskgraph.graph.values import decode, device_buffers, encode


def views(base: np.ndarray) -> list[np.ndarray]:
    """Of all orders of its axes, each whole, with gaps and backwards."""
    found = []
    for axes in itertools.permutations(range(base.ndim)):
        turned = base.transpose(axes)
        found += [turned, turned[::2], turned[::-1], turned[..., ::-1], turned[1:, ::-2], turned[:1], turned[..., :1]]
    return found


def strides(array: np.ndarray) -> tuple[int, ...]:
    """What an array without gaps that lies alike has."""
    return tuple(0 if n == 1 else s for n, s in zip(array.shape, array.strides, strict=True))


@pytest.mark.parametrize("shape", [(3, 4, 5), (40, 50), (4, 1, 6), (90, 100)], ids=str)
@pytest.mark.parametrize("writable", [False, True])
def test_arrays_come_back_as_they_lay(shape: tuple[int, ...], writable: bool) -> None:
    base = np.random.default_rng(0).standard_normal(shape)
    for sent in views(base):
        came = decode(encode({"x": sent}, ordered=True), writable=writable)["x"]
        assert came.flags.writeable is writable
        assert np.array_equal(came, sent) and came.dtype == sent.dtype
        assert order_of(came.shape, came.strides, 8) == order_of(sent.shape, sent.strides, 8)
        for axis in (None, 0, 1):
            assert came.sum(axis=axis).tobytes() == sent.sum(axis=axis).tobytes()


def with_gaps() -> list[np.ndarray]:
    base = np.random.default_rng(1).standard_normal((60, 70, 3))
    record = np.zeros(1000, [("a", "i4"), ("b", "f8")])
    record["b"] = np.random.default_rng(2).standard_normal(1000)
    found = [base[:, 1, 1], base[:, 1], base[:, :, 1], base[:, 3:50, 1:], base[::2, ::-3].T, base[:, :1, 2]]
    cut = [base[:, ::3, 0], base[:, ::-3, 0].T, base[1:, :, ::2], base[..., ::2].transpose(2, 0, 1)]  # the last gap is
    return [*found, *cut, record["b"]]


@pytest.mark.parametrize("at", range(11))
@pytest.mark.parametrize("writable", [False, True])
def test_what_has_gaps_comes_back_with_gaps(at: int, writable: bool) -> None:
    """It came back dense: the sum of a column, and its product with itself, had other last bits after a failure."""
    sent = with_gaps()[at]
    assert not sent.flags.forc
    encoded = encode({"x": sent}, ordered=True)
    came = decode(encoded, writable=writable)["x"]
    assert came.flags.writeable is writable and not came.flags.forc
    assert np.array_equal(came, sent)
    assert order_of(came.shape, came.strides, 8) == order_of(sent.shape, sent.strides, 8)
    for axis in (None, *range(sent.ndim)):
        assert came.sum(axis=axis).tobytes() == sent.sum(axis=axis).tobytes()
    assert came.base.nbytes <= 4 * sent.nbytes
    again = encode({"x": came}, ordered=True)
    assert (again.meta, again.digest) == (encoded.meta, encoded.digest)


def test_any_view_multiplies_as_it_did() -> None:
    """Rows whose last gap is cut off, as in every third of 160 columns, came back dense: with other last bits."""
    random = np.random.default_rng(4)
    most = {1: 400, 2: 60, 3: 20}
    for _ in range(300):
        axes = int(random.integers(1, 4))
        base = random.standard_normal(random.integers(1, most[axes], axes)).transpose(random.permutation(axes))
        part = base[tuple([slice(int(random.choice([0, extent // 3])), None) for extent in base.shape])]
        sent = part[tuple([slice(None, None, int(random.choice([1, 2, 3, -1, -2]))) for _ in part.shape])]
        came = decode(encode(sent, ordered=True), writable=True)
        assert np.array_equal(came, sent) and came.flags.forc == sent.flags.forc
        factor = random.standard_normal(sent.shape[-1])
        assert (came @ factor).tobytes() == (sent @ factor).tobytes()
        assert np.einsum("...i,...i", came, came).tobytes() == np.einsum("...i,...i", sent, sent).tobytes()


@pytest.mark.parametrize(
    "shared", [np.broadcast_to(np.arange(3.0), (2, 3)), np.broadcast_to(np.array([[1.0], [2]]), (2, 3))]
)
def test_broadcast_array(shared: np.ndarray) -> None:
    came = decode(encode(shared, ordered=True), writable=True)
    assert np.array_equal(came, shared) and came.flags.forc


@pytest.mark.parametrize("axes", [1, 3, 12, 16])
def test_room_of_gaps(axes: int) -> None:
    """They took half as much again for each axis: two thousand times it for what has 18 of two elements."""
    bits = np.arange(1 << axes, dtype="u2").reshape((2,) * axes)
    order = bytes(axis | 0x40 for axis in range(axes))
    came = restore_order(bits, order)
    assert np.array_equal(came, bits) and order_of(came.shape, came.strides, 2) == order
    assert came.base is not None and came.base.nbytes < 3 * bits.nbytes + 2


@pytest.mark.parametrize(
    ("shape", "order", "said"),
    [
        ((0, 3), b"\x40\1", "gaps in an array of no bytes"),
        ((1, 3), b"\x40\x41", "gaps along axis 0, of one element"),
        *(((2, 3), order, "in the order") for order in (b"\0", b"\0\0", b"\1\2", b"\0\1\2", b"\0\x7f", b"\x80\x80")),
    ],
)
def test_wrong_orders(shape: tuple[int, int], order: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        restore_order(np.zeros(shape), order)


@pytest.mark.parametrize("size", [10, 100, 300], ids=["in meta", "in the pack", "in a buffer"])
def test_what_came_is_encoded_as_it_was(size: int) -> None:
    for sent in (np.zeros((size, size)).T, np.zeros((size, size))[::-1], np.zeros((size, size, 1)).T):
        first = encode({"x": sent, "y": 1}, ordered=True)
        again = encode(decode(first), ordered=True)
        assert (again.meta, again.digest) == (first.meta, first.digest)


def test_c_order_is_not_recorded() -> None:
    for sent in (np.arange(12.0), np.zeros((3, 4)), np.zeros((3, 4))[1:], np.zeros((1, 4)).T, np.zeros((0, 4)).T):
        assert encode(sent, ordered=True).meta == encode(sent).meta
    assert order_of((2, 3), (0, 8)) and decode(encode(np.broadcast_to(np.arange(3.0), (2, 3)), ordered=True))[1, 2] == 2


def test_items_arrive_in_c_order() -> None:
    assert decode(encode(np.zeros((3, 4)).T)).flags.c_contiguous


def test_every_dtype() -> None:
    record = np.zeros((3, 4), [("a", "i1"), ("b", "f8")])  # with padding between
    aligned = np.zeros((3, 4), np.dtype([("a", "i1"), ("b", "f8")], align=True))
    for sent in (
        record.T,
        aligned.T,
        np.full((3, 4), "text").T,
        np.zeros((3, 4), bool).T,
        np.zeros((300, 400), "i2").T,
    ):
        came = decode(encode([sent], ordered=True))[0]
        assert came.dtype == sent.dtype and np.array_equal(came, sent) and came.strides == sent.strides


@pytest.mark.parametrize("stays", [False, True])
def test_arrays_of_a_device(stays: bool) -> None:
    soft = SoftDevice()
    host = np.random.default_rng(0).standard_normal((200, 300))
    sent = soft.xp.asarray(host).T
    encoded = encode({"x": sent}, ordered=True, stays=stays)
    assert bool(device_buffers(encoded)) is stays
    came = decode(encoded, device=soft, writable=True)["x"]
    assert came.strides == sent.strides and np.array_equal(came.get(), host.T)
    assert encoded.digest == encode({"x": host.T}, ordered=True).digest


def test_names_of_fortran_arrays() -> None:
    state = {"w": np.zeros((300, 400)).T, "back": np.zeros((300, 400))[::-1], "small": np.zeros((2, 3)).T}
    state |= {"column": np.zeros((300, 400))[:, 1], "rows": np.zeros((5, 4))[::2], "few": np.zeros((5, 4)).T[1:]}
    named = {named.path: named.shape for named in outline(encode(state, ordered=True))}
    whole = {("w", "T"): (300, 400), ("small", "T"): (2, 3)}
    assert named == whole | {("column",): (300,), ("rows",): (3, 4), ("few", "T"): (5, 3)}
