"""Faults at named moments of an epoch, in real node processes: for tests, and to see how a job of yours reacts.

`TASKGRAPH_INJECT` names a directory. Each file in it is one fault, described by its name:

    kill,commit                   the leader's process gets SIGKILL just before its next commit
    kill,snapshot,task=3,epoch=7  the process of task 3's primary, before its snapshot of epoch 7
    stop,done,task=0              SIGSTOP
    block=3,processor,task=2      the event loop stands still for 3 s
    hold,commit,epoch=50          a process at that moment waits until the file is removed

A process that reaches the moment removes the file, and only the process that removed it executes the fault. So a fault
happens once, however many nodes there are, and a test sees the file vanish. Remove the file of a hold to end the hold.
Epochs that are committed together reach `commit` one after another. Files may be added while the job runs. Without the
variable nodes call nothing at these moments.
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

__all__ = ["STAGES", "VARIABLE", "Injection", "injection_point"]

log = logging.getLogger("taskgraph.node")

VARIABLE = "TASKGRAPH_INJECT"

_LOOK_S = 0.02
"""How often a process at a hold looks for its file."""

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
    "part",
    "sent",
    "total",
    "report",
)
"""The stages of `tg.testing.STAGES`, and: `held`: a backup has stored a boundary and not acknowledged it; `takeover`: a
node is about to write a takeover; `taken`: it has just written it; `checkpoint`: a primary is about to write its file
of a checkpoint; `checkpointed`: a checkpoint has just been completed.

Of elastic jobs, whose epochs are the numbers of their sums: `part`: a worker is about to send sums of parts; `sent`:
the first worker has taken them; `total`: user code has ended, and a worker is about to tell that it holds all totals;
`report`: it is about to send its report in a new view."""


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault: what happens, and when; None: for any task, in any epoch."""

    action: str
    stage: str
    seconds: float = 0.0
    task: int | None = None
    epoch: int | None = None

    @staticmethod
    def parse(name: str) -> Injection:
        """Parses the name of a file.

        Raises:
            JobError: the name describes no fault.
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

    def matches(self, stage: str, task: int, epoch: int) -> bool:
        """Returns True if the fault is for this stage, task and epoch."""
        return self.stage == stage and self.task in (None, task) and self.epoch in (None, epoch)

    def execute(self) -> None:
        """Executes the fault in this process."""
        if self.action == "block":
            time.sleep(self.seconds)
        else:
            if self.action == "kill":
                lastwords.intend_end()
            os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)


def injection_point() -> Callable[[str, int, int], Awaitable[None]] | None:
    """Returns the function that a node calls at its named moments; None without the variable."""
    folder_name = os.environ.get(VARIABLE)
    if not folder_name:
        return None
    folder = Path(folder_name)
    log.warning("%s=%s: this node fails where a file there says so", VARIABLE, folder)

    async def point(stage: str, task: int, epoch: int) -> None:
        for name in _names(folder):
            injection = Injection.parse(name)
            if not injection.matches(stage, task, epoch):
                continue
            if injection.action == "hold":
                log.warning("held: %s, at %s of task %d in epoch %d", name, stage, task, epoch)
                while (folder / name).exists():  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
            else:
                with contextlib.suppress(FileNotFoundError):  # another process took it
                    os.unlink(folder / name)
                    log.warning("injected: %s, at %s of task %d in epoch %d", name, stage, task, epoch)
                    injection.execute()

    return point


def _names(folder: Path) -> list[str]:
    """Returns the names of the remaining faults, without files that begin with a dot: those are being written."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except FileNotFoundError:
        return []
