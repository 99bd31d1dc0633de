"""Strict mode checks what is marked `@tg.stateless`."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from jobs_kit import fails, job, run

import taskgraph as tg


class Sum(tg.Task, state=["total"]):
    """A stateless compute and a sync point."""

    base: Any = 3

    def setup(self) -> None:
        self.total = 0

    @tg.stateless
    def compose(self, epoch: tg.Epoch) -> None:
        self.declare(epoch)

    def declare(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.early, outbound={"x": "all"})
        epoch.processor(self.late, inbound={"x": "all"})

    @tg.stateless
    def early(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", self.work(epoch))

    def work(self, epoch: tg.Epoch) -> Any:
        return epoch.number + self.base

    def late(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += sum(ins.all("x").values())

    def result(self) -> Any:
        return self.total


READS = "it reads what other methods change; since setup() changed: self.total; leave the mark out"


def test_stateless_compose_that_reads_state() -> None:
    class Growing(Sum):
        def declare(self, epoch: tg.Epoch) -> None:
            super().declare(epoch)
            if self.total:
                epoch.processor(self.more, inbound={"x": "all"})

        def more(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            """A sync point that changes nothing."""

    error = fails(job(Growing))
    assert error.epoch == 1, "in epoch 0 the state is that of setup"
    assert str(error).startswith(
        f"task {error.task}, epoch 1: 'compose' is marked @tg.stateless, but on the object as setup() makes it, it "
        f"declares another graph: {READS}"
    )


def test_stateless_compute_that_reads_state() -> None:
    class Adding(Sum):
        def work(self, epoch: tg.Epoch) -> Any:
            return self.total + 1

    error = fails(job(Adding))
    assert str(error).startswith(
        f"task {error.task}, epoch 1: 'early' is marked @tg.stateless, but on the object as setup() makes it, it puts "
        f"another 'x' to task 0: {READS}"
    )


def test_undeclared_attributes_count_too() -> None:

    class Remembering(Sum):
        last = 0

        def work(self, epoch: tg.Epoch) -> Any:
            return self.last

        def on_event(self, event: tg.Event) -> None:
            self.last = 7

    says = r"'early' is marked .* it puts another 'x' .*; since setup\(\) changed: self.last, self.total; leave"
    with pytest.raises(tg.JobFailed, match=says):
        run(job(Remembering, epochs=4))


@pytest.mark.parametrize("where", ["compose", "early"])
def test_stateless_code_that_reads_later_attributes(where: str) -> None:
    class Later(Sum):
        def declare(self, epoch: tg.Epoch) -> None:
            self.use(epoch, "compose")
            super().declare(epoch)

        def work(self, epoch: tg.Epoch) -> Any:
            self.use(epoch, "early")
            return super().work(epoch)

        def use(self, epoch: tg.Epoch, place: str) -> None:
            if epoch.number and place == where:
                assert self.later

        def late(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            super().late(epoch, ins, outs)
            self.later = 1

    error = fails(job(Later))
    assert str(error).startswith(
        f"task {error.task}, epoch 1: '{where}' is marked @tg.stateless, but on the object as setup() makes it, it "
        f"fails (AttributeError: 'Later' object has no attribute 'later'): it reads what other methods change; since "
        f"setup() changed: self.later, self.total; leave the mark out"
    )


@pytest.mark.parametrize("where", ["compose", "early"])
@pytest.mark.parametrize("made", ["in setup", "anew", "in place"])
def test_stateless_code_that_writes_is_named(where: str, made: str) -> None:
    class Keeping(Sum):
        def setup(self) -> None:
            super().setup()
            if made != "anew":
                self.kept = np.zeros(3)

        def declare(self, epoch: tg.Epoch) -> None:
            self.keep("compose")
            super().declare(epoch)

        def work(self, epoch: tg.Epoch) -> Any:
            self.keep("early")
            return super().work(epoch)

        def keep(self, place: str) -> None:
            if place == where and made == "in place":
                self.kept[0] += 1
            elif place == where:
                self.kept = np.ones(3)

    error = fails(job(Keeping))
    assert str(error).startswith(
        f"task {error.task}, epoch 0: '{where}' is marked @tg.stateless, and changed self.kept: another epoch may run "
        f"between this and who reads it; hand values on through epoch.scratch, make what stays in setup(), or leave "
        f"the mark out"
    )


class Legitimate(Sum):
    """Everything that a stateless compute may read."""

    factors = np.arange(4.0)  # of the class

    def setup(self) -> None:
        super().setup()
        self.data = np.random.default_rng(self.task_id).normal(size=100)
        self.lock = threading.Lock()  # nothing that travels
        self.events: list[str] = []

    def on_event(self, event: tg.Event) -> None:
        self.events.append(type(event).__name__)

    def declare(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.first, outbound={"y": self.task_id})
        epoch.processor(self.early, inbound={"y": self.task_id}, outbound={"x": "all"})
        epoch.processor(self.unmarked, outbound={"z": self.task_id})
        epoch.processor(self.second, inbound={"z": self.task_id}, outbound={"w": self.task_id})
        epoch.processor(self.late, inbound={"x": "all", "w": self.task_id})

    @tg.stateless
    async def first(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        epoch.scratch.drawn = epoch.rng.normal(size=4)
        with self.lock:
            outs.empty("y", (4,), float)[:] = self.factors * epoch.number + len(epoch.neighbors("peers"))

    @tg.stateless
    def early(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", float(self.data @ self.data) + float(epoch.scratch.drawn @ ins["y"]))

    def unmarked(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        epoch.scratch.total = self.total
        outs.put("z", None)

    @tg.stateless
    def second(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("w", epoch.scratch.total)  # by what came before it in the same epoch


@pytest.mark.parametrize("order", [0, 1])
def test_correct_marks_pass(order: int) -> None:
    given = job(Legitimate, epochs=4)
    assert run(given, order=order).values == run(given, strict=False).values


def test_stateless_requests_are_replayed() -> None:

    class Asking(Sum):
        @tg.stateless
        async def early(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            one = await epoch.request(1, "square", epoch.number)
            other = await epoch.request(1, "square", one + 1)
            outs.put("x", one + other)

    class Answering(Sum):
        @tg.handles("square")
        def square(self, epoch: tg.Epoch, sender: int, payload: Any) -> Any:
            return payload**2

    given = job(lambda task: Answering() if task else Asking(), epochs=4)
    assert run(given).values == run(given, strict=False).values


def test_marks_need_a_marked_compose() -> None:
    class Reading(Sum):
        def compose(self, epoch: tg.Epoch) -> None:
            self.declare(epoch)

        def work(self, epoch: tg.Epoch) -> Any:
            return self.total + 1

    assert run(job(Reading, epochs=3)).values == {0: 26, 1: 26}
