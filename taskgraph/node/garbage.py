"""How often a process that nodes run in searches for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["search_garbage_less_often", "searching_garbage_less_often"]

_YOUNG = 2000
"""As many objects come before the youngest are searched for garbage, as in Python 3.13; older ones have 700. What waits
for a commit is no garbage and soon gone, and would be searched again and again: 2 % of a node's time, and half of it
where hundreds of tasks share a process."""


def search_garbage_less_often() -> None:
    """Has garbage searched for as seldom as newer Pythons do, unless it is more seldom, or never, already."""
    young, *older = gc.get_threshold()
    if 0 < young < _YOUNG:
        gc.set_threshold(_YOUNG, *older)


@contextmanager
def searching_garbage_less_often() -> Iterator[None]:
    """The same for a while, in a process that is the user's own; what is set there meanwhile stays."""
    before = gc.get_threshold()
    search_garbage_less_often()
    ours = gc.get_threshold()
    try:
        yield
    finally:
        if gc.get_threshold() == ours:
            gc.set_threshold(*before)
