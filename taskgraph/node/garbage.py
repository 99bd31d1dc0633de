"""How often a process that nodes run in searches for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["search_garbage_for", "search_garbage_less_often", "searching_garbage_less_often"]

_YOUNG = 2000
"""As many objects come before the youngest are searched for garbage, as in Python 3.13; older ones have 700. What waits
for a commit is no garbage and soon gone, and would be searched again and again: 2 % of a node's time."""
_EACH, _MOST = 200, 50_000
"""More, where many tasks share a process, whose epochs wait for one commit: so many for each task, and at most."""

_set: tuple[int, int, int] | None = None
"""What this process has from here; None: it has its own, which stays."""


def search_garbage_less_often() -> None:
    """Has garbage searched for as seldom as newer Pythons do, unless it is more seldom, or never, already."""
    global _set
    young, old, oldest = gc.get_threshold()
    if 0 < young <= _YOUNG:
        _set = (_YOUNG, old, oldest)
        gc.set_threshold(*_set)


def search_garbage_for(tasks: int) -> None:
    """So many tasks have their primaries on the node here now. What others have set since stays."""
    global _set
    if _set is not None and gc.get_threshold() == _set:
        _set = (min(max(_YOUNG, _EACH * tasks), _MOST), *_set[1:])
        gc.set_threshold(*_set)


@contextmanager
def searching_garbage_less_often() -> Iterator[None]:
    """The same for a while, in a process that is the user's own; what is set there meanwhile stays."""
    global _set
    before, outer = gc.get_threshold(), _set
    search_garbage_less_often()
    try:
        yield
    finally:
        if gc.get_threshold() == _set:
            gc.set_threshold(*before)
        _set = outer
