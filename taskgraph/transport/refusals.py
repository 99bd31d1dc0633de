"""Strangers who were refused: told once, and not as often as they knock.

What a stranger sends decides what is said of it, so neither the number of lines nor what is in them may be the
stranger's choice.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

__all__ = ["Refusals", "printable"]

#: One line for each reason in this time, and `_LINES` of all reasons together.
_EVERY_S = 60.0
_LINES = 20
_TEXT = 300
"""Characters of one line: some of them are the stranger's."""
_UNPRINTABLE = re.compile(r"[^ -~]")
_NUMBERS = re.compile(r"[0-9a-fA-F]*\d[0-9a-fA-F]*")


class Refusals:
    """Logs refused connections.

    Args:
        log: where to.
        now: the monotonic time.
    """

    def __init__(self, log: logging.Logger, now: Callable[[], float]) -> None:
        self._log = log
        self._now = now
        self._began = float("-inf")
        self._said: dict[str, int] = {}  # reason -> how many were not told since
        self._untold = 0  # of reasons that are not kept
        self.count = 0

    def refused(self, where: str, why: str) -> None:
        """One more. `where` and `why` may be what a stranger sent."""
        self.count += 1
        now = self._now()
        if now - self._began >= _EVERY_S:
            self._tell_rest()
            self._began, self._said, self._untold = now, {}, 0
        # The same but for its numbers is the same reason: sizes and addresses are for the stranger to choose.
        reason = _NUMBERS.sub("#", why[:_TEXT])
        if reason in self._said:
            self._said[reason] += 1
        elif len(self._said) >= _LINES:
            self._untold += 1
        else:
            self._said[reason] = 0
            self._log.warning("refused a connection from %s: %s", printable(where), printable(why))

    def _tell_rest(self) -> None:
        rest = self._untold + sum(self._said.values())
        if rest:
            self._log.warning("refused %d more connections since, for like reasons", rest)


def printable(text: str) -> str:
    """What a stranger said, as one short line of ASCII."""
    return _UNPRINTABLE.sub("?", text[:_TEXT])
