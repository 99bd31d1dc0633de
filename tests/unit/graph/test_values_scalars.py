"""numpy's numbers, one by one: to the bytes that arrays of them have, in few calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from taskgraph.graph.values import decode, encode

NUMBERS = [np.dtype(code).type(1) for code in "?bhilqBHILQefdgFDG"]
TIMES = [np.datetime64(7, "s"), np.timedelta64(3, "25us"), np.datetime64("NaT", "ns")]


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("number", NUMBERS + TIMES, ids=lambda number: f"{type(number).__name__} {number}")
def test_it_comes_back_as_what_it_was(number: Any, writable: bool) -> None:
    (found, _) = decode(encode((number, "")), writable=writable)
    assert type(found) is type(number) and found.dtype.num == number.dtype.num and found.dtype == number.dtype
    assert repr(found) == repr(number)
