"""Virtual time, and processes that can be frozen.

One event loop runs everything. Each simulated process is a name in a context variable: what a process starts inherits
it, so the loop knows of every callback whose it is. A frozen process is one whose callbacks are held back; on thaw
they run in the order they would have, late: its timers have passed, its messages are old, its mind is unchanged. That
is what SIGSTOP and SIGCONT do to a process, and it makes a real zombie.

Likewise a process may be busy for a while with what it has run at one time.

Each process reads a clock of its own: it is ahead of others', and runs at its own rate. Whatever is outside of every
process goes by the loop's own time, `at`.
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
"""Callbacks at one moment of virtual time; more is a loop that does not end."""

_OWNER: contextvars.ContextVar[Process | None] = contextvars.ContextVar("taskgraph_simulated_process", default=None)


class Nothing(Exception):
    """The loop cannot go on, and the run is not over."""


@dataclass(frozen=True, slots=True)
class Clock:
    """A host's monotonic clock."""

    rate: float = 1.0
    ahead_s: float = 0.0

    def reads(self, at: float) -> float:
        """What it shows at a time of the loop."""
        return at * self.rate + self.ahead_s

    def when(self, reads: float) -> float:
        """The time of the loop at which it shows that, or has just shown it: there are roundings."""
        return reads - self.ahead_s if self.rate == 1.0 else (reads - self.ahead_s) / self.rate + _ROUNDED_S


_TRUE = Clock()
_ROUNDED_S = 1e-9


class Process:
    """Something that can be frozen as a whole."""

    __slots__ = ("_held", "busy", "clock", "context", "frozen", "name", "stepped")

    def __init__(self, name: str, stepped: Callable[[], float] | None = None) -> None:
        self.name = name
        self.frozen = False
        self.busy = False
        self.clock = _TRUE
        self.stepped = stepped
        """Told that all was run that was to be run at one time; returns how long that took."""
        self._held: list[asyncio.Handle] = []
        self.context = contextvars.Context()
        self.context.run(_OWNER.set, self)

    def fresh(self) -> contextvars.Context:
        """A context for a task of this process."""
        return self.context.copy()

    def thaw(self, loop: SimLoop) -> None:
        """What was held back runs now."""
        self.frozen = False
        self._go_on(loop)

    def steps(self, loop: SimLoop) -> None:
        """All was run that was to be run now; what comes while that takes is held back."""
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
    """Calls it at once, outside of every process: by the loop's own time, and what it starts is nobody's."""
    return _OUTSIDE.copy().run(function, *args)


def later(delay_s: float, function: Callable[[Unpack[Ts]], object], *args: *Ts) -> None:
    """Calls it in so long, outside of every process."""
    asyncio.get_running_loop().call_later(delay_s, function, *args, context=_OUTSIDE.copy())


def own_time() -> float:
    """That of the loop that runs. Tests of a part have a loop that is not simulated."""
    loop = asyncio.get_running_loop()
    return loop.at if isinstance(loop, SimLoop) else loop.time()


def plan(at: float, function: Callable[[Unpack[Ts]], object], *args: *Ts, context: contextvars.Context | None) -> None:
    """Calls it at that time of the loop's own."""
    loop = asyncio.get_running_loop()
    (loop.plan if isinstance(loop, SimLoop) else loop.call_at)(at, function, *args, context=context)


class _Now(asyncio.Handle):
    """A handle is made for each of millions of callbacks: without what the loop here never looks at."""

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
        """It is thrown away when its time comes."""
        self._cancelled = True
        self._callback = None
        self._args = ()


class _Task(asyncio.Task[Any]):
    """Its hash is a number of its own instead of its address: groups keep tasks in sets, and cancel them in that order.

    Else the order would depend on what the process did before.
    """

    __slots__ = ("_number",)

    def __init__(self, number: int, coro: Any, *, loop: SimLoop, name: str | None, context: Any) -> None:
        self._number = number  # first: the loop's set of all tasks asks for the hash at once
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self._number


class SimLoop(asyncio.BaseEventLoop):
    """Time leaps to the next timer when nothing else is to be done. There are no files and no sockets.

    `time()` is by the clock of the process that asks, as are the delays and times of timers; `at` and `plan` are not.
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
        """As `call_at`, by the loop's own time."""
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
        """As often as there is something to be done: to come back here for each moment took a while, too."""
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
                raise Nothing("nothing can happen any more: everything waits for something that nobody does")
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
