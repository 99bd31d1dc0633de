"""Import this module in a driver, and PyTorch tensors travel.

A tensor arrives as a `torch.Tensor` of the same dtype, shape and bits, bfloat16 and float8 included. It is a copy of
its own, which may be written to. What does not travel, and is refused with the way out: the graph that made it (a
tensor that requires a gradient: send `t.detach()`), parameters and other subclasses, and sparse, nested, quantized and
meta tensors.

A tensor of a CUDA device travels as CuPy's arrays do, where the node has CuPy, and by the host's memory where it has
not. It arrives on the device of a node that has one and CuPy, on the CPU of any other, and belongs to PyTorch: in its
memory, on its current stream. Where it was is no part of its value: its digest is the same.

This module needs PyTorch; nothing else of the framework does.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from taskgraph.device.api import Array, OnDevice
from taskgraph.device.cuda import givers
from taskgraph.device.lookup import from_dlpack
from taskgraph.graph.codecs import codec
from taskgraph.graph.orders import copied
from taskgraph.graph.refusals import CannotTravel
from taskgraph.protocol.deviceloss import device_error

__all__: list[str] = []

_PLAIN: Final = frozenset(
    (
        torch.bool,
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
)
"""dtypes that numpy has, too. All others travel as unsigned integers of their size."""
_BITS: Final = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def _encode(tensor: torch.Tensor) -> tuple[str, Any]:
    if tensor.is_nested:
        raise CannotTravel(tensor, "it is nested: send t.unbind(), its tensors")
    if tensor.requires_grad:
        raise CannotTravel(tensor, "it requires a gradient, and the graph behind it does not travel: send t.detach()")
    if tensor.layout is not torch.strided:
        raise CannotTravel(tensor, f"its layout is {tensor.layout}: send t.to_dense(), or its indices and values")
    if tensor.is_quantized:
        raise CannotTravel(tensor, "it is quantized: send t.dequantize(), or t.int_repr() with its scale")
    if tensor.is_meta:
        raise CannotTravel(tensor, "it is on the meta device and has no data: make it on a real one")
    name = str(tensor.dtype).removeprefix("torch.")
    bits = tensor.resolve_conj().resolve_neg()
    if bits.dtype not in _PLAIN:
        if bits.dtype.itemsize not in _BITS:
            raise CannotTravel(tensor, f"its dtype is {tensor.dtype}: convert it, e.g. t.float()")
        bits = bits.view(_BITS[bits.dtype.itemsize])
    if _on_host(tensor):
        return name, bits.numpy()  # as it lies in memory: of a state, that counts
    there = _there(bits)
    return name, OnDevice(bits.cpu().numpy()) if there is None else there


def _on_host(tensor: torch.Tensor) -> bool:
    return bool(tensor.device.type == "cpu")


def _there(tensor: torch.Tensor) -> Array | None:
    """The tensor's memory as an array of its device, behind what PyTorch has queued.

    None where it is no array of a device that is known here (without CuPy, say), or PyTorch or CuPy refuse.
    """
    try:
        return from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:  # as they say "no"
        if device_error(error) is not None:
            raise
        return None


def _decode(value: Any) -> torch.Tensor:
    name, array = value
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"not a dtype of this PyTorch ({torch.__version__}): {name!r}")
    if isinstance(array, np.ndarray):
        tensor = torch.from_numpy(array if array.flags.writeable else copied(array))  # a tensor cannot be read-only
    else:
        # In memory of PyTorch's own, since its streams know nothing of the one that an array's memory goes back to.
        tensor = torch.from_dlpack(array).clone()
        from_dlpack(tensor)  # the current stream follows that copy: the array's memory goes back behind it
    expected = dtype if dtype in _PLAIN else _BITS.get(dtype.itemsize)
    if tensor.dtype is not expected:
        raise ValueError(f"a tensor of dtype {dtype} came as {tensor.dtype}")
    return tensor.view(dtype)


def _give_back(nbytes: int) -> bool:
    """PyTorch keeps what was freed, as CuPy does. Says whether it let go of some."""
    if not torch.cuda.is_initialized():
        return False
    before = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    return bool(torch.cuda.memory_reserved() < before)


codec(torch.Tensor, _encode, _decode, name="torch.Tensor")
givers.append(_give_back)
