"""The leader deletes unneeded records of gone nodes, so that etcd's part of the job stays bounded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from taskgraph.errors import CoordinationError
from taskgraph.protocol import transactions
from taskgraph.protocol.forgetting import forgettable

if TYPE_CHECKING:
    from taskgraph.node.primary.primary import Primary
    from taskgraph.node.services import NodeServices

__all__ = ["forget_gone"]

KEPT = 1000
"""The records of the last gone nodes stay."""
BATCH = 64
"""Records per transaction: etcd takes 128 comparisons."""
LOOK_AGAIN_S = 10.0
"""Pause before the next try, if all records are still needed."""


async def forget_gone(node: NodeServices, primary: Primary) -> None:
    """Deletes such records until cancelled.

    A node that was absent at a deletion counts as gone, since it may be one of the deleted. So records stay for
    `lost_after_s`: a node that is absent for longer is gone anyway.
    """
    keeper = node.keeper
    while True:
        await keeper.wait_until(lambda view: len(view.gone) >= KEPT + BATCH, structure=True)
        await node.while_paused()
        read, own = keeper.view.revision, node.node_revision
        await asyncio.sleep(max(LOOK_AGAIN_S, node.settings.lost_after_s))
        if node.paused or node.node_revision != own:
            continue  # this node was paused, and others may have been: that time does not count
        oldest = [each for each in forgettable(keeper.view, KEPT) if keeper.view.gone[each].mod_revision <= read]
        try:
            for first in range(0, len(oldest), BATCH):
                some = [each for each in oldest[first : first + BATCH] if each in keeper.view.gone]
                txn = transactions.forget_gone(
                    keeper.view, some, primary_revision=primary.revision, writer=node.writer()
                )
                result = await node.coordinator.txn(txn)
                if not result.succeeded:
                    break  # the view is stale
                await keeper.caught_up(result.revision)
        except CoordinationError as error:
            node.log.info("records of gone nodes could not be deleted yet: %s", error)
