"""The encoded bytes: nodes compare digests, and checkpoints of an earlier release are read, so they may not change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf import timestamp_pb2

from taskgraph.graph.values import codec, decode, digest_of, encode, message


@message(name="bytes.Step")
class Step:
    theta: Any
    count: int = 3


class Money:
    def __init__(self, cents: Any) -> None:
        self.cents = cents


codec(Money, lambda money: money.cents, Money, name="bytes.Money")


VALUES: list[Any] = [
    None,
    True,
    -1,
    (1 << 64) - 1,
    1 << 64,
    -(1 << 70),
    -0.0,
    1.5 - 2j,
    "text",
    "é\ud800\0",
    b"b" * 65_535,
    b"b" * 65_536,
    [1, [2.5, (None, ["deep"])], "end"],
    {"a": 1, 2: "b", (3, None): [b"c"], False: {}, b"k": {"k": {"k": ()}}},
    {"state": {"count": np.zeros(1)}, "numbers": {"loss": 0.25}, "log": {7: "row"}},
    np.array(2.5),
    np.arange(12, dtype=">i4").reshape(3, 4),
    np.arange(20)[::-3],
    np.zeros((2, 0, 3), np.complex64),
    np.array(["a", "bcd"]),
    np.array(["2001-02-03"], "M8[25s]"),
    np.arange(3, dtype=np.longlong),
    np.arange(8191, dtype=float),
    np.arange(8192, dtype=float),
    np.zeros(2, [("a", "i1"), ("b", "<f8", (2, 2)), ("c", [("d", "M8[s]")])]),
    np.ones(9000, np.dtype([("a", "i1"), ("b", "<f8")], align=True)),
    np.ones(2, [(("title", "a"), "<i2")]).view(np.recarray).view(np.ndarray),
    [np.zeros(2), "between", np.zeros(9000), np.ones(3), np.ones(10_000), b"b" * 70_000],
    [np.full(3001, n, np.int16) for n in range(12)],
    np.float64(0.5),
    np.datetime64("2001-02-03"),
    np.str_("z\0"),
    np.bytes_(b"y"),
    np.void(b"ab"),
    [Step([Step(None, 1)], 2), {"step": Step("x")}],
    [Money([Money(1)])],
    timestamp_pb2.Timestamp(seconds=5, nanos=7),
]
DIGESTS = [
    "11c87eac",
    "a07b11a9",
    "6d350e53",
    "de8400a5",
    "cc4f9cd7",
    "fb163abe",
    "dcd53d63",
    "352abce6",
    "d7dbd0a7",
    "44ab529c",
    "5f8ac34f",
    "70fe5fea",
    "37c9c5ea",
    "05961298",
    "3a406966",
    "efa57495",
    "719c8d94",
    "d74492e1",
    "6c3894d1",
    "7640c26f",
    "85553899",
    "ef27ba1d",
    "d11cf74a",
    "2ff10f02",
    "34cc7a49",
    "b347db8b",
    "a21c51c5",
    "38ea940a",
    "02f16595",
    "7c444900",
    "ff539cbf",
    "cd0e4eda",
    "e367a50d",
    "2e123786",
    "3d70fd4b",
    "f8ae59da",
    "474e5a20",
]
"""The first bytes of each."""


@pytest.mark.parametrize(("value", "digest"), list(zip(VALUES, DIGESTS, strict=True)), ids=range(len(VALUES)))
def test_pinned_digests(value: Any, digest: str) -> None:
    for _ in range(2):  # the second time from what is remembered of the first
        encoded = encode(value)
        assert encoded.digest.hex()[:8] == digest
        assert digest_of(encoded.meta, encoded.buffers) == encoded.digest
        assert encode(decode(encoded)).digest == encoded.digest
        assert encode(decode(encoded, writable=True)).digest == encoded.digest
