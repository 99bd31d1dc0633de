"""Lists the CUDA devices that a process may use, and their names. Needs no device and no CuPy."""

from __future__ import annotations

import os
import re
from typing import Final

__all__ = ["PRETEND", "VISIBLE", "device_ids", "visible"]

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""The variable that says which devices a process may use. CUDA reads it once."""
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
    """The names of this process's devices for people: those of the variable, else their numbers."""
    named = visible(os.environ.get(VISIBLE, ""))
    return named[:count] if len(named) >= count else tuple(map(str, range(count)))
