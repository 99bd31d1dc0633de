"""Shows a job while it runs: for the command line, and for `tg.run(..., progress=True)`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from taskgraph.launch.local import LocalNodes
from taskgraph.launch.logs import LogTails
from taskgraph.observe.progress import ProgressDisplay
from taskgraph.results import EpochReport
from taskgraph.system.alongside import cancel_and_wait

__all__ = ["JobProgress"]

_TICK_S = 0.25


class JobProgress(ProgressDisplay):
    """Shows events that the caller passes, and after `follow_logs` nodes' logs, in its async context until `end`."""

    _log_tails: LogTails | None = None

    def follow_logs(self, nodes: LocalNodes) -> None:
        """Shows the nodes' logs, also lines to come."""
        self._log_tails = LogTails(nodes.logs, nodes.codes, self.line)

    async def __aenter__(self) -> JobProgress:
        self._ticking = asyncio.ensure_future(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(self._ticking)
        self.end()

    async def _tick(self) -> None:
        """Shows new lines of logs, and the progress, until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            if self._log_tails is not None:
                self._log_tails.poll()
            self.tick()

    def end(self, reports: Sequence[EpochReport] = ()) -> None:
        """Shows the rest of the logs, and ends the progress."""
        if self._log_tails is not None:
            tails, self._log_tails = self._log_tails, None
            tails.close()
        super().end(reports)
