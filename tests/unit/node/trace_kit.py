"""What a node traced, as who reads its trace sees it."""

from __future__ import annotations

from taskgraph.observe.trace import Span, Tracing
from taskgraph.observe.trace_chunks import Unpacker, chunks

__all__ = ["spans_of"]


def spans_of(tracing: Tracing) -> list[Span]:
    """All that one trace has seen; ask once."""
    unpacker = Unpacker()
    return [span for chunk in chunks(tracing) for span in unpacker.unpack(chunk)]
