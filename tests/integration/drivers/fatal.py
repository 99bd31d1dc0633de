"""A processor that ends its process, without a word."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import taskgraph as tg


class Fatal(tg.Task, state=["steps"]):
    """Task 1 ends its process in epoch `fatal_at`, `linger_s` after it began to compute, in this way.

    Where that is -1, in `setup()`; where it is the number of epochs, in `result()`.

    `once`: only where the file of that name is not there yet.
    `alone`: from then on no node becomes its backup.
    `kept`: not before there is a complete checkpoint below this folder.
    """

    def __init__(
        self, fatal_at: int, how: str, linger_s: float, once: Path | None, alone: bool, kept: Path | None
    ) -> None:
        self.fatal_at = fatal_at
        self.how = how
        self.linger_s = linger_s
        self.once = once
        self.alone = alone
        self.kept = kept

    def setup(self) -> None:
        self.steps = 0
        if self.fatal_at == -1:
            self.die()

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.crash, outbound={"step": self.task_id})
        epoch.processor(self.step, inbound={"step": self.task_id})

    def crash(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if epoch.number == self.fatal_at:
            self.die()
        outs.put("step", 1)

    def die(self) -> None:
        if self.task_id != 1 or (self.once and self.once.exists()):
            return
        if self.once:
            self.once.touch()
        if self.alone:
            Path(os.environ["TASKGRAPH_INJECT"], "hold,held,task=1").touch()
        while self.kept and not any(self.kept.rglob("manifest.json")):
            time.sleep(0.01)
        time.sleep(self.linger_s)
        if self.how == "segfault":
            ctypes.string_at(0)
        elif self.how == "abort":
            os.abort()
        elif self.how == "memory":  # all that it may have; a GiB is enough where a test allows less
            Path("/proc/self/oom_score_adj").write_text("1000")  # the kernel kills no other process
            taken = [b"x" * (1 << 20) for _ in range(1 << 10)]
            assert len(taken) < 1 << 10, "more memory was allowed"
        elif self.how == "killed":  # as by the kernel, where memory is short
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(int(self.how))

    def step(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.steps += ins["step"]

    def result(self) -> int:
        if self.steps == self.fatal_at:
            self.die()
        return self.steps


@tg.job
def fatal(
    tasks: int = 3,
    epochs: int = 6,
    fatal_at: int = 2,
    how: str = "11",
    linger_s: float = 0.0,
    once: bool = False,
    alone: bool = False,
    folder: str = "",
    ahead: int = tg.Settings().epochs_ahead,
    backups: int = 1,
    kept: str = "",
    name: str = "fatal",
) -> tg.Job:
    done = Path(folder) / "once" if once else None
    return tg.Job(
        name=name,
        tasks=tasks,
        epochs=epochs,
        backups=backups,
        checkpoint=f"file://{kept}" if kept else None,
        checkpoint_every=1,
        builder=lambda task_id: Fatal(fatal_at, how, linger_s, done, alone, Path(kept) if kept else None),
        settings=tg.Settings(epochs_ahead=ahead),
    )
