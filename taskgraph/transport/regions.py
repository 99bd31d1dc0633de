"""Shared memory as another process of the host finds it: a descriptor of ours, and what it must turn out to be."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["NAME", "Region"]

NAME: Final = "taskgraph"
"""What /proc shows of our memory; it is no name by which it could be opened."""


class Region:
    """Where shared memory lies here, and by which descriptor others open it.

    Attributes:
        fd: the descriptor; -1 when nobody is to open it any more.
        dev, ino: what tells this memory from any other.
        size, address: in this process.
    """

    __slots__ = ("__weakref__", "address", "dev", "fd", "ino", "size")

    def __init__(self, fd: int, dev: int, ino: int, size: int, address: int) -> None:
        self.fd = fd
        self.dev = dev
        self.ino = ino
        self.size = size
        self.address = address

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()
