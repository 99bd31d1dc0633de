"""What is sent is what arrives: types, bits, order, sharing."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from taskgraph.graph.orders import copy_in_order
from taskgraph.graph.values import decode, digest_of, encode, verify

relaxed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

texts = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=True)
    | st.complex_numbers()
    | texts
    | st.binary(max_size=40)
)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | texts | st.binary(max_size=4), lambda k: st.tuples(k, k), max_leaves=3
)
values = st.recursive(
    leaves,
    lambda v: st.lists(v, max_size=4) | st.lists(v, max_size=4).map(tuple) | st.dictionaries(keys, v, max_size=4),
    max_leaves=20,
)
dtypes = st.one_of(
    npst.scalar_dtypes(),
    npst.byte_string_dtypes(endianness="?"),
    npst.unicode_string_dtypes(endianness="?"),
    npst.datetime64_dtypes(endianness="?"),
    npst.timedelta64_dtypes(endianness="?"),
    npst.nested_dtypes(),
    npst.nested_dtypes().map(lambda d: np.dtype([("b", "i1"), ("d", d), ("é", ">f8", (2, 2))], align=True)),
)


def same(one: Any, other: Any) -> None:
    """Exact equality of type and bits, all the way down."""
    assert type(one) is type(other)
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif isinstance(one, dict):
        same(list(one.items()), list(other.items()))
    elif isinstance(one, float):
        assert struct.pack("<d", one) == struct.pack("<d", other)
    elif isinstance(one, complex):
        same((one.real, one.imag), (other.real, other.imag))
    elif isinstance(one, np.ndarray):
        same_dtype(one.dtype, other.dtype)
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes() or encode(one).digest == encode(other).digest
    elif isinstance(one, np.str_ | np.bytes_):
        assert list(one) == list(other)
    elif isinstance(one, np.generic):
        same(np.asarray(one), np.asarray(other))
    else:
        assert one == other


def same_dtype(one: np.dtype[Any], other: np.dtype[Any]) -> None:
    assert one == other
    assert one.num == other.num
    assert one.type is other.type
    assert one.isalignedstruct == other.isalignedstruct
    assert one.itemsize == other.itemsize
    assert one.names == other.names
    for name in one.names or ():
        assert one.fields[name][1:] == other.fields[name][1:]
        same_dtype(one.fields[name][0], other.fields[name][0])
    if one.subdtype is not None:
        assert one.shape == other.shape
        same_dtype(one.base, other.base)


def travels(value: Any) -> Any:
    encoded = encode(value, what="test")
    assert verify(encoded)
    assert type(encoded.meta) is bytes
    assert len(encoded.digest) == 16
    assert encoded.digest == digest_of(encoded.meta, encoded.buffers)
    for buffer in encoded.buffers:
        assert buffer.readonly
        assert buffer.c_contiguous
        assert buffer.format == "B"
    back = decode(encoded)
    same(value, back)
    same(value, decode(encoded, writable=True))
    assert encode(back).digest == encoded.digest
    return back


@relaxed
@given(values)
def test_plain_values(value: Any) -> None:
    travels(value)


@relaxed
@given(npst.arrays(dtypes, npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)))
def test_arrays_of_every_dtype(array: np.ndarray) -> None:
    back = travels(array)
    assert not back.flags.writeable
    assert back.flags.aligned
    assert back.flags.c_contiguous


@relaxed
@given(dtypes.flatmap(lambda d: npst.arrays(d, 3)))
def test_numpy_scalars(array: np.ndarray) -> None:
    travels(array[0])


@relaxed
@given(st.data())
def test_views_of_any_layout(data: st.DataObject) -> None:
    array = data.draw(npst.arrays("i4", npst.array_shapes(min_side=2), unique=False))
    view = array[data.draw(npst.basic_indices(array.shape, allow_ellipsis=False))]
    travels(np.asarray(view))
    travels(array.T)


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        struct.unpack("<d", b"\x01\0\0\0\0\0\xf4\x7f")[0],
        -0.0,
        math.inf,
        complex(-0.0, math.nan),
        10**5000,
        -(1 << 63),
        1 << 63,
        -(1 << 63) - 1,
        "\ud800\udc00 \0",
        "x" * 10_000,
        b"",
        b"z" * 10_000,
        {2: "b", 1: "a", "1": None, (1, ("x", b"y")): [], None: 0, False: 1, 1.5: {}},
        [[], (), {}, [[]]],
        np.str_("a\0"),
        np.str_("\ud800"),
        np.bytes_(b"a\0\0"),
        np.bytes_(b"b" * 9000),
        np.void(b"\0\1"),
        np.void(b""),
        np.longlong(-3),
        np.datetime64("NaT", "ns"),
        np.timedelta64(25, "s"),
        np.bool_(True),
        {np.int64(3): np.float32("nan")},
        {np.frombuffer(b"12345678", [("x", "i4"), ("y", "f4")])[0]: [np.zeros(2)]},
        {(np.frombuffer(b"ab", [("x", "u1"), ("y", "u1")])[0], 1): 2},
    ],
    ids=lambda value: type(value).__name__,
)
def test_chosen_values(value: Any) -> None:
    travels(value)


RECORD = np.dtype((np.record, [("x", "f4"), ("y", "i8")]))
SPARSE = np.dtype({"names": ["b", "a"], "formats": ["u1", "f8"], "offsets": [20, 3], "itemsize": 40})
OVERLAP = np.dtype({"names": ["f", "i"], "formats": ["<f4", "<u4"], "offsets": [0, 0]})
TITLED = np.dtype([(("a title", "x"), "f8"), ("y", "M8[25s]")])
EMPTY_STRUCT = np.dtype({"names": [], "formats": [], "itemsize": 8})


@pytest.mark.parametrize(
    "array",
    [
        np.array(3.5),
        np.zeros((3, 0, 2), ">i2"),
        np.zeros(4, RECORD),
        np.arange(80, dtype="u1").view(SPARSE),
        np.arange(8, dtype="u1").view(OVERLAP),
        np.zeros(2, TITLED),
        np.zeros(3, EMPTY_STRUCT),
        np.zeros(3, [("f", "S0"), ("g", "V0"), ("h", "U0")]),
        np.zeros(3, [("f", "S0")])["f"],
        np.zeros((2, 2), "V0"),
        np.array(["ab", "", "\U0001f600"], ">U3"),
        np.array([b"a", b"\0b"]),
        np.array([1, 2], np.longlong),
        np.array([1, 2], np.ulonglong).astype(">Q"),
        np.array([1.5, -0.0, np.inf], np.longdouble),
        np.array([1.5 + 2j], np.clongdouble).byteswap().view(np.dtype(np.clongdouble).newbyteorder()),
        np.zeros(2000, [("a", "i1"), ("b", np.longdouble, (2,))]),
        np.asfortranarray(np.arange(20_000.0).reshape(100, 200)),
        np.arange(20_000.0)[::-3],
        np.broadcast_to(np.float32(3), (100, 100)),
        np.array([0x7FF0000000000001, 0xFFF8000000000123], "u8").view("f8"),
        np.zeros((1,) * 32),
    ],
    ids=lambda array: str(array.dtype)[:30],
)
def test_chosen_arrays(array: np.ndarray) -> None:
    back = travels(array)
    assert not back.flags.writeable


def test_padding_is_sent_as_zeros() -> None:
    """Equal values have equal digests, whatever their memory held before, and that memory does not leak."""
    padded = np.dtype([("a", "i1"), ("b", "f8"), ("c", "i2", (3,))], align=True)
    for dtype in (padded, SPARSE, np.dtype(np.longdouble), np.dtype(np.clongdouble), np.dtype((np.record, padded))):
        for count in (1, 1000):
            clean = np.zeros(count, dtype)
            dirty = np.frombuffer(bytearray(b"\xaa" * clean.nbytes), dtype).copy()
            for name in dtype.names or ():
                dirty[name] = clean[name]
            if dtype.names is None:
                clean[:] = 3
                dirty[:] = 3
            before = dirty.tobytes()
            assert encode(clean).digest == encode(dirty).digest
            assert b"\xaa" not in encode(dirty).meta
            assert dirty.tobytes() == before
            assert encode(clean[0]).digest == encode(dirty[0]).digest


def test_padding_of_nested_records() -> None:
    inner = np.dtype([("x", "u1"), ("y", "i4")], align=True)
    dtype = np.dtype([("several", inner, (2, 3)), ("one", inner)])
    for count in (1, 1000):
        clean = np.zeros(count, dtype)
        memory = bytearray(b"\xaa" * clean.nbytes)
        dirty = np.frombuffer(memory, dtype)
        for name in ("several", "one"):
            for field in ("x", "y"):
                dirty[name][field] = 0
        assert b"\xaa" in memory
        encoded = encode(dirty)
        assert encoded.digest == encode(clean).digest
        assert not [part for part in (encoded.meta, *encoded.buffers) if b"\xaa" in bytes(part)]


PADDED = np.dtype([("a", "i1"), ("b", "f8"), ("c", [("x", "u1"), ("y", "i4")], (2,))], align=True)
LIES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "in C's order": lambda a: a,
    "in Fortran's": lambda a: a.T,
    "backwards": lambda a: a[::-1],
    "with gaps": lambda a: a[:, ::2],
    "as one element": lambda a: a[0, 0],
}


def look(array: np.ndarray) -> bytes:
    """All bytes of its elements: `tobytes` copies, too, and leaves padding out where they are not side by side."""
    array = np.asarray(array)
    return array.view(f"V{array.itemsize}").tobytes()


def after_noise(nbytes: int, make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What is made where memory that was freed just before is full of noise."""
    noise = [np.full(nbytes, 0xAB, np.uint8) for _ in range(30)]
    del noise
    return make(*args, **options)


@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("dtype", [PADDED, SPARSE, np.dtype((np.record, PADDED))], ids=["aligned", "sparse", "record"])
@pytest.mark.parametrize("size", [2, 7, 30, 60], ids=lambda n: f"{n}x{n}")
def test_padding_arrives_as_zeros(size: int, dtype: np.dtype[Any], lies: str) -> None:
    """What was restored had there what memory held before: numpy copies records field by field."""
    table = np.zeros((size, size), dtype)
    table["b"] = np.arange(size * size).reshape(size, size)
    sent = LIES[lies](table)
    for ordered in (False, True):
        encoded = encode([sent], ordered=ordered)
        shifted = tuple([memoryview(b"x" + bytes(buffer))[1:] for buffer in encoded.buffers])  # is copied to be aligned
        for came in (encoded, type(encoded)(encoded.meta, shifted, encoded.digest)):
            for writable in (False, True):
                (found,) = after_noise(sent.nbytes, decode, came, writable=writable)
                assert look(found) == look(sent)
                assert found.flags.writeable is writable
    if isinstance(sent, np.ndarray):
        assert look(after_noise(sent.nbytes, copy_in_order, sent)) == look(sent)


def test_equal_dtypes_stay_apart() -> None:
    """A cache by equality would make the bytes depend on what was sent before."""
    struct_ = [("a", "i1"), ("b", "i1")]
    twins = [np.dtype(np.int64), np.dtype(np.longlong)], [np.dtype(struct_), np.dtype(struct_, align=True)]
    for one, other in (*twins, (np.dtype([("x", "f4"), ("y", "i8")]), RECORD)):
        assert one == other
        first = [encode(np.zeros(2, d)).digest for d in (one, other)]
        assert first == [encode(np.zeros(2, d)).digest for d in (one, other)]
        assert first[0] != first[1]
        for dtype in (other, one):
            travels(np.zeros(2, dtype))


def test_the_order_of_a_dict_is_part_of_it() -> None:
    assert encode({1: 1, 2: 2}).digest != encode({2: 2, 1: 1}).digest


def test_equal_numbers_of_other_types() -> None:
    assert len({encode(v).digest for v in (1, 1.0, True, 1 + 0j, np.int64(1), np.array(1), [1], (1,))}) == 8


def test_a_thousand_buffers_keep_their_order() -> None:
    travels([np.full(600, n) for n in range(1000)] + [b"y" * 5000, "s" * 5000])
