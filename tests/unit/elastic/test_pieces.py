"""`run.once` and `run.map`: each piece is computed once, and all workers get all values, whoever dies or joins."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from elastic_cluster import SCENARIOS, Scenario, job_of, pause, run_body

import taskgraph as tg


def centers(run: Any) -> Any:
    x = np.random.default_rng(0).normal(size=(60, 2))
    first = run.once(lambda: [random.random(), float(np.random.rand())])
    s = run.state(w=np.array(first), best=np.inf)
    for step in run.steps(rows=60, batch=30, parts=5, passes=12):
        for part in step:
            part.add(mean=x[part.rows].sum(0) - part.size * s.w)
            pause()
        s.w = s.w + 0.1 * step["mean"] / step.size
        if step.number % 3 == 0:
            errors = run.map(lambda i, w=s.w: float(((x[i::4] - w) ** 2).sum()) + random.random(), range(4))
            s.best = min(s.best, sum(errors))
    return [*s.w.tolist(), s.best, *first]


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    return asyncio.run(run_body(centers))


@pytest.mark.parametrize("scenario", SCENARIOS[1:])
def test_same_values(scenario: Scenario, undisturbed: Any) -> None:
    assert asyncio.run(run_body(centers, scenario)) == undisturbed


def test_no_piece_is_no_round() -> None:
    assert asyncio.run(run_body(lambda run: run.map(lambda piece: piece, []), (2, ""))) == []


def test_each_piece_is_computed_on_one_worker() -> None:
    computed: list[int] = []

    def body(run: Any) -> None:
        run.once(lambda: computed.append(-1))
        run.map(computed.append, range(5))

    asyncio.run(run_body(body, (3, "")))
    assert sorted(computed) == [-1, 0, 1, 2, 3, 4]


def test_map_keeps_the_order_of_its_pieces() -> None:
    assert asyncio.run(run_body(lambda run: run.map(lambda piece: 2 * piece, range(9)), (3, ""))) == list(
        range(0, 18, 2)
    )


def changed(run: Any) -> Any:
    first = run.once(lambda: {"w": np.zeros(2), "seen": [0]})
    w, seen = first["w"], first["seen"]
    before = w.tolist(), list(seen)
    s = run.state(w=w, seen=seen)
    for step in run.steps(rows=4, batch=4, parts=2, passes=12):
        for part in step:
            part.collect(ones=np.ones(2))
            pause()
        ones = step.all("ones")[0]
        ones += 1
        s.w += ones
        s.seen.append(step.number)
        (more,) = run.map(lambda piece: np.full(2, piece), [3.0])
        more += 1
        s.w += more
    return before, s.w.tolist(), s.seen


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_values_may_be_changed(scenario: Scenario) -> None:
    """What a newcomer gets of `run.once` is the value before the changes."""
    before, w, seen = asyncio.run(run_body(changed, scenario))
    assert (list(before), w, seen) == ([[0.0, 0.0], [0]], [72.0, 72.0], [0, *range(12)])


def in_loop(run: Any) -> None:
    for step in run.steps(rows=4, batch=4, parts=2, passes=1):
        for part in step:
            run.once(lambda: 1)
            part.add()


def caught_outside(run: Any) -> None:
    for step in run.steps(rows=4, batch=4, parts=2, passes=1):
        for part in step:
            part.add()
        try:
            run.once(lambda: 1 // 0)
        except ZeroDivisionError:
            step.report(failed=1)


def once_in_a_map(run: Any) -> None:
    run.map(lambda piece: run.once(lambda: piece), range(3))


def round_in_a_map(run: Any) -> None:
    for step in run.steps(rows=4, batch=4, parts=2, passes=1):
        for part in step:
            part.add()
        run.map(lambda _, step=step: [part.add() for part in step], range(3))


def value_in_place_of_a_function(run: Any) -> None:
    run.once(print("saved"))  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (in_loop, r"run.once in the part loop: call it before or after `for part in step`"),
        (caught_outside, r"the function of run\.once .* raised an exception that was caught outside"),
        (once_in_a_map, r"the function of run\.map called the run"),
        (round_in_a_map, r"the function of run\.map called the run"),
        (value_in_place_of_a_function, r"run\.once takes a function, not NoneType"),
    ],
)
@pytest.mark.parametrize("workers", [1, 3])
async def test_calls_that_do_not_fit(body: Any, text: str, workers: int) -> None:
    with pytest.raises(tg.JobFailed, match=text):
        await run_body(body, (workers, ""))


def noise_before_the_parts(run: Any) -> float:
    s = run.state(total=0.0)
    for step in run.steps(rows=12, batch=2, parts=2, passes=1):
        noise = random.random() + float(np.random.rand())
        for part in step:
            part.add(noise=noise * part.size)
        s.total += noise + step["noise"]
    return float(s.total)


def test_newcomer_draws_the_random_numbers_of_the_others_in_its_first_step() -> None:
    tg.testing.run(job_of(noise_before_the_parts))


class Numbers:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> float:
        return float(row)


def noise_of_each_round(run: Any, reads: bool) -> list[list[float]]:
    found = []
    for step in run.steps(Numbers(), batch=4, parts=2, passes=1):
        for _ in range(2):
            for part in step:
                _ = part.data if reads else None
                part.collect(noise=random.random())
            found.append(step.all("noise"))
    return found


def test_each_part_of_each_step_has_a_seed_of_its_own() -> None:
    def body(run: Any) -> Any:
        seeds = []
        for step in run.steps(rows=4, batch=4, parts=2, passes=3):
            for part in step:
                part.collect(seed=part.seed, drawn=float(np.random.random()))
            seeds += [*step.all("seed"), *step.all("drawn")]
        return seeds

    assert len({*asyncio.run(run_body(body))}) == 12


@pytest.mark.parametrize("reads", [False, True])
def test_each_round_draws_other_random_numbers(reads: bool) -> None:
    first, second = asyncio.run(run_body(lambda run: noise_of_each_round(run, reads)))
    assert len({*first, *second}) == 4
