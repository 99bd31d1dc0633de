"""shards: how far the queues and maps of a job are."""

from __future__ import annotations

import argparse
import asyncio
import json

import uvloop

from taskgraph.commands.common import reach
from taskgraph.commands.looking import show_again, statuses_of
from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.observe.queues_text import merge_queues, shards_json, shards_text
from taskgraph.observe.status import NodeStatus

__all__ = ["shards"]

_WATCH_S = 1.0


def shards(options: argparse.Namespace) -> int:
    """Shows how far the queues and maps of a running job are."""
    return uvloop.run(_shards(options))


async def _shards(options: argparse.Namespace) -> int:
    """Prints the queues once, or with --watch until the job ends."""
    async with reach(options) as reached:
        keeper = ViewKeeper(reached.coordinator, reached.name, refresh_s=0.1)
        while True:
            await keeper.load()
            found = (await statuses_of(reached, keeper.view)).values()
            queues = merge_queues(queue for said in found if isinstance(said, NodeStatus) for queue in said.queues)
            if options.json:
                print(json.dumps({"job": reached.name, "queues": shards_json(queues)}), flush=True)
            else:
                text = shards_text(queues) or f"job {reached.name!r} computes no pieces at the moment"
                show_again(text, on_screen=options.watch)
            if not options.watch or not keeper.view.running:
                return 0
            await asyncio.sleep(_WATCH_S)
