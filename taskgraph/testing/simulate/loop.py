"""Virtual time, and processes that can be frozen.

One event loop runs everything. A context variable names the simulated process of each callback, and callbacks inherit
it. A process is in one of three states:

| State  | Callbacks | Ends |
|---|---|---|
| running | run when they are due | |
| busy | are held back: the process still executes its last step | when that step's time is over |
| frozen | are held back, as by SIGSTOP | when the caller calls `thaw`, as by SIGCONT |

Callbacks that were held back run late, in their order. So a process that thaws is a real zombie: its timers have passed
and its messages are old, but its state is unchanged.

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

__all__ = ["Clock", "Nothing", "Process", "SimLoop", "later", "outside", "own_time", "plan"]

_MAX_AT_ONCE = 200_000
"""Callbacks at one moment of virtual time; more of them mean an endless loop."""

_OWNER: contextvars.ContextVar[Process | None] = contextvars.ContextVar("taskgraph_simulated_process", default=None)


class Nothing(Exception):
    """The loop cannot go on, and the run is not over."""


@dataclass(frozen=True, slots=True)
class Clock:
    """A host's monotonic clock."""

    rate: float = 1.0
    ahead_s: float = 0.0

    def reads(self, at: float) -> float:
        """Converts a time of the loop to what this clock shows then."""
        return at * self.rate + self.ahead_s

    def when(self, reads: float) -> float:
        """Converts what this clock shows to a time of the loop, rounded up: the clock shows no less then."""
        return reads - self.ahead_s if self.rate == 1.0 else (reads - self.ahead_s) / self.rate + _ROUNDED_S


_TRUE = Clock()
_ROUNDED_S = 1e-9


class Process:
    """A process: see the states above."""

    __slots__ = ("_held", "busy", "clock", "context", "frozen", "name", "stepped")

    def __init__(self, name: str, stepped: Callable[[], float] | None = None) -> None:
        self.name = name
        self.frozen = False
        self.busy = False
        self.clock = _TRUE
        self.stepped = stepped
        """Called after each step, in which all due callbacks ran; returns how long the step took."""
        self._held: list[asyncio.Handle] = []
        self.context = contextvars.Context()
        self.context.run(_OWNER.set, self)

    def fresh(self) -> contextvars.Context:
        """A context for a task of this process."""
        return self.context.copy()

    def thaw(self, loop: SimLoop) -> None:
        """Ends the freeze. Callbacks that were held back run now."""
        self.frozen = False
        self._go_on(loop)

    def steps(self, loop: SimLoop) -> None:
        """Ends a step. The process is busy for the time that the step took."""
        if self.stepped is not None and (took_s := self.stepped()) > 0.0:
            self.busy = True
            loop.call_later(took_s, self._stepped, loop, context=_OUTSIDE.copy())

    def _stepped(self, loop: SimLoop) -> None:
        self.busy = False
        self._go_on(loop)

    def _go_on(self, loop: SimLoop) -> None:
        if self.frozen or self.busy:
            return
        held, self._held = self._held, []
        loop.again(held)


_OUTSIDE = contextvars.Context()


def outside(function: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
    """Calls the function now, outside of all processes: by the loop's own time, and its callbacks belong to none."""
    return _OUTSIDE.copy().run(function, *args)


def later(delay_s: float, function: Callable[[Unpack[Ts]], object], *args: *Ts) -> None:
    """Calls the function after `delay_s`, outside of all processes."""
    asyncio.get_running_loop().call_later(delay_s, function, *args, context=_OUTSIDE.copy())


def own_time() -> float:
    """The running loop's own time. Tests of a part may run on a loop that is not simulated."""
    loop = asyncio.get_running_loop()
    return loop.at if isinstance(loop, SimLoop) else loop.time()


def plan(at: float, function: Callable[[Unpack[Ts]], object], *args: *Ts, context: contextvars.Context | None) -> None:
    """Calls the function at a time of the loop's own."""
    loop = asyncio.get_running_loop()
    (loop.plan if isinstance(loop, SimLoop) else loop.call_at)(at, function, *args, context=context)


class _Now(asyncio.Handle):
    """A handle without the attributes that this loop never reads: a run makes millions of them."""

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


class _Later(asyncio.TimerHandle):
    """See `_Now`."""

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
        """Cancels the timer; the loop drops it when its time comes."""
        self._cancelled = True
        self._callback = None
        self._args = ()


class _Task(asyncio.Task[Any]):
    """A task whose hash is its number, not its address: task groups keep tasks in sets, and cancel them in that order.

    With addresses the order would depend on what the process did before.
    """

    __slots__ = ("_number",)

    def __init__(self, number: int, coro: Any, *, loop: SimLoop, name: str | None, context: Any) -> None:
        self._number = number  # first: the loop's set of all tasks asks for the hash at once
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self._number


class SimLoop(asyncio.BaseEventLoop):
    """A loop whose time jumps to the next timer when no callback is due. It has no files and no sockets.

    `time()`, delays and times of timers are by the clock of the calling process; `at` and `plan` are by the loop's own.
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
        self.ran: dict[Process, None] = {}  # processes that have a pace, and whose callbacks are being run
        self.abort = ""  # why it must not go on

    def time(self) -> float:
        process = _OWNER.get()
        return self.at if process is None or process.clock is _TRUE else process.clock.reads(self.at)

    def create_task(
        self, coro: Any, *, name: object = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        self._tasks += 1
        return _Task(self._tasks, coro, loop=self, name=None if name is None else str(name), context=context)

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = _Now(callback, args, self, context)
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
        handle = _Later(at, callback, args, self, context)
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
        at = when if process is None else process.clock.when(when)
        return self.plan(at, callback, *args, context=context)

    def plan(
        self, at: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: contextvars.Context | None
    ) -> asyncio.TimerHandle:
        """Schedules like `call_at`, by the loop's own time."""
        handle = _Later(at, callback, args, self, context)
        self._count += 1
        heappush(self._timers, (at, self._count, handle))
        return handle

    def again(self, handles: list[asyncio.Handle]) -> None:
        """Runs callbacks that were held back."""
        self._due.extend(handles)

    def _write_to_self(self) -> None:
        pass

    def _run_once(self) -> None:
        """Runs steps while any is due: a return to the caller after each step would be slow."""
        while not self._stopping:  # type: ignore[attr-defined]
            self._run_moment()

    def _run_moment(self) -> None:
        if self.abort:
            why, self.abort = self.abort, ""
            raise Nothing(why)
        timers = self._timers
        if not self._due:
            while timers and timers[0][2]._cancelled:
                heappop(timers)
            if not timers:
                raise Nothing("nothing can happen: all code waits, and no timer is left")
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
            raise Nothing(f"{self._at_once} callbacks at one moment: something runs for ever ({due[-1]!r})")
        ran = self.ran
        for handle in due:
            if handle._cancelled:
                continue
            context: contextvars.Context = handle._context  # type: ignore[attr-defined]
            if (process := context.get(_OWNER)) is not None:
                if process.frozen or process.busy:
                    process._held.append(handle)
                    continue
                if process.stepped is not None:
                    ran[process] = None
            try:
                context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"{handle!r} failed", "exception": error, "handle": handle})
        if ran:
            self.ran = {}
            for process in ran:
                process.steps(self)

    def close(self) -> None:
        self._timers.clear()
        self._due.clear()
        super().close()
