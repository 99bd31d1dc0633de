"""Where an array lived: beside the value, not in it. With a stand-in for CuPy here; on a GPU in tests/integration."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from taskgraph.errors import ValueNotEncodable
from taskgraph.graph.devices import OnDevice, device_count
from taskgraph.graph.values import decode, encode


class DeviceArray:
    """As much of cupy.ndarray as encoding asks for; it is no numpy array, as the real one is none."""

    __module__ = "cupy"

    def __init__(self, data: Any, copy: bool = True, order: str = "C") -> None:
        self.data = np.array(data, copy=copy, order=order)

    def get(self, order: str = "C") -> Any:
        return self.data.copy(order=order)


class Sparse:
    __module__ = "cupyx.scipy.sparse"


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("cupy")
    module.ndarray = DeviceArray
    module.array = DeviceArray
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.mark.parametrize("shape", [(), (3,), (100, 100), (0, 2)])
def test_a_device_array_comes_back_where_there_is_a_device(cupy: Any, shape: tuple[int, ...]) -> None:
    host = np.random.default_rng(1).normal(size=shape)
    value = [host, DeviceArray(host), {"x": (DeviceArray(host.T), host)}]
    encoded = encode(value)
    assert encoded.digest == encode([host, host, {"x": (host.T, host)}]).digest
    on_host = decode(encoded)
    assert [type(a) for a in (*on_host[:2], *on_host[2]["x"])] == [np.ndarray] * 4
    back = decode(encoded, device="cuda")
    assert [type(a) for a in (*back[:2], *back[2]["x"])] == [np.ndarray, DeviceArray, DeviceArray, np.ndarray]
    assert np.array_equal(back[1].data, host)
    assert np.array_equal(back[2]["x"][0].data, host.T)


def test_later_changes_on_the_device_do_not_arrive(cupy: Any) -> None:
    array = DeviceArray(np.zeros(10_000))
    encoded = encode(array)
    array.data[:] = 7
    assert not decode(encoded).any()


def test_one_device_array_decoded_twice_is_two(cupy: Any) -> None:
    encoded = encode(DeviceArray(np.zeros(10_000)))
    decode(encoded, device="cuda").data[:] = 7
    assert not decode(encoded, device="cuda").data.any()


def test_codecs_of_other_libraries_can_say_that_an_array_was_on_a_device(cupy: Any) -> None:
    encoded = encode(OnDevice(np.arange(3)))
    assert encoded.digest == encode(np.arange(3)).digest
    assert type(decode(encoded, device="cuda")) is DeviceArray


def test_other_things_of_cupy_do_not_travel(cupy: Any) -> None:
    with pytest.raises(ValueNotEncodable, match="a\\.indptr"):
        encode(Sparse())


def test_nothing_imports_cupy_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it would raise
    value = [np.zeros(3), np.zeros((100, 100))]
    assert len(decode(encode(value), device="cuda")) == 2


@pytest.mark.gpu
@pytest.mark.skipif(device_count() == 0, reason="no CUDA device")
def test_a_real_device() -> None:
    import cupy

    for host in (np.arange(6.0).reshape(2, 3), np.array(2, "i1"), np.zeros((200, 300), "c8").T, np.zeros(0, "?")):
        encoded = encode({"a": cupy.asarray(host)})
        assert encoded.digest == encode({"a": host}).digest
        back = decode(encoded, device="cuda", writable=True)["a"]
        assert type(back) is cupy.ndarray
        assert (back.dtype, back.shape) == (host.dtype, host.shape)
        assert np.array_equal(back.get(), host)
        back += back
        assert np.array_equal(decode(encoded)["a"], host)
