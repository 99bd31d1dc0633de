"""Spans as the control service tells them: as they were kept, and every text once."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from taskgraph.errors import DecodeError
from taskgraph.observe._proto import control_pb2 as pb
from taskgraph.observe.trace import FIRST_TEXTS, MAX_TEXTS, SPAN, Span, Tracing

__all__ = ["Unpacker", "chunks"]

_SPANS = 1 << 13
"""In a chunk: half a megabyte. A message takes as long as hundreds of spans, whatever its size."""


def chunks(tracing: Tracing) -> Iterator[pb.TraceChunk]:
    """What was kept since it was asked last."""
    spans, names, lost = tracing.fetch()
    for start in range(0, len(spans), _SPANS * SPAN.size):
        yield pb.TraceChunk(lost=lost, names=names, spans=spans[start : start + _SPANS * SPAN.size])
        names, lost = [], 0


class Unpacker:
    """Reads chunks of one stream, in order."""

    def __init__(self) -> None:
        self._texts = [*FIRST_TEXTS]

    def unpack(self, chunk: pb.TraceChunk) -> Iterator[Span]:
        """Raises DecodeError where it is not what a node tells."""
        texts = self._texts
        if len(texts) + len(chunk.names) > MAX_TEXTS:
            raise DecodeError(f"not spans of a node: more than {MAX_TEXTS} texts")
        texts += chunk.names
        try:
            for kind, name, peer, *numbers in SPAN.iter_unpack(chunk.spans):
                yield (texts[kind], texts[name], texts[peer], *numbers)
        except (struct.error, IndexError) as error:
            raise DecodeError(f"not spans of a node: {error}") from None
