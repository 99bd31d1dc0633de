"""The encoded bytes: nodes compare digests, and checkpoints of an earlier release are read, so they may not change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf import timestamp_pb2

from taskgraph.graph import encoding
from taskgraph.graph.values import codec, decode, digest_of, encode, message


@message(name="bytes.Step")
class Step:
    theta: Any
    count: int = 3


class Money:
    def __init__(self, cents: Any) -> None:
        self.cents = cents


codec(Money, lambda money: money.cents, Money, name="bytes.Money")

# A value, its digest, bytes of meta, buffers: as they always were.
TABLE: list[tuple[Any, str, int, int]] = [
    (None, "2c069b5956f8e5d0aa2725c0a61db679", 6, 0),
    (True, "fbfe0d29a7ab0d0db239d8472b60fa5d", 6, 0),
    (False, "be68d958fbdd7c4bd90693adb2318b06", 6, 0),
    (0, "5819dfd5c3e3628bbf212c5abb04005d", 14, 0),
    (-1, "93056ff99b4e24fd2f253c2356fcb422", 14, 0),
    ((1 << 63) - 1, "06ca04c604ecc3d01d40cb12a36fdb56", 14, 0),
    (-(1 << 63), "71291e943ddad471ad744a3444880a31", 14, 0),
    (1 << 63, "3b4e45691acd83027b04156b7b2abcfa", 23, 0),
    (-(1 << 200), "a22556c54d5a5f5e4b0bfe8166ee6aff", 40, 0),
    (0.5, "b57b19645061943363ae808e047b3abb", 14, 0),
    (float("-inf"), "ed44c63a9e36e9f08d3f65b26dad3994", 14, 0),
    (-0.0, "1ba24544ecb6bed3d6c2f94d7fa86738", 14, 0),
    (1.5 - 2j, "16a2d7528b9e4030c7935e5f79463900", 22, 0),
    ("", "f70df41d3239a2bed677332e5284c01c", 14, 0),
    ("text", "3787875a307e2fdd8b79502332824487", 18, 0),
    ("é\ud800\0", "3cf5b82d48bcd651c9ccd8e7fcff8f1a", 20, 0),
    ("x" * 4096, "9812017428f2d371f7476452a4e5993e", 4110, 0),
    ("x" * 65_534, "36137af3af44ff5dfb11ebfe23693d9f", 65548, 0),
    ("x" * 65_535, "293b47040854b970ad1a51d9426da338", 14, 1),
    ("x" * 65_536, "c15bdde6a18bdc9369bb7062a3005dcb", 14, 1),
    (b"", "c0943e9f3fd7cc7b51c58b10a63a5e4b", 14, 0),
    (b"bytes\0", "463b9ac0e49480ffca680f4abcfe5509", 20, 0),
    (b"b" * 4096, "d9c8e3efd332abfdf95efc4d4e379d70", 4110, 0),
    (b"b" * 65_534, "90a167aefdd93215dfee18cf5c3bef8a", 65548, 0),
    (b"b" * 65_535, "f7c5cda12958e17d50d22aa0e59c7c5f", 14, 1),
    (b"b" * 65_536, "63ba8a887d07cc1c1746b9337cac9245", 14, 1),
    ([], "b3a89d02b12e846ee72b68dd9f241fa6", 14, 0),
    ((), "7f399c15ad2ee867a211c69192a2d2cc", 14, 0),
    ({}, "84e18a1a971f7383bbe429ec8947e371", 14, 0),
    ([1, [2.5, (None, ["deep"])], "end"], "f25cbbd4255fd0c0cc86b9327611b830", 85, 0),
    (
        {"a": 1, 2: "b", (3, None): [b"c"], False: {}, b"k": {"k": {"k": ()}}},
        "58e0c99a029f969ad9788ff8e4d35575",
        157,
        0,
    ),
    ({"k" * 5000: 1, "l" * 70_000: 2}, "4ad60b3a23db222a5f059ef479e88e18", 5050, 1),
    (
        {"state": {"count": np.zeros(1)}, "numbers": {"loss": 0.25}, "log": {7: "row"}},
        "c6e5f1289a2ee3e7ff90ce9ac20e7de0",
        165,
        0,
    ),
    (np.zeros(1), "1b864b13ca7d215be33687d8277bfc9a", 28, 0),
    (np.array(2.5), "7b918126746c366c0369844885290075", 28, 0),
    (np.arange(7, dtype=np.int8), "dce2c39c4df2447053ed5d7513698a6e", 27, 0),
    (np.arange(12, dtype=">i4").reshape(3, 4), "7bd9a8a7c4328c5bc73e927cc3215c84", 84, 0),
    (np.arange(12, dtype=np.float32).reshape(3, 4).T, "6da1b552c79021845c74b8d963850016", 84, 0),
    (np.arange(20)[::-3], "edab68828b08632398f5d7c689ab76f5", 76, 0),
    (np.zeros((2, 0, 3), np.complex64), "ef194c02c599d00817b306ca999c5da3", 36, 0),
    (np.array([True, False]), "12836adf5d93faf7c7f54aac846fe0a4", 22, 0),
    (np.array(["a", "bcd"]), "b6446c71504e7cf172c40faef3269483", 44, 0),
    (np.array([b"a", b"bcd"]), "d103066ee1511cadf71fb2b0d14ee064", 26, 0),
    (np.zeros(3, "U0"), "9b7f764482453b9e2357c31fff285657", 32, 0),
    (np.array(["2001-02-03"], "M8[25s]"), "887a207e2a850b360073185aa1e8fb7d", 44, 0),
    (np.arange(3, dtype=np.longlong), "0ad819ab817c4c7e916e6678fa6f3e3f", 44, 0),
    (np.arange(512, dtype=float), "81a1fe8b50ad4947fc4391f8adf6c80f", 4116, 0),
    (np.arange(8191, dtype=float), "2b5f8e5f2f1a084b2ba706cc06442e1b", 65548, 0),
    (np.zeros(65_535, "u1"), "14393aa4386f5a886aea25eea1a9a8e9", 19, 1),
    (np.arange(8192, dtype=float), "b53b473a55e274d7915fbdbe44947abb", 19, 1),
    (np.arange(20480, dtype=np.int32).reshape(2, 10240).T, "ae4f3224615ac4f86a76ae5db9576948", 27, 1),
    (
        np.zeros(2, [("a", "i1"), ("b", "<f8", (2, 2)), ("c", [("d", "M8[s]")])]),
        "04b85cbd1d405f6089e8c1d6477291dc",
        230,
        0,
    ),
    (np.ones(3, np.dtype([("a", "i1"), ("b", "<f8")], align=True)), "193f51ab8d5ad1d1e7a2970de305b8de", 132, 0),
    (np.ones(9000, np.dtype([("a", "i1"), ("b", "<f8")], align=True)), "1d46b3d3994266feb98950f12d346418", 71, 1),
    (
        np.ones(2, [(("title", "a"), "<i2")]).view(np.recarray).view(np.ndarray),
        "48873c45fcadae2f65b164e5f2c2e20a",
        72,
        0,
    ),
    (
        [np.zeros(2), "between", np.zeros(9000), np.ones(3), np.ones(10_000), b"b" * 70_000],
        "82abdb188daa193de421bf5d33c4105f",
        147,
        3,
    ),
    (  # what is too much for meta, and too little for a buffer each
        [
            *(np.full(3001, n, np.int16) for n in range(12)),
            "t" * 5000,
            np.str_("s" * 600),
            np.ones(9000),
            b"b" * 5001,
            np.bytes_(b"y" * 601),
            np.ones((40, 20)).T,
            np.ones(90, np.dtype([("a", "i1"), ("b", "<f8")], align=True)),
            np.ones(3),
            "é" * 30_000,
            Step(np.ones((70, 1)), {}),
        ],
        "1dd0ef7497ce5f34b9d067520a128303",
        65477,
        2,
    ),
    (np.float64(0.5), "cd3dcfc2e871237eb69a56beed784945", 18, 0),
    (np.int16(-3), "71a728314efe705233a8074630fcbdcb", 12, 0),
    (np.bool_(True), "6de90cba6916705ecb3a68656a097673", 11, 0),
    (np.datetime64("2001-02-03"), "45edd188208a5b9f54490d5069d5b954", 21, 0),
    (np.str_("z\0"), "43360899141c4049eac53e2164a1393d", 16, 0),
    (np.str_("z" * 70_000), "4a24492077fb4143c40866298943a4c8", 14, 1),
    (np.bytes_(b"y"), "65a9727ae57aff97f7afe09076591708", 15, 0),
    (np.void(b"ab"), "f1315fbbd21df5c0007f0a468caba7c0", 12, 0),
    (Step(np.arange(3.0)), "5d7e4381ecfa176c1f8e21dc69c155d7", 114, 0),
    ([Step([Step(None, 1)], 2), {"step": Step("x" * 70_000)}], "8e0d1829bed232277b943f41daea08f3", 229, 1),
    (Money(250), "b842e375cfa73401ffe6921e233e1c17", 34, 0),
    ([Money([Money(1)])], "73c34d10f57c3309d763c9ed71628337", 72, 0),
    (timestamp_pb2.Timestamp(seconds=5, nanos=7), "60bdbe05d57219d0a5dbe675b0302e47", 52, 0),
]


@pytest.mark.parametrize("case", range(len(TABLE)))
def test_bytes_do_not_change(case: int) -> None:
    value, digest, size, buffers = TABLE[case]
    for _ in range(2):  # what is remembered of the first time gives the same
        encoded = encode(value)
        assert (encoded.digest.hex(), len(encoded.meta), len(encoded.buffers)) == (digest, size, buffers)
        assert digest_of(encoded.meta, encoded.buffers) == encoded.digest
        assert encode(decode(encoded)).digest == encoded.digest
        assert encode(decode(encoded, writable=True)).digest == encoded.digest


def test_bytes_of_a_snapshot() -> None:
    def name(text: bytes) -> bytes:
        return b"S" + len(text).to_bytes(8, "little") + text

    def entries(count: int) -> bytes:
        return b"D" + count.to_bytes(8, "little")

    array = b"A\x03<f8\x01" + (1).to_bytes(8, "little")
    meta = b"\x01" + entries(3) + name(b"state") + entries(1) + name(b"count") + array
    meta += bytes(-len(meta) % 16) + bytes(8)
    meta += name(b"numbers") + entries(0) + name(b"log") + entries(0)
    assert encode({"state": {"count": np.zeros(1)}, "numbers": {}, "log": {}}).meta == meta + bytes(4)


def test_keys_that_are_not_remembered_make_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        "",
        "k",
        "é\ud800\0",
        "\U0001f600" * encoding._KEY_CHARS,
        "k" * (encoding._KEY_CHARS + 1),
        "k" * 5000,
        1,
        None,
    ]
    value = {key: [{key: n}] for n, key in enumerate(keys)}
    kept = encode(value)
    with monkeypatch.context() as patched:
        patched.setattr(encoding, "_KEYS_KEPT", 0)
        encoding._keys.clear()
        assert encode(value) == kept
        assert not encoding._keys
    assert encode(value) == kept
    assert len(encoding._keys) == 4
    assert decode(kept) == value


def test_remembered_keys_are_bounded() -> None:
    for start in range(0, 3 * encoding._KEYS_KEPT, 100):
        value = {f"key {n}": n for n in range(start, start + 200)}
        assert decode(encode(value)) == value
    assert len(encoding._keys) <= encoding._KEYS_KEPT
