"""CUDA devices, where there are any. cupy is imported only on a machine that has it, and only when asked.

Arrays on a device are copied to the host when they are encoded, and back where they are decoded on a node with a GPU.
Where an array lived is no part of its value: primary and backup may sit on different kinds of nodes, and their digests
must agree. So it is noted beside the value, outside of what is digested (see `values`).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import numpy
from numpy.typing import NDArray

__all__ = [
    "PRETEND",
    "VISIBLE",
    "OnDevice",
    "array_module",
    "device_count",
    "device_ids",
    "to_device",
    "to_host",
    "visible",
]

log = logging.getLogger("taskgraph.devices")

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""The variable by which CUDA is told which devices a process may use; it reads it once."""
PRETEND: Final = "TASKGRAPH_PRETEND_DEVICES"
"""For tests of who gets which device, where there is none: what `CUDA_VISIBLE_DEVICES` names counts as there."""

_DEVICE: Final = re.compile(r"\d+|GPU-.+|MIG-.+")


def visible(text: str) -> tuple[str, ...]:
    """The devices that a value of `CUDA_VISIBLE_DEVICES` names: as CUDA reads it, up to the first that is none."""
    found: list[str] = []
    for entry in map(str.strip, text.split(",")):
        if not _DEVICE.fullmatch(entry):
            break  # "", "-1", "NoDevFiles": how people and batch systems say "none"
        found.append(entry)
    return tuple(found)


def device_ids(count: int) -> tuple[str, ...]:
    """What a person calls this process's devices: as it was told of them, else by their numbers."""
    told = visible(os.environ.get(VISIBLE, ""))
    return told[:count] if len(told) >= count else tuple(map(str, range(count)))


def device_count() -> int:
    """How many CUDA devices this process can use; 0 without cupy, without a driver, or with none visible."""
    if PRETEND in os.environ:
        return len(visible(os.environ.get(VISIBLE, "")))
    if importlib.util.find_spec("cupy") is None:
        return 0
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # cupy raises its own classes, and ImportError where CUDA's libraries are missing
        log.warning("cupy is installed, but no CUDA device can be used: %s", error)
        return 0


def array_module(devices: int) -> tuple[ModuleType, str]:
    """What `Task.xp` is on a node with that many devices, and where its arrays live."""
    if devices and PRETEND not in os.environ:
        import cupy

        return cupy, "cuda"
    return numpy, "host"


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A fresh host copy of an array that lived on a device; for codecs of other libraries' device arrays."""

    host: NDArray[Any]


def to_host(value: Any) -> OnDevice | None:
    """A copy of a CuPy array on the host, in C order, after all work queued on the current stream; None for others."""
    cupy = sys.modules.get("cupy")
    if cupy is None or type(value) is not getattr(cupy, "ndarray", None):
        return None
    return OnDevice(value.get(order="C"))


def to_device(array: NDArray[Any]) -> Any:
    """A new CuPy array of the same elements on the current device.

    CuPy has no read-only arrays: this one is nobody else's, and writing to it changes no other.

    Raises:
        ImportError: CuPy is not installed here.
    """
    import cupy

    return cupy.array(array, copy=True, order="C")
