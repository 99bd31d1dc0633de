"""`epoch.map` and work queues in whole jobs, with failures."""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import taskgraph as tg


class Squares(tg.Task, state=["total", "counts"]):
    """Maps a list in each epoch."""

    def setup(self) -> None:
        self.total = 0.0
        self.counts: list[int] = []

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.map("squares", range(20), self.square, self.add)

    def square(self, epoch: tg.Epoch, piece: int) -> float:
        return piece**2 + epoch.rng.random()

    def add(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        self.total += sum(ins["squares"])
        self.counts.append(len(ins["squares"]))

    def result(self) -> tuple[float, list[int]]:
        return self.total, self.counts


class Rows(tg.Task, state=["seen", "left"]):
    """Computes some pieces of a queue in each epoch."""

    upto: int | None = 7

    def setup(self) -> None:
        self.seen: list[Any] = []
        self.left: list[int] = []

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.map("work", "rows", self.work, self.keep, upto=self.upto)

    def work(self, epoch: tg.Epoch, piece: int) -> tuple[int, float]:
        return piece, epoch.rng.random()

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        self.seen += ins["work"]
        queue = epoch.queue("rows")
        self.left.append(queue.left)
        if queue.done:
            epoch.finish()

    def result(self) -> tuple[list[Any], list[int]]:
        return self.seen, self.left


def squares(tasks: int = 3) -> tg.Job:
    return tg.Job(tasks=tasks, epochs=3, builder=Squares)


def rows(tasks: int = 3, builder: type[tg.Task] = Rows, **options: Any) -> tg.Job:
    queue = tg.WorkQueue(options.pop("source", range(20)), **options)
    return tg.Job(tasks=tasks, builder=builder, queues={"rows": queue})


STAGES = ["processor", "done", *(pytest.param(s, marks=pytest.mark.slow) for s in ("compose", "sync", "snapshot"))]


@functools.cache
def undisturbed(job: Callable[[], tg.Job]) -> dict[int, Any]:
    return tg.testing.run(job(), strict=False).values


def test_results_do_not_depend_on_the_number_of_tasks() -> None:
    alone = tg.testing.run(squares(1)).value
    assert alone[1] == [20, 20, 20]
    assert tg.testing.run(squares(4)).values == dict.fromkeys(range(4), alone)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("task", [0, 2])
def test_map_survives_deaths(task: int, stage: str) -> None:
    assert tg.testing.run(squares(), kills={(task, 1): stage}, order=task).values == undisturbed(squares)


def test_each_piece_of_a_queue_counts_once() -> None:
    found = tg.testing.run(rows(passes=2, shuffle=True))
    seen, left = found.values[0]
    assert left == [33, 26, 20, 13, 6, 0]
    assert sorted(piece for piece, _ in seen[:20]) == sorted(piece for piece, _ in seen[20:]) == [*range(20)]
    assert [piece for piece, _ in seen[:20]] != [piece for piece, _ in seen[20:]]
    assert found.values[1] == found.values[2] == (seen, left)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("task", [0, 2, 3], ids=["task 0", "a task", "the dealer"])
def test_queue_survives_deaths(task: int, stage: str) -> None:
    assert tg.testing.run(rows(), kills={(task, 1): stage}, order=task).values == undisturbed(rows)


@pytest.mark.slow
def test_queue_survives_many_deaths() -> None:
    expected = tg.testing.run(rows(passes=2)).values
    kills = {(3, 1): "processor", (0, 1): "sync", (2, 2): "processor", (3, 3): "snapshot", (1, 4): "compose"}
    assert tg.testing.run(rows(passes=2), kills=kills).values == expected


def test_without_upto_an_epoch_has_the_rest_of_a_pass() -> None:
    class Whole(Rows):
        upto = None

    assert tg.testing.run(rows(builder=Whole, passes=2)).values[0][1] == [20, 0]


def test_with_overlap_an_epoch_has_pieces_of_two_passes() -> None:
    assert tg.testing.run(rows(passes=2, overlap=True)).values[0][1] == [33, 26, 19, 12, 5, 0]


class Words:
    """A source of our own."""

    def pieces(self) -> list[str]:
        return ["a b", "c", "d e f"]

    def read(self, piece: str) -> Iterator[str]:
        yield from piece.split()


class Read(Rows):
    def work(self, epoch: tg.Epoch, piece: Any) -> Any:
        return piece


def test_a_source_gives_the_rows_of_a_piece() -> None:
    assert tg.testing.run(rows(builder=Read, source=Words())).values[0][0] == [["a", "b"], ["c"], ["d", "e", "f"]]


class Coroutines(Rows):
    async def work(self, epoch: tg.Epoch, piece: int) -> tuple[int, float]:  # type: ignore[override]
        return piece, epoch.rng.random()

    async def keep(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:  # type: ignore[override]
        super().keep(epoch, ins)


def test_value_and_then_may_be_coroutines() -> None:
    assert tg.testing.run(rows(builder=Coroutines)).values == undisturbed(rows)


class Slow:
    """A source that takes its time, which no event loop has."""

    def pieces(self) -> Iterator[str]:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        yield from "abc"

    def read(self, piece: str) -> Iterator[str]:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        yield piece


@pytest.mark.parametrize("builder", [Rows, Coroutines])
def test_files_are_not_read_on_the_event_loop(builder: type[tg.Task]) -> None:
    seen, _ = tg.testing.run(rows(builder=builder, source=Slow())).values[0]
    assert [piece for piece, _ in seen] == [["a"], ["b"], ["c"]]


def test_without_then_the_pieces_are_counted() -> None:
    class Counted(tg.Task):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.map("work", "rows", self.work, upto=7)
            epoch.processor(self.look, outbound={"left": self.task_id})
            epoch.processor(self.end, inbound={"left": self.task_id})

        def work(self, epoch: tg.Epoch, piece: int) -> None: ...

        def look(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("left", epoch.queue("rows").left)

        def end(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            if self.task_id == 0:
                epoch.report(left=ins["left"])
                if not ins["left"]:
                    epoch.finish()

    reports = tg.testing.run(rows(builder=Counted)).reports
    assert [report.numbers["left"] for report in reports] == [20, 13, 6, 0]


class Wrong(Rows):
    def work(self, epoch: tg.Epoch, piece: int) -> tuple[int, float]:
        if piece == 5:
            raise ValueError("five is right out")
        return super().work(epoch, piece)


def test_too_many_errors_fail_the_job() -> None:
    with pytest.raises(tg.PieceFailed, match=r"piece 5 of 'rows' failed too often, on n[0-9]+") as failed:
        tg.testing.run(rows(builder=Wrong))
    assert failed.value.piece == 5
    assert failed.value.node.startswith("n")
    assert "five is right out" in failed.value.traceback


def test_a_piece_may_be_set_aside() -> None:
    found = tg.testing.run(rows(builder=Wrong, on_error="set aside"), kills={(3, 1): "processor"})
    (failed,) = found.set_aside["rows"]
    assert failed.piece == 5
    assert "five is right out" in failed.traceback
    assert [one.piece for one in found.values[0][0] if isinstance(one, tg.Failed)] == [5]
    assert tg.JobResult.from_json(found.to_json()).set_aside == found.set_aside


def test_a_piece_is_set_aside_in_each_pass() -> None:
    found = tg.testing.run(rows(builder=Wrong, on_error="set aside", attempts=1, passes=2))
    assert [(one.piece, one.pass_number) for one in found.set_aside["rows"]] == [(5, 0), (5, 1)]
    assert [one.pass_number for one in found.values[0][0] if isinstance(one, tg.Failed)] == [0, 1]


def test_sys_exit_in_a_piece_is_an_error_of_the_piece() -> None:
    class Exits(Rows):
        def work(self, epoch: tg.Epoch, piece: int) -> tuple[int, float]:
            return super().work(epoch, piece) if piece != 5 else sys.exit(3)

    (failed,) = tg.testing.run(rows(builder=Exits, on_error="set aside")).set_aside["rows"]
    assert failed.piece == 5 and "SystemExit: 3" in failed.traceback


def test_an_error_that_goes_away_costs_nothing() -> None:
    class Sometimes(Rows):
        failed = False

        def work(self, epoch: tg.Epoch, piece: int) -> tuple[int, float]:
            if piece == 5 and not Sometimes.failed:
                Sometimes.failed = True
                raise OSError("not there yet")
            return super().work(epoch, piece)

    assert tg.testing.run(rows(builder=Sometimes)).values == undisturbed(rows)


def test_empty_queue_is_over_at_once() -> None:
    assert tg.testing.run(rows(source=[])).values[0] == ([], [0])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("x", "words", print), "the job has no queue 'words'"),
        (("x", [1], 5), "value and then are functions"),
        (("x", [1], print, None, 0), "upto=0"),
    ],
)
def test_wrong_calls_are_named(arguments: tuple[Any, ...], says: str) -> None:
    class Wrongly(tg.Task):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.map(*arguments[:4], **({"upto": arguments[4]} if len(arguments) > 4 else {}))

    with pytest.raises(tg.JobFailed, match=says):
        tg.testing.run(tg.Job(tasks=1, epochs=1, builder=Wrongly))


def test_different_pieces_are_named() -> None:
    class Differ(Squares):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.map("squares", range(20 + self.task_id), self.square, self.add)

    with pytest.raises(tg.JobFailed, match="all tasks give the same pieces"):
        tg.testing.run(tg.Job(tasks=2, epochs=1, builder=Differ))


class Renamed:
    """Files that were renamed between two runs, as many as before."""

    names = tuple("abcdefghijkl")

    def pieces(self) -> list[str]:
        return [*self.names]

    def read(self, piece: str) -> list[str]:
        return [piece]


class Names(tg.Task):
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.map("names", "files", self.name, upto=1)

    def name(self, epoch: tg.Epoch, rows: list[str]) -> str:
        time.sleep(0.02)  # checkpoints become complete meanwhile
        return rows[0]


@tg.job
def names(place: str, epochs: int) -> tg.Job:
    queues = {"files": tg.WorkQueue(Renamed())}
    return tg.Job(tasks=2, epochs=epochs, builder=Names, queues=queues, checkpoint=place, checkpoint_every=1)


def test_other_pieces_than_a_queue_began_with_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path.as_uri()
    tg.run(names(place, 6), nodes=0)
    assert tg.run(names(place, 8), nodes=0, resume=True).epochs == 8
    monkeypatch.setattr(Renamed, "names", tuple("abcdefghijkm"))
    with pytest.raises(tg.JobFailed, match="queue 'files' has other pieces on this node than it began with"):
        tg.run(names(place, 10), nodes=0, resume=True)


def test_wrong_options_of_a_queue_are_named() -> None:
    with pytest.raises(tg.JobError, match="set aside"):
        tg.WorkQueue(range(3), on_error="ignore")
    with pytest.raises(tg.JobError, match="buffer=-1"):
        tg.WorkQueue(range(3), buffer=-1)
    with pytest.raises(tg.JobError, match=r"passes=1\.5"):
        tg.WorkQueue(range(3), passes=1.5)  # type: ignore[arg-type]


computed: Counter[tuple[int, int]] = Counter()


class Counted(Rows):
    """Counts how often each piece is computed in each epoch."""

    def work(self, epoch: tg.Epoch, piece: int) -> tuple[int, float]:
        computed[epoch.number, piece] += 1
        return super().work(epoch, piece)


def test_an_epoch_that_begins_again_uses_results_that_are_there() -> None:
    """The death of the dealer's primary restarts the epoch; the tasks on other nodes have their results still."""
    computed.clear()
    found = tg.testing.run(rows(builder=Counted), kills={(3, 1): "sync"}, nodes=4, strict=False)
    assert found.values == undisturbed(rows)
    assert found.restarts == 1
    assert sum(computed.values()) < 20 + 7, "not all pieces of epoch 1 are computed again"


class Pushed(Rows):
    def work(self, epoch: tg.Epoch, piece: int) -> tuple[int, float]:
        epoch.table("sums").push([piece % 2], np.full((1, 1), -float(piece), np.float32))
        return super().work(epoch, piece)


class Pulled(Pushed):
    def compose(self, epoch: tg.Epoch) -> None:
        super().compose(epoch)
        epoch.processor(self.pull, outbound={"sums": self.task_id})
        epoch.processor(self.report, inbound={"sums": self.task_id})

    def pull(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("sums", epoch.table("sums").pull([0, 1])[:, 0])

    def report(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        epoch.report(even=ins["sums"][0], odd=ins["sums"][1])


@pytest.mark.parametrize(
    "kills",
    [
        {},
        {(3, 1): "processor"},
        pytest.param({(1, 1): "sync"}, marks=pytest.mark.slow),
        pytest.param({(4, 1): "done"}, marks=pytest.mark.slow),
    ],
)
def test_pushes_of_a_piece_count_once(kills: dict[tuple[int, int], str]) -> None:
    """The sums of pushes at the beginning of each epoch: seven pieces a time, in order."""
    job = tg.Job(
        tasks=3,
        builder=Pulled,
        queues={"rows": tg.WorkQueue(range(20))},
        tables={"sums": tg.Table(1, init="zeros", lr=1.0, servers=1)},
    )
    found = [(r.numbers["even"], r.numbers["odd"]) for r in tg.testing.run(job, kills=kills).reports]
    assert found == [(0, 0), (0 + 2 + 4 + 6, 1 + 3 + 5), (0 + 2 + 4 + 6 + 8 + 10 + 12, 1 + 3 + 5 + 7 + 9 + 11 + 13)]


def test_a_collective_may_use_the_results() -> None:
    class Both(Squares):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.map("squares", range(4), self.square, self.add)
            epoch.allreduce("sum", self.part, self.take, inbound=("squares",))

        def part(self, epoch: tg.Epoch, ins: tg.Inputs) -> float:
            return float(ins["squares"][self.task_id])

        def take(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
            assert ins["sum"] == sum(float(one) for one in [*self.last][:2])

        def add(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
            super().add(epoch, ins)
            self.last = ins["squares"]

    assert tg.testing.run(tg.Job(tasks=2, epochs=2, builder=Both)).value[1] == [4, 4]


def test_epochs_may_be_in_flight() -> None:
    class Ahead(Squares):
        @tg.stateless
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.map("squares", range(20), self.square, self.add)

    job = tg.Job(tasks=3, epochs=3, builder=Ahead)
    assert tg.testing.run(job, strict=False).values == tg.testing.run(job).values == undisturbed(squares)


def test_two_maps_of_a_queue_in_an_epoch_are_refused() -> None:
    class Twice(Rows):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.map("work", "rows", self.work, self.keep)
            epoch.map("more", "rows", self.work)

    with pytest.raises(tg.JobFailed, match="computes this queue in this epoch already"):
        tg.testing.run(rows(builder=Twice))
