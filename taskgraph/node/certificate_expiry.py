"""Warns if certificates of this node are about to end, or have ended.

Open connections go on without a valid certificate, so nothing else shows the end before the next connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from taskgraph.errors import TransportError
from taskgraph.network.tls import Tls
from taskgraph.observe.events import EventLog

__all__ = ["CertificateExpiryWatch"]

_SHARE_LEFT = 10
"""Warns when less than 1/10 of the validity is left,"""
_AT_MOST_S = 86_400.0
"""and at the earliest a day before the end."""
_CHECK_S = 60.0
"""The longest time between two checks: files are renewed at any time, and clocks may be set."""
_LEAST_S = 0.1


class CertificateExpiryWatch:
    """Warns, by events, of a node's certificates that end soon or have ended. Loads none.

    Args:
        now: unix time, which decides when certificates end.
    """

    def __init__(self, tls: Tls, events: EventLog, node: str, host: str, now: Callable[[], float] = time.time) -> None:
        self._tls = tls
        self._events = events
        self._who = f"{node} on {host}"
        self._now = now
        self._emitted: set[tuple[Path, float, bool]] = set()

    async def run(self) -> None:
        """Checks the certificates, once a minute at least, until it is cancelled."""
        while True:
            next_s = self.warn_if_due()
            await asyncio.sleep(next_s)

    def warn_if_due(self) -> float:
        """Warns once about each certificate that ends soon, and once more when it has ended.

        Returns:
            Seconds until the next check.
        """
        try:
            found = self._tls.validity()
        except TransportError:  # the files are missing; connections that need them say so
            return _CHECK_S
        now, next_s = self._now(), _CHECK_S
        for path, (begins, ends) in found.items():
            soon = ends - min(_AT_MOST_S, (ends - begins) / _SHARE_LEFT)
            next_s = min([next_s, *(at - now for at in (soon, ends) if at > now)])
            if now < soon or (key := (path, ends, now >= ends)) in self._emitted:
                continue
            self._emitted.add(key)
            self._events.emit("certificate", f"{self._who}: {self._warning_text(path, ends, ended=now >= ends)}")
        return max(next_s, _LEAST_S)

    def _warning_text(self, path: Path, ends: float, *, ended: bool) -> str:
        at = f"{datetime.fromtimestamp(ends, UTC):%Y-%m-%d %H:%M:%S} UTC"
        if path == self._tls.ca:
            what, todo = "the authority", "one that goes on, and certificates of it on all hosts"
        else:
            what, todo = "the certificate", f"a renewed one, and its key in {self._tls.key}"
        if ended:
            return (
                f"{what} in {path} has ended, at {at}: open connections go on, new ones fail, also for "
                f"the job's results. Write to that file {todo}; no restart is needed"
            )
        return (
            f"{what} in {path} ends at {at}; after that new connections fail, also for the job's results. Write to "
            f"that file {todo}, before that; no restart is needed"
        )
