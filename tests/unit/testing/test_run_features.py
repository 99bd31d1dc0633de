"""Channels, topologies and hooks in small jobs, with and without failures."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from jobs_kit import Kills, fails, job, run, same

import taskgraph as tg
from taskgraph.testing import STAGES

PLACES: list[Kills] = [{}, {(0, 1): "processor"}, {(1, 1): "sync", (0, 2): "done"}]


class Heat(tg.Task, state=["cell"]):
    """A halo exchange: every cell becomes the mean of its neighbors."""

    links = ("north", "south", "west", "east")

    def setup(self) -> None:
        self.cell = np.full(2, float(self.task_id))

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.share, outbound={"cell": self.links})
        epoch.processor(self.relax, inbound={"cell": [i for link in self.links for i in epoch.neighbors(link)]})

    def share(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("cell", self.cell)

    def relax(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.cell = np.mean(list(ins.all("cell").values()), axis=0)

    def result(self) -> Any:
        return self.cell


@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize("kills", [{}, {(4, 1): "done", (0, 2): "commit"}, {(5, 3): "processor"}], ids=str)
def test_halo_exchange_on_a_grid(kills: Kills, order: int) -> None:
    heat = tg.Job(tasks=6, epochs=4, builder=Heat, topology=tg.grid(2, 3))
    result = run(heat, kills=kills, order=order)
    cells = np.arange(6.0)
    near = {0: (3, 1), 1: (4, 0, 2), 2: (5, 1), 3: (0, 4), 4: (1, 3, 5), 5: (2, 4)}
    for _ in range(4):
        cells = np.array([np.mean([cells[j] for j in near[i]]) for i in range(6)])
    assert [value[0] for value in result.values.values()] == pytest.approx(cells.tolist(), abs=0, rel=1e-15)


def test_a_ring_passes_tokens_around() -> None:
    class Token(tg.Task, state=["token"]):
        def setup(self) -> None:
            self.token = self.task_id

        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.give, outbound={"token": "right"})
            epoch.processor(self.take, inbound={"token": "left"})

        def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("token", self.token)

        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.token = ins["token"]

        def result(self) -> int:
            return self.token

    result = run(job(Token, tasks=5, epochs=3, topology=tg.ring()), kills={(2, 1): "snapshot"})
    assert result.values == {i: (i - 3) % 5 for i in range(5)}


class Counting(tg.Task, state=["total"]):
    """Base class of tasks that sum something up."""

    total: Any

    def setup(self) -> None:
        self.total = 0

    def result(self) -> Any:
        return self.total


@pytest.mark.parametrize("kills", PLACES, ids=str)
def test_a_topology_that_changes_every_epoch(kills: Kills) -> None:
    class Hop(Counting):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.say, outbound={"id": "out"})
            epoch.processor(self.hear, inbound={"id": "in"})

        def say(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("id", self.task_id)

        def hear(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total = self.total * 10 + ins["id"]

    hops = tg.edges(lambda epoch: [(i, (i + epoch) % 4) for i in range(4)])
    result = run(job(Hop, tasks=4, epochs=3, topology=hops), kills=kills)
    assert result.values == {i: 100 * i + 10 * ((i - 1) % 4) + (i - 2) % 4 for i in range(4)}


@pytest.mark.parametrize("kills", PLACES, ids=str)
def test_several_processors_read_one_inbound_channel(kills: Kills) -> None:
    class Shared(Counting):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.give, outbound={"x": "peers"})
            epoch.processor(self.twice, inbound={"x": "peers"}, outbound={"y": "peers"})
            epoch.processor(self.add, inbound={"x": "peers", "y": "peers"})
            epoch.processor(self.again, inbound={"x": "peers"})

        def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("x", epoch.number + 1)

        def twice(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("y", 2 * ins["x"])

        def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += ins["x"] + ins["y"]

        def again(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += 100 * ins["x"]

    result = run(job(Shared, epochs=3), kills=kills)
    assert result.values == {0: 618, 1: 618}


@pytest.mark.parametrize("kills", PLACES, ids=str)
def test_a_channel_to_oneself(kills: Kills) -> None:
    class Alone(Counting):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.give, outbound={"x": self.task_id})
            epoch.processor(self.take, inbound={"x": [self.task_id]})

        def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("x", epoch.number)

        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += ins["x"]

    assert run(job(Alone, epochs=4, topology={}), kills=kills).values == {0: 6, 1: 6}


def test_a_channel_without_neighbors_carries_nothing() -> None:
    class Leafy(Counting):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.give, outbound={"x": "children"})
            epoch.processor(self.take, inbound={"x": "parents"})

        def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("x", 1)

        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += sum(ins.all("x").values()) + ("x" in ins)

    assert run(job(Leafy, topology=tg.tree())).values == {0: 0, 1: 4}


@pytest.mark.parametrize("kills", PLACES, ids=str)
def test_tasks_without_state(kills: Kills) -> None:
    class Pure(tg.Task):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.give, outbound={"x": "peers"})
            epoch.processor(self.take, inbound={"x": "peers"})

        def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("x", epoch.number)

        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            epoch.report(sum=ins["x"] + epoch.number)

    result = run(job(Pure, epochs=4), kills=kills)
    assert result.values == {}
    assert [r.by_task for r in result.reports] == [{0: {"sum": 2.0 * e}, 1: {"sum": 2.0 * e}} for e in range(4)]
    with pytest.raises(tg.JobError, match="no task returned one"):
        _ = result.value


@pytest.mark.parametrize("order", range(3))
def test_parallel_processors_run_as_their_items_come(order: int) -> None:
    class Wide(Counting):
        def compose(self, epoch: tg.Epoch) -> None:
            other = 1 - self.task_id
            epoch.processor(self.echo, inbound={"ask": other}, outbound={"echo": other}, parallel=True)
            epoch.processor(self.ask, outbound={"ask": other})
            epoch.processor(self.take, inbound={"echo": other})

        def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("ask", self.task_id)

        async def echo(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("echo", ins["ask"] + 10)

        async def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += ins["echo"]

    # Declared in this order without parallel=True it would be a cycle of waits: each echo runs before its own ask.
    result = run(job(Wide, epochs=3), order=order, kills={(0, 1): "processor"})
    assert result.values == {0: 30, 1: 33}


@pytest.mark.parametrize("kills", PLACES)
def test_compose_may_be_a_coroutine(kills: Kills) -> None:
    class Awaiting(Heat):
        async def compose(self, epoch: tg.Epoch) -> None:
            await asyncio.sleep(0)
            super().compose(epoch)

    plain, awaiting = (
        run(job(kind, tasks=4, epochs=3, topology=tg.grid(2, 2)), kills=kills) for kind in (Heat, Awaiting)
    )
    same(plain, awaiting)


def test_scratch_lasts_one_epoch() -> None:
    class Notes(Counting):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.note, outbound={"x": self.task_id})
            epoch.processor(self.read, inbound={"x": self.task_id})

        def note(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            assert vars(epoch.scratch) == {}
            epoch.scratch.seen = epoch.number + 1
            outs.put("x", None)

        def read(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += epoch.scratch.seen

    assert run(job(Notes, epochs=3), kills={(0, 1): "sync"}).values == {0: 6, 1: 6}


class Dice(Counting):
    """Draws random numbers in a processor and in a sync point."""

    def setup(self) -> None:
        self.total = np.zeros(0)

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.roll, outbound={"x": self.task_id})
        epoch.processor(self.roll_again, inbound={"x": self.task_id})

    def roll(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", epoch.rng.random(2))

    def roll_again(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total = np.concatenate([self.total, ins["x"], epoch.rng.random(1)])


@pytest.mark.parametrize("stage", STAGES)
def test_rng_is_the_same_in_a_replay_only(stage: str) -> None:
    undisturbed = run(job(Dice, epochs=3), nodes=1)
    same(run(job(Dice, epochs=3), kills={(0, 1): stage}), undisturbed)
    drawn = np.concatenate([undisturbed.values[0], undisturbed.values[1]])
    assert len(set(drawn.tolist())) == 18
    other = run(job(Dice, epochs=3, seed=1), nodes=1)
    assert not set(other.values[0].tolist()) & set(drawn.tolist())


class Named(Dice):
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.roll, outbound={"x": self.task_id})
        epoch.processor(self.roll_again, inbound={"x": self.task_id}, name="läst")


def test_rng_is_as_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text("utf-8")
    (formula,) = re.findall(r"`rng` is `(np\.random\.default_rng\(.*?\)\))`", page)
    named = job(Named, epochs=2, seed=-7)

    def draws(epoch: int, task_id: int, name: str, count: int) -> list[float]:
        scope = {"np": np, "xxhash": xxhash, "job": named, "epoch": SimpleNamespace(number=epoch)}
        return list(eval(formula, {**scope, "task_id": task_id, "name": name}).random(count))

    for task_id, drawn in run(named).values.items():
        expected = [draws(epoch, task_id, *drew) for epoch in range(2) for drew in (("roll", 2), ("läst", 1))]
        assert drawn.tolist() == [number for numbers in expected for number in numbers]
    dice = Dice()
    dice.task_id = 3
    assert tg.testing.compute(dice.roll, epoch=5, seed=-7)["x"].tolist() == draws(5, 3, "roll", 2)


class Drawn(Counting):
    """Task 0 draws a random number for each flag and request, and keeps them in the order of arrival."""

    def setup(self) -> None:
        self.total: list[tuple[str, int, str, float]] = []

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.scratch.drawn = []
        if self.task_id == 0:
            epoch.processor(self.keep)
            return
        epoch.flag(0, "a")
        epoch.flag(0, "b")
        epoch.flag(self.task_id)

    async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
        if self.task_id == 0:
            epoch.scratch.drawn.append(("flag", sender, meta, epoch.rng.random()))
            return
        await asyncio.gather(*[epoch.request(0, "draw", payload) for payload in ("a", "b")])

    @tg.handles("draw")
    def draw(self, epoch: tg.Epoch, sender: int, payload: Any) -> None:
        epoch.scratch.drawn.append(("request", sender, payload, epoch.rng.random()))

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total = [*self.total, *epoch.scratch.drawn]


def test_each_message_has_its_own_rng() -> None:
    drawn = [run(job(Drawn, tasks=4), order=order, nodes=1).values[0] for order in range(1, 5)]
    assert len({tuple(one) for one in drawn}) > 1, "they came in several orders"
    assert len({frozenset(one) for one in drawn}) == 1, "and each drew the same in all of them"
    assert len({number for *_, number in drawn[0]}) == len(drawn[0]) == 12 * job(Drawn).epochs


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("order", range(2))
def test_on_commit_in_order_at_least_once(stage: str, order: int) -> None:
    told: list[tuple[int, int, int]] = []

    class Told(Counting):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.count)

        def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += 1

        def on_commit(self, number: int, state: Any) -> None:
            told.append((self.task_id, number, state["total"]))

    result = run(job(Told, tasks=1, epochs=4), kills={(0, 1): stage, (0, 3): stage}, order=order)
    assert result.values == {0: 4}
    assert all(total == number + 1 for _, number, total in told)
    numbers = [number for _, number, _ in told]
    assert numbers == sorted(numbers)
    assert set(numbers) == {0, 1, 2, 3}
    assert result.failovers >= 2


def test_on_commit_before_the_next_epoch() -> None:
    heard: list[str] = []

    class Ordered(Counting):
        def compose(self, epoch: tg.Epoch) -> None:
            heard.append(f"compose {epoch.number}")
            epoch.processor(self.count)

        def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            heard.append(f"compute {epoch.number}")
            self.total += 1

        async def on_commit(self, number: int, state: Any) -> None:
            heard.append(f"commit {number}")

        def result(self) -> int:
            heard.append("result")
            return 0

    run(job(Ordered, tasks=1, epochs=2), strict=False, nodes=1)
    assert heard == ["compose 0", "compute 0", "commit 0", "compose 1", "compute 1", "commit 1", "result"]


def test_events_of_a_failover() -> None:
    told: list[tuple[int, tg.Event]] = []

    class Told(Counting):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.give, outbound={"x": "peers"})
            epoch.processor(self.take, inbound={"x": "peers"})

        def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("x", 1)

        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += sum(ins.all("x").values())

        def on_event(self, event: tg.Event) -> None:
            told.append((self.task_id, event))

    run(job(Told, tasks=3, epochs=5), kills={(1, 2): "processor"}, strict=False)
    first = [event for task, event in told if task == 1 and isinstance(event, tg.BecamePrimary)]
    assert [event.term for event in first][:2] == [1, 2]
    about_1 = [event for task, event in told if task != 1 and getattr(event, "task", None) == 1]
    assert any(isinstance(e, tg.NeighborFailed) and e.link == "peers" for e in about_1)
    assert any(isinstance(e, tg.NeighborRestarted) and e.term == 2 and e.link == "peers" for e in about_1)


def test_teardown_once_per_living_replica() -> None:
    living: dict[int, int] = {}

    class Tidy(Counting):
        def setup(self) -> None:
            super().setup()
            living[self.task_id] = living.get(self.task_id, 0) + 1

        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.count)

        def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += 1

        def teardown(self) -> None:
            living[self.task_id] -= 1

    run(job(Tidy, tasks=3, backups=1), strict=False)
    assert living == {0: 0, 1: 0, 2: 0}


def test_results_of_all_tasks() -> None:
    class Some(Counting):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.count)

        def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += 1

        def result(self) -> Any:
            return None if self.task_id == 1 else {"total": self.total, "task": self.task_id, "big": np.zeros(100_000)}

    result = run(job(Some, tasks=3))
    assert list(result.values) == [0, 2]
    assert result.values[2]["total"] == 2
    assert result.values[2]["big"].shape == (100_000,)
    with pytest.raises(tg.JobError, match=r"tasks 0, 2 returned different ones: use \.values"):
        _ = result.value


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("epoch", [0, 2, 3])
def test_reports_survive_the_root(stage: str, epoch: int) -> None:
    class Reporting(Counting):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.say, outbound={"x": self.task_id})
            epoch.processor(self.count, inbound={"x": self.task_id})

        def say(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("x", 0)
            if self.task_id == 1 and epoch.number % 2:
                epoch.report(odd=epoch.number)

        def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += 1
            epoch.report(total=self.total, who=self.task_id)

    result = run(job(Reporting, tasks=3, epochs=4), kills={(0, epoch): stage}, order=1)
    assert [r.epoch for r in result.reports] == [0, 1, 2, 3]
    for report in result.reports:
        number = report.epoch
        odd = {"odd": float(number)} if number % 2 else {}
        assert report.by_task == {
            t: {"total": number + 1.0, "who": float(t)} | (odd if t == 1 else {}) for t in range(3)
        }
        assert report.numbers["who"] == 0.0, "the lowest task's"


VALUES: list[Any] = [
    None,
    True,
    -(10**40),
    1.5,
    float("inf"),
    -0.0,
    "ünïcode",
    b"\0bytes",
    [1, [2.0, None]],
    (1, (2,)),
    {"a": 1, "b": [b"x"]},
    np.float32(1.25),
    np.datetime64("2020-01-02"),
    np.array(3),
    np.zeros((0, 3)),
    np.arange(12).reshape(3, 4)[::2, ::-1],
    np.arange(6, dtype=">i4").reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array([(1, 2.5)], dtype=[("n", "i4"), ("x", "f8")]),
    *(np.array([0, 1, 1], dtype=code) for code in "?bBhHiIlLqQefdgFDG"),
    np.array(["a", "bcd"]),
    np.array([b"a", b"bcd"]),
    np.array(["2020-01-01", "NaT"], dtype="M8[s]"),
    np.array([1, 2], dtype="m8[ms]"),
]


def test_every_kind_of_value_travels() -> None:
    class Courier(tg.Task):
        def compose(self, epoch: tg.Epoch) -> None:
            if self.task_id == 0:
                epoch.processor(self.give, outbound={"values": 1})
            else:
                epoch.processor(self.take, inbound={"values": 0})

        def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("values", VALUES)

        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            got.clear()
            got.extend(ins["values"])

    got: list[Any] = []
    run(job(Courier, epochs=1), strict=False)
    assert len(got) == len(VALUES)
    for sent, came in zip(VALUES, got, strict=True):
        assert type(came) is type(sent)
        if isinstance(sent, np.ndarray | np.generic):
            assert (came.dtype, came.shape) == (sent.dtype, sent.shape)
            np.testing.assert_array_equal(came, sent)
            assert isinstance(came, np.generic) or not came.flags.writeable
        else:
            assert repr(came) == repr(sent)


def test_empty_and_partial_puts() -> None:
    class Filling(Counting):
        def compose(self, epoch: tg.Epoch) -> None:
            if self.task_id == 0:
                epoch.processor(self.give, outbound={"x": "peers", "y": "peers"})
            else:
                epoch.processor(self.take, inbound={"x": 0, "y": 0})

        def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.empty("x", (2, 2))[:] = epoch.number
            for peer in epoch.neighbors("peers"):
                outs.put("y", 10 * peer, to=peer)

        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += float(ins["x"].sum()) + ins["y"]

    assert run(job(Filling, tasks=3, epochs=3)).values == {0: 0, 1: 42.0, 2: 72.0}


def test_put_copies() -> None:
    class Changing(Counting):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.give, outbound={"x": self.task_id})
            epoch.processor(self.take, inbound={"x": self.task_id})

        def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            array = np.ones(3)
            outs.put("x", array)
            array[:] = 7

        def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += float(ins["x"].sum())

    assert run(job(Changing, tasks=1, epochs=2)).value == 6.0


def test_restored_state_is_writable() -> None:
    class Own(tg.Task):
        def setup(self) -> None:
            self.box = SimpleNamespace(array=np.zeros(2), steps=0)

        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.step)

        def step(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.box.array += 1
            self.box.steps += 1

        def snapshot(self) -> Any:
            return [self.box.array, self.box.steps]

        def restore(self, state: Any) -> None:
            self.box = SimpleNamespace(array=state[0], steps=state[1])

        def result(self) -> Any:
            return [self.box.array.tolist(), self.box.steps]

    assert run(job(Own, epochs=4), kills={(0, 2): "snapshot"}).values == {t: [[4.0, 4.0], 4] for t in (0, 1)}


def test_finish_ends_the_job() -> None:
    class Until(Counting):
        def compose(self, epoch: tg.Epoch) -> None:
            assert not epoch.last
            epoch.processor(self.count)

        def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += 1
            if self.task_id == 1 and self.total == 5:
                epoch.finish()

    for stage in STAGES:
        result = run(job(Until, epochs=None), kills={(0, 4): stage})
        assert result.values == {0: 5, 1: 5}
        assert result.epochs == 5


def test_builder_gets_the_task_id() -> None:
    class Named(tg.Task):
        def __init__(self, name: str) -> None:
            self.name = name

        def compose(self, epoch: tg.Epoch) -> None: ...

        def result(self) -> Any:
            return [self.name, self.task_id, self.tasks, self.primary, self.xp.__name__, self.log.name]

    values = run(job(lambda i: Named(f"task {i}"), tasks=2)).values
    assert values[1] == ["task 1", 1, 2, True, "numpy", "taskgraph.task.1"]


def test_min_in_sync_waits_for_backups() -> None:
    class Safe(Counting):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.count)

        def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += 1

    safe = job(Safe, backups=2, epochs=4, settings=tg.Settings(min_in_sync=2))
    assert run(safe, kills={(0, 1): "done", (1, 2): "sync"}).values == {0: 4, 1: 4}


def test_held_coroutine_is_replayed_before_sync_points() -> None:
    class Asks(tg.Task, state=["total"]):
        def setup(self) -> None:
            self.total = 0

        def compose(self, epoch: tg.Epoch) -> None:
            epoch.flag("right", epoch.number)
            epoch.processor(self.keep)

        async def on_flag(self, epoch: tg.Epoch, sender: int, meta: int) -> None:
            epoch.scratch.asking = asyncio.create_task(self.ask(epoch, sender, epoch.hold("asks")))

        async def ask(self, epoch: tg.Epoch, sender: int, hold: tg.Hold) -> None:
            with hold:
                await asyncio.sleep(0.01)
                epoch.scratch.answer = await epoch.request(sender, "double", epoch.number)

        @tg.handles("double", pure=True)
        def double(self, epoch: tg.Epoch, sender: int, payload: int) -> int:
            return 2 * payload

        def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.total += epoch.scratch.answer

        def result(self) -> int:
            return self.total

    for kills in PLACES:
        assert run(job(Asks, epochs=4, topology=tg.ring()), kills=kills).values == {0: 12, 1: 12}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("where", ["on_flag", "sync point"])
def test_last_of_several_holds_counts(where: str, strict: bool) -> None:

    class Holds(tg.Task, state=["total"]):
        def setup(self) -> None:
            self.total = 0

        def compose(self, epoch: tg.Epoch) -> None:
            if where == "on_flag":
                epoch.flag(self.task_id)
            else:
                epoch.processor(self.begin)
            epoch.processor(self.keep)

        def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
            self.hold(epoch)

        async def begin(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.hold(epoch)

        def hold(self, epoch: tg.Epoch) -> None:
            first, second = epoch.hold("first"), epoch.hold("second")
            threading.Thread(target=self.add, args=(epoch.scratch, second)).start()
            first.release()

        def add(self, scratch: Any, hold: tg.Hold) -> None:
            with hold:
                time.sleep(0.05)
                scratch.added = 1
                if where == "sync point":
                    self.total += 1

        def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            if where == "on_flag":
                self.total += epoch.scratch.added

        def result(self) -> int:
            return self.total

    assert run(job(Holds, epochs=3), strict=strict, kills={(0, 2): "compose"}).values == {0: 3, 1: 3}


def test_builder_that_reuses_an_object() -> None:
    shared = Heat()
    with pytest.raises(tg.JobFailed, match="that it had returned before: make one each time"):
        run(job(lambda _: shared, topology=tg.grid(1, 2)))


@pytest.mark.parametrize("all_", [False, True])
def test_inputs_used_later_are_named(all_: bool) -> None:
    class Keeps(tg.Task):
        kept: list[tg.Inputs]

        def setup(self) -> None:
            self.kept = []

        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.give, outbound={"x": self.task_id})
            epoch.processor(self.keep, inbound={"x": self.task_id})

        def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("x", 1)

        def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.kept.append(ins)
            epoch.report(x=self.kept[0].all("x")[0] if all_ else self.kept[0]["x"])

    error = fails(job(Keeps, tasks=1, epochs=4), strict=False)
    assert "task 0, epoch 0, keep: the epoch of this `ins` is over" in str(error)
