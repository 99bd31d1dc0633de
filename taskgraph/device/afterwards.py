"""Threads that do the work of finalizers: calls that may block, and calls that wait for events of a device.

    finalizer ──► `soon` ─────────────────────────► thread 1 calls it
              ──► `later` ──► thread 2, a pause ──► `soon`
              ──► `call` with events ──► thread 1: passed? ──► call it
                                                   not yet ──► thread 3 waits, then calls it

A finalizer runs in any thread, in the middle of any code. On an event loop it must not call CUDA. While one thread
copies from the device to memory that is not page-locked (`float(array)` does), that thread waits for all work queued
before, and CUDA's driver blocks every thread that makes or destroys an event or a stream, or records an event there.

A garbage collection may run a finalizer in the middle of this module's code, so nothing here waits for a lock.
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
"""How long an idle thread lives."""
_LATER_S: Final = 0.01
"""Pause before a postponed call; it keeps memory for as long."""

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
    """A thread that handles requests of finalizers, and ends after a while without any.

    Args:
        work: handles one request.
    """

    def __init__(self, work: Callable[[Any], None]) -> None:
        self._work = work
        self._requests: SimpleQueue[Any] = SimpleQueue()  # its `put` is reentrant, unlike that of `Queue`
        self._busy = _thread.allocate_lock()  # the running thread has it

    def ask(self, what: object) -> None:
        self._requests.put(what)
        if self._busy.acquire(blocking=False):
            try:
                _thread.start_new_thread(self._run, ())
            except RuntimeError:  # the system starts no more threads: the next request tries again
                self._busy.release()

    def next_request(self) -> Any:
        """Removes and returns the oldest request; None if there is none."""
        try:
            return self._requests.get_nowait()
        except Empty:
            return None

    def _run(self) -> None:
        while True:
            try:
                what = self._requests.get(timeout=_IDLE_S)
            except Empty:
                self._busy.release()
                if self._requests.empty() or not self._busy.acquire(blocking=False):
                    return  # a request that came meanwhile started another thread
            else:
                self._work(what)
                del what  # an idle thread keeps no references


def soon(then: Callable[[], object]) -> None:
    """Calls a function in a thread, in the order of these requests."""
    _calling.ask(then)


def later(then: Callable[[], object]) -> None:
    """Calls a function in a thread after a short pause."""
    _postponed.ask(then)


def _wait_a_moment(then: Callable[[], object] | None) -> None:
    time.sleep(_LATER_S)
    while then is not None:
        soon(then)
        then = _postponed.next_request()


def do_now() -> bool:
    """Makes pending calls of `soon` in this thread. True if there were any."""
    done = False
    while (then := _calling.next_request()) is not None:
        done = True
        _call(then)
    return done


def call(device: Device, events: Sequence[Event], then: Callable[[], object]) -> None:
    """Calls a function in a thread once the device has passed the events; at once if there are none.

    The function must not block. This thread does not look at events: that would end its capture of a graph.
    """
    if events:
        soon(partial(_look, _Work(device, events, then)))
    else:
        _call(then)


def _look(work: _Work) -> None:
    if not _do_if_due(work):  # waiting blocks a thread, so another one does that
        _waiting.ask(work)


def _wait_for(work: _Work) -> None:
    waiting = [work]
    while waiting:
        while (another := _waiting.next_request()) is not None:
            waiting.append(another)
        waiting = [work for work in waiting if not _do_if_due(work)]
        if waiting and not _wait_for_events(waiting[0]):  # then looks at the others again
            _left.append(waiting.pop(0))


def _do_if_due(work: _Work) -> bool:
    """Calls `work.then` if the device has passed the work's events. Returns True if so."""
    try:
        if not work.due():
            return False
    except Exception:
        return False  # waiting for it raises the same error, and logs it
    for event in work.events:
        work.device.recycle(event)
    _call(work.then)
    return True


def _wait_for_events(work: _Work) -> bool:
    """Blocks until the device has passed the work's events. Returns False if the device failed."""
    try:
        for event in work.events:
            work.device.wait(event)
    except Exception as error:  # usually the device is lost
        log.warning("the device failed, so memory that it read is neither reused nor returned to its lender: %s", error)
        return False
    return True


def _call(then: Callable[[], object]) -> None:
    try:
        then()
    except Exception:  # the thread must live for other calls
        log.exception("memory of a device could not be released")


_calling: Final = Worker(_call)
_postponed: Final = Worker(_wait_a_moment)
_waiting: Final = Worker(_wait_for)
_left: Final[list[_Work]] = []
"""Work of lost devices, which never becomes due; keeps its memory for ever."""


_things: Final[dict[int, list[Any]]] = {}
"""The things of each `Aside`, by number, so that they do not become garbage together with it."""
_numbers: Final = itertools.count()


class Aside:
    """Holds things whose finalizers call CUDA. If this object ends on an event loop, a thread finalizes them."""

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
