"""One epoch's graph of one task: its processors and channels, checked when it is composed.

Pure: it knows names and task ids, not values, sockets or clocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, Final, NamedTuple

from taskgraph.errors import GraphError

_YIELDS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR

__all__ = ["TEXTS", "Composition", "Processor", "is_text"]

TEXTS: Final[set[str]] = set()
"""Names that are texts, as most were found to be before: to look here first is no call."""
_TEXTS_KEPT: Final = 1024


def is_text(name: str) -> bool:
    """Whether a name can travel as what it is. Half a surrogate pair cannot: names of files may hold some."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    if len(TEXTS) < _TEXTS_KEPT:
        TEXTS.add(name)
    return True


class Processor(NamedTuple):
    """One processor of a task in one epoch.

    Attributes:
        inbound: tag -> producers, in the order declared.
        outbound: tag -> consumers, in the order declared.
        sync: it declares no outbound channel: it runs after all others and may change state.
        parallel: it runs whenever it is ready.
    """

    name: str
    compute: Callable[..., Any]
    inbound: Mapping[str, tuple[int, ...]]
    outbound: Mapping[str, tuple[int, ...]]
    sync: bool
    parallel: bool


@dataclass(slots=True)
class Composition:
    """What `compose` declared, in order.

    Attributes:
        named: all processors, in the order declared.
        ordered: processors that run one after another before the sync points.
        parallel: those that run whenever they are ready.
        sync_points: those that run last.
    """

    task: int
    epoch: int
    named: dict[str, Processor] = field(default_factory=dict)
    ordered: list[Processor] = field(default_factory=list)
    parallel: list[Processor] = field(default_factory=list)
    sync_points: list[Processor] = field(default_factory=list)
    _takes: dict[tuple[str, int], None] = field(default_factory=dict)
    _puts: dict[tuple[str, int], str] = field(default_factory=dict)

    def add(
        self,
        compute: Callable[..., Any],
        inbound: Mapping[str, tuple[int, ...]],
        outbound: Mapping[str, tuple[int, ...]],
        *,
        sync: bool,
        name: str | None,
        parallel: bool,
    ) -> Processor:
        """Adds a processor; raises GraphError where it does not fit what is there."""
        if not callable(compute):
            raise GraphError(f"{self._at()}: a processor's compute must be callable, not {type(compute).__name__}")
        name = name or _name_of(compute)
        code = getattr(compute, "__code__", None)
        if code is not None and code.co_flags & _YIELDS:
            raise GraphError(
                f"{self._at()}: {name!r} has a `yield`, so calling it would run nothing of it: put each value with "
                f"outs.put(tag, value), several of one tag as a list"
            )
        if name in self.named:
            raise GraphError(
                f"{self._at()}: two processors are called {name!r}; give one of them another: "
                f"epoch.processor(..., name='...')"
            )
        if sync and parallel:
            raise GraphError(
                f"{self._at()}: processor {name!r} has no outbound channel, so it is a sync point and may change "
                f"state; sync points run one after another: leave parallel=True out"
            )
        if name not in TEXTS and not is_text(name):
            raise GraphError(f"{self._at()}: the name {name!a} of a processor is no text that can be encoded")
        for tag, consumers in outbound.items():
            if tag not in TEXTS and not is_text(tag):
                raise self._no_text(tag)
            for consumer in consumers:
                other = self._puts.setdefault((tag, consumer), name)
                if other != name:
                    raise GraphError(
                        f"{self._at()}: processors {other!r} and {name!r} both declare channel {tag!r} to task "
                        f"{consumer}; a channel has one producer: give one of them another tag"
                    )
        for tag, producers in inbound.items():
            if tag not in TEXTS and not is_text(tag):
                raise self._no_text(tag)
            for producer in producers:
                self._takes[(tag, producer)] = None
        processor = Processor(name, compute, inbound, outbound, sync, parallel)
        self.named[name] = processor
        (self.sync_points if sync else self.parallel if parallel else self.ordered).append(processor)
        return processor

    def _no_text(self, tag: str) -> GraphError:
        return GraphError(f"{self._at()}: the tag {tag!a} is no text that can be encoded: name the channel otherwise")

    def _at(self) -> str:
        return f"task {self.task}, epoch {self.epoch}, compose"

    @property
    def processors(self) -> tuple[Processor, ...]:
        """In the order declared."""
        return tuple(self.named.values())

    def channels_in(self) -> list[tuple[str, int]]:
        """(tag, producer) of every inbound channel, each once, in the order declared."""
        return list(self._takes)

    def channels_out(self) -> list[tuple[str, int]]:
        """(tag, consumer) of every outbound channel."""
        return list(self._puts)

    def producer_of(self, tag: str, consumer: int) -> str | None:
        """Which processor puts the item of a channel."""
        return self._puts.get((tag, consumer))


def _name_of(compute: Callable[..., Any]) -> str:
    if type(compute) is MethodType:  # plain methods and functions, which most are, are asked for nothing they lack
        compute = compute.__func__
    if type(compute) is FunctionType and compute.__name__ != "<lambda>":
        return compute.__name__
    inner: Any = compute
    while hasattr(inner, "func"):  # functools.partial
        inner = inner.func
    name = getattr(inner, "__name__", type(inner).__name__)
    return "processor" if name == "<lambda>" else str(name)
