"""What is shown of a job while it runs: by the command line, and by `tg.run(..., progress=True)`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from taskgraph.alongside import alongside
from taskgraph.jobs import Job
from taskgraph.launch.logs import LogTails
from taskgraph.launch.supervise import Hooks
from taskgraph.observe.progress import Progress

__all__ = ["showing", "tick"]

_TICK_S = 0.25


@contextlib.asynccontextmanager
async def showing(job: Job) -> AsyncIterator[tuple[Progress, Hooks]]:
    """Shows a job that is run with these hooks."""
    progress = Progress(job.name, job.tasks, job.epochs, job.backups)
    try:
        async with alongside(tick(progress)):
            yield progress, Hooks(progress.event, lambda follower, nodes: progress.follow(follower.view))
    finally:
        progress.end()


async def tick(progress: Progress, tails: Sequence[LogTails] = ()) -> None:
    """Shows what moved, until cancelled."""
    while True:
        await asyncio.sleep(_TICK_S)
        for tail in tails:
            tail.poll()
        progress.tick()
