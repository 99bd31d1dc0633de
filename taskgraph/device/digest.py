"""The xxh3-128 of blocks of memory on a device, taken there: `digest.cu`, and how CuPy launches it.

Every block in one launch, and each byte is read once. Written from the specification of XXH3
(https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, version 0.1.1): seed 0, the default secret, canonical
form, as `xxhash.xxh3_128_digest` on the host.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy

__all__ = ["ALIGNMENT", "DIGEST_BYTES", "NAME", "OPTIONS", "THREADS", "count", "launch", "source"]

NAME: Final = "digest_blocks"
THREADS: Final = 288
"""Of a thread block, as the kernel has it."""
OPTIONS: Final = ("-std=c++17",)
ALIGNMENT: Final = 16
"""Bytes: of the memory and of every block in it."""
DIGEST_BYTES: Final = 16


def source() -> str:
    """The kernel, in CUDA C++. It includes nothing, so NVRTC needs no headers."""
    return Path(__file__).with_name("digest.cu").read_text("utf-8")


@cache
def _kernel() -> Any:
    """Compiled at its first launch on each device; CuPy keeps the result on disk for other processes."""
    import cupy

    return cupy.RawKernel(source(), NAME, options=OPTIONS)


def count(nbytes: int, block_bytes: int) -> int:
    """How many blocks that many bytes have; the last one may be shorter."""
    return -(-nbytes // block_bytes)


def launch(data: int, nbytes: int, block_bytes: int, digests: int, stream: Any) -> None:
    """Queues the digests of the blocks of `nbytes` at the address `data`, in order, on a stream of the current device.

    Args:
        digests: where they go: memory of the device, `DIGEST_BYTES` for each block, aligned to 8.
        stream: a `cupy.cuda.Stream` or `ExternalStream`. Both memories must stay until it came past the launch.

    Raises:
        ValueError: the memory, or a block in it, is not aligned to `ALIGNMENT`; or a block has 4 GiB or more.
    """
    if data % ALIGNMENT or block_bytes % ALIGNMENT or not 0 < block_bytes < 1 << 32:
        raise ValueError(f"blocks of {block_bytes} bytes at {data:#x}: not aligned to {ALIGNMENT}, or too large")
    if blocks := count(nbytes, block_bytes):
        arguments = tuple(map(numpy.uint64, (data, nbytes, block_bytes, digests)))  # CuPy passes them as they are
        with stream:
            _kernel()((blocks,), (THREADS,), arguments)
