"""Computes the xxh3-128 of blocks of a device's memory there: the kernel is in `digest.cu`, CuPy launches it.

One launch digests all blocks and reads each byte once, also if it copies them. Written from the specification of XXH3
(https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, version 0.1.1): seed 0, the default secret, canonical
form, as `xxhash.xxh3_128_digest` on the host.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy

__all__ = [
    "ALIGNMENT",
    "COPIES",
    "DIGESTS",
    "DIGEST_BYTES",
    "OPTIONS",
    "THREADS",
    "count_blocks",
    "kernel_source",
    "launch_kernel",
]

DIGESTS: Final = "digest_blocks"
COPIES: Final = "copy_blocks"
"""The kernels' names."""
THREADS: Final = 288
"""Threads of a thread block; the kernel has the same number."""
OPTIONS: Final = ("-std=c++17",)
ALIGNMENT: Final = 16
"""Of the memory and of every block in it, bytes."""
DIGEST_BYTES: Final = 16


def kernel_source() -> str:
    """Returns the kernels' source, in CUDA C++. It includes no headers, since NVRTC has none."""
    return Path(__file__).with_name("digest.cu").read_text("utf-8")


@cache
def _kernel(name: str) -> Any:
    return _module().get_function(name)


@cache
def _module() -> Any:
    """Returns the kernels: compiled at the first launch on each device; CuPy keeps them on disk for other processes."""
    import cupy

    return cupy.RawModule(code=kernel_source(), options=OPTIONS)


def count_blocks(nbytes: int, block_bytes: int) -> int:
    """Returns the number of blocks in `nbytes`; the last one may be shorter."""
    return -(-nbytes // block_bytes)


def launch_kernel(data: int, nbytes: int, block_bytes: int, digests: int, stream: Any, copy: int = 0) -> None:
    """Queues the digests of the blocks of `nbytes` at the address `data`, in order, on a stream of the current device.

    Args:
        digests: the address for the digests, `DIGEST_BYTES` for each block, aligned to 8.
        stream: a `cupy.cuda.Stream` or `ExternalStream`. Keep all memory until the stream has passed the launch.
        copy: an address to copy the bytes to in the same pass; 0: no copy.

    Raises:
        ValueError: memory or block size is not aligned to `ALIGNMENT`, or a block has 4 GiB or more.
    """
    if data % ALIGNMENT or copy % ALIGNMENT or block_bytes % ALIGNMENT or not 0 < block_bytes < 1 << 32:
        raise ValueError(f"blocks of {block_bytes} bytes at {data:#x}: not aligned to {ALIGNMENT}, or too large")
    if blocks := count_blocks(nbytes, block_bytes):
        given = (data, nbytes, block_bytes, digests, copy) if copy else (data, nbytes, block_bytes, digests)
        arguments = tuple(map(numpy.uint64, given))  # sizes as the kernel declares them
        with stream:
            _kernel(COPIES if copy else DIGESTS)((blocks,), (THREADS,), arguments)
