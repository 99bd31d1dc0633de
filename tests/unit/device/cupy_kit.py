"""As much of CuPy as `taskgraph.device.cuda` asks for, on a device in software."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import xxhash
from softdevice import SoftArray, SoftDevice, SoftEvent, SoftStream

from taskgraph.device import virtual


def launch_on(soft: SoftDevice) -> Callable[..., None]:
    """In place of `taskgraph.device.digest.launch_kernel`, on addresses as the stand-in has them."""

    def launch(data: Any, nbytes: int, block_bytes: int, digests: Any, stream: Any, copy: Any = 0) -> None:
        assert data.nbytes == nbytes and stream.of is soft.current_stream()
        source, target = data.elements.reshape(-1).view(np.uint8), digests.elements.reshape(-1, 16)

        def take() -> None:
            if isinstance(copy, SoftArray):
                copy.elements.reshape(-1).view(np.uint8)[:nbytes] = source
            for number, row in enumerate(target):
                block = source[number * block_bytes : (number + 1) * block_bytes]
                row[:] = np.frombuffer(xxhash.xxh3_128_digest(block.data), np.uint8)

        with stream:
            soft._do(take)

    return launch


class RunOn:
    """As `taskgraph.device.virtual.MappedMemory`."""

    def __init__(self, soft: SoftDevice, array: SoftArray) -> None:
        self.address = array
        self.nbytes = array.nbytes
        self._soft = soft

    def offer(self) -> bytes:
        return self._soft.share(self.address)


def virtual_on(soft: SoftDevice, cupy: Any) -> dict[str, Callable[..., RunOn]]:
    """In place of functions of `taskgraph.device.virtual`."""

    def allocate(device: int, nbytes: int) -> RunOn:
        if nbytes > cupy.cuda.runtime.free_bytes:
            raise virtual.DriverError("cuMemCreate", virtual.OUT_OF_MEMORY)
        return RunOn(soft, soft.allocate(nbytes))

    def open_memory(device: int, offered: bytes, nbytes: int) -> RunOn:
        return RunOn(soft, soft.open(offered, nbytes))

    return {"allocate": allocate, "open_memory": open_memory}


def stand_in(soft: SoftDevice) -> Any:
    """A module in place of `cupy`, whose arrays are its `ndarray`. Its calls take what CuPy's take, and no more."""

    entered: list[Stream] = []  # of the test's thread, as is `current`
    current: list[Stream] = []

    class Event:
        """As CuPy's, it is destroyed by its finalizer, also where that runs before those of others that have it."""

        def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
            assert block and disable_timing, "a wait that spins"
            self.place: SoftEvent | None = None
            self.captured = False

        @property
        def ptr(self) -> Event:
            return self

        def __del__(self) -> None:
            if self.place is not None:
                self.place.destroyed = True

        @property
        def done(self) -> bool:
            assert self.place is not None
            return soft.has_passed(self.place)

        def synchronize(self) -> None:
            assert self.place is not None
            soft.wait(self.place)

    class Stream:
        """The same."""

        destroyed = False

        def __init__(self, of: SoftStream | None = None) -> None:
            self.of = of or soft.new_stream()

        def __del__(self) -> None:
            self.destroyed = True

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and self.of is other.of

        def __hash__(self) -> int:
            return hash(self.of)

        @classmethod
        def from_external(cls, other: Stream) -> Stream:
            return cls(other.of)

        def use(self) -> Stream:
            soft.use(self.of)
            current[:] = [self]
            return self

        def __enter__(self) -> Stream:
            entered.append(self)
            return self.use()

        def __exit__(self, *_: object) -> None:
            entered.pop()  # CuPy goes back to what was entered before, whatever was in use, and whose turn it is
            (entered[-1] if entered else Stream(soft.default)).use()

        def record(self, event: Event) -> Event:
            if self.destroyed:
                soft.misuses.append("a stream was used whose finalizer ran")
            event.captured = bool(self.of.captured_in)
            event.place = None if event.captured else soft.record(self.of)
            return event

        def is_capturing(self) -> bool:
            return bool(self.of.captured_in)

        def wait_event(self, event: Event) -> None:
            if self.destroyed:
                soft.misuses.append("a stream was used whose finalizer ran")
            assert event.place is not None
            soft.follow(self.of, event.place)

    class Device:
        def __init__(self, number: int) -> None:
            assert number == 0

        id = 0

        def use(self) -> Device:
            return self

        def __enter__(self) -> Device:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def copy_elements(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
        """A kernel, which has a bool of 2 in a register of 1."""
        np.copyto(target, source.view(np.uint8) != 0 if source.dtype == bool else source)

    class CupyArray(SoftArray):
        def __new__(cls, *args: Any) -> Any:
            if isinstance(args[0], SoftDevice):
                return object.__new__(cls)
            shape, dtype, pointer = args
            return soft.view(pointer.array, np.dtype(dtype), shape, pointer.owner or pointer.array)

        def __init__(self, *args: Any) -> None:
            if isinstance(args[0], SoftDevice):
                super().__init__(*args)

        @property
        def device(self) -> Any:
            return Device(0)

        @property
        def data(self) -> Any:
            return SimpleNamespace(ptr=self, array=self, owner=self, mem=SimpleNamespace(_owner=self._owner))

        @property
        def flags(self) -> Any:
            return self.elements.flags

        def __mod__(self, alignment: int) -> int:
            """Of an array that stands for its address."""
            return int(self.elements.ctypes.data % alignment)

        def __setitem__(self, key: Any, value: Any) -> None:
            assert key is ... and value.shape == self.shape and value.dtype == self.dtype
            source, target = value.elements, self.elements
            if source.flags.c_contiguous and target.flags.c_contiguous:
                source, target = (elements.reshape(-1).view(np.uint8) for elements in (source, target))
                soft._do(lambda: np.copyto(target, source))
            else:
                soft._do(lambda: copy_elements(source, target))

        def copy(self, order: str = "C") -> Any:
            assert order == "C"
            made = soft._new(self.shape, self.dtype)
            source, target = self.elements, made.elements
            soft._do(lambda: copy_elements(source, target))
            return made

        def get(self, out: Any = None, blocking: bool = True) -> Any:
            assert out is not None and out.shape == self.shape and out.dtype == self.dtype
            soft.fetch(self, out.reshape(-1).view(np.uint8))
            if blocking:
                soft.wait(soft.record(soft.current_stream()))
            return out

        def set(self, arr: Any) -> None:
            """As CuPy's, from page-locked memory: it is read when the stream comes to it."""
            assert arr.shape == self.shape and arr.dtype == self.dtype and arr.flags.c_contiguous
            made = soft.upload(arr)
            target, source = self.elements, made.elements
            soft._do(lambda: np.copyto(target, source))

    def get_current_stream(device: int = 0) -> Stream:
        if not current or current[0].of is not soft.current_stream():
            current[:] = [Stream(soft.current_stream())]
        return current[0]

    def host_memory(ptr: int, size: int) -> Any:
        return np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(ptr))

    def asarray(data: Any, order: str = "C") -> Any:
        if not isinstance(data, CupyArray):
            return soft.to_device(np.asarray(data))
        return data if data.elements.flags.c_contiguous else soft.copy(data)

    class Runtime:
        """Where CuPy has addresses this has arrays."""

        free_bytes = 1 << 30

        def getDeviceProperties(self, number: int) -> dict[str, Any]:
            assert number == 0
            return {"uuid": soft.identity.partition(b"\0")[0]}  # as a string of C's

        def deviceGetPCIBusId(self, number: int) -> str:
            assert number == 0
            return "0000:65:00.0"

        def memGetInfo(self) -> tuple[int, int]:
            return self.free_bytes, 1 << 30

        def __init__(self) -> None:
            self._registered: dict[int, Any] = {}

        def hostRegister(self, ptr: int, size: int, flags: int) -> None:
            memory = host_memory(ptr, size)
            soft.register(memory)
            self._registered[ptr] = memory

        def eventQuery(self, event: Event) -> int:
            """Raises nothing, whatever it is."""
            return 907 if event.captured else 0 if event.done else 600

        def hostUnregister(self, ptr: int) -> None:
            soft.unregister(self._registered.pop(ptr))

    runtime = Runtime()
    module_pool = SimpleNamespace(free_all_blocks=lambda: setattr(runtime, "free_bytes", 1 << 30))

    def empty(shape: tuple[int, ...], dtype: Any) -> Any:
        return soft._new(shape, dtype)

    soft.array_type = CupyArray
    module: Any = ModuleType("cupy")
    module.ndarray = CupyArray
    module.asarray = asarray
    module.empty = empty
    module.array = lambda data, copy, order: soft.to_device(data)
    module.get_default_memory_pool = lambda: module_pool
    module.cuda = SimpleNamespace(
        runtime=runtime,
        Device=Device,
        Event=Event,
        Stream=Stream,
        UnownedMemory=lambda pointer, size, owner, device: SimpleNamespace(array=pointer, owner=owner),
        MemoryPointer=lambda memory, offset: memory,
        get_current_stream=get_current_stream,
    )
    return module
