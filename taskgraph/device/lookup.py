"""Finds the device of an array, and turns arrays of other libraries into the device's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from taskgraph.device import cuda
from taskgraph.device.api import Array, Device

__all__ = ["declare", "device_of", "from_dlpack"]

_declared: Final[dict[type, Callable[[Any], Device]]] = {}

_readers: Final[dict[int, Callable[[Any], Array | None]]] = {2: cuda.from_dlpack}
"""By DLPack's kinds of devices: 2 is CUDA's own memory."""


def declare(kind: type, device: Callable[[Any], Device]) -> None:
    """Arrays of exactly this type are on the device that `device(array)` gives."""
    _declared[kind] = device


def device_of(value: Any) -> Device | None:
    """The device that an array is on; None for everything that is no array of a device."""
    declared = _declared.get(type(value))
    return cuda.device_of(value) if declared is None else declared(value)


def from_dlpack(value: Any) -> Array | None:
    """Returns another library's array as an array of its device, in the same memory, behind that library's queue.

    None where this process has nothing that reads that kind of memory. Raises what DLPack or a library says "no" with.
    """
    kind, _ = value.__dlpack_device__()
    read = _readers.get(kind)
    return None if read is None else read(value)
