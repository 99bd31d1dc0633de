"""Whose lease has ended: the node of that lease, and no node that came back with another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any, cast

import pytest

import taskgraph as tg
from taskgraph.node.membership.overdue import Overdue
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import KeyEvent, KeyValue
from taskgraph.protocol.records import EpochRecord, MemberRecord, NodeRecord, PrimaryRecord, Record
from taskgraph.protocol.view import JobView
from taskgraph.testing.clock import FastForwardLoop

KEYS = Keys("fit")
ME, OTHER = "n1-a", "n2-a"


class _Etcd:
    def __init__(self) -> None:
        self.left_s: dict[int, int] = {}
        self.asked: list[int] = []

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def lease_left(self, lease: int) -> int | None:
        self.asked.append(lease)
        return self.left_s.get(lease)


class _Node:
    """One that is backup of a task whose primary is the other."""

    id = ME
    paused = False
    log = logging.getLogger("taskgraph.node.n1")
    settings = tg.Settings(lease_ttl_s=5.0)

    def __init__(self) -> None:
        self.coordinator = _Etcd()
        self.keeper = self
        self.view = JobView("fit")
        self._revision = 0
        self.commit(3)
        self.write(KEYS.primary(0), PrimaryRecord(node=OTHER, term=1, stateful=True))
        self.write(KEYS.member(0, ME), MemberRecord())
        self.register(lease=7)

    def write(self, key: str, record: Record) -> None:
        self._revision += 1
        kv = KeyValue(key, record.to_bytes(), self._revision, self._revision)
        self.view.apply(self._revision, [KeyEvent("put", kv)])

    def commit(self, epoch: int) -> None:
        self.write(KEYS.epoch, EpochRecord(epoch=epoch, attempt=1))

    def vanish(self) -> None:
        """etcd deletes the key of the other node."""
        self._revision += 1
        self.view.apply(self._revision, [KeyEvent("delete", KeyValue(KEYS.node(OTHER), b"", 0, self._revision))])

    def register(self, *, lease: int) -> None:
        """What the other node does."""
        record = NodeRecord(
            name="n2", run="r", host="here", pid=1, endpoints=(), control="", fingerprint="", lease=lease, writer="w"
        )
        self.write(KEYS.node(OTHER), record)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=FastForwardLoop) as made:
        yield made


def test_a_node_that_registered_with_another_lease_is_no_more_the_one_whose_lease_ended(
    runner: asyncio.Runner,
) -> None:
    """What etcd said of its lease before counts for nothing: it lives, and is to be asked for by the new one."""
    node, told = _Node(), list[tuple[str, int, bool]]()
    overdue = Overdue(cast(Any, node), lambda name, lease, ended: told.append((name, lease, ended)))

    async def scenario() -> None:
        etcd = node.coordinator
        watching = asyncio.ensure_future(overdue.watch())
        etcd.left_s = {7: 0, 8: 4}
        await asyncio.sleep(10)
        assert overdue.nodes == {OTHER} and told == [(OTHER, 7, True)]

        node.register(lease=8)
        assert overdue.nodes == frozenset(), "before etcd was asked for anything again"
        etcd.asked.clear()
        await asyncio.sleep(10)
        assert overdue.nodes == frozenset() and len(told) == 1
        assert set(etcd.asked) <= {7, 8} and etcd.asked.count(7) <= 1 and 8 in etcd.asked

        etcd.left_s = {8: 0}
        await asyncio.sleep(10)
        assert overdue.nodes == {OTHER} and told[1:] == [(OTHER, 8, True)]
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    runner.run(scenario())


def test_a_lease_that_ended_is_known_to_have_until_its_key_is_gone(runner: asyncio.Runner) -> None:
    """Others took over, and epochs commit again: it was forgotten, and whoever was evicted for it passed for alive."""
    node, told = _Node(), list[tuple[str, int, bool]]()
    overdue = Overdue(cast(Any, node), lambda name, lease, ended: told.append((name, lease, ended)))

    async def scenario() -> None:
        watching = asyncio.ensure_future(overdue.watch())
        node.coordinator.left_s = {7: 0}
        await asyncio.sleep(10)
        assert overdue.nodes == {OTHER}
        for epoch in range(4, 40):
            node.commit(epoch)
            await asyncio.sleep(0.1)
            assert overdue.nodes == {OTHER}
        node.vanish()
        assert overdue.nodes == frozenset()
        node.coordinator.asked.clear()
        await asyncio.sleep(10)
        assert node.coordinator.asked == [] and told == [(OTHER, 7, True)]
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    runner.run(scenario())
