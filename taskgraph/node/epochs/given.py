"""Items that user code got views of, where strict mode looks at them later."""

from __future__ import annotations

from dataclasses import dataclass

from taskgraph.graph.values import staying
from taskgraph.protocol.messages import EncodedOnDevice

__all__ = ["Given"]


@dataclass(frozen=True, slots=True)
class Given:
    """An item that user code got views of, in the memory where others read it, too."""

    value: EncodedOnDevice
    tag: str
    producer: int
    processor: str
    epoch: int

    @property
    def viewed(self) -> bool:
        return any(buffer.viewed for buffer in staying(self.value))
