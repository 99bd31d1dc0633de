"""What the tasks reported in an epoch, as the leader tells it for the boundary of task 0: all of it, or nothing yet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster_kit import Counting, crashes, holder, job, play, told
from msgspec import structs

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.primary.leader import LeaderRole
from taskgraph.node.reports import ReportLog
from taskgraph.protocol.commit import Commit
from taskgraph.protocol.kv import Txn
from taskgraph.protocol.messages import Report, Reports, Stamp

FIRST = Stamp(1, 0)
NEXT = Stamp(1, 1)
ROWS = {0: {"a": 1.0}, 1: {"b": 2.0}}


def report(task: int, stamp: Stamp = FIRST, **options: Any) -> Report:
    given = {"term": 1, "done": True, "version": 0, "sent": 0, "received": 0, "numbers": ROWS[task], **options}
    return Report(stamp, task, **given)


def asked(check: Callable[[LeaderRole], Awaitable[None]], *, epoch: int = 0) -> None:
    """Calls `check` with a leader of its own, on the node of task 0, at the beginning of an epoch.

    Args:
        epoch: in a later one than the first nobody is ahead of the last commit.
    """

    async def begin(cluster: InProcessCluster, node: str) -> None:
        primary = cluster.node(node).roles.primaries[0]
        try:
            await check(LeaderRole(cluster.node(node), primary))
        except AssertionError as error:
            wrong.append(error)
        checked.set()

    async def scenario(cluster: InProcessCluster) -> None:
        await checked.wait()
        for error in wrong:
            raise error

    checked, wrong = asyncio.Event(), list[AssertionError]()
    settings = tg.Settings(epochs_ahead=0 if epoch else 3)
    made = tg.Job(tasks=2, epochs=3, builder=lambda _: Counting(), settings=settings)
    play(made, scenario, nodes=1, stages={("compose", 0, epoch): begin})


def test_a_task_that_is_only_idle_has_not_reported_its_numbers() -> None:
    async def check(role: LeaderRole) -> None:
        role.report_now(report(0))
        role.report_now(report(1, done=False, numbers={}))
        assert role.rows_now(NEXT, {}) is None
        role.report_now(report(1))
        assert role.rows_now(NEXT, {}) == ROWS

    asked(check)


def test_what_was_reported_in_an_attempt_is_not_that_of_another() -> None:
    async def check(role: LeaderRole) -> None:
        role.report_now(Reports((report(0), report(1))))
        assert role.rows_now(NEXT, {}) == ROWS
        assert role.rows_now(Stamp(2, 1), {}) is None

    asked(check)


def test_whoever_waits_is_told_of_a_message_part_of_which_is_void() -> None:
    async def check(role: LeaderRole) -> None:
        role.report_now(report(0))
        waits = asyncio.ensure_future(role.rows_before(NEXT, {}))
        await asyncio.sleep(0)
        role.report_now(Reports((report(1, Stamp(0, 0)), report(1))))
        async with asyncio.timeout(1.0):
            assert await waits == ROWS

    asked(check)


def test_after_a_roll_back_the_epochs_that_come_again_are_waited_for() -> None:
    """They were committed once: the log is asked for those, and no longer has them."""

    async def check(role: LeaderRole) -> None:
        role._committed = 5  # as it was before that
        assert role.rows_now(NEXT, {}) is None

    asked(check)


def test_a_new_leader_takes_what_everybody_says_of_the_epoch_before() -> None:
    """The one before it committed that, and died before it told anybody."""

    async def check(role: LeaderRole) -> None:
        begun = {"done": False, "numbers": {}}
        role.report_now(report(0, NEXT, **begun))
        assert role.rows_now(NEXT, ROWS[0]) is None
        role.report_now(report(1, NEXT, previous=ROWS[1], **begun))
        assert role.rows_now(NEXT, ROWS[0]) == ROWS

    asked(check, epoch=1)


def test_what_was_undone_before_its_commit_was_known_is_not_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(role: LeaderRole) -> None:
        view, log = role._node.keeper.view, role._primary.replica.log
        known = view.epoch
        assert known is not None

        async def committed_and_undone(txn: Txn, *, key: str, writer: str) -> int:
            view.epoch = replace(known, record=structs.replace(known.record, attempt=2, lineage=2))
            return view.revision

        role.report_now(Reports((report(0), report(1))))
        with monkeypatch.context() as patch:
            patch.setattr(role._node, "transact", committed_and_undone)
            await role._commit(Commit(finished=False))
        view.epoch = known
        assert not log and role._committed == 0

    asked(check)


def test_that_reports_are_thinned_is_told_whoever_added_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit of several epochs may be read before its answer comes: most are in the log then, out of boundaries."""

    async def check(role: LeaderRole) -> None:
        view, told = role._node.keeper.view, []

        async def committed(txn: Txn, *, key: str, writer: str) -> int:
            patch.setattr(ReportLog, "thinned", True)
            return view.revision

        with monkeypatch.context() as patch:
            patch.setattr(role._node, "transact", committed)
            patch.setattr(role._node.events, "emit", lambda kind, *_, **__: told.append(kind))
            for _ in range(2):
                role.report_now(Reports((report(0), report(1))))
                await role._commit(Commit(finished=False))
        assert told.count("reports thinned") == 1

    asked(check)


def test_who_takes_over_the_leaders_task_and_another_one_writes_a_checkpoint_of_both(tmp_path: Path) -> None:
    """Its leader was not told yet what was reported: the other task waited for that, and was lacking in it itself."""

    async def dies_with_the_other(cluster: InProcessCluster, node: str) -> None:
        for primary in {holder(cluster, task).id for task in (0, 1)}:
            cluster.crash(primary)
        await asyncio.Event().wait()

    async def scenario(cluster: InProcessCluster) -> None:
        assert (await cluster.result()).values == {0: 6, 1: 6}
        assert crashes(cluster) == 2 and len(told(cluster, "takeover")) == 2

    made = job(Counting, epochs=6, backups=2, checkpoint=f"file://{tmp_path}", checkpoint_every=1)
    play(made, scenario, nodes=3, stages={("committed", 0, 2): dies_with_the_other})
