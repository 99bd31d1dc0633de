"""What a late piece may still do: nothing. Its epoch went on without it, since another task has computed the piece."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from taskgraph.epoch import AttemptEnded

if TYPE_CHECKING:
    import concurrent.futures

    from taskgraph.epoch import Work
    from taskgraph.protocol.messages import Encoded

__all__ = ["PieceWork"]


class PieceWork:
    """The `Work` that the code of a piece uses: it passes all on to the attempt, until `close`.

    After that any use raises AttemptEnded: another task has computed the piece. A message is sent before `close`, or
    not at all.
    """

    def __init__(self, work: Work) -> None:
        self.task, self.number, self.attempt = work.task, work.number, work.attempt
        self.seed, self.last = work.seed, work.last
        self._open: Work | None = work
        self._lock = threading.Lock()

    def close(self) -> None:
        """Ends all use of the attempt, and lets its memory go."""
        with self._lock:
            self._open = None

    @property
    def cancelled(self) -> bool:
        work = self._open
        return work is None or work.cancelled

    def flag(self, where: str, to: tuple[int, ...], value: Encoded) -> None:
        with self._lock:
            self._work.flag(where, to, value)

    def request(self, where: str, to: int, method: str, value: Encoded) -> concurrent.futures.Future[Encoded]:
        with self._lock:
            return self._work.request(where, to, method, value)

    def hold(self, where: str, why: str) -> Callable[[], None]:
        with self._lock:
            return self._work.hold(where, why)

    def report(self, numbers: dict[str, float]) -> None:
        with self._lock:
            self._work.report(numbers)

    def finish(self) -> None:
        with self._lock:
            self._work.finish()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    @property
    def _work(self) -> Work:
        """The attempt. Raises AttemptEnded after `close`."""
        work = self._open
        if work is None:
            raise AttemptEnded(late=True)
        return work
