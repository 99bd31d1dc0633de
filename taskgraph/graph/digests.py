"""The digest of an encoded value.

Without buffers: xxh3-128 of the value (meta up to the trailer). With buffers: xxh3-128 of

    the value
    its length, and that of each buffer: 8 bytes each, little-endian
    the xxh3-128 of every block of every buffer, in order: 16 bytes each, big-endian as everywhere

A buffer's blocks have `BLOCK_BYTES` each, the last one what is left; an empty buffer has none. So the blocks of a value
can be digested in any order: by several threads while they copy them, or where an array lives. The lengths keep buffers
apart.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, Protocol

import xxhash

from taskgraph.graph import worksharing

__all__ = [
    "BLOCK_BYTES",
    "FillingBuffer",
    "StreamingDigest",
    "block_digests",
    "digest",
    "of_block_digests",
    "of_one_buffer",
    "without_buffers",
]

BLOCK_BYTES: Final = 1 << 20
"""Some 0.1 ms of copying and digesting: enough that it costs little to share blocks between threads, and so little that
no thread waits long for the last one; half and a quarter of it were no faster. Another size changes digests: raise
`version.PROTOCOL`, `transport.frames.PROTOCOL_VERSION` and the format of checkpoints."""

without_buffers: Final = xxhash.xxh3_128_digest
"""Returns the digest of a value that has no buffers."""


_pack_two: Final = struct.Struct("<2Q").pack


class FillingBuffer(Protocol):
    """A buffer that is filled while it is digested."""

    @property
    def nbytes(self) -> int: ...

    def digest(self, begin: int, end: int) -> bytes:
        """Returns the xxh3-128 of bytes `begin` to `end`. Call once for each block, in any order, from any thread."""


def digest(value: bytes | bytearray | memoryview, buffers: Sequence[memoryview | FillingBuffer]) -> bytes:
    """Returns the digest of a value: 16 bytes. Idle cores help with large values."""
    if not buffers:
        return without_buffers(value)
    sizes: list[int] = []
    for buffer in buffers:
        sizes.append(buffer.nbytes)  # noqa: PERF401 - a comprehension is a call before Python 3.12
    whole = _hash_head(value, sizes)
    if sum(sizes) >= worksharing.LEAST_BYTES:
        _digest_blocks_in_threads(whole, buffers)
        return whole.digest()
    for buffer in buffers:
        size = buffer.nbytes
        if size <= BLOCK_BYTES and isinstance(buffer, memoryview):
            if size:
                whole.update(xxhash.xxh3_128_digest(buffer))
        else:
            for begin in range(0, size, BLOCK_BYTES):
                whole.update(_digest_block(buffer, begin))
    return whole.digest()


def of_one_buffer(value: bytes, buffer: memoryview) -> bytes:
    """Returns the digest of a value with exactly one buffer. Faster than `digest` if the buffer is a single block."""
    size = buffer.nbytes
    if not 0 < size <= BLOCK_BYTES:
        return digest(value, (buffer,))
    return without_buffers(value + _pack_two(len(value), size) + without_buffers(buffer))


def of_block_digests(value: bytes | bytearray | memoryview, sizes: Sequence[int], blocks: bytes) -> bytes:
    """Returns the digest of a value from the digests of all blocks of its buffers, in order."""
    whole = _hash_head(value, sizes)
    whole.update(blocks)
    return whole.digest()


def block_digests(buffer: memoryview | FillingBuffer) -> bytes:
    """Returns the digests of the blocks of a buffer, in order, as `of_block_digests` takes them."""
    return b"".join([_digest_block(buffer, begin) for begin in range(0, buffer.nbytes, BLOCK_BYTES)])


def _digest_blocks_in_threads(whole: xxhash.xxh3_128, buffers: Sequence[memoryview | FillingBuffer]) -> None:
    """Adds the digests of all blocks, which threads share, to the whole digest."""
    blocks = [(buffer, begin) for buffer in buffers for begin in range(0, buffer.nbytes, BLOCK_BYTES)]
    digests = [b""] * len(blocks)

    def work(number: int) -> None:
        digests[number] = _digest_block(*blocks[number])

    worksharing.for_each(work, len(blocks))
    whole.update(b"".join(digests))


def _digest_block(buffer: memoryview | FillingBuffer, begin: int) -> bytes:
    if isinstance(buffer, memoryview):
        return xxhash.xxh3_128_digest(buffer[begin : begin + BLOCK_BYTES])
    end = begin + BLOCK_BYTES
    return buffer.digest(begin, end if end < buffer.nbytes else buffer.nbytes)


def _hash_head(value: bytes | bytearray | memoryview, sizes: Sequence[int]) -> xxhash.xxh3_128:
    """Begins a digest: with the value, its length, and those of its buffers."""
    whole = xxhash.xxh3_128(value)
    whole.update(struct.pack(f"<{len(sizes) + 1}Q", len(value), *sizes))
    return whole


class StreamingDigest:
    """Digests a value whose buffers arrive in pieces of any size."""

    __slots__ = ("_block_hash", "_block_left", "_sizes_left", "_value_hash")

    def __init__(self, value: bytes | memoryview, sizes: Sequence[int]) -> None:
        self._value_hash = _hash_head(value, sizes)
        self._block_hash = xxhash.xxh3_128()
        self._sizes_left = [size for size in reversed(sizes) if size]  # bytes to come of each buffer, the next one last
        self._block_left = self._next_block()  # bytes to come of the current block

    def _next_block(self) -> int:
        """Returns the size of the block that comes next; 0: all blocks have come."""
        return min(self._sizes_left[-1], BLOCK_BYTES) if self._sizes_left else 0

    def update(self, data: memoryview, /) -> None:
        """Hashes the next piece of the buffers. Raises ValueError if it ends beyond the last buffer."""
        at, end = 0, data.nbytes
        while at < end:
            if not self._block_left:
                raise ValueError(f"{end - at} bytes more than the value's buffers have")
            count = min(end - at, self._block_left)
            self._block_hash.update(data[at : at + count])
            at += count
            self._block_left -= count
            self._sizes_left[-1] -= count
            if not self._block_left:
                self._value_hash.update(self._block_hash.digest())
                self._block_hash.reset()
                if not self._sizes_left[-1]:
                    self._sizes_left.pop()
                self._block_left = self._next_block()

    def digest(self) -> bytes:
        """Returns the digest of the whole value, once all bytes arrived."""
        return self._value_hash.digest()
