"""Signals that tell this process to end."""

from __future__ import annotations

import signal
import time

__all__ = ["StopSignals", "obey_sigterm", "stop_ignoring_children"]

_SAME_ORDER_S = 1.0
"""A signal that reaches a process several times does so within milliseconds; a person takes longer."""


class StopSignals:
    """Tells a signal that is a new order to end this process from one that repeats the first.

    A batch system, systemd or `timeout` may signal a process directly and through its parent. Each Ctrl-C is an order.
    """

    def __init__(self) -> None:
        self._first_at: float | None = None

    def is_new(self, number: int) -> bool:
        """Notes signal `number`, which just came. True: it is an order of its own; False: it repeats the first one."""
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            return True
        return number == signal.SIGINT or now - self._first_at >= _SAME_ORDER_S


def stop_ignoring_children() -> None:
    """Stops ignoring SIGCHLD, which may be inherited: children could not be waited for."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def obey_sigterm() -> None:
    """Makes SIGTERM end this process like Ctrl-C, until it handles signals itself.

    The first process of a container gets only signals that it handles.
    """
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
