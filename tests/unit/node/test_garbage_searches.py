"""Garbage is searched for less often where nodes run: also in a user's own process, while a job runs there."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import taskgraph as tg
from taskgraph.node.garbage import search_garbage_for, search_garbage_less_often, searching_garbage_less_often

_PYTHON_3_11 = (700, 10, 10)
RUNS = [lambda job: tg.run(job, nodes=0), tg.testing.run]


@pytest.fixture(autouse=True)
def mine() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*_PYTHON_3_11)
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((700, 10, 10), (2000, 10, 10)),
        ((2000, 10, 10), (2000, 10, 10)),
        ((50000, 5, 7), (50000, 5, 7)),
        ((0, 10, 10),) * 2,
    ],
)
def test_garbage_is_searched_for_no_more_often_than_newer_pythons_do(
    before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    gc.set_threshold(*before)
    search_garbage_less_often()
    assert gc.get_threshold() == after


class Looks(tg.Task):
    """Its result is how often garbage is searched for."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.look)

    def look(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        pass

    def result(self) -> Any:
        return list(gc.get_threshold())


class Fails(Looks):
    def look(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        raise ValueError("of its own")


class Sets(Looks):
    def look(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        gc.set_threshold(50000, 5, 7)


def job(builder: Callable[[], tg.Task]) -> tg.Job:
    return tg.Job(tasks=1, epochs=1, builder=lambda _: builder(), backups=0, name="looks")


@pytest.mark.parametrize("run", RUNS)
def test_a_job_in_ones_own_process_has_it_searched_for_less_often_while_it_runs(run: Callable[..., Any]) -> None:
    assert run(job(Looks)).value == [2000, 10, 10]
    assert gc.get_threshold() == _PYTHON_3_11
    with pytest.raises(tg.JobFailed, match="of its own"):
        run(job(Fails))
    assert gc.get_threshold() == _PYTHON_3_11


@pytest.mark.parametrize("run", RUNS)
def test_what_a_job_sets_itself_stays(run: Callable[..., Any]) -> None:
    assert run(job(Sets)).value == [50000, 5, 7]
    assert gc.get_threshold() == (50000, 5, 7)


@pytest.mark.parametrize(("tasks", "objects"), [(9, 2000), (30, 6000), (300, 50_000)])
def test_the_more_tasks_share_a_node_the_rarer_it_is_searched_for(tasks: int, objects: int) -> None:
    many = tg.Job(tasks=tasks, epochs=1, builder=lambda _: Looks(), backups=0, name="many")
    assert tg.run(many, nodes=0).values[0] == [objects, 10, 10]
    assert gc.get_threshold() == _PYTHON_3_11


def test_where_nobody_asked_for_it_tasks_change_nothing() -> None:
    search_garbage_for(300)
    assert gc.get_threshold() == _PYTHON_3_11


def test_it_is_as_rare_as_suits_the_tasks_that_are_there_now() -> None:
    with searching_garbage_less_often():
        search_garbage_for(100)
        assert gc.get_threshold() == (20_000, 10, 10)
        search_garbage_for(20)
        assert gc.get_threshold() == (4000, 10, 10)
        gc.set_threshold(700, 10, 10)  # a driver does
        search_garbage_for(100)
        assert gc.get_threshold() == (700, 10, 10)
    assert gc.get_threshold() == (700, 10, 10)
