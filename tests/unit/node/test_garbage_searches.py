"""Processes that host nodes search for garbage less often."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import taskgraph as tg

_PYTHON_3_11 = (700, 10, 10)


@pytest.fixture(autouse=True)
def mine() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*_PYTHON_3_11)
    yield
    gc.set_threshold(*before)


class Looks(tg.Task):
    """Its result is the threshold of garbage searches."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.look)

    def look(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        pass

    def result(self) -> Any:
        return list(gc.get_threshold())


def job(builder: Callable[[], tg.Task]) -> tg.Job:
    return tg.Job(tasks=1, epochs=1, builder=lambda _: builder(), backups=0, name="looks")


@pytest.mark.parametrize(("tasks", "objects"), [(9, 2000), (30, 6000), (300, 50_000)])
def test_more_tasks_mean_rarer_searches(tasks: int, objects: int) -> None:
    many = tg.Job(tasks=tasks, epochs=1, builder=lambda _: Looks(), backups=0, name="many")
    assert tg.run(many, nodes=0).values[0] == [objects, 10, 10]
    assert gc.get_threshold() == _PYTHON_3_11
