"""A job that keeps a ledger: every task says of every item what it was, from whom, in which epoch, and in what order.

Items go down and up a tree, and round a ring that is another one in every epoch. In `Talking`, flags and requests go
round it, too; in `Flying`, several epochs are worked on at a time. Whoever consumed an item twice, missed one, or took
them in another order has another ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import taskgraph as tg


def following(task: int, tasks: int, epoch: int) -> list[int]:
    return [(task + 1 + epoch % (tasks - 1)) % tasks]


def preceding(task: int, tasks: int, epoch: int) -> list[int]:
    return [(task - 1 - epoch % (tasks - 1)) % tasks]


TOPOLOGY = tg.tree() | {"following": following, "preceding": preceding}


class Ledgered(tg.Task, state=["theta", "ledger", "names", "consumed", "next"]):
    """`ledger` is of everything consumed; `names` of (epoch, producer, tag) alone, which can be told beforehand."""

    pace_s = 0.0
    finish = ""
    block = ""
    ballast = 0

    def setup(self) -> None:
        self.theta = np.random.default_rng(self.task_id).normal(size=16)
        self.ledger = self.names = b""
        self.consumed = self.next = 0

    def compose(self, epoch: tg.Epoch) -> None:
        theta = {"theta": "parents"} if self.task_id else {}
        epoch.processor(self.down, inbound=theta, outbound={"theta": "children"})
        epoch.processor(self.around, outbound={"hello": "following"})
        if self.task_id:
            epoch.processor(self.up, inbound={**theta, "grad": "children"}, outbound={"grad": "parents"})
        epoch.processor(self.settle, inbound={**theta, "grad": "children", "hello": "preceding"})

    async def down(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if not self.task_id:
            await asyncio.sleep(self.pace_s)
            self._block()
            if self.finish and os.path.exists(self.finish):  # noqa: ASYNC240
                epoch.finish()
        outs.put("theta", ins["theta"] if self.task_id else self.theta)

    def _block(self) -> None:
        """User code as it should not be: an `async def` that keeps the event loop, once, as long as a file is there."""
        blocks = f"{self.block}-{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.block, blocks)
        while os.path.exists(blocks):
            time.sleep(0.01)

    async def around(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("hello", np.resize(self.theta * (1 + self.task_id), 16 + self.ballast))

    def up(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("grad", np.sin(ins["theta"]) + self.theta + sum(ins.all("grad").values()))

    def settle(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if epoch.number != self.next:
            raise AssertionError(f"task {self.task_id}: epoch {epoch.number} on a state that is of epoch {self.next}")
        self.next = epoch.number + 1
        for tag in ("theta", "grad", "hello"):
            if tag in ins:
                for producer, item in ins.all(tag).items():
                    self._consume(epoch.number, producer, tag, np.asarray(item).tobytes())
                    self.theta = self.theta + 1e-3 * np.cos(np.asarray(item)[:16])
        for tag, sender, what in self.messages(epoch):
            self._consume(epoch.number, sender, tag, np.float64(what).tobytes())
            self.theta = self.theta + 1e-3 * np.cos(what)
        self.theta = self.theta + epoch.rng.normal(scale=1e-3, size=16)
        epoch.report(size=float(np.abs(self.theta).sum()))

    def messages(self, epoch: tg.Epoch) -> list[tuple[str, int, float]]:
        """(what, from whom, content) of what came beside items."""
        return []

    def _consume(self, epoch: int, producer: int, tag: str, content: bytes) -> None:
        name = f"{epoch}/{producer}/{tag}".encode()
        self.names = xxhash.xxh3_128_digest(self.names + name)
        self.ledger = xxhash.xxh3_128_digest(self.ledger + name + content)
        self.consumed += 1

    def result(self) -> dict[str, Any]:
        return shown(self.snapshot())


def shown(state: dict[str, Any]) -> dict[str, Any]:
    """A task's state, as its result tells it."""
    return {**state, "ledger": state["ledger"].hex(), "names": state["names"].hex()}


class Talking(Ledgered):
    """The same with messages: whoever took one cannot be replaced without the epoch starting again."""

    async def around(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await super().around(epoch, ins, outs)
        epoch.flag("following", float(self.theta[0]))
        to = epoch.neighbors("following")[0]
        epoch.scratch.answer = (to, await epoch.request(to, "ask", float(self.theta[1])))

    @tg.handles("ask")
    def ask(self, epoch: tg.Epoch, sender: int, payload: float) -> float:
        epoch.scratch.asked = (sender, payload)
        return payload + float(self.theta[2])

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: float) -> None:
        epoch.scratch.flagged = (sender, meta)

    def messages(self, epoch: tg.Epoch) -> list[tuple[str, int, float]]:
        scratch = epoch.scratch
        return [("flag", *scratch.flagged), ("ask", *scratch.asked), ("answer", *scratch.answer)]


class Flying(Ledgered):
    """The same with several epochs in flight: only what `settle` keeps has an order. All tiers take their time."""

    seen = ""

    @tg.stateless
    def compose(self, epoch: tg.Epoch) -> None:
        super().compose(epoch)

    @tg.stateless
    async def down(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self._look(epoch)
        await asyncio.sleep(self.pace_s)
        if not self.task_id and self.finish and os.path.exists(self.finish):  # noqa: ASYNC240
            epoch.finish()
        outs.put("theta", ins["theta"] + 1.0 if self.task_id else np.cos(np.arange(16.0) * epoch.number))

    def _look(self, epoch: tg.Epoch) -> None:
        """Leaves word where an earlier epoch is not through. It looks at the state for nothing else."""
        if self.seen and epoch.number > self.next:
            Path(self.seen, f"{self.task_id} is {epoch.number - self.next} ahead").touch()

    @tg.stateless
    async def around(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("hello", np.sin(np.arange(16.0 + self.ballast) * (epoch.number + self.task_id)))

    @tg.stateless
    def up(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        time.sleep(self.pace_s / 4)
        outs.put("grad", np.sin(ins["theta"]) + self.task_id + sum(ins.all("grad").values()))


def kind(*, talk: bool, flying: bool) -> type[Ledgered]:
    return Talking if talk else Flying if flying else Ledgered


@tg.job
def ledgered(  # `finish`: a file; the epoch in which it is there is the last
    tasks: int = 7,
    epochs: int = 1000,
    backups: int = 1,
    pace_s: float = 0.0,
    talk: bool = False,
    flying: bool = False,
    seen: str = "",
    finish: str = "",
    block: str = "",
    ballast: int = 0,
    ttl_s: float = 2.0,
    checkpoint: str = "",
    every: int = 10,
    lost_after_s: float = 30.0,
    ping_s: float = 5.0,
) -> tg.Job:
    def build(task_id: int) -> Ledgered:
        task = kind(talk=talk, flying=flying)()
        if isinstance(task, Flying):
            task.seen = seen
        task.pace_s, task.finish, task.block, task.ballast = pace_s, finish, block, ballast
        return task

    return tg.Job(
        tasks=tasks,
        epochs=epochs,
        backups=backups,
        builder=build,
        topology=TOPOLOGY,
        checkpoint=checkpoint or None,
        checkpoint_every=every,
        settings=tg.Settings(
            lease_ttl_s=ttl_s,
            lease_stall_s=ttl_s / 2,
            lost_after_s=lost_after_s,
            ping_s=ping_s,
            ping_timeout_s=4 * ping_s,
        ),
    )


def expected_names(task: int, tasks: int, epochs: int, *, talk: bool = False) -> tuple[str, int]:
    """`names` and `consumed` as they must be, from the links alone."""
    digest, count = b"", 0
    for epoch in range(epochs):
        found = [("theta", p) for p in TOPOLOGY.neighbors("parents", task, tasks, epoch)]
        found += [("grad", p) for p in TOPOLOGY.neighbors("children", task, tasks, epoch)]
        found += [("hello", p) for p in preceding(task, tasks, epoch)]
        if talk:
            before, after = preceding(task, tasks, epoch)[0], following(task, tasks, epoch)[0]
            found += [("flag", before), ("ask", before), ("answer", after)]
        for tag, producer in found:
            digest = xxhash.xxh3_128_digest(digest + f"{epoch}/{producer}/{tag}".encode())
        count += len(found)
    return digest.hex(), count
