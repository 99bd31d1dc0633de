"""Memory of other processes of this host, as they lend it: opened once, mapped read-only, kept for the next loan.

What a peer says of its memory is believed as far as it can be checked: the descriptor must be one of the process at
the other end of the socket (the kernel says which that is), of anonymous memory, with the identity and the size told,
and sealed so that it cannot shrink under a reader. Anything else is not mapped.
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
from taskgraph.graph.blocks import Block, Watch
from taskgraph.transport.pages import address_of, mapped
from taskgraph.transport.regions import NAME, Region

__all__ = ["CannotBorrow", "Loan", "Mappings", "Reference"]

_IDLE_S: Final = 15.0
"""How long a mapping waits for the next loan; longer than a segment waits for its next value."""
_FOR_NOW: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
_SEAL: Final = getattr(fcntl, "F_SEAL_SHRINK", 0)


class Reference(NamedTuple):
    """A piece of a peer's memory, as the peer describes it.

    Attributes:
        lease: the peer's number for this loan.
        dev, ino, size: of the memory behind it.
        offset, length: the piece, within the memory.
        fd: the descriptor at the peer.
    """

    lease: int
    dev: int
    ino: int
    size: int
    offset: int
    fd: int
    length: int


class CannotBorrow(Exception):
    """The memory cannot be opened. `for_good`: nor will any other of that peer be."""

    def __init__(self, why: str, *, for_good: bool) -> None:
        super().__init__(why)
        self.for_good = for_good


class _Mapping:
    __slots__ = ("loans", "memory", "region", "used_at")

    def __init__(self, memory: memoryview, region: Region) -> None:
        self.memory = memory
        self.region = region
        self.loans: set[Loan] = set()
        self.used_at = 0.0  # when it was last found to be lent


class Loan(Watch[Block]):
    """One borrowed piece: what its block's `origin` is, and what tells when that is garbage.

    It can be lent on: its region is open here, too.

    Attributes:
        lease, length, offset: as its `Reference` told.
        loans: those of the same memory that are open, this one among them.
        spoiled: somebody may read it for ever.
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
        self.spoiled = True

    def pinned(self, device: Device) -> None:
        return None  # it is mapped to be read, and not every device can lock that


class Mappings:
    """What this process has mapped of others. Used from the event loop; blocks may become garbage in any thread.

    Args:
        limit: mappings at a time, lent and idle. Each takes up to two descriptors.
        clock: seconds.
    """

    def __init__(self, *, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._known: dict[tuple[int, int], _Mapping] = {}

    def __len__(self) -> int:
        return len(self._known)

    def borrow(self, pid: int, reference: Reference, ended: Callable[[Loan], object]) -> Block:
        """The piece, read-only.

        Args:
            ended: called with the loan, in any thread, when no view is left; it takes it out of `loan.loans`.

        Raises:
            CannotBorrow: it is not to be had; `ended` is not called.
        """
        lease, dev, ino, size, offset, _, length = reference
        mapping = self._known.get((dev, ino))
        if mapping is None:
            self._make_room()
            mapping = self._known[dev, ino] = _open(pid, reference)
        elif mapping.region.size != size:
            raise CannotBorrow(f"memory of {mapping.region.size} bytes, told to have {size}", for_good=True)
        block = Block((length,), np.uint8, mapping.memory, offset)
        block.origin = loan = Loan(block, ended)
        loan.lease, loan.offset, loan.length, loan.spoiled = lease, offset, length, False
        loan.region, loan.loans = mapping.region, mapping.loans
        mapping.loans.add(loan)
        mapping.used_at = self._clock()
        return block

    def _make_room(self) -> None:
        if len(self._known) < self._limit:
            return
        idle = [(mapping.used_at, key) for key, mapping in self._known.items() if not mapping.loans]
        if not idle:
            raise CannotBorrow(f"{self._limit} pieces of memory of others are in use here already", for_good=False)
        del self._known[min(idle)[1]]

    def trim(self) -> None:
        """Lets go of what has not been lent for long. To be called now and then."""
        now = self._clock()
        for key, mapping in list(self._known.items()):
            if mapping.loans:
                mapping.used_at = now
            elif now - mapping.used_at > _IDLE_S:
                del self._known[key]

    def close(self) -> None:
        """Lets go of everything; views stay valid for as long as somebody has them."""
        self._known.clear()


def _open(pid: int, reference: Reference) -> _Mapping:
    path = f"/proc/{pid}/fd/{reference.fd}"
    try:
        shown = os.readlink(path)  # looked at first: opening something else might block, or do something
        if not shown.startswith(f"/memfd:{NAME} "):
            raise CannotBorrow(f"{path} is {shown:.100}", for_good=True)
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise CannotBorrow(f"{path} cannot be opened: {error}", for_good=error.errno not in _FOR_NOW) from error
    try:
        found = os.fstat(fd)
        same = (found.st_dev, found.st_ino, found.st_size) == (reference.dev, reference.ino, reference.size)
        if not same or not stat.S_ISREG(found.st_mode):
            raise CannotBorrow(f"{path} is other memory than was told", for_good=True)
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEAL:
            raise CannotBorrow(f"{path} may shrink", for_good=True)
        memory = mapped(fd, reference.size, writable=False)
    except OSError as error:
        os.close(fd)
        raise CannotBorrow(f"{path} cannot be mapped: {error}", for_good=error.errno not in _FOR_NOW) from error
    except BaseException:
        os.close(fd)
        raise
    return _Mapping(memory, Region(fd, reference.dev, reference.ino, reference.size, address_of(memory)))
