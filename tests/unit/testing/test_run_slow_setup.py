"""What strict mode replays on, where `setup` takes long: it runs once more per task, and hides nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from jobs_kit import fails, job, run

import taskgraph as tg
from taskgraph.node.epochs import twins

EPOCHS = 4
REPLICAS = 2 * 2


@pytest.fixture(autouse=True)
def setups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every `setup` takes long; whose it was."""
    monkeypatch.setattr(twins, "_WORTH_S", 0.0)
    monkeypatch.setattr(Sums, "setups", found := [])
    yield found


class Sums(tg.Task, state=["total"]):
    setups: ClassVar[list[int]] = []

    def setup(self) -> None:
        self.setups.append(self.task_id)
        self.total = 0.0
        self.rows = [float(row) for row in range(10)]
        self.part = self.add_up  # of the object itself

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"part": "all"})
        epoch.processor(self.take, inbound={"part": "all"})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("part", self.part() + self.total)

    def add_up(self) -> float:
        return sum(self.rows)

    def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += sum(ins.all("part").values())

    def result(self) -> float:
        return self.total


def test_it_runs_once_more_per_task_however_many_epochs_there_are(setups: list[int]) -> None:
    result = run(job(Sums, epochs=EPOCHS))
    assert result.values == {0: 3600.0, 1: 3600.0}
    assert sorted(setups) == sorted([0, 1] * 3)


class Forgets(Sums):
    """Its rows change, and are no state."""

    def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        super().take(epoch, ins, outs)
        self.rows[0] += 1.0


class InClosure(Sums):
    """So does a number that only a closure knows, which a copy would share."""

    def setup(self) -> None:
        super().setup()
        steps = 0

        def part() -> float:
            nonlocal steps
            steps += 1
            return float(steps)

        self.part = part


def test_what_is_forgotten_is_found_all_the_same() -> None:
    error = fails(job(Forgets, epochs=EPOCHS))
    assert error.epoch == 1 and "snapshot() forgets state" in str(error), str(error)
    error = fails(job(InClosure, epochs=EPOCHS))
    assert error.epoch == 0 and "an attribute keeps what the first try left" in str(error), str(error)


class _Loses:
    """Comes out of a pickle as another one."""

    value = 1.0

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _lost, ()


def _lost() -> _Loses:
    made = _Loses()
    made.value = 2.0
    return made


class Odd(Sums):
    def setup(self) -> None:
        super().setup()
        self.part = self.of_what_is_lost
        self.odd = _Loses()

    def of_what_is_lost(self) -> float:
        return self.odd.value


class Closes(Sums):
    def teardown(self) -> None: ...


@pytest.mark.parametrize("task", [Odd, Closes])
def test_where_a_copy_would_not_do_each_replay_has_a_setup_of_its_own(task: type[Sums], setups: list[int]) -> None:
    run(job(task, epochs=EPOCHS))
    # The one whose result is looked at, one not restored; and, of the copy, two that tell what a first try left in it,
    # and one that judges it.
    more = 2 if task is Closes else 5
    assert len(setups) == REPLICAS + 2 * (EPOCHS + more)
