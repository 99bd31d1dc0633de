"""What was said of nodes that are gone, and that nobody needs to know any more.

A job may run for months, with nodes that come and go. Each leaves `gone/{node}`, and everybody who looks at the job
reads all of them.
"""

from __future__ import annotations

from taskgraph.protocol.fatal import blamed
from taskgraph.protocol.view import JobView

__all__ = ["forgettable"]


def forgettable(view: JobView, kept: int) -> list[str]:
    """Nodes that are gone and of which nobody has to know that, the oldest first; none of the last `kept`.

    No key names them, so that none of them can be waited for, succeeded or placed. And what ended them counts no more:
    epochs that are committed went through. Those that count are few: the job fails before they are many.
    """
    if view.epoch is None:
        return []
    at = view.epoch.record.epoch
    oldest = sorted(view.gone, key=lambda node: view.gone[node].mod_revision)[: max(0, len(view.gone) - kept)]
    needed = {primary.record.node for primary in view.primaries.values()}.union(view.nodes, *view.members.values())
    return [node for node in oldest if node not in needed and not _counts(view, node, at)]


def _counts(view: JobView, node: str, at: int) -> bool:
    """Whether its end may still be one of those that fail the job."""
    gone = view.gone[node]
    of_device = gone.record.epoch
    return (of_device is not None and of_device >= at) or any(blamed(view, gone, at))
