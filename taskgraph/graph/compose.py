"""Composes and checks one epoch's graph of one task: its processors and channels.

Pure: it knows names and task ids, not values, sockets or clocks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Mapping
from operator import is_
from types import FunctionType, MethodType
from typing import Any, Final, Protocol, cast

from taskgraph.errors import GraphError, JobError
from taskgraph.protocol.frozen import frozen
from taskgraph.signatures import signature

_YIELDS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR

__all__ = ["TEXTS", "Composition", "Graph", "Processor", "is_text", "name_of"]

TEXTS: Final[set[str]] = set()
"""Names that are texts, as most were found to be before: to look here first is no call."""
_TEXTS_KEPT: Final = 1024


def is_text(name: str) -> bool:
    """True if a name can be encoded. Half a surrogate pair cannot; names of files may have one."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    if len(TEXTS) < _TEXTS_KEPT:
        TEXTS.add(name)
    return True


Channel = tuple[str, int]
"""(tag, producer) of an inbound one, (tag, consumer) of an outbound one."""
Links = Mapping[str, Any] | None
"""The inbound or outbound channels of a processor, as declared: tag -> a link's name, a task, or several."""


class Linked(Protocol):
    """Says where a task's links lead in the epoch that is composed."""

    def neighbors(self, link: str) -> tuple[int, ...]:
        """Raises JobError where there is no such link, or it leads to no task."""


@frozen
class Processor:
    """One processor of a task.

    Attributes:
        inbound: tag -> producers, in the order declared.
        outbound: tag -> consumers, in the order declared.
        sync: it declares no outbound channel: it runs after all others and may change state.
        parallel: it runs whenever it is ready.
        takes, puts: its channels, one by one.
    """

    name: str
    compute: Callable[..., Any]
    inbound: Mapping[str, tuple[int, ...]]
    outbound: Mapping[str, tuple[int, ...]]
    sync: bool
    parallel: bool
    takes: tuple[Channel, ...]
    puts: tuple[Channel, ...]


@frozen
class Declaration:
    """The words in which `compose` declared a processor.

    Attributes:
        inbound, outbound: the tags, and what each leads to: a link, a task, or several in a sequence of its own.
        changing: the links it names that may lead elsewhere in another epoch, and where they led.
    """

    compute: Callable[..., Any]
    name: str | None
    parallel: bool
    inbound: tuple[tuple[str, ...], tuple[Any, ...]]
    outbound: tuple[tuple[str, ...], tuple[Any, ...]]
    changing: tuple[tuple[str, tuple[int, ...]], ...]


@frozen
class Graph:
    """The graph that `compose` declared. Epochs that declare the same processors share one object.

    Attributes:
        names: of the processors.
        ordered: those that run one after another before the sync points.
        parallel: those that run whenever they are ready.
        sync_points: those that run last.
        channels_in: (tag, producer) of every inbound channel, each once.
        channels_out: (tag, consumer) of every outbound channel.
        declarations: of all processors; none where one of them cannot be recognised when it is declared again.
    """

    processors: tuple[Processor, ...]
    names: tuple[str, ...]
    ordered: tuple[Processor, ...]
    parallel: tuple[Processor, ...]
    sync_points: tuple[Processor, ...]
    channels_in: tuple[Channel, ...]
    channels_out: tuple[Channel, ...]
    declarations: tuple[Declaration, ...]

    def lasts(self, owner: object) -> bool:
        """True if its declaration means the same in every epoch: all names in it refer to the same objects and links.

        Args:
            owner: whose `compose` declared it. What its own methods and plain functions know of an epoch is what they
                are called with; other objects, and the defaults of a function, may have been made for this one.
        """
        known = len(self.declarations) == len(self.processors)
        return known and all(not d.changing and _knows_nothing(d.compute, owner) for d in self.declarations)


def _knows_nothing(compute: Callable[..., Any], owner: object) -> bool:
    """True if the function cannot hold objects made for one epoch."""
    if type(compute) is MethodType:
        return compute.__self__ is owner or isinstance(compute.__self__, type)
    function = cast(FunctionType, compute)  # without a closure, or it could not be recognised
    return not function.__defaults__ and not function.__kwdefaults__


class Composition:
    """The graph that `compose` declares, while it does.

    Most tasks declare the same in every epoch. What is declared in the words of the epoch before, in the same order,
    is neither checked nor made again: one look at each processor finds that. What stands for many epochs
    is not declared again at all: see `Graph.lasts`.

    Args:
        before: the graph of an epoch before.
        lasting: the links that are the same in every epoch.
    """

    __slots__ = (
        "_again",
        "_declarations",
        "_lasting",
        "_named",
        "_ordered",
        "_parallel",
        "_puts",
        "_sync_points",
        "_takes",
        "before",
        "epoch",
        "linked",
        "task",
    )

    def __init__(
        self, task: int, epoch: int, before: Graph | None = None, lasting: Container[str] = frozenset()
    ) -> None:
        self.task = task
        self.epoch = epoch
        self.linked: dict[str, tuple[int, ...]] = {}
        """Where links lead that were asked for; most are named more than once."""
        self._lasting = lasting
        self._again = 0  # how many processors were declared again
        self.before = before
        """The graph that is expected again; None after the first processor that differs from it."""
        if before is None:
            self._begin()

    def lasts(self, link: str) -> bool:
        """True if the link leads to the same tasks in every epoch."""
        return link in self._lasting

    def again(
        self,
        compute: Callable[..., Any],
        inbound: Links,
        outbound: Links,
        name: str | None,
        parallel: bool,
        work: Linked,
    ) -> bool:
        """Adds a processor and returns True if the epoch before declared the same one in this place.

        What is compared is of the same type, too: 1 is a task, True and 1.0 are none; and members of an enum may be
        equal to texts, and be called otherwise.
        """
        before, at = self.before, self._again
        if before is None or at == len(before.declarations):
            return False
        known = before.declarations[at]
        if type(compute) is not type(known.compute) or compute != known.compute or parallel is not known.parallel:
            return False
        if name is not known.name and (type(name) is not type(known.name) or name != known.name):
            return False
        for given, (tags, tos) in (inbound, known.inbound), (outbound, known.outbound):
            if given is None:
                if tags:
                    return False
            elif type(given) is not dict or len(given) != len(tags):
                return False
            # Constants of the code, which most are, are the very same objects.
            elif all(map(is_, given, tags)) and all(map(is_, given.values(), tos)):
                continue
            elif not _equal(given, tags, tos):
                return False
        if known.changing and not self._lead_as_before(known.changing, work):
            return False
        self._again = at + 1
        return True

    def _lead_as_before(self, links: tuple[tuple[str, tuple[int, ...]], ...], work: Linked) -> bool:
        for link, ids in links:
            if link not in self.linked:
                try:
                    self.linked[link] = work.neighbors(link)
                except JobError:
                    return False  # `add` finds the same error, and raises it
            if self.linked[link] != ids:
                return False
        return True

    def add(
        self,
        compute: Callable[..., Any],
        inbound: Mapping[str, tuple[int, ...]],
        outbound: Mapping[str, tuple[int, ...]],
        *,
        name: str | None,
        parallel: bool,
        declared: tuple[Links, Links],
    ) -> None:
        """Adds a processor; raises GraphError where it does not fit what is there.

        Args:
            declared: `inbound` and `outbound` as they were declared.
        """
        if self.before is not None:
            self._begin()
        if not callable(compute):
            raise GraphError(f"{self._at()}: a processor's compute must be callable, not {type(compute).__name__}")
        declaration = self._declaration(compute, *declared, name, parallel)
        name = name or name_of(compute)
        code = getattr(compute, "__code__", None)
        if code is not None and code.co_flags & _YIELDS:
            raise GraphError(
                f"{self._at()}: {name!r} has a `yield`, so calling it would run nothing of it: put each value with "
                f"outs.put(tag, value), several of one tag as a list"
            )
        if not _takes_three(compute):
            raise GraphError(f"{self._at()}: {name!r} {_called(compute)}")
        if name in self._named:
            raise GraphError(
                f"{self._at()}: two processors are called {name!r}; give one of them another: "
                f"epoch.processor(..., name='...')"
            )
        if parallel and not outbound:
            raise GraphError(
                f"{self._at()}: processor {name!r} has no outbound channel, so it is a sync point and may change "
                f"state; sync points run one after another: leave parallel=True out. To ask others without a channel, "
                f"flag yourself in compose, epoch.flag(self.task_id), and ask in on_flag"
            )
        if name not in TEXTS and not is_text(name):
            raise GraphError(f"{self._at()}: the name {name!a} of a processor is no text that can be encoded")
        takes, puts = [], []
        for tag, consumers in outbound.items():
            if tag not in TEXTS and not is_text(tag):
                raise self._no_text(tag)
            for consumer in consumers:
                puts.append((tag, consumer))
                if (other := self._puts.get((tag, consumer))) is not None:
                    raise GraphError(
                        f"{self._at()}: processors {other!r} and {name!r} both declare channel {tag!r} to task "
                        f"{consumer}; a channel has one producer: give one of them another tag"
                    )
        for tag, producers in inbound.items():
            if tag not in TEXTS and not is_text(tag):
                raise self._no_text(tag)
            for producer in producers:
                takes.append((tag, producer))  # noqa: PERF401 - a comprehension is a call before Python 3.12
        processor = Processor(name, compute, inbound, outbound, not outbound, parallel, tuple(takes), tuple(puts))
        self._enter(processor, declaration)

    def _begin(self) -> None:
        """Begins a new graph with the processors that were declared again."""
        before, self.before = self.before, None
        self._named: dict[str, Processor] = {}
        self._declarations: list[Declaration] = []
        self._ordered: list[Processor] = []
        self._parallel: list[Processor] = []
        self._sync_points: list[Processor] = []
        self._takes: dict[Channel, None] = {}
        self._puts: dict[Channel, str] = {}
        if before is not None:
            for processor, declaration in zip(before.processors[: self._again], before.declarations, strict=False):
                self._enter(processor, declaration)

    def _enter(self, processor: Processor, declaration: Declaration | None) -> None:
        self._named[processor.name] = processor
        if declaration is not None:
            self._declarations.append(declaration)
        if processor.sync:
            self._sync_points.append(processor)
        else:
            (self._parallel if processor.parallel else self._ordered).append(processor)
        self._takes |= dict.fromkeys(processor.takes)
        self._puts |= dict.fromkeys(processor.puts, processor.name)

    def _declaration(
        self, compute: Callable[..., Any], inbound: Links, outbound: Links, name: str | None, parallel: bool
    ) -> Declaration | None:
        """A declaration that can be compared with the next epoch's; None if it holds more than plain values.

        Nothing made for one epoch is kept for the next one, with all it refers to: no closure, no partial.
        """
        if type(compute) is not MethodType and (type(compute) is not FunctionType or compute.__closure__):
            return None
        if type(parallel) is not bool or (name is not None and type(name) is not str):
            return None
        changing: dict[str, tuple[int, ...]] = {}
        if (takes := self._plain(inbound, changing)) is None or (puts := self._plain(outbound, changing)) is None:
            return None
        return Declaration(compute, name, parallel, takes, puts, tuple(changing.items()))

    def _plain(
        self, links: Links, changing: dict[str, tuple[int, ...]]
    ) -> tuple[tuple[str, ...], tuple[Any, ...]] | None:
        """Tags, and where each of them leads, as plain values; None where they are none.

        Args:
            changing: gets the links among them that may lead elsewhere in another epoch.
        """
        tags: list[str] = []
        tos: list[Any] = []
        for tag, to in links.items() if links else ():
            kind = type(to)
            if not isinstance(tag, str):
                return None
            if kind is str:
                if to not in self._lasting:
                    changing[to] = self.linked[to]
            elif kind is list or kind is tuple:
                for one in to:
                    if type(one) is not int and (type(one) is not str or one not in self._lasting):
                        return None
                to = kind(to)  # a list may be another when it comes again
            elif kind is not int:
                return None
            tags.append(tag)
            tos.append(to)
        return tuple(tags), tuple(tos)

    def _no_text(self, tag: str) -> GraphError:
        return GraphError(f"{self._at()}: the tag {tag!a} is no text that can be encoded: name the channel otherwise")

    def _at(self) -> str:
        return f"task {self.task}, epoch {self.epoch}, compose"

    def graph(self) -> Graph:
        """The declared graph."""
        before = self.before
        if before is not None:
            if self._again == len(before.processors):
                return before
            self._begin()
        return Graph(
            tuple(self._named.values()),
            tuple(self._named),
            tuple(self._ordered),
            tuple(self._parallel),
            tuple(self._sync_points),
            tuple(self._takes),
            tuple(self._puts),
            tuple(self._declarations) if len(self._declarations) == len(self._named) else (),
        )


def _equal(given: dict[str, Any], tags: tuple[str, ...], tos: tuple[Any, ...]) -> bool:
    """True if these links equal the declared ones, in type, too. Both have the same number of tags."""
    for (tag, to), known_tag, known_to in zip(given.items(), tags, tos, strict=True):
        if tag is not known_tag and (type(tag) is not type(known_tag) or tag != known_tag):
            return False
        if to is not known_to:
            kind = type(to)
            if kind is not type(known_to):
                return False
            if (kind is list or kind is tuple) and list(map(type, to)) != list(map(type, known_to)):
                return False
            if to != known_to:
                return False
    return True


def name_of(compute: Callable[..., Any]) -> str:
    """The name of a processor that has none: that of its function."""
    if type(compute) is MethodType:  # plain methods and functions, which most are, are asked for nothing they lack
        compute = compute.__func__
    if type(compute) is FunctionType and compute.__name__ != "<lambda>":
        return compute.__name__
    inner: Any = compute
    while hasattr(inner, "func"):  # functools.partial
        inner = inner.func
    name = getattr(inner, "__name__", type(inner).__name__)
    return "processor" if name == "<lambda>" else str(name)


_LEFT_OPEN: Final = getattr(functools, "Placeholder", object())
"""Python 3.14 puts this into a partial for an argument that comes later."""


def _takes_three(compute: Callable[..., Any]) -> bool:
    """False if calling compute(epoch, ins, outs) would fail; True if that cannot be seen.

    What is declared anew in every epoch comes here in every epoch: to count is many times faster than
    `inspect.signature`. And it looks at the code that is called, not at what a decorator says of it.
    """
    given, named = 3, frozenset[str]()
    while type(compute) is functools.partial:
        if any(one is _LEFT_OPEN for one in compute.args):
            return True
        given += len(compute.args)
        named |= compute.keywords.keys()
        compute = compute.func
    if type(compute) is MethodType:
        given += 1
        compute = compute.__func__
    if type(compute) is not FunctionType:
        return True
    code = compute.__code__
    taken, by_name = code.co_argcount, code.co_kwonlyargcount
    if given == taken and not by_name and not named:  # as a rule
        return True
    if given > taken and not code.co_flags & inspect.CO_VARARGS:
        return False
    positional, others = code.co_varnames[:taken], frozenset(code.co_varnames[taken : taken + by_name])
    if not named.isdisjoint(positional[:given]):  # given twice
        return False
    required = {
        *positional[given : taken - len(compute.__defaults__ or ())],
        *others.difference(compute.__kwdefaults__ or ()),
    }
    unknown = named.difference(positional, others)
    return named >= required and (not unknown or bool(code.co_flags & inspect.CO_VARKEYWORDS))


def _called(compute: Callable[..., Any]) -> str:
    """Returns how a compute is called, and which parameters it takes instead, for a message."""
    given = ["epoch", "ins", "outs"]
    while isinstance(compute, functools.partial):
        given[:-3] = ["..."]
        compute = compute.func
    function: Any = compute
    if type(compute) is MethodType:
        given.insert(0, "cls" if isinstance(compute.__self__, type) else "self")
        function = compute.__func__
    code = function.__code__
    return (
        f"is called as {function.__name__}({', '.join(given)}), but takes "
        f"{signature(function, follow_wrapped=False)}, defined at {code.co_filename}, line {code.co_firstlineno}"
    )
