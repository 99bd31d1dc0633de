"""numpy's numbers, one by one: to the bytes that arrays of them have, in few calls."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from taskgraph.graph.values import decode, encode

NUMBERS = [np.dtype(code).type(1) for code in "?bhilqBHILQefdgFDG"]
TIMES = [np.datetime64(7, "s"), np.timedelta64(3, "25us"), np.datetime64("NaT", "ns")]


def calls(work: Callable[[], Any]) -> Counter[str]:
    """How often it calls each function of Python's."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found[frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("kind", [np.float64, np.int64, np.bool_, np.float32, np.complex128])
def test_numpy_scalars_take_few_calls(kind: type[Any]) -> None:
    items = [kind(number) for number in range(200)]
    encoded = encode(items)
    assert encode(items) == encoded and decode(encoded) == items
    written, read = calls(lambda: encode(items)), calls(lambda: decode(encoded))
    assert max(written.values()) == max(read.values()) == 200, "no function more than once for each"
    assert written.total() < 3.2 * 200 and read.total() < 3.2 * 200, (written, read)


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("number", NUMBERS + TIMES, ids=lambda number: f"{type(number).__name__} {number}")
def test_it_comes_back_as_what_it_was(number: Any, writable: bool) -> None:
    (found, _) = decode(encode((number, "")), writable=writable)
    assert type(found) is type(number) and found.dtype.num == number.dtype.num and found.dtype == number.dtype
    assert repr(found) == repr(number)
