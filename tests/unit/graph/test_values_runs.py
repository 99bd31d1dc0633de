"""Lists, tuples and dicts of many numbers, bools or texts: written at once, and read as they were."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_values_roundtrip import relaxed, same, texts, travels

from taskgraph.errors import DecodeError
from taskgraph.graph import runs
from taskgraph.graph.outline import outline
from taskgraph.graph.tags import BYTES, COLUMNS, LIST, RUN
from taskgraph.graph.values import decode, encode
from taskgraph.protocol.messages import Encoded

U64 = struct.Struct("<Q").pack
kinds = (st.floats(), st.integers(-(1 << 63), (1 << 63) - 1), st.integers(), st.booleans(), texts)


def many(elements: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(elements, min_size=runs.LEAST - 2, max_size=40)


@relaxed
@given(st.one_of([many(kind) for kind in kinds]))
def test_lists_and_tuples_of_one_type(value: list[Any]) -> None:
    travels(value)
    travels(tuple(value))
    travels({"rows": [value, value], "n": len(value)})


@relaxed
@given(st.one_of([many(k) for k in kinds]), st.one_of([many(k) for k in kinds]))
def test_dicts_of_one_type_to_another(keys: list[Any], values: list[Any]) -> None:
    travels(dict(zip(keys, values, strict=False)))
    travels({tuple(keys): tuple(values)})


@pytest.mark.parametrize(
    "value",
    [
        [1.0] * 20 + [1],
        [1] * 20 + [True],
        [1] * 20 + [1 << 63],
        [True, False] * 20,
        ["\ud83d", "\ude00"] * 20,
        ["", "\U0001f600", "é", "\0"] * 20,
        [0.0, -0.0, float("nan")] * 20,
        [struct.unpack("<d", b"\x01\0\0\0\0\0\xf4\x7f")[0]] * 20,
        [float(i) for i in range(30_000)],
        [*range(1000), None],
        ["text" * 100] * 1000,
        {i: str(i) for i in range(3000)},
        {str(i): i / 3 for i in range(20_000)},
        {float(i): i % 2 == 0 for i in range(20)},
        {str(i): [i] for i in range(20)},
        {(i, i): 1.5 for i in range(20)},
        [[float(j) for j in range(100)] for _ in range(1000)],
    ],
    ids=range(17),
)
def test_chosen_values(value: Any) -> None:
    travels(value)


@pytest.mark.parametrize("value", [[1.5] * 8192, list(range(8192)), {str(i): 1.5 for i in range(8192)}])
def test_a_run_takes_what_its_parts_do(value: Any) -> None:
    assert encode(value).size_bytes < 8192 * 8 * 2.6


def test_the_order_of_a_dict_stays() -> None:
    value = {str(-i): i for i in range(100)}
    assert list(decode(encode(value)).items()) == list(value.items())


def test_what_cannot_travel_among_many_is_named() -> None:
    with pytest.raises(Exception, match=r"at \[20\] cannot travel"):
        encode([1.0] * 20 + [{1}])
    with pytest.raises(Exception, match=r"at \['30'\] cannot travel"):
        encode({str(i): 1.0 if i < 30 else {1} for i in range(40)})


def test_a_checkpoint_names_the_arrays_beside_runs() -> None:
    value = {"log": [1.5] * 100, "names": {str(i): i for i in range(50)}, "theta": np.arange(3.0)}
    (found,) = outline(encode(value))
    assert found.path == ("theta",)


def run(kind: bytes, data: bytes, tag: bytes = LIST) -> bytes:
    return RUN + tag + kind + BYTES.inline + U64(len(data)) + data


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (run(b"f", b"1234567"), "of 8 bytes has 7"),
        (run(b"q", b"12345678"), "a run of kind b'q'"),
        (run(b"f", b"12345678", b"D"), "as b'D'"),
        (run(b"T", b"\0\1\2"), "others than 0 and 1"),
        (RUN + LIST + b"f" + b"N", "without its bulk"),
        (RUN + LIST + b"f" + b"S" + U64(8) + b"12345678", "without its bytes"),
        (run(b"S", U64(1) + U64(2)) + b"S" + U64(2) + b"ab", "not as long"),
        (run(b"S", U64(1 << 63) * 2) + b"S" + U64(2) + b"ab", "not as long"),
        (run(b"S", U64(2)) + b"B" + U64(2) + b"ab", "not as long"),
        (RUN + LIST, "announces"),
        (RUN + LIST + b"f", "without its bulk"),
        (RUN + LIST + b"f" + b"B" + U64(1 << 60), "announces"),
        ((RUN + LIST + b"f") * 1000, "without its bulk"),
        (COLUMNS + run(b"i", U64(1) + U64(1)) + run(b"i", U64(1) + U64(2)), "1 different"),
        (COLUMNS + run(b"i", U64(1) + U64(2)) + run(b"i", U64(1)), "has 1 values"),
        (COLUMNS + b"L" + U64(0) + run(b"i", U64(1)), "no run"),
    ],
    ids=range(16),
)
def test_what_is_said_of_bytes_that_are_no_run(body: bytes, said: str) -> None:
    encoded = Encoded(b"\x01" + body + b"\0\0\0\0", (), b"")
    with pytest.raises(DecodeError) as caught:
        decode(encoded)
    assert said in str(caught.value)


def test_the_ends_of_64_bits() -> None:
    same(travels([-(1 << 63), (1 << 63) - 1] * 10), [-(1 << 63), (1 << 63) - 1] * 10)


def test_a_dict_is_written_without_a_tuple_for_each_of_its_items() -> None:
    numbers = {number: float(number) for number in range(100_000)}
    encode(numbers)
    tracemalloc.start()
    try:
        encode(numbers)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 110 * len(numbers)  # it is 84; with tuples 143
