"""A graph that is declared again is the same one, and nothing that is declared otherwise passes for it."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import taskgraph as tg
from taskgraph.epoch import Epoch, Scratch
from taskgraph.graph.compose import Composition, Graph

TASKS = 5


class Named(str, enum.Enum):  # noqa: UP042 - what `str` gives is not what it is equal to
    X = "x"


class Task:
    def one(self, epoch: Any, ins: Any, outs: Any) -> None: ...

    def other(self, epoch: Any, ins: Any, outs: Any) -> None: ...

    def wrong(self, epoch: Any, ins: Any, outs: Any) -> Any:
        yield


def alone(epoch: Any, ins: Any, outs: Any) -> None: ...


class Alike(str):
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


def moving(task: int, tasks: int, epoch: int) -> list[int]:
    return [(task + 1 + epoch // 3) % tasks]


def failing(task: int, tasks: int, epoch: int) -> list[int]:
    return [1] if epoch % 3 else [tasks]


def raising(task: int, tasks: int, epoch: int) -> list[int]:
    if epoch % 4 == 3:
        raise ZeroDivisionError(f"in epoch {epoch}")
    return [1, 2]


TOPOLOGY = tg.ring() | {"moving": moving, "failing": failing, "raising": raising}
TASK, ANOTHER = Task(), Task()


@dataclass
class Work:
    """`taskgraph.epoch.Work`, as far as `compose` asks for it."""

    number: int
    composing: Composition | None
    task: int = 0
    asked: int = 0

    def __post_init__(self) -> None:
        self.scratch = Scratch()

    def neighbors(self, link: str) -> tuple[int, ...]:
        self.asked += 1
        return TOPOLOGY.neighbors(link, self.task, TASKS, self.number)

    def links(self) -> tuple[str, ...]:
        return tuple(TOPOLOGY)

    def tasks(self) -> int:
        return TASKS


Declared = Mapping[str, Any]
"""The arguments of one `epoch.processor`."""


def compose(declared: list[Declared], epoch: int, before: Graph | None) -> tuple[Graph, int]:
    """The graph, and how many links were asked for."""
    composing = Composition(0, epoch, before, TOPOLOGY.constant)
    work: Any = Work(epoch, composing)
    for arguments in declared:
        Epoch(work, "compose").processor(**arguments)
    return composing.graph(), work.asked


def told(graph: Graph) -> Any:
    """All that there is to see of a graph, but who is called, which may be equal and another object."""
    rows = [
        (p.name, list(p.inbound.items()), list(p.outbound.items()), p.takes, p.puts, p.sync, p.parallel)
        for p in graph.processors
    ]
    kinds = [[p.name for p in some] for some in (graph.ordered, graph.parallel, graph.sync_points)]
    types = [type(tag) for p in graph.processors for tag in (*p.inbound, *p.outbound)]
    return rows, types, kinds, graph.names, graph.channels_in, graph.channels_out


def outcome(declared: list[Declared], epoch: int, before: Graph | None) -> tuple[Any, Graph | None]:
    """What comes of it: a graph, or an error and what it says."""
    try:
        graph, _ = compose(declared, epoch, before)
    except Exception as error:
        return (type(error), str(error)), None
    return (told(graph), [p.compute for p in graph.processors]), graph


TAGS = st.sampled_from(["x", "y", "".join(["y", ""]), tg.Tag[float]("x"), Named.X, Alike("x"), "\ud800", 1, 1.0])
WHERE = st.sampled_from(
    [
        *("left", "right", "moving", "failing", "raising", "nowhere", Alike("left")),
        *(1, 2, True, 1.0, np.int64(1), 9, None),
        *([1, 2], [2, 1], [1.0], ("left", 2), ["moving"], np.array([1, 2])),
    ]
)
CHANNELS = st.one_of(st.none(), st.dictionaries(TAGS, WHERE, max_size=2), st.just([("x", 1)]))
COMPUTES = st.one_of(
    st.sampled_from([TASK.one, TASK.other, ANOTHER.one, TASK.wrong, alone, "no function"]),
    st.builds(lambda: TASK.one),  # another object each time, and equal
    st.builds(lambda: functools.partial(TASK.one)),
    st.builds(lambda: lambda epoch, ins, outs: None),
)
DECLARED = st.fixed_dictionaries(
    {"compute": COMPUTES, "inbound": CHANNELS, "outbound": CHANNELS},
    optional={"name": st.sampled_from([None, "", "one", "two", Alike("one")]), "parallel": st.sampled_from([True, 1])},
)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_declaration_is_independent_of_last_epoch(data: st.DataObject) -> None:
    """Neither what comes of it, nor which error: one declaration at a time is changed, or none."""
    declared = data.draw(st.lists(DECLARED, max_size=3))
    before: Graph | None = None
    for epoch in range(6):
        expected, _ = outcome(declared, epoch, None)
        found, graph = outcome(declared, epoch, before)
        assert found == expected
        before = graph or before
        if declared and data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(declared) - 1))
            key = data.draw(st.sampled_from(["compute", "inbound", "outbound", "name", "parallel"]))
            other = data.draw(DECLARED)
            if key in other:
                declared[at] = {**declared[at], key: other[key]}


def plain(epoch: int = 0) -> list[Declared]:
    """Two processors, in objects made anew, as `compose` makes them."""
    return [
        {"compute": TASK.one, "inbound": {"x": "left"}, "outbound": {"x": "right", "n": 2}},
        {"compute": TASK.other, "inbound": {"x": "left", "n": 1}},
    ]


def test_same_declaration_reuses_graph() -> None:
    graph, asked = compose(plain(), 0, None)
    assert asked == 2 and len(graph.declarations) == 2
    for epoch in (1, 2):
        again, asked = compose(plain(), epoch, graph)
        assert again is graph and asked == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop(),
        lambda d: d.append({"compute": alone, "inbound": {"x": "left"}}),
        lambda d: d.reverse(),
        lambda d: d[0].update(compute=ANOTHER.one),
        lambda d: d[0].update(compute=functools.partial(TASK.one)),
        lambda d: d[0].update(name="another"),
        lambda d: d[0].update(name=Alike("another")),
        lambda d: d[0].update(parallel=True),
        lambda d: d[0].update(inbound={"x": "right"}),
        lambda d: d[0].update(inbound=None),
        lambda d: d[0].update(inbound={Named.X: "left"}),
        lambda d: d[0].update(outbound={"n": 2, "x": "right"}),
        lambda d: d[0].update(outbound={"x": "right", "n": 3}),
        lambda d: d[1].update(inbound={"x": "left", "n": [1]}),
        lambda d: d[1].update(inbound={"x": "left", "n": (1,)}),
        lambda d: d[1].update(inbound={"x": "left", "n": 1, "more": "left"}),
    ],
)
def test_different_declaration_makes_new_graph(change: Callable[[Any], object]) -> None:
    graph, _ = compose(plain(), 0, None)
    declared = plain()
    change(declared)
    other, _ = compose(declared, 1, graph)
    alone_, _ = compose(declared, 1, None)
    assert other is not graph and told(other) == told(alone_)
    assert [p.compute for p in other.processors] == [d["compute"] for d in declared]


def test_float_or_bool_is_no_task() -> None:
    graph, _ = compose(plain(), 0, None)
    declared = plain()
    declared[1] = {**declared[1], "inbound": {"x": "left", "n": 1.0}}
    with pytest.raises(tg.GraphError, match=r"task 0, epoch 1, compose: inbound 'n' takes a link's name, .*, not 1\.0"):
        compose(declared, 1, graph)


def test_changing_link() -> None:
    declared: list[Declared] = [
        {"compute": TASK.one, "outbound": {"x": "moving", "y": "moving"}},
        {"compute": TASK.other, "outbound": {"z": "moving"}},
    ]
    graph, _ = compose(declared, 0, None)
    graphs = {0: graph}
    for epoch in range(1, 7):
        graph, asked = compose(declared, epoch, graph)
        assert asked == 1 and graph.processors[1].outbound == {"z": tuple(moving(0, TASKS, epoch))}
        graphs[epoch] = graph
    assert graphs[1] is graphs[0] and graphs[3] is not graphs[2] and graphs[5] is graphs[3]


def test_lists_of_tasks_are_compared() -> None:
    """Also where the very list is changed."""
    several = [1, 2]
    declared: list[Declared] = [{"compute": TASK.one, "inbound": {"x": several, "y": ["left", 2], "z": (1, 2)}}]
    graph, _ = compose(declared, 0, None)
    again, asked = compose([{**declared[0], "inbound": {"x": [1, 2], "y": ["left", 2], "z": (1, 2)}}], 1, graph)
    assert again is graph and asked == 0
    several[1] = 3
    changed, _ = compose(declared, 2, graph)
    assert changed.processors[0].inbound == {"x": (1, 3), "y": (4, 2), "z": (1, 2)}
    for others in ([1, 2.0], [1, np.array([1, 2])], [1, "2"]):
        with pytest.raises(tg.GraphError):
            compose([{**declared[0], "inbound": {"x": others, "y": ["left", 2], "z": (1, 2)}}], 3, graph)
    by_link, _ = compose([{"compute": TASK.one, "inbound": {"x": ["moving"]}}], 0, None)
    assert by_link.declarations == ()


def test_closures_are_not_kept() -> None:
    """A closure may refer to anything."""
    held = np.zeros(3)
    for arguments in (
        {"compute": lambda epoch, ins, outs: held},
        {"compute": functools.partial(lambda held, epoch, ins, outs: None, held)},
    ):
        graph, _ = compose([{"compute": TASK.one}, arguments], 0, None)
        assert graph.declarations == ()


class Takes:
    def none(): ...  # type: ignore[misc]

    def two(self, epoch, ins): ...  # type: ignore[no-untyped-def]

    def three(self, epoch, ins, outs): ...  # type: ignore[no-untyped-def]

    def four(self, epoch, ins, outs, rate): ...  # type: ignore[no-untyped-def]

    def more(self, epoch, ins, outs, rate=1, *, scale=2): ...  # type: ignore[no-untyped-def]

    def scaled(self, epoch, ins, outs, *, scale): ...  # type: ignore[no-untyped-def]

    def any(self, *args, **kwargs): ...  # type: ignore[no-untyped-def]

    def __call__(self, epoch, ins, outs): ...  # type: ignore[no-untyped-def]

    @classmethod
    def of_class(cls, epoch, ins, outs): ...  # type: ignore[no-untyped-def]

    @staticmethod
    def static(epoch, ins, outs): ...  # type: ignore[no-untyped-def]

    @functools.wraps(four)
    def wrapped(self, epoch, ins, outs): ...  # type: ignore[no-untyped-def]

    @classmethod
    def of_no_class(cls): ...  # type: ignore[no-untyped-def]


class TakesNone:
    def __call__(self) -> None: ...


TAKES, PARTIAL = Takes(), functools.partial
CALLED = [
    *(getattr(TAKES, name) for name in dir(Takes) if not name.startswith("_")),
    *(TAKES, Takes.two, Takes.three, TakesNone(), print, max, len, TakesNone, np.add),
    *(PARTIAL(TAKES.four, rate=1), PARTIAL(TAKES.four, scale=1), PARTIAL(TAKES.scaled, scale=1), PARTIAL(TAKES.scaled)),
    *(PARTIAL(TAKES.any, 1, x=2), PARTIAL(TAKES.three, epoch=1), PARTIAL(TAKES.three, 1), PARTIAL(Takes.three, TAKES)),
    *(PARTIAL(Takes.four, TAKES, 1), PARTIAL(TAKES.more, 1), PARTIAL(TAKES.more, 1, 2), PARTIAL(TakesNone())),
    *(lambda: None, lambda *args: None, lambda epoch, ins, outs=1: None, lambda e, i, o, x=1, /: None),
    *(lambda e, i, o, /, x: None, PARTIAL(lambda e, i, o, /, **more: None, x=1), lambda e, *args, x=1: None),
]


@pytest.mark.parametrize("compute", CALLED)
def test_signature_check_agrees_with_calls(compute: Callable[..., Any]) -> None:
    fits = True
    try:
        inspect.signature(compute, follow_wrapped=False).bind(1, 2, 3)
    except (TypeError, ValueError):  # the latter of a method without self, and of a partial that nothing can complete
        function = compute.func if isinstance(compute, functools.partial) else compute
        fits = not inspect.isfunction(function) and not inspect.ismethod(function)  # others are not looked at
    if fits:
        compose([{"compute": compute, "name": "one"}], 0, None)
    else:
        with pytest.raises(
            tg.GraphError, match=r"compose: 'one' is called as .*epoch, ins, outs\), but takes \(.* line"
        ):
            compose([{"compute": compute, "name": "one"}], 0, None)


def test_error_names_the_call() -> None:
    for compute, called in [
        (
            TAKES.two,
            r"two\(self, epoch, ins, outs\), but takes \(self, epoch, ins\), defined at .*_compose\.py, line \d+$",
        ),
        (TAKES.none, r"none\(self, epoch, ins, outs\), but takes \(\)"),  # type: ignore[misc]
        (Takes.three, r"three\(epoch, ins, outs\), but takes \(self, epoch, ins, outs\)"),
        (Takes.of_no_class, r"of_no_class\(cls, epoch, ins, outs\), but takes \(cls\)"),
        (PARTIAL(TAKES.three, 1), r"three\(self, \.\.\., epoch, ins, outs\)"),
    ]:
        with pytest.raises(tg.GraphError, match=called):
            compose([{"compute": compute, "name": "one"}], 0, None)
