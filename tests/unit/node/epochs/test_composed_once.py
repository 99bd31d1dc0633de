"""A stateless `compose` that asks its epoch for nothing is called once per attempt of the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
from cluster_kit import play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.protocol.messages import Stamp

EPOCHS = 8


class Counting(tg.Task, state=["seen"]):
    """Notes in which attempts and epochs it composed."""

    composed: ClassVar[list[Stamp]]

    def setup(self) -> None:
        self.seen: list[int] = []

    def declare(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.give, outbound={"x": self.task_id})
        epoch.processor(self.take, inbound={"x": self.task_id})

    def noted(self, epoch: tg.Epoch) -> None:
        """What a user cannot know without asking."""
        work: Any = epoch._work
        self.composed.append(Stamp(work.attempt, work.number))

    @tg.stateless
    async def compose(self, epoch: tg.Epoch) -> None:
        self.noted(epoch)
        self.declare(epoch)

    @tg.stateless
    async def give(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("x", epoch.number)

    async def take(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.seen = [*self.seen, ins["x"]]

    def result(self) -> list[int]:
        return self.seen


async def ended(cluster: InProcessCluster) -> tg.JobResult:
    return await cluster.result()


def composed_of(
    kind: type[Counting],
    scenario: Callable[[InProcessCluster], Any] = ended,
    *,
    nodes: int = 1,
    topology: Mapping[str, Any] | None = None,
    stages: Mapping[tuple[str, int, int], Any] | None = None,
    **settings: Any,
) -> list[Stamp]:
    """Runs a job of one task and checks its result; returns the epochs in which it composed."""

    class Fresh(kind, state=["seen"]):  # type: ignore[misc,valid-type]
        composed: ClassVar[list[Stamp]] = []

    given = tg.Job(
        tasks=1,
        epochs=EPOCHS,
        builder=lambda _: Fresh(),
        backups=nodes - 1,
        topology=topology,
        settings=tg.Settings(**settings),
    )
    found = play(given, scenario, nodes=nodes, stages=stages)
    assert found.values == {0: list(range(EPOCHS))}
    return Fresh.composed


def every_epoch() -> list[Stamp]:
    return [Stamp(1, epoch) for epoch in range(EPOCHS)]


@pytest.mark.parametrize("in_flight", [1, 4])
def test_stateless_compose_runs_once(in_flight: int) -> None:
    assert composed_of(Counting, epochs_in_flight=in_flight) == [Stamp(1, 0)]


def test_unmarked_compose_runs_every_epoch() -> None:
    class Unmarked(Counting, state=["seen"]):
        async def compose(self, epoch: tg.Epoch) -> None:
            self.noted(epoch)
            self.declare(epoch)

    assert composed_of(Unmarked) == every_epoch()


def test_strict_mode_composes_every_epoch() -> None:
    assert set(every_epoch()) <= set(composed_of(Counting, strict=True)), "and looks whether it keeps its promise"


ASKED: dict[str, Callable[[tg.Epoch], object]] = {
    "number": lambda epoch: epoch.number,
    "last": lambda epoch: epoch.last,
    "attempt": lambda epoch: epoch.attempt,
    "cancelled": lambda epoch: epoch.cancelled,
    "seed": lambda epoch: epoch.seed,
    "rng": lambda epoch: epoch.rng.random(),
    "scratch": lambda epoch: setattr(epoch.scratch, "of", "compose"),
    "report": lambda epoch: epoch.report(number=1),
    "hold": lambda epoch: epoch.hold("for a moment").release(),
    "flag": lambda epoch: epoch.flag,  # that it is called is not needed
    "request": lambda epoch: epoch.request,
    "finish": lambda epoch: epoch.finish,
    "by its name": lambda epoch: getattr(epoch, "num" + "ber"),
    "by no name": lambda epoch: getattr(epoch, "", None),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
def test_compose_that_asks_runs_every_epoch(ask: Callable[[tg.Epoch], object], plain: bool) -> None:
    class Asking(Counting, state=["seen"]):
        def _compose(self, epoch: tg.Epoch) -> None:
            self.noted(epoch)
            self.declare(epoch)
            ask(epoch)

    class Waiting(Asking, state=["seen"]):
        @tg.stateless
        async def compose(self, epoch: tg.Epoch) -> None:
            self._compose(epoch)

    class Plain(Asking, state=["seen"]):
        @tg.stateless
        def compose(self, epoch: tg.Epoch) -> None:  # type: ignore[override]
            self._compose(epoch)

    assert composed_of(Plain if plain else Waiting, epochs_in_flight=1) == every_epoch()


def links(changing: bool) -> tg.Topology:
    def here(task: int, tasks: int, epoch: int) -> tuple[int, ...]:
        return (task,)

    return tg.Topology({"here": here}) if changing else tg.full()


@pytest.mark.parametrize(("changing", "expected"), [(True, every_epoch()), (False, [Stamp(1, 0)])])
@pytest.mark.parametrize("named", [False, True], ids=["asked for", "named"])
def test_changing_link_is_asked_every_epoch(changing: bool, expected: list[Stamp], named: bool) -> None:
    link = "here" if changing else "all"

    class Linked(Counting, state=["seen"]):
        def declare(self, epoch: tg.Epoch) -> None:
            to: Any = link if named else epoch.neighbors(link)
            epoch.processor(self.give, outbound={"x": to})
            epoch.processor(self.take, inbound={"x": to})

    assert composed_of(Linked, topology=links(changing), epochs_in_flight=1) == expected


def test_takeover_composes_anew() -> None:
    async def killed(cluster: InProcessCluster, name: str) -> None:
        cluster.crash(name)

    class Fresh(Counting, state=["seen"]):
        composed: ClassVar[list[Stamp]] = []

    given = tg.Job(tasks=1, epochs=EPOCHS, builder=lambda _: Fresh(), backups=1)
    found = play(given, ended, nodes=2, stages={("processor", 0, 3): killed})
    assert found.values == {0: list(range(EPOCHS))}
    assert len(Fresh.composed) == 2
