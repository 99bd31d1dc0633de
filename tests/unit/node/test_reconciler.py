"""When a node looks through all tasks again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cluster_kit import stand_still

from taskgraph.node.reconciler import Reconciler
from taskgraph.testing.clock import FastForwardLoop


class Looking(Reconciler):
    """Its looks take time and find nothing."""

    def __init__(self, took_s: float) -> None:
        self.looks, self.took_s = 0, took_s
        self.changed, now = asyncio.Event(), asyncio.get_running_loop().time
        node, roles, other = SimpleNamespace(now=now), SimpleNamespace(changed=self.changed), cast(Any, None)
        super().__init__(
            cast(Any, node), cast(Any, roles), suspicion=other, fatal_code=other, takeovers=other, notices=other
        )

    def reconcile(self) -> None:
        self.looks += 1
        stand_still(self.took_s)

    async def change(self) -> None:
        self.changed.set()
        for _ in range(5):
            await asyncio.sleep(0)


def while_it_runs(took_s: float, scenario: Callable[[Looking], Awaitable[None]]) -> None:
    """Runs a scenario on a clock that stands while code runs."""

    async def running() -> None:
        reconciler = Looking(took_s)
        task = asyncio.create_task(reconciler.run())
        await asyncio.sleep(0)
        await scenario(reconciler)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with asyncio.Runner(loop_factory=FastForwardLoop) as runner:
        runner.run(running())


def test_each_change_is_seen_at_once() -> None:
    async def scenario(running: Looking) -> None:
        for looks in range(1, 20):
            assert running.looks == looks
            await running.change()

    while_it_runs(0.0, scenario)


@pytest.mark.parametrize(("took_s", "rest_s"), [(0.02, 0.06), (3600.0, 1.0)])
def test_changes_after_long_look_are_batched(took_s: float, rest_s: float) -> None:
    async def scenario(running: Looking) -> None:
        for _ in range(20):
            await running.change()
        assert running.looks == 1, "hundreds of tasks are taken over, and each is a change of its own"
        await asyncio.sleep(rest_s - 0.01)
        assert running.looks == 1
        await asyncio.sleep(0.02)
        assert running.looks == 2
        stand_still(1.5)  # longer than any pause
        await running.change()
        assert running.looks == 3

    while_it_runs(took_s, scenario)


def test_looks_every_second_without_change() -> None:
    async def scenario(running: Looking) -> None:
        await asyncio.sleep(0.9)
        assert running.looks == 1
        await asyncio.sleep(0.2)
        assert running.looks == 2

    while_it_runs(0.0, scenario)
