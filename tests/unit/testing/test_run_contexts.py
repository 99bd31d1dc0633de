"""What code sets in its context: in the driver for all tasks, in `setup` for the task, in a call for that call."""

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


def context() -> tuple[int, str, str, str]:
    errors = np.geterr()
    return decimal.getcontext().prec, errors["divide"], errors["over"], KNOWN.get()


def set_in_call() -> None:
    decimal.getcontext().prec = 5
    np.seterr(divide="ignore")
    KNOWN.set("something")


class Sets(tg.Task, state=["found"]):
    """Sets its context in `setup` and in some calls; looks at it in each hook, compute and handler."""

    def __init__(self) -> None:
        np.seterr(divide="raise")

    def setup(self) -> None:
        self.found: list[Any] = []
        decimal.getcontext().prec = 50 + self.task_id
        KNOWN.set(f"task {self.task_id}")

    async def asked(self) -> Any:
        await asyncio.sleep(0)
        return context()

    @tg.handles("plain")
    def plain(self, epoch: tg.Epoch, sender: int, payload: Any) -> Any:
        self.look()
        set_in_call()

    @tg.handles("coroutine", pure=True)
    async def coroutine(self, epoch: tg.Epoch, sender: int, payload: Any) -> Any:
        return await self.asked() == self.expected()

    def compose(self, epoch: tg.Epoch) -> None:
        self.look()
        epoch.processor(self.ask, outbound={"seen": self.task_id})
        epoch.processor(self.keep, inbound={"seen": self.task_id})

    def expected(self) -> tuple[int, str, str, str]:
        return 50 + self.task_id, "raise", "raise", f"task {self.task_id}"

    def look(self) -> None:
        assert context() == self.expected()

    async def ask(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.look()
        set_in_call()
        await asyncio.sleep(0)
        assert context() == (5, "ignore", "raise", "something") == await asyncio.create_task(self.asked())
        for to in range(self.tasks):
            await epoch.request(to, "plain")
            assert await epoch.request(to, "coroutine")
        outs.put("seen", 1)

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.found = [*self.found, context()]
        set_in_call()

    def result(self) -> Any:
        return {tuple(one) for one in (*self.found, context())} == {self.expected()}


@pytest.mark.parametrize("how", ["calm", "killed", "one process"])
def test_setup_sets_the_context_of_its_task(how: str) -> None:
    def run() -> Any:
        np.seterr(over="raise")  # as a driver does
        decimal.getcontext().prec = 9
        made = job(lambda _: Sets(), tasks=2, epochs=4)
        if how == "one process":
            return tg.run(made, nodes=0).values
        return tg.testing.run(made, kills={(0, 1): "sync", (1, 2): "done"} if how == "killed" else {}).values

    assert contextvars.Context().run(run) == {0: True, 1: True}


class SetsOne(tg.Task):
    """Sets one variable in `setup`, where the context is empty before."""

    def setup(self) -> None:
        KNOWN.set("something")

    def compose(self, epoch: tg.Epoch) -> None:
        assert KNOWN.get() == "something"

    def result(self) -> str:
        return KNOWN.get()


@pytest.mark.parametrize("nodes", [0, None])
def test_setup_sets_an_empty_context(nodes: int | None) -> None:
    def run() -> Any:
        made = job(lambda _: SetsOne(), tasks=2, epochs=1)
        return (tg.testing.run(made) if nodes is None else tg.run(made, nodes=nodes)).values

    assert contextvars.Context().run(run) == dict.fromkeys(range(2), "something")
