"""Memory of a device that other processes map: by a driver's stand-in, between real processes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taskgraph.device import handles, virtual
from taskgraph.protocol.deviceloss import device_error

GXX = shutil.which("g++")
MIB = 1 << 20

pytestmark = pytest.mark.skipif(
    GXX is None or sys.platform != "linux", reason="the driver's stand-in is made by g++, of Linux's memory"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("driver") / "libcuda.so"
    source = Path(__file__).with_name("fakecuda.cpp")
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    done = subprocess.run([str(GXX), *options, "-o", str(built), str(source)], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return built


@pytest.fixture
def driver(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(virtual, "_LIBRARY", str(library))
    virtual._driver.cache_clear()
    loaded = ctypes.CDLL(str(library))
    yield loaded
    gc.collect()
    handles.close_withdrawn()
    assert loaded.live() == 0
    virtual._driver.cache_clear()


def write(run: virtual.MappedMemory, data: bytes) -> None:
    ctypes.memmove(run.address, data, len(data))


def read(run: virtual.MappedMemory, nbytes: int) -> bytes:
    return ctypes.string_at(run.address, nbytes)


OTHER = """
import ctypes, sys
from taskgraph.device import virtual

virtual._LIBRARY = sys.argv[1]
run = virtual.open_memory(0, bytes.fromhex(sys.argv[2]), int(sys.argv[3]))
print(ctypes.string_at(run.address, 5), flush=True)
if sys.argv[4] == "writes":
    ctypes.memset(run.address, 0, 1)
    print("written")
elif sys.argv[4] == "lends on":
    print(run.offer().hex(), flush=True)
    input()
"""


def other(library: Path, handle: bytes, nbytes: int, does: str) -> list[str]:
    return [sys.executable, "-c", OTHER, str(library), handle.hex(), str(nbytes), does]


def test_allocate_and_free(driver: Any) -> None:
    run = virtual.allocate(0, 3 * MIB + 5)
    assert run.nbytes == 3 * MIB + 5 and driver.live() == 2
    write(run, b"x" * run.nbytes)
    assert read(run, run.nbytes) == b"x" * run.nbytes
    del run
    assert driver.live() == 0


def test_another_process_reads_it(driver: Any, library: Path) -> None:
    run = virtual.allocate(0, 2 * MIB)
    write(run, b"there")
    handle = run.offer()
    assert run.offer() == handle
    done = subprocess.run(other(library, handle, run.nbytes, "reads"), capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("b'there'\n", "")


def test_opened_memory_is_read_only(driver: Any, library: Path) -> None:
    run = virtual.allocate(0, 2 * MIB)
    write(run, b"there")
    done = subprocess.run(other(library, run.offer(), run.nbytes, "writes"), capture_output=True, text=True, timeout=60)
    assert done.stdout == "b'there'\n" and done.returncode < 0
    assert read(run, 5) == b"there"


def test_open_memory_is_lent_on(driver: Any, library: Path) -> None:
    run = virtual.allocate(0, 2 * MIB)
    write(run, b"there")
    command = other(library, run.offer(), run.nbytes, "lends on")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "b'there'\n"
        handle = bytes.fromhex(process.stdout.readline())
        del run
        handles.close_withdrawn()
        again = virtual.open_memory(0, handle, 2 * MIB)
        process.kill()
        process.wait()
        assert read(again, 5) == b"there", "of two processes that had it neither has it now"


def test_open_of_freed_memory(driver: Any) -> None:
    run = virtual.allocate(0, 2 * MIB)
    handle = run.offer()
    del run
    with pytest.raises(OSError, match="withdrawn"):
        virtual.open_memory(0, handle, 2 * MIB)


def test_allocate_too_much(driver: Any) -> None:
    with pytest.raises(virtual.DriverError, match="cuMemCreate") as refused:
        virtual.allocate(0, 1 << 40)
    assert refused.value.status == virtual.OUT_OF_MEMORY
    assert device_error(refused.value) is refused.value, "a task that meets it is failed over"


def files() -> set[tuple[str, str]]:
    """Number and file."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def leaked(there: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """What is open now and was not there, but for two sockets: threads of gRPC that other tests left may open some."""
    new = files() - there
    sockets = {(number, file) for number, file in new if file.startswith("socket:")}
    return new if len(sockets) > 2 else new - sockets


def test_failed_allocation_leaves_nothing(driver: Any) -> None:
    kept = virtual.allocate(0, 2 * MIB)
    handle, before, there = kept.offer(), driver.live(), files()
    for _ in range(10):
        driver.fail(1)
        with pytest.raises(virtual.DriverError, match="cuMemSetAccess: CUDA error 801"):
            virtual.open_memory(0, handle, 2 * MIB)
        with pytest.raises(virtual.DriverError, match="cuMemMap"):
            virtual.open_memory(0, handle, 4 * MIB)  # it is less
        gc.collect()
    assert driver.live() == before and not leaked(there)


@pytest.mark.parametrize("name", ["libthere-is-none.so", "libc.so.6"])
def test_driver_without_sharing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "_LIBRARY", name)
    virtual._driver.cache_clear()
    with pytest.raises(OSError, match=r"there-is-none|this driver has no cuMem"):
        virtual.allocate(0, MIB)
    virtual._driver.cache_clear()


@pytest.mark.parametrize("whose", ["own", "another's"])
def test_failed_offer_closes_descriptor(driver: Any, monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
    virtual.allocate(0, 2 * MIB).offer()  # whatever a process has from the first one on
    handles.close_withdrawn()
    there, offer = files(), handles.offer

    def cannot(fd: int) -> bytes:
        raise OSError("no thread can be started")

    for _ in range(10):
        monkeypatch.setattr(handles, "offer", offer)
        own = virtual.allocate(0, 2 * MIB)
        run = virtual.open_memory(0, own.offer(), 2 * MIB) if whose == "another's" else own
        monkeypatch.setattr(handles, "offer", cannot)
        with pytest.raises(OSError):
            run.offer()
        del run, own
    gc.collect()
    handles.close_withdrawn()
    assert not leaked(there)


async def test_event_loop_does_not_unmap(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call, called = virtual._call_driver, []

    def noted(name: str, *arguments: Any) -> None:
        called.append((name, threading.get_ident()))
        call(name, *arguments)

    run = virtual.allocate(0, 2 * MIB)
    monkeypatch.setattr(virtual, "_call_driver", noted)
    del run
    async with asyncio.timeout(30):
        while driver.live():  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0.001)
    assert [name for name, _ in called] == ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]
    assert threading.get_ident() not in {thread for _, thread in called}
