"""CUDA devices by CuPy, which only this module and `digest` import, and not before a device is needed.

Every method of `CudaDevice` is a few calls of CuPy. Code that depends on their order is in other modules, and is tested
on a device in software (`tests/unit/device/softdevice.py`).
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
from taskgraph.device.afterwards import OffLoopFinalizer
from taskgraph.device.api import IDENTITY_BYTES, Array, Device, Event, Stream
from taskgraph.device.memory import BoundedAllocator, bound_pinned_memory, reclaimers
from taskgraph.device.visible import PRETEND, VISIBLE, visible_devices
from taskgraph.errors import JobError
from taskgraph.protocol.deviceloss import device_error

__all__ = ["CudaDevice", "array_module", "bound_memory", "device_count", "device_of", "from_dlpack", "reclaimers"]

log = logging.getLogger("taskgraph.devices")

_CHECK_BLOCK: Final = 1 << 16
_CHECK_BYTES: Final = 3 * _CHECK_BLOCK + 1000
"""Size of the array of a trial: some blocks, and a part of one."""
_MOST_EVENTS: Final = 1024
"""Limit on unused events that are kept."""
_REGISTER: Final = 0
"""`cudaHostRegisterDefault`: with unified addressing, which today's devices have, it serves all contexts."""
_CAPTURE_ERRORS: Final = range(900, 909)
"""`cudaErrorStreamCaptureUnsupported` and the errors after it."""
_CAPTURED: Final = 907
"""`cudaErrorCapturedEvent`: the event is part of a graph. CuPy's `eventQuery` returns it."""
_PER_THREAD: Final = "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM"
_FIRST: Final = 0
"""A node computes on the first device its process has."""


def device_count() -> int:
    """Returns the number of CUDA devices that this process can use; 0 without cupy or a driver.

    Raises:
        JobError: there are devices, and CuPy is set to use a default stream per thread.
    """
    if PRETEND in os.environ:
        return len(visible_devices(os.environ.get(VISIBLE, "")))
    if importlib.util.find_spec("cupy") is None:
        return 0
    try:
        import cupy

        found = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # cupy raises its own classes, and ImportError where CUDA's libraries are missing
        log.warning("cupy is installed, but no CUDA device can be used: %s", error)
        return 0
    if found and os.environ.get(_PER_THREAD, "0") not in ("", "0"):
        raise JobError(
            f"{_PER_THREAD} is set, so work of your asyncio tasks and threads would have no order with the streams of "
            "tasks: unset it where you start nodes (docs/gpu.md, Streams)"
        )
    return found


def array_module(devices: int) -> tuple[ModuleType, Device | None]:
    """Returns `Task.xp` of a node with that many devices, and the device of its arrays, None for the host."""
    if devices and PRETEND not in os.environ:
        import cupy

        return cupy, _first_device()
    return numpy, None


def bound_memory(devices: int, fraction: float, sharing: int) -> None:
    """Bounds the memory of CuPy's pools in a node's process. Call it once, before user code runs.

    Args:
        devices: the number of devices of the process; without any, CuPy is not loaded.
        fraction: the part of the first device's memory that all processes may hold together.
        sharing: the number of processes on that device.
    """
    if not devices or PRETEND in os.environ:
        return
    import cupy

    try:
        log.info("%s", BoundedAllocator(cupy, _FIRST, fraction, sharing).install())
        bound_pinned_memory(cupy)
    except Exception:  # the node starts all the same; if the device is broken, its first user reports that
        log.exception("the memory of CuPy's pools is not bounded")


def device_of(value: Any) -> Device | None:
    """Returns the device of a CuPy array, the first one of this process; None for other values."""
    cupy = sys.modules.get("cupy")
    if cupy is None or type(value) is not getattr(cupy, "ndarray", None):
        return None
    return _first_device()


def from_dlpack(value: Any) -> Array | None:
    """Views another library's array as a CuPy array; None if there is no CuPy.

    CuPy's current stream follows the other library's work.
    """
    try:
        import cupy
    except ImportError:  # no CuPy, or no libraries of CUDA
        return None
    return cupy.from_dlpack(value)


@cache
def _first_device() -> CudaDevice:
    return CudaDevice(sys.modules["cupy"], _FIRST)


def _fetch_bytes(array: Array) -> bytes:
    """Copies a few bytes to the host; the array must be complete."""
    found: bytes = array.get(out=numpy.empty(array.shape, array.dtype)).tobytes()
    return found


class CudaDevice:
    """A `taskgraph.device.api.Device`. Making one does not call CUDA.

    Args:
        cupy: the module.
        number: the device's number in this process.
    """

    def __init__(self, cupy: Any, number: int) -> None:
        self._cupy = cupy
        self._number = number
        self._events: deque[Event] = deque()
        self._works: bool | None = None  # None: not tried yet
        self._trying = threading.Lock()
        self._identity: bytes | None = None

    # -- order ------------------------------------------------------------------------------------

    def new_stream(self) -> Stream:
        # Not non_blocking: work of other libraries on CUDA's default stream must be in order with work on this one.
        with self._cupy.cuda.Device(self._number):
            return self._cupy.cuda.Stream()  # type: ignore[no-any-return]

    def current_stream(self) -> Stream:
        return self._cupy.cuda.get_current_stream(self._number)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        # Entered, not `use`d: at the end of a `with` on another stream CuPy returns to the stream entered before.
        # And entered twice, since CuPy keeps one stack per thread, and a coroutine may have a `with` open over an
        # await. Its end would pop our entry, and make current what was current before: perhaps another task's stream.
        cuda, number = self._cupy.cuda, self._number
        device = cuda.Device(number)
        device.use()
        before, mark = cuda.get_current_stream(number), self._another_object_of(stream)
        mark.__enter__()
        try:
            stream.__enter__()
            yield
        finally:
            device.use()  # user code may have made another one current
            with contextlib.suppress(IndexError):  # user code left more often than it entered
                while cuda.get_current_stream(number) is not mark:
                    stream.__exit__(None, None, None)
                mark.__exit__(None, None, None)
            if cuda.get_current_stream(number) != before:
                before.use()

    def _another_object_of(self, stream: Any) -> Any:
        """Returns another object for the same stream."""
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
            # The stream's own thread may have begun a capture meanwhile, and even ended it.
            if self.current_stream() != stream and (
                stream.is_capturing() or runtime.eventQuery(event.ptr) == _CAPTURED  # type: ignore[attr-defined]
            ):
                return None
        except RuntimeError as error:
            # CuPy's own error has no status: the capture failed, and its stream has not ended it yet.
            if type(error) is RuntimeError or getattr(error, "status", 0) in _CAPTURE_ERRORS:
                return None
            raise
        return event

    def recycle(self, event: Event) -> None:
        if len(self._events) < _MOST_EVENTS:
            self._events.append(event)
        else:
            OffLoopFinalizer([event])

    def follow(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)  # type: ignore[attr-defined]

    def wait(self, event: Event) -> None:
        event.synchronize()

    def has_passed(self, event: Event) -> bool:
        return bool(event.done)

    # -- memory -----------------------------------------------------------------------------------

    def can_copy(self, array: Array) -> bool:
        if array.device.id != self._number:
            return False
        if self._works is None:
            with self._trying:
                if self._works is None:
                    self._works = self._works_in_trial()
        return self._works

    def _works_in_trial(self) -> bool:
        """True if a small array is copied and digested right on this device, with its driver and CuPy.

        Otherwise arrays go by the host, which is slower. Digests that differ from the host's would be worse: tasks
        would disagree about every item. Raises errors of the device itself.
        """
        wanted = numpy.arange(_CHECK_BYTES // 8, dtype=numpy.uint64) * numpy.uint64(0x9E3779B185EBCA87)
        found = numpy.zeros(_CHECK_BYTES, numpy.uint8)
        try:
            with self.on(self.new_stream()):
                copy = self.empty(wanted.nbytes)
                copied = self.fill_and_digest(copy, self.to_device(wanted), _CHECK_BLOCK)
                digests = self.queue_digests(copy, _CHECK_BLOCK)
                self.fetch(self.view(copy, wanted.dtype, wanted.shape, None), found)
                self.wait(self.record(self.current_stream()))
                taken = {copied(), digests()}
        except Exception as error:
            if device_error(error) is not None:
                raise
            log.exception("the trial of device %d failed, so its arrays go by the host", self._number)
            return False
        data = wanted.view(numpy.uint8)
        blocks = [data[at : at + _CHECK_BLOCK].data for at in range(0, _CHECK_BYTES, _CHECK_BLOCK)]
        if not numpy.array_equal(found, data) or taken != {b"".join(map(xxhash.xxh3_128_digest, blocks))}:
            log.error("device %d made a wrong copy or digest in its trial, so its arrays go by the host", self._number)
            return False
        return True

    def copy(self, array: Array) -> Array:
        with self._cupy.cuda.Device(self._number):
            # `array.copy` is a kernel, compiled for each dtype, which may write a bool of 2 as 1. This copies bytes if
            # it can.
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

    def queue_digests(self, array: Array, block_bytes: int) -> Callable[[], bytes]:
        return self._digests(array, block_bytes, 0)

    def _digests(self, array: Array, block_bytes: int, copy: int) -> Callable[[], bytes]:
        with self._cupy.cuda.Device(self._number):
            found = self._cupy.empty(
                (digest.count_blocks(array.nbytes, block_bytes) * digest.DIGEST_BYTES,), numpy.uint8
            )
            digest.launch_kernel(array.data.ptr, array.nbytes, block_bytes, found.data.ptr, self.current_stream(), copy)
        return partial(_fetch_bytes, found)

    def to_device(self, host: NDArray[Any]) -> Array:
        with self._cupy.cuda.Device(self._number):
            return self._cupy.array(host, copy=True, order="C")

    def upload(self, host: NDArray[Any]) -> Array:
        with self._cupy.cuda.Device(self._number):
            made = self._cupy.empty(host.shape, host.dtype)
            made.set(host)  # `cupy.array` would keep registered memory until its next call
            return made

    def fetch(self, array: Array, target: NDArray[numpy.uint8], begin: int = 0) -> None:
        if target.nbytes == array.nbytes:
            array.get(out=numpy.ndarray(array.shape, array.dtype, target.data), blocking=False)
            return
        elements = self.view(array, target.dtype, (array.nbytes,), array)
        elements[begin : begin + target.nbytes].get(out=target, blocking=False)

    def to_host(self, array: Array) -> NDArray[Any]:
        cupy, there = self._cupy, array.device
        with there:  # perhaps another device
            host = numpy.empty(array.shape, array.dtype)
            if array.size:
                whole = cupy.asarray(array, order="C")
                # Waits for earlier work by an event, which does not use the processor; the copy itself is short.
                event = cupy.cuda.Event(block=True, disable_timing=True)
                cupy.cuda.get_current_stream().record(event)
                event.synchronize()
                whole.get(out=host)  # without `out`, CuPy may choose memory of the device
            return host

    # -- memory that other processes can open -----------------------------------------------------

    @property
    def identity(self) -> bytes:
        if self._identity is None:
            runtime = self._cupy.cuda.runtime
            # CuPy ends the UUID at its first zero byte. And instances of a divided device (MIG) share a bus. So both.
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

    def _array_of(self, run: virtual.MappedMemory) -> Array:
        cuda = self._cupy.cuda
        memory = cuda.UnownedMemory(run.address, run.nbytes, run, self._number)
        return self._cupy.ndarray((run.nbytes,), numpy.uint8, cuda.MemoryPointer(memory, 0))

    def fill_and_digest(self, target: Array, source: Array, block_bytes: int) -> Callable[[], bytes]:
        if source.flags.c_contiguous and not source.data.ptr % digest.ALIGNMENT:
            return self._digests(source, block_bytes, target.data.ptr)
        with self._cupy.cuda.Device(self._number):
            self._cupy.ndarray(source.shape, source.dtype, target.data)[...] = source
        return self.queue_digests(target, block_bytes)

    def share(self, memory: Array) -> bytes:
        with self._cupy.cuda.Device(self._number):
            run: virtual.MappedMemory = memory.data.mem._owner
            return run.offer()

    def open(self, handle: bytes, nbytes: int) -> Array:
        with self._cupy.cuda.Device(self._number):
            self._cupy.cuda.runtime.memGetInfo()  # creates the device's context if there is none
            return self._array_of(virtual.open_memory(self._number, handle, nbytes))

    def register(self, memory: NDArray[numpy.uint8]) -> None:
        with self._cupy.cuda.Device(self._number):
            self._cupy.cuda.runtime.hostRegister(memory.ctypes.data, memory.nbytes, _REGISTER)

    def unregister(self, memory: NDArray[numpy.uint8]) -> None:
        with self._cupy.cuda.Device(self._number):
            self._cupy.cuda.runtime.hostUnregister(memory.ctypes.data)
