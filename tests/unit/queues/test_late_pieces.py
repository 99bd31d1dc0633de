"""Stragglers of `epoch.map`: an epoch goes on without a piece that another task has computed meanwhile."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any, ClassVar

import numpy as np
import pytest

import taskgraph as tg

PIECES = 30
SLOW = 17


class Sums(tg.Task, state=["sums"]):
    """Maps numbers, one of which the first task that has it cannot compute for a long time."""

    epochs = 4

    def setup(self) -> None:
        self.sums: list[int] = []

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.map("work", range(PIECES), self.work, self.keep)
        epoch.processor(self.pull, outbound={"pushed": self.task_id})
        epoch.processor(self.report, inbound={"pushed": self.task_id})

    async def work(self, epoch: tg.Epoch, piece: int) -> int:
        raise NotImplementedError

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        self.sums.append(sum(ins["work"]))

    def pull(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("pushed", float(epoch.table("pushed").pull([0])[0, 0]))

    def report(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        epoch.report(pushed=ins["pushed"])

    def result(self) -> list[int]:
        return self.sums


def job(builder: type[Sums], tasks: int = 3) -> tg.Job:
    tables = {"pushed": tg.Table(1, init="zeros", lr=1.0, servers=1)}
    return tg.Job(tasks=tasks, epochs=builder.epochs, builder=builder, tables=tables)


def push(epoch: tg.Epoch) -> None:
    epoch.table("pushed").push([0], -np.ones((1, 1), np.float32))


def check(found: tg.JobResult[Any], builder: type[Sums]) -> None:
    assert set(map(tuple, found.values.values())) == {(sum(range(PIECES)),) * builder.epochs}
    assert [report.numbers["pushed"] for report in found.reports] == [PIECES * n for n in range(builder.epochs)]


class Coroutines(Sums):
    """Piece 17 takes 1000 s for the first task that has it in epoch 1, the others 10 ms."""

    first: tg.Epoch | None = None
    cancelled = False
    ended_at = 0.0

    async def work(self, epoch: tg.Epoch, piece: int) -> int:
        push(epoch)
        await asyncio.sleep(0.01)
        if piece == SLOW and epoch.number == 1 and Coroutines.first is None:
            Coroutines.first = epoch
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                Coroutines.cancelled = epoch.cancelled
                with pytest.raises(BaseException, match="another task has computed this piece"):
                    epoch.request(0, "none")
                raise
        return piece

    async def keep(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:  # type: ignore[override]
        super().keep(epoch, ins)
        Coroutines.ended_at = asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    "kills",
    [{}, {(2, 2): "processor"}, *(pytest.param({(task, 1): "sync"}, marks=pytest.mark.slow) for task in range(3))],
)
def test_a_late_coroutine_is_cancelled(kills: dict[tuple[int, int], str]) -> None:
    Coroutines.first, Coroutines.cancelled = None, False
    check(tg.testing.run(job(Coroutines), kills=kills), Coroutines)
    assert Coroutines.cancelled
    assert Coroutines.ended_at < 100


class Long(tg.Task, state=["found"]):
    """Each piece takes a second."""

    began_at = ended_at = 0.0

    def setup(self) -> None:
        self.found: list[int] = []

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.map("work", "numbers", self.work, self.keep)

    async def work(self, epoch: tg.Epoch, piece: int) -> int:
        if piece == 0:
            Long.began_at = asyncio.get_running_loop().time()
        await asyncio.sleep(1)
        return piece

    async def keep(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        self.found += ins["work"]
        Long.ended_at = asyncio.get_running_loop().time()
        epoch.finish()

    def result(self) -> list[int]:
        return self.found


def test_long_pieces_follow_one_another_at_once() -> None:
    """A task that computes a long piece has asked for the end; its next ask does not wait behind that one."""
    job = tg.Job(tasks=1, builder=Long, queues={"numbers": tg.WorkQueue(range(10))})
    assert tg.testing.run(job, strict=False).value == [*range(10)]
    assert Long.ended_at - Long.began_at == pytest.approx(10, abs=0.5)


class Threads(Sums):
    """Piece 17 waits in a thread, for the first task that has it in epoch 1, until a later epoch lets it go on."""

    epochs = 6
    slow_task: int | None = None
    said: ClassVar[list[str]] = []
    epochs_of: ClassVar[list[tuple[int, int]]] = []
    go_on = threading.Event()
    ended = threading.Event()
    back = threading.Event()

    def work(self, epoch: tg.Epoch, piece: int) -> int:  # type: ignore[override]
        push(epoch)
        self.epochs_of.append((self.task_id, epoch.number))
        if epoch.last:  # its thread may have ended just now
            if self.task_id == Threads.slow_task:
                self.back.set()
            assert self.back.wait(30), "it takes pieces again"
        if piece == SLOW and epoch.number == 1 and Threads.slow_task is None:
            Threads.slow_task = self.task_id
            before = epoch.cancelled
            assert self.go_on.wait(30)
            self.said += [str(before), str(epoch.cancelled)]
            for use in (lambda: push(epoch), lambda: epoch.request(0, "none"), lambda: epoch.report(sum=1)):
                try:
                    use()
                except BaseException as error:
                    self.said.append(str(error))
            self.ended.set()
            raise ValueError("an error of a late piece is none")
        return piece

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        super().keep(epoch, ins)
        if epoch.number == 3:
            self.go_on.set()
            assert self.ended.wait(30)


def test_a_late_thread_runs_on_beside_the_epochs() -> None:
    check(tg.run(job(Threads), nodes=0), Threads)
    before, now, *errors = Threads.said
    assert (before, now) == ("False", "True")
    assert len(errors) == 3 and all("another task has computed this piece" in error for error in errors)
    of_slow = {number for task, number in Threads.epochs_of if task == Threads.slow_task}
    assert not {2, 3} & of_slow, "it takes no pieces while its thread runs"


@tg.message
class Number:
    """It takes half a second to make one, once the piece of `late` was given up."""

    number: int
    late: ClassVar[tg.Epoch | None] = None
    waited: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if Number.late is not None and Number.late.cancelled and not Number.waited:
            Number.waited = True
            time.sleep(0.5)


class LongEnd(Sums):
    """Piece 17 waits in a thread, for the first task that has it; then that task takes long to put its results."""

    epochs = 2
    ended = threading.Event()

    def work(self, epoch: tg.Epoch, piece: int) -> Number:  # type: ignore[override]
        found = Number(piece)
        if piece == SLOW and Number.late is None:
            Number.late = epoch
            assert self.ended.wait(30)
        return found

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs) -> None:
        self.sums.append(sum(one.number for one in ins["work"]))
        self.ended.set()


def test_a_task_with_a_late_piece_may_take_long_to_put_its_results() -> None:
    found = tg.run(job(LongEnd), nodes=0)
    assert set(map(tuple, found.values.values())) == {(sum(range(PIECES)),) * LongEnd.epochs}
    assert Number.waited


class Fails(Sums):
    """Piece 17 waits in a thread, for the first task that has it, and raises for the others."""

    first: int | None = None
    go_on = threading.Event()

    def work(self, epoch: tg.Epoch, piece: int) -> int:  # type: ignore[override]
        if piece == SLOW:
            if Fails.first is None:
                Fails.first = self.task_id
                self.go_on.wait(30)
            elif self.task_id != Fails.first:
                raise ValueError("none for 17")
        return piece


def test_a_job_that_fails_beside_a_late_thread_says_why(caplog: pytest.LogCaptureFixture) -> None:
    settings = tg.Settings(cancel_s=0.1)
    errors: list[logging.LogRecord] = []
    while not errors:  # none if the task of the thread heard of the failure first: it does not wait for the thread then
        Fails.first = None
        Fails.go_on.clear()
        with pytest.raises(tg.JobFailed, match="piece 17 of 'work' failed too often") as failed:
            tg.run(tg.Job(tasks=3, epochs=1, builder=Fails, settings=settings, tables=job(Fails).tables), nodes=0)
        Fails.go_on.set()
        assert "none for 17" in str(failed.value)
        errors = [each for each in caplog.records if each.levelname == "ERROR"]
    (record,) = errors
    assert f"task {Fails.first} on" in record.getMessage() and "did not return within 0.1 s" in record.getMessage()
    assert record.exc_info is None
