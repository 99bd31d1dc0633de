"""Threads that do the work of finalizers: calls that may block, and calls that wait for events of a device.

    finalizer ──► `call_soon` ──────────────────────────► thread 1 calls it
              ──► `call_later` ──► thread 2, a pause ──► `call_soon`
              ──► `call_after` some events ──► thread 1: passed? ──► call it
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

__all__ = [
    "FinalizerThread",
    "OffLoopFinalizer",
    "call_after",
    "call_later",
    "call_soon",
    "make_pending_calls",
    "on_a_loop",
]

_IDLE_S: Final = 10.0
"""How long an idle thread lives."""
_LATER_S: Final = 0.01
"""Pause before a postponed call; it keeps memory for as long."""

log = logging.getLogger("taskgraph.devices")


def on_a_loop() -> bool:
    """True if an event loop runs in this thread."""
    return asyncio._get_running_loop() is not None


class _DeferredCall(NamedTuple):
    """A function to call once the device has passed some events."""

    device: Device
    events: Sequence[Event]
    then: Callable[[], object]

    def events_passed(self) -> bool:
        return all(map(self.device.has_passed, self.events))


class FinalizerThread:
    """A thread that handles requests of finalizers, and ends after a while without any.

    Args:
        work: handles one request.
    """

    def __init__(self, work: Callable[[Any], None]) -> None:
        self._work = work
        self._requests: SimpleQueue[Any] = SimpleQueue()  # its `put` is reentrant, unlike that of `Queue`
        self._busy = _thread.allocate_lock()  # the running thread has it

    def ask(self, request: object) -> None:
        """Gives the thread a request, and starts the thread if none runs. Does not wait."""
        self._requests.put(request)
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
                request = self._requests.get(timeout=_IDLE_S)
            except Empty:
                self._busy.release()
                if self._requests.empty() or not self._busy.acquire(blocking=False):
                    return  # a request that came meanwhile started another thread
            else:
                self._work(request)
                del request  # an idle thread keeps no references


def call_soon(then: Callable[[], object]) -> None:
    """Calls a function soon in a helper thread, one after another in the order of the calls. Does not wait."""
    _calling.ask(then)


def call_later(then: Callable[[], object]) -> None:
    """Passes a function to `call_soon` after a short pause. Does not wait."""
    _postponed.ask(then)


def _call_after_pause(then: Callable[[], object] | None) -> None:
    """After a pause passes the function, and those that came meanwhile, to `call_soon`."""
    time.sleep(_LATER_S)
    while then is not None:
        call_soon(then)
        then = _postponed.next_request()


def make_pending_calls() -> bool:
    """Calls the functions that wait for the thread of `call_soon`, in this thread. True if there were any."""
    done = False
    while (then := _calling.next_request()) is not None:
        done = True
        _call_and_log_error(then)
    return done


def call_after(device: Device, events: Sequence[Event], then: Callable[[], object]) -> None:
    """Calls a function in a helper thread once the device has passed the events; without events here, at once.

    The function must not block. This thread does not look at events: that would end its capture of a graph.
    """
    if events:
        call_soon(partial(_call_or_wait, _DeferredCall(device, events, then)))
    else:
        _call_and_log_error(then)


def _call_or_wait(work: _DeferredCall) -> None:
    if not _call_if_passed(work):  # waiting blocks a thread, so another one does that
        _waiting.ask(work)


def _wait_and_call(work: _DeferredCall) -> None:
    """Handles a request of the thread that waits, with those that come meanwhile, each when its events have passed."""
    waiting = [work]
    while waiting:
        while (another := _waiting.next_request()) is not None:
            waiting.append(another)
        waiting = [work for work in waiting if not _call_if_passed(work)]
        if waiting and not _wait_for_events(waiting[0]):  # then looks at the others again
            _lost.append(waiting.pop(0))


def _call_if_passed(work: _DeferredCall) -> bool:
    """Calls `work.then` if the device has passed the work's events. False: it has not, or the device failed."""
    try:
        if not work.events_passed():
            return False
    except Exception:
        return False  # waiting for it raises the same error, and logs it
    for event in work.events:
        work.device.recycle(event)
    _call_and_log_error(work.then)
    return True


def _wait_for_events(work: _DeferredCall) -> bool:
    """Blocks until the device has passed the work's events. Returns False if the device failed."""
    try:
        for event in work.events:
            work.device.wait(event)
    except Exception as error:  # usually the device is lost
        log.warning("the device failed, so memory that it read is neither reused nor returned to its lender: %s", error)
        return False
    return True


def _call_and_log_error(then: Callable[[], object]) -> None:
    try:
        then()
    except Exception:  # the thread must live for other calls
        log.exception("memory of a device could not be released")


_calling: Final = FinalizerThread(_call_and_log_error)
_postponed: Final = FinalizerThread(_call_after_pause)
_waiting: Final = FinalizerThread(_wait_and_call)
_lost: Final[list[_DeferredCall]] = []
"""Work of lost devices, which never becomes due; keeps its memory for ever."""


_things: Final[dict[int, list[Any]]] = {}
"""The things of each `OffLoopFinalizer`, by number, so that they do not become garbage together with it."""
_numbers: Final = itertools.count()


class OffLoopFinalizer:
    """Holds things whose finalizers call CUDA. If it is finalized on an event loop, a thread finalizes the things."""

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
            call_soon(partial(_things.pop, self._number))
        else:
            del _things[self._number]
