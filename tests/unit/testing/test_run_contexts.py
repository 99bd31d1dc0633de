"""What code sets in its context holds until it returns: results depend neither on order nor on who shares a process."""

from __future__ import annotations

import asyncio
import contextvars
import decimal
from typing import Any

import numpy as np
import pytest
from jobs_kit import job

import taskgraph as tg

KNOWN: contextvars.ContextVar[str] = contextvars.ContextVar("KNOWN", default="nothing")
_SET = decimal.Context(prec=9)


def precise() -> tuple[int, str, str]:
    return decimal.getcontext().prec, np.geterr()["divide"], KNOWN.get()


def leave() -> None:
    decimal.getcontext().prec = 5
    np.seterr(divide="raise")
    KNOWN.set("something")


class Sets(tg.Task, state=["found"]):
    """Task 0 sets in its first epoch; both look, in each hook, and in handlers that are called from where it is set."""

    def setup(self) -> None:
        self.found: list[Any] = []
        leave()

    async def asked(self) -> Any:
        await asyncio.sleep(0)
        return precise()

    @tg.handles("plain")
    def plain(self, epoch: tg.Epoch, sender: int, payload: Any) -> Any:
        return precise()

    @tg.handles("coroutine", pure=True)
    async def coroutine(self, epoch: tg.Epoch, sender: int, payload: Any) -> Any:
        return await self.asked()

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.ask, outbound={"seen": self.task_id})
        epoch.processor(self.keep, inbound={"seen": self.task_id})

    async def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        seen = [precise(), await self.asked()]
        leave()
        await asyncio.sleep(0)
        assert precise() == (5, "raise", "something") == await asyncio.create_task(self.asked())
        for method in ("plain", "coroutine"):
            seen += [await epoch.request(to, method) for to in range(epoch.number % 2 + 1)]
        outs.put("seen", seen)

    async def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.found = [*self.found, *ins["seen"], precise()]
        leave()

    def result(self) -> Any:
        return sorted({tuple(one) for one in (*self.found, precise())})


@pytest.mark.parametrize("how", ["calm", "killed", "one process"])
def test_each_call_begins_as_if_nothing_was_set(how: str) -> None:
    def run() -> Any:
        context, known = decimal.getcontext().copy(), np.geterr()
        decimal.setcontext(_SET.copy())
        np.seterr(divide="ignore")
        try:
            made = job(Sets, tasks=2, epochs=4)
            if how == "one process":
                return tg.run(made, nodes=0).values
            return tg.testing.run(made, kills={(0, 1): "sync", (1, 2): "done"} if how == "killed" else {}).values
        finally:
            decimal.setcontext(context)
            np.seterr(**known)

    assert run() == {task: [(decimal.DefaultContext.prec, "warn", "nothing")] for task in range(2)}
