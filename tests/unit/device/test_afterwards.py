"""What finalizers leave to threads is done in order and to the end, wherever it is asked for."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from softdevice import SoftDevice, SoftStream

from taskgraph.device import afterwards


def until(there: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not there():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.001)


def test_calls_run_in_order() -> None:
    done: list[tuple[int, int]] = []
    for number in range(200):
        afterwards.call_soon(lambda number=number: done.append((number, threading.get_ident())))
    until(lambda: len(done) == 200)
    assert [number for number, _ in done] == list(range(200))
    assert threading.get_ident() not in {thread for _, thread in done}


def test_calls_from_many_threads() -> None:
    done: list[object] = []

    def twice() -> None:
        done.append(None)
        afterwards.call_soon(lambda: done.append(None))

    threads = [threading.Thread(target=lambda: [afterwards.call_soon(twice) for _ in range(100)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: len(done) == 1600)


def test_call_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    afterwards.call_soon(lambda: 1 / 0)
    afterwards.call_soon(done.set)
    assert done.wait(30)
    assert "could not be released" in caplog.text and "ZeroDivisionError" in caplog.text


def test_postponed_call() -> None:
    done, tries = threading.Event(), list[int]()

    def again() -> None:
        tries.append(len(tries))
        afterwards.call_later(again) if len(tries) < 3 else done.set()

    afterwards.call_later(again)
    assert done.wait(30) and tries == [0, 1, 2]


def test_capturing_thread_looks_at_no_event() -> None:
    soft, done = SoftDevice(), threading.Event()
    event = soft.record(soft.new_stream())
    with soft.captures():
        afterwards.call_after(soft, [event], done.set)
        assert done.wait(30)
    assert not soft.misuses


class Holds(SoftDevice):
    """A device that comes past the events of some streams when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.past: dict[SoftStream, threading.Event] = {}

    def held(self) -> SoftStream:
        stream = self.new_stream()
        self.past[stream] = threading.Event()
        stream.queue.append(lambda: None)
        stream.queued += 1
        return stream

    def wait(self, event: Any) -> None:
        if event.stream in self.past:
            assert self.past[event.stream].wait(30)
        super().wait(event)


def test_call_waits_for_events() -> None:
    soft, done = Holds(), list[str]()
    slow, slower = soft.held(), soft.held()
    afterwards.call_after(soft, [soft.record(slow), soft.record(slower)], lambda: done.append("both"))
    afterwards.call_after(soft, [], lambda: done.append("at once"))
    assert done == ["at once"]
    soft.past[slow].set()
    time.sleep(0.02)
    assert done == ["at once"]
    soft.past[slower].set()
    until(lambda: done == ["at once", "both"])


def test_due_call_overtakes_waiting_one() -> None:
    soft, done = Holds(), list[str]()
    slow, quick = soft.held(), soft.new_stream()
    afterwards.call_after(soft, [soft.record(slow)], lambda: done.append("slow"))
    time.sleep(0.01)
    afterwards.call_after(soft, [soft.record(quick)], lambda: done.append("quick"))
    soft.past[slow].set()
    until(lambda: sorted(done) == ["quick", "slow"])


def test_lost_device_keeps_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    left: list[object] = []
    monkeypatch.setattr(afterwards, "_lost", left)
    soft, other, done = SoftDevice(), SoftDevice(), threading.Event()
    event = soft.record(soft.new_stream())
    monkeypatch.setattr(soft, "has_passed", lambda event: 1 / 0)
    monkeypatch.setattr(soft, "wait", lambda event: 1 / 0)
    afterwards.call_after(soft, [event], lambda: pytest.fail("nobody knows whether it is read"))
    afterwards.call_after(other, [other.record(other.new_stream())], done.set)
    assert done.wait(30)
    until(lambda: len(left) == 1)
    assert "is neither reused nor returned to its lender: division by zero" in caplog.text


class Goes:
    def __init__(self, where: list[int]) -> None:
        self.where = where

    def __del__(self) -> None:
        self.where.append(threading.get_ident())


def test_aside_on_and_off_a_loop(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    where: list[int] = []
    afterwards.OffLoopFinalizer([Goes(where)])
    assert where == [threading.get_ident()]

    async def on_a_loop() -> None:
        aside = afterwards.OffLoopFinalizer([Goes(where), Goes(where)])
        cycle: list[object] = [aside]
        cycle.append(cycle)
        del aside, cycle
        gc.collect()
        await asyncio.to_thread(until, lambda: len(where) == 3)

    asyncio.run(on_a_loop())
    assert threading.get_ident() not in where[1:]
    assert not caplog.records
