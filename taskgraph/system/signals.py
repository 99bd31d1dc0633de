"""Signals that tell this process to end."""

from __future__ import annotations

import signal
import time

__all__ = ["Orders", "hear_of_children", "obey_sigterm"]

_SAME_ORDER_S = 1.0
"""Who ends a whole group, and what passes that on besides, are done within milliseconds; a person takes longer."""


class Orders:
    """Tells whether a signal is an order of its own, or the last one again.

    Who ends a group of processes (a batch system, systemd, `timeout`) may reach one of them several times at once: by
    itself, and by what passes its signal on. A Ctrl-C is always one more.
    """

    def __init__(self) -> None:
        self._first_at: float | None = None

    def is_new(self, number: int) -> bool:
        """Whether `number`, which came just now, is the first order, or a later one."""
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            return True
        return number == signal.SIGINT or now - self._first_at >= _SAME_ORDER_S


def hear_of_children() -> None:
    """Has this process know how its children end, where who started it does not want to know (SIGCHLD is ignored): that
    is inherited, and they cannot be waited for then."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def obey_sigterm() -> None:
    """Has SIGTERM end this process like Ctrl-C, until it takes signals itself.

    Else the first process of a container would not hear of it: signals that it has no handler for do not reach it.
    """
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
