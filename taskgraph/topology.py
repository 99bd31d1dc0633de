"""The neighbors of tasks: named links, each a function of (task_id, tasks, epoch), so they may change every epoch.

A link gives the same ids wherever and however often it is called: every replica of every task asks on its own. The
order of the ids is the order in which `ins.all` lists what came along the link.
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


_LASTING: Final[WeakSet[Link]] = WeakSet()
"""Links that are the same in every epoch. An attribute would not do: `functools.wraps` copies attributes."""
_ORDERED: Final = frozenset((tuple, list, range))
"""The types that most links return: a check against an abstract class is slow."""
_Table = Mapping[int, Sequence[int]]
_KEPT_IDS = 1 << 20
"""Cached neighbors of links that do not change: 8 MiB."""
_EPOCHS_KEPT = 66
"""Epochs whose edges are kept at a time, of links that change: the tasks of a node are in that many, with the default
`epochs_ahead`, and each of them asks."""
_PAIRS_KEPT = 1 << 16
"""Pairs in the cached epochs, above which fewer epochs are cached: 20 MiB."""
_FEWEST_KEPT = 4
"""Epochs that are always cached: the one at work, the next, and one of a restart or replay."""
_TRIED = 3
"""How many answers of a link that may change are asked for once more, of those that name somebody; of a function of
`edges`, one. All nodes of a test ask that same function, and its answers are kept: that it draws other pairs each time
would show on nodes only."""
_AS_GIVEN = (
    "every node asks on its own and needs the same answer, so let it follow from the arguments alone, as what "
    "np.random.default_rng([7, epoch]) draws"
)


class Topology(Mapping[str, Link]):
    """Named links, an immutable mapping. Topologies are joined with `|`, with a plain dict of functions, too.

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
        self.lasting = frozenset(name for name, link in links.items() if _lasts(link))
        """The links that are the same in every epoch."""
        self.known: dict[tuple[str, int, int], tuple[int, ...]] = {}
        """By link, task and number of tasks: what `neighbors` found that is the same in every epoch."""
        self._room = _KEPT_IDS
        self._untried = dict.fromkeys(links.keys() - self.lasting, _TRIED)

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
        """Checked neighbors of a task along a link.

        Raises:
            GraphError: no such link, or it names a task that does not exist, or one twice, or others each time.
        """
        found = self.known.get((link, task_id, tasks))
        if found is not None:
            return found
        if link not in self._links:
            known = ", ".join(repr(name) for name in self._links) or "none"
            raise GraphError(f"task {task_id}: there is no link {link!r}; the topology's links are: {known}")
        found = _checked(self._links[link], f"link {link!r}", task_id, tasks, epoch)
        if link in self.lasting and len(found) < self._room:
            self._room -= len(found) + 1
            self.known[link, task_id, tasks] = found
        if found and (left := self._untried.get(link)):
            again = _checked(self._links[link], f"link {link!r}", task_id, tasks, epoch)
            if again != found:
                raise GraphError(
                    f"task {task_id}: link {link!r} names {list(found)} in epoch {epoch}, and {list(again)} when it "
                    f"is asked once more: {_AS_GIVEN}"
                )
            self._untried[link] = left - 1
        return found


def _check_parameters(what: str, link: Link) -> None:
    """Raises JobError if a link does not accept its arguments, before the first `compose` does."""
    try:
        takes = signature(link)
    except ValueError:  # something of C that tells nothing of itself
        return
    try:
        takes.bind(0, 1, 0)
    except TypeError:
        raise JobError(
            f"{what} is called with (task_id, tasks, epoch), but takes {takes}: lambda task_id, tasks, epoch: ..."
        ) from None


def _checked(link: Link, what: str, task_id: int, tasks: int, epoch: int) -> tuple[int, ...]:
    given = link(task_id, tasks, epoch)
    if type(given) is range:  # nothing is in it twice, and its ends are its extremes
        found = tuple(given)
        if not found or (0 <= found[0] < tasks and 0 <= found[-1] < tasks):
            return found
    if type(given) not in _ORDERED and (not isinstance(given, Iterable) or isinstance(given, str | bytes)):
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


def _lasting(links: dict[str, Link]) -> Topology:
    """Marks links that are the same in every epoch, so that they are called once."""
    _LASTING.update(links.values())
    return Topology(links)


def _lasts(link: Link) -> bool:
    return type(link) is FunctionType and link in _LASTING  # a callable of another type may have no hash


def as_topology(links: Mapping[str, Link]) -> Topology:
    """A topology from a plain dict of functions, or itself."""
    return links if isinstance(links, Topology) else Topology(links)


def _count(what: str, number: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise JobError(f"{what} must be an int of at least 1, not {number!r}")
    return number


def tree(fanout: int = 2) -> Topology:
    """Links `parents` (one, or none for the root, task 0) and `children` (up to `fanout`)."""
    _count("tree: fanout", fanout)
    return _lasting(
        {
            "parents": lambda i, n, e: ((i - 1) // fanout,) if i else (),
            "children": lambda i, n, e: range(min(n, i * fanout + 1), min(n, i * fanout + fanout + 1)),
        }
    )


def star() -> Topology:
    """Links `hub` (task 0, for all others) and `spokes` (all others, for task 0)."""
    return _lasting({"hub": lambda i, n, e: (0,) if i else (), "spokes": lambda i, n, e: () if i else range(1, n)})


def ring() -> Topology:
    """Links `left` and `right`; a task alone has no neighbors."""
    return _lasting(
        {
            "left": lambda i, n, e: ((i - 1) % n,) if n > 1 else (),
            "right": lambda i, n, e: ((i + 1) % n,) if n > 1 else (),
        }
    )


def full() -> Topology:
    """Links `peers` (all others) and `all` (oneself too)."""
    return _lasting({"peers": lambda i, n, e: (j for j in range(n) if j != i), "all": lambda i, n, e: range(n)})


def grid(rows: int, cols: int, periodic: bool = False) -> Topology:
    """Links `north`, `south`, `west`, `east` on a grid of rows x cols tasks, numbered row by row.

    With `periodic` the last row or column is next to the first one; a task alone in it is its own neighbor.

    Raises:
        GraphError: when it is used; the job has not rows x cols tasks. It fails a job: JobFailed, with the same text.
    """
    _count("grid: rows", rows), _count("grid: cols", cols)

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

    return _lasting({"north": step(-1, 0), "south": step(1, 0), "west": step(0, -1), "east": step(0, 1)})


def bipartite(servers: int) -> Topology:
    """Tasks 0 to servers - 1 are servers, the rest workers: links `servers` (for workers), `workers` (for servers).

    Raises:
        GraphError: when it is used; the job has no task left to be a worker. It fails a job: JobFailed, with the same
            text.
    """
    _count("bipartite: servers", servers)

    def between(tasks: int) -> None:
        if tasks <= servers:
            raise GraphError(f"bipartite({servers}): a job of {tasks} tasks has no workers; give it more tasks")

    def to_servers(i: int, n: int, e: int) -> Sequence[int]:
        between(n)
        return range(servers) if i >= servers else ()

    def to_workers(i: int, n: int, e: int) -> Sequence[int]:
        between(n)
        return range(servers, n) if i < servers else ()

    return _lasting({"servers": to_servers, "workers": to_workers})


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
        of_epoch, tried = pairs, False

        def edges_in(epoch: int) -> tuple[_Edges, int]:
            nonlocal tried
            found = _edges(of_epoch(epoch))
            if found.pairs and not tried:
                if _edges(of_epoch(epoch)) != found:
                    raise GraphError(
                        f"edges: the function returns other pairs when it is asked once more for epoch {epoch}: "
                        f"{_AS_GIVEN}"
                    )
                tried = True
            return found, found.pairs

        edges_of = _kept(edges_in)
    else:
        fixed = _edges(pairs)

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
    return Topology(made) if callable(pairs) else _lasting(made)


class _Edges(NamedTuple):
    to: _Table
    back: _Table
    largest: int
    pairs: int


def _edges(pairs: Pairs) -> _Edges:
    """Tables for both directions, and the largest task id of all."""
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


def _kept(make: Callable[[_Key], tuple[_Made, int]]) -> Callable[[_Key], _Made]:
    """Returns a function that caches `make(key)` for the latest keys; `make` also returns its number of pairs.

    Several threads may call it.
    """
    kept: dict[_Key, tuple[_Made, int]] = {}
    lock = Lock()
    pairs = 0

    def made_for(key: _Key) -> _Made:
        nonlocal pairs
        found = kept.get(key)
        if found is None:
            found = make(key)
            with lock:
                if key not in kept:  # nor made in another thread meanwhile
                    kept[key] = found
                    pairs += found[1]
                while len(kept) > _EPOCHS_KEPT or (pairs > _PAIRS_KEPT and len(kept) > _FEWEST_KEPT):
                    pairs -= kept.pop(next(iter(kept)))[1]
        return found[0]

    return made_for


def inverse(link: Link) -> Link:
    """The inverse of a link: the tasks that have this one as a neighbor, in the order of ids.

    Looks at every task once an epoch; once in all for the links of `tree`, `ring` and the like.

    tg.Topology({"followers": followers, "following": tg.inverse(followers)})
    topology | {"following": tg.inverse(topology["followers"])}
    """
    if not callable(link):
        raise JobError(f"inverse takes a link's function, as in tg.inverse(topology['children']), not {link!r}")
    _check_parameters("inverse: the link", link)
    what = f"the inverted link {getattr(link, '__name__', '')!r}"

    def inverted(key: tuple[int, int]) -> tuple[_Table, int]:
        (tasks, epoch), pairs = key, 0
        back: dict[int, list[int]] = {}
        for task in range(tasks):
            neighbors = _checked(link, what, task, tasks, epoch)
            pairs += len(neighbors)
            for neighbor in neighbors:
                back.setdefault(neighbor, []).append(task)
        return back, pairs

    table = _kept(inverted)
    if not _lasts(link):
        return lambda task_id, tasks, epoch: table((tasks, epoch)).get(task_id, ())
    lasting = _lasting({"back": lambda task_id, tasks, epoch: table((tasks, 0)).get(task_id, ())})
    return lasting["back"]
