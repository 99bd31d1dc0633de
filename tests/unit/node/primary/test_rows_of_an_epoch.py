"""What the tasks reported in an epoch, as the leader tells it for the boundary of task 0: all of it, or nothing yet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from cluster_kit import Counting, play

import taskgraph as tg
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node.primary.leader import LeaderRole
from taskgraph.protocol.messages import Report, Reports, Stamp

FIRST = Stamp(1, 0)
NEXT = Stamp(1, 1)
ROWS = {0: {"a": 1.0}, 1: {"b": 2.0}}


def report(task: int, stamp: Stamp = FIRST, **options: Any) -> Report:
    given = {"term": 1, "done": True, "version": 0, "sent": 0, "received": 0, "numbers": ROWS[task], **options}
    return Report(stamp, task, **given)


def asked(check: Callable[[LeaderRole], Awaitable[None]]) -> None:
    """Calls `check` with a leader of its own, on the node of task 0, at the beginning of the job."""

    async def begin(cluster: InProcessCluster, node: str) -> None:
        primary = cluster.node(node).roles.primaries[0]
        await check(LeaderRole(cluster.node(node), primary))
        checked.set()

    async def scenario(cluster: InProcessCluster) -> None:
        await checked.wait()

    checked = asyncio.Event()
    job = tg.Job(tasks=2, epochs=3, builder=lambda _: Counting(), settings=tg.Settings(epochs_ahead=3))
    play(job, scenario, nodes=1, stages={("compose", 0, 0): begin})


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
