"""Import this module in a driver, and PyTorch tensors travel.

A tensor arrives as a `torch.Tensor` of the same dtype, shape and bits, bfloat16 and float8 included. It is a writable
copy. Refused, with advice in the error: tensors that require a gradient (send `t.detach()`), parameters and other
subclasses, and sparse, nested, quantized and meta tensors.

If the node has CuPy, a tensor on a CUDA device travels like CuPy's arrays; otherwise it goes by the host. It arrives on
the device of a node that has a device and CuPy, in PyTorch's memory and on its current stream, and on the CPU of other
nodes. Its device is no part of its value, nor of its digest.

Only this module needs PyTorch.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from taskgraph.device.api import Array, DeviceArrayOnHost
from taskgraph.device.cuda import reclaimers
from taskgraph.device.lookup import from_dlpack
from taskgraph.graph.codecs import codec
from taskgraph.graph.orders import copy_in_order
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
"""dtypes that numpy has, too. Others travel as unsigned integers of their size."""
_BITS: Final = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def _encode(tensor: torch.Tensor) -> tuple[str, Any]:
    """Returns the name of a tensor's dtype, and its elements as an array. Raises CannotTravel."""
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
        return name, bits.numpy()  # in its order in memory, which a state keeps
    array = _device_array(bits)
    return name, DeviceArrayOnHost(bits.cpu().numpy()) if array is None else array


def _on_host(tensor: torch.Tensor) -> bool:
    return bool(tensor.device.type == "cpu")


def _device_array(tensor: torch.Tensor) -> Array | None:
    """Returns the tensor's memory as an array of its device, after PyTorch's queued work.

    None without CuPy, or if PyTorch or CuPy refuse.
    """
    try:
        return from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:  # refusals
        if device_error(error) is not None:
            raise
        return None


def _decode(value: Any) -> torch.Tensor:
    """Makes the tensor that `_encode` encoded. Raises ValueError if the value is no encoded tensor."""
    name, array = value
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"not a dtype of this PyTorch ({torch.__version__}): {name!r}")
    if isinstance(array, np.ndarray):
        tensor = torch.from_numpy(
            array if array.flags.writeable else copy_in_order(array)
        )  # a tensor cannot be read-only
    else:
        # A copy in PyTorch's memory, since PyTorch's streams do not follow the one that gets the array's memory back.
        tensor = torch.from_dlpack(array).clone()
        from_dlpack(tensor)  # the current stream follows that copy, so the array's memory is freed after it
    expected = dtype if dtype in _PLAIN else _BITS.get(dtype.itemsize)
    if tensor.dtype is not expected:
        raise ValueError(f"a tensor of dtype {dtype} came as {tensor.dtype}")
    return tensor.view(dtype)


def _free_unused_memory(nbytes: int) -> bool:
    """Makes PyTorch free all its unused memory when a device is out of memory. True if it freed some."""
    if not torch.cuda.is_initialized():
        return False
    before = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    return bool(torch.cuda.memory_reserved() < before)


codec(torch.Tensor, _encode, _decode, name="torch.Tensor")
reclaimers.append(_free_unused_memory)
