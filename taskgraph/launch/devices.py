"""Deals CUDA devices to the nodes of this host: each gets its own, if there are enough.

A launcher loads neither CuPy nor CUDA. It reads `CUDA_VISIBLE_DEVICES`, which batch systems and users set, or else the
driver's device files; a container has those that it was given.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from taskgraph.device.visible import VISIBLE, visible_devices

__all__ = ["count_sharing", "deal", "host_devices"]

_FILE = re.compile(r"nvidia\d+")


def host_devices(environ: Mapping[str, str] = os.environ, folder: Path = Path("/dev")) -> tuple[str, ...]:
    """Returns the devices for nodes, as `CUDA_VISIBLE_DEVICES` calls them.

    Devices without device files (WSL) are not seen: nodes find them by themselves.
    """
    if VISIBLE in environ:
        return visible_devices(environ[VISIBLE])
    try:
        files = [name for name in os.listdir(folder) if _FILE.fullmatch(name)]
    except OSError:
        return ()
    # CUDA numbers what it sees from 0 on, whatever the numbers of the files are.
    return tuple(map(str, range(len(files))))


def deal(devices: Sequence[str], first: int, nodes: int) -> list[str | None]:
    """Returns `CUDA_VISIBLE_DEVICES` for each of `nodes` nodes that are started together; None: leave it unchanged.

    Devices are dealt round robin. If there are enough, the first devices of all nodes differ: a process makes its
    arrays on its first.

    Args:
        first: the number of earlier nodes of the job: dealing goes on after them.
    """
    if not devices:
        return [None] * nodes
    start = first % len(devices)
    order = [*devices[start:], *devices[:start]]
    return [",".join(order[i % len(order) :: nodes]) for i in range(nodes)]


def count_sharing(dealt: Sequence[str | None]) -> list[int]:
    """Counts for each node the nodes, itself included, that compute on its device: the first that it has."""
    firsts = [own if own is None else own.partition(",")[0] for own in dealt]
    count = Counter(firsts)
    return [count[first] for first in firsts]
