"""The README's program in one process gives the same bits in every order and with every kill."""

from __future__ import annotations

import numpy as np
import pytest
from jobs_kit import Fit, Kills, fit, run, same

from taskgraph.results import JobResult
from taskgraph.testing import STAGES

ROOT, INNER, LEAF = 0, 1, 5


@pytest.fixture(scope="module")
def undisturbed() -> JobResult:
    return run(fit(), nodes=1)


def test_same_numbers_as_a_plain_program(undisturbed: JobResult) -> None:
    rows = [np.random.default_rng(t).normal(size=(Fit.rows, 3)) for t in range(7)]

    def grad(t: int, theta: np.ndarray) -> np.ndarray:
        below: np.ndarray | int = sum(grad(c, theta) for c in (2 * t + 1, 2 * t + 2) if c < 7)
        return rows[t].T @ (rows[t] @ theta - rows[t] @ [1.0, 2.0, 3.0]) + below

    theta = np.zeros(3)
    for _ in range(5):
        theta -= grad(0, theta) / (Fit.rows * 7)
    np.testing.assert_array_equal(undisturbed.value, theta)
    assert undisturbed.epochs == 5
    assert (undisturbed.failovers, undisturbed.restarts) == (0, 0)
    assert [r.numbers["epoch"] for r in undisturbed.reports] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("order", range(5))
@pytest.mark.parametrize("nodes", [2, 3])
def test_same_bits_in_every_order(undisturbed: JobResult, order: int, nodes: int) -> None:
    same(run(fit(), order=order, nodes=nodes), undisturbed)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("task", [ROOT, INNER, LEAF])
def test_a_primary_killed_at_every_stage(undisturbed: JobResult, task: int, stage: str) -> None:
    if stage in ("commit", "committed") and task != ROOT:
        pytest.skip("it happens at the leader only")
    killed = run(fit(), kills={(task, 2): stage}, order=(task + STAGES.index(stage)) % 3)
    same(killed, undisturbed)
    assert killed.failovers >= 1


@pytest.mark.parametrize("stage", STAGES)
def test_root_killed_in_first_and_last_epoch(undisturbed: JobResult, stage: str) -> None:
    same(run(fit(), kills={(ROOT, 0): stage, (ROOT, 4): stage}, order=1), undisturbed)


TWO_KILLS: list[Kills] = [
    {(ROOT, 1): "processor", (ROOT, 2): "commit"},
    {(ROOT, 1): "committed", (ROOT, 2): "compose"},
    {(INNER, 1): "sync", (LEAF, 1): "done"},
    {(ROOT, 2): "done", (INNER, 2): "snapshot"},
    {(INNER, 1): "done", (INNER, 2): "done"},
    {(LEAF, 0): "compose", (ROOT, 4): "committed"},
]


@pytest.mark.parametrize(("order", "kills"), [*enumerate(TWO_KILLS)], ids=str)
def test_two_kills(undisturbed: JobResult, order: int, kills: Kills) -> None:
    same(run(fit(), kills=kills, order=order), undisturbed)


@pytest.mark.parametrize(("order", "first"), [*enumerate(STAGES[:5])])
def test_two_backups_survive_two_kills(undisturbed: JobResult, order: int, first: str) -> None:
    kills = {(ROOT, 2): first, (INNER, 2): STAGES[(order + 2) % 5]}
    same(run(fit(backups=2), kills=kills, order=order), undisturbed)


def test_without_backups(undisturbed: JobResult) -> None:
    same(run(fit(backups=0), nodes=3), undisturbed)


def test_more_nodes_than_replicas(undisturbed: JobResult) -> None:
    same(run(fit(tasks=7), nodes=12), undisturbed)


def test_without_strict_mode(undisturbed: JobResult) -> None:
    same(run(fit(), strict=False, order=4, kills={(INNER, 1): "done"}), undisturbed)


def test_a_run_is_the_same_run_again() -> None:
    kills: Kills = {(ROOT, 1): "sync", (LEAF, 3): "processor"}
    one, other = (run(fit(), kills=kills, order=7) for _ in range(2))
    same(one, other)
    assert (one.failovers, one.restarts) == (other.failovers, other.restarts)
