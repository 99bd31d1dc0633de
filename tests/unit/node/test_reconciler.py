"""When a node looks through all tasks again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from taskgraph.node.reconciler import Reconciler


class Looking(Reconciler):
    """Its looks take a time of their own, and find nothing."""

    def __init__(self, took_s: float) -> None:
        self.looks, self.at, self.took_s = 0, 0.0, took_s
        self.changed, self.again = asyncio.Event(), asyncio.Event()
        node, roles, other = (
            SimpleNamespace(now=lambda: self.at),
            SimpleNamespace(changed=self.changed),
            cast(Any, None),
        )
        super().__init__(
            cast(Any, node), cast(Any, roles), suspicion=other, fatal_code=other, takeovers=other, noticing=other
        )

    def reconcile(self) -> None:
        self.looks += 1
        self.at += self.took_s
        if self.looks > 1:
            self.again.set()

    async def change(self) -> None:
        self.changed.set()
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def running(request: pytest.FixtureRequest) -> Any:
    reconciler = Looking(request.param)
    task = asyncio.create_task(reconciler.run())
    await asyncio.sleep(0)
    yield reconciler
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("running", [0.0], indirect=True)
async def test_each_change_is_looked_at_at_once(running: Looking) -> None:
    for looks in range(1, 20):
        assert running.looks == looks
        await running.change()


@pytest.mark.parametrize("running", [0.02, 3600.0], indirect=True)
async def test_changes_that_come_soon_after_a_long_look_are_looked_at_together(running: Looking) -> None:
    for _ in range(20):
        await running.change()
    assert running.looks == 1, "hundreds of tasks are taken over, and each is a change of its own"
    async with asyncio.timeout(10):
        await running.again.wait()
    assert running.looks == 2
    running.at += 1.0  # it has rested
    await running.change()
    assert running.looks == 3
