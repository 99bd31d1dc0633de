"""What is to be done once a device came past some events, and nobody waits for that.

It is asked for by finalizers, which run in any thread and in the middle of anything, a garbage collection in the middle
of this module's own code included: so nothing here takes a lock that it waits for.
"""

from __future__ import annotations

import _thread
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from taskgraph.device.api import Device, Event

__all__ = ["call"]

log = logging.getLogger("taskgraph.devices")


class _Work(NamedTuple):
    device: Device
    events: Sequence[Event]
    then: Callable[[], object]

    def due(self) -> bool:
        return all(map(self.device.done, self.events))


_asked: Final[deque[_Work]] = deque()
_at_work: Final = _thread.allocate_lock()
"""Held by the thread that does it: there is one while there is something to do."""
_left: Final[list[_Work]] = []
"""What will never be due, as their device is lost: what they hold stays."""


def call(device: Device, events: Sequence[Event], then: Callable[[], object]) -> None:
    """Calls a function, which raises nothing and waits for nobody, in some thread, once these events are past."""
    if not events:
        then()
        return
    _asked.append(_Work(device, events, then))
    if _at_work.acquire(blocking=False):
        try:
            _thread.start_new_thread(_do_all, ())
        except RuntimeError:  # no thread can be started any more: the next one's does it
            _at_work.release()


def _do_all() -> None:
    waiting: list[_Work] = []
    while True:
        while _asked or waiting:
            while _asked:
                waiting.append(_asked.popleft())
            waiting = [work for work in waiting if not _done(work)]
            if waiting and not _waited(waiting[0]):  # the rest is looked at when that one is past
                _left.append(waiting.pop(0))
        _at_work.release()
        if not _asked or not _at_work.acquire(blocking=False):
            return  # who came meanwhile started another thread


def _done(work: _Work) -> bool:
    """Whether nothing is left to do of it."""
    try:
        if not work.due():
            return False
    except Exception:
        return False  # to wait for it says why
    try:
        work.then()
    except Exception:  # this thread is everybody's
        log.exception("memory that others lent is not given back to them")
    return True


def _waited(work: _Work) -> bool:
    try:
        for event in work.events:
            work.device.wait(event)
    except Exception as error:  # the device is lost, as a rule
        log.warning("memory that others lent is not given back to them: %s", error)
        return False
    return True
