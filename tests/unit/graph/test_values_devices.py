"""Where an array lived: beside the value, not in it. With a device in software; on CUDA's in tests/integration."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from softdevice import SoftArray, SoftDevice

from taskgraph.device.api import DeviceArrayOnHost
from taskgraph.device.cuda import array_module, device_count
from taskgraph.errors import ValueNotEncodable
from taskgraph.graph.values import decode, encode


class Sparse:
    __module__ = "cupyx.scipy.sparse"


@pytest.fixture
def soft() -> SoftDevice:
    return SoftDevice()


@pytest.mark.parametrize("shape", [(), (3,), (100, 100), (0, 2)])
def test_device_array_round_trip(soft: SoftDevice, shape: tuple[int, ...]) -> None:
    host = np.random.default_rng(1).normal(size=shape)
    value = [host, soft.xp.asarray(host), {"x": (soft.xp.asarray(host.T), host)}]
    encoded = encode(value)
    assert encoded.digest == encode([host, host, {"x": (host.T, host)}]).digest
    on_host = decode(encoded)
    assert [type(a) for a in (*on_host[:2], *on_host[2]["x"])] == [np.ndarray] * 4
    back = decode(encoded, device=soft)
    assert [type(a) for a in (*back[:2], *back[2]["x"])] == [np.ndarray, SoftArray, SoftArray, np.ndarray]
    assert np.array_equal(back[1].get(), host)
    assert np.array_equal(back[2]["x"][0].get(), host.T)


def test_later_device_changes_do_not_arrive(soft: SoftDevice) -> None:
    array = soft.xp.asarray(np.zeros(10_000))
    encoded = encode(array)
    array += 7
    assert not decode(encoded).any()


def test_device_array_decoded_twice(soft: SoftDevice) -> None:
    encoded = encode(soft.xp.asarray(np.zeros(10_000)))
    one = decode(encoded, device=soft)
    one += 7
    assert not decode(encoded, device=soft).get().any()


def test_codec_of_device_array(soft: SoftDevice) -> None:
    encoded = encode(DeviceArrayOnHost(np.arange(3)))
    assert encoded.digest == encode(np.arange(3)).digest
    assert type(decode(encoded, device=soft)) is SoftArray


def test_other_things_of_cupy_do_not_travel(soft: SoftDevice) -> None:
    with pytest.raises(ValueNotEncodable, match="a\\.indptr"):
        encode(Sparse())


def test_nothing_imports_cupy_by_itself(monkeypatch: pytest.MonkeyPatch, soft: SoftDevice) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it would raise
    value = [np.zeros(3), np.zeros((100, 100))]
    assert len(decode(encode(value), device=soft)) == 2


@pytest.mark.gpu
@pytest.mark.skipif(device_count() == 0, reason="no CUDA device")
def test_a_real_device() -> None:
    import cupy

    for host in (np.arange(6.0).reshape(2, 3), np.array(2, "i1"), np.zeros((200, 300), "c8").T, np.zeros(0, "?")):
        encoded = encode({"a": cupy.asarray(host)})
        assert encoded.digest == encode({"a": host}).digest
        back = decode(encoded, device=array_module(1)[1], writable=True)["a"]
        assert type(back) is cupy.ndarray
        assert (back.dtype, back.shape) == (host.dtype, host.shape)
        assert np.array_equal(back.get(), host)
        back += back
        assert np.array_equal(decode(encoded)["a"], host)
