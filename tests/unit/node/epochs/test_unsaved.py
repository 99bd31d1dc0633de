"""Event `unheld` names attributes that an epoch changed and no snapshot has."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest
from cluster_kit import Counting, job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.epochs.unsaved import outside_writes
from taskgraph.observe.events import Event


class Loud(type):
    """Nor of the class of what is looked at."""

    __hash__ = type.__hash__

    def __eq__(cls, other: object) -> NoReturn:
        raise AssertionError("classes compared")


class Odd(metaclass=Loud):
    """Nothing may be asked of it."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> NoReturn:
        raise AssertionError("compared")

    def __getattribute__(self, name: str) -> NoReturn:
        raise AssertionError("looked into")


class Name(str):
    """It is put into a dict once, and nobody looks for it."""

    put = False

    def __hash__(self) -> int:
        if self.put:
            raise AssertionError("looked for")
        self.put = True
        return str.__hash__(self)


class Careful(Counting, state=["total"]):
    """Calls `change` in each epoch."""

    change: Callable[[Any, tg.Epoch], object]
    odd: Any

    def setup(self) -> None:
        super().setup()
        self.theta: Any = np.zeros(3)
        self.large = np.zeros((300, 300), order="F")
        self.rows = [1]
        self.steps = 0
        self.best = float("nan")
        self.odd, self.odds = Odd(), np.empty(1, object)
        self.odds[0] = self.odd
        self.mapped = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)

    @property
    def asked(self) -> NoReturn:
        raise AssertionError("asked")

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await super().count(epoch, ins, outs)
        type(self).change(self, epoch)


def told(of: tg.Job, *, nodes: int = 1) -> list[Event]:
    async def scenario(cluster: InProcessCluster) -> list[Event]:
        await cluster.result()
        return [event for event in cluster.events if event.kind == "unheld"]

    return play(of, scenario, nodes=nodes)


def alone(change: Callable[[Any, tg.Epoch], object], **members: Any) -> list[Event]:
    """Returns the events of a job whose task calls `change` in each epoch."""
    fit = type("Fit", (Careful,), {"change": staticmethod(change), **members})
    return told(job(fit, tasks=1, epochs=4, backups=0))


def rebound(name: str, value: Callable[[Any], object]) -> Callable[[Any, tg.Epoch], None]:
    return lambda task, epoch: setattr(task, name, value(task))


def larger(task: Any, epoch: tg.Epoch) -> None:
    task.large -= 1.0


def grown(task: Any, epoch: tg.Epoch) -> None:
    task.theta[1] += 1.0


@pytest.mark.parametrize(
    ("change", "name", "epoch"),
    [
        (rebound("theta", lambda task: task.theta + 1.0), "theta", 0),
        (rebound("theta", lambda task: task.theta.astype(np.float32)), "theta", 0),
        (rebound("theta", lambda task: 0), "theta", 0),
        (grown, "theta", 0),
        (larger, "large", 0),
        (rebound("large", lambda task: task.large.copy()), "large", 0),
        (rebound("mapped", lambda task: None), "mapped", 0),
        (rebound("steps", lambda task: task.steps + 1), "steps", 0),
        (rebound("rows", lambda task: [*task.rows, 2]), "rows", 0),
        (rebound("odd", lambda task: Odd()), "odd", 0),
        (lambda task, epoch: vars(task).pop("steps", None), "steps", 0),
        (lambda task, epoch: setattr(task, "steps", epoch.number), "steps", 1),
    ],
)
def test_changed_attribute_gives_one_event(change: Callable[[Any, tg.Epoch], object], name: str, epoch: int) -> None:
    (event,) = alone(change)
    assert (event.task, event.epoch, event.term, event.transient) == (0, epoch, 1, False)
    assert event.text.startswith(f"task 0: Fit changed self.{name} in an epoch, and no snapshot has it: ")
    assert f"state=['{name}']" in event.text and "tg.testing.run" in event.text and "epoch.scratch" in event.text


@pytest.mark.parametrize(
    "change",
    [
        lambda task, epoch: None,
        rebound("theta", lambda task: task.theta.copy()),
        rebound("steps", lambda task: int("0")),
        lambda task, epoch: setattr(task, "seen", epoch.number),
        lambda task, epoch: setattr(task, "steps", max(0, epoch.number - 1)),
        lambda task, epoch: task.mapped.__setitem__(0, 1 + epoch.number),
        lambda task, epoch: None if epoch.number else vars(task).update({Name("of no attribute"): 1}),
    ],
    ids=["nothing", "equal", "an equal number", "its own", "later", "not numpy's memory", "not a name"],
)
def test_unchanged_attributes_give_no_event(change: Callable[[Any, tg.Epoch], object]) -> None:
    assert alone(change) == []


def restored(self: Any, state: dict[str, Any]) -> None:
    self.total, self.theta = state["total"], np.zeros(3)


@pytest.mark.parametrize(
    "hooks", [{"restore": restored}, {"restore": restored, "snapshot": lambda self: {"total": self.total}}]
)
def test_tasks_with_restore_give_no_event(hooks: dict[str, Any]) -> None:
    assert alone(grown, **hooks) == []


def test_changes_in_on_commit_give_no_event() -> None:
    def on_commit(self: Any, number: int, state: Any) -> None:
        self.steps = number + 1

    assert alone(lambda task, epoch: None, on_commit=on_commit) == []


def test_one_event_per_class_and_node() -> None:
    class Fit(Careful):
        change = grown

    events = told(job(Fit, tasks=12, epochs=3), nodes=2)
    assert {event.node for event in events} == {"n1", "n2"} and len(events) == 2


MODEL: Any = None
LOCAL = threading.local()


class Connects(Counting, state=["total"]):
    def setup(self) -> None:
        super().setup()
        LOCAL.session = 1


def test_thread_local_set_in_setup_is_named() -> None:
    (event,) = told(job(Connects, tasks=3, epochs=2))
    assert "Connects.setup sets LOCAL.session of a threading.local: other calls may run in another thread" in event.text


class Outside(Counting, state=["total"]):
    """Writes to a global and to an attribute of its class."""

    best: Any = None
    steps = 0

    def setup(self) -> None:
        global MODEL
        super().setup()
        MODEL = 1

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        global MODEL
        await super().count(epoch, ins, outs)
        MODEL = self.total
        Outside.steps += 1

        def better() -> None:
            Outside.best = MODEL

        better()


class Inside(Outside, state=["total"]):
    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += MODEL + Outside.steps


class Loads(Inside, state=["total"]):
    """`setup` calls `load`, and an epoch calls `make`, too; both write a global."""

    def setup(self) -> None:
        super().setup()
        self.load(3)

    def load(self, times: int) -> None:
        global MODEL
        MODEL = self.make()
        if times:
            self.load(times - 1)

    def make(self) -> int:
        global MODEL
        MODEL = 1
        return 1

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += self.make()


def test_globals_filled_by_setup_pass() -> None:
    assert outside_writes(Loads) == {"make": "the global MODEL"}


def test_writes_to_globals_and_classes_are_named() -> None:
    assert outside_writes(Outside) == {
        "count": "the global MODEL and Outside.steps, an attribute of the class and Outside.best, an attribute of the "
        "class"
    }
    assert outside_writes(Inside) == {}
    (event,) = told(job(Outside, tasks=3, epochs=4))
    assert event.text.partition(": ")[2].startswith("Outside.count writes the global MODEL and Outside.steps, ")
    assert told(job(Inside, tasks=3, epochs=4)) == []


class Early(tg.Task, state=["total", "sums"]):
    """Task 1 changes its state while it puts a value, task 0 in its sync point."""

    def setup(self) -> None:
        self.total, self.sums = 0, np.zeros(3)

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id:
            epoch.processor(self.put, outbound={"total": "parents"})
        else:
            epoch.processor(self.take, inbound={"total": "children"})

    def put(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if epoch.number == 1:
            self.total += 1
        outs.put("total", self.total)

    def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += ins["total"]
        self.sums[0] = 1.0


@pytest.mark.parametrize("in_flight", [1, 2])
def test_state_changed_before_the_sync_point_is_reported(in_flight: int) -> None:
    settings = tg.Settings(epochs_in_flight=in_flight)
    found = told(job(Early, tasks=2, epochs=4, backups=0, topology=tg.tree(), settings=settings))
    if in_flight > 1:
        assert not found, "another epoch may have reached its sync point"
        return
    (event,) = found
    assert (event.task, event.epoch) == (1, 1)
    assert event.text.startswith("task 1: Early changed self.total outside a sync point: if the epoch starts again")
