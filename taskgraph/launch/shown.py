"""`tg.run(..., progress=True)`: what `taskgraph run` shows of a job, on standard error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from taskgraph.jobs import Job
from taskgraph.launch.supervise import Hooks
from taskgraph.observe.progress import Progress

__all__ = ["showing"]

_TICK_S = 0.25


@contextlib.asynccontextmanager
async def showing(job: Job) -> AsyncIterator[tuple[Progress, Hooks]]:
    """Shows a job that is run with these hooks."""
    progress = Progress(job.name, job.tasks, job.epochs, job.backups)
    ticking = asyncio.ensure_future(_tick(progress))
    try:
        yield progress, Hooks(progress.event, lambda follower, nodes: progress.follow(follower.view))
    finally:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        progress.end()


async def _tick(progress: Progress) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        progress.tick()
