"""Handlers that are at work for long, where sums of idle tasks differ for as long, and a primary was replaced."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_kit import IN_STEP, die, holder, play, told

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.primary import audits, leader
from taskgraph.node.primary.audits import Findings
from taskgraph.protocol.commit import DIFFERENTLY
from taskgraph.protocol.messages import LedgerEntry, Report, Stamp
from taskgraph.protocol.sums import identity

S = Stamp(1, 0)
LONG_S = 5.0


class Slow(tg.Task, state=["taken"]):
    """The hub flags all others, and what they do with that takes long."""

    def setup(self) -> None:
        self.taken = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.scratch.taken = 0
        if self.task_id == 0:
            epoch.flag("spokes", "go")
        epoch.processor(self.count)

    async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
        await asyncio.sleep(LONG_S)
        epoch.scratch.taken += 1

    def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.taken += epoch.scratch.taken

    def result(self) -> int:
        return self.taken


@pytest.mark.parametrize("settings", [IN_STEP, tg.Settings()])
def test_no_handler_is_begun_again_because_a_node_joined(settings: tg.Settings) -> None:
    job = tg.Job(tasks=5, epochs=8, builder=lambda _: Slow(), topology=tg.star(), settings=settings)

    async def scenario(cluster: InProcessCluster) -> tuple[tg.JobResult, InProcessCluster]:
        await cluster.nodes[0].keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch == 2)
        await cluster.start(1)
        return await cluster.result(), cluster

    result, cluster = play(job, scenario, nodes=2)
    assert told(cluster, "hand-over")
    assert told(cluster, "restart") == [] and result.restarts == 0
    assert result.values == {0: 0} | dict.fromkeys(range(1, 5), 8)


@pytest.mark.parametrize("joins", [False, True])
def test_ledgers_are_asked_for_less_often_the_longer_a_handler_is_at_work(
    monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    """All tasks were, twice a second: with 300 of them that took 8 % of a core, for hours."""
    asked: list[float] = []

    async def audit(*args: Any) -> Findings:
        asked.append(asyncio.get_running_loop().time())
        return await audits.audit(*args)

    monkeypatch.setattr(leader, "audits", SimpleNamespace(audit=audit))
    monkeypatch.setitem(globals(), "LONG_S", 200.0)
    job = tg.Job(tasks=5, epochs=1, builder=lambda _: Slow(), topology=tg.star(), settings=IN_STEP)

    async def scenario(cluster: InProcessCluster) -> float:
        if joins:
            await asyncio.sleep(100.0)
            await cluster.start(1)
        await cluster.result()
        return asyncio.get_running_loop().time()

    ended = play(job, scenario, nodes=2)
    pauses = [later - before for before, later in itertools.pairwise(asked)]
    assert 35 <= len(asked) < 80
    assert min(pauses) > 0.4 and max(pauses) < 6.5 and ended - asked[-1] < 6.5


class Pairs(tg.Task, state=["pairs"]):
    """Task 0 waits until both others have flagged it the same word. Each primary of task 1 has a word of its own."""

    words: list[str]
    flagged: asyncio.Event

    def setup(self) -> None:
        self.pairs = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.scratch.came = {}
        if self.task_id == 1:
            epoch.processor(self.begin, outbound={"begun": "own"})
            epoch.processor(self.count, inbound={"begun": "own"})
        else:
            epoch.processor(self.count)

    async def begin(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await asyncio.sleep(1)  # the others are idle by then
        word = self.words.pop(0) if self.words else "last"
        epoch.flag("first", word)
        if word == "lost":
            await asyncio.sleep(1)  # it was taken by then
            self.flagged.set()
            await asyncio.sleep(1000)
        epoch.flag("third", word)
        outs.put("begun", word)

    async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
        if self.task_id == 2:
            epoch.flag("first", meta)
        elif epoch.scratch.came.setdefault(meta, other := asyncio.Event()) is other:
            await other.wait()
        else:
            epoch.scratch.came[meta].set()

    def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.pairs += len(epoch.scratch.came)

    def result(self) -> int:
        return self.pairs


class Watched(Pairs, state=["pairs"]):
    """And task 1 is at work until task 0 has all pairs."""

    def compose(self, epoch: tg.Epoch) -> None:
        super().compose(epoch)
        epoch.scratch.over = asyncio.Event()

    async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
        if self.task_id == 1:
            if meta == "watch":
                await epoch.scratch.over.wait()
            else:
                epoch.scratch.over.set()
            return
        await super().on_flag(epoch, sender, meta)
        if self.task_id == 2:
            await asyncio.sleep(1)  # task 1 is idle by then
            epoch.flag("second", "watch")
        elif all(other.is_set() for other in epoch.scratch.came.values()):
            epoch.flag("second", "over")


@pytest.mark.parametrize("waiting", [Pairs, Watched])
def test_handlers_that_wait_for_what_a_lost_primary_would_have_sent_are_begun_again(waiting: type[Pairs]) -> None:
    """Of those that are watched both ends of the edge that differs moved on, and will not report again."""

    class Fresh(waiting, state=["pairs"]):  # type: ignore[misc, valid-type]
        words, flagged = ["lost"], asyncio.Event()

    links = {"own": lambda i, n, e: (i,)} | {
        name: lambda i, n, e, to=to: (to,) for to, name in enumerate(("first", "second", "third"))
    }
    job = tg.Job(tasks=3, epochs=2, builder=lambda _: Fresh(), topology=links, settings=IN_STEP)

    async def scenario(cluster: InProcessCluster) -> tuple[tg.JobResult, InProcessCluster]:
        await Fresh.flagged.wait()
        lost = holder(cluster, 1)
        assert lost not in (holder(cluster, 0), holder(cluster, 2))
        die(cluster, lost.id)
        return await cluster.result(), cluster

    result, cluster = play(job, scenario, nodes=3)
    assert [text.partition(": ")[2][:40] for text in told(cluster, "restart")] == [DIFFERENTLY[:40]]
    assert result.values == {0: 2, 1: 0, 2: 0}


class Late(tg.Task, state=["taken"]):
    """Task 1 is idle when it takes a flag, and then at work for long."""

    def setup(self) -> None:
        self.taken = 0

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id == 0:
            epoch.flag("first", "go")
        epoch.processor(self.count)

    async def on_flag(self, epoch: tg.Epoch, sender: int, meta: Any) -> None:
        await asyncio.sleep(2 if self.task_id == 0 else 100)
        if self.task_id == 0:
            epoch.flag("second", "go")

    def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.taken += 1

    def result(self) -> int:
        return self.taken


def test_large_ledgers_are_asked_for_the_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice a second those of 300 tasks that all send to all kept the leader's node from renewing its lease."""
    audit, audits = leader.audits.audit, []

    async def counted(*args: Any) -> Findings:
        found = await audit(*args)
        audits.append(found)
        found.entries = 400_000
        return found

    monkeypatch.setattr(leader.audits, "audit", counted)
    links = {"first": lambda i, n, e: (0,), "second": lambda i, n, e: (1,)}
    job = tg.Job(tasks=2, epochs=1, builder=lambda _: Late(), topology=links, settings=IN_STEP)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        return await cluster.result()

    assert play(job, scenario, nodes=2).values == {0: 1, 1: 1}
    assert 5 <= len(audits) <= 11, "of 100 s"


# -- what ledgers tell ----------------------------------------------------------------------------


def sent(to: int, name: str) -> LedgerEntry:
    return LedgerEntry(True, "flag", 1 - to, to, name, b"")


def received(by: int, name: str) -> LedgerEntry:
    return LedgerEntry(False, "flag", 1 - by, by, name, b"")


def found(*pages: tuple[LedgerEntry, ...], moved: int | None = None) -> Findings:
    """Of tasks that are idle, all but `moved` with the ledger they reported."""

    def total(page: tuple[LedgerEntry, ...], side: bool) -> int:
        return sum(identity(e.kind, e.sender, e.receiver, e.name, e.digest) for e in page if e.sent is side)

    reports = {
        task: Report(S, task, 1, False, 1, *((0, 0) if task == moved else (total(page, True), total(page, False))))
        for task, page in enumerate(pages)
    }
    return Findings(reports, dict(enumerate(pages)))


def test_what_a_task_at_work_took_of_one_that_has_sent_it_does_not_differ() -> None:
    findings = found((sent(1, "x"),), (received(1, "x"),), moved=1)
    assert (findings.behind, findings.differing, findings.disagreements) == ((1,), [], [])


def test_what_a_task_at_work_may_still_count_does_not_differ() -> None:
    findings = found((sent(1, "x"),), (received(1, "y"),), moved=1)
    assert findings.behind == (1,)
    assert findings.differing == ["task 1 counted flag 'y' from task 0, which did not send it"]
    assert findings.disagreements == []  # asked for at another moment it may have sent it


def test_what_came_from_a_task_at_work_that_did_not_send_it_differs() -> None:
    pages = (sent(1, "x"), received(0, "z")), (received(1, "y"), sent(0, "v"))
    never_sent = [
        "task 1 counted flag 'y' from task 0, which did not send it",
        "task 0 counted flag 'z' from task 1, which did not send it",
    ]
    findings = found(*pages, moved=0)
    assert findings.differing == ["task 0 sent flag 'x' to task 1, which did not count it", *never_sent]
    reports = {task: Report(S, task, 1, False, 1, 0, 0) for task in range(2)}
    findings = Findings(reports, dict(enumerate(pages)))
    assert findings.behind == (0, 1) and findings.disagreements == []
    assert findings.differing == never_sent  # what is sent, and not counted, may be on its way


def test_a_request_that_a_task_at_work_waits_for_does_not_differ() -> None:
    asked = LedgerEntry(False, "request", 0, 1, "add/1", b"")
    pages = (sent(1, "x"),), (received(1, "x"), asked)
    assert found(*pages, moved=0).differing == []
    assert found(*pages).differing == ["task 1 counted request 'add/1' from task 0, which did not send it"]


def test_what_nobody_is_at_work_with_differs_and_disagrees() -> None:
    findings = found((sent(1, "x"),), ())
    assert findings.behind == ()
    assert findings.differing == findings.disagreements == ["task 0 sent flag 'x' to task 1, which did not count it"]
