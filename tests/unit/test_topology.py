"""Links: who is whose neighbor, and what is said where a link does not fit the job."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import taskgraph as tg
import taskgraph.topology as topology_module
from taskgraph.topology import Link, as_topology


def table(topology: tg.Topology, link: str, tasks: int, epoch: int = 0) -> list[tuple[int, ...]]:
    return [topology.neighbors(link, task, tasks, epoch) for task in range(tasks)]


def pairs(topology: tg.Topology, link: str, tasks: int, epoch: int = 0) -> set[tuple[int, int]]:
    return {(i, j) for i, ids in enumerate(table(topology, link, tasks, epoch)) for j in ids}


# -- the shipped ones ---------------------------------------------------------------------------------


def test_tree() -> None:
    assert table(tg.tree(), "children", 6) == [(1, 2), (3, 4), (5,), (), (), ()]
    assert table(tg.tree(), "parents", 6) == [(), (0,), (0,), (1,), (1,), (2,)]
    assert table(tg.tree(fanout=1), "children", 3) == [(1,), (2,), ()]
    assert tg.tree(fanout=14).neighbors("children", 0, 15, 0) == tuple(range(1, 15))


def test_star() -> None:
    assert table(tg.star(), "hub", 4) == [(), (0,), (0,), (0,)]
    assert table(tg.star(), "spokes", 4) == [(1, 2, 3), (), (), ()]


def test_ring() -> None:
    assert table(tg.ring(), "left", 4) == [(3,), (0,), (1,), (2,)]
    assert table(tg.ring(), "right", 4) == [(1,), (2,), (3,), (0,)]
    assert table(tg.ring(), "left", 1) == table(tg.ring(), "right", 1) == [()]
    assert table(tg.ring(), "left", 2) == table(tg.ring(), "right", 2) == [(1,), (0,)]


def test_full() -> None:
    assert table(tg.full(), "peers", 3) == [(1, 2), (0, 2), (0, 1)]
    assert table(tg.full(), "all", 3) == [(0, 1, 2)] * 3


def test_grid() -> None:
    grid = tg.grid(2, 3)  # 0 1 2 / 3 4 5
    assert table(grid, "north", 6) == [(), (), (), (0,), (1,), (2,)]
    assert table(grid, "south", 6) == [(3,), (4,), (5,), (), (), ()]
    assert table(grid, "west", 6) == [(), (0,), (1,), (), (3,), (4,)]
    assert table(grid, "east", 6) == [(1,), (2,), (), (4,), (5,), ()]
    assert table(tg.grid(2, 3, periodic=True), "west", 6) == [(2,), (0,), (1,), (5,), (3,), (4,)]
    assert table(tg.grid(1, 2, periodic=True), "north", 2) == [(0,), (1,)], "alone in its column"


def test_grid_needs_enough_tasks() -> None:
    with pytest.raises(tg.GraphError, match=r"the grid has 2 x 3 = 6 tasks, the job has 7"):
        tg.grid(2, 3).neighbors("north", 0, 7, 0)


def test_bipartite() -> None:
    assert table(tg.bipartite(2), "servers", 5) == [(), (), (0, 1), (0, 1), (0, 1)]
    assert table(tg.bipartite(2), "workers", 5) == [(2, 3, 4), (2, 3, 4), (), (), ()]


@pytest.mark.parametrize("link", ["servers", "workers"])
def test_bipartite_needs_workers(link: str) -> None:
    with pytest.raises(tg.GraphError, match="a job of 2 tasks has no workers"):
        tg.bipartite(2).neighbors(link, 0, 2, 0)


@given(tasks=st.integers(1, 40), fanout=st.integers(1, 5), servers=st.integers(1, 5))
def test_shipped_links_are_inverse_pairs(tasks: int, fanout: int, servers: int) -> None:
    both = [
        (tg.tree(fanout), "parents", "children"),
        (tg.star(), "hub", "spokes"),
        (tg.ring(), "left", "right"),
        (tg.grid(tasks, 2), "north", "south"),
        (tg.grid(2, tasks, periodic=True), "west", "east"),
        (tg.bipartite(servers), "servers", "workers"),
        (tg.full(), "peers", "peers"),
    ]
    for topology, one, other in both:
        count = {"north": 2 * tasks, "west": 2 * tasks, "servers": servers + tasks}.get(one, tasks)
        assert pairs(topology, one, count) == {(j, i) for i, j in pairs(topology, other, count)}


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: tg.tree(0), "tree: fanout must be an int of at least 1, not 0"),
        (lambda: tg.tree(2.0), "tree: fanout must be an int"),
        (lambda: tg.tree(True), "tree: fanout must be an int"),
        (lambda: tg.grid(0, 3), "grid: rows"),
        (lambda: tg.grid(3, "4"), "grid: cols"),
        (lambda: tg.bipartite(0), "bipartite: servers"),
    ],
)
def test_senseless_sizes_are_refused(make: Any, complaint: str) -> None:
    with pytest.raises(tg.JobError, match=complaint):
        make()


# -- edges --------------------------------------------------------------------------------------------

EDGES = [(0, 2), (0, 1), (2, 0), (1, 2)]


@pytest.mark.parametrize(
    "given",
    [
        EDGES,
        (pair for pair in EDGES),
        np.array(EDGES),
        {0: [2, 1], 2: [0], 1: [2]},
        lambda epoch: EDGES,
        lambda epoch: {0: np.array([2, 1]), 2: [0], 1: [2]},
    ],
    ids=["list", "generator", "array", "mapping", "function", "function of a mapping"],
)
def test_edges_lead_both_ways(given: Any) -> None:
    topology = tg.edges(given)
    for _ in range(2):  # nothing is used up
        assert table(topology, "out", 3) == [(2, 1), (2,), (0,)]
        assert [set(ids) for ids in table(topology, "in", 3)] == [{2}, {0}, {0, 1}]
    assert table(topology, "out", 4)[3] == ()


def test_edges_may_change_every_epoch() -> None:
    topology = tg.edges(lambda epoch: [(0, 1 + epoch % 2)], out="follows", inbound="followers")
    assert [topology.neighbors("follows", 0, 3, epoch) for epoch in range(3)] == [(1,), (2,), (1,)]
    assert [topology.neighbors("followers", 2, 3, epoch) for epoch in range(3)] == [(), (0,), ()]


@pytest.mark.parametrize("link", ["out", "in"])
@pytest.mark.parametrize("task", [0, 1])
def test_edge_to_an_unknown_task_is_named(link: str, task: int) -> None:
    with pytest.raises(tg.GraphError, match="edges name task 7, but the job has tasks 0 to 2"):
        tg.edges([(0, 1), (7, 2)]).neighbors(link, task, 3, 0)


def test_double_edge_is_refused() -> None:
    with pytest.raises(tg.GraphError, match=r"task 0: link 'out' names task 1 twice; list\(dict.fromkeys\(ids\)\)"):
        tg.edges([(0, 1), (0, 1)]).neighbors("out", 0, 2, 0)


@pytest.mark.parametrize("given", [[(1, 2, 3)], [5], [("a", 1)], [(0.5, 1)], 5, {0: 1}])
def test_bad_edge_is_named(given: Any) -> None:
    with pytest.raises(tg.JobError, match=r"edges takes pairs \(from, to\) of task ids, not"):
        tg.edges(given)
    with pytest.raises(tg.JobError, match=r"edges takes pairs \(from, to\) of task ids, not"):
        tg.edges(lambda epoch: given).neighbors("out", 0, 2, 0)


def test_negative_edges_and_equal_names_are_refused() -> None:
    with pytest.raises(tg.JobError, match=r"\(0, -1\) names a task below 0"):
        tg.edges([(0, -1)])
    with pytest.raises(tg.JobError, match="two names, not 'x' for both"):
        tg.edges([], out="x", inbound="x")


def test_random_links_are_refused() -> None:
    """Nodes of a test share a function and what `edges` keeps of it: only a real run failed, and not with that."""
    drawn = iter(range(1, 1000))
    edges = tg.edges(lambda epoch: [(0, 1 + next(drawn) % 2)] if epoch else [])
    assert edges.neighbors("out", 0, 3, 0) == (), "nothing to draw, so nothing is known yet"
    for _ in range(2):  # whoever asks first may not be who tells it
        with pytest.raises(tg.GraphError, match=r"other pairs when it is asked once more for epoch 1: every node asks"):
            edges.neighbors("in", 1, 3, 1)
    link = tg.Topology({"to": lambda i, n, e: [next(drawn) % 3] if e else []})
    assert link.neighbors("to", 1, 3, 0) == ()
    for _ in range(2):
        with pytest.raises(tg.GraphError, match=r"task 1: link 'to' names \[\d\] in epoch 1, and \[\d\] when it is"):
            link.neighbors("to", 1, 3, 1)


def test_random_links_are_probed_rarely() -> None:
    asked = []

    def link(task: int, tasks: int, epoch: int) -> list[int]:
        asked.append(epoch)
        return [epoch % tasks] if epoch else []

    topology = tg.Topology({"to": link})
    for epoch in range(6):
        topology.neighbors("to", 0, 3, epoch)
    assert asked == [0, 1, 1, 2, 2, 3, 3, 4, 5]


# -- inverse ------------------------------------------------------------------------------------------


def test_inverse_link() -> None:
    topology = tg.Topology({"next": lambda i, n, e: {(i + 1 + e) % n, (i + 2 + e) % n}})
    topology |= {"previous": tg.inverse(topology["next"])}
    for epoch in (0, 1, 2, 0):
        assert pairs(topology, "previous", 5, epoch) == {(j, i) for i, j in pairs(topology, "next", 5, epoch)}


@given(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6))))
def test_inverse_of_the_inverse(edges: set[tuple[int, int]]) -> None:
    link = tg.edges(sorted(edges))["out"]
    topology = tg.Topology({"link": link, "again": tg.inverse(tg.inverse(link))})
    assert pairs(topology, "again", 7) == pairs(topology, "link", 7) == edges


def test_inverse_checks_its_link() -> None:
    topology = tg.Topology({"followers": tg.inverse(lambda i, n, e: (99,))})
    with pytest.raises(
        tg.GraphError, match=r"task 0: the inverted link .* names task 99, but the job has tasks 0 to 3"
    ):
        topology.neighbors("followers", 1, 4, 0)
    with pytest.raises(tg.JobError, match=r"tg\.inverse\(topology\['children'\]\)"):
        tg.inverse("children")  # type: ignore[arg-type]


# -- topologies ---------------------------------------------------------------------------------------


def test_topologies_join_with_dicts() -> None:
    mine: Mapping[str, Any] = {"root": lambda i, n, e: (0,)}
    for both in (tg.tree() | tg.ring() | mine, mine | (tg.tree() | tg.ring())):
        assert isinstance(both, tg.Topology)
        assert set(both) == {"parents", "children", "left", "right", "root"}
        assert both.neighbors("root", 3, 4, 0) == (0,)
    assert len(tg.Topology()) == 0


def test_joined_links_need_different_names() -> None:
    with pytest.raises(tg.JobError, match="both topologies have a link 'children': rename one"):
        tg.tree() | tg.tree(3)
    with pytest.raises(tg.JobError, match="'hub'"):
        {"hub": lambda i, n, e: ()} | tg.star()


def test_topology_copies_its_dict() -> None:
    links: dict[str, Any] = {"hub": lambda i, n, e: (0,)}
    topology = as_topology(links)
    links["other"] = links["hub"]
    assert list(topology) == ["hub"]
    assert as_topology(topology) is topology
    with pytest.raises(TypeError):
        topology["x"] = links["hub"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("links", "complaint"),
    [
        (tg.tree, r"call it: tg\.tree\(\)"),
        ("ring", r"not of 'ring'; call it: tg\.ring\(\)"),
        ([1, 2], "made of named links"),
        ({"children": [1, 2]}, "link 'children' must be a function"),
        (
            {"x": lambda i, n: ()},
            r"link 'x' is called with \(task_id, tasks, epoch\), but takes \(i, n\): lambda task_id",
        ),
        ({"x": lambda i, n, e, k: ()}, r"link 'x' is called with .*, but takes \(i, n, e, k\)"),
        ({3: lambda i, n, e: ()}, "name is a string, not 3"),
        ({"": lambda i, n, e: ()}, "name is a string, not ''"),
    ],
)
def test_bad_topology_is_refused(links: Any, complaint: str) -> None:
    with pytest.raises(tg.JobError, match=complaint):
        tg.Topology(links)
    with pytest.raises(tg.JobError, match=complaint):
        as_topology(links)


def test_bad_link_to_invert_is_refused() -> None:
    with pytest.raises(tg.JobError, match=r"inverse: the link is called with .*, but takes \(i, n\)"):
        tg.inverse(lambda i, n: ())  # type: ignore[arg-type, misc]


class Along:
    def __call__(self, i: int, n: int, e: int) -> tuple[int, ...]:
        return (2,)


@pytest.mark.parametrize(
    "link",
    [functools.partial(lambda k, *given: (k,), 2), lambda i, n, e, k=2: (k,), lambda *given: (2,), Along()],
    ids=["partial", "default", "any", "object"],
)
def test_callables_of_three_arguments_are_links(link: Any) -> None:
    assert tg.Topology({"x": link}).neighbors("x", 0, 3, 0) == (2,)


@pytest.mark.parametrize(
    "ids",
    [
        lambda: [2, 1],
        lambda: (2, 1),
        lambda: np.array([2, 1]),
        lambda: (i for i in (2, 1)),
        lambda: {2: "a", 1: "b"},
        lambda: [np.int32(2), np.uint8(1)],
    ],
)
def test_link_keeps_the_order_of_ids(ids: Callable[[], Any]) -> None:
    found = tg.Topology({"x": lambda i, n, e: ids()}).neighbors("x", 0, 3, 0)
    assert found == (2, 1)
    assert [type(number) for number in found] == [int, int]


def test_set_of_ids_is_sorted() -> None:
    assert tg.Topology({"x": lambda i, n, e: {300, 1, 17}}).neighbors("x", 0, 301, 0) == (1, 17, 300)


@pytest.mark.parametrize(
    ("ids", "complaint"),
    [
        ([17], "task 3: link 'x' names task 17, but the job has tasks 0 to 14"),
        ([-1], "task 3: link 'x' names task -1, but the job has tasks 0 to 14"),
        ([1, 0, 2, 1], r"task 3: link 'x' names task 1 twice; list\(dict.fromkeys\(ids\)\) has each once"),
        ([1.0], "task 3: link 'x' names 1.0, which is no task id"),
        ([True, False], "task 3: link 'x' names True, which is no task id"),
        (["a"], "task 3: link 'x' names 'a', which is no task id"),
        ({"a", 1}, "task 3: link 'x' names 'a', which is no task id"),
        ({None, 1}, "task 3: link 'x' names None, which is no task id"),
        (None, "task 3: link 'x' must return task ids, as a list; it returned None"),
        (2, "it returned 2"),
        ("children", "it returned 'children'"),
    ],
)
def test_link_that_does_not_fit_is_named(ids: Any, complaint: str) -> None:
    with pytest.raises(tg.GraphError, match=complaint):
        tg.Topology({"x": lambda i, n, e: ids}).neighbors("x", 3, 15, 0)


def test_unknown_link_lists_the_known() -> None:
    with pytest.raises(tg.GraphError, match=r"no link 'childs'; the topology's links are: 'parents', 'children'"):
        tg.tree().neighbors("childs", 0, 3, 0)
    with pytest.raises(tg.GraphError, match="links are: none"):
        tg.Topology().neighbors("x", 0, 3, 0)


# -- links that are the same in every epoch --------------------------------------------------------------------------


def counted(link: Link, calls: list[int]) -> Link:
    @functools.wraps(link)
    def asked(task: int, tasks: int, epoch: int) -> Iterable[int]:
        calls.append(task)
        return link(task, tasks, epoch)

    return asked


@pytest.mark.parametrize(
    "topology",
    [
        tg.tree(),
        tg.star(),
        tg.ring(),
        tg.full(),
        tg.grid(2, 3),
        tg.bipartite(2),
        tg.edges([(0, 1), (1, 5)]),
        tg.Topology({"up": tg.inverse(tg.tree()["children"])}),
    ],
    ids=lambda topology: str(topology),
)
def test_lasting_links_are_computed_once(topology: tg.Topology) -> None:
    calls: list[int] = []
    assert all(link in topology_module._CONSTANT for link in topology.values())
    asked = topology_module._mark_constant({name: counted(link, calls) for name, link in topology.items()})
    found = [[asked.neighbors(link, 1, 6, epoch) for link in topology] for epoch in range(3)]
    assert found == [[tuple(topology[link](1, 6, 0)) for link in topology]] * 3
    assert len(calls) == len(topology)
    assert asked.neighbors(next(iter(topology)), 2, 6, 7) == tuple(topology[next(iter(topology))](2, 6, 0))


@functools.wraps(tg.ring()["right"])
def rotating(task: int, tasks: int, epoch: int) -> Iterable[int]:
    return [(task + 1 + epoch) % tasks]


rotated = tg.Topology({"right": rotating})


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, task: int, tasks: int, epoch: int) -> Iterable[int]:
        return [(task + epoch) % tasks]


@pytest.mark.parametrize(
    "topology",
    [
        tg.Topology({"next": lambda i, n, e: [(i + e) % n]}),
        tg.edges(lambda epoch: [(0, 1 + epoch)]),
        rotated,
        tg.Topology({"a": Unhashable()}),
    ],
    ids=["a function", "edges of the epoch", "a wrapper of a lasting one", "an object"],
)
def test_changing_links_are_computed_each_epoch(topology: tg.Topology) -> None:
    link = next(iter(topology))
    first, *others = [topology.neighbors(link, 0, 6, epoch)[0] for epoch in (0, 1, 2, 1)]
    assert others == [first + 1, first + 2, first + 1]


@pytest.mark.parametrize("inverted", [False, True], ids=["edges", "inverse"])
@pytest.mark.parametrize(
    ("most_pairs", "kept"),
    [(1 << 16, 66), (300, 30), (1, 4)],
    ids=["as far as tasks are apart", "fewer where they are large", "a few however large they are"],
)
def test_changing_links_are_computed_once_an_epoch(
    inverted: bool, most_pairs: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology_module, "_MAX_CACHED_PAIRS", most_pairs)
    made: list[int] = []

    def follows(task: int, tasks: int, epoch: int) -> list[int]:
        if task == 0:
            made.append(epoch)
        return [(task + epoch) % tasks]

    def along(epoch: int) -> list[tuple[int, int]]:
        return [(task, *follows(task, 10, epoch)) for task in range(10)]

    topology = tg.Topology({"in": tg.inverse(follows)}) if inverted else tg.edges(along)
    for task in range(10):
        for epoch in range(100, 100 + kept):
            assert topology.neighbors("in", task, 10, epoch) == ((task - epoch) % 10,)
    if not inverted:
        assert made.pop(0) == 100, "its first answer is asked for once more"
    assert made == list(range(100, 100 + kept))
    for epoch in (100 + kept, 101, 100):  # there is no room for that one with all of them
        topology.neighbors("in", 0, 10, epoch)
    assert made[kept:] == [100 + kept, 100]
