"""Faults at named moments of an epoch, in real node processes: for tests, and to see what a job of yours does then.

`TASKGRAPH_INJECT` names a directory. A file in it is one fault, and its name says which:

    kill,commit                   the leader's process gets SIGKILL just before its next commit
    kill,snapshot,task=3,epoch=7  the process of task 3's primary, before its snapshot of epoch 7
    stop,done,task=0              SIGSTOP
    block=3,processor,task=2      the event loop stands still for 3 s
    hold,commit,epoch=50          whoever comes there waits for as long as the file is there

A process that reaches the moment of a fault removes the file, and only who removed it fails: so a fault happens once,
however many nodes there are, and whoever waits for it sees it gone. A hold is removed by who put it there. Epochs that
are committed together come to `commit` one after another, and then are committed. Files may be put there while the job
runs. Without the variable a node has no point to call at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from taskgraph.errors import JobError
from taskgraph.node.usercode import lastwords

__all__ = ["STAGES", "VARIABLE", "Injection", "injected"]

log = logging.getLogger("taskgraph.node")

VARIABLE = "TASKGRAPH_INJECT"

_LOOK_S = 0.02
"""How often a hold is looked at."""

STAGES = (
    "compose",
    "processor",
    "sync",
    "snapshot",
    "held",
    "done",
    "commit",
    "committed",
    "takeover",
    "taken",
    "checkpoint",
    "checkpointed",
)
"""Those of `tg.testing.STAGES`, and: a backup holds a boundary and has not said so (`held`); a successor is about to
write that it is primary (`takeover`), it is written and nothing came of it yet (`taken`); a primary is about to write
its file of a checkpoint (`checkpoint`); a checkpoint was just completed (`checkpointed`)."""


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault: what happens, and when."""

    action: str
    stage: str
    seconds: float = 0.0
    task: int | None = None
    epoch: int | None = None

    @staticmethod
    def parse(name: str) -> Injection:
        """An injection by its file's name.

        Raises:
            JobError: the name is none.
        """
        first, *rest = name.split(",")
        action, _, seconds = first.partition("=")
        if action not in ("kill", "stop", "block", "hold") or not rest or rest[0] not in STAGES:
            raise JobError(
                f"{VARIABLE}: {name!r} is no fault; one is e.g. kill,commit or block=3,processor,task=2,epoch=7; the "
                f"stages are {', '.join(STAGES)}"
            )
        try:
            where = {key: int(value) for key, _, value in (part.partition("=") for part in rest[1:])}
            return Injection(action, rest[0], float(seconds or 0), **where)
        except (TypeError, ValueError) as error:
            raise JobError(f"{VARIABLE}: {name!r} is no fault: {error}") from None

    def is_for(self, stage: str, task: int, epoch: int) -> bool:
        """Whether this is its moment."""
        return self.stage == stage and self.task in (None, task) and self.epoch in (None, epoch)

    def happen(self) -> None:
        """The fault itself, in this process."""
        if self.action == "block":
            time.sleep(self.seconds)
        else:
            if self.action == "kill":
                lastwords.mean()
            os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)


def injected() -> Callable[[str, int, int], Awaitable[None]] | None:
    """What a node is to call at its named moments; None without the variable."""
    given = os.environ.get(VARIABLE)
    if not given:
        return None
    folder = Path(given)
    log.warning("%s=%s: this node fails where a file there says so", VARIABLE, folder)

    async def point(stage: str, task: int, epoch: int) -> None:
        for name in _names(folder):
            injection = Injection.parse(name)
            if not injection.is_for(stage, task, epoch):
                continue
            if injection.action == "hold":
                log.warning("held: %s, at %s of task %d in epoch %d", name, stage, task, epoch)
                while (folder / name).exists():  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
            else:
                with contextlib.suppress(FileNotFoundError):  # another process took it
                    os.unlink(folder / name)
                    log.warning("injected: %s, at %s of task %d in epoch %d", name, stage, task, epoch)
                    injection.happen()

    return point


def _names(folder: Path) -> list[str]:
    """The faults that are left; files with a dot in front are being made."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except FileNotFoundError:
        return []
