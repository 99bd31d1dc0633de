"""Threads that do the work of finalizers: calls that may block, and calls that must wait for events of a device.

A finalizer runs in any thread, and in the middle of anything. On an event loop it must not call CUDA: while some thread
of the process copies from the device to memory that is not page-locked (`float(array)` does), and so waits for all that
is queued before, CUDA's driver blocks, for as long, every thread that makes or destroys an event or a stream, or
records an event on that stream.

As a collection of garbage may run a finalizer in the middle of this module's own code, nothing here takes a lock that
it waits for.
"""

from __future__ import annotations

import _thread
import asyncio
import itertools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

from taskgraph.device.api import Device, Event

__all__ = ["Aside", "Worker", "call", "do_now", "later", "on_a_loop", "soon"]

_IDLE_S: Final = 10.0
"""How long such a thread waits for more."""
_LATER_S: Final = 0.01
"""How long what cannot be done yet is put off: it holds memory for as long."""

log = logging.getLogger("taskgraph.devices")


def on_a_loop() -> bool:
    """True if an event loop runs in this thread."""
    return asyncio._get_running_loop() is not None


class _Work(NamedTuple):
    device: Device
    events: Sequence[Event]
    then: Callable[[], object]

    def due(self) -> bool:
        return all(map(self.device.done, self.events))


class Worker:
    """A thread that does what finalizers ask for, in any thread, and ends when nothing was for a while.

    Args:
        work: does it.
    """

    def __init__(self, work: Callable[[Any], None]) -> None:
        self._work = work
        self._asked: SimpleQueue[Any] = SimpleQueue()  # whose `put` may come in the middle of itself
        self._busy = _thread.allocate_lock()  # held by the thread

    def ask(self, what: object) -> None:
        self._asked.put(what)
        if self._busy.acquire(blocking=False):
            try:
                _thread.start_new_thread(self._run, ())
            except RuntimeError:  # the system starts no more threads: the next request tries again
                self._busy.release()

    def next(self) -> Any:
        """The next request; None if there is none."""
        try:
            return self._asked.get_nowait()
        except Empty:
            return None

    def _run(self) -> None:
        while True:
            try:
                what = self._asked.get(timeout=_IDLE_S)
            except Empty:
                self._busy.release()
                if self._asked.empty() or not self._busy.acquire(blocking=False):
                    return  # who came meanwhile started another thread
            else:
                self._work(what)
                del what  # an idle thread keeps no references


def soon(then: Callable[[], object]) -> None:
    """Calls a function in a thread; in the order in which that is asked for."""
    _calling.ask(then)


def later(then: Callable[[], object]) -> None:
    """Calls a function in a thread after a moment, because it cannot be done yet."""
    _postponed.ask(then)


def _wait_a_moment(then: Callable[[], object] | None) -> None:
    time.sleep(_LATER_S)
    while then is not None:
        soon(then)
        then = _postponed.next()


def do_now() -> bool:
    """Makes the calls of `soon` that are left, in this thread. True if there were some."""
    done = False
    while (then := _calling.next()) is not None:
        done = True
        _call(then)
    return done


def call(device: Device, events: Sequence[Event], then: Callable[[], object]) -> None:
    """Calls a function in a thread once these events are past; at once if there are none. It must not block.

    To look at an event ends the capture of a graph in the same thread: so that is not done in this one.
    """
    if events:
        soon(partial(_look, _Work(device, events, then)))
    else:
        _call(then)


def _look(work: _Work) -> None:
    if not _done(work):  # a look at events does not block, but a thread that waits for them may
        _waiting.ask(work)


def _wait_for(work: _Work) -> None:
    waiting = [work]
    while waiting:
        while (another := _waiting.next()) is not None:
            waiting.append(another)
        waiting = [work for work in waiting if not _done(work)]
        if waiting and not _waited(waiting[0]):  # the rest is looked at when that one is past
            _left.append(waiting.pop(0))


def _done(work: _Work) -> bool:
    """True if the work is done."""
    try:
        if not work.due():
            return False
    except Exception:
        return False  # to wait for it says why
    for event in work.events:
        work.device.recycle(event)
    _call(work.then)
    return True


def _waited(work: _Work) -> bool:
    try:
        for event in work.events:
            work.device.wait(event)
    except Exception as error:  # the device is lost, as a rule
        log.warning("memory that was read is not used again, or given back to who lent it: %s", error)
        return False
    return True


def _call(then: Callable[[], object]) -> None:
    try:
        then()
    except Exception:  # the thread is everybody's
        log.exception("memory of a device could not be let go of")


_calling: Final = Worker(_call)
_postponed: Final = Worker(_wait_a_moment)
_waiting: Final = Worker(_wait_for)
_left: Final[list[_Work]] = []
"""Work whose device is lost. It never becomes due, and keeps its memory."""


_things: Final[dict[int, list[Any]]] = {}
"""Things of each `Aside`, by its number, so that they are not garbage together with it."""
_numbers: Final = itertools.count()


class Aside:
    """Holds things whose finalizers call CUDA: they run in a thread where this object goes on an event loop."""

    __slots__ = ("_number",)

    def __init__(self, things: list[Any]) -> None:
        self._number = next(_numbers)
        _things[self._number] = things

    @property
    def things(self) -> list[Any]:
        return _things[self._number]

    def __del__(
        self, is_finalizing: Callable[[], bool] = sys.is_finalizing, here: Callable[[], bool] = on_a_loop
    ) -> None:
        if is_finalizing():
            return
        if here():
            soon(partial(_things.pop, self._number))
        else:
            del _things[self._number]
