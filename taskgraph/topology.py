"""The neighbors of tasks: named links, each a function of (task_id, tasks, epoch), so they may change every epoch.

A link must return the same ids in every process and every call: every replica of every task calls it. `ins.all` lists
values in the order of the ids.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from types import FunctionType
from typing import Final, NamedTuple, TypeVar
from weakref import WeakSet

from taskgraph.errors import GraphError, JobError
from taskgraph.signatures import signature

__all__ = [
    "Link",
    "Topology",
    "as_topology",
    "bipartite",
    "edges",
    "full",
    "grid",
    "inverse",
    "ring",
    "star",
    "tree",
]

Link = Callable[[int, int, int], Iterable[int]]
"""(task_id, tasks, epoch) -> task ids."""


_CONSTANT: Final[WeakSet[Link]] = WeakSet()
"""Links that are the same in every epoch. A mark on the function would not do: `functools.wraps` copies attributes."""
_COMMON_TYPES: Final = frozenset((tuple, list, range))
"""The types that most links return: checked first, since a check against an abstract class is slow."""
_Table = Mapping[int, Sequence[int]]
_MAX_CACHED_IDS = 1 << 20
"""The most cached neighbors of constant links: 8 MiB."""
_MAX_CACHED_EPOCHS = 66
"""The most epochs whose edges are cached, for links that change: with the default `epochs_ahead`, the tasks of a node
are at work in as many epochs."""
_MAX_CACHED_PAIRS = 1 << 16
"""The most pairs in the cached epochs: 20 MiB. Above it, fewer epochs are cached."""
_MIN_CACHED_EPOCHS = 4
"""Epochs that are always cached: the one at work, the next, and one of a restart or replay."""
_REPEATS = 3
"""Calls of a link that are repeated, to find links that return other ids each time. Only calls that return ids count.
(For a function of `edges` one call is repeated.) In one process the cache would hide the difference."""
_SAME_ANSWER_ADVICE = (
    "every node asks on its own and needs the same answer, so let it follow from the arguments alone, as what "
    "np.random.default_rng([7, epoch]) draws"
)


class Topology(Mapping[str, Link]):
    """An immutable mapping of named links. `|` joins two topologies, or a topology and a dict of functions.

    Raises:
        JobError: a name is no string, or a link no function of three arguments.
    """

    def __init__(self, links: Mapping[str, Link] | None = None) -> None:
        links = {} if links is None else links
        if not isinstance(links, Mapping):
            name = links if isinstance(links, str) else getattr(links, "__name__", "")
            call = f"; call it: tg.{name}()" if name in __all__ else ""
            raise JobError(f"a topology is made of named links, {{name: function}}, not of {links!r}{call}")
        for name, link in links.items():
            if not isinstance(name, str) or not name:
                raise JobError(f"a link's name is a string, not {name!r}")
            if not callable(link):
                raise JobError(f"link {name!r} must be a function (task_id, tasks, epoch) -> task ids, not {link!r}")
            _check_parameters(f"link {name!r}", link)
        self._links = dict(links)
        self.constant = frozenset(name for name, link in links.items() if _is_constant(link))
        """The links that are the same in every epoch."""
        self.cached: dict[tuple[str, int, int], tuple[int, ...]] = {}
        """(link, task, number of tasks) -> neighbors, for constant links."""
        self._cache_room = _MAX_CACHED_IDS
        self._repeats_left = dict.fromkeys(links.keys() - self.constant, _REPEATS)

    def __getitem__(self, name: str) -> Link:
        return self._links[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._links)

    def __len__(self) -> int:
        return len(self._links)

    def __repr__(self) -> str:
        return f"Topology({', '.join(self._links)})"

    def __or__(self, other: Mapping[str, Link]) -> Topology:
        if not isinstance(other, Mapping):
            return NotImplemented
        both = self._links.keys() & other.keys()
        if both:
            raise JobError(
                f"both topologies have a link {min(both)!r}: rename one, as in "
                f"tg.Topology({{'other_name': topology[{min(both)!r}]}})"
            )
        return Topology({**self._links, **other})

    def __ror__(self, other: Mapping[str, Link]) -> Topology:
        return Topology(other) | self if isinstance(other, Mapping) else NotImplemented

    def neighbors(self, link: str, task_id: int, tasks: int, epoch: int) -> tuple[int, ...]:
        """Returns the neighbors of a task along a link, checked.

        Raises:
            GraphError: there is no such link; or it names a task that does not exist, names a task twice, or returns
                other tasks in a second call.
        """
        found = self.cached.get((link, task_id, tasks))
        if found is not None:
            return found
        if link not in self._links:
            cached = ", ".join(repr(name) for name in self._links) or "none"
            raise GraphError(f"task {task_id}: there is no link {link!r}; the topology's links are: {cached}")
        found = _call_link(self._links[link], f"link {link!r}", task_id, tasks, epoch)
        if link in self.constant and len(found) < self._cache_room:
            self._cache_room -= len(found) + 1
            self.cached[link, task_id, tasks] = found
        if found and (left := self._repeats_left.get(link)):
            again = _call_link(self._links[link], f"link {link!r}", task_id, tasks, epoch)
            if again != found:
                raise GraphError(
                    f"task {task_id}: link {link!r} names {list(found)} in epoch {epoch}, and {list(again)} when it "
                    f"is asked once more: {_SAME_ANSWER_ADVICE}"
                )
            self._repeats_left[link] = left - 1
        return found


def _check_parameters(what: str, link: Link) -> None:
    """Raises JobError if a link does not accept (task_id, tasks, epoch)."""
    try:
        takes = signature(link)
    except ValueError:  # a function in C without a signature
        return
    try:
        takes.bind(0, 1, 0)
    except TypeError:
        raise JobError(
            f"{what} is called with (task_id, tasks, epoch), but takes {takes}: lambda task_id, tasks, epoch: ..."
        ) from None


def _call_link(link: Link, what: str, task_id: int, tasks: int, epoch: int) -> tuple[int, ...]:
    """Calls a link, and returns the task ids. Raises GraphError if something is no task id, or is there twice."""
    given = link(task_id, tasks, epoch)
    if type(given) is range:  # nothing is in it twice, and its ends are its extremes
        found = tuple(given)
        if not found or (0 <= found[0] < tasks and 0 <= found[-1] < tasks):
            return found
    if type(given) not in _COMMON_TYPES and (not isinstance(given, Iterable) or isinstance(given, str | bytes)):
        raise GraphError(f"task {task_id}: {what} must return task ids, as a list; it returned {given!r}")
    ids = []
    for neighbor in given:
        number = neighbor
        if type(neighbor) is not int:
            try:
                number = operator.index(neighbor)
            except TypeError:
                raise GraphError(f"task {task_id}: {what} names {neighbor!r}, which is no task id") from None
            if isinstance(neighbor, bool):  # a mask where ids were meant
                raise GraphError(f"task {task_id}: {what} names {neighbor!r}, which is no task id")
        if not 0 <= number < tasks:
            raise GraphError(f"task {task_id}: {what} names task {number}, but the job has tasks 0 to {tasks - 1}")
        ids.append(number)
    if len(ids) > 1 and len(set(ids)) != len(ids):
        twice = Counter(ids).most_common(1)[0][0]
        raise GraphError(f"task {task_id}: {what} names task {twice} twice; list(dict.fromkeys(ids)) has each once")
    if isinstance(given, set | frozenset):  # it has no order of its own
        ids.sort()
    return tuple(ids)


def _mark_constant(links: dict[str, Link]) -> Topology:
    """Makes a topology of links that are the same in every epoch, so that their neighbors are cached."""
    _CONSTANT.update(links.values())
    return Topology(links)


def _is_constant(link: Link) -> bool:
    return type(link) is FunctionType and link in _CONSTANT  # a callable of another type may have no hash


def as_topology(links: Mapping[str, Link]) -> Topology:
    """Makes a topology from a dict of functions; returns a topology unchanged."""
    return links if isinstance(links, Topology) else Topology(links)


def _check_count(what: str, number: int) -> int:
    """Returns the number. Raises JobError unless it is an int of at least 1."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise JobError(f"{what} must be an int of at least 1, not {number!r}")
    return number


def tree(fanout: int = 2) -> Topology:
    """Links `parents` (one, or none for the root, task 0) and `children` (up to `fanout`)."""
    _check_count("tree: fanout", fanout)
    return _mark_constant(
        {
            "parents": lambda i, n, e: ((i - 1) // fanout,) if i else (),
            "children": lambda i, n, e: range(min(n, i * fanout + 1), min(n, i * fanout + fanout + 1)),
        }
    )


def star() -> Topology:
    """Links `hub` (task 0, for all others) and `spokes` (all others, for task 0)."""
    return _mark_constant(
        {"hub": lambda i, n, e: (0,) if i else (), "spokes": lambda i, n, e: () if i else range(1, n)}
    )


def ring() -> Topology:
    """Links `left` and `right`; a task alone has no neighbors."""
    return _mark_constant(
        {
            "left": lambda i, n, e: ((i - 1) % n,) if n > 1 else (),
            "right": lambda i, n, e: ((i + 1) % n,) if n > 1 else (),
        }
    )


def full() -> Topology:
    """Links `peers` (all others) and `all` (oneself too)."""
    return _mark_constant({"peers": lambda i, n, e: (j for j in range(n) if j != i), "all": lambda i, n, e: range(n)})


def grid(rows: int, cols: int, periodic: bool = False) -> Topology:
    """Links `north`, `south`, `west`, `east` on a grid of rows x cols tasks, numbered row by row.

    With `periodic` the last row or column is next to the first one; a task alone in it is its own neighbor.

    Raises:
        GraphError: when it is used; the job has not rows x cols tasks. It fails a job: JobFailed, with the same text.
    """
    _check_count("grid: rows", rows), _check_count("grid: cols", cols)

    def step(down: int, right: int) -> Link:
        def link(i: int, n: int, e: int) -> Sequence[int]:
            if n != rows * cols:
                raise GraphError(f"the grid has {rows} x {cols} = {rows * cols} tasks, the job has {n}")
            row, col = i // cols + down, i % cols + right
            if periodic:
                row, col = row % rows, col % cols
            elif not (0 <= row < rows and 0 <= col < cols):
                return ()
            return (row * cols + col,)

        return link

    return _mark_constant({"north": step(-1, 0), "south": step(1, 0), "west": step(0, -1), "east": step(0, 1)})


def bipartite(servers: int) -> Topology:
    """Tasks 0 to servers - 1 are servers, the rest workers: links `servers` (for workers), `workers` (for servers).

    Raises:
        GraphError: when it is used; the job has no task left to be a worker. It fails a job: JobFailed, with the same
            text.
    """
    _check_count("bipartite: servers", servers)

    def check_workers(tasks: int) -> None:
        if tasks <= servers:
            raise GraphError(f"bipartite({servers}): a job of {tasks} tasks has no workers; give it more tasks")

    def to_servers(i: int, n: int, e: int) -> Sequence[int]:
        check_workers(n)
        return range(servers) if i >= servers else ()

    def to_workers(i: int, n: int, e: int) -> Sequence[int]:
        check_workers(n)
        return range(servers, n) if i < servers else ()

    return _mark_constant({"servers": to_servers, "workers": to_workers})


Pairs = Iterable[tuple[int, int]] | Mapping[int, Iterable[int]]
"""Directed edges: (from, to), or {from: [to, ...]}."""


def edges(pairs: Pairs | Callable[[int], Pairs], *, out: str = "out", inbound: str = "in") -> Topology:
    """Links from directed edges: `out` leads along them, `inbound` against them, each in the order of the edges.

    Args:
        pairs: pairs (from, to), or a mapping {from: [to, ...]}, or a function of the epoch that returns either.
        out, inbound: what the two links are called.

    Raises:
        JobError: something is no edge; from a function: when used.
        GraphError: when it is used; an edge names a task that does not exist, or is there twice, or a function returns
            others each time. It fails a job: JobFailed, with the same text.
    """
    if out == inbound:
        raise JobError(f"edges: the two links need two names, not {out!r} for both")
    edges_of: Callable[[int], _Edges]
    if callable(pairs):
        of_epoch, repeated = pairs, False

        def make_edges(epoch: int) -> tuple[_Edges, int]:
            nonlocal repeated
            found = _edge_tables(of_epoch(epoch))
            if found.pairs and not repeated:
                if _edge_tables(of_epoch(epoch)) != found:
                    raise GraphError(
                        f"edges: the function returns other pairs when it is asked once more for epoch {epoch}: "
                        f"{_SAME_ANSWER_ADVICE}"
                    )
                repeated = True
            return found, found.pairs

        edges_of = _cache_latest(make_edges)
    else:
        fixed = _edge_tables(pairs)

        def edges_of(epoch: int) -> _Edges:
            return fixed

    def link(table: Callable[[_Edges], _Table]) -> Link:
        def along(i: int, n: int, e: int) -> Sequence[int]:
            found = edges_of(e)
            if found.largest >= n:  # also where the task asking has no part in that edge
                raise GraphError(f"edges name task {found.largest}, but the job has tasks 0 to {n - 1}")
            return table(found).get(i, ())

        return along

    made = {out: link(lambda found: found.to), inbound: link(lambda found: found.back)}
    return Topology(made) if callable(pairs) else _mark_constant(made)


class _Edges(NamedTuple):
    """The edges of an epoch: tables in both directions, the largest task id, and the number of pairs."""

    to: _Table
    back: _Table
    largest: int
    pairs: int


def _edge_tables(pairs: Pairs) -> _Edges:
    """Checks pairs, and makes tables of them for both directions."""
    if not isinstance(pairs, Iterable):
        raise JobError(f"edges takes pairs (from, to) of task ids, not {pairs!r}")
    if isinstance(pairs, Mapping):
        try:
            pairs = [(one, other) for one, others in pairs.items() for other in others]
        except TypeError:
            raise JobError(
                f"edges takes pairs (from, to) of task ids, not {pairs!r:.100}; as a dict, {{from: [to, ...]}}"
            ) from None
    to: dict[int, list[int]] = {}
    back: dict[int, list[int]] = {}
    largest = count = 0
    for pair in pairs:
        try:
            one, other = (operator.index(task) for task in pair)
        except (TypeError, ValueError):
            raise JobError(f"edges takes pairs (from, to) of task ids, not {pair!r}") from None
        if min(one, other) < 0:
            raise JobError(f"edges: {pair!r} names a task below 0")
        to.setdefault(one, []).append(other)
        back.setdefault(other, []).append(one)
        largest = max(largest, one, other)
        count += 1
    return _Edges(to, back, largest, count)


_Key = TypeVar("_Key")
_Made = TypeVar("_Made")


def _cache_latest(make: Callable[[_Key], tuple[_Made, int]]) -> Callable[[_Key], _Made]:
    """Returns a function that caches `make(key)` for the latest keys. `make` returns a value and its number of pairs.

    Several threads may call it.
    """
    kept: dict[_Key, tuple[_Made, int]] = {}
    lock = Lock()
    pairs = 0

    def get(key: _Key) -> _Made:
        nonlocal pairs
        found = kept.get(key)
        if found is None:
            found = make(key)
            with lock:
                if key not in kept:  # nor made in another thread meanwhile
                    kept[key] = found
                    pairs += found[1]
                while len(kept) > _MAX_CACHED_EPOCHS or (pairs > _MAX_CACHED_PAIRS and len(kept) > _MIN_CACHED_EPOCHS):
                    pairs -= kept.pop(next(iter(kept)))[1]
        return found[0]

    return get


def inverse(link: Link) -> Link:
    """Returns the inverse of a link: it leads to the tasks that have this task as a neighbor, in the order of ids.

    It asks the link for every task, once in each epoch; for constant links (`tree`, `ring`, ...) only once.

    tg.Topology({"followers": followers, "following": tg.inverse(followers)})
    topology | {"following": tg.inverse(topology["followers"])}
    """
    if not callable(link):
        raise JobError(f"inverse takes a link's function, as in tg.inverse(topology['children']), not {link!r}")
    _check_parameters("inverse: the link", link)
    what = f"the inverted link {getattr(link, '__name__', '')!r}"

    def invert(key: tuple[int, int]) -> tuple[_Table, int]:
        (tasks, epoch), pairs = key, 0
        back: dict[int, list[int]] = {}
        for task in range(tasks):
            neighbors = _call_link(link, what, task, tasks, epoch)
            pairs += len(neighbors)
            for neighbor in neighbors:
                back.setdefault(neighbor, []).append(task)
        return back, pairs

    table = _cache_latest(invert)
    if not _is_constant(link):
        return lambda task_id, tasks, epoch: table((tasks, epoch)).get(task_id, ())
    constant = _mark_constant({"back": lambda task_id, tasks, epoch: table((tasks, 0)).get(task_id, ())})
    return constant["back"]
