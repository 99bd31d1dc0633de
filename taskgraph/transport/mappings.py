"""Borrowed memory of other processes of this host: opened once, mapped read-only, kept for the next loan.

A peer's reference is checked: the descriptor must belong to the process at the other end of the socket (as the kernel
says), be anonymous memory of the stated identity and size, and be sealed, so that it cannot shrink under a reader.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from taskgraph.device.api import Device
from taskgraph.graph.blocks import Block, Finalizer
from taskgraph.transport.pages import address_of, map_shared
from taskgraph.transport.regions import NAME, Region

__all__ = ["CannotBorrow", "Loan", "Mappings", "MemoryReference"]

_IDLE_S: Final = 15.0
"""Time that a mapping waits for the next loan. Longer than a segment waits for its next value."""
_PASSING_ERRORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
_SEAL: Final = getattr(fcntl, "F_SEAL_SHRINK", 0)


class MemoryReference(NamedTuple):
    """A piece of the memory of a peer, as the peer describes it.

    Attributes:
        lease: number of the lease.
        dev, ino, size: identity and size of the memory.
        offset, length: of the piece in the memory.
        fd: the descriptor in the process of the peer.
    """

    lease: int
    dev: int
    ino: int
    size: int
    offset: int
    fd: int
    length: int


class CannotBorrow(Exception):
    """The memory cannot be opened. `for_good`: nor can any other memory of the peer."""

    def __init__(self, why: str, *, for_good: bool) -> None:
        super().__init__(why)
        self.for_good = for_good


class _Mapping:
    """Memory of another process that is mapped here, and the loans of it."""

    __slots__ = ("loans", "memory", "region", "used_at")

    def __init__(self, memory: memoryview, region: Region) -> None:
        self.memory = memory
        self.region = region
        self.loans: set[Loan] = set()
        self.used_at = 0.0  # last time that it was seen in use


class Loan(Finalizer[Block]):
    """A borrowed piece of memory: the `origin` of its block, called when the block is garbage.

    It can be lent to a third process, since its region is open here, too.

    Attributes:
        lease, length, offset: as in its `MemoryReference`.
        loans: the open loans of the same memory, including this one.
        spoiled: a process may read it for ever.
    """

    __slots__ = ("lease", "length", "loans", "offset", "region", "spoiled")
    lease: int
    length: int
    loans: set[Loan]
    offset: int
    region: Region
    spoiled: bool

    locked = False

    def spoil(self) -> None:
        """Notes that a process may read this memory for ever: it is returned as spoiled."""
        self.spoiled = True

    def pin(self, device: Device) -> None:
        return None  # read-only; not all devices can lock such memory


class Mappings:
    """The mappings of a process. Used on the event loop; blocks may become garbage in any thread.

    Args:
        limit: the most mappings, used and idle. Each takes one or two descriptors.
        clock: seconds.
    """

    def __init__(self, *, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._known: dict[tuple[int, int], _Mapping] = {}

    def __len__(self) -> int:
        return len(self._known)

    def borrow(self, pid: int, reference: MemoryReference, ended: Callable[[Loan], object]) -> Block:
        """Maps a piece of memory of another process, read-only; returns it as a block.

        Args:
            ended: called with the loan, in any thread, when no view is left. It removes the loan from `loan.loans`.

        Raises:
            CannotBorrow: the memory cannot be opened. `ended` is not called.
        """
        lease, dev, ino, size, offset, _, length = reference
        mapping = self._known.get((dev, ino))
        if mapping is None:
            self._make_room()
            mapping = self._known[dev, ino] = _open(pid, reference)
        elif mapping.region.size != size:
            raise CannotBorrow(f"memory of {mapping.region.size} bytes; the reference says {size}", for_good=True)
        block = Block((length,), np.uint8, mapping.memory, offset)
        block.origin = loan = Loan(block, ended)
        loan.lease, loan.offset, loan.length, loan.spoiled = lease, offset, length, False
        loan.region, loan.loans = mapping.region, mapping.loans
        mapping.loans.add(loan)
        mapping.used_at = self._clock()
        return block

    def _make_room(self) -> None:
        """Closes the mapping that was idle for longest, if there are as many as may be. Raises CannotBorrow if all are
        used.
        """
        if len(self._known) < self._limit:
            return
        idle = [(mapping.used_at, key) for key, mapping in self._known.items() if not mapping.loans]
        if not idle:
            raise CannotBorrow(f"{self._limit} mappings are in use", for_good=False)
        del self._known[min(idle)[1]]

    def trim(self) -> None:
        """Closes mappings that were idle for long. Called periodically."""
        now = self._clock()
        for key, mapping in list(self._known.items()):
            if mapping.loans:
                mapping.used_at = now
            elif now - mapping.used_at > _IDLE_S:
                del self._known[key]

    def close(self) -> None:
        """Closes all mappings. Views stay valid."""
        self._known.clear()


def _open(pid: int, reference: MemoryReference) -> _Mapping:
    """Opens and maps the memory of a reference, after all checks. Raises CannotBorrow."""
    path = f"/proc/{pid}/fd/{reference.fd}"
    try:
        shown = os.readlink(path)  # before opening: to open another kind of file may block
        if not shown.startswith(f"/memfd:{NAME} "):
            raise CannotBorrow(f"{path} is {shown:.100}", for_good=True)
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise CannotBorrow(f"{path} cannot be opened: {error}", for_good=error.errno not in _PASSING_ERRORS) from error
    try:
        found = os.fstat(fd)
        same = (found.st_dev, found.st_ino, found.st_size) == (reference.dev, reference.ino, reference.size)
        if not same or not stat.S_ISREG(found.st_mode):
            raise CannotBorrow(f"{path} is other memory than the reference says", for_good=True)
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEAL:
            raise CannotBorrow(f"{path} may shrink", for_good=True)
        memory = map_shared(fd, reference.size, writable=False)
    except OSError as error:
        os.close(fd)
        raise CannotBorrow(f"{path} cannot be mapped: {error}", for_good=error.errno not in _PASSING_ERRORS) from error
    except BaseException:
        os.close(fd)
        raise
    return _Mapping(memory, Region(fd, reference.dev, reference.ino, reference.size, address_of(memory)))
