"""Who is whose neighbor: named links, each a function of (task_id, tasks, epoch), so they may change every epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from taskgraph.errors import GraphError, JobError

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


class Topology(Mapping[str, Link]):
    """Named links. Topologies are joined with `|`."""

    def __init__(self, links: Mapping[str, Link] | None = None) -> None:
        for name, link in (links or {}).items():
            if not isinstance(name, str) or not name:
                raise JobError(f"a link's name is a string, not {name!r}")
            if not callable(link):
                raise JobError(f"link {name!r} must be a function (task_id, tasks, epoch) -> task ids")
        self._links = dict(links or {})

    def __getitem__(self, name: str) -> Link:
        return self._links[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._links)

    def __len__(self) -> int:
        return len(self._links)

    def __repr__(self) -> str:
        return f"Topology({', '.join(self._links)})"

    def __or__(self, other: Mapping[str, Link]) -> Topology:
        both = self._links.keys() & other.keys()
        if both:
            raise JobError(f"both topologies have a link {sorted(both)[0]!r}: rename one with tg.Topology({{...}})")
        return Topology({**self._links, **other})

    def __ror__(self, other: Mapping[str, Link]) -> Topology:
        return Topology(other) | self

    def neighbors(self, link: str, task_id: int, tasks: int, epoch: int) -> tuple[int, ...]:
        """Checked neighbors of a task along a link.

        Raises:
            GraphError: no such link, or it names a task that does not exist, or one twice.
        """
        function = self._links.get(link)
        if function is None:
            known = ", ".join(repr(name) for name in self._links) or "none"
            raise GraphError(f"task {task_id}: there is no link {link!r}; the topology's links are: {known}")
        found = []
        for neighbor in function(task_id, tasks, epoch):
            try:
                number = int(neighbor.__index__())
            except AttributeError:
                raise GraphError(f"task {task_id}: link {link!r} names {neighbor!r}, which is no task id") from None
            if not 0 <= number < tasks:
                raise GraphError(
                    f"task {task_id}: link {link!r} names task {number}, but the job has tasks 0 to {tasks - 1}"
                )
            found.append(number)
        if len(set(found)) != len(found):
            raise GraphError(f"task {task_id}: link {link!r} names a task twice: {found}")
        return tuple(found)


def as_topology(links: Mapping[str, Link]) -> Topology:
    """A topology from a plain dict of functions, or itself."""
    return links if isinstance(links, Topology) else Topology(links)


def tree(fanout: int = 2) -> Topology:
    """Links `parents` (one, or none for the root, task 0) and `children` (up to `fanout`)."""
    if fanout < 1:
        raise JobError(f"tree: fanout must be at least 1, not {fanout}")
    return Topology(
        {
            "parents": lambda i, n, e: ((i - 1) // fanout,) if i else (),
            "children": lambda i, n, e: range(min(n, i * fanout + 1), min(n, i * fanout + fanout + 1)),
        }
    )


def star() -> Topology:
    """Links `hub` (task 0, for all others) and `spokes` (all others, for task 0)."""
    return Topology({"hub": lambda i, n, e: (0,) if i else (), "spokes": lambda i, n, e: () if i else range(1, n)})


def ring() -> Topology:
    """Links `left` and `right`; a task alone has no neighbors."""
    return Topology(
        {
            "left": lambda i, n, e: ((i - 1) % n,) if n > 1 else (),
            "right": lambda i, n, e: ((i + 1) % n,) if n > 1 else (),
        }
    )


def full() -> Topology:
    """Links `peers` (all others) and `all` (oneself too)."""
    return Topology({"peers": lambda i, n, e: (j for j in range(n) if j != i), "all": lambda i, n, e: range(n)})


def grid(rows: int, cols: int, periodic: bool = False) -> Topology:
    """Links `north`, `south`, `west`, `east` on a grid of rows x cols tasks, numbered row by row.

    Raises:
        GraphError (when used): the job has not rows x cols tasks.
    """
    if rows < 1 or cols < 1:
        raise JobError(f"grid: rows and cols must be at least 1, not {rows} x {cols}")

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

    return Topology({"north": step(-1, 0), "south": step(1, 0), "west": step(0, -1), "east": step(0, 1)})


def bipartite(servers: int) -> Topology:
    """Tasks 0 to servers - 1 are servers, the rest workers: links `servers` (for workers), `workers` (for servers)."""
    if servers < 1:
        raise JobError(f"bipartite: there must be at least 1 server, not {servers}")
    return Topology(
        {
            "servers": lambda i, n, e: range(min(servers, n)) if i >= servers else (),
            "workers": lambda i, n, e: range(servers, n) if i < servers else (),
        }
    )


Pairs = Iterable[tuple[int, int]]


def edges(pairs: Pairs | Callable[[int], Pairs], *, out: str = "out", inbound: str = "in") -> Topology:
    """Links from directed edges (from, to): `out` leads along them, `inbound` against them.

    Args:
        pairs: the edges, or a function of the epoch that returns them.
    """
    if callable(pairs):
        of_epoch = pairs
    else:
        fixed = tuple(pairs)
        for pair in fixed:
            if not (isinstance(pair, tuple | list) and len(pair) == 2):
                raise JobError(f"edges takes pairs (from, to), not {pair!r}")

        def of_epoch(epoch: int) -> Pairs:
            return fixed

    @lru_cache(maxsize=4)
    def tables(epoch: int) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        to: dict[int, list[int]] = {}
        back: dict[int, list[int]] = {}
        for one, other in of_epoch(epoch):
            to.setdefault(one, []).append(other)
            back.setdefault(other, []).append(one)
        return to, back

    return Topology({out: lambda i, n, e: tables(e)[0].get(i, ()), inbound: lambda i, n, e: tables(e)[1].get(i, ())})


def inverse(link: Link) -> Link:
    """The link the other way: whoever has me as a neighbor. Costs one look at every task per epoch."""

    @lru_cache(maxsize=4)
    def table(tasks: int, epoch: int) -> dict[int, list[int]]:
        back: dict[int, list[int]] = {}
        for task in range(tasks):
            for neighbor in link(task, tasks, epoch):
                back.setdefault(neighbor, []).append(task)
        return back

    def inverted(task_id: int, tasks: int, epoch: int) -> Any:
        return table(tasks, epoch).get(task_id, ())

    return inverted
