"""Memory that is ready before the state is copied."""

from __future__ import annotations

from taskgraph.elastic_jobs.prepared_memory import PreparedMemory
from taskgraph.graph.blocks import Block
from taskgraph.transport.pages import address_of
from taskgraph.transport.segments import Pool

MIB = 1 << 20


def test_memory_that_is_ready_is_given_first() -> None:
    pool = Pool(max_segments=8, max_idle_bytes=0)
    made: list[int] = []

    def allocate(nbytes: int) -> Block | None:
        made.append(nbytes)
        return pool.allocate(nbytes)

    memory = PreparedMemory(allocate)
    memory.fill((4 * MIB, MIB, 1))
    assert made == [4 * MIB, MIB, 1], "the pool has no memory for a single byte"
    blocks = [memory.allocate(MIB), memory.allocate(4 * MIB), memory.allocate(MIB)]
    assert made == [4 * MIB, MIB, 1, MIB], "the last one is new"
    assert [block.nbytes for block in blocks if block is not None] == [MIB, 4 * MIB, MIB]
    assert len({address_of(block.data) for block in blocks if block is not None}) == 3
    pool.close()
