"""What reports take in memory until their epoch commits: in the leader, and in the nodes that work ahead."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Iterator

import pytest
from cluster_kit import play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.protocol.commit import Leader
from taskgraph.protocol.messages import Message, Report, Reports, Stamp
from taskgraph.protocol.numbers import Numbers
from taskgraph.transport import wire

TASKS, EPOCHS, WIDTH = 20, 8, 50


def numbers_of(epoch: int) -> dict[str, float]:
    return {f"loss of part {part}": epoch + part / 8 for part in range(WIDTH)}


def done(task: int, epoch: int) -> Report:
    previous = numbers_of(epoch - 1) if epoch else {}
    return Report(Stamp(1, epoch), task, 1, True, 0, 0, 0, numbers=numbers_of(epoch), previous=previous, ahead=True)


def arrived(message: Message) -> Message:
    return wire.from_header(wire.to_header(message))


@pytest.fixture
def traced() -> Iterator[None]:
    gc.collect()  # what others left: its end may be told in a log, which is kept
    tracemalloc.start()
    yield
    tracemalloc.stop()


def test_the_leader_holds_little_more_of_an_epoch_than_the_numbers(traced: None) -> None:
    leader = Leader(TASKS, 100, ahead=EPOCHS)
    leader.begin(Stamp(1, 0))
    before = tracemalloc.get_traced_memory()[0]
    for task in range(TASKS):
        told = arrived(Reports(tuple([done(task, epoch) for epoch in range(EPOCHS)])))
        assert isinstance(told, Reports)
        leader.report(*told.reports)
    kept = [leader.keep_numbers(epoch, {}) for epoch in range(EPOCHS)]
    gc.collect()
    took = tracemalloc.get_traced_memory()[0] - before
    assert kept == [dict.fromkeys(range(TASKS), numbers_of(epoch)) for epoch in range(EPOCHS)]
    assert took / (TASKS * EPOCHS) < 8 * WIDTH + 600, "the report itself, and what finds it"


def test_the_same_names_are_held_once_whoever_reports_them() -> None:
    one, other = (arrived(done(task, 1)) for task in (1, 2))
    assert isinstance(one, Report) and isinstance(other, Report)
    found = {id(each.names) for each in (one.numbers, one.previous, other.numbers) if isinstance(each, Numbers)}
    assert found == {id(Numbers.of(numbers_of(3)).names)}


class Wide(tg.Task, state=["count"]):
    def setup(self) -> None:
        self.count = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.step)

    async def step(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.count += 1
        epoch.report(**numbers_of(epoch.number))


def test_who_works_ahead_holds_what_it_reported_once() -> None:
    async def until_checked(cluster: InProcessCluster, node: str) -> None:
        await checked.wait()

    async def check(cluster: InProcessCluster, node: str) -> None:
        primary = cluster.node(node).roles.primaries[0]
        told = [primary.reporter._reports[epoch].report for epoch in range(3)]
        try:
            assert [report.numbers for report in told] == [numbers_of(epoch) for epoch in range(3)]
            assert told[1].numbers is told[2].previous
            assert all(isinstance(report.numbers, Numbers) for report in told)
            assert [attempt.numbers for attempt in primary.attempts] == [{}] * len(list(primary.attempts))
        except AssertionError as error:
            wrong.append(error)
        checked.set()

    async def scenario(cluster: InProcessCluster) -> None:
        result = await cluster.result()
        assert [report.numbers for report in result.reports] == [numbers_of(epoch) for epoch in range(5)]
        for error in wrong:
            raise error
        assert checked.is_set()
        told = [event.fields for event in cluster.events if event.kind == "commit"]
        assert told == [numbers_of(epoch) for epoch in range(5)]
        assert {type(fields) for fields in told} == {Numbers}, "many may wait to be sent to who follows the job"

    checked, wrong = asyncio.Event(), list[AssertionError]()
    job = tg.Job(tasks=1, epochs=5, builder=lambda _: Wide(), settings=tg.Settings(epochs_ahead=4))
    play(job, scenario, nodes=1, stages={("commit", 0, 0): until_checked, ("compose", 0, 3): check})
