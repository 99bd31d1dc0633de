"""Memory for a copy of the state, allocated before user code has to wait for the copy: new memory is slow."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

from taskgraph.graph.blocks import Allocate, Block
from taskgraph.transport.pages import address_of, move_to_huge_pages

__all__ = ["PreparedMemory"]


class PreparedMemory:
    """Memory for the large arrays of a copy of the state, allocated ahead.

    Args:
        allocate: returns memory that other processes of the host can read.
    """

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._ready: dict[int, list[Block]] = {}

    def fill(self, sizes: Iterable[int]) -> None:
        """Allocates and touches memory for arrays of these sizes, in bytes. It takes long: call it in a thread."""
        for nbytes in sizes:
            block = self._allocate(nbytes)
            if block is not None:
                move_to_huge_pages(address_of(block.data), nbytes)
                block[:: mmap.PAGESIZE] = 0  # the kernel gives a page when it is written first
                self._ready.setdefault(nbytes, []).append(block)

    def allocate(self, nbytes: int) -> Block | None:
        """Returns memory that `fill` made, else new memory; None: there is none (as `graph.blocks.Allocate`)."""
        ready = self._ready.get(nbytes)
        return ready.pop() if ready else self._allocate(nbytes)
