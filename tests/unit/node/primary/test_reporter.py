"""What a primary reports reaches the leader: at once where that is possible, patiently where it is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cluster_kit import Counting, job, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.primary.reporter import Reporter
from taskgraph.node.router import Router
from taskgraph.protocol.messages import Accepted, Reply, Report, Reports, Stamp
from taskgraph.protocol.records import PrimaryRecord
from taskgraph.protocol.view import Versioned


class _Keeper:
    """A view of nothing but task 0's primary."""

    def __init__(self) -> None:
        self.view = self
        self.stamp = Stamp(0, 0)
        self.generation_revision = 1
        self.primaries: dict[int, Versioned[PrimaryRecord]] = {}
        self._waits: list[tuple[asyncio.Future[None], Any]] = []

    def lead(self, revision: int) -> None:
        self.primaries[0] = Versioned(
            PrimaryRecord(node=f"n{revision}", term=revision, stateful=False), revision, revision
        )
        for future, predicate in self._waits:
            if not future.done() and predicate(self):
                future.set_result(None)

    def when(self, predicate: Any, *, structure: bool) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        assert structure
        self._waits.append((future, predicate))
        if predicate(self):
            future.set_result(None)
        return future


class _Node:
    """What a reporter asks of its node; calls are answered by the test."""

    class tracing:
        on = False

    class settings:
        call_s = 5.0
        epochs_ahead = 6  # three are enough for a message
        gather_s = 0.04

    class gathering:
        @staticmethod
        def seconds(ahead: int) -> float:
            return _Node.settings.gather_s

    def __init__(self) -> None:
        self.keeper = _Keeper()
        self.router = self
        self.leader: _Leader | None = None
        self.paused = False
        self.resumed = asyncio.Event()
        self.begun: list[tuple[Report | Reports, asyncio.Future[Reply]]] = []
        self.patient: list[Report | Reports] = []
        self.reachable = True

    def begin(self, task: int, message: Report | Reports, *, quiet: bool) -> asyncio.Future[Reply] | None:
        assert task == 0
        assert quiet
        if not self.reachable:
            return None
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.begun.append((message, reply))
        return reply

    async def to_primary(self, task: int, message: Any, *, timeout_s: float) -> Reply:
        assert task == 0
        self.patient.append(message())
        return Accepted(1)

    async def while_paused(self) -> None:
        if self.paused:
            await self.resumed.wait()


def _report(epoch: int, *, done: bool = True, ahead: bool = False) -> Report:
    return Report(Stamp(0, epoch), 3, 1, done=done, version=0, sent=0, received=0, ahead=ahead)


def _ahead(*epochs: int) -> tuple[Report, ...]:
    return tuple(_report(epoch, ahead=True) for epoch in epochs)


def _committed(node: _Node, reporter: Reporter, epoch: int) -> float:
    """A commit is seen: `epoch` is at work now. Returns when."""
    node.keeper.stamp = Stamp(0, epoch)
    reporter.forget(before=epoch)
    return asyncio.get_running_loop().time()


async def _until_sent(node: _Node, count: int = 1) -> float:
    """Returns when so many messages were sent, and when that was."""
    async with asyncio.timeout(30):
        while len(node.begun) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return asyncio.get_running_loop().time()


async def _turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def _started() -> tuple[_Node, Reporter, asyncio.Task[None]]:
    node = _Node()
    node.keeper.lead(1)
    reporter = Reporter(node)  # type: ignore[arg-type]
    running = asyncio.create_task(reporter.run())
    await _turns()
    return node, reporter, running


async def test_a_report_is_sent_once_and_from_where_it_is_made() -> None:
    node, reporter, running = await _started()
    reporter.set(_report(1))
    assert [report for report, _ in node.begun] == [_report(1)]
    node.begun[0][1].set_result(Accepted(1))
    await _turns()
    assert len(node.begun) == 1
    assert not node.patient
    running.cancel()


async def test_a_report_that_is_lost_is_told_patiently() -> None:
    node, reporter, running = await _started()
    reporter.set(_report(1))
    node.begun[0][1].set_exception(ConnectionResetError())
    await _turns()
    assert node.patient == [_report(1)]
    running.cancel()


async def test_what_is_on_its_way_is_not_told_a_second_time() -> None:
    node, reporter, running = await _started()
    reporter.set(_report(1))
    reporter._look.set()
    await _turns()
    assert not node.patient
    running.cancel()


async def test_where_nothing_can_be_sent_at_once_it_is_told_patiently() -> None:
    node, reporter, running = await _started()
    node.reachable = False
    reporter.set(_report(1))
    await _turns()
    assert node.patient == [_report(1)]
    running.cancel()


async def test_a_node_that_is_paused_says_nothing_until_it_resumes() -> None:
    node, reporter, running = await _started()
    node.paused = True
    reporter.set(_report(1))
    await _turns()
    assert not node.begun
    assert not node.patient
    node.paused = False
    node.resumed.set()
    await _turns()
    assert node.patient == [_report(1)]
    running.cancel()


async def test_a_new_leader_is_told_again() -> None:
    node, reporter, running = await _started()
    reporter.set(_report(1))
    node.begun[0][1].set_result(Accepted(1))
    await _turns()
    node.keeper.lead(2)
    await _turns()
    assert node.patient == [_report(1)]
    reporter.forget()
    node.keeper.lead(3)
    await _turns()
    assert node.patient == [_report(1)]  # there is nothing to tell
    running.cancel()


async def test_an_answer_for_an_earlier_report_of_the_epoch_does_not_count_for_the_next() -> None:
    node, reporter, running = await _started()
    reporter.set(_report(1, done=False))
    reporter.set(_report(1))
    await _turns()
    assert node.begun[0][1].cancelled(), "of no interest any more"
    assert not node.patient
    node.begun[1][1].set_exception(ConnectionResetError())
    await _turns()
    assert node.patient == [_report(1)]
    running.cancel()


async def test_a_new_leader_is_told_of_every_epoch_that_is_not_committed() -> None:
    node, reporter, running = await _started()
    for epoch in range(4):
        reporter.set(_report(epoch))
        node.begun[-1][1].set_result(Accepted(1))
    reporter.forget(before=2)
    node.keeper.lead(2)
    await _turns()
    assert node.patient == [Reports((_report(2), _report(3)))]
    running.cancel()


async def test_what_the_leader_says_nothing_against_is_forgotten_with_its_epoch() -> None:
    node, reporter, running = await _started()
    reporter.set(_report(1))
    reporter.forget(before=2)
    await _turns()
    assert node.begun[0][1].cancelled()
    assert not node.patient
    running.cancel()


async def test_of_epochs_ahead_several_are_gathered() -> None:
    node, reporter, running = await _started()
    for report in _ahead(1, 2):
        reporter.set(report)
    assert not node.begun
    reporter.set(*_ahead(3))
    assert [message for message, _ in node.begun] == [Reports(_ahead(1, 2, 3))]
    await _turns()
    assert not node.patient
    running.cancel()


async def test_a_task_that_may_be_less_far_ahead_gathers_less() -> None:
    node, reporter, running = await _started()
    reporter.gather_by(4)
    for epoch in (1, 2):
        reporter.set(*_ahead(epoch))
    assert [message for message, _ in node.begun] == [Reports(_ahead(1, 2))]
    reporter.gather_by(0)
    reporter.set(*_ahead(3))
    assert [message for message, _ in node.begun[1:]] == [*_ahead(3)]
    running.cancel()


async def test_what_was_gathered_does_not_wait_long() -> None:
    node, reporter, running = await _started()
    began = asyncio.get_running_loop().time()
    reporter.set(*_ahead(1))
    assert await _until_sent(node) > began + 0.9 * node.settings.gather_s / 2
    assert [message for message, _ in node.begun] == [*_ahead(1)]
    running.cancel()


async def test_nor_does_what_is_gathered_after_that_though_nothing_more_comes() -> None:
    node, reporter, running = await _started()
    for count in (1, 2, 3):
        reporter.set(*_ahead(count))
        assert len(node.begun) == count - 1
        await _until_sent(node, count)
    assert [message for message, _ in node.begun] == [*_ahead(1, 2, 3)]
    running.cancel()


async def test_a_report_that_somebody_may_wait_for_takes_with_it_what_was_gathered() -> None:
    node, reporter, running = await _started()
    reporter.set(*_ahead(0))
    assert [message for message, _ in node.begun] == [*_ahead(0)], "of the epoch at work"
    reporter.set(*_ahead(1))
    reporter.set(_report(2))
    assert [message for message, _ in node.begun[1:]] == [Reports((*_ahead(1), _report(2)))], "it does not go on"
    await asyncio.sleep(0.03)
    assert len(node.begun) == 2
    running.cancel()


async def test_what_was_gathered_is_there_shortly_before_the_leader_commits_again() -> None:
    """Also of the epoch at work, of which the leader commits nothing before."""
    node, reporter, running = await _started()
    reporter.set(*_ahead(2))
    committed = _committed(node, reporter, 2)
    reporter.set(*_ahead(3))
    await _turns()
    assert not node.begun
    waited = await _until_sent(node) - committed
    assert waited > 0.7 * node.settings.gather_s
    assert [message for message, _ in node.begun] == [Reports(_ahead(2, 3))]
    reporter.set(*_ahead(4))
    await _turns()
    assert len(node.begun) == 1, "it is for the commit after that"
    running.cancel()


async def test_every_commit_gathers_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Node.settings, "gather_s", 0.4)  # half of it is slept: a busy machine sleeps longer
    node, reporter, running = await _started()
    _committed(node, reporter, 1)
    reporter.set(*_ahead(1))
    await asyncio.sleep(0.5 * node.settings.gather_s)
    assert not node.begun
    committed = _committed(node, reporter, 1)
    waited = await _until_sent(node) - committed
    assert waited > 0.7 * node.settings.gather_s
    running.cancel()


async def test_where_a_commit_is_overdue_the_epoch_at_work_is_reported_at_once() -> None:
    node, reporter, running = await _started()
    _committed(node, reporter, 1)
    await asyncio.sleep(node.settings.gather_s)
    reporter.set(*_ahead(1))
    assert [message for message, _ in node.begun] == [*_ahead(1)]
    running.cancel()


async def test_after_a_takeover_the_epoch_at_work_is_reported_at_once() -> None:
    """The leader commits it as soon as all have reported."""
    node, reporter, running = await _started()
    _committed(node, reporter, 1)
    node.keeper.generation_revision += 1
    reporter.set(*_ahead(1))
    assert [message for message, _ in node.begun] == [*_ahead(1)]
    running.cancel()


async def test_in_another_attempt_the_epoch_at_work_is_reported_at_once() -> None:
    node, reporter, running = await _started()
    _committed(node, reporter, 1)
    reporter.forget()
    reporter.set(*_ahead(1))
    assert [message for message, _ in node.begun] == [*_ahead(1)]
    running.cancel()


async def test_what_is_forgotten_is_not_told_from_what_was_gathered() -> None:
    node, reporter, running = await _started()
    for report in _ahead(1, 2):
        reporter.set(report)
    reporter.forget()
    await asyncio.sleep(0.03)
    assert not node.begun
    running.cancel()


async def test_a_new_leader_is_told_what_was_gathered_for_another() -> None:
    node, reporter, running = await _started()
    for report in _ahead(1, 2):
        reporter.set(report)
    node.keeper.lead(2)
    await _turns()
    assert node.patient == [Reports(_ahead(1, 2))]
    running.cancel()


async def test_of_a_message_that_is_lost_all_that_is_not_committed_is_told_patiently() -> None:
    node, reporter, running = await _started()
    for report in _ahead(1, 2, 3):
        reporter.set(report)
    reporter.forget(before=2)
    assert not node.begun[0][1].done(), "two of them are of interest still"
    node.begun[0][1].set_exception(ConnectionResetError())
    await _turns()
    assert node.patient == [Reports(_ahead(2, 3))]
    running.cancel()


async def test_a_message_is_of_no_interest_when_none_of_it_is() -> None:
    node, reporter, running = await _started()
    for report in _ahead(1, 2, 3):
        reporter.set(report)
    reporter.forget(before=4)
    await _turns()
    assert node.begun[0][1].cancelled()
    assert not node.patient
    running.cancel()


async def test_a_node_that_is_paused_keeps_what_was_gathered() -> None:
    node, reporter, running = await _started()
    reporter.set(*_ahead(1))
    node.paused = True
    reporter.set(_report(2))
    await _turns()
    assert not node.begun
    node.paused = False
    node.resumed.set()
    await _turns()
    assert node.patient == [Reports((*_ahead(1), _report(2)))]
    running.cancel()


class _Leader:
    """The leader's role on this very node."""

    def __init__(self) -> None:
        self.takes = True
        self.took: list[Report] = []

    def report_now(self, report: Report) -> Accepted | None:
        if self.takes:
            self.took.append(report)
        return Accepted(1) if self.takes else None


async def _leading() -> tuple[_Node, _Leader, Reporter, asyncio.Task[None]]:
    node, leader = _Node(), _Leader()
    node.keeper.lead(1)
    node.leader = leader
    reporter = Reporter(node, leads=True)  # type: ignore[arg-type]
    running = asyncio.create_task(reporter.run())
    await _turns()
    return node, leader, reporter, running


async def test_the_leaders_own_task_tells_it_without_a_call() -> None:
    node, leader, reporter, running = await _leading()
    for report in (*_ahead(1, 2), _report(3)):
        reporter.set(report)
    await _turns()
    assert leader.took == [*_ahead(1, 2), _report(3)], "and nothing is gathered"
    assert not node.begun and not node.patient
    running.cancel()


async def test_what_a_leader_at_hand_does_not_take_goes_its_way() -> None:
    """Its view has not come so far, or it does not lead yet, or its node is paused."""
    node, leader, reporter, running = await _leading()
    leader.takes = False
    reporter.set(_report(1))
    assert [report for report, _ in node.begun] == [_report(1)]
    node.leader = None
    reporter.set(_report(2))
    assert [report for report, _ in node.begun] == [_report(1), _report(2)]
    node.leader, leader.takes, node.paused = leader, True, True
    reporter.set(_report(3))
    await _turns()
    assert not leader.took and not node.patient
    node.paused = False
    node.resumed.set()
    await _turns()
    assert node.patient == [_report(3)]
    running.cancel()


async def test_whoever_leads_after_it_is_told_again_what_it_took() -> None:
    node, leader, reporter, running = await _leading()
    reporter.set(_report(1))
    node.leader = None
    node.keeper.lead(2)
    await _turns()
    assert leader.took == [_report(1)] and node.patient == [_report(1)]
    running.cancel()


async def test_what_the_leader_says_that_it_lacks_is_told_again_with_all_that_was_told_since() -> None:
    node, reporter, running = await _started()
    for epoch in (1, 2):
        reporter.set(_report(epoch))
    await _turns()
    reporter.tell_again(0)  # nothing is known of it here
    await _turns()
    assert not node.patient
    reporter.tell_again(1)
    await _turns()
    assert node.patient == [Reports((_report(1), _report(2)))]
    assert all(reply.cancelled() for _, reply in node.begun), "nobody waits for what was lost"
    running.cancel()


class _Flagged(Counting, state=["total"]):
    """Its tasks are idle before they are done."""

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.flag, outbound={"x": 1 - self.task_id})
        epoch.processor(self.count, inbound={"x": 1 - self.task_id})

    async def flag(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        epoch.flag([1 - self.task_id], 1)
        outs.put("x", 1)

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: int) -> None:
        pass


@pytest.mark.parametrize("done", [False, True])
def test_a_report_that_is_lost_on_its_way_is_told_again(done: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its session stands, so nothing told that it was: the job waited for ever, and said of nothing."""
    lost: list[Report] = []
    begin = Router.begin

    def losing(router: Router, task: int, message: Any, *, quiet: bool = False) -> asyncio.Future[Reply] | None:
        if quiet and not lost and isinstance(message, Report) and message.stamp.epoch == 1 and message.done is done:
            lost.append(message)
            return asyncio.get_running_loop().create_future()
        return begin(router, task, message, quiet=quiet)

    monkeypatch.setattr(Router, "begin", losing)

    async def scenario(cluster: InProcessCluster) -> None:
        assert (await cluster.result(timeout_s=500)).values[0] == 3

    play(job(_Flagged), scenario, nodes=2)
    assert lost
