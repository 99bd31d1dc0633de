"""Shared memory that other processes of the host can open, by a descriptor of this process."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["NAME", "Region"]

NAME: Final = "taskgraph"
"""The label of our memory in /proc. It cannot be opened by this name."""


class Region:
    """A piece of shared memory.

    Attributes:
        fd: the descriptor by which other processes open it; -1 after `close_descriptor`.
        dev, ino: its identity.
        size, address: of its mapping in this process.
    """

    __slots__ = ("__weakref__", "address", "dev", "fd", "ino", "size")

    def __init__(self, fd: int, dev: int, ino: int, size: int, address: int) -> None:
        self.fd = fd
        self.dev = dev
        self.ino = ino
        self.size = size
        self.address = address

    def close_descriptor(self) -> None:
        """Closes the descriptor, so that no more processes can open the memory. All mappings of it stay."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close_descriptor()
