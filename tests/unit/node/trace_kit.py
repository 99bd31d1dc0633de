"""The spans that a node kept."""

from __future__ import annotations

from taskgraph.observe.trace import Span, Tracing

__all__ = ["spans_of"]


def spans_of(tracing: Tracing) -> list[Span]:
    """All spans since they were fetched last; a task that is the other side is named as in the trace's file."""
    return [
        (k, n, f"task {peer}" if isinstance(peer, int) else peer, *rest) for k, n, peer, *rest in tracing.fetch()[0]
    ]
