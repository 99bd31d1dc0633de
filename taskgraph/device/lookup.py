"""Finds the device of an array, and turns arrays of other libraries into the device's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from taskgraph.device import cuda
from taskgraph.device.api import Array, Device

__all__ = ["device_of", "from_dlpack", "register_array_type"]

_declared: Final[dict[type, Callable[[Any], Device]]] = {}

_readers: Final[dict[int, Callable[[Any], Array | None]]] = {2: cuda.from_dlpack}
"""Functions that read memory of a kind of device, by DLPack's number; 2 is CUDA."""


def register_array_type(kind: type, device: Callable[[Any], Device]) -> None:
    """Registers an array type, and a function that returns the device of such an array, for `device_of`."""
    _declared[kind] = device


def device_of(value: Any) -> Device | None:
    """Returns the device of an array; None for host arrays and other values."""
    declared = _declared.get(type(value))
    return cuda.device_of(value) if declared is None else declared(value)


def from_dlpack(value: Any) -> Array | None:
    """Views another library's array as an array of the device's own library, after that other library's queued work.

    Returns None if this process cannot read that kind of memory.

    Raises:
        Exception: DLPack or a library refuses.
    """
    kind, _ = value.__dlpack_device__()
    read = _readers.get(kind)
    return None if read is None else read(value)
