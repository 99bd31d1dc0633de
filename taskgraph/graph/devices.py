"""CUDA devices, where there are any. cupy is imported only on a machine that has it, and only when asked."""

from __future__ import annotations

import importlib.util
import logging
from types import ModuleType

import numpy

__all__ = ["array_module", "device_count"]

log = logging.getLogger("taskgraph.devices")


def device_count() -> int:
    """How many CUDA devices this process can use; 0 without cupy, without a driver, or with none visible."""
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
    if devices:
        import cupy

        return cupy, "cuda"
    return numpy, "host"
