"""The digest kernel on a device: the same digests as on the host, and behind what its stream does."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import xxhash

from taskgraph.device import digest
from taskgraph.device.cuda import device_count
from taskgraph.graph.digests import BLOCK_BYTES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(device_count() == 0, reason="no CUDA device")]


def on_device(data: Any, nbytes: int, stream: Any) -> list[bytes]:
    import cupy

    count = digest.count_blocks(nbytes, BLOCK_BYTES)
    with stream:
        found = cupy.full(max(count, 1) * digest.DIGEST_BYTES, 0xDD, dtype=cupy.uint8)
        digest.launch_kernel(data.data.ptr, nbytes, BLOCK_BYTES, found.data.ptr, stream)
        text = found.get().tobytes()
    return [text[at : at + digest.DIGEST_BYTES] for at in range(0, count * digest.DIGEST_BYTES, digest.DIGEST_BYTES)]


def on_host(data: bytes) -> list[bytes]:
    return [xxhash.xxh3_128_digest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]


def test_all_lengths_as_on_the_host() -> None:
    import cupy

    data = numpy.random.default_rng(20).bytes(67 * BLOCK_BYTES)
    there = cupy.asarray(numpy.frombuffer(data, dtype=numpy.uint8))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    short = range(0, 2500, 7)
    long = [n * 1024 + off for n in (31, 32, 33, 64, 1023, 1024, 1025, 3000) for off in (-1, 0, 1, 17, 241)]
    wrong = [n for n in {*range(300), *short, *long, len(data)} if on_device(there, n, stream) != on_host(data[:n])]
    assert not wrong


def test_the_digests_are_of_what_the_stream_did_before() -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        array = cupy.zeros(64 * BLOCK_BYTES, dtype=cupy.uint8)
        for _ in range(50):
            array += cupy.uint8(1)
    assert on_device(array, array.nbytes, stream) == on_host(bytes([50]) * array.nbytes)
