"""Steps that read a source: each row once in each pass, the same bits on any number of workers."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic_cluster import SCENARIOS, Scenario, job_of, pause, run_body, run_job

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster


class Pieces:
    """A source of pieces with these numbers of rows."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def pieces(self) -> list[int]:
        return list(range(len(self.sizes)))

    def read(self, piece: int) -> list[tuple[int, int]]:
        return [(piece, row) for row in range(self.sizes[piece])]


SIZES = (7, 0, 12, 1, 5, 30, 0, 2, 9, 4, 0)


@tg.elastic
def sums(run: tg.Run, passes: int = 3, batch: int = 10, parts: int = 4, buffer: int = 0, rounds: int = 1) -> Any:
    s = run.state(seen=np.zeros((passes, len(SIZES), max(SIZES)), np.int64), steps=0, order=0.0, ends=0)
    for step in run.steps(Pieces(*SIZES), batch=batch, parts=parts, passes=passes, buffer=buffer):
        for _ in range(rounds):
            for part in step:
                pause()
                assert part.data == [tuple(row) for row in part.rows.tolist()] or buffer
                assert 1 <= part.size == len(part.data) <= 2 * -(-batch // parts)  # twice, in a trial of a strict run
                seen = np.zeros((len(SIZES), max(SIZES)), np.int64)
                for piece, row in part.data:
                    seen[piece, row] += 1
                part.add(seen=seen, order=float(np.sin(part.rows).sum()))
        assert step.size == step["seen"].sum() == len(step.rows)
        s.seen[step.pass_number] += step["seen"]
        s.order += step["order"] * (step.number + 1)
        s.steps += 1
        s.ends += step.ends_pass
    return {"seen": s.seen, "order": s.order, "steps": s.steps, "ends": s.ends}


def check_each_row_once(value: Any, passes: int) -> None:
    wanted = [[int(row < size) for row in range(max(SIZES))] for size in SIZES]
    assert value["seen"].tolist() == [wanted] * passes
    assert value["ends"] == passes


KILLS = {(0, 1): "part", (1, 3): "total", (0, 5): "begin"}


@pytest.mark.parametrize(
    ("arguments", "kills"),
    [
        ({"passes": 2, "rounds": 2}, {}),
        ({"passes": 2, "buffer": 3, "batch": 17}, KILLS),
        pytest.param({}, KILLS, marks=pytest.mark.slow),
        pytest.param({"parts": 24, "batch": 24}, KILLS, marks=pytest.mark.slow),
        pytest.param({"rounds": 2}, KILLS, marks=pytest.mark.slow),
    ],
)
def test_each_row_once_with_equal_bits(arguments: dict[str, int], kills: dict[tuple[int, int], str]) -> None:
    calm = tg.run(sums(**arguments), nodes=0).value
    passes = arguments.get("passes", 3)
    check_each_row_once(calm, passes)
    tested = tg.testing.run(sums(**arguments), kills=kills).value
    assert tested["order"] == calm["order"] and tested["steps"] == calm["steps"]
    check_each_row_once(tested, passes)


@pytest.mark.parametrize(
    "scenario", [pytest.param(each, marks=pytest.mark.slow) for each in SCENARIOS] + [(5, "K..K+")]
)
async def test_equal_on_many_workers(scenario: Scenario) -> None:
    value: Any = (await run_job(sums(passes=4), scenario)).values[0]
    check_each_row_once(value, 4)
    calm: Any = (await run_job(sums(passes=4))).values[0]
    assert value["order"] == calm["order"]


def test_order_is_seeded() -> None:
    def rows(**arguments: Any) -> list[list[int]]:
        found: list[list[int]] = []

        def read(run: tg.Run) -> None:
            for step in run.steps(Pieces(3, 3, 3, 3), batch=4, parts=2, **arguments):
                for part in step:
                    part.add()
                found.extend(step.rows.tolist())

        tg.run(job_of(read), nodes=0)
        return found

    plain = rows(passes=1, shuffle=False)
    # lane 0 reads pieces 0 and 2, lane 1 pieces 1 and 3; each part takes two rows
    assert plain[:4] == [[0, 0], [0, 1], [1, 0], [1, 1]] and plain[4:8] == [[0, 2], [2, 0], [1, 2], [3, 0]]
    both = rows(passes=2, seed=1)
    assert rows(passes=2, seed=1) == both != rows(passes=2, seed=2)
    assert both[:12] != both[12:] and sorted(both[:12]) == sorted(both[12:]) == sorted(plain)
    buffered = rows(passes=1, shuffle=False, buffer=3)
    assert buffered == plain, "rows are numbered in the order in which they are read"


def test_lines_and_files_are_read_by_lanes(tmp_path: Path) -> None:
    for name in range(5):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}-{line}\n" for line in range(10 + name)))

    def read(run: tg.Run) -> list[str]:
        s = run.state(lines=[])
        for step in run.steps(tg.lines(f"{tmp_path}/*.txt", size=4), batch=9, parts=3, passes=1):
            for part in step:
                part.collect(lines=part.data)
            s.lines = [*s.lines, *(line for lines in step.all("lines") for line in lines)]
        return list(s.lines)

    tested = tg.testing.run(job_of(read), kills={(0, 2): "sums"}).value
    assert sorted(tested) == sorted(f"{name}-{line}" for name in range(5) for line in range(10 + name))


async def until_checkpoint(job: Any, nodes: int, until: int, **how: bool) -> Any:
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


@tg.elastic
def slow(run: tg.Run) -> Any:
    import time

    s = run.state(seen=[])
    for step in run.steps(Pieces(*SIZES), batch=6, parts=3, passes=3):
        for part in step:
            time.sleep(0.004)
            part.add()
        s.seen.append(step.rows)
    return [rows.tolist() for rows in s.seen]


@pytest.mark.slow
def test_resumed_on_another_number_of_workers(tmp_path: Path) -> None:
    made = slow()
    assert made.elastic is not None
    often = dataclasses.replace(made.elastic, checkpoint_every_s=0.02)
    job = dataclasses.replace(made, checkpoint=tmp_path.as_uri(), _elastic=often)
    asyncio.run(until_checkpoint(job, 2, 15))
    resumed = asyncio.run(until_checkpoint(job, 3, 0, resume=True))
    assert resumed == tg.run(slow(), nodes=0).value


async def test_readers_of_other_workers_are_closed() -> None:
    opened: list[str] = []

    class Noted(Pieces):
        def read(self, piece: int) -> Any:
            opened.append(f"open {piece}")
            try:
                yield from super().read(piece)
            finally:
                opened.append(f"close {piece}")

    def body(run: Any) -> None:
        for step in run.steps(Noted(30, 30), batch=4, parts=2, passes=1):
            for part in step:
                pause()
                part.add()

    await run_body(body)
    assert opened.count("open 0") == opened.count("close 0") == 1, "one reader goes through the lane"


@pytest.mark.parametrize(
    ("source", "arguments", "text"),
    [
        (Pieces(1), {}, r"run\.steps\(source\) needs batch"),
        (Pieces(1), {"batch": 1, "parts": 1, "drop_last": True}, "with drop_last=True"),
        (Pieces(1), {"batch": 1, "rows": 1}, "give one of them"),
        (Pieces(1), {"batch": 1}, "a part would have no row"),
        (Pieces(1), {"batch": 24, "buffer": -1}, "must be a number of rows"),
        (Pieces(), {"batch": 24}, "the source has no pieces"),
        (Pieces(0, 0), {"batch": 24}, "the source has no rows in its 2 pieces"),
        (np.zeros(5), {"batch": 5, "parts": 1, "buffer": 2}, "is for sources"),
        ("data/*.txt", {"batch": 5, "parts": 1}, r"'data/\*\.txt'\): name files as tg\.lines\(url\)"),
        (Pieces, {"batch": 5, "parts": 1}, r"not the class Pieces: write Pieces\(\)"),
    ],
)
def test_what_does_not_fit_is_said(source: Any, arguments: dict[str, Any], text: str) -> None:
    def read(run: tg.Run) -> None:
        for step in run.steps(source, **arguments):
            for part in step:
                part.add()

    with pytest.raises(tg.JobFailed, match=text):
        tg.run(job_of(read), nodes=0)


def test_what_is_known_after_the_round_only() -> None:
    def read(run: tg.Run) -> None:
        steps = run.steps(Pieces(3), batch=2, parts=1, passes=1)
        with pytest.raises(TypeError, match="not known before"):
            len(steps)
        with pytest.raises(tg.StepError, match="counted as they are read"):
            _ = steps.per_pass
        for step in steps:
            for name in ("rows", "size", "ends_pass"):
                with pytest.raises(tg.StepError, match=rf"step\.{name} of a source is known after"):
                    getattr(step, name)
            for part in step:
                part.add()
            assert (step.size, step.ends_pass) == ((2, False) if step.number == 0 else (1, True))

    tg.run(job_of(read), nodes=0)


def test_a_step_reads_its_rows() -> None:
    def read(run: tg.Run) -> None:
        for _ in run.steps(Pieces(3), batch=2, parts=1, passes=1):
            pass

    with pytest.raises(tg.JobFailed, match="step 0 has read no rows"):
        tg.run(job_of(read), nodes=0)


def test_source_that_differs_between_workers_is_named() -> None:
    class Drawn(Pieces):
        def __init__(self, worker: str) -> None:
            super().__init__(10, 10)
            self.worker = worker

        def read(self, piece: int) -> Any:
            return [(self.worker, row) for row in range(self.sizes[piece])]

    def read(run: tg.Run) -> float:
        s = run.state(sum=0)
        for step in run.steps(Drawn(run.worker), batch=4, parts=2, passes=1):
            for part in step:
                part.add(sum=sum(len(worker) + ord(worker[-1]) for worker, _ in part.data))
            s.sum += step["sum"]
        return float(s.sum)

    with pytest.raises(tg.JobFailed, match=r"part \d of step 0 is not the same on"):
        tg.testing.run(job_of(read))


async def test_pieces_are_any_values() -> None:
    class Arrays:
        def pieces(self) -> list[Any]:
            return [{"at": np.arange(20_000) + number, "name": (number, None)} for number in range(3)]

        def read(self, piece: Any) -> list[int]:
            return [int(piece["at"][-1])]

    def body(run: tg.Run) -> Any:
        s = run.state(found=[])
        for step in run.steps(Arrays(), batch=2, parts=2, passes=1):
            for part in step:
                pause()
                part.collect(rows=part.data)
            s.found = [*s.found, *(row for rows in step.all("rows") for row in rows)]
        return s.found

    for scenario in ((1, ""), (2, "+")):
        assert sorted(await run_body(body, scenario)) == [19_999, 20_000, 20_001]


def test_pieces_that_cannot_travel_are_named() -> None:
    class Odd(Pieces):
        def pieces(self) -> list[Any]:
            return [object()]

    def body(run: tg.Run) -> None:
        for _ in run.steps(Odd(1), batch=1, parts=1):
            pass

    with pytest.raises(tg.JobFailed, match="a list of pieces"):
        tg.run(job_of(body), nodes=0)
