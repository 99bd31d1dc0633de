"""One call of the user's function: its thread on one side, the event loop on the other.

    in the thread: first_state, ask, report, give_state, emit    on the loop: begin_with, copied_state, returned, stop

A worker that is excluded and enters again calls the function again, with a state that it copies.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from taskgraph.elastic_jobs.adding import Finished, Merging, Total
from taskgraph.elastic_jobs.engine import chained
from taskgraph.elastic_jobs.sums import Sums
from taskgraph.graph.blocks import Allocate
from taskgraph.protocol.messages import Encoded, FirstPart, StateCopy, StateDigests
from taskgraph.protocol.records import name_of

if TYPE_CHECKING:
    from taskgraph.driver.spec import JobSpec
    from taskgraph.elastic_jobs.engine import Engine
    from taskgraph.elastic_jobs.interface import WorkerNode
    from taskgraph.elastic_jobs.tracing import WorkerTrace

__all__ = ["Stopped", "UserCall"]


_HAND_OVER_S: Final = 0.02
"""Finished spans are sent after so long, though the worker has more parts to compute: its death would cost them."""


_Checked = tuple[str, FirstPart]
"""A newcomer, and its first part."""


class Stopped(BaseException):
    """Raised in user code when its worker ends, or begins anew. No `except Exception` of user code may catch it."""


class UserCall:
    """One call of the function of an elastic job.

    Args:
        function: calls it in a thread; returns its value, and how many totals it got.

    Attributes:
        digests: of the state before the last checked step.
        state_wanted: another worker, or a checkpoint, waits for the state between two steps.
        value: what the function returned; None: it has not returned.
        positions: the number of totals that it has got, once it has returned.
    """

    def __init__(self, node: WorkerNode, engine: Engine, function: Callable[[UserCall], tuple[Encoded, int]]) -> None:
        self._node = node
        self._function = function
        self._engine = engine
        self._start: concurrent.futures.Future[StateCopy | None] = concurrent.futures.Future()
        self._copies: list[tuple[str, asyncio.Future[StateCopy | None]]] = []  # who waits for the state
        self._dealt: list[int] = []  # parts that user code has got and not begun; used in its thread
        self._checking: _Checked | None = None  # the part at work is that of a newcomer
        self._merging: Merging | None = None  # of the parts that it has got last
        self._handed_at = 0.0
        self._stopped = False
        self.state_wanted = False
        self.digests = StateDigests(-1, ())
        self.value: Encoded | None = None
        self.positions = -1

    # -- in the thread of user code ---------------------------------------------------------------

    @property
    def spec(self) -> JobSpec:
        return self._node.spec

    @property
    def allocate(self) -> Allocate:
        """Allocates memory that other processes of the host can read."""
        return self._node.router.allocate

    @property
    def trace(self) -> WorkerTrace:
        return self._node.trace

    @property
    def name(self) -> str:
        return self._node.name

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers of the view that this worker has read."""
        return self.view[1]

    @property
    def view(self) -> tuple[int, tuple[str, ...]]:
        """The number of the view that this worker has read, and the names of its workers."""
        view = self._engine.core.view
        return (-1, ()) if view is None else (view.number, tuple(map(name_of, view.workers)))

    def __call__(self) -> None:
        """Calls the function."""
        self.value, self.positions = self._function(self)

    def ask(
        self, position: int, parts: int, tag: bytes, done: tuple[int, Sums] | None, *, repeatable: bool
    ) -> int | Sums:
        """Asks for the next part, or the total of the position.

        Args:
            position: the number of totals that user code has got.
            parts: the number of parts of this position.
            tag: a digest of all totals so far and of what user code asks for; equal on all workers.
            done: the part that user code has finished, if any, and what it contributes.
            repeatable: a part contributes the same if it is computed again.
        """
        threads, trace, finished = self._node.threads, self._node.trace, None
        mark = trace.begin() if done is not None else None
        if done is not None and self._checking is not None:
            self._check(*self._checking, done[1])
        elif done is not None:
            assert self._merging is not None
            if self._engine.first_part_due and repeatable:
                threads.post(self._engine.send_first_part, position, done[0], chained(b"", done[1]))
            self._merging.add(*done)
            if not self._dealt or threads.clock() > self._handed_at + _HAND_OVER_S:
                finished = self._merging.take(to_send=self._engine.sends_sums)
                self._handed_at = threads.clock()
        if done is not None:
            trace.keep(mark, "add", f"adds part {done[0]}")
        if self._dealt and finished is not None:
            threads.post(self._engine.computed, position, finished)
        if not self._dealt:
            answer: concurrent.futures.Future[list[int] | Total | _Checked] = concurrent.futures.Future()
            threads.post(self._asked, position, parts, tag, answer, finished)
            found = threads.block(answer, None)
            if isinstance(found, Total):
                mark = trace.begin()
                total = found.sums()
                trace.keep(mark, "total", "adds up the total", size_bytes=total.nbytes)
                return total
            if isinstance(found, tuple):
                self._checking = found
                return found[1].part
            self._dealt = found
            self._merging = Merging(found, parts, self.allocate)
            self._handed_at = threads.clock()
        return self._dealt.pop(0)

    def is_behind(self, position: int) -> bool:
        """True if this worker holds the total of a position that user code has not reached."""
        return position < self._engine.core.position

    def _check(self, newcomer: str, first: FirstPart, sums: Sums) -> None:
        """Compares the first part of a newcomer with what this worker computes of it."""
        self._checking = None
        if chained(b"", sums) != first.digest:
            name = name_of(newcomer)
            text = f"the first part of {name} differs from what {self.name} computes of it: something that parts read"
            self.emit("differs", f"{text} is not named in run.state, or they are not deterministic")

    def first_state(self) -> StateCopy | None:
        """Waits until user code may begin. Returns the state to begin with; None: its own."""
        return self._node.threads.block(self._start, None)

    def give_state(self, step: int, position: int, tag: bytes, value: Encoded) -> None:
        """Gives a copy of the state, between two steps, to newcomers and the checkpoint that wait for one."""
        self.state_wanted = False
        self._node.threads.post(self._given, StateCopy(step, position, tag, value))

    def report(self, position: int, step: int, numbers: dict[str, float]) -> None:
        """Reports numbers of a step, which count once the totals below `position` are stable."""
        self._node.threads.post(self._node.reports.add, position, step, numbers)

    def emit(self, kind: str, text: str) -> None:
        """Emits an event of this node."""
        self._node.threads.post(self._node.events.emit, kind, text)

    def wait_for(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Waits until a coroutine has run on the loop; if the node ends before, it raises `Stopped`."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._node.threads.post(self._run_and_tell, work, done)
        self._node.threads.block(done, None)

    @property
    def parts_left(self) -> int:
        """The number of parts that this worker has been dealt and user code has not begun."""
        return len(self._dealt)

    def note_digests(self, step: int, digests: dict[str, bytes]) -> None:
        """Keeps the digests of the state before a checked step, for workers that differ."""
        self.digests = StateDigests(step, tuple(sorted(digests.items())))

    # -- on the event loop ------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """True once user code may compute."""
        return self._start.done()

    def begin(self) -> None:
        """Lets user code begin with its own state."""
        self._start.set_result(None)

    def begin_with(self, copy: StateCopy) -> None:
        """Lets user code begin with a copied state."""
        self._engine.catch_up(copy.position, [])
        self._start.set_result(copy)

    def stop(self) -> None:
        """Raises `Stopped` in user code, as soon as it asks for something."""
        self._stopped = True
        if not self._start.done():
            self._start.set_exception(Stopped())
        self._engine.stop(Stopped())
        for _, copy in self._copies:
            if not copy.done():
                copy.set_result(None)

    async def copied_state(self, newcomer: str = "") -> StateCopy | None:
        """Returns the state of user code between two steps, once the totals before it are stable; None if the call is
        stopped meanwhile.

        Args:
            newcomer: keep the totals that follow for this worker.
        """
        if self._stopped:
            return None
        copy: asyncio.Future[StateCopy | None] = asyncio.get_running_loop().create_future()
        self._copies.append((newcomer, copy))
        self.state_wanted = True
        found = await copy
        while found is not None and self._engine.core.stable < found.position and not self._stopped:
            await self._node.short_pause()
        return None if self._stopped else found

    async def returned(self) -> Encoded | None:
        """Returns the value once the function has returned it; None: the call is stopped."""
        while self.value is None and not self._stopped:
            await self._node.short_pause()
        return self.value

    def _asked(self, position: int, parts: int, tag: bytes, answer: Any, finished: Finished | None) -> None:
        if finished is not None:
            self._engine.computed(position, finished)
        if self._stopped or not self._node.running:
            answer.set_exception(Stopped())
        else:
            self._engine.ask(position, parts, tag, answer)

    def _run_and_tell(self, work: Callable[[], Coroutine[Any, Any, None]], done: Any) -> None:
        def over(ran: asyncio.Task[None]) -> None:
            if ran.cancelled() or ran.exception() is not None:
                done.set_exception(Stopped())
            else:
                done.set_result(None)

        if self._stopped or not self._node.running:
            done.set_exception(Stopped())
        else:
            self._node.own(work(), "wait for user code").add_done_callback(over)

    def _given(self, copy: StateCopy) -> None:
        waiting, self._copies = self._copies, []
        for newcomer, future in waiting:
            if newcomer:
                self._engine.keep_totals_for(newcomer, copy.position)  # it has not asked for totals yet
            if not future.done():
                future.set_result(copy)
