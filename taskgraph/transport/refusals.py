"""Log lines about refused connections.

Strangers choose how often they connect and what they send. So the number of lines and the characters in them are
bounded here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

__all__ = ["RefusalLog", "printable"]

#: Each reason is logged once in this time, and at most `_LINES` reasons are.
_EVERY_S = 60.0
_LINES = 20
_TEXT = 300
"""Characters of a line that may come from a stranger."""
_UNPRINTABLE = re.compile(r"[^ -~]")
_NUMBERS = re.compile(r"[0-9a-fA-F]*\d[0-9a-fA-F]*")


class RefusalLog:
    """Logs refused connections.

    Args:
        log: the logger.
        now: a monotonic clock, in seconds.
    """

    def __init__(self, log: logging.Logger, now: Callable[[], float]) -> None:
        self._log = log
        self._now = now
        self._began = float("-inf")
        self._logged: dict[str, int] = {}  # reason -> refusals since it was logged
        self._others = 0  # refusals for reasons beyond `_LINES`
        self.count = 0

    def add(self, where: str, why: str) -> None:
        """Counts a refused connection; logs it, unless its or too many reasons were logged within a minute.

        A stranger may have chosen `where` and `why`.
        """
        self.count += 1
        now = self._now()
        if now - self._began >= _EVERY_S:
            self._log_rest()
            self._began, self._logged, self._others = now, {}, 0
        # Reasons that differ only in numbers count as one: strangers choose sizes and addresses.
        reason = _NUMBERS.sub("#", why[:_TEXT])
        if reason in self._logged:
            self._logged[reason] += 1
        elif len(self._logged) >= _LINES:
            self._others += 1
        else:
            self._logged[reason] = 0
            self._log.warning("refused a connection from %s: %s", printable(where), printable(why))

    def _log_rest(self) -> None:
        """Logs how many connections were refused without a line since the last one."""
        rest = self._others + sum(self._logged.values())
        if rest:
            self._log.warning("refused %d more connections since, for like reasons", rest)


def printable(text: str) -> str:
    """Turns a stranger's text into one short line of ASCII."""
    return _UNPRINTABLE.sub("?", text[:_TEXT])
