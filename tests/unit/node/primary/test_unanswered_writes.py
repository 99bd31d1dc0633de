"""Writes that etcd does not answer."""

from __future__ import annotations

import asyncio

import pytest
from cluster_kit import Gated, blindable, eyes, gated, holder, job, play, told

from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.node import Node
from taskgraph.protocol.kv import Put, Txn, TxnResult

__all__ = ["blindable", "gated"]

LASTS_S = 60.0


@pytest.mark.usefixtures("blindable")
def test_unanswered_commits_are_event(gated: type[Gated], caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(cluster: InProcessCluster) -> None:
        ended = asyncio.ensure_future(cluster.result())
        await gated.reached.wait()
        leader = holder(cluster, 0)
        eyes(leader).lose(leader.keeper.view.keys.epoch)
        gated.gate.set()
        await asyncio.sleep(LASTS_S)
        assert not ended.done() and not leader.paused
        (line,) = leader.status().waits
        assert line.startswith("a write has waited for etcd for ") and line.endswith(" s: held back by the test")
        (waits,) = told(cluster, "waits")
        assert waits.startswith("epoch 1 waits: a write has waited for etcd")
        assert LASTS_S < eyes(leader).losses < 30 * LASTS_S
        assert 2 <= sum("outcome is unknown" in record.message for record in caplog.records) <= LASTS_S / 5
        eyes(leader).lose("")
        assert (await ended).values == {0: 3, 1: 3}
        assert not leader.status().waits

    play(job(gated), scenario, nodes=2)


def test_takeover_replaced_before_answer_begins_nothing(gated: type[Gated]) -> None:
    """The read after a lost answer shows the other node's takeover."""

    async def scenario(cluster: InProcessCluster) -> None:
        await gated.reached.wait()
        first = holder(cluster, 0)
        second, third = (cluster.node(n) for n in first.keeper.view.in_sync(0) if n != first.id)
        execute = second.writes.execute

        async def unanswered(txn: Txn, key: str, writer: str) -> TxnResult | None:
            result = await execute(txn, key, writer)
            if result is None or not any(isinstance(op, Put) and op.key == key for op in txn.success):
                return result
            await third.keeper.wait_until(lambda view: view.primary_node(0) == second.id)
            await third.takeovers._become_primary(0, failure=False)
            return TxnResult(True, result.revision)

        begun: list[tuple[Node, int]] = []
        with pytest.MonkeyPatch.context() as patch:
            for node in (second, third):
                begin = node.roles.begin_term
                patch.setattr(
                    node.roles, "begin_term", lambda one, begin=begin: (begun.append((one.node, one.term)), begin(one))
                )
            patch.setattr(second.writes, "execute", unanswered)
            cluster.crash(first.id)
            gated.gate.set()
            assert (await cluster.result()).values == {0: 3}
        assert begun == [(third, 3)]

    play(job(gated, tasks=1, backups=2), scenario, nodes=3)
