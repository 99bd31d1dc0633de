"""Shared memory where the kernel can put it into huge pages, and what gives pages back to it.

A pass over a megabyte of ordinary pages needs the place of 256 of them, and so pushes the places of everything else
out of what a core remembers: after each compute the interpreter's own have to be looked up again, which in a virtual
machine takes some twenty steps each. A huge page (2 MiB on x86) is one place, and filled anew in a third of the time.

What processes share gets huge pages by itself where the administrator said so, which is rare. Since Linux 6.1 a process
may ask for them (`MADV_COLLAPSE`). Whether there are any is the kernel's to say, at any time, and makes no difference
to anybody but in speed.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

__all__ = ["address_of", "emptied", "gathered", "huge_page_bytes", "mapped"]

_SETTINGS: Final = Path("/sys/kernel/mm/transparent_hugepage")
_LARGEST: Final = 4 << 20
"""Huge pages that are larger than this (where ordinary ones have 64 KiB) would waste more than they save."""
_PAUSE_S: Final = 30.0
"""Nothing is asked for this long after the kernel had no huge page to give, or had to move much memory to find one."""
_DEAR_S: Final = 0.01
"""Processor time that a huge page is not worth: as a rule it is a hundredth of that, and to fill small ones a fifth."""
_MADV_COLLAPSE: Final = 25
_MADV_REMOVE: Final = 9
_MAP_FIXED: Final = 0x10

_not_before = 0.0


@functools.cache
def huge_page_bytes() -> int:
    """The size of a huge page; 0 where there are none, or they are switched off (`transparent_hugepage/enabled`)."""
    try:
        if "[never]" in (_SETTINGS / "enabled").read_text():
            return 0
        size = int((_SETTINGS / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0
    return size if size <= _LARGEST else 0


def mapped(fd: int, size: int, *, writable: bool) -> memoryview:
    """The memory of a file, shared, which goes with the last view of it; the descriptor stays the caller's.

    Raises:
        OSError: it cannot be mapped.
    """
    huge = huge_page_bytes()
    if not huge or size < huge:
        how: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}  # none of its own
        return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ, **how))
    # Huge pages can be only where file and address agree, which `mmap.mmap` cannot ask for: the file goes over a part
    # of what it found, which stays the owner of all of it, also for who wants to know whether it may be written to.
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    space = memoryview(mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE + huge, flags=reserved, prot=access))
    address = address_of(space)
    offset = -address % huge
    if _libc().mmap(address + offset, size, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != address + offset:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return space[offset : offset + size]


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    place, length, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = place
    libc.mmap.argtypes = [place, length, number, number, number, ctypes.c_long]
    libc.madvise.argtypes = [place, length, number]
    return libc


def address_of(memory: memoryview) -> int:
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address


def gathered(
    address: int,
    size: int,
    *,
    now: Callable[[], float] = time.monotonic,
    used: Callable[[], float] = time.thread_time,
) -> bool:
    """Whether shared memory lies in huge pages from now on, as far as whole ones fit into it; it is what it was.

    It must be aligned to them. Takes a tenth of a millisecond a page, several times that where the host has to find
    memory for it first: it is not for more than some pages at a time. May be called in any thread.

    Args:
        now: seconds.
        used: processor time of this thread, in seconds. (The clock would tell who else wanted the core.)
    """
    global _not_before
    huge = huge_page_bytes()
    if not huge or address % huge:
        return False
    done = size >= huge
    for page in range(address, address + size // huge * huge, huge):
        if now() < _not_before:
            return False
        _ = ctypes.c_uint8.from_address(page).value  # the kernel collapses nothing that is not there at all
        began = used()
        if _libc().madvise(page, huge, _MADV_COLLAPSE):
            done = False
            if ctypes.get_errno() == errno.EAGAIN:  # a page of it was in somebody's hands
                continue
            _not_before = now() + _PAUSE_S
        elif used() - began > _DEAR_S:
            _not_before = now() + _PAUSE_S
    return done


def emptied(address: int, size: int) -> bool:
    """Whether the kernel took back the pages of writable, shared memory: in every process it is zeros from now on."""
    return sys.platform == "linux" and not _libc().madvise(address, size, _MADV_REMOVE)
