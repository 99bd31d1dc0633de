"""Features of the coordinator in memory alone: crashes of nodes, lagging watches, the loop's own time."""

from __future__ import annotations

import asyncio
import heapq
import random
import selectors
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.errors import Unavailable
from taskgraph.protocol.kv import Put, Txn


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer when there is nothing else to do."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        super().__init__(selectors.SelectSelector())

    def time(self) -> float:
        return self._virtual_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            while self._scheduled and self._scheduled[0].cancelled():
                heapq.heappop(self._scheduled)._scheduled = False
                self._timer_cancelled_count -= 1
            if self._scheduled:
                self._virtual_s = max(self._virtual_s, self._scheduled[0].when())
        super()._run_once()


def run_in_virtual_time(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main)


def put(key: str, lease: int = 0) -> Txn:
    return Txn(success=(Put(key, b"", lease),))


def test_crashed_node_loses_its_keys() -> None:
    async def main() -> None:
        store = MemoryStore()
        node, observer = MemoryCoordinator(store), MemoryCoordinator(store)
        lease = await node.lease(5.0, stall_limit_s=1e9)
        await node.txn(put("/n", lease.id))
        await asyncio.sleep(100.3)
        assert await observer.get("/n") is not None
        renewed_until = lease.valid_until()
        node.crash()
        async with aclosing(observer.watch("/", store.revision + 1)) as watch:
            batch = await anext(watch)
        assert [event.kind for event in batch.events] == ["delete"]
        assert renewed_until < observer.now() < renewed_until + 0.5
        assert renewed_until == pytest.approx(105.0)

    run_in_virtual_time(main())


def test_calls_of_a_crashed_node_fail() -> None:
    async def main() -> None:
        store = MemoryStore()
        node, other = MemoryCoordinator(store), MemoryCoordinator(store)
        lease = await node.lease(5.0, stall_limit_s=1e9)
        watching = asyncio.ensure_future(anext(node.watch("/", 2)))
        writing = asyncio.ensure_future(node.txn(put("/under-way")))
        await asyncio.sleep(0)
        node.crash()
        for call in (watching, writing, node.get("/a"), node.list("/"), node.lease(5.0, stall_limit_s=1.0)):
            with pytest.raises(Unavailable, match="crashed"):
                await call
        await lease.close(revoke=True)  # a dead process revokes nothing
        assert store.has_lease(lease.id)
        assert await other.get("/under-way") is None

    run_in_virtual_time(main())


def test_blocked_loop_keeps_the_lease() -> None:
    async def main() -> None:
        store = MemoryStore()
        node = MemoryCoordinator(store)
        patient = await node.lease(5.0, stall_limit_s=2.0)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop._virtual_s += 6.5  # the thread renewed for 2 s, hence alive until 7 s
        patient.tick()
        assert not patient.lost() and store.alive(patient.id)
        loop._virtual_s += 7.5
        patient.tick()
        assert patient.lost() and not store.alive(patient.id)

    run_in_virtual_time(main())


def test_lagging_watches_keep_order() -> None:
    async def main() -> None:
        store = MemoryStore()
        writer = MemoryCoordinator(store)
        readers = [MemoryCoordinator(store, rng=random.Random(seed), max_lag_s=0.5) for seed in range(4)]
        arrivals: list[tuple[int, int]] = []

        async def follow(number: int) -> list[int]:
            seen: list[int] = []
            async with aclosing(readers[number].watch("/", 2)) as watch:
                async for batch in watch:
                    seen += [event.kv.mod_revision for event in batch.events]
                    arrivals.append((number, batch.revision))
                    if batch.revision == 51:
                        return seen
            raise AssertionError("the watch ended by itself")

        async with asyncio.TaskGroup() as group:
            following = [group.create_task(follow(number)) for number in range(4)]
            for _ in range(50):
                await writer.txn(put("/a"))
                await asyncio.sleep(0.05)
        assert all(task.result() == list(range(2, 52)) for task in following)
        assert len({number for number, _ in arrivals[:4]}) > 1
        assert [revision for _, revision in arrivals] != sorted(revision for _, revision in arrivals)

    run_in_virtual_time(main())


def test_seed_decides_the_lags() -> None:
    async def arrivals(seed: int, into: list[float]) -> None:
        store = MemoryStore()
        writer, reader = MemoryCoordinator(store), MemoryCoordinator(store, rng=random.Random(seed))
        async with aclosing(reader.watch("/", 2)) as watch:
            for _ in range(5):
                await writer.txn(put("/a"))
                await anext(watch)
                into.append(reader.now())

    runs: list[list[float]] = [[], [], []]
    for seed, into in zip((1, 1, 2), runs, strict=True):
        run_in_virtual_time(arrivals(seed, into))
    assert runs[0] == runs[1] != runs[2]
