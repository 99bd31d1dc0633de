"""Collectives: what each kind gives, the same bits by each way, with kills, and what errors say."""

from __future__ import annotations

import gc
import importlib
import re
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.collectives import adding
from taskgraph.collectives.plan import LARGE_SLICE_BYTES, tree_place
from taskgraph.node.router import Router

TASKS = [1, 2, 6, 9]
LARGE = 4 * LARGE_SLICE_BYTES // 8
"""Floats that four tasks slice, with via="auto"."""
Compose = Callable[[Any, tg.Epoch], None]


class Keeper(tg.Task, state=["seen"]):
    """Keeps what the sync points saw."""

    def __init__(self, declare: Compose) -> None:
        self.declare = declare

    def setup(self) -> None:
        self.seen: list[Any] = []
        self.x = np.random.default_rng(self.task_id).normal(size=(7, 3)) * 10.0**self.task_id

    def compose(self, epoch: tg.Epoch) -> None:
        self.declare(self, epoch)

    def array(self, epoch: tg.Epoch, ins: tg.Inputs) -> Any:
        return self.x + epoch.number

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        self.seen.append({tag: ins.all(tag) for tag in ins})

    def result(self) -> Any:
        return self.seen


def job(declare: Compose, tasks: int, epochs: int = 1, **options: Any) -> tg.Job:
    return tg.Job(tasks=tasks, epochs=epochs, builder=lambda _: Keeper(declare), **options)


def seen(declare: Compose, tasks: int, **options: Any) -> dict[int, list[Any]]:
    """What each task saw in the last epoch: the values of the one tag, in the order of the producers."""
    values = tg.testing.run(job(declare, tasks, **options)).values
    return {task: [*found[-1].values()] for task, found in values.items() if found}


def only(found: list[Any]) -> Any:
    [by_producer] = found
    [value] = by_producer.values()
    return value


def arrays(tasks: int) -> list[Any]:
    return [np.random.default_rng(task).normal(size=(7, 3)) * 10.0**task for task in range(tasks)]


def added(values: list[Any]) -> Any:
    """Along the tree: the first half has the largest power of two that leaves something for the second."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return added(values[:half]) + added(values[half:])


@pytest.mark.parametrize("tasks", TASKS)
@pytest.mark.parametrize("via", ["tree", "ring"])
def test_allreduce_adds_along_the_same_tree_by_each_way(tasks: int, via: Any) -> None:
    found = seen(lambda self, epoch: epoch.allreduce("sum", self.array, self.keep, via=via), tasks)
    expected = added(arrays(tasks)).tobytes()
    assert [only(found[task]).tobytes() for task in range(tasks)] == [expected] * tasks


@pytest.mark.parametrize("root", [0, 3, 5])
def test_reduce_has_the_bits_of_allreduce_at_any_root(root: int) -> None:
    found = seen(lambda self, epoch: epoch.reduce("sum", self.array, self.keep, root=root), 6)
    assert found.keys() == {root}
    assert only(found[root]).tobytes() == added(arrays(6)).tobytes()


@pytest.mark.parametrize("via", ["tree", "ring"])
@pytest.mark.parametrize(("op", "of"), [("min", np.minimum), ("max", np.maximum)])
def test_extremes_of_each_element(op: Any, of: np.ufunc, via: Any) -> None:
    found = seen(lambda self, epoch: epoch.allreduce("it", self.array, self.keep, op=op, via=via), 5)
    for task in range(5):
        assert np.array_equal(only(found[task]), of.reduce(arrays(5)))


@pytest.mark.parametrize("via", ["tree", "ring"])
@pytest.mark.parametrize("tasks", [1, 4, 5])
def test_mean_is_weighted(tasks: int, via: Any) -> None:
    def value(self: Any, epoch: tg.Epoch) -> None:
        def weighted(epoch: tg.Epoch, ins: tg.Inputs) -> Any:
            tree = {"count": self.task_id, "x": self.x, "small": np.full(3, self.task_id, np.float32)}
            return self.task_id + 1, tree

        epoch.allreduce("mean", weighted, self.keep, op="mean", via=via)

    found = [only(each) for each in seen(value, tasks).values()]
    weights = np.arange(1, tasks + 1)
    assert len(found) == tasks
    for mean in found:
        assert mean["count"] == pytest.approx(np.average(range(tasks), weights=weights))
        np.testing.assert_allclose(mean["x"], np.average(arrays(tasks), axis=0, weights=weights))
        assert mean["small"].dtype == np.float32
        assert type(mean["count"]) is float


@pytest.mark.parametrize("via", ["tree", "ring"])
def test_trees_keep_their_names_types_and_shapes(via: Any) -> None:
    def tree(epoch: tg.Epoch, ins: tg.Inputs) -> Any:
        half = np.array([0.1, 60000.0], np.float16)
        return {"n": 2, "flag": True, "parts": [np.ones((2, 3)), (1.5, 2 + 1j)], "half": half, "none": np.zeros((0, 4))}

    found = seen(lambda self, epoch: epoch.allreduce("t", tree, self.keep, via=via), 3)
    total = only(found[2])
    assert list(total) == ["flag", "half", "n", "none", "parts"]
    assert (total["n"], total["flag"]) == (6, 3)
    assert type(total["n"]) is int
    assert total["half"].dtype == np.float32 and total["half"][1] == 180000.0, "16-bit floats are added in float32"
    assert total["none"].shape == (0, 4)
    assert total["parts"][0].tolist() == [[3.0] * 3] * 2
    assert total["parts"][1] == (4.5, 6 + 3j)
    assert not total["parts"][0].flags.writeable


@pytest.mark.parametrize("via", ["tree", "ring"])
def test_large_arrays(via: Any) -> None:
    def large(epoch: tg.Epoch, ins: tg.Inputs) -> Any:
        return {"w": np.arange(300_000.0), "b": np.ones(5, np.float32)}

    found = seen(lambda self, epoch: epoch.allreduce("t", large, self.keep, via=via), 3)
    for task in range(3):
        assert np.array_equal(only(found[task])["w"], 3 * np.arange(300_000.0))
        assert only(found[task])["b"].tolist() == [3.0] * 5


def test_tensors_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    importlib.import_module("taskgraph.torch")  # tensors travel

    def value(epoch: tg.Epoch, ins: tg.Inputs) -> Any:
        return 2, {"w": torch.full((2, 2), 1.5, requires_grad=True), "half": torch.ones(3, dtype=torch.bfloat16)}

    found = seen(lambda self, epoch: epoch.allreduce("t", value, self.keep, op="mean"), 3)
    total = only(found[1])
    assert torch.equal(total["w"], torch.full((2, 2), 1.5))
    assert torch.equal(total["half"], torch.ones(3, dtype=torch.float32))


@pytest.mark.parametrize("tasks", [1, 5])
@pytest.mark.parametrize("last", [False, True])
def test_broadcast(tasks: int, last: bool) -> None:
    root = tasks - 1 if last else 0

    def declare(self: Any, epoch: tg.Epoch) -> None:
        epoch.broadcast("it", lambda epoch, ins: {"from": self.task_id, "any": "text"}, self.keep, root=root)

    found = seen(declare, tasks)
    assert [only(found[task]) for task in range(tasks)] == [{"from": root, "any": "text"}] * tasks


def test_gather_and_allgather_have_all_values_by_task() -> None:
    found = seen(lambda self, epoch: epoch.gather("g", lambda epoch, ins: self.task_id, self.keep, root=2), 4)
    assert found == {2: [{task: task for task in range(4)}]}
    found = seen(lambda self, epoch: epoch.allgather("g", lambda epoch, ins: self.task_id, self.keep), 4)
    assert found == {task: [{other: other for other in range(4)}] for task in range(4)}


@pytest.mark.parametrize("give", [list, dict])
def test_scatter(give: type) -> None:
    def declare(self: Any, epoch: tg.Epoch) -> None:
        values = {task: f"for {task}" for task in range(4)}
        epoch.scatter("s", lambda epoch, ins: values if give is dict else [*values.values()], self.keep, root=1)

    assert {task: only(each) for task, each in seen(declare, 4).items()} == {task: f"for {task}" for task in range(4)}


@pytest.mark.parametrize("tasks", [1, 3])
def test_reduce_scatter_gives_each_task_its_share(tasks: int) -> None:
    found = seen(lambda self, epoch: epoch.reduce_scatter("s", self.array, self.keep), tasks)
    whole = added(arrays(tasks))
    for task in range(tasks):
        assert only(found[task]).tobytes() == whole[tg.shard(7, task, tasks)].tobytes()


def test_reduce_scatter_of_a_mean() -> None:
    def declare(self: Any, epoch: tg.Epoch) -> None:
        epoch.reduce_scatter("s", lambda epoch, ins: (self.task_id, {"x": self.x}), self.keep, op="mean")

    found = seen(declare, 3)
    mean = np.average(arrays(3), axis=0, weights=[0, 1, 2])
    np.testing.assert_allclose(np.concatenate([only(found[task])["x"] for task in range(3)]), mean)


def test_groups_along_links() -> None:
    """Rows and columns of a grid: every task is in a group of each."""

    def row(task: int, tasks: int, epoch: int) -> list[int]:
        return [task // 3 * 3 + i for i in range(3)]

    def column(task: int, tasks: int, epoch: int) -> list[int]:
        return [i for i in range(tasks) if i % 3 == task % 3 and i != task]

    def declare(self: Any, epoch: tg.Epoch) -> None:
        epoch.allreduce("row", lambda epoch, ins: 10.0**self.task_id, over="row")
        epoch.allreduce("all", lambda epoch, ins: ins["row"], self.keep, over="column", inbound=("row",), via="ring")

    found = seen(declare, 6, topology={"row": row, "column": column})
    assert {task: only(each) for task, each in found.items()} == dict.fromkeys(range(6), 111111.0)


def test_groups_that_change_with_the_epoch() -> None:
    def partner(task: int, tasks: int, epoch: int) -> list[int]:
        return [task ^ (1 << epoch % 2)]

    def declare(self: Any, epoch: tg.Epoch) -> None:
        epoch.allreduce("pair", lambda epoch, ins: self.task_id, self.keep, over="partner")

    values = tg.testing.run(job(declare, 4, epochs=3, topology={"partner": partner})).values
    sums = {task: [only([*each.values()]) for each in found] for task, found in values.items()}
    assert sums == {0: [1, 2, 1], 1: [1, 4, 1], 2: [5, 2, 5], 3: [5, 4, 5]}


class Mixed(tg.Task, state=["theta", "norms"]):
    """Collectives that rest on others, on channels, and that a sync point of its own reads."""

    def setup(self) -> None:
        self.theta, self.norms = np.zeros(2), np.zeros(0)

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"hint": "right"})
        epoch.broadcast("rate", lambda epoch, ins: 0.5, root=1)
        epoch.allreduce("grad", self.gradient, inbound={"rate": self.task_id, "hint": "left"})
        epoch.reduce("norm", self.norm, self.note, inbound=("grad",), op="max", root=2)
        epoch.processor(self.update, inbound={"grad": self.task_id, "rate": self.task_id})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("hint", self.task_id)

    async def gradient(self, epoch: tg.Epoch, ins: tg.Inputs) -> Any:
        return ins["rate"] * (self.theta - [self.task_id, ins["hint"]]) + epoch.rng.normal(size=2)

    def norm(self, epoch: tg.Epoch, ins: tg.Inputs) -> float:
        return float(abs(ins["grad"]).sum())

    async def note(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        self.norms = np.append(self.norms, ins["norm"])

    def update(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.theta = self.theta - ins["rate"] * ins["grad"] / self.tasks

    def result(self) -> Any:
        return self.theta, self.norms


def test_results_rest_on_results_and_channels_and_survive_kills() -> None:
    mixed = tg.Job(tasks=5, epochs=4, builder=Mixed, topology=tg.ring())
    plain = tg.testing.run(mixed)
    assert len(plain.values[2][1]) == 4
    for order, kills in enumerate([{(4, 2): "sync", (1, 1): "done"}, {(2, 3): "snapshot"}]):
        killed = tg.testing.run(mixed, kills=kills, order=order)
        assert killed.failovers
        assert {task: (a.tobytes(), b.tobytes()) for task, (a, b) in killed.values.items()} == {
            task: (a.tobytes(), b.tobytes()) for task, (a, b) in plain.values.items()
        }


@pytest.mark.parametrize("via", ["tree", "ring"])
def test_kills_at_every_stage_leave_the_bits(via: Any) -> None:
    def declare(self: Any, epoch: tg.Epoch) -> None:
        epoch.allreduce("sum", self.array, self.keep, via=via)

    def last(result: tg.JobResult) -> set[bytes]:
        return {only([*found[-1].values()]).tobytes() for found in result.values.values()}

    plain = last(tg.testing.run(job(declare, 4, epochs=4)))
    assert len(plain) == 1
    kills = {(0, 1): "processor", (3, 2): "compose", (1, 3): "done"}
    killed = tg.testing.run(job(declare, 4, epochs=4, backups=2), kills=kills, order=3)
    assert killed.failovers and last(killed) == plain


class Growing(tg.Task, state=["x", "total"]):
    """Adds arrays that are small and large in turns, and changes its own in place."""

    def __init__(self, via: Any, sizes: Sequence[int] = (5, LARGE, 5)) -> None:
        self.via, self.sizes = via, sizes

    def setup(self) -> None:
        self.x = np.random.default_rng(self.task_id).normal(size=max(self.sizes))
        self.total = 0.0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.allreduce("sum", self.value, self.keep, via=self.via)

    def value(self, epoch: tg.Epoch, ins: tg.Inputs) -> Any:
        return self.x[: self.sizes[epoch.number % len(self.sizes)]]

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        self.x[: len(ins["sum"])] += ins["sum"] / 3
        self.total += float(ins["sum"][-1])

    def result(self) -> Any:
        return self.x.tobytes(), self.total


def growing(via: Any = "auto", **options: Any) -> tg.Job:
    return tg.Job(tasks=3, epochs=3, builder=lambda _: Growing(via), **options)


@pytest.mark.slow
def test_sizes_that_change_leave_the_bits_by_each_way_also_with_kills() -> None:
    plain = tg.testing.run(growing("tree")).values
    assert tg.testing.run(growing("ring"), order=1).values == plain
    kills: list[Any] = [{(0, 1): "processor", (2, 2): "sync"}, {(2, 1): "done", (1, 2): "processor"}]
    for order, killed in enumerate(kills):
        found = tg.testing.run(growing(backups=2), kills=killed, order=order)
        assert found.failovers and found.values == plain


def test_a_resumed_job_goes_on_where_values_grow(tmp_path: Path) -> None:
    def upto(epochs: int) -> tg.Job:
        kept: dict[str, Any] = {"checkpoint": tmp_path.as_uri(), "checkpoint_every": 1}
        return tg.Job(tasks=2, epochs=epochs, builder=lambda _: Growing("auto", (5, 5, LARGE)), **kept)

    tg.run(upto(2), nodes=0)
    resumed = tg.run(upto(4), nodes=0, resume=True)
    whole = tg.Job(tasks=2, epochs=4, builder=lambda _: Growing("tree", (5, 5, LARGE)))
    assert resumed.values == tg.run(whole, nodes=0).values


def test_groups_with_large_and_with_small_values() -> None:
    def pair(task: int, tasks: int, epoch: int) -> list[int]:
        return [task ^ (1 << epoch % 2)]

    def declare(self: Any, epoch: tg.Epoch) -> None:
        def value(epoch: tg.Epoch, ins: tg.Inputs) -> Any:
            return np.full(LARGE if 0 in (self.task_id, *epoch.neighbors("pair")) else 3, 1.0 + self.task_id)

        epoch.allreduce("pair", value, self.keep, over="pair")

    values = tg.testing.run(job(declare, 4, epochs=2, topology={"pair": pair})).values
    sums = {task: [only([*each.values()]) for each in found] for task, found in values.items()}
    assert {task: [(len(each), each[-1]) for each in found] for task, found in sums.items()} == {
        0: [(LARGE, 3.0), (LARGE, 4.0)],
        1: [(LARGE, 3.0), (3, 6.0)],
        2: [(3, 7.0), (LARGE, 4.0)],
        3: [(3, 7.0), (3, 6.0)],
    }


@pytest.mark.parametrize("sizes", [(5, LARGE), (LARGE, 5)])
@pytest.mark.parametrize("when", ["sync", "done"])
def test_another_primary_that_gives_another_size_is_an_error(sizes: tuple[int, int], when: Any) -> None:
    given: list[int] = []

    def declare(self: Any, epoch: tg.Epoch) -> None:
        def value(epoch: tg.Epoch, ins: tg.Inputs) -> Any:
            if self.task_id == 1:
                given.append(sizes[bool(given)])
            return np.ones(given[-1] if self.task_id == 1 else sizes[0])

        epoch.allreduce("sum", value, self.keep)

    with pytest.raises(tg.JobFailed, match=r"shape \(\d+,\) in task 0, and .* in task 1: give the same names"):
        tg.testing.run(job(declare, 4), kills={(1, 0): when}, strict=False)
    assert given[:2] == [*sizes]


class Total(tg.Task, state=["total"]):
    def setup(self) -> None:
        self.total = 0.0

    @tg.stateless
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.allreduce("part", self.part, self.add)

    @tg.stateless
    def part(self, epoch: tg.Epoch, ins: tg.Inputs) -> Any:
        return np.full(3 * LARGE // 4 if epoch.number == 15 else 1, float(epoch.number))

    def add(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        self.total += float(ins["part"][-1])

    def result(self) -> float:
        return self.total


def test_stateless_collectives_are_composed_once_and_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    compose = Total.compose

    class Counted(Total):
        @tg.stateless
        def compose(self, epoch: tg.Epoch) -> None:
            calls.append(self.task_id)
            compose(self, epoch)

    total = tg.Job(tasks=3, epochs=30, builder=Counted)
    assert tg.testing.run(total, strict=False).values == dict.fromkeys(range(3), 3.0 * sum(range(30)))
    assert len(calls) < 15, "once for many epochs"
    assert tg.testing.run(total).values == dict.fromkeys(range(3), 3.0 * sum(range(30)))


def test_large_values_in_one_epoch_leave_later_pulls_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_all, calls = Router.begin_all, [0]

    def counted(*args: Any) -> Any:
        calls[-1] += 1
        return begin_all(*args)

    class Once(Total):
        size = 3

        @tg.stateless
        def part(self, epoch: tg.Epoch, ins: tg.Inputs) -> Any:
            return np.ones(self.size if epoch.number == 3 else 3)

    class Large(Once):
        size = 2 * LARGE

    monkeypatch.setattr(Router, "begin_all", counted)
    for builder in (Once, Large):
        calls.append(0)
        tg.testing.run(tg.Job(tasks=2, epochs=50, builder=builder), strict=False)
    _, small, large = calls
    assert 0 < large < 2 * small


class Heavy(tg.Task, state=["total", "weights"]):
    """Has so much state that its digest, in strict mode, takes longer than the sync point."""

    def setup(self) -> None:
        self.total = 0.0
        self.weights = np.ones(1_000_000)

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.allreduce("sum", lambda epoch, ins: np.ones(5), self.add, via="ring")

    def add(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        self.total += float(ins["sum"][0])

    def result(self) -> float:
        return self.total


def test_strict_mode_checks_the_state_after_an_exchange_before_sync_points_change_it() -> None:
    strict = tg.Job(tasks=3, epochs=2, builder=lambda _: Heavy(), settings=tg.Settings(strict=True))
    assert tg.run(strict, nodes=0).values == dict.fromkeys(range(3), 6.0)


def test_values_that_were_added_are_freed_at_once() -> None:
    values = [np.ones(3) for _ in range(4)]
    freed = [weakref.ref(value) for value in values]
    gc.disable()  # the pool of shared memory waits for the next collection, where values are part of a cycle
    try:
        adding.add_along_tree(values, "sum", lambda nbytes: None)
        values.clear()
        assert [ref() for ref in freed] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize("tasks", [1, 2, 3, 6, 8, 17])
def test_the_tree_has_one_root_and_adds_alike_for_each(tasks: int) -> None:
    members = tuple(range(100, 100 + tasks))

    def text(root: int, member: int) -> str:
        found = str(member)
        for child, earlier in tree_place(members, root, member).children:
            assert tree_place(members, root, child).parent == member
            found = f"({text(root, child)} {found})" if earlier else f"({found} {text(root, child)})"
        return found

    assert len({text(root, root) for root in members}) == 1
    assert [tree_place(members, root, root).parent for root in members] == [None] * tasks


# -- errors -----------------------------------------------------------------------------------------------------------


def failure(declare: Compose, tasks: int = 4, **options: Any) -> str:
    with pytest.raises(tg.JobFailed) as failed:
        tg.testing.run(job(declare, tasks, **options))
    return str(failed.value)


@pytest.mark.parametrize("via", ["tree", "ring", "auto"])
@pytest.mark.parametrize("size", [3, LARGE])
def test_shapes_that_differ_name_both_tasks(via: Any, size: int) -> None:
    def declare(self: Any, epoch: tg.Epoch) -> None:
        tree = {"w": np.ones(3), "bias": np.ones(size if self.task_id != 2 else 4)}
        epoch.allreduce("grad", lambda epoch, ins: tree, self.keep, via=via)

    text = rf"bias is an array of float64 with shape \(4,\) in task 2, and .* with shape \({size},\) in task 3"
    assert re.search(f"allreduce of 'grad': {text}", failure(declare))


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_names_that_differ_name_both_tasks(op: Any) -> None:
    def declare(self: Any, epoch: tg.Epoch) -> None:
        tree = {"w": 1.0, "b" if self.task_id != 2 else "bias": 2.0}
        value = (1.0, tree) if op == "mean" else tree
        epoch.allreduce("grad", lambda epoch, ins: value, self.keep, op=op)

    assert "allreduce of 'grad': b is nothing in task 2, and a float in task 3" in failure(declare)


@pytest.mark.parametrize(
    ("value", "op", "says"),
    [
        (None, "sum", "a value is None .*: a sum is made of numbers"),
        ({"a": "text"}, "sum", r"\['a'\] is a str"),
        ({"a": 1, 2: 3}, "sum", "keys that are no texts"),
        (np.ma.array([1.0, 2.0], mask=[0, 1]), "sum", "is a masked array"),
        (1.0, "mean", r"for a mean return \(weight, tree\)"),
        ((True, 1.0), "mean", "the weight of a mean is a number, not bool"),
        ((float("nan"), 1.0), "mean", "the weight of a mean is nan"),
        ((0, 1.0), "mean", "the weights of all tasks add up to 0"),
    ],
)
def test_values_that_cannot_be_added(value: Any, op: Any, says: str) -> None:
    text = failure(lambda self, epoch: epoch.allreduce("it", lambda epoch, ins: value, self.keep, op=op))
    assert "epoch 0: allreduce of 'it': " in text
    assert re.search(says, text), text


@pytest.mark.parametrize("via", ["tree", "ring"])
def test_what_has_weight_0_counts_nothing(via: Any) -> None:
    def declare(self: Any, epoch: tg.Epoch) -> None:
        given = (0, [np.full(3, np.nan), np.inf]) if self.task_id == 1 else (2.0, [np.ones(3), 4.0])
        epoch.allreduce("it", lambda epoch, ins: given, self.keep, op="mean", via=via)

    array, number = only(seen(declare, 3)[0])
    assert (array.tolist(), number) == ([1.0, 1.0, 1.0], 4.0)


def test_mean_of_arrays_of_the_other_byte_order() -> None:
    def declare(self: Any, epoch: tg.Epoch) -> None:
        epoch.allreduce("it", lambda epoch, ins: (1, np.full(3, self.task_id, ">f8")), self.keep, op="mean")

    assert only(seen(declare, 3)[0]).tolist() == [1.0, 1.0, 1.0]


def test_values_that_cannot_be_scattered() -> None:
    def declare(self: Any, epoch: tg.Epoch) -> None:
        epoch.scatter("it", lambda epoch, ins: [1, 2], self.keep)

    assert "return one value for each of the tasks [0, 1, 2, 3]" in failure(declare)
    assert "it got 2 values" in failure(declare)
    text = failure(lambda self, epoch: epoch.reduce_scatter("it", lambda epoch, ins: {"a": 1.0}, self.keep))
    assert "['a'] is a float without an axis" in text


@pytest.mark.parametrize(
    ("declare", "says"),
    [
        (lambda self, epoch: epoch.allreduce("g", self.array, self.keep, op="prod"), "op takes 'sum', 'mean', 'min'"),
        (lambda self, epoch: epoch.allreduce("g", self.array, self.keep, via="star"), "via takes 'auto', 'tree'"),
        (lambda self, epoch: epoch.allreduce("g", self.array, self.keep, over="children"), "joins task 0 to 0, 1, 2, "),
        (lambda self, epoch: epoch.allreduce("g", self.array, self.keep, over="row"), "there is no link 'row'"),
        (lambda self, epoch: epoch.reduce("g", self.array, self.keep, root=4), "root takes the id of one of the tasks"),
        (lambda self, epoch: epoch.allreduce("g", self.array, self.keep, inbound=("x",)), "no collective before this"),
        (lambda self, epoch: epoch.allreduce("g", self.array, self.keep, inbound="x"), "inbound takes tags"),
        (lambda self, epoch: epoch.allreduce("g", self.array), "nothing reads 'g'"),
        (lambda self, epoch: epoch.allreduce("g", lambda epoch, ins, outs: 1, self.keep), "takes (epoch, ins, outs)"),
        (lambda self, epoch: epoch.allreduce("g", 3.0, self.keep), "must be callable, not float"),
        (
            lambda self, epoch: [epoch.allreduce("g", self.array, self.keep) for _ in range(2)],
            "another collective has this tag",
        ),
    ],
)
def test_arguments_that_do_not_fit(declare: Compose, says: str) -> None:
    assert says in failure(declare, topology=tg.tree())


def test_only_in_compose() -> None:
    def late(epoch: tg.Epoch, ins: tg.Inputs) -> None:
        epoch.allreduce("g", late)

    text = failure(lambda self, epoch: epoch.broadcast("g", late, self.keep))
    assert "allreduce() and other collectives are declared in compose(), and only there" in text


def differing(one: Compose, other: Compose) -> Compose:
    return lambda self, epoch: one(self, epoch) if self.task_id == 1 else other(self, epoch)


def plain(tag: str, **options: Any) -> Compose:
    return lambda self, epoch: epoch.allreduce(tag, self.array, self.keep, **options)


def both(one: Compose, other: Compose) -> Compose:
    def declare(self: Any, epoch: tg.Epoch) -> None:
        one(self, epoch)
        other(self, epoch)

    return declare


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (plain("g"), lambda self, epoch: None),
        (lambda self, epoch: None, plain("g", via="ring")),
        (plain("g", op="max"), plain("g")),
        (plain("g", via="tree"), plain("g", via="ring")),
        (plain("g", via="auto"), plain("g", via="ring")),
        (plain("g", via="tree"), plain("g", via="auto")),
        (both(plain("g"), plain("h")), both(plain("h"), plain("g"))),
        (plain("g"), lambda self, epoch: epoch.broadcast("g", self.array, self.keep)),
        (plain("g"), lambda self, epoch: epoch.reduce("g", self.array, self.keep)),
        (
            lambda self, epoch: epoch.reduce("g", self.array, self.keep, root=1),
            lambda self, epoch: epoch.reduce("g", self.array, self.keep),
        ),
        (
            lambda self, epoch: epoch.gather("g", self.array, self.keep),
            lambda self, epoch: epoch.allgather("g", self.array, self.keep),
        ),
    ],
)
def test_tasks_that_declare_differently_are_told_so(one: Compose, other: Compose) -> None:
    text = failure(differing(one, other))
    assert "'g" in text or "'h" in text
    refused = "which does not offer it in this epoch" in text and "All tasks declare the same collectives" in text
    assert refused or "does not take it" in text
