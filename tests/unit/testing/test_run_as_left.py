"""What `setup` made of the state is cut off by the restore before epoch 0: strict mode says so, and of nothing else."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from jobs_kit import fails, job, run, says

import taskgraph as tg


class Sums(tg.Task, state=["grid", "total"]):
    def setup(self) -> None:
        self.grid, self.total = np.zeros(6), 0.0
        self.make()

    def make(self) -> None:
        """Makes something of the state."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"x": self.task_id})
        epoch.processor(self.add, inbound={"x": self.task_id})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", 1.0)

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += ins["x"]

    def result(self) -> Any:
        return self.grid.sum() + self.total


class View(Sums):
    def make(self) -> None:
        self.inner = self.grid[1:-1]

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.inner += 1.0


class ReadLater(View):
    """Epoch 1 reads what epoch 0 wrote."""

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", self.inner.sum())

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.grid += 1.0


class Optimizer:
    def __init__(self, params: np.ndarray) -> None:
        self.params = params

    def step(self) -> None:
        self.params -= 0.1


class Held(Sums):
    def make(self) -> None:
        self.optimizer = Optimizer(self.grid)

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.optimizer.step()


class OfOneBase(Sums, state=["head"]):
    def make(self) -> None:
        self.head = self.grid[:3]

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.grid += 1.0
        self.total += self.head.sum()


class InDict(Sums, state=["params"]):
    def make(self) -> None:
        self.params = {"grid": self.grid}

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.grid += 1.0
        self.total += self.params["grid"].sum()


@pytest.mark.parametrize(
    ("kind", "epoch", "words"),
    [
        (View, 0, "(state 'grid')"),
        (View, 0, "(here: self.inner and self.grid)"),
        (ReadLater, 0, "(self.inner)"),
        (Held, 0, "(state 'grid')"),
        (OfOneBase, 0, "(here: self.head and self.grid)"),
        (InDict, 0, "state 'params'"),
    ],
)
def test_views_cut_off_by_restore_are_named(kind: type[Sums], epoch: int, words: str) -> None:
    error = fails(job(kind, tasks=1, epochs=3))
    assert error.epoch == epoch
    says(error, "without a restore after setup()", words, "make that in restore(), after super().restore(state)")


class Meets(Sums):
    """Each task gets a request while it waits for a reply, so no epoch is replayed."""

    async def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", await epoch.request(1 - self.task_id, "one"))

    @tg.handles("one")
    async def one(self, epoch: tg.Epoch, sender: int, payload: Any) -> float:
        return 1.0


class Again(View):
    """`restore` makes the view again."""

    def restore(self, state: Any) -> None:
        super().restore(state)
        self.make()


class OnlyThere(Again):
    """Only `restore` makes the view: without it, the epoch raises."""

    def setup(self) -> None:
        self.grid, self.total = np.zeros(6), 0.0


class OfData(Sums):
    """State that is a view of something else, and is replaced."""

    def make(self) -> None:
        self.data = np.arange(60.0)
        self.grid = self.data[:6]

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.grid = self.grid + epoch.rng.normal(size=6)


class Unlike(Sums):
    """Its `setup` makes another state each time."""

    def make(self) -> None:
        self.grid = np.frombuffer(os.urandom(6), "u1") + 0.0

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.grid = self.grid + ins["x"]


class Asks(Sums):
    """Uses requests, flags and holds in coroutines."""

    async def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        with epoch.hold("why"):
            epoch.flag(self.task_id)
            outs.put("x", await epoch.request(1 - self.task_id, "grid"))

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
        epoch.scratch.told = sender

    @tg.handles("grid")
    def given(self, epoch: tg.Epoch, sender: int, payload: Any) -> float:
        return float(self.grid.sum()) + sender

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.grid = self.grid + ins["x"] + epoch.rng.normal() + epoch.scratch.told


class Marked(Sums):
    """A task whose epochs may be in flight."""

    @tg.stateless
    def compose(self, epoch: tg.Epoch) -> None:
        super().compose(epoch)

    @tg.stateless
    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", epoch.rng.normal())


@pytest.mark.parametrize("kind", [Sums, Again, OnlyThere, OfData, Unlike, Asks, Meets, Marked])
@pytest.mark.parametrize("kills", [{}, {(0, 0): "done", (1, 1): "sync"}])
def test_correct_tasks_pass(kind: type[Sums], kills: Any) -> None:
    assert run(job(kind, epochs=4), kills=kills).epochs == 4


class Opens(View):
    opened: ClassVar[list[int]] = []

    def make(self) -> None:
        super().make()
        self.opened.append(1)

    def teardown(self) -> None:
        self.opened.append(-1)


@pytest.mark.parametrize("differs", [True, False])
def test_each_object_is_torn_down(differs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Opens, "opened", opened := [])
    if not differs:
        monkeypatch.setattr(Opens, "add", Sums.add)
    end: Callable[..., Any] = fails if differs else run
    end(job(Opens, tasks=1, epochs=3))
    assert sum(opened) == 0 and len(opened) > 4


def test_state_of_the_class_is_named() -> None:
    class Shares(Sums, state=["seen"]):
        seen: ClassVar[list[int]] = []

        def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            self.seen.append(epoch.number)

    says(fails(job(Shares)), "(state 'seen'): self.seen is an attribute of the class", "make it in setup()")


@pytest.mark.parametrize("cancelled", [True, False])
def test_endless_teardown_is_named(cancelled: bool) -> None:

    class Stays(Sums):
        async def teardown(self) -> None:
            until = asyncio.get_running_loop().time() + 10_000
            while asyncio.get_running_loop().time() < until:
                try:
                    await asyncio.sleep(10_000)
                except asyncio.CancelledError:
                    if cancelled:
                        raise

    error = fails(job(Stays, tasks=1))
    assert (error.task, error.epoch, error.where) == (0, 0, "teardown")
    says(error, "task 0: teardown did not return within 60 s (cancel_s)")
