"""Code that keeps an `epoch` and uses it when that is over: a mistake, told by name; no node ends for it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from cluster_kit import Counting, holder, job, play

import taskgraph as tg
from taskgraph.epoch import AttemptEnded
from taskgraph.errors import JobFailed
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.loop import NodeLoop
from taskgraph.node.usercode.ended import as_expected, pass_ended_threads_over, passing_ended_threads_over

OVER = r"uses an `epoch` that is over"


class Keeping(Counting, state=["total"]):
    kept: Any = None
    at: str = ""

    def uses(self, where: str) -> None:
        if where == self.at and self.kept is not None:
            self.kept.report(loss=1.0)

    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.uses("count")
        await super().count(epoch, ins, outs)
        self.kept = epoch

    def on_commit(self, epoch: int, state: Any) -> None:
        self.uses("on_commit")

    def snapshot(self) -> Any:
        self.uses("snapshot")
        return {"total": self.total}

    def restore(self, state: Any) -> None:
        self.total = state["total"]

    def result(self) -> int:
        self.uses("result")
        return self.total


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("where", ["count", "on_commit", "result"])
def test_it_is_told_by_name(where: str, strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Fresh(Keeping, state=["total"]):
        at = where

    async def scenario(cluster: InProcessCluster) -> None:
        with pytest.raises(JobFailed, match=OVER) as failed:
            await cluster.result()
        assert f"{where!r}: it uses" in str(failed.value)

    settings = tg.Settings(strict=strict, epochs_ahead=0)
    play(job(Fresh, settings=settings), scenario, nodes=3)
    assert not [record for record in caplog.records if "cannot go on" in record.getMessage()], "no node ends for it"


USES: dict[str, Callable[[tg.Epoch], object]] = {
    "report": lambda epoch: epoch.report(loss=1.0),
    "finish": lambda epoch: epoch.finish(),
    "hold": lambda epoch: epoch.hold("too late"),
}


@pytest.mark.parametrize("use", USES)
def test_so_it_is_in_the_next_epoch_where_it_is_done_and_not_committed(use: str) -> None:
    """It would else be lost without a word: what it reports may be on its way already."""
    used = asyncio.Event()

    class Fresh(Counting, state=["total"]):
        kept: Any = None

        async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            if self.task_id == 0:
                await used.wait()  # the epoch is not committed before
            elif self.kept is not None:
                used.set()
                USES[use](self.kept)
            self.kept = epoch

    async def scenario(cluster: InProcessCluster) -> None:
        with pytest.raises(JobFailed, match=r"task 1, epoch 1, 'count': it uses an `epoch` that is over"):
            await cluster.result()

    play(job(Fresh, settings=tg.Settings(epochs_ahead=4)), scenario, nodes=2)


@pytest.mark.parametrize(
    "use", [lambda epoch: epoch.flag(0), lambda epoch: epoch.request(0, "get")], ids=["flag", "request"]
)
def test_what_is_sent_after_the_job_ended_is_logged(
    use: Callable[[tg.Epoch], object], caplog: pytest.LogCaptureFixture
) -> None:
    """It is lost, and the job ended all the same."""
    kept: list[tg.Epoch] = []

    class Fresh(Counting, state=["total"]):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.keep, outbound={"kept": self.task_id})
            epoch.processor(self.count, inbound={"kept": self.task_id})

        async def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            kept.append(epoch)
            outs.put("kept", None)

    async def scenario(cluster: InProcessCluster) -> None:
        await cluster.result()
        with pytest.raises((AttemptEnded, tg.GraphError)):
            use(kept[-1])
        await asyncio.sleep(0)
        assert "comes too late" in caplog.text and "after the job ended" in caplog.text

    play(job(Fresh), scenario, nodes=2)


def test_who_hears_of_it_in_a_thread_of_its_own_is_told_what_it_is() -> None:
    assert "keeps it open with epoch.hold" in str(AttemptEnded())
    assert "epoch.hold" not in str(AttemptEnded(held=True)), "it did what is asked for"


@pytest.mark.parametrize("kind", ["thread", "coroutine"])
def test_who_held_an_epoch_that_ends_is_given_no_advice(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told to keep the epoch open, as it did."""
    ended: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.append(args.exc_value))
    asked, gate, beside = asyncio.Event(), asyncio.Event(), set()

    class Holding(Counting, state=["total"]):
        def compose(self, epoch: tg.Epoch) -> None:
            epoch.processor(self.ask, outbound={"x": self.task_id})
            epoch.processor(self.count, inbound={"x": self.task_id})

        async def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
            outs.put("x", 1)
            if (self.task_id, epoch.number) != (0, 1) or beside:
                return
            hold, reply = epoch.hold("asks"), epoch.request(1, "late")
            if kind == "thread":
                thread = threading.Thread(target=self.in_thread, args=(hold, reply))
                beside.add(thread)
                thread.start()
            else:
                task = asyncio.create_task(self.as_coroutine(hold, reply))
                beside.add(task)
                task.add_done_callback(lambda task: ended.append(task.exception()))

        def in_thread(self, hold: tg.Hold, reply: tg.Reply) -> None:
            with hold:
                reply.wait()

        async def as_coroutine(self, hold: tg.Hold, reply: tg.Reply) -> None:
            with hold:
                await reply

        @tg.handles("late")
        async def late(self, epoch: tg.Epoch, sender: int, payload: None) -> None:
            asked.set()
            await gate.wait()

    async def scenario(cluster: InProcessCluster) -> None:
        await asked.wait()
        cluster.crash(holder(cluster, 0).id)
        while not ended:  # noqa: ASYNC110 (a thread tells)
            await asyncio.sleep(0.01)
        gate.set()
        assert (await cluster.result()).values == {0: 3, 1: 3}

    play(job(Holding), scenario, nodes=3)
    (error,) = ended
    assert isinstance(error, AttemptEnded) and "epoch.hold" not in str(error)
    assert as_expected(error)


def test_how_they_end_is_printed_of_nobody_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    errors = [AttemptEnded(held=True), AttemptEnded(), ValueError("mine")]
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    pass_ended_threads_over()
    for error in errors:
        threading.excepthook(threading.ExceptHookArgs((type(error), error, None, None)))
    printed = capsys.readouterr().err
    assert printed.count("AttemptEnded") == 1 and "keeps it open with epoch.hold" in printed and "mine" in printed

    async def unseen() -> None:
        for error in errors:
            asyncio.get_running_loop().call_exception_handler({"message": "never retrieved", "exception": error})

    with caplog.at_level(logging.ERROR):
        uvloop.run(unseen(), loop_factory=NodeLoop)
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == errors[1:]


def test_after_runs_of_several_threads_the_hook_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that did not end in the order in which they began left one more hook, until an error in a thread was a
    RecursionError."""
    told: list[object] = []

    def mine(args: Any) -> None:
        told.append(args.exc_value)

    def ends(error: BaseException) -> None:
        threading.excepthook(threading.ExceptHookArgs((type(error), error, None, None)))

    monkeypatch.setattr(threading, "excepthook", mine)
    error, first, second = ValueError("mine"), passing_ended_threads_over(), passing_ended_threads_over()
    first.__enter__()
    second.__enter__()
    ends(error)
    first.__exit__(None, None, None)
    ends(AttemptEnded(held=True))
    ends(error)
    second.__exit__(None, None, None)
    assert threading.excepthook is mine and told == [error, error]
    with passing_ended_threads_over():
        its_own = threading.excepthook = lambda args: told.append("its own")
        with passing_ended_threads_over():
            ends(error)
        assert threading.excepthook is its_own
    assert threading.excepthook is its_own and told[2:] == ["its own"]


def test_a_hook_that_users_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(args: Any) -> None: ...

    monkeypatch.setattr(threading, "excepthook", mine)
    pass_ended_threads_over()
    assert threading.excepthook is mine
