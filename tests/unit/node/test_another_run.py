"""A job's name is submitted again while nodes of the earlier run still end: they write nothing to the new run."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import taskgraph as tg
from taskgraph.coordination.memory import MemoryCoordinator
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.launch.submit import submit
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import JobStatus, StatusRecord


class Counts(tg.Task, state=["value"]):
    def setup(self) -> None:
        self.value = 0

    def compose(self, epoch: Any) -> None:
        epoch.processor(self.count)

    async def count(self, epoch: Any, ins: Any, outs: Any) -> None:
        await asyncio.sleep(0.02)
        self.value += 1


async def test_stale_run_writes_nothing() -> None:
    cluster = InProcessCluster(tg.Job(tasks=2, epochs=10_000, builder=lambda _: Counts()))
    await cluster.start(2)
    node = cluster.nodes[0]
    await node.keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch >= 2)
    keys, ended = node.keeper.view.keys, StatusRecord(state=JobStatus.CANCELLED, writer="somebody")
    cluster.store.execute(Txn(success=(Put(keys.status, ended.to_bytes()),)))
    await submit(MemoryCoordinator(cluster.store), dataclasses.replace(cluster.spec, run="again"))
    await asyncio.gather(*(member.run for member in cluster._members.values()), return_exceptions=True)
    found = {kv.key: kv.value for kv in cluster.store.select(keys.root, prefix=True)}
    await cluster.stop()
    assert StatusRecord.from_bytes(found.pop(keys.status)).writer == "again"
    assert [key for key in found if not key.startswith((keys.events, keys.spec, keys.epoch, keys.generation))] == []
