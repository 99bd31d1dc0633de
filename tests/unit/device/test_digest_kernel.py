"""The digest kernel, its own source, compiled for the CPU and run by `emulation.cpp`; and launched as CuPy would."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import xxhash

from taskgraph.device import digest as subject
from taskgraph.graph.digests import BLOCK_BYTES

KERNEL = Path(subject.__file__).with_name("digest.cu")
EMULATION = Path(__file__).with_name("emulation.cpp")
GXX = shutil.which("g++")
KIB, MIB = 1 << 10, 1 << 20
FIRST_READY, LAST_READY, SOME_READY = 0, 1, 2  # and any more than that: seeds of other orders

Digests = Callable[..., list[bytes]]

needs_gxx = pytest.mark.skipif(
    GXX is None or sys.platform != "linux", reason="the kernel is emulated by what g++ makes on Linux"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    built = tmp_path_factory.mktemp("kernel") / "kernel.so"
    trapping = ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
    quiet = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-fno-strict-aliasing", *trapping, *quiet]
    command = [str(GXX), *options, f'-DKERNEL="{KERNEL}"', "-o", str(built), str(EMULATION)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    library = ctypes.CDLL(str(built))
    library.guarded.restype = ctypes.c_void_p
    library.guarded.argtypes = [ctypes.c_size_t, ctypes.c_int]
    library.release.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.launch.argtypes = [
        *(ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_uint, ctypes.c_uint, ctypes.c_uint64),
    ]
    return library


class Stream:
    def __init__(self) -> None:
        self.current = False

    def __enter__(self) -> Stream:
        self.current = True
        return self

    def __exit__(self, *_: object) -> None:
        self.current = False


@pytest.fixture(params=["digested", "copied"])
def digests(request: pytest.FixtureRequest, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Digests]:
    """The digests of blocks of some data, by `launch`: CuPy's launching is replaced by the emulation's.

    Copied, too, in half of the tests; then the digests are right where the copy is.
    """
    stream, order, launches, copies = Stream(), FIRST_READY, 0, request.param == "copied"

    class RawModule:
        def __init__(self, *, code: str, options: tuple[str, ...] = ()) -> None:
            assert code == KERNEL.read_text("utf-8")

        def get_function(self, name: str) -> Any:
            return {("digest_blocks", False): digest, ("copy_blocks", True): digest}[name, copies]

    def digest(grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        nonlocal launches
        assert stream.current
        assert (len(grid), len(block)) == (1, 1)
        assert all(isinstance(arg, numpy.uint64) for arg in args), "of the sizes of the kernel's parameters"
        launches += 1
        assert len(args) == 4 + copies
        given = (*map(int, args), 0)[:5]
        result = library.launch(*given, grid[0], block[0], order)
        assert result != -2, "more threads than the kernel says it has"
        assert result != -1, "threads wait for others that ended or wait for something else"
        assert not result, f"a thread was ended by signal {result}: it touched what is not its, or is not aligned"

    @contextmanager
    def memory(nbytes: int, at_end: bool) -> Iterator[int]:
        begin = library.guarded(nbytes, at_end)
        try:
            yield begin
        finally:
            library.release(begin, nbytes)

    def digests(data: bytes, block_bytes: int = BLOCK_BYTES, in_order: int = FIRST_READY, end: bool = True) -> Any:
        nonlocal order, launches
        order, launches = in_order, 0
        count = subject.count_blocks(len(data), block_bytes)
        size = len(data)
        with memory(size, end) as begin, memory(size, end) as copy, memory(count * subject.DIGEST_BYTES, end) as out:
            ctypes.memmove(begin, data, size)
            subject.launch_kernel(begin, size, block_bytes, out, stream, copy if copies else 0)
            assert ctypes.string_at(begin, size) == data
            assert not copies or ctypes.string_at(copy, size) == data
            found = ctypes.string_at(out, count * subject.DIGEST_BYTES)
        assert launches == (1 if data else 0)
        return [found[at : at + subject.DIGEST_BYTES] for at in range(0, len(found), subject.DIGEST_BYTES)]

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(RawModule=RawModule))
    for cached in (subject._kernel, subject._module):
        cached.cache_clear()
    yield digests
    for cached in (subject._kernel, subject._module):
        cached.cache_clear()


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(20).randbytes(3 * MIB + 777)


def expected(data: bytes, block_bytes: int = BLOCK_BYTES) -> list[bytes]:
    return [xxhash.xxh3_128_digest(data[at : at + block_bytes]) for at in range(0, len(data), block_bytes)]


@needs_gxx
def test_short_buffers(digests: Digests, data: bytes) -> None:
    """All lengths that the specification has algorithms of their own for, and of each kind of last round."""
    ends = [n + off for n in range(0, 3 * KIB, 64) for off in (-1, 0, 1)]
    lengths = {*range(300), *(n for n in ends if n > 0), *range(300, 3 * KIB, 31)}
    wrong = [n for n in sorted(lengths) if digests(data[:n]) != expected(data[:n])]
    assert not wrong


LENGTHS = [
    *(n * KIB + off for n in (3, 4, 5, 31, 32, 33, 36, 63, 64, 65, 96, 97) for off in (-1, 0, 1)),
    *(4095 + 64, 64 * KIB + 63, 64 * KIB + 65, 777_777),
    *(MIB - 1, MIB, MIB + 1, 3 * MIB + 777),
]


@needs_gxx
@pytest.mark.parametrize("order", [FIRST_READY, LAST_READY, SOME_READY])
def test_long_buffers(digests: Digests, data: bytes, order: int) -> None:
    """Lengths around batches of rounds, and around blocks."""
    wrong = [n for n in LENGTHS if digests(data[:n], in_order=order) != expected(data[:n])]
    assert not wrong


@needs_gxx
def test_bounds_of_memory(digests: Digests, data: bytes) -> None:
    """Behind it and before it is what nobody may touch: at its end in the tests above, at its begin here."""
    for length in (1, 3, 8, 16, 17, 128, 129, 240, 241, 256, 1024, 1025, 33 * KIB + 1, MIB, MIB + 1):
        part = data[-length:]
        assert digests(part, end=False) == expected(part)


@needs_gxx
@pytest.mark.parametrize("block_bytes", [16, 128, 240, 256, 1040, 33 * KIB])
def test_block_sizes(digests: Digests, data: bytes, block_bytes: int) -> None:
    for tail in (0, 1, 13, 16, 17, 128, 129, 240, 241):
        part = data[: 5 * block_bytes + tail]
        assert digests(part, block_bytes) == expected(part, block_bytes)


@needs_gxx
@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_equal_bytes(digests: Digests, byte: int) -> None:
    """Sums without carries, and with all of them."""
    part = bytes([byte]) * (MIB + 100)
    assert digests(part) == expected(part)


@needs_gxx
def test_empty_buffer(digests: Digests) -> None:
    assert digests(b"") == []


@pytest.mark.parametrize(
    "data, block_bytes, copy",
    [
        *((8, MIB, 0), (4096 + 1, MIB, 0), (4096, MIB + 8, 0), (4096, 0, 0), (4096, 1 << 32, 0)),
        *((4096, MIB, 8), (4096, MIB, 8192 + 4)),
    ],
)
def test_unsupported_sizes(data: int, block_bytes: int, copy: int) -> None:
    with pytest.raises(ValueError, match="not aligned to 16, or too large"):
        subject.launch_kernel(data, 4096, block_bytes, 0, Stream(), copy)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90"])
def test_compiles_without_spills(architecture: str, tmp_path: Path) -> None:
    nvcc = str(shutil.which("nvcc"))
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    if architecture not in known:
        pytest.skip(f"this nvcc is too new or too old for {architecture}")
    options = [*subject.OPTIONS, f"-arch={architecture}", "-cubin", "-Werror=all-warnings", "-Xptxas=-v"]
    command = [nvcc, *options, "-o", str(tmp_path / "digest.cubin"), str(KERNEL)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    report = done.stdout + done.stderr
    assert report.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") >= 1
    assert report.count("bytes spill stores") == report.count(" 0 bytes spill stores"), report


def test_the_source_needs_no_headers() -> None:
    """NVRTC has none, unless somebody installed CUDA's and says where they are."""
    assert not [line for line in subject.kernel_source().splitlines() if line.lstrip().startswith("#include")]
