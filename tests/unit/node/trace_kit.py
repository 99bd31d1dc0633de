"""What a node traced, as who reads its trace sees it."""

from __future__ import annotations

from taskgraph.observe.trace import Span, Tracing
from taskgraph.observe.trace_chunks import Packer, Unpacker

__all__ = ["spans_of"]


async def spans_of(tracing: Tracing) -> list[Span]:
    """All that one trace has seen; ask once."""
    unpacker = Unpacker()
    return [span async for chunk in Packer().chunks(tracing) for span in unpacker.unpack(chunk)]
