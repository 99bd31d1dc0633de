"""Handlers of `atexit` in a node."""

from __future__ import annotations

import atexit
import time
from pathlib import Path

import pytest

import taskgraph as tg


class Leaves(tg.Task):
    def __init__(self, folder: str, hangs: bool) -> None:
        self.folder = Path(folder)
        self.hangs = hangs

    def setup(self) -> None:
        if self.hangs:
            atexit.register(time.sleep, 600)
        atexit.register((self.folder / "atexit").touch)

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.work)

    def work(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        pass


@tg.job
def leaves(folder: str, hangs: bool) -> tg.Job:
    return tg.Job(tasks=1, epochs=1, builder=lambda task: Leaves(folder, hangs))


@pytest.mark.parametrize("hangs", [False, True])
def test_exit_handlers_run_for_a_moment(tmp_path: Path, hangs: bool) -> None:
    began = time.monotonic()
    tg.run(leaves(folder=str(tmp_path), hangs=hangs), nodes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["atexit"]
    assert time.monotonic() - began < 30
