"""Memory of a CUDA device that other processes can map, by the driver's virtual memory management.

Such memory lives as long as any process maps it, or has its descriptor (CUDA driver API, `cuMemRelease`). Memory of
`cudaMalloc` that is opened by `cudaIpcOpenMemHandle` ends with the process that allocated it, even if others read it.

Processes send each other a file descriptor (`handles`). A process maps memory of another one read-only; a write there
is an illegal access, which CUDA reports.

CuPy lacks these calls of the driver, so this module makes them by ctypes.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

from taskgraph.device import handles
from taskgraph.device.afterwards import call_soon, on_a_loop

__all__ = ["OUT_OF_MEMORY", "DriverError", "MappedMemory", "allocate", "open_memory"]

log = logging.getLogger("taskgraph.devices")

OUT_OF_MEMORY: Final = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""
_LIBRARY: Final = "libcuda.so.1"
_PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED: memory of a device
_DESCRIPTOR: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ: Final = 1  # CU_MEM_ACCESS_FLAGS_PROT_READ
_READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE

_int, _size, _address, _handle, _flags = (
    ctypes.c_int,
    ctypes.c_size_t,
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.c_uint64,
)


class _Location(ctypes.Structure):  # CUmemLocation
    _fields_ = (("type", _int), ("id", _int))


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", _int),
        ("handle_types", _int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", _int))


_CALLS: Final = {
    "cuMemGetAllocationGranularity": (ctypes.POINTER(_size), ctypes.POINTER(_Properties), _int),
    "cuMemCreate": (ctypes.POINTER(_handle), _size, ctypes.POINTER(_Properties), _flags),
    "cuMemAddressReserve": (ctypes.POINTER(_address), _size, _size, _address, _flags),
    "cuMemMap": (_address, _size, _size, _handle, _flags),
    "cuMemSetAccess": (_address, _size, ctypes.POINTER(_Access), _size),
    "cuMemExportToShareableHandle": (ctypes.POINTER(_int), _handle, _int, _flags),
    "cuMemImportFromShareableHandle": (ctypes.POINTER(_handle), ctypes.c_void_p, _int),
    "cuMemUnmap": (_address, _size),
    "cuMemAddressFree": (_address, _size),
    "cuMemRelease": (_handle,),
}


class DriverError(RuntimeError):
    """A call of the CUDA driver failed.

    Attributes:
        status: a CUresult.
    """

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call}: CUDA error {status}")
        self.status = status


@cache
def _driver() -> Any:
    """Loads the CUDA driver's library, and sets the types of its functions. OSError: none from CUDA 10.2 or later."""
    library = ctypes.CDLL(_LIBRARY)
    for name, types in _CALLS.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise OSError(f"this driver has no {name}") from None
        function.argtypes, function.restype = types, _int
    return library


def _call_driver(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise DriverError(name, status)


def _properties(device: int) -> _Properties:
    return _Properties(_PINNED, _DESCRIPTOR, _Location(_ON_DEVICE, device), None, (ctypes.c_ubyte * 8)())


def _mapped_size(device: int, nbytes: int) -> int:
    grain = _size()
    _call_driver("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(_properties(device)), 0)
    return -(-nbytes // grain.value) * grain.value


class MappedMemory:
    """Memory of a device, mapped in this process as long as this object lives.

    Drop the last reference only when the device is done with the memory.

    Attributes:
        address: of the first byte.
        nbytes: the requested size; more may be mapped.
    """

    __slots__ = ("__weakref__", "_descriptor", "_handle", "_offered", "_size", "address", "nbytes")

    def __init__(self, device: int, handle: int, nbytes: int, access: int, descriptor: int | None) -> None:
        """
        Args:
            handle: the driver's; released with this object, also if this raises.
            descriptor: the file by which the memory came; closed with this object, also if this raises.
        """
        self.nbytes = nbytes
        self.address = 0
        self._handle = handle
        self._descriptor = descriptor
        self._offered: bytes | None = None
        self._size = 0
        size = _mapped_size(device, nbytes)
        at = _address()
        _call_driver("cuMemAddressReserve", ctypes.byref(at), size, 0, 0, 0)
        try:
            _call_driver("cuMemMap", at, size, 0, handle, 0)
        except BaseException:
            _call_driver("cuMemAddressFree", at, size)
            raise
        self.address, self._size = at.value, size
        _call_driver("cuMemSetAccess", at, size, ctypes.byref(_Access(_Location(_ON_DEVICE, device), access)), 1)

    def offer(self) -> bytes:
        """Returns `HANDLE_BYTES` by which other processes open the memory while this object lives."""
        if self._offered is None:
            if self._descriptor is None:
                found = _int()
                _call_driver("cuMemExportToShareableHandle", ctypes.byref(found), self._handle, _DESCRIPTOR, 0)
                self._descriptor = found.value
            self._offered = handles.offer(self._descriptor)
            self._descriptor = None
        return self._offered

    def __del__(
        self, is_finalizing: Callable[[], bool] = sys.is_finalizing, here: Callable[[], bool] = on_a_loop
    ) -> None:
        if is_finalizing():
            return  # the driver may be gone already; the process frees everything
        if self._offered is not None:
            handles.withdraw(self._offered)
        release = partial(_release, self.address, self._size, self._handle, self._descriptor)
        if here():
            call_soon(release)
        else:
            release()


def _release(address: int, size: int, handle: int, descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)
    try:
        if size:
            _call_driver("cuMemUnmap", address, size)
            _call_driver("cuMemAddressFree", address, size)
        _call_driver("cuMemRelease", handle)
    except DriverError as error:  # usually the device is lost
        log.warning("%d bytes of a device cannot be freed: %s", size, error)


def allocate(device: int, nbytes: int) -> MappedMemory:
    """Allocates memory of a device that has a CUDA context in this process.

    Raises:
        DriverError: the device has too little memory (`OUT_OF_MEMORY`), or lacks the feature.
        OSError: there is no driver, or it lacks these calls.
    """
    made = _handle()
    size = _mapped_size(device, nbytes)
    _call_driver("cuMemCreate", ctypes.byref(made), size, ctypes.byref(_properties(device)), 0)
    return MappedMemory(device, made.value, nbytes, _READ_WRITE, None)


def open_memory(device: int, offered: bytes, nbytes: int) -> MappedMemory:
    """Maps memory that a process offered (`MappedMemory.offer`), for reading only.

    Raises:
        DriverError: it is not memory of this device.
        OSError: the process that offered it ended, withdrew it, or is in another container.
    """
    descriptor = handles.fetch(offered)
    found = _handle()
    try:
        _call_driver("cuMemImportFromShareableHandle", ctypes.byref(found), ctypes.c_void_p(descriptor), _DESCRIPTOR)
    except BaseException:
        os.close(descriptor)
        raise
    return MappedMemory(device, found.value, nbytes, _READ, descriptor)
