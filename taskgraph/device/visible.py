"""Names of the CUDA devices that a process may use. Needs no device and no CuPy."""

from __future__ import annotations

import os
import re
from typing import Final

__all__ = ["PRETEND", "VISIBLE", "device_ids", "visible_devices"]

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""The variable with the devices that a process may use; CUDA reads it once."""
PRETEND: Final = "TASKGRAPH_PRETEND_DEVICES"
"""For tests on hosts without devices: if set, the devices in `CUDA_VISIBLE_DEVICES` count as present."""

_DEVICE: Final = re.compile(r"\d+|GPU-.+|MIG-.+")


def visible_devices(text: str) -> tuple[str, ...]:
    """Parses `CUDA_VISIBLE_DEVICES` as CUDA does: devices up to the first invalid entry."""
    found: list[str] = []
    for entry in map(str.strip, text.split(",")):
        if not _DEVICE.fullmatch(entry):
            break  # "", "-1", "NoDevFiles": people and batch systems write these for "none"
        found.append(entry)
    return tuple(found)


def device_ids(count: int) -> tuple[str, ...]:
    """Returns names of this process's `count` devices: from `CUDA_VISIBLE_DEVICES`, or else "0", "1", ..."""
    named = visible_devices(os.environ.get(VISIBLE, ""))
    return named[:count] if len(named) >= count else tuple(map(str, range(count)))
