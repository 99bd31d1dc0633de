"""`replace=True` and `--replace`: another node takes the place of one that dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_kit import DRIVER, sums
from processes_kit import becomes

import taskgraph as tg
from taskgraph.driver.loading import load_driver
from taskgraph.launch.local import LocalNodes
from taskgraph.launch.supervise import FrontEndHooks
from taskgraph.protocol.view import JobView
from taskgraph.system.alongside import cancel_and_wait

LIMIT_S = 60.0

KEPT = """
import time
from pathlib import Path

import taskgraph as tg


class Kept(tg.Task, state=["total"]):
    def __init__(self, gate):
        self.gate = gate

    def setup(self):
        self.total = 0

    def compose(self, epoch):
        epoch.processor(self.add)

    def add(self, epoch, ins, outs):
        while epoch.number == 40 and not Path(self.gate).exists() and not epoch.cancelled:
            time.sleep(0.01)
        self.total += (self.task_id + 1) * epoch.number

    def result(self):
        return self.total


@tg.job
def kept(gate: str, place: str):
    return tg.Job(
        tasks=2,
        epochs=50,
        builder=lambda task: Kept(gate),
        checkpoint=f"file://{place}",
        checkpoint_every=10,
        settings=tg.Settings(epochs_ahead=0),
    )
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With the runtime directory of the nodes that a test starts, in which nothing is left."""
    root = Path(tempfile.mkdtemp(prefix="tg-"))  # short, for the paths of sockets
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(root))
    yield root
    left = [
        path
        for path in (root / "taskgraph").rglob("*")
        if not path.is_dir() and not {"finished", "locks"} & {*path.parts}
    ]
    shutil.rmtree(root)
    assert not left


class Replacing:
    """A run whose nodes are replaced, and which ends with its block."""

    def __init__(self, job: tg.Job, nodes: int) -> None:
        self.nodes: LocalNodes | None = None
        self.view: Callable[[], JobView] | None = None
        hooks = FrontEndHooks(on_start=self._on_start)
        self.work = asyncio.ensure_future(tg.arun(job, nodes=nodes, replace=True, timeout_s=2 * LIMIT_S, hooks=hooks))

    async def __aenter__(self) -> Replacing:
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(self.work)

    def _on_start(self, follower: Any, nodes: LocalNodes) -> None:
        self.nodes, self.view = nodes, lambda: follower.view

    async def until(self, true: Callable[[JobView], bool]) -> None:
        await becomes(lambda: self.work.done() or (self.view is not None and true(self.view())), LIMIT_S)
        assert not self.work.done(), self.work

    def kill(self, name: str) -> None:
        assert self.nodes is not None
        os.kill(self.nodes.pids()[name], signal.SIGKILL)


@pytest.mark.smoke
async def test_job_survives_its_first_nodes(folder: Path) -> None:
    gate = folder / "gate"

    def safe(view: JobView, *names: str) -> bool:
        """Whether these are its nodes, and none of them is the last one that holds a task's state."""
        return {known.record.name for known in view.nodes.values()} == set(names) and all(
            len(view.active_members(task)) >= 2 for task in range(7)
        )

    # No more than two die in one epoch: what ends three nodes is taken for a fault of the code that ran.
    async with Replacing(load_driver(str(DRIVER))(pause_at=2, gate=str(gate)), 2) as run:
        await run.until(lambda view: safe(view, "n1", "n2"))
        for name, others in (("n1", ("n2", "n3")), ("n2", ("n3", "n4"))):
            run.kill(name)
            await run.until(lambda view, others=others: safe(view, *others))  # type: ignore[misc]
        gate.touch()
        result = await run.work
        assert result.value == sums() and result.restarts == 0


async def test_the_only_node_is_replaced_and_the_job_goes_on_from_its_checkpoint(folder: Path) -> None:
    gate, driver = folder / "gate", folder / "kept.py"
    driver.write_text(KEPT)
    async with Replacing(load_driver(str(driver))(gate=str(gate), place=str(folder / "places")), 1) as run:
        await run.until(lambda view: view.checkpoint is not None and view.epoch.record.epoch == 40)
        run.kill("n1")
        await run.until(lambda view: "n2" in {known.record.name for known in view.nodes.values()})
        gate.touch()
        result = await run.work
        assert result.values == {0: sum(range(50)), 1: 2 * sum(range(50))} and result.restarts == 1
