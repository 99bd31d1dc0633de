"""Import this module in a driver, and PyTorch tensors travel.

A tensor arrives as a `torch.Tensor` of the same dtype, shape and bits, bfloat16 and float8 included. It is a copy of
its own, which may be written to. What does not travel, and is refused with the way out: the graph that made it (a
tensor that requires a gradient: send `t.detach()`), parameters and other subclasses, and sparse, quantized and meta
tensors.

A tensor of a GPU is copied to the host when it is put, and arrives on the GPU of a node that has one and CuPy, on the
CPU of any other. Which one is no part of its value: its digest is the same.

This module needs PyTorch; nothing else of the framework does.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from taskgraph.device.api import OnDevice
from taskgraph.graph.codecs import codec
from taskgraph.graph.refusals import CannotTravel

__all__: list[str] = []

_PLAIN: Final = frozenset(
    (
        torch.bool,
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
)
"""What numpy has too. All others travel as unsigned integers of their size."""
_BITS: Final = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def _encode(tensor: torch.Tensor) -> tuple[str, Any]:
    if tensor.requires_grad:
        raise CannotTravel(tensor, "it requires a gradient, and the graph behind it does not travel: send t.detach()")
    if tensor.layout is not torch.strided:
        raise CannotTravel(tensor, f"its layout is {tensor.layout}: send t.to_dense(), or its indices and values")
    if tensor.is_quantized:
        raise CannotTravel(tensor, "it is quantized: send t.dequantize(), or t.int_repr() with its scale")
    if tensor.is_meta:
        raise CannotTravel(tensor, "it is on the meta device and has no data: make it on a real one")
    name = str(tensor.dtype).removeprefix("torch.")
    on_host = tensor.device.type == "cpu"
    host = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    if host.dtype not in _PLAIN:
        if host.dtype.itemsize not in _BITS:
            raise CannotTravel(tensor, f"its dtype is {tensor.dtype}: convert it, e.g. t.float()")
        host = host.view(_BITS[host.dtype.itemsize])
    array = host.numpy()
    return name, array if on_host else OnDevice(array)


def _decode(value: Any) -> torch.Tensor:
    name, array = value
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"not a dtype of this PyTorch ({torch.__version__}): {name!r}")
    if isinstance(array, np.ndarray):
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())  # a tensor cannot be read-only
    else:
        tensor = torch.from_dlpack(array)
    expected = dtype if dtype in _PLAIN else _BITS.get(dtype.itemsize)
    if tensor.dtype is not expected:
        raise ValueError(f"a tensor of dtype {dtype} came as {tensor.dtype}")
    return tensor.view(dtype)


codec(torch.Tensor, _encode, _decode, name="torch.Tensor")
