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

UNNAMED: Final = "processor"
"""The default name of a lambda."""
RELAY: Final = "relay"
"""Names the processor that passes the result of a collective on: `grad (relay)`."""
_GENERATOR_FLAGS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR

__all__ = [
    "ENCODABLE_TEXTS",
    "RELAY",
    "UNNAMED",
    "Composition",
    "ComputeWrapper",
    "Graph",
    "Processor",
    "is_text",
    "name_of",
]

ENCODABLE_TEXTS: Final[set[str]] = set()
"""Caches names that can be encoded: a lookup is cheaper than the call of `is_text`."""
_MOST_TEXTS: Final = 1024


def is_text(name: str) -> bool:
    """True if a name can be encoded as UTF-8. Lone surrogates, which file names may contain, cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    if len(ENCODABLE_TEXTS) < _MOST_TEXTS:
        ENCODABLE_TEXTS.add(name)
    return True


Channel = tuple[str, int]
"""(tag, producer) of an inbound channel, (tag, consumer) of an outbound channel."""
Links = Mapping[str, Any] | None
"""The inbound or outbound channels of a processor as declared: tag -> a link's name, a task, or a sequence of them."""


class ComputeWrapper(Protocol):
    """Makes a compute of a function that takes other arguments. Equal wrappers make computes that do the same."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments with which the function is called."""

    @property
    def optional(self) -> tuple[str, ...]:
        """Tags of channels, inbound or outbound, that carry no item in some epochs. Both tasks know in which."""

    @property
    def derives(self) -> DerivedChannel | None:
        """The local channel whose item the processor derives, in epochs that need this; None: it runs in all epochs."""

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `compute(epoch, ins, outs)`: most call `function`, and put its result into channels."""


@frozen
class DerivedChannel:
    """A local channel of a task: its item is that of an inbound channel, or is derived from that by a processor.

    Attributes:
        tag: of the local channel.
        source: the inbound channel, (tag, producer).
        mark: if the inbound item has this digest, the processor runs, and supplies the item of the local channel.
    """

    tag: str
    source: Channel
    mark: bytes


class LinkResolver(Protocol):
    """Resolves a task's links to neighbors in the epoch that is composed."""

    def neighbors(self, link: str) -> tuple[int, ...]:
        """Returns the tasks that a link leads to. Raises JobError if the link is unknown, or names a wrong task."""


@frozen
class Processor:
    """One processor of a task.

    Attributes:
        inbound: tag -> producers, in the order declared.
        outbound: tag -> consumers, in the order declared.
        sync: the processor is a sync point: it has no outbound channel, runs after all others, and may change state.
        parallel: the processor runs as soon as its inputs are ready.
        takes: the inbound channels for whose items it waits; not the optional ones.
        puts: the outbound channels that it puts in every epoch.
        may_put: its optional outbound channels.
        derives: if set, the processor runs only in epochs in which it must derive this.
    """

    name: str
    compute: Callable[..., Any]
    inbound: Mapping[str, tuple[int, ...]]
    outbound: Mapping[str, tuple[int, ...]]
    sync: bool
    parallel: bool
    takes: tuple[Channel, ...]
    puts: tuple[Channel, ...]
    may_put: tuple[Channel, ...] = ()
    derives: DerivedChannel | None = None


@frozen
class Declaration:
    """The arguments with which `compose` declared a processor.

    Attributes:
        wrapper: makes a compute of `compute`; None: it is one.
        inbound, outbound: the tags, and where each leads: a link, a task, or a sequence of them.
        changing: the links in them that may lead to other tasks in another epoch, and their tasks in this epoch.
    """

    compute: Callable[..., Any]
    wrapper: ComputeWrapper | None
    name: str | None
    parallel: bool
    inbound: tuple[tuple[str, ...], tuple[Any, ...]]
    outbound: tuple[tuple[str, ...], tuple[Any, ...]]
    changing: tuple[tuple[str, tuple[int, ...]], ...]


@frozen
class Graph:
    """A task's graph as `compose` declared it. Epochs that declare equal processors share one object.

    Attributes:
        names: the names of the processors.
        ordered: processors that run one after another, before the sync points.
        parallel: processors that run as soon as their inputs are ready.
        sync_points: processors that run last.
        channels_in: (tag, producer) of every inbound channel that is pulled in every epoch, each once.
        channels_out: (tag, consumer) of every outbound channel.
        declarations: one for each processor; empty if one of them cannot be compared with the next epoch's.
        collectives: the tags of the collectives whose results the task gets.
        derived: source -> the local channel that has its item, and the processor that may derive it.
    """

    processors: tuple[Processor, ...]
    names: tuple[str, ...]
    ordered: tuple[Processor, ...]
    parallel: tuple[Processor, ...]
    sync_points: tuple[Processor, ...]
    channels_in: tuple[Channel, ...]
    channels_out: tuple[Channel, ...]
    declarations: tuple[Declaration, ...]
    collectives: tuple[str, ...]
    derived: Mapping[Channel, tuple[DerivedChannel, Processor]]

    def is_reusable(self, owner: object) -> bool:
        """True if the graph is valid in every epoch, so that `compose` need not run again.

        Args:
            owner: the task whose `compose` declared the graph. Its own methods and plain functions refer to no object
                of an epoch; other objects, and the defaults of a function, may have been created for this epoch.
        """
        known = len(self.declarations) == len(self.processors)
        return known and all(not d.changing and _is_free_of_epoch(d.compute, owner) for d in self.declarations)


def _is_free_of_epoch(compute: Callable[..., Any], owner: object) -> bool:
    """True if the function surely refers to no object that was created for one epoch."""
    if type(compute) is MethodType:
        return compute.__self__ is owner or isinstance(compute.__self__, type)
    function = cast(FunctionType, compute)  # it has no closure, or there would be no declaration
    return not function.__defaults__ and not function.__kwdefaults__


class Composition:
    """Builds a task's graph while `compose` declares it.

    Most tasks declare the same processors in every epoch. A declaration that equals the previous epoch's, in the same
    place, is neither checked nor built again. A graph that is valid in every epoch is not even declared again: see
    `Graph.is_reusable`.

    Args:
        before: the graph of an earlier epoch.
        lasting: the links that lead to the same tasks in every epoch.
    """

    __slots__ = (
        "_by_name",
        "_declarations",
        "_derived",
        "_lasting",
        "_ordered",
        "_parallel",
        "_puts",
        "_repeated",
        "_sync_points",
        "_takes",
        "before",
        "collectives",
        "epoch",
        "linked",
        "results",
        "task",
    )

    def __init__(
        self, task: int, epoch: int, before: Graph | None = None, lasting: Container[str] = frozenset()
    ) -> None:
        self.task = task
        self.epoch = epoch
        self.linked: dict[str, tuple[int, ...]] = {}
        """Caches the neighbors of links, since most links are named more than once."""
        self.collectives: dict[tuple[int, ...], int] = {}
        """How many collectives each group of tasks has so far."""
        self.results: dict[str, tuple[int, ...]] = {}
        """Results of collectives: tag -> the tasks that this task has them from."""
        self._lasting = lasting
        self._repeated = 0  # processors that were declared as in `before`
        self.before = before
        """The graph that is expected again; None after the first processor that differs."""
        if before is None:
            self._begin_new_graph()

    def is_constant(self, link: str) -> bool:
        """True if the link leads to the same tasks in every epoch."""
        return link in self._lasting

    def add_repeated(
        self,
        compute: Callable[..., Any],
        inbound: Links,
        outbound: Links,
        name: str | None,
        parallel: bool,
        work: LinkResolver,
        wrapper: ComputeWrapper | None = None,
    ) -> bool:
        """Takes the processor of `before` if its declaration in this place is equal. Returns False if not: call `add`.

        Types are compared, too: 1 is a task, True and 1.0 are not, and a member of an enum may equal a text.
        """
        before, at = self.before, self._repeated
        if before is None or at == len(before.declarations):
            return False
        known = before.declarations[at]
        if type(compute) is not type(known.compute) or compute != known.compute or parallel is not known.parallel:
            return False
        if name is not known.name and (type(name) is not type(known.name) or name != known.name):
            return False
        if wrapper is not known.wrapper and wrapper != known.wrapper:
            return False
        for given, (tags, tos) in (inbound, known.inbound), (outbound, known.outbound):
            if given is None:
                if tags:
                    return False
            elif type(given) is not dict or len(given) != len(tags):
                return False
            # Most are constants of the code: the same objects in each epoch.
            elif all(map(is_, given, tags)) and all(map(is_, given.values(), tos)):
                continue
            elif not _links_equal(given, tags, tos):
                return False
        if known.changing and not self._links_unchanged(known.changing, work):
            return False
        self._repeated = at + 1
        return True

    def _links_unchanged(self, links: tuple[tuple[str, tuple[int, ...]], ...], work: LinkResolver) -> bool:
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
        wrapper: ComputeWrapper | None = None,
    ) -> None:
        """Checks and adds a processor; raises GraphError if it is invalid or conflicts with another processor.

        Args:
            wrapper: makes the processor's compute of `compute`.
            declared: `inbound` and `outbound` as the user wrote them, with names of links.
        """
        if self.before is not None:
            self._begin_new_graph()
        if not callable(compute):
            raise GraphError(f"{self._where()}: a processor's compute must be callable, not {type(compute).__name__}")
        declaration = self._declaration(compute, wrapper, *declared, name, parallel)
        name = name or name_of(compute)
        code = getattr(compute, "__code__", None)
        if code is not None and code.co_flags & _GENERATOR_FLAGS:
            raise GraphError(
                f"{self._where()}: {name!r} has a `yield`, so calling it would run nothing of it: put each value with "
                f"outs.put(tag, value), several of one tag as a list"
            )
        arguments = _ARGUMENTS if wrapper is None else wrapper.arguments
        if not _accepts(compute, len(arguments)):
            raise GraphError(f"{self._where()}: {name!r} {_describe_call(compute, arguments)}")
        if name in self._by_name:
            raise GraphError(
                f"{self._where()}: two processors are called {name!r}; give one of them another: "
                f"epoch.processor(..., name='...')"
            )
        if parallel and not outbound:
            raise GraphError(
                f"{self._where()}: processor {name!r} has no outbound channel, so it is a sync point and may change "
                f"state; sync points run one after another: leave parallel=True out. To ask others without a channel, "
                f"flag yourself in compose, epoch.flag(self.task_id), and ask in on_flag"
            )
        if name not in ENCODABLE_TEXTS and not is_text(name):
            raise GraphError(f"{self._where()}: the name {name!a} of a processor is no text that can be encoded")
        takes: list[Channel] = []
        puts: list[Channel] = []
        may_put: list[Channel] = []
        optional, derives = ((), None) if wrapper is None else (wrapper.optional, wrapper.derives)
        for tag, consumers in outbound.items():
            if tag not in ENCODABLE_TEXTS and not is_text(tag):
                raise self._tag_error(tag)
            for consumer in consumers:
                (may_put if tag in optional else puts).append((tag, consumer))
                if (other := self._puts.get((tag, consumer))) is not None:
                    raise GraphError(
                        f"{self._where()}: processors {other!r} and {name!r} both declare channel {tag!r} to task "
                        f"{consumer}; a channel has one producer: give one of them another tag"
                    )
        for tag, producers in inbound.items():
            if tag not in ENCODABLE_TEXTS and not is_text(tag):
                raise self._tag_error(tag)
            if tag in optional:
                continue
            for producer in producers:
                takes.append((tag, producer))  # noqa: PERF401 - a comprehension is a call before Python 3.12
        if wrapper is not None:
            compute = wrapper.wrap(compute)
        processor = Processor(
            name, compute, inbound, outbound, not outbound, parallel, tuple(takes), tuple(puts), tuple(may_put), derives
        )
        self._append(processor, declaration)

    def _begin_new_graph(self) -> None:
        """Begins a new graph with the processors that equal those of `before` so far."""
        before, self.before = self.before, None
        self._by_name: dict[str, Processor] = {}
        self._derived: dict[Channel, tuple[DerivedChannel, Processor]] = {}
        self._declarations: list[Declaration] = []
        self._ordered: list[Processor] = []
        self._parallel: list[Processor] = []
        self._sync_points: list[Processor] = []
        self._takes: dict[Channel, None] = {}
        self._puts: dict[Channel, str] = {}
        if before is not None:
            for processor, declaration in zip(before.processors[: self._repeated], before.declarations, strict=False):
                self._append(processor, declaration)

    def _append(self, processor: Processor, declaration: Declaration | None) -> None:
        """Adds a processor to the graph, in its order."""
        self._by_name[processor.name] = processor
        if declaration is not None:
            self._declarations.append(declaration)
        if (derived := processor.derives) is not None:
            self._derived[derived.source] = derived, processor
        elif processor.sync:
            self._sync_points.append(processor)
        else:
            (self._parallel if processor.parallel else self._ordered).append(processor)
        self._takes |= dict.fromkeys(processor.takes)
        self._puts |= dict.fromkeys((*processor.puts, *processor.may_put), processor.name)

    def _declaration(
        self,
        compute: Callable[..., Any],
        wrapper: ComputeWrapper | None,
        inbound: Links,
        outbound: Links,
        name: str | None,
        parallel: bool,
    ) -> Declaration | None:
        """Returns a declaration to compare with the next epoch's; None if it refers to objects that are not plain.

        A closure or partial may refer to objects of this epoch, and would keep them alive for the next epoch.
        """
        if type(compute) is not MethodType and (type(compute) is not FunctionType or compute.__closure__):
            return None
        if type(parallel) is not bool or (name is not None and type(name) is not str):
            return None
        changing: dict[str, tuple[int, ...]] = {}
        if (takes := self._plain_links(inbound, changing)) is None or (
            puts := self._plain_links(outbound, changing)
        ) is None:
            return None
        return Declaration(compute, wrapper, name, parallel, takes, puts, tuple(changing.items()))

    def _plain_links(
        self, links: Links, changing: dict[str, tuple[int, ...]]
    ) -> tuple[tuple[str, ...], tuple[Any, ...]] | None:
        """Returns the tags, and where each leads; None if they are not plain values.

        Args:
            changing: receives the links among them that may lead to other tasks in another epoch.
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
                to = kind(to)  # a copy: the user may change the list later
            elif kind is not int:
                return None
            tags.append(tag)
            tos.append(to)
        return tuple(tags), tuple(tos)

    def _tag_error(self, tag: str) -> GraphError:
        return GraphError(
            f"{self._where()}: the tag {tag!a} is no text that can be encoded: name the channel otherwise"
        )

    def _where(self) -> str:
        """Names the task and epoch, for messages."""
        return f"task {self.task}, epoch {self.epoch}, compose"

    def _check_results(self) -> None:
        """Raises GraphError if no processor of this task reads the result of a collective that it gets."""
        for tag, producers in self.results.items():
            readers = (p for p in self._by_name.values() if tag in p.inbound and p.name != f"{tag} ({RELAY})")
            if producers and not any(p.inbound[tag] == producers for p in readers):
                raise GraphError(
                    f"{self._where()}: nothing reads {tag!r}, the result of a collective: give it a `then`, name it in "
                    f"another collective, inbound=({tag!r},), or in a processor, inbound={{{tag!r}: self.task_id}}"
                )

    def graph(self) -> Graph:
        """Ends the declaration. Returns the graph: `before` itself if all declarations equal its own.

        Raises:
            GraphError: no processor reads the result of a collective.
        """
        before = self.before
        if before is not None:
            if self._repeated == len(before.processors):
                return before
            self._begin_new_graph()
        self._check_results()
        for derived, _ in self._derived.values():
            self._takes.pop((derived.tag, self.task), None)  # it is local: nothing is pulled
        return Graph(
            tuple(self._by_name.values()),
            tuple(self._by_name),
            tuple(self._ordered),
            tuple(self._parallel),
            tuple(self._sync_points),
            tuple(self._takes),
            tuple(self._puts),
            tuple(self._declarations) if len(self._declarations) == len(self._by_name) else (),
            tuple(self.results),
            self._derived,
        )


def _links_equal(given: dict[str, Any], tags: tuple[str, ...], tos: tuple[Any, ...]) -> bool:
    """True if `given` equals the known tags and targets, also in type. Both must have the same number of tags."""
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
    """Returns the default name of a processor: the name of its function."""
    if type(compute) is MethodType:  # the fast path: most are plain methods and functions
        compute = compute.__func__
    if type(compute) is FunctionType and compute.__name__ != "<lambda>":
        return compute.__name__
    inner: Any = compute
    while hasattr(inner, "func"):  # functools.partial
        inner = inner.func
    name = getattr(inner, "__name__", type(inner).__name__)
    return UNNAMED if name == "<lambda>" else str(name)


_PLACEHOLDER: Final = getattr(functools, "Placeholder", object())
"""Marks an argument that a partial leaves open, from Python 3.14 on."""


_ARGUMENTS: Final = ("epoch", "ins", "outs")


def _accepts(compute: Callable[..., Any], arguments: int) -> bool:
    """False if a call with so many arguments would surely fail.

    It counts parameters, since `inspect.signature` is many times slower, and changing graphs are checked in every
    epoch. It checks the code that is called, not the signature that a decorator announces.
    """
    given, named = arguments, frozenset[str]()
    while type(compute) is functools.partial:
        if any(one is _PLACEHOLDER for one in compute.args):
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


def _describe_call(compute: Callable[..., Any], arguments: tuple[str, ...]) -> str:
    """Returns the end of an error message, after the name of `compute`: how it is called, but what it takes, and where
    it is defined."""
    given = list(arguments)
    while isinstance(compute, functools.partial):
        given[: -len(arguments)] = ["..."]
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
