"""`epoch.map` and work queues in whole jobs, with failures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


STAGES = ("compose", "processor", "sync", "snapshot", "done")


def test_results_do_not_depend_on_the_number_of_tasks() -> None:
    alone = tg.testing.run(squares(1)).value
    assert alone[1] == [20, 20, 20]
    assert tg.testing.run(squares(4)).values == dict.fromkeys(range(4), alone)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("task", [0, 2])
def test_map_survives_deaths(task: int, stage: str) -> None:
    expected = tg.testing.run(squares()).values
    assert tg.testing.run(squares(), kills={(task, 1): stage}, order=task).values == expected


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
    expected = tg.testing.run(rows()).values
    found = tg.testing.run(rows(), kills={(task, 1): stage}, order=task)
    assert found.values == expected


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
    assert tg.testing.run(rows(builder=Coroutines)).values == tg.testing.run(rows()).values


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


def test_an_error_that_goes_away_costs_nothing() -> None:
    class Sometimes(Rows):
        failed = False

        def work(self, epoch: tg.Epoch, piece: int) -> tuple[int, float]:
            if piece == 5 and not Sometimes.failed:
                Sometimes.failed = True
                raise OSError("not there yet")
            return super().work(epoch, piece)

    assert tg.testing.run(rows(builder=Sometimes)).values == tg.testing.run(rows()).values


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


def test_wrong_options_of_a_queue_are_named() -> None:
    with pytest.raises(tg.JobError, match="set aside"):
        tg.WorkQueue(range(3), on_error="ignore")
    with pytest.raises(tg.JobError, match="buffer=-1"):
        tg.WorkQueue(range(3), buffer=-1)
