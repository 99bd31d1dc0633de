"""A device in software, for tests of what rests on the order of streams: a mistake shows as a wrong number, every time.

Nothing that is queued on one of its streams is done before it has to be: before somebody waits for an event behind it,
or for a stream that follows one. With a seed, some is done earlier, here and there. Memory that nobody wrote yet, or
that somebody freed, is full of 0xDD. Freed memory belongs to its stream, and goes to the next who allocates there.

So these are seen: reading on the host, or on another stream, what was not done yet; giving away memory that another
stream still reads. `waits` and `waits_on_loops` tell who blocked for it, and whether that stopped an event loop.

Memory of the host that is registered is copied from and to when that is done, wherever the arrays on it went meanwhile:
so giving it away too early shows, too. What must never be done with it (`misuses`) fails every call from then on.

While a stream is captured (`captures`) nothing of the framework's may touch it, nor may anything wait in that thread.

    device = SoftDevice()
    device.xp.arange(10.0)     # as much of an array module as tests need
"""

from __future__ import annotations

import collections
import contextlib
import math
import mmap
import os
import random
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from taskgraph.device.afterwards import on_a_loop
from taskgraph.device.api import HANDLE_BYTES, IDENTITY_BYTES
from taskgraph.device.lookup import register_array_type

__all__ = ["SoftArray", "SoftDevice", "SoftEvent", "SoftStream"]

POISON: Final = 0xDD
GONE_S: Final = 5.0
"""Memory of the host that is garbage has to be unregistered within this time."""
_HANDLE: Final = struct.Struct("<ii")


class SoftStream:
    """A queue of operations."""

    def __init__(self, name: str, calls_on_loops: list[str]) -> None:
        self.name = name
        self.calls_on_loops = calls_on_loops
        self.queue: collections.deque[Callable[[], object]] = collections.deque()
        self.queued = 0
        self.done = 0
        self.runs = False
        self.captured_in = 0  # the thread that captures a graph on it

    def __repr__(self) -> str:
        return f"<stream {self.name}: {self.done} of {self.queued}>"


class SoftEvent:
    """A place in a stream. Once its finalizer ran it is of no use: so are events of CUDA in CuPy."""

    def __init__(self, stream: SoftStream) -> None:
        self.stream = stream
        self.place = stream.queued
        self.destroyed = self.recycled = False
        self._note()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        self.destroyed = True
        if not (self.recycled or is_finalizing()):
            self._note()

    def _note(self) -> None:
        if on_a_loop():
            self.stream.calls_on_loops.append("".join(traceback.format_stack(limit=12)))


class _Memory:
    """A run of the device's memory, freed with the last reference to it."""

    def __init__(self, device: SoftDevice, raw: NDArray[np.uint8]) -> None:
        self.stream = device.current_stream()
        self.raw = raw
        self._freed = device._freed

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # some goes after this module
            self._freed.append((self.raw, self.stream))


class _SharedRun:
    """Memory of the device that other processes can open. It stays for those who have when it is freed."""

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("softdevice", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, nbytes)
        self.raw = np.frombuffer(mmap.mmap(self.fd, nbytes), np.uint8)
        self.raw.fill(POISON)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            os.close(self.fd)


class _OpenedRun:
    """Memory of another process. Who reads it when nobody here has it open any more reads 0xDD."""

    def __init__(self, soft: SoftDevice, path: str, fd: int, nbytes: int) -> None:
        # A mapping of its own, so that it can be spoiled; what the owner writes is seen until then.
        memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.fd = fd
        self.raw = np.frombuffer(memory, np.uint8)
        self._path = path
        self._opened = soft.opened
        self._opened.append(path)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self._opened.remove(self._path)
            self.raw.fill(POISON)
            os.close(self.fd)


class _Registered:
    """A run of the host's memory that the device copies from and to by itself.

    It keeps the memory from going while something is queued, but not what was made on it: that may be given away.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        root = _root(memory)
        self.begin = _address(memory)
        self.end = self.begin + memory.nbytes
        self.live = True
        self.queued = 0
        self._offset = self.begin - _address(_bytes_of(root))
        self._root = weakref.ref(root, self._went)
        self._gone_at = math.inf

    def _went(self, _: object, now: Callable[[], float] = time.monotonic) -> None:
        self._gone_at = now()

    @property
    def gone(self) -> bool:
        """Whether its memory is. The garbage collector says so before it asks finalizers, which may well keep it."""
        return time.monotonic() - self._gone_at > GONE_S

    def part(self, array: NDArray[Any]) -> NDArray[np.uint8] | None:
        """The same memory, held by nothing that `array` was made on. None: it lies elsewhere."""
        at = _address(array)
        if not (self.begin <= at and at + array.nbytes <= self.end):
            return None
        root = self._root()
        if root is None:
            return None
        offset = self._offset + at - self.begin
        return _bytes_of(root)[offset : offset + array.nbytes]


def _root(array: NDArray[Any]) -> Any:
    """What has the memory of an array: an mmap, or the array that allocated it."""
    holder: Any = array
    while True:
        if isinstance(holder, np.ndarray) and holder.base is not None:
            holder = holder.base
        elif isinstance(holder, memoryview):
            holder = holder.obj
        else:
            return holder


def _bytes_of(root: Any) -> NDArray[np.uint8]:
    return root.reshape(-1).view(np.uint8) if isinstance(root, np.ndarray) else np.frombuffer(root, np.uint8)


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class SoftDevice:
    """`taskgraph.device.api.Device` in software.

    Args:
        identity: processes whose device has the same have the same device; None: nobody has this one.
        seed: at every call, streams chosen by it go on a little; None: nothing is done before it has to be.
        races: a stream on which memory is freed goes on at once, so that the memory has a new owner as early as can be.
    """

    array_type: type[SoftArray]

    def __init__(self, seed: int | None = None, *, races: bool = False, identity: bytes | None = None) -> None:
        self.identity = identity or os.urandom(IDENTITY_BYTES)
        self._lock = threading.RLock()
        self._rng = random.Random(seed) if seed is not None else None
        self._races = races
        self.streams: list[SoftStream] = []
        self.calls_on_loops: list[str] = []
        """The stacks of those that made or destroyed an event on an event loop, which a driver may hold up for long."""
        self._freed: collections.deque[tuple[NDArray[np.uint8], SoftStream]] = collections.deque()
        self._free: dict[tuple[SoftStream, int], list[NDArray[np.uint8]]] = {}
        self._here = threading.local()
        self.default = self.new_stream()
        self.taken_bytes = 0
        """What was allocated afresh, since nothing of that size was free on that stream."""
        self.reused = 0
        """How often freed memory was given to somebody."""
        self.waits: list[str] = []
        """For every wait, the function that asked for it."""
        self.waits_on_loops: list[str] = []
        """The stacks of those that stopped an event loop."""
        self.opened: list[str] = []
        """The memory of others that is open."""
        self.times_opened = 0
        self.registered: list[_Registered] = []
        """Memory of the host that is page-locked."""
        self.registrations = 0
        """How often some was."""
        self.misuses: list[str] = []
        """What was done with registered memory, or an event, that must not be."""
        self.xp = _namespace(self)

    # -- order ------------------------------------------------------------------------------------

    def new_stream(self) -> SoftStream:
        with self._lock:
            made = SoftStream(str(len(self.streams)), self.calls_on_loops)
            self.streams.append(made)
            return made

    def current_stream(self) -> SoftStream:
        return getattr(self._here, "stream", self.default)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before = self.use(stream)
        try:
            yield
        finally:
            self.use(before)

    def use(self, stream: Any) -> SoftStream:
        """Makes it this thread's current stream; returns what was."""
        before = self.current_stream()
        self._here.stream = stream
        return before

    @contextlib.contextmanager
    def captures(self) -> Iterator[None]:
        """Within, code of a task captures a graph on this thread's current stream, and others may not touch that."""
        stream = self.current_stream()
        with self._lock:
            stream.captured_in = threading.get_ident()
        try:
            yield
        finally:
            with self._lock:
                stream.captured_in = 0

    def _touch(self, stream: SoftStream) -> None:
        if stream.captured_in:
            raise self._misused("a stream was touched on which somebody captures a graph")

    def _look_in_thread(self) -> None:
        here = threading.get_ident()
        if any(stream.captured_in == here for stream in self.streams):
            raise self._misused("an event was looked at in a thread that captures a graph")

    def record(self, stream: Any) -> SoftEvent:
        with self._lock:
            self._go_on()
            self._touch(stream)
            return SoftEvent(stream)

    def try_record(self, stream: Any) -> SoftEvent | None:
        with self._lock:
            return None if stream.captured_in else self.record(stream)

    def recycle(self, event: SoftEvent) -> None:
        self._look(event)
        event.destroyed = event.recycled = True

    def follow(self, stream: Any, event: SoftEvent) -> None:
        with self._lock:
            self._go_on()
            self._touch(stream)
            self._look(event)
            of, place = event.stream, event.place
            self._queue(stream, lambda: self._run(of, place))

    def wait(self, event: SoftEvent) -> None:
        caller = sys._getframe(1).f_code.co_qualname
        with self._lock:
            self.waits.append(caller)
            if on_a_loop():
                self.waits_on_loops.append("".join(traceback.format_stack(limit=12)))
            self._go_on()
            self._look_in_thread()
            self._look(event)
            self._run(event.stream, event.place)

    def _look(self, event: SoftEvent) -> None:
        if event.destroyed:
            raise self._misused("an event was used whose finalizer ran")

    def has_passed(self, event: SoftEvent) -> bool:
        with self._lock:
            self._go_on()
            self._look_in_thread()
            self._look(event)
            return event.stream.done >= event.place

    def synchronize(self) -> None:
        """Does all that is queued anywhere: for the end of a test."""
        with self._lock:
            self._go_on()
            for stream in self.streams:
                self._run(stream, stream.queued)
            self._go_on()

    def _queue(self, stream: SoftStream, operation: Callable[[], object]) -> None:
        stream.queue.append(operation)
        stream.queued += 1

    def _run(self, stream: SoftStream, place: int) -> None:
        """Does what is queued on a stream up to a place."""
        if stream.runs:
            return  # what it does just now asked for another stream, which follows it: both began before
        stream.runs = True
        try:
            while stream.done < place:
                operation = stream.queue.popleft()
                operation()
                stream.done += 1
        finally:
            stream.runs = False

    def _go_on(self) -> None:
        """At every call: memory that was freed goes to its stream, and streams go on as the seed has it."""
        if any(entry.gone for entry in self.registered):
            self.misuses.append("memory went while it was registered")
        if self.misuses:
            raise AssertionError(self.misuses[0])
        while self._freed:
            raw, stream = self._freed.popleft()
            self._queue(stream, lambda raw=raw: raw.fill(POISON))  # type: ignore[misc]
            self._free.setdefault((stream, raw.nbytes), []).append(raw)
            if self._races:
                self._run(stream, stream.queued)
        if self._rng is not None:
            stream = self._rng.choice(self.streams)
            self._run(stream, self._rng.randint(stream.done, stream.queued))

    # -- memory -----------------------------------------------------------------------------------

    def _take(self, nbytes: int, stream: SoftStream) -> NDArray[np.uint8]:
        with self._lock:
            self._go_on()
            free = self._free.get((stream, nbytes))
            if free:
                self.reused += 1
                return free.pop()
            self.taken_bytes += nbytes
            return np.full(nbytes, POISON, np.uint8)

    def _new(self, shape: tuple[int, ...], dtype: Any) -> SoftArray:
        dtype = np.dtype(dtype)
        memory = _Memory(self, self._take(int(np.prod(shape, dtype=int)) * dtype.itemsize, self.current_stream()))
        return self.array_type(self, memory, np.ndarray(shape, dtype, memory.raw.data))

    def _do(self, operation: Callable[[], object]) -> None:
        """Queues it on the current stream."""
        stream = self.current_stream()
        with self._lock:
            self._go_on()
            if stream.captured_in != threading.get_ident():
                self._touch(stream)
            self._queue(stream, operation)

    def can_copy(self, array: SoftArray) -> bool:
        return array.soft is self

    def copy(self, array: SoftArray) -> SoftArray:
        made = self._new(array.shape, array.dtype)
        source, target = array.elements, made.elements
        self._do(lambda: np.copyto(target, source))
        return made

    def view(self, array: SoftArray, dtype: np.dtype[Any], shape: tuple[int, ...], owner: object) -> SoftArray:
        data = array.elements.reshape(-1).view(np.uint8).data
        return self.array_type(self, owner, np.ndarray(shape, dtype, data))

    def empty(self, nbytes: int) -> SoftArray:
        return self._new((nbytes,), np.uint8)

    def queue_digests(self, array: SoftArray, block_bytes: int) -> Callable[[], bytes]:
        data = array.elements.reshape(-1).view(np.uint8)
        found = [b"\xdd" * 16 for _ in range(0, data.nbytes, block_bytes)]

        def take() -> None:
            for number in range(len(found)):
                block = data[number * block_bytes : (number + 1) * block_bytes]
                found[number] = xxhash.xxh3_128_digest(block.data)

        self._do(take)
        return lambda: b"".join(found)

    def to_device(self, host: NDArray[Any]) -> SoftArray:
        made = self._new(host.shape, host.dtype)
        source, target = host.copy(), made.elements
        self._do(lambda: np.copyto(target, source))
        return made

    def upload(self, host: NDArray[Any]) -> SoftArray:
        assert host.flags.c_contiguous
        found = self._registered(host)
        if found is None:
            raise self._misused("copied from memory that is not registered, as if it were")
        made = self._new(host.shape, host.dtype)
        entry, source = found
        target = made.elements.reshape(-1).view(np.uint8)
        self._do(self._by_itself(entry, lambda: np.copyto(target, source)))
        return made

    def fetch(self, array: SoftArray, target: NDArray[np.uint8], begin: int = 0) -> None:
        if target.nbytes == array.nbytes:
            source = array.elements
        else:
            assert array.elements.flags.c_contiguous
            source = array.elements.reshape(-1).view(np.uint8)[begin : begin + target.nbytes]
        assert source.nbytes == target.nbytes
        found = self._registered(target)
        if found is None:
            self._do(lambda: np.copyto(np.ndarray(source.shape, source.dtype, target.data), source))
        else:
            entry, there = found
            copy = self._by_itself(entry, lambda: np.copyto(np.ndarray(source.shape, source.dtype, there.data), source))
            self._do(copy)

    def to_host(self, array: SoftArray) -> NDArray[Any]:
        host = np.empty(array.shape, array.dtype)
        source = array.elements
        self._do(lambda: np.copyto(host, source))
        self.wait(self.record(self.current_stream()))
        return host

    # -- memory that other processes can open -----------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        return 1 << 30

    def allocate(self, nbytes: int) -> SoftArray:
        if nbytes > self.memory_bytes:
            raise MemoryError(f"{nbytes} bytes of a device in software")
        run = _SharedRun(nbytes)
        return self.array_type(self, run, run.raw)

    def fill_and_digest(self, target: SoftArray, source: SoftArray, block_bytes: int) -> Callable[[], bytes]:
        made, given = np.ndarray(source.shape, source.dtype, target.elements.data), source.elements
        self._do(lambda: np.copyto(made, given))
        return self.queue_digests(target, block_bytes)

    def share(self, memory: SoftArray) -> bytes:
        run = memory._owner
        assert isinstance(run, _SharedRun | _OpenedRun), "memory that other processes cannot open"
        return _HANDLE.pack(os.getpid(), run.fd).ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes, nbytes: int) -> SoftArray:
        pid, number = _HANDLE.unpack(handle[: _HANDLE.size])
        path = f"/proc/{pid}/fd/{number}"
        if not os.readlink(path).startswith("/memfd:softdevice "):
            raise OSError(f"{path} is something else")
        run = _OpenedRun(self, path, os.open(path, os.O_RDWR | os.O_CLOEXEC), nbytes)
        with self._lock:
            self.times_opened += 1
        return self.array_type(self, run, run.raw)

    # -- memory of the host -----------------------------------------------------------------------

    def register(self, memory: NDArray[np.uint8]) -> None:
        with self._lock:
            self._go_on()
            self.registrations += 1
            entry = _Registered(memory)
            if any(entry.begin < other.end and other.begin < entry.end for other in self.registered):
                raise self._misused("memory is registered twice")
            self.registered.append(entry)

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        with self._lock:
            self._go_on()
            begin, end = _address(memory), _address(memory) + memory.nbytes
            for entry in self.registered:
                if (entry.begin, entry.end) == (begin, end):
                    break
            else:
                raise self._misused("memory is unregistered that is not registered")
            self.registered.remove(entry)
            entry.live = False
            if entry.queued:
                raise self._misused("memory is unregistered while copies from or to it are queued")

    def _registered(self, array: NDArray[Any]) -> tuple[_Registered, NDArray[np.uint8]] | None:
        with self._lock:
            for entry in self.registered:
                part = entry.part(array)
                if part is not None:
                    return entry, part
        return None

    def _by_itself(self, entry: _Registered, operation: Callable[[], object]) -> Callable[[], None]:
        entry.queued += 1

        def copy() -> None:
            if not entry.live:
                raise self._misused("a copy from or to memory that was unregistered meanwhile")
            operation()
            entry.queued -= 1

        return copy

    def _misused(self, how: str) -> AssertionError:
        self.misuses.append(how)
        return AssertionError(how)


class SoftArray:
    """An array of a `SoftDevice`. Its operations are queued on the current stream.

    Attributes:
        soft: its device.
        elements: where they are; what is in there is of no use before the stream was waited for.
    """

    def __init__(self, device: SoftDevice, owner: object, elements: NDArray[Any]) -> None:
        self.soft = device
        self._owner = owner  # of the memory
        self.elements = elements

    @property
    def device(self) -> SoftDevice:
        return self.soft

    @property
    def shape(self) -> tuple[int, ...]:
        return self.elements.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self.elements.strides

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.elements.dtype

    @property
    def ndim(self) -> int:
        return self.elements.ndim

    @property
    def size(self) -> int:
        return self.elements.size

    @property
    def nbytes(self) -> int:
        return self.elements.nbytes

    @property
    def T(self) -> SoftArray:
        return type(self)(self.soft, self._owner, self.elements.T)

    def transpose(self, axes: Sequence[int]) -> SoftArray:
        return type(self)(self.soft, self._owner, self.elements.transpose(axes))

    def get(self) -> NDArray[Any]:
        """A copy on the host. Waits."""
        return self.soft.to_host(self)

    def copy(self) -> SoftArray:
        return self.soft.copy(self)

    def reshape(self, *shape: int) -> SoftArray:
        assert self.elements.flags.c_contiguous, "only what needs no copy"
        return type(self)(self.soft, self._owner, self.elements.reshape(*shape))

    def __getitem__(self, key: Any) -> SoftArray:
        return type(self)(self.soft, self._owner, self.elements[key if isinstance(key, tuple) else (key, ...)])

    def __setitem__(self, key: Any, value: Any) -> None:
        target, source = self.elements, value.elements if isinstance(value, SoftArray) else np.array(value)
        self.soft._do(lambda: target.__setitem__(key, source))

    def sum(self) -> SoftArray:
        source, made = self.elements, self.soft._new((), np.zeros(1, self.dtype).sum().dtype)
        target = made.elements
        self.soft._do(lambda: np.sum(source, out=target))
        return made

    def max(self) -> SoftArray:
        source, made = self.elements, self.soft._new((), self.dtype)
        target = made.elements
        self.soft._do(lambda: np.max(source, out=target))
        return made

    def mean(self) -> SoftArray:
        return self.sum() / self.size

    def __float__(self) -> float:
        return float(self.get())

    def __len__(self) -> int:
        return len(self.elements)

    __array_ufunc__ = None  # numpy leaves it to these arrays to say no

    def _made_with(self, function: np.ufunc, *args: Any) -> SoftArray:
        given = [_operand(arg) for arg in args]
        shape = np.broadcast_shapes(*(array.shape for array in given))
        made = self.soft._new(shape, np.result_type(*given, *([np.float64] if function is np.divide else [])))
        target = made.elements
        self.soft._do(lambda: function(*given, out=target, casting="unsafe"))
        return made

    def _change(self, function: np.ufunc, other: Any) -> SoftArray:
        target, given = self.elements, _operand(other)
        self.soft._do(lambda: function(target, given, out=target, casting="unsafe"))
        return self

    def __add__(self, other: Any) -> SoftArray:
        return self._made_with(np.add, self, other)

    def __radd__(self, other: Any) -> SoftArray:
        return self._made_with(np.add, other, self)

    def __sub__(self, other: Any) -> SoftArray:
        return self._made_with(np.subtract, self, other)

    def __mul__(self, other: Any) -> SoftArray:
        return self._made_with(np.multiply, self, other)

    def __rmul__(self, other: Any) -> SoftArray:
        return self._made_with(np.multiply, other, self)

    def __truediv__(self, other: Any) -> SoftArray:
        return self._made_with(np.divide, self, other)

    def __iadd__(self, other: Any) -> SoftArray:
        return self._change(np.add, other)

    def __imul__(self, other: Any) -> SoftArray:
        return self._change(np.multiply, other)


def _operand(value: Any) -> NDArray[Any]:
    if isinstance(value, SoftArray):
        return value.elements
    if isinstance(value, np.ndarray):  # as CuPy says it
        raise TypeError(f"Unsupported type {type(value)}")
    return np.array(value)


SoftDevice.array_type = SoftArray
register_array_type(SoftArray, lambda array: array.soft)


def _namespace(device: SoftDevice) -> ModuleType:
    """The device's array module: what `Task.xp` is where it is the node's."""

    def asarray(data: Any, dtype: Any = None) -> SoftArray:
        if isinstance(data, SoftArray) and dtype in (None, data.dtype):
            return data
        return device.to_device(np.asarray(data, dtype))

    module: Any = ModuleType("softdevice")
    module.ndarray = SoftArray
    module.asarray = asarray
    module.array = lambda data, dtype=None: device.to_device(np.asarray(data, dtype))
    module.arange = lambda *args, dtype=None: device.to_device(np.arange(*args, dtype=dtype))
    module.zeros = lambda shape, dtype=float: device.to_device(np.zeros(shape, dtype))
    module.ones = lambda shape, dtype=float: device.to_device(np.ones(shape, dtype))
    module.full = lambda shape, value, dtype=float: device.to_device(np.full(shape, value, dtype))
    return module  # type: ignore[no-any-return]
