"""What collectives need of `tg.Epoch`, `Inputs` and `Outputs`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from taskgraph.graph.blocks import Block
from taskgraph.protocol.messages import Encoded

__all__ = ["Ins", "Outs", "To", "Work"]

To = str | int | Sequence[str | int]
"""A link's name, a task id, or several of them."""


class Work(Protocol):
    """What a processor needs of the attempt in which it runs."""

    task: int
    number: int

    def tasks(self) -> int: ...
    def neighbors(self, link: str, task: int | None = None) -> tuple[int, ...]: ...
    def allocate(self, nbytes: int) -> Block | None: ...
    def run_in_thread(self, function: Callable[[], None]) -> Awaitable[None]: ...
    def supply(self, tag: str, value: Encoded) -> None: ...


class Ins(Protocol):
    """The values that came in the inbound channels of a processor, still encoded."""

    @property
    def size_bytes(self) -> int: ...
    def encoded(self, tag: str, producer: int) -> Encoded: ...
    def fetch(self, tag: str) -> Awaitable[None]: ...


class Outs(Protocol):
    """Takes the values of the outbound channels of a processor."""

    @property
    def work(self) -> Work: ...
    def put(self, tag: str, value: Any, to: To | None = None) -> None: ...
    def put_encoded(self, tag: str, encoded: Encoded, to: tuple[int, ...] | None = None) -> None: ...
