"""Spans as the control service tells them: columns as bytes, and every text once."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from taskgraph.errors import DecodeError
from taskgraph.observe._proto import control_pb2 as pb
from taskgraph.observe.trace import WIDTH, Span, Tracing

__all__ = ["Packer", "Unpacker"]

_TEXTS = ("", "...")
"""The first numbers. The second stands for what is one text too many."""
_MAX_TEXTS = 1 << 16
"""Texts one stream may tell: an event's text is one, so they are not few."""
_NUMBERS = 7
"""Columns that are numbers; the other three are texts."""
_SPANS = 1 << 10
"""Packed at a time: a third of a millisecond's work, since it is done on the loop."""
_PARTS = 8
"""In a chunk: a message takes as long as hundreds of spans, whatever its size."""


class Packer:
    """Makes chunks of one stream."""

    def __init__(self) -> None:
        self._numbers: dict[int | str, int] = {text: number for number, text in enumerate(_TEXTS)}
        self._new: list[str] = []

    async def chunks(self, tracing: Tracing) -> AsyncGenerator[pb.TraceChunk, None]:
        """What was kept since it was asked last; others run in between."""
        spans, lost = tracing.fetch()
        for start in range(0, len(spans), _PARTS * _SPANS * WIDTH):
            chunk, lost = pb.TraceChunk(lost=lost), 0
            for part in range(start, min(start + _PARTS * _SPANS * WIDTH, len(spans)), _SPANS * WIDTH):
                chunk.spans.append(self._pack(spans[part : part + _SPANS * WIDTH]))
                await asyncio.sleep(0)
            chunk.names.extend(self._new)
            self._new.clear()
            yield chunk

    def _pack(self, spans: list[Any]) -> pb.TraceSpans:
        kinds, names, peers, begins, ends, tasks, stamps, terms, sizes = (spans[at::WIDTH] for at in range(WIDTH))
        attempts, epochs = zip(*stamps, strict=True)
        texts, numbers = kinds + names + peers, (*begins, *ends, *tasks, *epochs, *attempts, *terms, *sizes)
        try:
            numbered = [*map(self._numbers.__getitem__, texts)]
        except KeyError:  # a new one: seldom
            numbered = [*map(self._number, texts)]
        return pb.TraceSpans(
            texts=struct.pack(f"<{len(numbered)}H", *numbered), numbers=struct.pack(f"<{len(numbers)}q", *numbers)
        )

    def _number(self, text: int | str) -> int:
        known = self._numbers.get(text)
        if known is not None:
            return known
        if len(self._numbers) >= _MAX_TEXTS:
            return self._numbers["..."]
        number = self._numbers[text] = len(self._numbers)
        self._new.append(text if isinstance(text, str) else f"task {text}")
        return number


class Unpacker:
    """Reads chunks of one stream, in order."""

    def __init__(self) -> None:
        self._texts = [*_TEXTS]

    def unpack(self, chunk: pb.TraceChunk) -> Iterator[Span]:
        """Raises DecodeError where it is not what a node tells."""
        if len(self._texts) + len(chunk.names) > _MAX_TEXTS:
            raise DecodeError(f"not spans of a node: more than {_MAX_TEXTS} texts")
        self._texts += chunk.names
        try:
            for part in chunk.spans:
                yield from self._unpack(part.texts, part.numbers)
        except (struct.error, IndexError) as error:
            raise DecodeError(f"not spans of a node: {error}") from None

    def _unpack(self, texts: bytes, numbers: bytes) -> Iterator[Span]:
        count = len(numbers) // (8 * _NUMBERS)
        named = [self._texts[number] for number in struct.unpack(f"<{3 * count}H", texts)]
        numbered = struct.unpack(f"<{count * _NUMBERS}q", numbers)
        columns = (column[at : at + count] for column in (named, numbered) for at in range(0, len(column), count or 1))
        yield from zip(*columns, strict=True)
