"""Finds old `gone/{node}` records that can be deleted.

A job may run for months, and each node that ends leaves such a record, which all nodes read.
"""

from __future__ import annotations

from taskgraph.protocol.fatal import blamed
from taskgraph.protocol.view import JobView

__all__ = ["forgettable"]


def forgettable(view: JobView, kept: int) -> list[str]:
    """Returns gone nodes whose records can be deleted, oldest first; none of the last `kept`.

    No other key names such a node, and its death does not count for `fatal` or `deviceloss`.
    """
    if view.epoch is None:
        return []
    at = view.epoch.record.epoch
    oldest = sorted(view.gone, key=lambda node: view.gone[node].mod_revision)[: max(0, len(view.gone) - kept)]
    needed = {primary.record.node for primary in view.primaries.values()}.union(view.nodes, *view.members.values())
    return [node for node in oldest if node not in needed and not _counts(view, node, at)]


def _counts(view: JobView, node: str, at: int) -> bool:
    """The death of the node still counts."""
    gone = view.gone[node]
    of_device = gone.record.epoch
    return (of_device is not None and of_device >= at) or any(blamed(view, gone, at))
