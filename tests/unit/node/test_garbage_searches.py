"""Garbage is searched for less often where nodes run: also in a user's own process, while a job runs there."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import taskgraph as tg
from taskgraph.node.garbage import search_garbage_less_often

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
