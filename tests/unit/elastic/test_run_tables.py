"""Tables in elastic jobs: a push counts once, and rows have the same bits on any number of workers."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic_cluster import SCENARIOS, Scenario, job_of, pause, run_job

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster

OPTIMIZERS = ("sgd", "momentum", "adagrad", "adam")
ROWS, USERS, ITEMS, RANK = 200, 30, 20, 4


def ratings() -> tuple[Any, Any, Any]:
    draws = np.random.default_rng(0)
    users, items = draws.integers(USERS, size=ROWS), draws.integers(ITEMS, size=ROWS)
    return users, items, draws.normal(size=ROWS).astype(np.float32)


@tg.elastic
def factors(run: tg.Run, optimizer: str = "sgd", passes: int = 3, pause_s: float = 0.0) -> Any:
    users, items, scores = ratings()
    s = run.state(loss=0.0)
    options: Any = {"optimizer": optimizer, "lr": 0.05, "scale": 0.5}
    of_users, of_items = run.table("users", RANK, **options), run.table("items", RANK, **options)
    for step in run.steps(rows=ROWS, batch=40, parts=7, passes=passes):
        for part in step:
            pause()
            time.sleep(pause_s)
            u, i = users[part.rows], items[part.rows]
            a, b = of_users.pull(u), of_items.pull(i)
            errors = (a * b).sum(1) - scores[part.rows]
            of_users.push(u, errors[:, None] * b)
            of_items.push(i, (errors[:, None] * a).astype(np.float64))  # rounded to the table's float32
            part.add(loss=float(errors @ errors))
        s.loss = step["loss"]
        if step.ends_pass:
            of_users.lr = of_users.lr * 0.9
    known = np.arange(USERS), np.arange(ITEMS)
    return {"users": of_users.pull(known[0]), "items": of_items.pull(known[1]), "loss": s.loss, "lr": of_users.lr}


def bits(value: Any) -> list[Any]:
    return [value["users"].tobytes(), value["items"].tobytes(), value["loss"], value["lr"]]


def test_equal_to_a_loop_without_tasks() -> None:
    users, items, scores = ratings()
    order: list[Any] = []

    def first_rows(run: tg.Run) -> Any:
        made = [run.table(name, RANK, scale=0.5).pull(np.arange(30)) for name in ("users", "items")]
        for step in run.steps(rows=ROWS, batch=40, parts=7, passes=3):
            order.append(step.rows)
            for part in step:
                part.add()
        return made

    of_users, of_items = (np.array(rows) for rows in tg.run(job_of(first_rows), nodes=0).value)
    rate = 0.05
    for number, rows in enumerate(order):
        u, i = users[rows], items[rows]
        errors = ((of_users[u] * of_items[i]).sum(1) - scores[rows])[:, None]
        changes = errors * of_items[i], errors * of_users[u]
        np.subtract.at(of_users, u, np.float32(rate) * changes[0])
        np.subtract.at(of_items, i, np.float32(0.05) * changes[1])
        rate *= 0.9 if number % 5 == 4 else 1
    value = tg.run(factors(), nodes=0).value
    np.testing.assert_allclose(value["users"], of_users, atol=1e-5)
    np.testing.assert_allclose(value["items"], of_items[:ITEMS], atol=1e-5)
    assert value["lr"] == pytest.approx(0.05 * 0.9**3)


@pytest.mark.parametrize(
    "optimizer", ["adam", *(pytest.param(each, marks=pytest.mark.slow) for each in OPTIMIZERS[:3])]
)
async def test_same_bits_on_many_workers(optimizer: str) -> None:
    found = [bits((await run_job(factors(optimizer=optimizer), each)).values[0]) for each in [*SCENARIOS, (5, "K.K+")]]
    assert found.count(found[0]) == len(found)


KILLS = {(0, 1): "part", (1, 3): "sums", (0, 6): "total"}


@pytest.mark.parametrize(
    ("optimizer", "kills"),
    [("sgd", {}), *(pytest.param(name, KILLS, marks=pytest.mark.slow) for name in OPTIMIZERS), ("adam", KILLS)],
)
def test_strict_run_with_kills(optimizer: str, kills: Any) -> None:
    calm = tg.run(factors(optimizer=optimizer, passes=2), nodes=0).value
    assert bits(tg.testing.run(factors(optimizer=optimizer, passes=2), kills=kills).value) == bits(calm)


async def part_of_run(job: Any, nodes: int, until: int, **how: bool) -> Any:
    cluster = InProcessCluster(job, endless_leases=True)
    try:
        await cluster.start(nodes, **how)
        if not until:
            return (await cluster.result(20)).values[0]
        view = cluster.living[0].keeper
        await view.wait_until(lambda v: (v.checkpoint and v.checkpoint.record.epoch >= until) or v.finished)
        assert not view.view.finished
        return None
    finally:
        await cluster.stop()


def test_resumed_on_another_number_of_workers(tmp_path: Path) -> None:
    def paced(pause_s: float) -> Any:
        made = factors(optimizer="adam", pause_s=pause_s)
        assert made.elastic is not None
        often = dataclasses.replace(made.elastic, checkpoint_every_s=0.02)
        return dataclasses.replace(made, checkpoint=tmp_path.as_uri(), _elastic=often)

    asyncio.run(part_of_run(paced(0.03), 2, 5))  # a checkpoint is complete long before the job ends
    resumed = asyncio.run(part_of_run(paced(0.004), 3, 0, resume=True))
    assert bits(resumed) == bits(tg.run(factors(optimizer="adam"), nodes=0).value)


def counts(run: tg.Run) -> Any:
    table = run.table("counts", 2, init="zeros", lr=1.0, dtype="float64")
    for step in run.steps(rows=50, batch=10, parts=5, passes=4):
        for _ in range(2):  # rounds
            for part in step:
                pause()
                rounds = 2 * step.number + step.round - 1
                assert table.pull([1000]).tolist() == [[20 * rounds, 0]], "as of the round's beginning"
                table.push(part.rows, np.full((part.size, 2), -1.0))
                table.push([1000, 1000], [[-part.size, 0.0], [-part.size, 0.0]])
                table.push([], np.zeros((0, 2)))
                part.add()
        assert table.pull([1000])[0, 0] == 20 * 2 * (step.number + 1), "after the round"
    assert len(table) == 51
    return table.pull([*range(50), 1000])


@pytest.mark.parametrize("scenario", [(1, ""), (3, ".K+")])
async def test_pushes_are_summed_and_counted_once(scenario: Scenario) -> None:
    found: Any = (await run_job(job_of(counts), scenario)).values[0]
    assert found.tolist() == [[8.0, 8.0]] * 50 + [[40 * 20.0, 0.0]]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda run, table: table.push([1], np.ones((1, 1), np.float32)), r"table 't'\.push outside a part"),
        (lambda run, table: run.once(lambda: table.push([1], np.ones((1, 1), np.float32))), "outside a part"),
        (lambda run, table: run.table("t", 2), "there is a table of this name"),
        (lambda run, table: run.table("u", 2, servers=2), "every worker has all rows"),
        (lambda run, table: run.table("u", 0), "width"),
        (lambda run, table: run.table("u", 2, rate=1), r"run\.table\(rate=\.\.\.\): run\.table has no 'rate'"),
        (lambda run, table: table.pull(), "needs ids"),
        (lambda run, table: table.pull([0.5]), "takes int64 ids"),
        (lambda run, table: setattr(table, "lr", "x"), r"lr must be a finite number"),
    ],
)
def test_what_does_not_fit_is_said(call: Any, text: str) -> None:
    def body(run: tg.Run) -> None:
        table = run.table("t", 1)
        if "outside" not in text:
            call(run, table)
        for step in run.steps(rows=4, batch=4, parts=2, passes=1):
            for part in step:
                part.add()
            call(run, table)

    with pytest.raises(tg.JobFailed, match=text):
        tg.run(job_of(body), nodes=0)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda run, table: table.push([1, 2], np.ones((1, 1), np.float32)), r"gradients of shape \(2, 1\)"),
        (lambda run, table: table.push([1], np.ones((1, 1), int)), "gradients are floats, not int64"),
        (lambda run, table: setattr(table, "lr", 1.0), "set in the part loop"),
        (lambda run, table: run.table("u", 1), "after the first step"),
    ],
)
def test_what_does_not_fit_in_a_part_is_said(call: Any, text: str) -> None:
    def body(run: tg.Run) -> None:
        table = run.table("t", 1)
        for step in run.steps(rows=4, batch=4, parts=2, passes=1):
            for part in step:
                part.add()
                call(run, table)

    with pytest.raises(tg.JobFailed, match=text):
        tg.run(job_of(body), nodes=0)


def test_rate_that_depends_on_the_worker_is_found() -> None:
    def body(run: tg.Run) -> None:
        table = run.table("t", 1)
        for step in run.steps(rows=4, batch=4, parts=2, passes=6):
            for part in step:
                table.push(part.rows, np.ones((part.size, 1), np.float32))
                part.add()
            table.lr = 0.1 if run.worker == "n1" else 0.2

    with pytest.raises(tg.JobFailed, match=r"table 't'"):
        tg.testing.run(job_of(body))


@tg.elastic
def shards_counts(run: tg.Run, passes: int = 2) -> Any:
    table = run.table("counts", 1, init="zeros", lr=1.0, dtype="float64")
    shards, failed = run.shards(range(40), passes=passes, shuffle=True, attempts=50), set[int]()
    for piece in shards:
        before = table.pull([piece, 1000])
        assert 0 <= before[0, 0] <= passes and 0 <= before[1, 0] <= 40 * passes
        table.push([piece], [[-1.0]])
        table.push([1000], [[-1.0]])
        if piece % 7 == 3 and piece not in failed:
            failed.add(piece)
            shards.fail(ValueError("its pushes do not count"))
    return table.pull([*range(40), 1000])


@pytest.mark.parametrize("kills", [{}, {(0, 3): "part", (1, 10): "sums", (2, 20): "begin"}])
@pytest.mark.parametrize("order", [0, 1])
def test_pushes_of_shards_count_with_their_pieces(kills: dict[tuple[int, int], str], order: int) -> None:
    found = tg.testing.run(shards_counts(), kills=kills, order=order, strict=False).value
    assert found.tolist() == [[2.0]] * 40 + [[80.0]]


SEEN: list[float] = []
"""How many pieces counted by what all workers have pulled so far."""


@tg.elastic
def late_pulls(run: tg.Run, staleness: int) -> float:
    table = run.table("counts", 1, init="zeros", lr=1.0, dtype="float64", staleness=staleness)
    for _ in run.shards(range(60)):
        counted = float(table.pull([0])[0, 0])
        assert not staleness or counted >= max(SEEN, default=0.0) - staleness
        SEEN.append(counted)
        table.push([0], [[-1.0]])
    return float(table.pull([0])[0, 0])


@pytest.mark.parametrize("staleness", [1, 2, 7])
@pytest.mark.parametrize("order", [7, 12])  # without the bound a pull lacks more in these
@pytest.mark.parametrize("kills", [{}, {(0, 2): "part"}])
def test_pull_lacks_no_more_pieces_than_staleness_says(
    staleness: int, order: int, kills: dict[tuple[int, int], str]
) -> None:
    SEEN.clear()
    assert tg.testing.run(late_pulls(staleness=staleness), kills=kills, order=order, nodes=3, strict=False).value == 60


def test_rate_set_in_a_piece_is_an_error() -> None:
    def body(run: tg.Run) -> None:
        table = run.table("t", 1)
        for _ in run.shards(range(3)):
            table.lr = 0.5

    with pytest.raises(tg.JobFailed, match=r"table 't'\.lr is set in a piece of run\.shards"):
        tg.run(job_of(body), nodes=0)


def test_push_after_the_last_shard_is_an_error() -> None:
    def body(run: tg.Run) -> None:
        table = run.table("t", 1)
        for piece in run.shards(range(3)):
            table.push([piece], np.ones((1, 1), np.float32))
        table.push([1], np.ones((1, 1), np.float32))

    with pytest.raises(tg.JobFailed, match="outside a part"):
        tg.run(job_of(body), nodes=0)


async def test_saved_rows_are_read_as_a_data_frame(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("pandas")
    url = str(tmp_path / "t.parquet")

    def body(run: tg.Run) -> Any:
        table = run.table("t", 3)
        for step in run.steps(rows=40, batch=20, parts=4, passes=2):
            for part in step:
                pause()
                table.push(part.rows * 10, np.ones((part.size, 3), np.float32))
                part.add()
            run.once(lambda: table.save(url))
        return table.pull(np.arange(0, 400, 10))

    rows: Any = (await run_job(job_of(body), (2, ""))).values[0]
    frame = tg.read_table(url)
    assert frame.index.tolist() == list(range(0, 400, 10))
    assert np.array_equal(frame.to_numpy(), rows)
