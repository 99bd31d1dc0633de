"""Attributes of a task that have the name of a hook, or of an attribute that the framework sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import taskgraph as tg


class Counts(tg.Task, state=["total"]):
    """Two epochs of it add up to 2."""

    total: int

    def setup(self) -> None:
        self.total = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.count)

    def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += 1


def run(builder: Callable[[int], tg.Task]) -> tg.JobResult:
    return tg.testing.run(tg.Job(tasks=1, epochs=2, builder=builder))


@pytest.mark.parametrize("hook", ["on_flag", "on_commit", "on_event", "teardown"])
def test_hook_set_on_the_object_is_refused(hook: str) -> None:
    class Sets(Counts, state=["total"]):
        def setup(self) -> None:
            super().setup()
            setattr(self, hook, print)

    with pytest.raises(tg.JobFailed, match=rf"self\.{hook} was set on the object and would not be called.*def {hook}"):
        run(lambda _: Sets())


@pytest.mark.parametrize("when", ["setup", "the last epoch"])
def test_result_set_as_attribute(when: str) -> None:

    class Sets(Counts, state=["total"]):
        def setup(self) -> None:
            super().setup()
            if when == "setup":
                self.result = None  # type: ignore[method-assign, assignment]

        def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            if epoch.last:
                self.result = 0.5  # type: ignore[method-assign, assignment]

    with pytest.raises(
        tg.JobFailed, match=r"self\.result was set to .*, which hides the hook result\(self\)"
    ) as failed:
        run(lambda _: Sets())
    assert failed.value.where == ("setup" if when == "setup" else "snapshot")


@pytest.mark.parametrize(
    ("name", "value"), [("tasks", ["a", "b"]), ("task_id", "first"), ("log", []), ("primary", {}), ("xp", 1.0)]
)
def test_framework_attributes_are_not_replaced(name: str, value: Any) -> None:
    class Sets(Counts, state=["total"]):
        def __init__(self) -> None:
            setattr(self, name, value)

    with pytest.raises(tg.JobFailed, match=rf"__init__ set self\.{name}, to a value of type .* set by the framework"):
        run(lambda _: Sets())


def test_attributes_declared_in_init_may_be_set_later() -> None:

    class Declares(Counts, state=["total"]):
        def __init__(self) -> None:
            for name in ("task_id", "tasks", "log", "primary", "xp"):
                setattr(self, name, None)

    assert run(lambda _: Declares()).epochs == 2


def test_primary_is_not_replaced() -> None:
    class Sets(Counts, state=["total"]):
        def setup(self) -> None:
            super().setup()
            self.primary = {"host": "a"}  # type: ignore[assignment]

    with pytest.raises(tg.JobFailed, match=r"setup set self\.primary, to a value of type dict"):
        run(lambda _: Sets())


def test_hooks_that_are_called_may_be_set() -> None:
    class Sets(Counts, state=["total"]):
        def __init__(self, task_id: int) -> None:
            self.task_id, self.tasks = task_id, 1

        def setup(self) -> None:
            super().setup()
            self.compose, self.result = self.other, lambda: self.total  # type: ignore[method-assign]

        def compose(self, epoch: tg.Epoch) -> None:
            raise AssertionError("it is another one")

        def other(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.count)

    assert run(Sets).value == 2
