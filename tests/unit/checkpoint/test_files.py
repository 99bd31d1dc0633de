"""One task's file: exact for us, open for others, and refused by name once a bit of it is another."""

from __future__ import annotations

import dataclasses
import json
import struct
import time
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors import numpy as safetensors_numpy
from safetensors import safe_open

import taskgraph as tg
from taskgraph.checkpoint.files import FileInfo, Label, pack_file, unpack_file
from taskgraph.errors import CheckpointError
from taskgraph.graph.values import decode, encode

LABEL = Label(job="fit", fingerprint="f1", tasks=3, task=2, epoch=20, attempt=4, run="ab12")


@tg.message
class SavedLayer:
    weight: np.ndarray
    name: str


STATES: dict[str, Any] = {
    "nothing": None,
    "an array alone": np.arange(6.0).reshape(2, 3),
    "a large array alone": np.arange(10_000, dtype=np.float32).reshape(100, 100),
    "by name": {"theta": np.ones(3), "momentum": np.zeros((2000, 2)), "steps": 7, "note": "héllo"},
    "nested": {"layers": [{"w": np.ones((40, 40))}, {"w": np.zeros(2)}], "pair": (np.int64(3), 1 + 2j)},
    "messages": {"layer": SavedLayer(np.full(5000, 0.5), "first")},
    "dtypes safetensors knows": {d: np.arange(5000).astype(d) for d in "?bBhHiIlLqQefd"},
    "dtypes it does not": {
        "complex": np.arange(3000) * 1j,
        "big endian": np.arange(3000, dtype=">f8"),
        "record": np.zeros(900, dtype=[("a", "<f8"), ("b", "S3")]),
        "text": np.array(["a", "bcd"] * 900),
        "time": np.array(["2020-01-01"] * 900, dtype="datetime64[s]"),
        "long double": np.arange(900, dtype=np.longdouble),
    },
    "no elements": {"empty": np.zeros((0, 5)), "point": np.array(3.0)},
    "not contiguous": {"t": np.arange(10_000).reshape(100, 100).T[::2], "f": np.asfortranarray(np.ones((90, 80)))},
    "long bytes and text": {"blob": bytes(range(256)) * 100, "text": "x" * 10_000},
    "names that clash": {1: np.ones(1000), "1": np.zeros(1000), "taskgraph.value": np.ones(2), "a.b": np.ones(2)},
    "many that are small": {
        "layers": {f"l{n}": {"w": np.full((30, 40), float(n)), "b": np.full(77, n, np.int16)} for n in range(40)},
        "text": "é" * 700,
        "complex": np.arange(300) * 1j,
        "blob": bytes(range(250)) * 3,
        "last": np.arange(1000) % 2 == 0,
        "odd": np.arange(100.0, dtype=">f8"),
    },
    "only what has no name beside each other": {"own": np.zeros(8000), "blobs": [b"x" * 700, "y" * 800, b"z" * 900]},
    "keys that are no Unicode": {"\ud800": np.ones(2), "a\udfff": {"b": np.ones(5000)}, "\\ud800": np.zeros(2)},
    "odd keys": {(1, 2): np.ones(2), None: np.zeros(2), "": np.ones(1), "__metadata__": np.ones(3)},
}


def packed(state: Any) -> tuple[FileInfo, bytes]:
    info, parts = pack_file(encode({"state": state, "numbers": {"loss": 0.5}, "log": {}}), LABEL)
    data = b"".join(parts)
    assert info.size == len(data)
    return info, data


def same(one: Any, other: Any) -> bool:
    """Equal in type, dtype, order of bytes, and bits."""
    return encode(one).digest == encode(other).digest


@pytest.mark.parametrize("name", STATES)
def test_comes_back_exactly(name: str) -> None:
    info, data = packed(STATES[name])
    value = unpack_file(memoryview(data), info, path="p")
    found = decode(value)
    assert same(found["state"], STATES[name])
    assert found["numbers"] == {"loss": 0.5}
    assert same(decode(value, writable=True)["state"], STATES[name])


@pytest.mark.parametrize("name", STATES)
def test_the_safetensors_package_opens_it(name: str, tmp_path: Any) -> None:
    path = tmp_path / "task.safetensors"
    path.write_bytes(packed(STATES[name])[1])
    with safe_open(path, framework="np") as file:
        assert file.metadata()["job"] == "fit"
        assert file.metadata()["epoch"] == "20"
        assert "taskgraph.value" in file.keys()  # noqa: SIM118 - not a mapping


def test_others_see_arrays_by_name(tmp_path: Any) -> None:
    weights = np.arange(5000, dtype=np.float32).reshape(50, 100)
    state = {"theta": np.array([1.0, 2.0]), "layers": [{"w": weights}], "layer": SavedLayer(np.full(700, 0.5), "a")}
    tensors = safetensors_numpy.load(packed(state)[1])
    assert tensors["theta"].tolist() == [1.0, 2.0]
    assert tensors["theta"].dtype == np.float64
    assert np.array_equal(tensors["layers.0.w"], weights)
    assert np.array_equal(tensors["layer.weight"], np.full(700, 0.5))
    assert set(tensors) == {"theta", "layers.0.w", "layer.weight", "taskgraph.value"}
    alone = safetensors_numpy.load(packed(weights)[1])
    assert np.array_equal(alone["state"], weights)


@pytest.mark.parametrize("room", [0, 3_000])
@pytest.mark.parametrize("name", STATES)
def test_arrays_without_room_for_names(name: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskgraph.checkpoint.files._NAMES_BYTES", room)
    info, data = packed(STATES[name])
    assert same(decode(unpack_file(memoryview(data), info, path="p"))["state"], STATES[name])
    tensors = safetensors_numpy.load(data)
    if room == 0:
        assert all(key.startswith("taskgraph.") for key in tensors)


def test_header_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of a million small arrays had a file that was written, called complete, and could never be read."""
    state = {
        **{f'small-{n}-"\\\n\x00é😀': np.zeros(2) for n in range(3000)},
        **{f'side-by-side-{n}-"\\\n\x00é😀': np.full((1,) * 20 + (200,), float(n)) for n in range(300)},
        "large": np.zeros(50_000),
    }
    _, everything = packed(state)
    monkeypatch.setattr("taskgraph.checkpoint.files._NAMES_BYTES", 100_000)
    monkeypatch.setattr("taskgraph.checkpoint.files._MAX_HEADER", 101_000)
    info, data = packed(state)
    assert struct.unpack_from("<Q", everything)[0] > 300_000
    assert 10_000 < struct.unpack_from("<Q", data)[0] < 101_000
    assert same(decode(unpack_file(memoryview(data), info, path="p"))["state"], state)
    tensors = safetensors_numpy.load(data)
    assert "large" in tensors and len(tensors) > 50, "large ones are named before small ones"


def test_too_many_large_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskgraph.checkpoint.files._MAX_HEADER", 10_000)
    large = {str(n): np.zeros(40_000) for n in range(200)}
    with pytest.raises(CheckpointError, match=r"200 large arrays, too many for the header"):
        packed(large)


def test_many_small_arrays_are_quick() -> None:
    """It took time that grew with the square of their number: seconds for these, minutes for 100,000."""
    value = encode({str(n): np.full(200, float(n)) for n in range(20_000)})
    begin = time.process_time()
    pack_file(value, LABEL)
    assert time.process_time() - begin < 3


def test_buffers_are_not_copied() -> None:
    value = encode({"state": np.zeros(1_000_000), "numbers": {}, "log": {}})
    _, parts = pack_file(value, LABEL)
    assert any(np.shares_memory(np.frombuffer(p, np.uint8), np.frombuffer(value.buffers[0], np.uint8)) for p in parts)


def test_arrays_are_aligned_in_the_file() -> None:
    _, data = packed({"a": np.ones(3, np.uint8), "b": np.ones(1000), "c": np.ones(3000, np.float16)})
    size = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8 : 8 + size])
    for name, itemsize in (("b", 8), ("c", 2)):
        assert (8 + size + header[name]["data_offsets"][0]) % itemsize == 0


def test_flipped_bits() -> None:
    info, data = packed({"theta": np.ones(3), "big": np.zeros(600)})
    for at in range(len(data)):
        torn = bytearray(data)
        torn[at] ^= 1 << at % 8
        with pytest.raises(CheckpointError, match=r"^some/file is "):
            unpack_file(memoryview(bytes(torn)), info, path="some/file")


def test_truncated_file() -> None:
    info, data = packed({"theta": np.ones(300)})
    for size in (0, 1, 7, 8, 100, len(data) // 2, len(data) - 1):
        with pytest.raises(CheckpointError, match="some/file is torn"):
            unpack_file(memoryview(data[:size]), info, path="some/file")
        with pytest.raises(CheckpointError, match="some/file is"):
            short = dataclasses.replace(info, size=size)
            unpack_file(memoryview(data[:size]), short, path="some/file")


def test_another_file() -> None:
    info, _ = packed({"theta": np.ones(3)})
    other, data = packed({"theta": np.zeros(3)})
    assert other.size == info.size
    with pytest.raises(CheckpointError, match="f is corrupt, or foreign"):
        unpack_file(memoryview(data), info, path="f")


def test_file_of_another_tool() -> None:
    data = memoryview(safetensors_numpy.save({"theta": np.ones(3)}))
    for digest in ("0" * 32, xxhash.xxh3_128_hexdigest(data)):
        with pytest.raises(CheckpointError, match=r"f is (corrupt|not a file)"):
            unpack_file(data, FileInfo(2, len(data), digest), path="f")


def test_random_bytes() -> None:
    rng = np.random.default_rng(1)
    for size in (*range(40), 200, 5000):
        data = rng.bytes(size)
        with pytest.raises(CheckpointError):
            unpack_file(memoryview(data), FileInfo(2, size, "0" * 32), path="f")
