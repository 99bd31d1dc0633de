"""Handlers that run for long, while the sums of idle tasks differ."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cluster_kit import IN_STEP, play, told

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.primary.audits import AuditFindings
from taskgraph.protocol.messages import LedgerEntry, Report, Stamp
from taskgraph.protocol.sums import encode_sum, entry_hash
from taskgraph.protocol.sums import total as mod_sum

S = Stamp(1, 0)
LONG_S = 5.0


class Slow(tg.Task, state=["taken"]):
    """The hub flags all others, whose handlers take long."""

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
def test_joining_node_restarts_no_handler(settings: tg.Settings) -> None:
    job = tg.Job(tasks=5, epochs=8, builder=lambda _: Slow(), topology=tg.star(), settings=settings)

    async def scenario(cluster: InProcessCluster) -> tuple[tg.JobResult, InProcessCluster]:
        await cluster.nodes[0].keeper.wait_until(lambda view: view.stamp is not None and view.stamp.epoch == 2)
        await cluster.start(1)
        return await cluster.result(), cluster

    result, cluster = play(job, scenario, nodes=2)
    assert told(cluster, "hand-over")
    assert told(cluster, "restart") == [] and result.restarts == 0
    assert result.values == {0: 0} | dict.fromkeys(range(1, 5), 8)


# -- what ledgers tell ----------------------------------------------------------------------------


def sent(to: int, name: str) -> LedgerEntry:
    return LedgerEntry(True, "flag", 1 - to, to, name, b"")


def received(by: int, name: str) -> LedgerEntry:
    return LedgerEntry(False, "flag", 1 - by, by, name, b"")


def found(*pages: tuple[LedgerEntry, ...], moved: int | None = None) -> AuditFindings:
    """Findings from idle tasks; all but `moved` show the ledger that they reported."""

    def total(page: tuple[LedgerEntry, ...], side: bool) -> bytes:
        return encode_sum(
            mod_sum(entry_hash(e.kind, e.sender, e.receiver, e.name, e.digest) for e in page if e.sent is side)
        )

    then = [() if task == moved else page for task, page in enumerate(pages)]
    reports = {
        task: Report(S, task, 1, False, 1, total(page, True), total(page, False)) for task, page in enumerate(then)
    }
    return AuditFindings(reports, dict(enumerate(pages)))


def test_received_item_agrees_during_work() -> None:
    findings = found((sent(1, "x"),), (received(1, "x"),), moved=1)
    assert (findings.behind, findings.differing, findings.disagreements) == ((1,), [], [])


def test_uncounted_item_agrees_during_work() -> None:
    findings = found((sent(1, "x"),), (received(1, "y"),), moved=1)
    assert findings.behind == (1,)
    assert findings.differing == ["task 1 counted flag 'y' from task 0, which did not send it"]
    assert findings.disagreements == []  # asked for at another moment it may have sent it


def test_unsent_item_differs() -> None:
    pages = (sent(1, "x"), received(0, "z")), (received(1, "y"), sent(0, "v"))
    never_sent = [
        "task 1 counted flag 'y' from task 0, which did not send it",
        "task 0 counted flag 'z' from task 1, which did not send it",
    ]
    findings = found(*pages, moved=0)
    assert findings.differing == ["task 0 sent flag 'x' to task 1, which did not count it", *never_sent]
    reports = {task: Report(S, task, 1, False, 1, encode_sum(0), encode_sum(0)) for task in range(2)}
    findings = AuditFindings(reports, dict(enumerate(pages)))
    assert findings.behind == (0, 1) and findings.disagreements == []
    assert findings.differing == never_sent  # what is sent, and not counted, may be on its way


def test_pending_request_agrees() -> None:
    asked = LedgerEntry(False, "request", 0, 1, "add/1", b"")
    pages = (sent(1, "x"),), (received(1, "x"), asked)
    assert found(*pages, moved=0).differing == []
    assert found(*pages).differing == ["task 1 counted request 'add/1' from task 0, which did not send it"]


def test_idle_tasks_differ_and_disagree() -> None:
    findings = found((sent(1, "x"),), ())
    assert findings.behind == ()
    assert findings.differing == findings.disagreements == ["task 0 sent flag 'x' to task 1, which did not count it"]
