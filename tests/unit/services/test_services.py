"""Tasks that a job has beside those of the user."""

from __future__ import annotations

from typing import Any

import pytest

import taskgraph as tg
from taskgraph.epoch import ask_service, service_ids
from taskgraph.services import Service


class Counter(tg.Task, state=["total"]):
    """A service task: it adds up what it is asked to, at the end of the epoch."""

    def setup(self) -> None:
        self.total = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.scratch.came = []
        epoch.processor(self.add)

    @tg.handles("put")
    def put(self, epoch: tg.Epoch, sender: int, payload: int) -> int:
        epoch.scratch.came.append(payload)
        return self.total

    def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.total += sum(epoch.scratch.came)


class Counters:
    def __init__(self, count: int = 2) -> None:
        self.count = count

    def service(self, name: str, tasks: int) -> Service:
        return Service(f"table {name}", self.count, lambda index: Counter())


class User(tg.Task, state=["seen"]):
    def setup(self) -> None:
        self.seen = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.ask, outbound={"seen": self.task_id})
        epoch.processor(self.keep, inbound={"seen": self.task_id})

    def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        ids = service_ids(epoch, "table counts")
        outs.put("seen", sum(ask_service(epoch, one, "put", 1 + self.task_id).wait() for one in ids))

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.seen = ins["seen"]

    def result(self) -> tuple[int, int]:
        return self.tasks, self.seen


def job(**arguments: Any) -> tg.Job:
    return tg.Job(tasks=3, epochs=5, builder=User, tables={"counts": Counters()}, **arguments)


def test_services_are_not_counted_as_tasks_of_the_user() -> None:
    assert tg.testing.run(job()).values == dict.fromkeys(range(3), (3, 2 * 4 * 6))


@pytest.mark.parametrize("kills", [{(3, 2): "processor"}, {(4, 1): "done", (0, 3): "compose"}])
def test_service_survives_the_death_of_its_primary(kills: dict[tuple[int, int], str]) -> None:
    assert tg.testing.run(job(), kills=kills).values == dict.fromkeys(range(3), (3, 48))


def test_wrong_service_names_what_to_give() -> None:
    with pytest.raises(tg.JobError, match=r"Job\(tables=\{'counts': \.\.\.\}\): must be a tg.Table\(\.\.\.\), not int"):
        tg.Job(tasks=1, builder=User, tables={"counts": 3})
