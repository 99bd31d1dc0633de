"""What collectives need of `tg.Epoch`, `Inputs` and `Outputs`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from taskgraph.graph.blocks import Block
from taskgraph.protocol.messages import Encoded

__all__ = ["AttemptPort", "InputsPort", "OutputsPort", "To"]

To = str | int | Sequence[str | int]
"""A link's name, a task id, or several of them."""


class AttemptPort(Protocol):
    """What collectives use of the attempt in which a processor runs. `task`, `number`: the task and the epoch."""

    task: int
    number: int

    def tasks(self) -> int: ...
    def neighbors(self, link: str, task: int | None = None) -> tuple[int, ...]: ...
    def allocate(self, nbytes: int) -> Block | None: ...
    def run_in_thread(self, function: Callable[[], None]) -> Awaitable[None]: ...
    def supply(self, tag: str, value: Encoded) -> None: ...


class InputsPort(Protocol):
    """What collectives use of `tg.Inputs`: the values of a processor's inbound channels, still encoded."""

    @property
    def size_bytes(self) -> int: ...
    def encoded(self, tag: str, producer: int) -> Encoded: ...
    def fetch(self, tag: str) -> Awaitable[None]: ...


class OutputsPort(Protocol):
    """What collectives use of `tg.Outputs`: takes the values of a processor's outbound channels, also encoded ones."""

    @property
    def work(self) -> AttemptPort: ...
    def put(self, tag: str, value: Any, to: To | None = None) -> None: ...
    def put_encoded(self, tag: str, encoded: Encoded, to: tuple[int, ...] | None = None) -> None: ...
