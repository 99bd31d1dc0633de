"""Rows that move to another number of servers, when a job is resumed from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from taskgraph.tables.store import RowStore, rows_of_server, store_of

__all__ = ["move_rows"]


def move_rows(states: Sequence[dict[str, Any]], servers: int) -> list[dict[str, Any]]:
    """Returns the states of `servers` servers with the rows of all given ones.

    Args:
        states: the snapshots of all servers of a table, in order.
    """
    stores = [store_of(state) for state in states]
    table, live = stores[0].table, [store.live_rows() for store in stores]
    whole = {name: np.concatenate([part[name] for part in live]) for name in live[0]}
    found = []
    for server in range(servers):
        mine = rows_of_server(whole, server, servers)
        order = np.argsort(mine["ids"])
        store = RowStore(table, segments=[{name: array[order] for name, array in mine.items()}] if len(order) else [])
        found.append({**states[0], "servers": servers, "blocks": store.blocks})
    return found
