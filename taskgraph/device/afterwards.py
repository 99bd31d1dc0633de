"""What finalizers leave to threads: calls that may stop, and what is to be done once a device came past some events.

A finalizer runs in any thread, and in the middle of anything. On an event loop it must not call CUDA: while some thread
of the process copies from the device to memory that is not page-locked (`float(array)` does), and so waits for all that
is queued before, CUDA's driver holds up, for as long, whoever makes or destroys an event or a stream, or records one on
that stream.

As a collection of garbage may run a finalizer in the middle of this module's own code, nothing here takes a lock that
it waits for.
"""

from __future__ import annotations

import _thread
import asyncio
import logging
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from taskgraph.device.api import Device, Event

__all__ = ["Aside", "call", "do_now", "on_a_loop", "soon"]

log = logging.getLogger("taskgraph.devices")


def on_a_loop() -> bool:
    """Whether an event loop runs in this thread."""
    return asyncio._get_running_loop() is not None


class _Work(NamedTuple):
    device: Device
    events: Sequence[Event]
    then: Callable[[], object]

    def due(self) -> bool:
        return all(map(self.device.done, self.events))


class _Thread:
    """A thread, for as long as there is something to do.

    Args:
        work: does what was asked for until there is nothing left.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.asked: Final[deque[Any]] = deque()
        self._work = work
        self._busy = _thread.allocate_lock()

    def ask(self, what: object) -> None:
        self.asked.append(what)
        if self._busy.acquire(blocking=False):
            try:
                _thread.start_new_thread(self._run, ())
            except RuntimeError:  # no thread can be started any more: the next one's does it
                self._busy.release()

    def _run(self) -> None:
        while True:
            self._work()
            self._busy.release()
            if not self.asked or not self._busy.acquire(blocking=False):
                return  # who came meanwhile started another thread


def soon(then: Callable[[], object]) -> None:
    """Calls a function in a thread; in the order in which that is asked for."""
    _calling.ask(then)


def do_now() -> bool:
    """Does in this thread what is left of that. Whether there was anything."""
    done = False
    while _calling.asked:
        try:
            then = _calling.asked.popleft()
        except IndexError:  # the thread was faster
            break
        done = True
        _call(then)
    return done


def _call_all() -> None:
    while _calling.asked:
        do_now()


def call(device: Device, events: Sequence[Event], then: Callable[[], object]) -> None:
    """Calls a function, which waits for nobody, in some thread, once these events are past."""
    if events:
        _waiting.ask(_Work(device, events, then))
    else:
        then()


def _wait_for_all() -> None:
    waiting: list[_Work] = []
    while _waiting.asked or waiting:
        while _waiting.asked:
            waiting.append(_waiting.asked.popleft())
        waiting = [work for work in waiting if not _done(work)]
        if waiting and not _waited(waiting[0]):  # the rest is looked at when that one is past
            _left.append(waiting.pop(0))


def _done(work: _Work) -> bool:
    """Whether nothing is left to do of it."""
    try:
        if not work.due():
            return False
    except Exception:
        return False  # to wait for it says why
    _call(work.then)
    return True


def _waited(work: _Work) -> bool:
    try:
        for event in work.events:
            work.device.wait(event)
    except Exception as error:  # the device is lost, as a rule
        log.warning("memory that others lent is not given back to them: %s", error)
        return False
    return True


def _call(then: Callable[[], object]) -> None:
    try:
        then()
    except Exception:  # the thread is everybody's
        log.exception("memory of a device could not be let go of")


_calling: Final = _Thread(_call_all)
_waiting: Final = _Thread(_wait_for_all)
_left: Final[list[_Work]] = []
"""What will never be due, as its device is lost: what it holds stays."""


class Aside:
    """Holds things whose finalizers call CUDA: they run in a thread where this object goes on an event loop."""

    __slots__ = ("things",)

    def __init__(self, things: list[Any]) -> None:
        self.things = things

    def __del__(
        self, is_finalizing: Callable[[], bool] = sys.is_finalizing, here: Callable[[], bool] = on_a_loop
    ) -> None:
        if here() and not is_finalizing():
            soon(partial(list.clear, self.things))
