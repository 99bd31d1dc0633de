"""An event loop with virtual time, and simulated processes that can be frozen.

One event loop runs all processes. A context variable names the process of each callback, and callbacks inherit it. A
process is in one of three states:

| State  | Callbacks | Ends |
|---|---|---|
| running | run when they are due | |
| busy | are held back: the process still executes its last step | when the step's duration is over |
| frozen | are held back, as by SIGSTOP | when the caller calls `thaw`, as by SIGCONT |

Callbacks that were held back run late, in their order. So a thawed process behaves like a real one: its timers have
passed and its messages are old, but its state is unchanged.

Each process reads the clock of its host, which has its own offset and rate. Code outside of all processes uses the
loop's own time, `at`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

__all__ = ["HostClock", "Process", "SimLoop", "SimulationHalted", "call_at_own_time", "later", "outside", "own_time"]

_MAX_AT_ONCE = 200_000
"""Callbacks at one moment of virtual time. More callbacks mean an endless loop."""

_OWNER: contextvars.ContextVar[Process | None] = contextvars.ContextVar("taskgraph_simulated_process", default=None)


class SimulationHalted(Exception):
    """Raised if the loop has no callback and no timer left, or runs for ever, before the run is over."""


@dataclass(frozen=True, slots=True)
class HostClock:
    """A host's monotonic clock."""

    rate: float = 1.0
    ahead_s: float = 0.0

    def reads(self, at: float) -> float:
        """Converts a time of the loop to this clock's reading at that time."""
        return at * self.rate + self.ahead_s

    def time_of(self, reads: float) -> float:
        """Converts a reading of this clock to a time of the loop, rounded up."""
        return reads - self.ahead_s if self.rate == 1.0 else (reads - self.ahead_s) / self.rate + _ROUNDING_S


_LOOP_CLOCK = HostClock()
_ROUNDING_S = 1e-9


class Process:
    """A simulated process. The module's docstring lists its states."""

    __slots__ = ("_held_back", "busy", "clock", "context", "frozen", "name", "step_s")

    def __init__(self, name: str, step_s: Callable[[], float] | None = None) -> None:
        self.name = name
        self.frozen = False
        self.busy = False
        self.clock = _LOOP_CLOCK
        self.step_s = step_s
        """Called after each step, which runs all due callbacks; returns its duration. None: steps take no time."""
        self._held_back: list[asyncio.Handle] = []
        self.context = contextvars.Context()
        self.context.run(_OWNER.set, self)

    def new_context(self) -> contextvars.Context:
        """Returns a new context for a task of this process."""
        return self.context.copy()

    def thaw(self, loop: SimLoop) -> None:
        """Ends the freeze, and runs the callbacks that were held back."""
        self.frozen = False
        self._run_held_back(loop)

    def end_step(self, loop: SimLoop) -> None:
        """Ends a step. The process is busy for the step's duration."""
        if self.step_s is not None and (took_s := self.step_s()) > 0.0:
            self.busy = True
            loop.call_later(took_s, self._end_busy, loop, context=_OUTSIDE.copy())

    def _end_busy(self, loop: SimLoop) -> None:
        """Called when the last step's duration is over."""
        self.busy = False
        self._run_held_back(loop)

    def _run_held_back(self, loop: SimLoop) -> None:
        """Queues the callbacks that were held back, unless the process is still frozen or busy."""
        if self.frozen or self.busy:
            return
        held, self._held_back = self._held_back, []
        loop.queue_held_back(held)


_OUTSIDE = contextvars.Context()


def outside(function: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
    """Calls the function now, outside of all processes: it uses the loop's time, and its callbacks have no process."""
    return _OUTSIDE.copy().run(function, *args)


def later(delay_s: float, function: Callable[[Unpack[Ts]], object], *args: *Ts) -> None:
    """Calls the function after `delay_s`, outside of all processes."""
    asyncio.get_running_loop().call_later(delay_s, function, *args, context=_OUTSIDE.copy())


def own_time() -> float:
    """Returns the running loop's own time. Some tests run on a loop that is not simulated."""
    loop = asyncio.get_running_loop()
    return loop.at if isinstance(loop, SimLoop) else loop.time()


def call_at_own_time(
    at: float, function: Callable[[Unpack[Ts]], object], *args: *Ts, context: contextvars.Context | None
) -> None:
    """Calls the function at a time of the loop's own clock."""
    loop = asyncio.get_running_loop()
    (loop.call_at_own_time if isinstance(loop, SimLoop) else loop.call_at)(at, function, *args, context=context)


class _FastHandle(asyncio.Handle):
    """A handle that skips the set-up of attributes that this loop never reads: a run creates millions of handles."""

    __slots__ = ()

    def __init__(
        self, callback: Any, args: tuple[Any, ...], loop: SimLoop, context: contextvars.Context | None
    ) -> None:
        self._callback = callback
        self._args = args
        self._loop = loop
        self._cancelled = False
        self._context = contextvars.copy_context() if context is None else context
        self._repr = self._source_traceback = None


class _FastTimerHandle(asyncio.TimerHandle):
    """A timer handle that skips the set-up of attributes that this loop never reads, like `_FastHandle`."""

    __slots__ = ()

    def __init__(
        self, when: float, callback: Any, args: tuple[Any, ...], loop: SimLoop, context: contextvars.Context | None
    ) -> None:
        self._when = when
        self._scheduled = False
        self._callback = callback
        self._args = args
        self._loop = loop
        self._cancelled = False
        self._context = contextvars.copy_context() if context is None else context
        self._repr = self._source_traceback = None

    def cancel(self) -> None:
        """Cancels the timer. The loop drops it when it is due."""
        self._cancelled = True
        self._callback = None
        self._args = ()


class _OrderedTask(asyncio.Task[Any]):
    """A task with its number as its hash: task groups keep tasks in sets, and cancel them in the order of hashes.

    By default the hash is the address, so the order would depend on earlier work of the real process.
    """

    __slots__ = ("_number",)

    def __init__(self, number: int, coro: Any, *, loop: SimLoop, name: str | None, context: Any) -> None:
        self._number = number  # first, since asyncio hashes the task at once
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self._number


class SimLoop(asyncio.BaseEventLoop):
    """An event loop whose time jumps to the next timer when no callback is due. It has no files and no sockets.

    `time()`, delays and timers use the clock of the calling process; `at` and `call_at_own_time` use the loop's clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at = 1.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = 0
        self._due: list[asyncio.Handle] = []
        self._at_once = 0
        self._tasks = 0
        self.steps = 0
        self._stepped_processes: dict[Process, None] = {}  # processes with step times that ran callbacks in this step
        self.abort = ""  # the reason for which the next step raises `SimulationHalted`; "": none

    def time(self) -> float:
        process = _OWNER.get()
        return self.at if process is None or process.clock is _LOOP_CLOCK else process.clock.reads(self.at)

    def create_task(
        self, coro: Any, *, name: object = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        self._tasks += 1
        return _OrderedTask(self._tasks, coro, loop=self, name=None if name is None else str(name), context=context)

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = _FastHandle(callback, args, self, context)
        self._due.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)  # worker threads, if any, run in lock-step

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        process = _OWNER.get()
        at = self.at + (delay if process is None else delay / process.clock.rate)
        handle = _FastTimerHandle(at, callback, args, self, context)
        self._count += 1
        heappush(self._timers, (at, self._count, handle))
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        process = _OWNER.get()
        at = when if process is None else process.clock.time_of(when)
        return self.call_at_own_time(at, callback, *args, context=context)

    def call_at_own_time(
        self, at: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: contextvars.Context | None
    ) -> asyncio.TimerHandle:
        """Schedules like `call_at`, by the loop's own clock."""
        handle = _FastTimerHandle(at, callback, args, self, context)
        self._count += 1
        heappush(self._timers, (at, self._count, handle))
        return handle

    def queue_held_back(self, handles: list[asyncio.Handle]) -> None:
        """Queues callbacks that were held back."""
        self._due.extend(handles)

    def _write_to_self(self) -> None:
        pass

    def _run_once(self) -> None:
        """Runs steps until the loop stops, where asyncio runs one: a return to the caller after each would be slow."""
        while not self._stopping:  # type: ignore[attr-defined]
            self._run_step()

    def _run_step(self) -> None:
        """Runs all callbacks and timers that are due; if none is, first advances the time to the next timer."""
        if self.abort:
            why, self.abort = self.abort, ""
            raise SimulationHalted(why)
        timers = self._timers
        if not self._due:
            while timers and timers[0][2]._cancelled:
                heappop(timers)
            if not timers:
                raise SimulationHalted("nothing can happen: all code waits, and no timer is left")
            self.at = max(self.at, timers[0][0])
            self._at_once = 0
        now = self.at
        due, self._due = self._due, []
        while timers and timers[0][0] <= now:
            timer = heappop(timers)[2]
            if not timer._cancelled:
                due.append(timer)
        self._at_once += len(due)
        self.steps += len(due)
        if self._at_once > _MAX_AT_ONCE:
            raise SimulationHalted(f"{self._at_once} callbacks at one moment: something runs for ever ({due[-1]!r})")
        ran = self._stepped_processes
        for handle in due:
            if handle._cancelled:
                continue
            context: contextvars.Context = handle._context  # type: ignore[attr-defined]
            if (process := context.get(_OWNER)) is not None:
                if process.frozen or process.busy:
                    process._held_back.append(handle)
                    continue
                if process.step_s is not None:
                    ran[process] = None
            try:
                context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"{handle!r} failed", "exception": error, "handle": handle})
        if ran:
            self._stepped_processes = {}
            for process in ran:
                process.end_step(self)

    def close(self) -> None:
        self._timers.clear()
        self._due.clear()
        super().close()
