"""Boundaries in shared memory are verified before a restore."""

from __future__ import annotations

import os

import numpy as np
import pytest

from taskgraph.graph.blocks import block_behind
from taskgraph.graph.values import decode, encode
from taskgraph.node.replica import is_intact
from taskgraph.protocol.messages import Encoded
from taskgraph.transport.mappings import Mappings, MemoryReference
from taskgraph.transport.segments import Pool

MIB = 1 << 20


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory is lent on Linux only")
def test_lenders_stray_write_is_found() -> None:
    pool, mappings = Pool(max_segments=2, max_idle_bytes=4 * MIB), Mappings(limit=2)
    made = encode({"state": {"x": np.arange(MIB / 8)}, "numbers": {}}, allocate=pool.allocate)
    block = block_behind(made.buffers[0])
    assert block is not None
    region = block.origin.region  # type: ignore[union-attr]
    reference = MemoryReference(1, region.dev, region.ino, region.size, 0, region.fd, MIB)
    lent = mappings.borrow(os.getpid(), reference, lambda loan: None)
    held = Encoded(made.meta, (lent.data.toreadonly(),), made.digest)
    assert is_intact(made) and is_intact(held)
    block.flags.writeable = True
    block[MIB // 2] ^= 1
    assert not is_intact(made) and not is_intact(held)
    assert decode(held)["state"]["x"][0] == 0.0
