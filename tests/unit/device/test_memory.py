"""What CuPy's pools hold of a device and of the host, and what is tried before an out-of-memory is final.

CuPy here is a stand-in whose pools do what those of CuPy 14 do: they take from the device what they have not got, keep
what was freed, and give it back where a limit or the device says that there is no more.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from taskgraph.device import cuda
from taskgraph.device.memory import LIMIT, BoundedAllocator, bound_pinned_memory, reclaimers
from taskgraph.device.visible import PRETEND

GIB = 1 << 30


class OutOfMemoryError(MemoryError):
    pass


class Refused(Exception):
    """The device has no more."""


class Gpu:
    """A device of 100 GiB, which several processes may share."""

    total = 100 * GIB

    def __init__(self) -> None:
        self.free = self.total

    def take(self, nbytes: int) -> None:
        if nbytes > self.free:
            raise Refused
        self.free -= nbytes


class Taken:
    """What an allocation is: its memory goes back to the pool with the last reference."""

    def __init__(self, pool: Pool, nbytes: int) -> None:
        self.pool, self.nbytes = pool, nbytes

    def __del__(self) -> None:
        self.pool.kept.append(self.nbytes)


class Pool:
    """`cupy.cuda.MemoryPool`, of one device."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.limit = 0
        self.total = 0
        self.kept: list[int] = []
        self.asked = 0

    def malloc(self, size: int) -> Taken:
        self.asked += 1
        size = -(-size // 512) * 512
        if size in self.kept:
            self.kept.remove(size)
            return Taken(self, size)
        limit = self.limit or 1 << 64
        if size > limit:
            raise OutOfMemoryError(size, self.total, limit)
        if self.total + size > limit:
            self.free_all_blocks()
        if self.total + size > limit:
            raise OutOfMemoryError(size, self.total, limit)
        try:
            self.gpu.take(size)
        except Refused:
            self.free_all_blocks()
            try:
                self.gpu.take(size)
            except Refused:
                raise OutOfMemoryError(size, self.total) from None
        self.total += size
        return Taken(self, size)

    def free_all_blocks(self) -> None:
        while self.kept:
            nbytes = self.kept.pop()
            self.total -= nbytes
            self.gpu.free += nbytes

    def total_bytes(self) -> int:
        return self.total

    def get_limit(self) -> int:
        return self.limit

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        assert size is not None and fraction is None
        self.limit = size


class Pinned:
    """`cupy.cuda.PinnedMemory`."""

    def __init__(self, size: int, flags: int) -> None:
        assert flags == 1
        self.size = size


class PinnedPool:
    """`cupy.cuda.PinnedMemoryPool`."""

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        self.allocate = allocate
        self.free: list[Pinned] = []

    def malloc(self, size: int) -> Any:
        size = 1 << (max(size, 512) - 1).bit_length()
        for found in self.free:
            if found.size == size:
                self.free.remove(found)
                return found
        return self.allocate(size).mem

    def free_all_blocks(self) -> None:
        self.free.clear()


class Cupy:
    """The module in one process."""

    def __init__(self, gpu: Gpu) -> None:
        self.pool = Pool(gpu)
        self.allocator: Callable[[int], Taken] = self.pool.malloc
        self.pinned: Callable[[int], Any] | None = None
        self.on = 0
        self.made_current = 0
        self.cuda = SimpleNamespace(
            Device=self.device,
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            runtime=SimpleNamespace(
                getDevice=lambda: self.on,
                getDeviceProperties=lambda number: {"totalGlobalMem": gpu.total},
                memGetInfo=lambda: (gpu.free, gpu.total),
                hostAllocPortable=1,
            ),
            get_allocator=lambda: self.allocator,
            set_allocator=lambda allocator: setattr(self, "allocator", allocator),
            PinnedMemory=Pinned,
            PinnedMemoryPointer=lambda memory, offset: SimpleNamespace(mem=memory),
            PinnedMemoryPool=PinnedPool,
            set_pinned_memory_allocator=lambda allocator: setattr(self, "pinned", allocator),
        )

    @contextlib.contextmanager
    def device(self, number: int) -> Iterator[None]:
        before, self.on = self.on, number
        self.made_current += 1
        yield
        self.on = before

    def get_default_memory_pool(self) -> Pool:
        return self.pool

    def alloc(self, gib: float) -> Taken:
        return self.allocator(int(gib * GIB))


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(LIMIT, raising=False)
    before = reclaimers[:]
    reclaimers.clear()
    yield
    reclaimers[:] = before


def processes(gpu: Gpu, count: int, fraction: float = 0.9) -> list[Cupy]:
    made = [Cupy(gpu) for _ in range(count)]
    for cupy in made:
        BoundedAllocator(cupy, 0, fraction, count).install()
    return made


def test_pools_stay_within_their_part() -> None:
    one, other = processes(Gpu(), 2)
    for gib in range(1, 30):  # never more than 29 at a time, and 435 in all
        one.alloc(gib)
    assert one.pool.total <= 45 * GIB
    assert other.alloc(45).nbytes == 45 * GIB


def test_pool_grows_beyond_its_part(caplog: pytest.LogCaptureFixture) -> None:
    gpu = Gpu()
    one, other = processes(gpu, 2)
    with caplog.at_level(logging.INFO):
        held = [one.alloc(8) for _ in range(5)]
    assert not caplog.records, "within its part"
    other.pool.gpu = Gpu()  # it ends
    with caplog.at_level(logging.INFO):
        held += [one.alloc(2) for _ in range(25)]
    assert one.pool.total == 90 * GIB and gpu.free == 10 * GIB
    assert 5 < len(caplog.records) < 12, "not with every array"
    with pytest.raises(OutOfMemoryError):
        one.alloc(1)
    held.clear()


def test_pool_stops_at_used_memory() -> None:
    gpu = Gpu()
    one, other = processes(gpu, 2)
    theirs = other.alloc(40)
    held = [one.alloc(10) for _ in range(5)]
    with pytest.raises(OutOfMemoryError):
        one.alloc(10)
    assert gpu.free == 10 * GIB, "a tenth is nobody's"
    del theirs
    other.pool.free_all_blocks()
    held.append(one.alloc(20))
    assert one.pool.total == 70 * GIB


def test_array_larger_than_part() -> None:
    (one, _) = processes(Gpu(), 2)
    for gib in (20, 21):
        one.alloc(gib)
    assert one.pool.total == 41 * GIB
    assert one.alloc(60).nbytes == 60 * GIB
    assert one.pool.total == 60 * GIB


def test_another_thread_takes_gained_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, _), held = processes(Gpu(), 2), []
    set_limit = one.pool.set_limit

    def meanwhile(size: int) -> None:
        set_limit(size)
        if len(held) == 1:
            held.append(one.pool.malloc(10 * GIB))

    monkeypatch.setattr(one.pool, "set_limit", meanwhile)
    held.append(one.alloc(45))
    held.append(one.alloc(10))
    assert one.pool.total == 65 * GIB


def test_gain_for_two_threads() -> None:
    (one, _), held = processes(Gpu(), 2), []

    def meanwhile(nbytes: int) -> bool:
        reclaimers.clear()
        held.append(one.alloc(2))
        return False

    held.append(one.alloc(45))
    reclaimers.append(meanwhile)
    held.append(one.alloc(3))
    assert one.pool.total == 50 * GIB and one.pool.limit == int(45 * GIB * 9 / 8)


def test_full_device_is_not_retried() -> None:
    gpu = Gpu()
    (one,) = processes(gpu, 1)
    gpu.take(95 * GIB)
    with pytest.raises(OutOfMemoryError):
        one.alloc(10)
    assert one.pool.asked == 1


def test_fragmented_memory_ends_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> None:
        raise Refused

    gpu = Gpu()
    (one,) = processes(gpu, 1)
    monkeypatch.setattr(gpu, "take", refuse)
    with pytest.raises(OutOfMemoryError):
        one.alloc(10)
    assert 1 < one.pool.asked < 20


def test_allocation_on_another_device() -> None:
    (one,) = processes(Gpu(), 1, 0.5)
    one.on = 1
    with pytest.raises(OutOfMemoryError):
        one.alloc(51)
    assert one.pool.limit == 50 * GIB


def test_givers_are_asked_in_turn() -> None:
    gpu = Gpu()
    (one,) = processes(gpu, 1, 1.0)
    gpu.take(80 * GIB)  # what they keep
    asked = []

    def giver(name: str, gives: int) -> Callable[[int], bool]:
        def give_back(nbytes: int) -> bool:
            asked.append((name, nbytes))
            gpu.free += gives
            return gives > 0

        return give_back

    reclaimers.extend(
        [giver("has none", 0), giver("has too little", GIB), giver("has enough", 9 * GIB), giver("last", GIB)]
    )
    one.alloc(10)
    assert not asked
    held = [one.alloc(15), one.alloc(10)]
    assert asked == [("has none", 10 * GIB), ("has too little", 10 * GIB), ("has enough", 10 * GIB)]
    del held


def test_final_error_is_cupys() -> None:
    (one,) = processes(Gpu(), 1)
    held = one.alloc(80)
    asked: list[int] = []
    reclaimers.append(lambda nbytes: bool(asked.append(nbytes)))
    with pytest.raises(OutOfMemoryError) as caught:
        one.alloc(11)
    assert caught.value.args == (11 * GIB, 80 * GIB, 90 * GIB)
    assert asked == [11 * GIB]
    del held


def test_error_keeps_nothing_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        (one,) = processes(Gpu(), 1)

        def fails() -> None:
            held = one.alloc(80)
            one.alloc(11)
            del held

        with pytest.raises(OutOfMemoryError):
            fails()
        assert one.pool.kept == [80 * GIB], "the traceback is gone, and so is what its frames had"
    finally:
        gc.enable()


@pytest.mark.parametrize("given", ["50%", "0"])
def test_users_limit_counts(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(LIMIT, given)
    cupy = Cupy(Gpu())
    cupy.pool.limit = 50 * GIB if given == "50%" else 0  # as CuPy reads it
    said = BoundedAllocator(cupy, 0, 0.9, 2).install()
    assert cupy.pool.limit == (50 * GIB if given == "50%" else 0)
    if given == "50%":
        with pytest.raises(OutOfMemoryError):
            cupy.alloc(51)
        assert "50.0 GiB" in said
    else:
        assert cupy.alloc(100) and LIMIT in said


def test_limit_set_by_code_counts() -> None:
    before, later = Cupy(Gpu()), Cupy(Gpu())
    before.pool.set_limit(20 * GIB)
    for cupy in (before, later):
        BoundedAllocator(cupy, 0, 0.9, 2).install()
    later.pool.set_limit(20 * GIB)
    for cupy in (before, later):
        with pytest.raises(OutOfMemoryError):
            cupy.alloc(21)
        assert cupy.pool.limit == 20 * GIB


def test_other_allocator_stays() -> None:
    cupy = Cupy(Gpu())
    managed: Any = object()
    cupy.allocator = managed
    assert "another allocator" in BoundedAllocator(cupy, 0, 0.9, 1).install()
    assert cupy.allocator is managed and cupy.pool.limit == 0


def test_no_needless_cuda_context() -> None:
    cupy = Cupy(Gpu())
    BoundedAllocator(cupy, 0, 0.9, 1).install()
    assert cupy.made_current == 0
    cupy = Cupy(Gpu())
    cupy.on = 1  # the driver did that
    BoundedAllocator(cupy, 0, 0.9, 1).install()
    assert cupy.made_current == 1 and cupy.on == 1


def test_report_of_limit() -> None:
    assert BoundedAllocator(Cupy(Gpu()), 0, 0.9, 1).install() == "device 0: CuPy's pool may hold 90.0 GiB of 100.0 GiB"
    said = BoundedAllocator(Cupy(Gpu()), 0, 0.9, 3).install()
    assert said.endswith("30.0 GiB of 100.0 GiB, and up to 90.0 GiB if other processes leave room")


# -- pinned memory of the host ---------------------------------------------------------------------


def test_pinned_memory_limit() -> None:
    cupy = Cupy(Gpu())
    bound_pinned_memory(cupy, 100 << 10)
    pool: PinnedPool = cupy.pinned.__self__  # type: ignore[union-attr]
    assert cupy.pinned is not None
    for kib in (32, 16, 32, 16):
        pool.free.append(cupy.pinned(kib << 10))
    assert sorted(memory.size >> 10 for memory in pool.free) == [16, 32], "used again"
    pool.free.append(cupy.pinned(64 << 10))
    assert [memory.size >> 10 for memory in pool.free] == [64], "the others went before it came"
    used = [cupy.pinned(48 << 10) for _ in range(3)]
    assert [memory.size >> 10 for memory in used] == [64, 64, 64], "what is in use is not bounded"
    pool.free.extend(used)
    used.clear()
    pool.free.append(cupy.pinned(1 << 10))
    assert [memory.size >> 10 for memory in pool.free] == [1]


# -- in a node's process ---------------------------------------------------------------------------


def test_process_bounds_both_pools(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cupy = Cupy(Gpu())
    monkeypatch.setitem(cuda.sys.modules, "cupy", cupy)
    monkeypatch.delenv(PRETEND, raising=False)
    cuda.bound_memory(0, 0.9, 1)
    assert cupy.pool.limit == 0 and cupy.pinned is None
    with caplog.at_level(logging.INFO):
        cuda.bound_memory(2, 0.5, 2)
    assert cupy.pool.limit == 25 * GIB and cupy.pinned is not None
    assert "25.0 GiB of 100.0 GiB" in caplog.text


def test_node_starts_without_bounds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(cuda.sys.modules, "cupy", SimpleNamespace())
    monkeypatch.delenv(PRETEND, raising=False)
    cuda.bound_memory(1, 0.9, 1)
    assert "is not bounded" in caplog.text


def test_pretended_devices_load_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRETEND, "1")
    monkeypatch.setitem(cuda.sys.modules, "cupy", None)
    cuda.bound_memory(1, 0.9, 1)
