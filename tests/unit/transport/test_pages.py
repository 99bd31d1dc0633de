"""Shared memory in huge pages: where it lies, that it is what it was, and that nothing is lost where there are none."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from taskgraph.transport import pages
from taskgraph.transport.pages import address_of, huge_page_bytes, map_shared, move_to_huge_pages, release_pages

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
    """Bytes of a mapping that are in huge pages."""
    text = Path("/proc/self/smaps").read_text()
    part = re.search(rf"^{address:x}-.*?^ShmemPmdMapped: +(\d+) kB", text, re.DOTALL | re.MULTILINE)
    assert part is not None
    return int(part[1]) << 10


def mapped_at(address: int) -> bool:
    return any(line.startswith(f"{address:x}-") for line in Path("/proc/self/maps").read_text().splitlines())


def test_mapping_is_aligned_to_huge_pages(fd: int) -> None:
    size = 3 * huge_page_bytes() + 5000
    for writable in (True, False):
        memory = map_shared(fd, size, writable=writable)
        assert address_of(memory) % huge_page_bytes() == 0
        assert len(memory) == size and memory.readonly is not writable and memory.format == "B"


def test_mapping_ends_with_its_last_view(fd: int) -> None:
    memory = map_shared(fd, 2 * huge_page_bytes(), writable=True)
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


def test_failed_mapping_leaves_nothing(fd: int) -> None:
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    before = len(Path("/proc/self/maps").read_text().splitlines())
    try:
        with pytest.raises(PermissionError):
            map_shared(reader, 2 * huge_page_bytes(), writable=True)
        with pytest.raises(OSError, match="Cannot allocate"):
            map_shared(fd, 1 << 60, writable=True)
    finally:
        os.close(reader)
    assert len(Path("/proc/self/maps").read_text().splitlines()) == before


def test_gathered_memory_keeps_its_content(fd: int) -> None:
    huge = huge_page_bytes()
    memory = map_shared(fd, 3 * huge + 5000, writable=True)
    array = np.frombuffer(memory, np.uint8)
    array[huge + 3] = 7
    array[-1] = 8
    address = address_of(memory)
    if not move_to_huge_pages(address, len(memory)):
        pytest.skip("the kernel has no huge page to give")
    assert in_huge_pages(address) == 3 * huge
    assert (int(array.sum()), int(array[huge + 3]), int(array[-1])) == (15, 7, 8)
    reader = map_shared(fd, 3 * huge + 5000, writable=False)
    assert sum(reader) == 15
    assert in_huge_pages(address_of(reader)) == 3 * huge


def test_returned_pages_become_zeros(fd: int) -> None:
    huge = huge_page_bytes()
    memory = map_shared(fd, 3 * huge + 5000, writable=True)
    move_to_huge_pages(address_of(memory), len(memory))
    np.frombuffer(memory, np.uint8)[:] = 5
    held = os.fstat(fd).st_blocks
    assert release_pages(address_of(memory) + huge // 2, huge)
    assert held - os.fstat(fd).st_blocks == huge // 512
    array = np.frombuffer(memory, np.uint8)
    assert int(array[: huge // 2].min()) == 5 and int(array[huge // 2 : huge * 3 // 2].max()) == 0
    assert int(array[huge * 3 // 2 :].min()) == 5


def test_huge_pages_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
