"""Which CUDA devices the nodes of this host get: each its own, as far as there are enough.

A launcher loads neither CuPy nor CUDA: what there is, it knows from `CUDA_VISIBLE_DEVICES`, which batch systems and
people set, or else from the device files of the driver, of which a container has those that it was given.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from taskgraph.device.visible import VISIBLE, visible

__all__ = ["deal", "host_devices", "sharing"]

_FILE = re.compile(r"nvidia\d+")


def host_devices(environ: Mapping[str, str] = os.environ, folder: Path = Path("/dev")) -> tuple[str, ...]:
    """The devices this process may hand to nodes, as `CUDA_VISIBLE_DEVICES` calls them.

    () also where there may be some that have no device files (WSL): nodes then find out by themselves.
    """
    if VISIBLE in environ:
        return visible(environ[VISIBLE])
    try:
        files = [name for name in os.listdir(folder) if _FILE.fullmatch(name)]
    except OSError:
        return ()
    # CUDA numbers what it sees from 0 on, whatever the numbers of the files are.
    return tuple(map(str, range(len(files))))


def deal(devices: Sequence[str], first: int, nodes: int) -> list[str | None]:
    """`CUDA_VISIBLE_DEVICES` for each of `nodes` nodes that are started together; None: as it is.

    Round robin: no device goes to a second node before every other went to one. A node that gets several begins with
    one that no other of them begins with, as long as there are enough: arrays are made on a process's first.

    Args:
        first: how many nodes the job had before, so that those that are added begin where the last ones ended.
    """
    if not devices:
        return [None] * nodes
    start = first % len(devices)
    order = [*devices[start:], *devices[:start]]
    return [",".join(order[i % len(order) :: nodes]) for i in range(nodes)]


def sharing(dealt: Sequence[str | None]) -> list[int]:
    """For each of the nodes that got that, how many of them compute on its device: on the first of those it has."""
    firsts = [own if own is None else own.partition(",")[0] for own in dealt]
    count = Counter(firsts)
    return [count[first] for first in firsts]
