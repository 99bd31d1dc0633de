"""CUDA devices, where there are any, by CuPy: but for `digest`'s kernel the only module that imports it, when asked.

Every method of `CudaDevice` is a few calls of CuPy. What rests on their order is elsewhere, and is tested with a device
in software (`tests/unit/device/softdevice.py`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import ModuleType
from typing import Any, Final

import numpy
import xxhash
from numpy.typing import NDArray

from taskgraph.device import digest, virtual
from taskgraph.device.afterwards import Aside
from taskgraph.device.api import IDENTITY_BYTES, Array, Device, Event, Stream
from taskgraph.device.memory import Bounded, bound_pinned, givers
from taskgraph.device.visible import PRETEND, VISIBLE, visible
from taskgraph.errors import JobError
from taskgraph.protocol.deviceloss import device_error

__all__ = ["CudaDevice", "array_module", "bound_memory", "device_count", "device_of", "from_dlpack", "givers"]

log = logging.getLogger("taskgraph.devices")

_CHECK_BLOCK: Final = 1 << 16
_CHECK_BYTES: Final = 3 * _CHECK_BLOCK + 1000
"""Size of the array that a trial uses: some blocks, and a part of one."""
_MOST_EVENTS: Final = 1024
"""That wait to be recorded anew."""
_REGISTER: Final = 0
"""`cudaHostRegisterDefault`: with unified addressing, which every device of today has, all contexts may use it."""
_CAPTURE_ERRORS: Final = range(900, 909)
"""`cudaErrorStreamCaptureUnsupported` and those that follow it."""
_CAPTURED: Final = 907
"""`cudaErrorCapturedEvent`: the event is part of a graph. A query tells it, and CuPy's passes on what it tells."""
_OF_THREADS: Final = "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM"
_FIRST: Final = 0
"""A node computes on the first device its process has."""


def device_count() -> int:
    """Returns how many CUDA devices this process can use; 0 without cupy, without a driver, or with none visible.

    Raises:
        JobError: there are some, and CuPy is set to use the default streams of threads.
    """
    if PRETEND in os.environ:
        return len(visible(os.environ.get(VISIBLE, "")))
    if importlib.util.find_spec("cupy") is None:
        return 0
    try:
        import cupy

        found = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # cupy raises its own classes, and ImportError where CUDA's libraries are missing
        log.warning("cupy is installed, but no CUDA device can be used: %s", error)
        return 0
    if found and os.environ.get(_OF_THREADS, "0") not in ("", "0"):
        raise JobError(
            f"{_OF_THREADS} is set, and what asyncio tasks and threads of your own code queue would be in no order "
            "with the streams of tasks: unset it where nodes are started (docs/gpu.md, Streams)"
        )
    return found


def array_module(devices: int) -> tuple[ModuleType, Device | None]:
    """`Task.xp` on a node with that many devices, and the device of its arrays: None is the host."""
    if devices and PRETEND not in os.environ:
        import cupy

        return cupy, _first()
    return numpy, None


def bound_memory(devices: int, fraction: float, sharing: int) -> None:
    """Bounds what CuPy's pools hold, in a process that is a node's: once, before any of its code runs.

    Args:
        devices: how many the process has; nothing is loaded where there is none.
        fraction: of the first one's memory, what all processes may hold together.
        sharing: how many processes share it.
    """
    if not devices or PRETEND in os.environ:
        return
    import cupy

    try:
        log.info("%s", Bounded(cupy, _FIRST, fraction, sharing).install())
        bound_pinned(cupy)
    except Exception:  # no reason for a node not to start: if the device is ill, the first task to use it says so
        log.exception("what CuPy's pools hold is not bounded")


def device_of(value: Any) -> Device | None:
    """The device of a CuPy array; None for everything else."""
    cupy = sys.modules.get("cupy")
    if cupy is None or type(value) is not getattr(cupy, "ndarray", None):
        return None
    return _first()


def from_dlpack(value: Any) -> Array | None:
    """See `lookup.from_dlpack`. CuPy has its current stream follow what the other library tells."""
    try:
        import cupy
    except ImportError:  # it is not installed, or CUDA's libraries are not
        return None
    return cupy.from_dlpack(value)


@cache
def _first() -> CudaDevice:
    return CudaDevice(sys.modules["cupy"], _FIRST)


def _bytes(array: Array) -> bytes:
    """Copies a few bytes to the host, from an array whose work was waited for."""
    found: bytes = array.get(out=numpy.empty(array.shape, array.dtype)).tobytes()
    return found


class CudaDevice:
    """`taskgraph.device.api.Device`. Making one asks nothing of CUDA.

    Args:
        cupy: the module.
        number: the device's, among those that this process sees.
    """

    def __init__(self, cupy: Any, number: int) -> None:
        self._cupy = cupy
        self._number = number
        self._events: deque[Event] = deque()
        self._works: bool | None = None  # None: not looked at yet
        self._looking = threading.Lock()
        self._identity: bytes | None = None

    # -- order ------------------------------------------------------------------------------------

    def stream(self) -> Stream:
        # Not non_blocking: what other libraries queue on CUDA's default stream is in order with what is queued on it.
        with self._cupy.cuda.Device(self._number):
            return self._cupy.cuda.Stream()  # type: ignore[no-any-return]

    def current(self) -> Stream:
        return self._cupy.cuda.get_current_stream(self._number)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        # Entered, and not `use`d: a `with` on another stream, of CuPy's own code, too, goes back to what was entered.
        # And twice: CuPy only counts who entered. A coroutine's `with` that is open over an await would else be ended
        # in place of ours, and one that ends here in a later step than it began in would end ours, and go on with what
        # was current before: the stream of another task, perhaps.
        cuda, number = self._cupy.cuda, self._number
        device = cuda.Device(number)
        device.use()
        before, mark = cuda.get_current_stream(number), self._same(stream)
        mark.__enter__()
        try:
            stream.__enter__()
            yield
        finally:
            device.use()  # code that ran may have left this thread at another one
            with contextlib.suppress(IndexError):  # more was left than entered
                while cuda.get_current_stream(number) is not mark:
                    stream.__exit__(None, None, None)
                mark.__exit__(None, None, None)
            if cuda.get_current_stream(number) != before:
                before.use()

    def _same(self, stream: Any) -> Any:
        """Returns another object for a stream."""
        cuda = self._cupy.cuda
        if hasattr(cuda.Stream, "from_external"):
            return cuda.Stream.from_external(stream)
        return cuda.ExternalStream(stream.ptr, self._number)  # before CuPy 14

    def record(self, stream: Stream) -> Event:
        with self._cupy.cuda.Device(self._number):
            try:
                event = self._events.pop()
            except IndexError:
                event = self._cupy.cuda.Event(block=True, disable_timing=True)
            return stream.record(event)  # type: ignore[attr-defined]

    def try_record(self, stream: Stream) -> Event | None:
        runtime = self._cupy.cuda.runtime
        try:
            if stream.is_capturing():  # type: ignore[attr-defined]
                return None
            event = self.record(stream)
            # In another thread than the stream's a capture may have begun in between, and even ended.
            if self.current() != stream and (
                stream.is_capturing() or runtime.eventQuery(event.ptr) == _CAPTURED  # type: ignore[attr-defined]
            ):
                return None
        except RuntimeError as error:
            # CuPy's own, without a status: an error has ended the capture, which is still to be ended on the stream.
            if type(error) is RuntimeError or getattr(error, "status", 0) in _CAPTURE_ERRORS:
                return None
            raise
        return event

    def recycle(self, event: Event) -> None:
        if len(self._events) < _MOST_EVENTS:
            self._events.append(event)
        else:
            Aside([event])

    def follow(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)  # type: ignore[attr-defined]

    def wait(self, event: Event) -> None:
        event.synchronize()

    def done(self, event: Event) -> bool:
        return bool(event.done)

    # -- memory -----------------------------------------------------------------------------------

    def keeps(self, array: Array) -> bool:
        if array.device.id != self._number:
            return False
        if self._works is None:
            with self._looking:
                if self._works is None:
                    self._works = self._look()
        return self._works

    def _look(self) -> bool:
        """True if arrays can stay on this device, with its driver and CuPy: tried once, on a small array.

        Where it does not they go by the host, which is slower. Digests that were not the host's would be worse: tasks
        would disagree about every item. An error of the device itself is raised: it is no reason to go on with it.
        """
        wanted = numpy.arange(_CHECK_BYTES // 8, dtype=numpy.uint64) * numpy.uint64(0x9E3779B185EBCA87)
        found = numpy.zeros(_CHECK_BYTES, numpy.uint8)
        try:
            with self.on(self.stream()):
                copy = self.empty(wanted.nbytes)
                copied = self.fill(copy, self.to_device(wanted), _CHECK_BLOCK)
                digests = self.digests(copy, _CHECK_BLOCK)
                self.fetch(self.view(copy, wanted.dtype, wanted.shape, None), found)
                self.wait(self.record(self.current()))
                taken = {copied(), digests()}
        except Exception as error:
            if device_error(error) is not None:
                raise
            log.exception("arrays do not stay on device %d, and go by the host: what that takes fails", self._number)
            return False
        data = wanted.view(numpy.uint8)
        blocks = [data[at : at + _CHECK_BLOCK].data for at in range(0, _CHECK_BYTES, _CHECK_BLOCK)]
        if not numpy.array_equal(found, data) or taken != {b"".join(map(xxhash.xxh3_128_digest, blocks))}:
            log.error("arrays do not stay on device %d, and go by the host: a copy or a digest is wrong", self._number)
            return False
        return True

    def copy(self, array: Array) -> Array:
        with self._cupy.cuda.Device(self._number):
            # Not `array.copy`: that is a kernel, compiled for each dtype, which may write a bool of 2 as 1. This copies
            # bytes where it can.
            made = self._cupy.empty(array.shape, array.dtype)
            made[...] = array
            return made

    def view(self, array: Array, dtype: numpy.dtype[Any], shape: tuple[int, ...], owner: object) -> Array:
        cuda = self._cupy.cuda
        memory = cuda.UnownedMemory(array.data.ptr, array.nbytes, owner, self._number)
        return self._cupy.ndarray(shape, dtype, cuda.MemoryPointer(memory, 0))

    def empty(self, nbytes: int) -> Array:
        with self._cupy.cuda.Device(self._number):
            return self._cupy.empty((nbytes,), numpy.uint8)

    def digests(self, array: Array, block_bytes: int) -> Callable[[], bytes]:
        return self._digests(array, block_bytes, 0)

    def _digests(self, array: Array, block_bytes: int, copy: int) -> Callable[[], bytes]:
        with self._cupy.cuda.Device(self._number):
            found = self._cupy.empty((digest.count(array.nbytes, block_bytes) * digest.DIGEST_BYTES,), numpy.uint8)
            digest.launch(array.data.ptr, array.nbytes, block_bytes, found.data.ptr, self.current(), copy)
        return partial(_bytes, found)

    def to_device(self, host: NDArray[Any]) -> Array:
        with self._cupy.cuda.Device(self._number):
            return self._cupy.array(host, copy=True, order="C")

    def upload(self, host: NDArray[Any]) -> Array:
        with self._cupy.cuda.Device(self._number):
            made = self._cupy.empty(host.shape, host.dtype)
            made.set(host)  # not `array`, which keeps registered memory until it is called the next time
            return made

    def fetch(self, array: Array, target: NDArray[numpy.uint8], begin: int = 0) -> None:
        if target.nbytes == array.nbytes:
            array.get(out=numpy.ndarray(array.shape, array.dtype, target.data), blocking=False)
            return
        elements = self.view(array, target.dtype, (array.nbytes,), array)
        elements[begin : begin + target.nbytes].get(out=target, blocking=False)

    def to_host(self, array: Array) -> NDArray[Any]:
        cupy, there = self._cupy, array.device
        with there:  # maybe not this one
            host = numpy.empty(array.shape, array.dtype)
            if array.size:
                whole = cupy.asarray(array, order="C")
                # First the work before it, by an event that lets the processor go; the copy itself is short.
                event = cupy.cuda.Event(block=True, disable_timing=True)
                cupy.cuda.get_current_stream().record(event)
                event.synchronize()
                whole.get(out=host)  # not memory of CuPy's choice: it may be the device's own
            return host

    # -- memory that other processes can open -----------------------------------------------------

    @property
    def identity(self) -> bytes:
        if self._identity is None:
            runtime = self._cupy.cuda.runtime
            # CuPy makes the UUID a string of C's: what follows its first zero is missing. And the instances of a device
            # that is divided (MIG) share its bus.
            uuid, bus = runtime.getDeviceProperties(self._number)["uuid"], runtime.deviceGetPCIBusId(self._number)
            self._identity = xxhash.xxh3_128_digest(bus.encode() + bytes(uuid[:IDENTITY_BYTES]))
        return self._identity

    @property
    def memory_bytes(self) -> int:
        with self._cupy.cuda.Device(self._number):
            return int(self._cupy.cuda.runtime.memGetInfo()[1])

    def allocate(self, nbytes: int) -> Array:
        cupy = self._cupy
        with cupy.cuda.Device(self._number):
            try:
                run = virtual.allocate(self._number, nbytes)
            except virtual.DriverError as error:
                if error.status != virtual.OUT_OF_MEMORY:
                    raise
                cupy.get_default_memory_pool().free_all_blocks()
                try:
                    run = virtual.allocate(self._number, nbytes)
                except virtual.DriverError as again:
                    if again.status != virtual.OUT_OF_MEMORY:
                        raise
                    raise MemoryError(f"{nbytes} bytes of device {self._number}") from None
            return self._array_of(run)

    def _array_of(self, run: virtual.Run) -> Array:
        cuda = self._cupy.cuda
        memory = cuda.UnownedMemory(run.address, run.nbytes, run, self._number)
        return self._cupy.ndarray((run.nbytes,), numpy.uint8, cuda.MemoryPointer(memory, 0))

    def fill(self, target: Array, source: Array, block_bytes: int) -> Callable[[], bytes]:
        if source.flags.c_contiguous and not source.data.ptr % digest.ALIGNMENT:
            return self._digests(source, block_bytes, target.data.ptr)
        with self._cupy.cuda.Device(self._number):
            self._cupy.ndarray(source.shape, source.dtype, target.data)[...] = source
        return self.digests(target, block_bytes)

    def share(self, memory: Array) -> bytes:
        with self._cupy.cuda.Device(self._number):
            run: virtual.Run = memory.data.mem._owner
            return run.offer()

    def open(self, handle: bytes, nbytes: int) -> Array:
        with self._cupy.cuda.Device(self._number):
            self._cupy.cuda.runtime.memGetInfo()  # the device's context is made where there is none
            return self._array_of(virtual.open_run(self._number, handle, nbytes))

    def register(self, memory: NDArray[numpy.uint8]) -> None:
        with self._cupy.cuda.Device(self._number):
            self._cupy.cuda.runtime.hostRegister(memory.ctypes.data, memory.nbytes, _REGISTER)

    def unregister(self, memory: NDArray[numpy.uint8]) -> None:
        with self._cupy.cuda.Device(self._number):
            self._cupy.cuda.runtime.hostUnregister(memory.ctypes.data)
