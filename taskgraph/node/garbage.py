"""Sets how often a process that hosts nodes collects garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["adapt_garbage_threshold", "search_garbage_less_often", "searching_garbage_less_often"]

_YOUNGEST_OBJECTS = 2000
"""New objects before the youngest generation is searched, as in Python 3.13; earlier versions have 700. Frequent
searches cost a node 2 % of its time, since objects that wait for a commit are no garbage."""
_EACH, _MOST = 200, 50_000
"""More new objects for each task of the process, since epochs of many tasks wait for one commit; and the limit."""

_set: tuple[int, int, int] | None = None
"""The thresholds set by this module; None: the process keeps its own."""


def search_garbage_less_often() -> None:
    """Searches for garbage as rarely as newer Pythons do, unless the process searches more rarely already."""
    global _set
    young, old, oldest = gc.get_threshold()
    if 0 < young <= _YOUNGEST_OBJECTS:
        _set = (_YOUNGEST_OBJECTS, old, oldest)
        gc.set_threshold(*_set)


def adapt_garbage_threshold(primaries: int) -> None:
    """Sets how many new objects start a search, by the number of primaries, unless user code has set it since."""
    global _set
    if _set is not None and gc.get_threshold() == _set:
        _set = (min(max(_YOUNGEST_OBJECTS, _EACH * primaries), _MOST), *_set[1:])
        gc.set_threshold(*_set)


@contextmanager
def searching_garbage_less_often() -> Iterator[None]:
    """Searches for garbage less often within a block, in a user's own process; a threshold set meanwhile stays."""
    global _set
    before, outer = gc.get_threshold(), _set
    search_garbage_less_often()
    try:
        yield
    finally:
        if gc.get_threshold() == _set:
            gc.set_threshold(*before)
        _set = outer
