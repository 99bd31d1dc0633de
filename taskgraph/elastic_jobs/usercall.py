"""One call of the user's function: its thread on one side, the event loop on the other.

    in the thread: first_state, ask, report, give_state, emit
    on the loop: let_code_begin_with, copied_state, returned, stop

A worker that is excluded and enters again calls the function again, with a state that it copies.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from taskgraph.elastic_jobs.adding import FinishedParts, Merging, chain_digest
from taskgraph.elastic_jobs.engine import TotalAndParts
from taskgraph.elastic_jobs.prepared_memory import PreparedMemory
from taskgraph.errors import JobError
from taskgraph.graph.blocks import Allocate
from taskgraph.graph.sums import Sums
from taskgraph.options import ARGPARSE
from taskgraph.protocol.messages import ComparedPart, Encoded, StateCopy, StateDigests
from taskgraph.protocol.records import name_of

if TYPE_CHECKING:
    from taskgraph.driver.spec import JobSpec
    from taskgraph.elastic_jobs.engine import Engine
    from taskgraph.elastic_jobs.interface import WorkerNode
    from taskgraph.elastic_jobs.tracing import WorkerTrace

__all__ = ["Stopped", "UserCall"]


_HAND_OVER_S: Final = 0.02
"""Finished spans are sent after so long, though the worker has more parts to compute: its death would cost them."""


_COMPARED_AFTER: Final = 9
"""Sums after which a part of the second most senior worker is compared: by then it may have kept what it read."""
_Checked = tuple[str, ComparedPart]
"""A worker, and the message about a part of it, which this worker computes, too."""


_Awaited = asyncio.Future[StateCopy | None]


class Stopped(BaseException):
    """Raised in user code when its worker ends, or begins anew. No `except Exception` of user code may catch it."""


class UserCall:
    """One call of the function of an elastic job.

    Args:
        function: calls it in a thread; returns its value, and how many totals it got.

    Attributes:
        state_wanted: another worker, or a checkpoint, waits for the state between two steps.
        value: what the function returned; None: it has not returned.
        positions: the number of totals that the function had got when it returned; -1: it has not returned.
    """

    def __init__(self, node: WorkerNode, engine: Engine, function: Callable[[UserCall], tuple[Encoded, int]]) -> None:
        self._node = node
        self._function = function
        self._engine = engine
        self._start: concurrent.futures.Future[StateCopy | None] = concurrent.futures.Future()
        self._wanted: list[tuple[str, _Awaited]] = []  # who waits for the state
        self._unstable: list[tuple[StateCopy, _Awaited]] = []  # copies that wait for the totals before them
        self._dealt: list[int] = []  # parts that user code has got and not begun; used in its thread
        self._ahead: tuple[int, int, tuple[int, ...]] = (-1, 0, ())  # position, the number of its parts, parts
        self._checking: _Checked | None = None  # the part at work is one that another worker has computed
        self._compared_in = _COMPARED_AFTER  # sums from now on; below 1: a part was compared, or none is to be
        self._merging: Merging | None = None  # of the parts that it has got last
        self._handed_at = 0.0
        self._stopped = False
        self._loop = asyncio.get_running_loop()
        self._rounds: asyncio.Task[None] | None = None  # deal pieces while user code computes some
        self._large: tuple[int, ...] = ()  # bytes of each large array of the state
        self._prepared: PreparedMemory | None = None
        self._checked: tuple[int, tuple[tuple[str, bytes], ...]] = (-1, ())  # a step, and digests of the state before
        self._asked = (-1, "")  # the position at which user code is, and what it asks for there
        self.state_wanted = False
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
        """Calls the function, and keeps its value and the number of totals that it got.

        Raises:
            JobError: it raised SystemExit or KeyboardInterrupt, which would end the worker, and then the others.
            RuntimeError: it raised what no future can carry.
        """
        try:
            self.value, self.positions = self._function(self)
        except (SystemExit, KeyboardInterrupt) as error:
            advice = "return from the function to end the job, or raise an exception"
            if isinstance(error, SystemExit) and error.code == 2:
                advice = ARGPARSE
            text = f"user code raised {error!r}: {advice}"
            raise JobError(text).with_traceback(error.__traceback__) from None
        except (StopIteration, GeneratorExit, asyncio.CancelledError) as error:
            raise RuntimeError(f"{type(error).__name__} left the function") from error

    def ask(
        self, position: int, parts: int, tag: bytes, call: str, done: tuple[int, Sums] | None, *, repeatable: bool
    ) -> int | Sums:
        """Gives the part `done`, waits, and returns the number of the next part, or the total of the position.

        Args:
            position: the number of totals that user code has got.
            parts: the number of parts of this position.
            tag: a digest of all totals so far and of what user code asks for; equal on all workers.
            call: what it asks for, for people.
            done: the part that user code has finished, if any, and what it contributes.
            repeatable: a part contributes the same if it is computed again.
        """
        self._asked = position, call
        if done is None and self._ahead[:2] == (position, parts) and self._ahead[2]:
            return self._first_of(self._ahead[2], parts)
        threads, trace, finished = self._node.threads, self._node.trace, None
        mark = trace.begin() if done is not None else None
        if done is not None and self._checking is not None:
            self._check_part(*self._checking, done[1])
        elif done is not None:
            assert self._merging is not None
            if self._engine.compared_part_due and repeatable:
                self._compared_in, self._engine.compared_part_due = 0, False
                threads.post(self._engine.send_compared_part, position, tag, done[0], chain_digest(b"", done[1]))
            self._merging.add(*done)
            if not self._dealt or threads.clock() > self._handed_at + _HAND_OVER_S:
                finished = self._merging.take(self._engine.contributions.encode_ahead)
                self._handed_at = threads.clock()
        if done is not None:
            trace.keep(mark, "add", f"adds part {done[0]}")
        if self._dealt and finished is not None:
            threads.post(self._engine.take_finished_parts, position, parts, tag, finished)
        if not self._dealt:
            answer: concurrent.futures.Future[list[int] | TotalAndParts | _Checked] = concurrent.futures.Future()
            threads.post(self._ask_engine, position, parts, tag, answer, finished)
            found = threads.block(answer, None)
            if isinstance(found, TotalAndParts):
                mark = trace.begin()
                total = found.total.sums()
                self._ahead = position + 1, found.of, found.ahead
                self._compared_in -= repeatable
                if self._compared_in == 0 and self._is_second:
                    self._engine.compared_part_due = True
                trace.keep(mark, "total", "adds up the total", size_bytes=total.nbytes)
                return total
            if isinstance(found, tuple):
                self._checking = found
                return found[1].part
            return self._first_of(found, parts)
        return self._dealt.pop(0)

    @property
    def _is_second(self) -> bool:
        """True if this is the second most senior worker."""
        view = self._engine.core.view
        return view is not None and view.workers[1:2] == (self._node.id,)

    def _first_of(self, dealt: Sequence[int], of: int) -> int:
        """Keeps the parts that user code was dealt, and returns the first; later calls of `ask` return the others."""
        first, *self._dealt = dealt
        self._merging = Merging(dealt, of, self.allocate)
        self._handed_at = self._node.threads.clock()
        return first

    def is_behind(self, position: int) -> bool:
        """True if user code at this position is behind its worker, which holds the position's total already."""
        return position < self._engine.core.position

    def _check_part(self, worker: str, other: ComparedPart, sums: Sums) -> None:
        """Compares a part that this worker has computed, too, with the digest of another one; emits `differs`."""
        self._checking = None
        if chain_digest(b"", sums) != other.digest:
            where = f"a part of {name_of(worker)}, in {self._asked[1]},"
            text = f"{where} differs from what {self.name} computes of it: something that parts read is not named in"
            self.emit("differs", f"{text} run.state, or they are not deterministic")

    def first_state(self) -> StateCopy | None:
        """Waits until user code may begin. Returns the state to begin with; None: its own."""
        return self._node.threads.block(self._start, None)

    def note_large(self, sizes: tuple[int, ...]) -> None:
        """Keeps the bytes of each large array of the state: `_prepare_memory` allocates as much for the next copy."""
        self._large = sizes

    def take_prepared_memory(self) -> PreparedMemory:
        """Returns what `_prepare_memory` prepared for a copy of the state, once; else memory that is not prepared."""
        memory, self._prepared = self._prepared, None
        return memory or PreparedMemory(self.allocate)

    def give_state(self, step: int, position: int, tag: bytes, value: Encoded) -> None:
        """Gives a copy of the state to those that wait for one; they get it once the totals before it are stable."""
        self.state_wanted = False
        self._node.threads.post(self._keep_copy, StateCopy(step, position, tag, value))

    def report(self, position: int, step: int, numbers: dict[str, float]) -> None:
        """Reports numbers of a step, which count once the totals below `position` are stable."""
        self._node.threads.post(self._node.reports.add, position, step, numbers)

    def emit(self, kind: str, text: str) -> None:
        """Emits an event of this node."""
        self._node.threads.post(self._node.events.emit, kind, text)

    def wait_for(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Waits until a coroutine has run on the loop. Raises `Stopped` if it fails, or the call is stopped before."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._node.threads.post(self._run_and_tell, work, done)
        self._node.threads.block(done, None)

    def clock(self) -> float:
        """Returns seconds by a clock of user code's thread; in a test by the loop's, so that a run is deterministic."""
        return self._loop.time() if self._node.threads.in_step else self._node.threads.clock()

    def post(self, function: Callable[[], None]) -> None:
        """Calls a function on the loop, soon; does not wait for that."""
        self._node.threads.post(function)

    def block(self, future: concurrent.futures.Future[None]) -> None:
        """Waits for a future in user code's thread."""
        self._node.threads.block(future, None)

    def take_ahead(self, position: int) -> tuple[int, tuple[int, ...]]:
        """Removes and returns the parts of a position that came with the total before it; (0, ()): none came.

        Returns:
            The number of all parts of the position, and the parts that came.
        """
        (at, of, parts), self._ahead = self._ahead, (-1, 0, ())
        return (of, parts) if at == position else (0, ())

    def keep_ahead(self, position: int, of: int, parts: tuple[int, ...]) -> None:
        """Keeps parts of a position that came with the total before it, for `ask` and `take_ahead`."""
        self._ahead = position, of, parts

    def run_rounds(
        self, rounds: Callable[[Engine], Coroutine[Any, Any, None]], over: Callable[[BaseException | None], None]
    ) -> None:
        """Starts a coroutine on the loop, beside user code, which must not call `ask` meanwhile.

        Args:
            over: called on the loop with the error that ended it; `Stopped`: the call ends; None: it has returned.
        """
        self._node.threads.post(self._begin_rounds, rounds, over)

    @property
    def parts_left(self) -> int:
        """The number of parts that this worker has been dealt and user code has not begun."""
        return len(self._dealt)

    def note_digests(self, step: int, digests: dict[str, bytes]) -> None:
        """Keeps the state's digests before a checked step, not earlier ones: if tags differ, they show what differs."""
        self._checked = step, tuple(sorted(digests.items()))

    @property
    def digests(self) -> StateDigests:
        """The digests of the state before the last checked step, and where user code is."""
        return StateDigests(*self._checked, *self._asked)

    # -- on the event loop ------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """True once user code may compute."""
        return self._start.done()

    def let_code_begin(self) -> None:
        """Lets user code begin with the state that it makes."""
        self._start.set_result(None)

    def let_code_begin_with(self, copy: StateCopy) -> None:
        """Lets user code begin with a copied state."""
        self._engine.catch_up(copy.position, [])
        self._start.set_result(copy)

    def stop(self) -> None:
        """Ends the call: raises `Stopped` in user code once it asks for something, and cancels rounds and copies."""
        self._stopped = True
        if not self._start.done():
            self._start.set_exception(Stopped())
        self._engine.answer_with_error(Stopped())
        if self._rounds is not None:
            self._rounds.cancel()
        for _, awaited in (*self._wanted, *self._unstable):
            if not awaited.done():
                awaited.set_result(None)

    async def copied_state(self, newcomer: str = "") -> StateCopy | None:
        """Returns the state of user code between two steps, once the totals before it are stable; None if the call is
        stopped meanwhile.

        Args:
            newcomer: keep the totals that follow for this worker.
        """
        if self._stopped:
            return None
        awaited: _Awaited = asyncio.get_running_loop().create_future()
        self._wanted.append((newcomer, awaited))
        if not self._large:
            self.state_wanted = True
        elif len(self._wanted) == 1:
            self._node.own(self._prepare_memory(), "make room")
        self._engine.heard()
        return await awaited

    async def _prepare_memory(self) -> None:
        """Prepares memory for a copy of the state in a thread, and then has user code make the copy."""
        memory = PreparedMemory(self.allocate)
        try:
            await self._node.file_threads.run(partial(memory.fill, self._large))
        finally:
            self._prepared, self.state_wanted = memory, True
            self._engine.heard()

    def give_stable_copies(self) -> None:
        """Gives copies of the state to those that wait for them, if the totals before them are stable now."""
        stable = self._engine.core.stable
        for copy, awaited in self._unstable:
            if copy.position <= stable and not awaited.done():
                awaited.set_result(copy)
        self._unstable = [(copy, awaited) for copy, awaited in self._unstable if copy.position > stable]

    async def returned(self) -> Encoded | None:
        """Waits until the function has returned, and returns its value; None: the call was stopped before."""
        while self.value is None and not self._stopped:
            await self._node.short_pause()
        return self.value

    def _ask_engine(self, position: int, parts: int, tag: bytes, answer: Any, finished: FinishedParts | None) -> None:
        """Gives the engine what user code has finished, then asks it for more; answers `Stopped` if the call ends."""
        if finished is not None:
            self._engine.take_finished_parts(position, parts, tag, finished)
        if self._stopped or not self._node.running:
            answer.set_exception(Stopped())
        else:
            self._engine.ask(position, parts, tag, answer)

    def _begin_rounds(
        self, rounds: Callable[[Engine], Coroutine[Any, Any, None]], over: Callable[[BaseException | None], None]
    ) -> None:
        """Starts the coroutine of `run_rounds` as a task; calls `over` when it ends, at once if the call is stopped."""
        if self._stopped or not self._node.running:
            over(Stopped())
            return
        failed: list[BaseException] = []

        async def run() -> None:
            try:
                await rounds(self._engine)
            except (Stopped, Exception) as error:  # user code gets it
                failed.append(error)

        def ended(task: asyncio.Task[None]) -> None:
            self._rounds = None
            over(Stopped() if task.cancelled() else failed[0] if failed else None)

        self._rounds = self._node.own(run(), "deal pieces")
        self._rounds.add_done_callback(ended)

    def _run_and_tell(self, work: Callable[[], Coroutine[Any, Any, None]], done: Any) -> None:
        """Starts the coroutine of `wait_for`, and sets its future when it has run; to `Stopped` if it failed."""

        def over(ran: asyncio.Task[None]) -> None:
            if ran.cancelled() or ran.exception() is not None:
                done.set_exception(Stopped())
            else:
                done.set_result(None)

        if self._stopped or not self._node.running:
            done.set_exception(Stopped())
        else:
            self._node.own(work(), "wait for user code").add_done_callback(over)

    def _keep_copy(self, copy: StateCopy) -> None:
        """Keeps a copy of the state until the totals before it are stable, for those that wait for it now."""
        wanted, self._wanted = self._wanted, []
        for newcomer, awaited in wanted:
            if newcomer:
                self._engine.totals.keep_for(newcomer, copy.position)  # it has not asked for totals yet
            self._unstable.append((copy, awaited))
        self.give_stable_copies()
