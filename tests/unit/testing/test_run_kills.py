"""Several kills at one moment: no task loses its last replica."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
from jobs_kit import Fit, Kills, fit, job, run, same
from test_run_events import Bank, Wave

import taskgraph as tg
from taskgraph.results import JobResult
from taskgraph.testing import STAGES


class Averages(tg.Task, state=["row"]):
    def setup(self) -> None:
        self.row = np.array([float(self.task_id)])

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"row": "right"})
        epoch.processor(self.mix, inbound={"row": "left"})

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("row", self.row)

    def mix(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.row = (self.row + ins["row"]) / 2

    def result(self) -> list[float]:
        return [float(self.row[0])]


@pytest.fixture(scope="module")
def undisturbed() -> JobResult:
    return run(fit(), nodes=1)


# With one backup each of these took, before anybody could take over, the node that held the other replica of a task
# of the first node.
BOTH_REPLICAS: list[tuple[Kills, int]] = [
    ({(0, 2): "snapshot", (6, 2): "done"}, 260),
    ({(2, 2): "done", (0, 2): "sync"}, 492),
    ({(1, 3): "snapshot", (2, 1): "compose", (6, 3): "snapshot"}, 855),
    ({(0, 3): "snapshot", (2, 3): "done"}, 510),
]


@pytest.mark.parametrize(("kills", "order"), BOTH_REPLICAS, ids=str)
@pytest.mark.parametrize("nodes", [3, 4])
def test_second_kill_waits_for_recovery(
    undisturbed: JobResult, kills: Kills, order: int, nodes: int, caplog: pytest.LogCaptureFixture
) -> None:
    killed = run(fit(), kills=kills, order=order, nodes=nodes, strict=False)
    same(killed, undisturbed)
    assert killed.failovers >= len(kills)
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("nodes", [3, 4])
def test_evicted_primary_counts_as_a_replica(undisturbed: JobResult, nodes: int) -> None:
    kills: Kills = {(1, 2): "processor", (1, 1): "snapshot", (0, 1): "sync"}
    same(run(fit(), kills=kills, order=369, nodes=nodes, strict=False), undisturbed)


def test_readmitted_member_counts_again() -> None:
    kills: Kills = {(1, 1): "snapshot", (1, 2): "sync", (0, 1): "snapshot"}
    result = run(job(Bank, tasks=3, epochs=3), kills=kills, order=923, nodes=3, strict=False)
    assert result.values == {0: 330, 1: 0, 2: 0}


@pytest.mark.parametrize("order", [1, 36, 40, 52, 54, 56])
def test_kill_after_the_last_commit(order: int) -> None:
    kills: Kills = {(0, 3): "committed", (2, 3): "snapshot", (1, 2): "compose"}
    ring = tg.Job(tasks=3, epochs=4, builder=Averages, topology=tg.ring(), backups=1)
    undisturbed = tg.testing.run(ring)
    same(tg.testing.run(ring, kills=kills, order=order), undisturbed)


@pytest.mark.parametrize("order", range(3))
def test_kills_after_one_write_are_one(order: int) -> None:
    kills: Kills = {(0, 1): "committed", (0, 2): "committed"}
    ring = tg.Job(tasks=3, epochs=4, builder=Averages, topology=tg.ring(), backups=1)
    killed = tg.testing.run(ring, kills=kills, order=order, strict=False)
    same(killed, tg.testing.run(ring))
    assert killed.failovers >= 1


@pytest.mark.parametrize("seed", range(60))
def test_any_kills_at_all(undisturbed: JobResult, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Up to four kills anywhere, with few nodes: everything comes about again and again."""
    dice = random.Random(seed)
    kind, tasks, epochs = dice.choice([(Fit, 7, 5), (Bank, 3, 3), (Wave, 4, 3)])
    backups = dice.choice([1, 1, 2])
    kills: dict[tuple[int, int], str] = {}
    for _ in range(dice.randint(1, 4)):
        task = dice.randrange(tasks)
        kills[task, dice.randrange(epochs)] = dice.choice(STAGES[: None if task == 0 else 5])
    topology = tg.tree() if kind is Fit else tg.full() if kind is Bank else tg.ring()
    whole = tg.Job(tasks=tasks, epochs=epochs, builder=kind, topology=topology, backups=backups)
    nodes = backups + dice.randint(1, 3)
    result = run(whole, kills=kills, order=dice.randrange(1, 100_000), nodes=nodes, strict=False)
    if kind is Fit:
        same(result, undisturbed)
    else:
        assert result.values == ({0: 330, 1: 0, 2: 0} if kind is Bank else {0: 12, 1: 3, 2: 6, 3: 9})
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []
