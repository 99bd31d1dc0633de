"""Sets how often a process that hosts nodes collects garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["search_garbage_for", "search_garbage_less_often", "searching_garbage_less_often"]

_YOUNG = 2000
"""New objects before the youngest generation is searched, as in Python 3.13; earlier versions have 700. Objects that
wait for a commit are no garbage, and searching them again and again costs a node 2 % of its time."""
_EACH, _MOST = 200, 50_000
"""More new objects for each task of the process, since epochs of many tasks wait for one commit; and the limit."""

_set: tuple[int, int, int] | None = None
"""The thresholds set by this module; None: the process keeps its own."""


def search_garbage_less_often() -> None:
    """Searches for garbage as rarely as newer Pythons do, unless the process searches more rarely already."""
    global _set
    young, old, oldest = gc.get_threshold()
    if 0 < young <= _YOUNG:
        _set = (_YOUNG, old, oldest)
        gc.set_threshold(*_set)


def search_garbage_for(tasks: int) -> None:
    """Adapts the threshold to the number of primaries on the node, unless somebody else has set it since."""
    global _set
    if _set is not None and gc.get_threshold() == _set:
        _set = (min(max(_YOUNG, _EACH * tasks), _MOST), *_set[1:])
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
