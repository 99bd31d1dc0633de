"""What takes long in a seed without being a failure: what else happens meanwhile, and that nothing is lost by it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from taskgraph.testing.simulate import pace
from taskgraph.testing.simulate.loop import HostClock, Process, SimLoop, outside
from taskgraph.testing.simulate.pace import HostClocks, SlowActors, SlowLink, StepTimes
from taskgraph.testing.simulate.threads import FunctionTiming, InlineThreads


def play(scenario: Callable[[], Any]) -> Any:
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(scenario())


def running(name: str, takes_s: float) -> tuple[Process, list[tuple[str, float]]]:
    """A process whose loop takes so long for what it runs at one time, and what it has run, and when."""
    return Process(name, lambda: takes_s), []


def call(process: Process, ran: list[tuple[str, float]], *names: str, at_s: float = 0.0) -> None:
    """Has the process call these, each after the one before it, without a wait."""
    loop = asyncio.get_running_loop()

    def step(left: tuple[str, ...]) -> None:
        ran.append((left[0], round(loop.time() - 1.0, 6)))
        if left[1:]:
            loop.call_soon(step, left[1:])

    loop.call_later(at_s, step, names, context=process.context)


def test_messages_arrive_between_two_steps_of_a_busy_loop() -> None:
    async def scenario() -> list[tuple[str, float]]:
        process, ran = running("n1", 0.1)
        call(process, ran, "first", "second", "third")
        call(process, ran, "message", at_s=0.05)
        await asyncio.sleep(1.0)
        return ran

    assert play(scenario) == [("first", 0.0), ("second", 0.1), ("message", 0.1), ("third", 0.2)]


def test_a_busy_loop_holds_up_no_other_process() -> None:
    async def scenario() -> list[tuple[str, float]]:
        busy, ran = running("n1", 0.1)
        call(busy, ran, "a", "b")
        call(Process("n2"), ran, "x", "y", "z", at_s=0.01)
        await asyncio.sleep(1.0)
        return ran

    assert play(scenario) == [("a", 0.0), ("x", 0.01), ("y", 0.01), ("z", 0.01), ("b", 0.1)]


@pytest.mark.parametrize("thaws_s", [0.05, 0.3])
def test_process_runs_when_neither_busy_nor_frozen(thaws_s: float) -> None:
    async def scenario() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        process, ran = running("n1", 0.1)
        call(process, ran, "a", "b", "c")
        await asyncio.sleep(0.01)
        process.frozen = True
        loop.call_later(thaws_s - 0.01, process.thaw, loop)
        await asyncio.sleep(1.0)
        return ran

    goes_on_s = max(0.1, thaws_s)
    assert play(scenario) == [("a", 0.0), ("b", goes_on_s), ("c", round(goes_on_s + 0.1, 6))]


def test_each_process_reads_a_clock_of_its_own() -> None:
    """Its timers go by that, too; what is outside of every process goes by the loop's own time."""

    async def scenario() -> list[tuple[float, float]]:
        loop, told = asyncio.get_running_loop(), list[tuple[float, float]]()
        assert isinstance(loop, SimLoop)
        process = Process("n1")
        process.clock = HostClock(1.25, 1000.0)

        def tell() -> None:
            told.append((round(loop.time(), 6), round(loop.at, 6)))

        def starts() -> None:
            tell()
            loop.call_later(5.0, tell)
            loop.call_at(loop.time() + 10.0, tell)
            outside(loop.call_later, 10.0, tell)

        loop.call_later(0.0, starts, context=process.context)
        await asyncio.sleep(20.0)
        return told

    assert play(scenario) == [(1001.25, 1.0), (1006.25, 5.0), (1011.25, 9.0), (11.0, 11.0)]


def test_hosts_have_one_clock_each_and_no_clock_goes_by_a_timer_too_early() -> None:
    assert HostClocks(random.Random(1), share=0.0).clock_of("h1") == HostClock()
    clocks = HostClocks(random.Random(1), share=1.0)
    first, second = clocks.clock_of("h1"), clocks.clock_of("h2")
    assert first is clocks.clock_of("h1") and first != second
    assert all(abs(clock.rate - 1.0) <= clocks.drift <= pace.MAX_CLOCK_DRIFT for clock in (first, second))
    assert all(
        first.reads(first.time_of(first.reads(1.0) + more / 7)) >= first.reads(1.0) + more / 7 for more in range(999)
    )


def test_one_link_is_slow_and_never_too_slow_to_connect() -> None:
    links = SlowLink(random.Random(1), share=1.0)
    pairs = [(f"n{one}", f"n{other}") for one in range(1, 5) for other in range(1, 5) if one != other]
    slow = {pair for pair in pairs if links.delay_s(f"{pair[0]}-1", f"{pair[1]}-3", 0.0001, 1.0) > 0.0001}
    assert len(slow) == 2 and {pair[::-1] for pair in slow} == slow, "both ways"
    one, other = slow.pop()
    assert links.delay_s(f"{one}-1", f"{other}-1", 0.1, 1.0) == 0.2
    assert links.delay_s(f"{one}-1", f"{other}-1", 0.3, 1.0) == 0.3
    assert not SlowLink(random.Random(1), share=0.0).active


def test_steps_take_no_time_where_they_are_not_drawn_or_have_ended() -> None:
    assert StepTimes(random.Random(1), share=0.0).step_s() == 0.0
    steps = StepTimes(random.Random(1), share=1.0)
    assert max(steps.step_s() for _ in range(1000)) > 0.0
    steps.end()
    assert steps.step_s() == 0.0


def test_one_actor_comes_last_for_a_while() -> None:
    now, told = 0.0, list[tuple[str, float, float]]()
    last = SlowActors(random.Random(3), share=1.0, now=lambda: now)
    last.on_slow = lambda *what: told.append(what)
    last._next_changes = [3]
    assert last.late_s("a") == last.late_s("b") == 0.0 and not told
    first = last.late_s("a", "b")
    ((name, late_s, for_s),) = told
    other = "b" if name == "a" else "a"
    assert all(0.5 * late_s <= each <= late_s for each in (first, last.late_s(name), last.late_s(other, name)))
    assert last.late_s(other) == 0.0
    now = for_s
    assert last.late_s(name) == 0.0


def test_no_actor_comes_last_unless_drawn() -> None:
    assert not SlowActors(random.Random(3), share=0.0, now=lambda: 0.0).active
    last = SlowActors(random.Random(3), share=1.0, now=lambda: 0.0)
    last._next_changes = [1]
    assert last.active and last.late_s("a") > 0.0
    last.end()
    assert last.late_s("a") == 0.0


def test_abandoned_function_may_have_run() -> None:
    """A thread is through with it before the loop hears of that."""

    async def scenario() -> tuple[list[str], bool]:
        threads, ran = InlineThreads(random.Random(1), 1.0, FunctionTiming(random.Random(2), share=1.0)), list[str]()
        future = threads.run(lambda: ran.append("ran"))
        while not ran:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0.001)
        given_up = future.cancel()
        await asyncio.sleep(1.0)
        return ran, given_up

    assert play(scenario) == (["ran"], True)


def test_a_brief_function_may_be_over_at_once() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    async def scenario() -> None:
        ends = FunctionTiming(random.Random(1), share=1.0)
        ends._at_once_share = 1.0
        threads = InlineThreads(random.Random(1), 1.0, ends)
        assert threads.start(lambda: 7, brief=True).over and threads.start(lambda: 7, brief=True).result() == 7
        with pytest.raises(ZeroDivisionError):
            threads.start(fail, brief=True).result()
        assert not threads.start(lambda: 7, brief=False).over

    play(scenario)
