"""Shared memory in huge pages.

A pass over 1 MiB of ordinary pages takes 256 entries of the processor's address cache (TLB), and evicts those of the
interpreter. In a virtual machine a miss takes some twenty steps. A huge page (2 MiB on x86) takes one entry, and is
filled in a third of the time. Since Linux 6.1 a process may ask for huge pages (`MADV_COLLAPSE`). If the kernel
refuses, only speed is lost.
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

__all__ = ["address_of", "huge_page_bytes", "map_shared", "move_to_huge_pages", "release_pages"]

_SETTINGS: Final = Path("/sys/kernel/mm/transparent_hugepage")
_LARGEST: Final = 4 << 20
"""Larger huge pages (of kernels with pages of 64 KiB) would waste more than they save."""
_PAUSE_S: Final = 30.0
"""Pause after the kernel had no huge page, or spent much time to make one."""
_COSTLY_S: Final = 0.01
"""A huge page is not worth this much processor time. It mostly takes a hundredth of it."""
_MADV_COLLAPSE: Final = 25
_MADV_REMOVE: Final = 9
_MAP_FIXED: Final = 0x10

_not_before = 0.0


@functools.cache
def huge_page_bytes() -> int:
    """Returns the size of a huge page; 0: the kernel has none, or `transparent_hugepage/enabled` forbids them."""
    try:
        if "[never]" in (_SETTINGS / "enabled").read_text():
            return 0
        size = int((_SETTINGS / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0
    return size if size <= _LARGEST else 0


def map_shared(fd: int, size: int, *, writable: bool) -> memoryview:
    """Maps a file as shared memory, until no view of the mapping is left. The caller keeps the descriptor.

    Raises:
        OSError: the file cannot be mapped.
    """
    huge = huge_page_bytes()
    if not huge or size < huge:
        how: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}  # no copy of the descriptor
        return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ, **how))
    # Huge pages need an aligned address, which `mmap.mmap` cannot ask for. So it reserves more than is needed, and the
    # file is mapped over an aligned part. The `mmap` object stays the owner.
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
    """Returns the C library, with the types of the calls that this module makes."""
    libc = ctypes.CDLL(None, use_errno=True)
    place, length, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = place
    libc.mmap.argtypes = [place, length, number, number, number, ctypes.c_long]
    libc.madvise.argtypes = [place, length, number]
    return libc


def address_of(memory: memoryview) -> int:
    """Returns the address of a piece of memory in this process."""
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address


def move_to_huge_pages(
    address: int,
    size: int,
    *,
    now: Callable[[], float] = time.monotonic,
    used: Callable[[], float] = time.thread_time,
) -> bool:
    """Moves aligned shared memory into huge pages, as far as whole ones fit. Returns True if all were moved.

    The content stays. Takes 0.1 ms a page, and several times that if the host has to find memory. May be called in any
    thread.

    Args:
        now: a clock, in seconds.
        used: processor time of this thread, in seconds.
    """
    global _not_before
    huge = huge_page_bytes()
    if not huge or address % huge:
        return False
    done = size >= huge
    for page in range(address, address + size // huge * huge, huge):
        if now() < _not_before:
            return False
        _ = ctypes.c_uint8.from_address(page).value  # the kernel collapses only pages that exist
        began = used()
        if _libc().madvise(page, huge, _MADV_COLLAPSE):
            done = False
            if ctypes.get_errno() == errno.EAGAIN:  # a page was in use
                continue
            _not_before = now() + _PAUSE_S
        elif used() - began > _COSTLY_S:
            _not_before = now() + _PAUSE_S
    return done


def release_pages(address: int, size: int) -> bool:
    """Gives pages of writable shared memory back to the kernel: all processes see zeros. Returns False if the kernel
    refused.
    """
    return sys.platform == "linux" and not _libc().madvise(address, size, _MADV_REMOVE)
