"""Spans as the control service tells them: columns, and every text once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from taskgraph.errors import DecodeError
from taskgraph.observe._proto import control_pb2 as pb
from taskgraph.observe.trace import Span

__all__ = ["Packer", "Unpacker"]

_COLUMNS = ("kind", "name", "peer", "begin_ns", "end_ns", "task", "epoch_of", "attempt", "term", "bytes")
_MAX_TEXTS = 1 << 16
"""Texts one stream may tell: an event's text is one, so they are not few. Later ones are "..."."""


class Packer:
    """Makes chunks of one stream."""

    def __init__(self) -> None:
        self._numbers: dict[int | str, int] = {"": 0}

    def pack(self, spans: Sequence[Span], *, epoch: int, lost: int = 0, over: bool = False) -> pb.TraceChunk:
        """One message; a thousand spans take about a millisecond."""
        chunk = pb.TraceChunk(epoch=epoch, lost=lost, over=over)
        if spans:
            columns: list[Any] = list(zip(*spans, strict=True))
            for at in range(3):
                columns[at] = self._numbered(columns[at], chunk)
            for name, column in zip(_COLUMNS, columns, strict=True):
                getattr(chunk, name).extend(column)
        return chunk

    def _numbered(self, texts: Sequence[int | str], chunk: pb.TraceChunk) -> list[int]:
        try:
            return [*map(self._numbers.__getitem__, texts)]
        except KeyError:  # a new one: seldom
            return [self._number(text, chunk) for text in texts]

    def _number(self, text: int | str, chunk: pb.TraceChunk) -> int:
        known = self._numbers.get(text)
        if known is None:
            if len(self._numbers) >= _MAX_TEXTS:
                return self._number("...", chunk) if text != "..." else 0
            known = self._numbers[text] = len(self._numbers)
            chunk.names.append(text if isinstance(text, str) else f"task {text}")
        return known


class Unpacker:
    """Reads chunks of one stream, in order."""

    def __init__(self) -> None:
        self._names = [""]

    def unpack(self, chunk: pb.TraceChunk) -> Iterator[Span]:
        """Raises DecodeError where the columns do not fit each other."""
        self._names += chunk.names
        columns: list[Iterable[int]] = [getattr(chunk, name) for name in _COLUMNS]
        try:
            for kind, name, peer, *numbers in zip(*columns, strict=True):
                yield (self._names[kind], self._names[name], self._names[peer], *numbers)
        except (ValueError, IndexError) as error:
            raise DecodeError(f"not spans of a node: {error}") from None
