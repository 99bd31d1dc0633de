"""The spans that a node kept."""

from __future__ import annotations

from taskgraph.observe.trace import Span, Tracing

__all__ = ["spans_of"]


def spans_of(tracing: Tracing) -> list[Span]:
    """All spans since the last call; tasks at the other side are named as in the trace's file."""
    return [
        (k, n, f"task {peer}" if isinstance(peer, int) else peer, *rest) for k, n, peer, *rest in tracing.fetch()[0]
    ]
