"""Which device an array is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from taskgraph.device import cuda
from taskgraph.device.api import Device

__all__ = ["declare", "device_of"]

_declared: Final[dict[type, Callable[[Any], Device]]] = {}


def declare(kind: type, device: Callable[[Any], Device]) -> None:
    """Arrays of exactly this type are on the device that `device(array)` gives."""
    _declared[kind] = device


def device_of(value: Any) -> Device | None:
    """The device that an array is on; None for everything that is no array of a device."""
    declared = _declared.get(type(value))
    return cuda.device_of(value) if declared is None else declared(value)
