"""Shared memory in huge pages: where it lies, that it is what it was, and that nothing is lost where there are none."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from taskgraph.transport import pages
from taskgraph.transport.pages import address_of, emptied, gathered, huge_page_bytes, mapped

pytestmark = pytest.mark.skipif(not huge_page_bytes(), reason="this kernel has none, or they are switched off")


@pytest.fixture
def fd() -> Iterator[int]:
    found = os.memfd_create("pages")
    os.ftruncate(found, 3 * huge_page_bytes() + 5000)
    yield found
    os.close(found)


@pytest.fixture(autouse=True)
def not_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_not_before", 0.0)


def in_huge_pages(address: int) -> int:
    """Bytes of the mapping at an address that this process finds by huge pages."""
    text = Path("/proc/self/smaps").read_text()
    part = re.search(rf"^{address:x}-.*?^ShmemPmdMapped: +(\d+) kB", text, re.DOTALL | re.MULTILINE)
    assert part is not None
    return int(part[1]) << 10


def mapped_at(address: int) -> bool:
    return any(line.startswith(f"{address:x}-") for line in Path("/proc/self/maps").read_text().splitlines())


def test_memory_begins_where_a_huge_page_may(fd: int) -> None:
    size = 3 * huge_page_bytes() + 5000
    for writable in (True, False):
        memory = mapped(fd, size, writable=writable)
        assert address_of(memory) % huge_page_bytes() == 0
        assert len(memory) == size and memory.readonly is not writable and memory.format == "B"


def test_memory_goes_with_its_last_view(fd: int) -> None:
    memory = mapped(fd, 2 * huge_page_bytes(), writable=True)
    address = address_of(memory)
    array = np.frombuffer(memory[100:200], np.uint8)
    part = array[5:6]
    del memory, array
    gc.collect()
    assert mapped_at(address)
    part[0] = 7
    assert os.pread(fd, 1, 105) == b"\x07"
    del part
    assert not mapped_at(address)


def test_who_is_found_by_the_garbage_collector_may_read_a_last_time(fd: int) -> None:
    """Weak references end before `__del__` is called: memory must not go with one."""
    read: list[int] = []

    class Last:
        def __init__(self, memory: memoryview) -> None:
            self.memory, self.me = memory, self

        def __del__(self) -> None:
            read.append(self.memory[5])

    memory = mapped(fd, 2 * huge_page_bytes(), writable=True)
    memory[5] = 7
    address = address_of(memory)
    Last(memory)
    del memory
    gc.collect()
    assert read == [7] and not mapped_at(address)


def test_what_may_only_be_read_stays_so(fd: int) -> None:
    memory = mapped(fd, 2 * huge_page_bytes(), writable=False)
    array: np.ndarray[tuple[int], np.dtype[np.uint8]] = np.ndarray((100,), np.uint8, memory)
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        array.flags.writeable = True


def test_what_is_small_is_mapped_too(fd: int) -> None:
    memory = mapped(fd, 4096, writable=True)
    memory[5] = 9
    assert mapped(fd, 4096, writable=False)[5] == 9


def test_what_cannot_be_mapped_says_why_and_leaves_nothing(fd: int) -> None:
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    before = len(Path("/proc/self/maps").read_text().splitlines())
    try:
        with pytest.raises(PermissionError):
            mapped(reader, 2 * huge_page_bytes(), writable=True)
        with pytest.raises(OSError, match="Cannot allocate"):
            mapped(fd, 1 << 60, writable=True)
    finally:
        os.close(reader)
    assert len(Path("/proc/self/maps").read_text().splitlines()) == before


def test_gathered_memory_is_what_it_was_and_lies_in_huge_pages_for_readers_too(fd: int) -> None:
    huge = huge_page_bytes()
    memory = mapped(fd, 3 * huge + 5000, writable=True)
    array = np.frombuffer(memory, np.uint8)
    array[huge + 3] = 7
    array[-1] = 8
    address = address_of(memory)
    if not gathered(address, len(memory)):
        pytest.skip("the kernel has no huge page to give")
    assert in_huge_pages(address) == 3 * huge
    assert (int(array.sum()), int(array[huge + 3]), int(array[-1])) == (15, 7, 8)
    reader = mapped(fd, 3 * huge + 5000, writable=False)
    assert sum(reader) == 15
    assert in_huge_pages(address_of(reader)) == 3 * huge


def test_pages_that_are_given_back_are_zeros_and_others_stay(fd: int) -> None:
    huge = huge_page_bytes()
    memory = mapped(fd, 3 * huge + 5000, writable=True)
    gathered(address_of(memory), len(memory))
    np.frombuffer(memory, np.uint8)[:] = 5
    held = os.fstat(fd).st_blocks
    assert emptied(address_of(memory) + huge // 2, huge)
    assert held - os.fstat(fd).st_blocks == huge // 512
    array = np.frombuffer(memory, np.uint8)
    assert int(array[: huge // 2].min()) == 5 and int(array[huge // 2 : huge * 3 // 2].max()) == 0
    assert int(array[huge * 3 // 2 :].min()) == 5


def test_who_got_none_does_not_ask_again_at_once(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = huge_page_bytes()
    memory = mapped(fd, 2 * huge, writable=True)
    answers = [errno.ENOMEM, errno.EAGAIN, errno.EAGAIN]
    asked: list[int] = []

    class Libc:
        def madvise(self, address: int, size: int, what: int) -> int:
            asked.append(what)
            ctypes.set_errno(answers.pop(0))
            return -1

    monkeypatch.setattr(pages, "_libc", Libc)
    address = address_of(memory)
    assert not gathered(address, 2 * huge, now=lambda: 100.0) and len(asked) == 1
    assert not gathered(address, 2 * huge, now=lambda: 100.0 + pages._PAUSE_S - 1) and len(asked) == 1
    assert not gathered(address, 2 * huge, now=lambda: 100.0 + pages._PAUSE_S + 1) and len(asked) == 3
    answers.append(errno.ENOMEM)  # the last ones were in somebody's hands: that is no reason to wait
    assert not gathered(address, 2 * huge, now=lambda: 100.0 + pages._PAUSE_S + 1) and len(asked) == 4


def test_pages_that_are_hard_to_find_are_not_asked_for_at_once_again(fd: int) -> None:
    huge = huge_page_bytes()
    memory = mapped(fd, 2 * huge, writable=True)
    address, used = address_of(memory), [0.0]

    def dear() -> float:
        used[0] += pages._DEAR_S + 0.001
        return used[0]

    if not gathered(address, huge, now=lambda: 100.0, used=dear):
        pytest.skip("the kernel has no huge page to give")
    assert not gathered(address, 2 * huge, now=lambda: 100.0 + pages._PAUSE_S - 1)
    assert gathered(address, 2 * huge, now=lambda: 100.0 + pages._PAUSE_S + 1)
    assert gathered(address, 2 * huge, now=lambda: 100.0 + pages._PAUSE_S + 1), "that was cheap"


def test_they_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_SETTINGS", tmp_path)
    answer = pages.huge_page_bytes.__wrapped__
    assert answer() == 0, "a kernel without them"
    (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    assert answer() == 0
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert answer() == 2097152
    (tmp_path / "hpage_pmd_size").write_text("536870912\n")
    assert answer() == 0, "too large to be worth it"


def test_readers_at_the_end_of_a_process_may_read_still() -> None:
    code = """
import os
from taskgraph.transport.pages import huge_page_bytes, mapped
fd = os.memfd_create("x"); os.ftruncate(fd, 2 * huge_page_bytes())
memory = mapped(fd, 2 * huge_page_bytes(), writable=True)
class Last:
    def __del__(self, memory=memory): print(memory[5])
last = Last()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
