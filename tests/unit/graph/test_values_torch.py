"""Tensors travel once `taskgraph.torch` is imported."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import taskgraph.torch  # noqa: E402, F401
from taskgraph.errors import DecodeError, ValueNotEncodable  # noqa: E402
from taskgraph.graph.values import decode, encode  # noqa: E402

NAMES = [
    "bool",
    "uint8",
    "int64",
    "float32",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
    "uint16",
    "float8_e4m3fn",
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("name", [*NAMES, "complex32"])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (60, 70)])
def test_every_dtype_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    dtype = getattr(torch, name)
    size = int(np.prod(shape))
    bits = torch.arange(size * dtype.itemsize, dtype=torch.int64).remainder(2 if name == "bool" else 251)
    tensor = bits.to(torch.uint8).view(dtype)[:size].reshape(shape) if size else torch.zeros(shape, dtype=dtype)
    encoded = encode({"w": tensor})
    back = decode(encoded)["w"]
    assert type(back) is torch.Tensor
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert encode({"w": back}).digest == encoded.digest
    if size:
        assert bytes(back.reshape(-1).view(torch.uint8).numpy()) == bytes(tensor.reshape(-1).view(torch.uint8).numpy())


def test_layouts_and_lazy_bits() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(decode(encode(tensor.t())), tensor.t())
    assert torch.equal(decode(encode(tensor[:, ::2])), tensor[:, ::2])
    complex_ = torch.complex(tensor, tensor)
    assert torch.equal(decode(encode(complex_.conj())), complex_.conj())
    assert torch.equal(decode(encode(complex_.conj().imag)), complex_.conj().imag)


def laid_out() -> list[torch.Tensor]:
    images = torch.rand(8, 16, 32, 32)
    rows = images.reshape(512, -1)
    return [
        images.to(memory_format=torch.channels_last),
        *(rows.t(), rows.t().to(torch.bfloat16), torch.complex(rows, rows).t().conj(), torch.rand(3, 4).t()),
        *(rows[:, ::2], rows[:, 3], images[:, 1], rows[:, ::2].to(torch.bfloat16)),  # with gaps
    ]


@pytest.mark.parametrize("at", range(9))
@pytest.mark.parametrize("writable", [False, True])
def test_a_state_comes_back_as_it_lay(at: int, writable: bool) -> None:
    """It came back in C's order: what a successor summed had other last bits."""
    sent = laid_out()[at]
    encoded = encode([sent], ordered=True)
    (back,) = decode(encoded, writable=writable)
    assert torch.equal(back, sent)
    if at < 5:
        assert back.stride() == sent.stride()
    for axis in range(sent.ndim):
        assert torch.equal(back.sum(axis), sent.sum(axis))
    assert encode([back], ordered=True).digest == encoded.digest
    assert encode([sent]).digest == encode([sent.contiguous()]).digest


@pytest.mark.parametrize(
    "tensor", [torch.rand(1, 90).expand(50, 90), torch.rand(50, 1).expand(50, 90), torch.zeros(0, 4).t()]
)
def test_what_has_no_order_of_its_own_comes_back(tensor: torch.Tensor) -> None:
    back = decode(encode(tensor, ordered=True), writable=True)
    assert torch.equal(back, tensor) and back.numel() == back.untyped_storage().nbytes() // back.itemsize


@pytest.mark.parametrize("size", [3, 10_000])
def test_what_arrives_is_ones_own(size: int) -> None:
    tensor = torch.zeros(size)
    encoded = encode(tensor)
    tensor += 7
    for writable in (False, True):
        back = decode(encoded, writable=writable)
        assert not back.any()
        back += 5
    assert not decode(encoded).any()


def test_what_does_not_travel_has_a_way_out() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    with warnings.catch_warnings(action="ignore"):  # such tensors are a prototype
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    refused: list[tuple[Any, str]] = [
        (leaf, "t.detach()"),
        (leaf * 2, "t.detach()"),
        (torch.nn.Parameter(torch.zeros(3)), "p.detach()"),
        (torch.eye(3).to_sparse(), "t.to_dense()"),
        (nested, "t.unbind()"),
        (torch.zeros(3, device="meta"), "meta device"),
    ]
    for value, way_out in refused:
        with pytest.raises(ValueNotEncodable, match=r"channel 'g': a value of type torch.* at \['w'\]") as caught:
            encode({"w": value}, what="channel 'g'")
        assert way_out in str(caught.value)
    assert torch.equal(decode(encode(leaf.detach())), leaf)


def test_a_state_dict() -> None:
    state = dict(torch.nn.Linear(3, 2).state_dict())
    back = decode(encode(state), writable=True)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[k], state[k]) for k in state)


def test_a_tensor_that_is_none() -> None:
    encoded = encode(torch.zeros(2))
    for dtype in (b"float64", b"nonsens"):
        changed = encoded.meta.replace(b"float32", dtype)
        with pytest.raises(DecodeError, match=r"codec 'torch.Tensor' cannot decode"):
            decode(type(encoded)(changed, (), b""))
