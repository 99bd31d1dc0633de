"""Where user code is in its run, and pieces that are computed once for all workers (`run.once`, `run.map`).

Pieces are a round of their own: each is a part, and what its worker computes is collected and reaches all. So pieces
are dealt, and computed again after a death, as parts are.

What is computed before the first step travels with the state: a newcomer's user code begins at its top, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from taskgraph.elastic_jobs.adding import chain_digest
from taskgraph.elastic_jobs.differing import END, error_of_wrong_call, is_checked
from taskgraph.elastic_jobs.libraries import pytorch
from taskgraph.elastic_jobs.rows import check_same
from taskgraph.elastic_jobs.seeding import GeneratorTurn, derived_seed, seed_generators
from taskgraph.elastic_jobs.sharing import refuse_shared_memory
from taskgraph.elastic_jobs.state import capture, check_names, digests, leaves, load, writable
from taskgraph.errors import StateError, StepError
from taskgraph.graph.sums import Sums
from taskgraph.graph.values import decode, encode

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.modules import Modules
    from taskgraph.elastic_jobs.usercall import UserCall
    from taskgraph.elastic_jobs.watching import Watch

__all__ = ["PIECE", "SUMMED", "CarriedState", "RunProgress"]

SUMMED: Final = 1
BOUNDARY: Final = 3
PIECE: Final = 4
"""Seeds of code after a round, between two steps, and in a piece: they differ at one position."""


class CarriedState(Protocol):
    """What newcomers and checkpoints get beside the user's state."""

    def captured(self) -> Any:
        """Returns a value that travels. Later changes must not reach it."""

    def load(self, captured: Any) -> None:
        """Replaces the content by what `captured` returned: on a newcomer, or for the checkpoint that is resumed."""

    def digests(self) -> dict[str, bytes]:
        """Returns digests by name, which are compared with those of other workers, as those of the state are."""


class RunProgress:
    """Where user code is in its run, on one worker.

    Attributes:
        node: the call of user code, as its node sees it.
        turn: taken while user code runs.
        position: the number of totals that user code has got.
        tag: a digest of these totals.
        in_steps: the first step has begun.
        end_tag: a digest of the state after the last step, which workers compare at the end; b"": there were no steps.
        watch: a test that watches user code; None: there is none.
        results_before_steps: the results of each `run.once` and `run.map` before the first step, in order.
        steps_arguments: the arguments of `run.steps` that all workers have to give alike.
        carried: by name, what travels with the state.
        copied_group_members: members of the group (`run.group`) on the worker whose state is copied; (): none.
    """

    def __init__(self, node: UserCall, turn: GeneratorTurn) -> None:
        self.node = node
        self.turn = turn
        self.position = 0
        self.tag = b""
        self.in_steps = False
        self.end_tag = b""
        self.watch: Watch | None = None
        self.results_before_steps: list[Any] = []
        self.steps_arguments: dict[str, int] = {}
        self.carried: dict[str, CarriedState] = {}
        self.copied_group_members: tuple[str, ...] = ()
        self._begun = False
        self._copied: tuple[int, int, bytes, dict[str, Any]] | None = None  # step, position, tag, what was captured
        self._inside = ""  # the call whose function is at work, or was left by an exception
        self._known: list[Any] = []  # values of `early` that came with the copied state, and user code has not got

    def begin(self, state: Any) -> int | None:
        """Waits until user code may compute. If this worker begins with a copied state, loads it and returns the number
        of the first step after it; None: it begins with its own.

        Args:
            state: what `run.state` got.

        Raises:
            StateError: it is unlike the copied one.
            StepError: `run.steps` got other arguments where the state was made.
        """
        self._wait_to_begin()
        self.in_steps = True
        if self._copied is None:
            return None
        step, self.position, self.tag, content = self._copied
        check_same(self.steps_arguments, content["arguments"])
        load(state, content["state"])
        here, there = sorted(self.carried), sorted(content["carried"])
        if here != there:
            raise StateError(
                f"this worker has {', '.join(here) or 'nothing'} beside its state, and {', '.join(there) or 'nothing'} "
                f"where it is copied from: make the same calls of the run on all workers, and in a program that is "
                f"resumed"
            )
        for name, carried in self.carried.items():
            carried.load(content["carried"][name])
        return step

    def _wait_to_begin(self) -> None:
        """Waits, the first time, until user code may compute, and keeps the copied state, if there is one."""
        if self._begun:
            return
        self._begun = True
        mark = self.node.trace.begin(of_step=False)
        with self.turn.released():
            copied = self.node.first_state()
        self.node.trace.keep(mark, "loop", "waits for the state to begin with")
        if copied is not None:
            pytorch()
            content = decode(copied.value)
            self._known = list(content["early"])
            self.copied_group_members = tuple(content["members"])
            self._copied = copied.step, copied.position, copied.tag, content

    def ask(
        self, parts: int, call: str, done: tuple[int, Sums] | None, *, detail: bytes = b"", repeatable: bool = False
    ) -> int | Sums:
        """Gives the part `done`, and returns the next part's number, or the position's total: see `UserCall.ask`.

        Args:
            call: what user code asks for, e.g. "step 7": all workers ask for the same.
            detail: what has to be alike, too.
            repeatable: a part contributes the same if it is computed again.

        Raises:
            StepError: a function that one worker calls for all is at work, or an exception has left it.
        """
        if self._inside:
            raise StepError(
                f"the function of {self._inside} called the run, or raised an exception that was caught outside: other "
                f"workers know of neither\ncatch it in that function, and return what happened"
            )
        with self.turn.released():
            tag = self.tag + call.encode() + detail
            answer = self.node.ask(self.position, parts, tag, call, done, repeatable=repeatable)
        if isinstance(answer, Sums):
            self.position, self.tag = self.position + 1, chain_digest(self.tag, answer)
        return answer

    @contextmanager
    def running_user_function(self, call: str) -> Iterator[None]:
        """Within this block `ask` raises StepError, since a function of user code runs on this worker only; also later,
        if an exception has left the block.
        """
        self._inside = call
        yield
        self._inside = ""

    def wait(self, future: Future[None]) -> None:
        """Waits for a future, without the turn: other workers of this process run user code meanwhile."""
        with self.turn.released():
            self.node.block(future)

    def end(self) -> None:
        """Waits, in a round of its own, until user code has returned on all workers; one that goes on is excluded.

        Raises:
            StepError: user code has returned before the first step, unlike that of the worker whose state is copied;
                or other workers have a total of another call at this position.
        """
        self._wait_to_begin()
        self.node.trace.end_step()
        if not self.in_steps and self._copied is not None:
            raise StepError(
                "the function returned before its first step, and goes on to it on other workers: decide from "
                "arguments and run.once alone"
            )
        end = Sums.of({"end": True})  # unlike what any other call contributes
        done: tuple[int, Sums] | None = None
        while isinstance(answer := self.ask(1, END, done, detail=self.end_tag), int):
            done = answer, end
        if answer.layout != end.layout:
            raise error_of_wrong_call(self.node.name, END)

    def cross_boundary(self, number: int, state: Any, group_members: Sequence[str] = ()) -> None:
        """Called before each step or turn of a group: gives the state to nodes that wait for it, seeds the generators.

        Args:
            number: of the step or turn.
            state: what `run.state` got.
            group_members: see `copied_group_members`.
        """
        check_names(state)
        if self.watch is not None or self.node.state_wanted or is_checked(number):
            refuse_shared_memory(leaves(state))
        self.node.trace.begin_step(number)
        if self.watch is not None:
            self.watch.at_boundary(number, state)
        if self.node.state_wanted:
            mark = self.node.trace.begin()
            carried = {name: each.captured() for name, each in self.carried.items()}
            copy = capture(
                state,
                self.results_before_steps,
                self.steps_arguments,
                carried,
                self.node.take_prepared_memory().allocate,
                group_members,
            )
            self.node.trace.keep(mark, "loop", "copies the state", size_bytes=copy.size_bytes)
            self.node.give_state(number, self.position, self.tag, copy)
        self.seed(BOUNDARY)

    def digests(self, state: Any) -> dict[str, bytes]:
        """Returns the digest of each leaf of the state, and of what travels with it, by name."""
        found = digests(state)
        for each in self.carried.values():
            found |= each.digests()
        return found

    def seed(self, what: int) -> None:
        """Seeds the generators from the job's seed, the position and `what` (`SUMMED`, ...): alike on all workers."""
        seed_generators(derived_seed(self.node.spec.seed, self.position, what))

    def compute_pieces(
        self, call: str, function: Callable[[Any], Any], pieces: Sequence[Any], modules: Modules | None
    ) -> list[Any]:
        """Computes each piece once, on some worker. Returns all results, in order, on all workers.

        Args:
            call: `run.once` or `run.map`, for messages.
            modules: those of the state, whose buffers and modes are put back after each piece.

        Raises:
            StepError: workers differ in what they call before the first step.
        """
        if not pieces:
            return []
        self._wait_to_begin()
        if not self.in_steps and self._copied is not None:
            if not self._known:
                raise StepError(
                    f"{call} before the first step is called more often than on the worker whose state is copied: "
                    f"call it alike on all workers"
                )
            known = self._known.pop(0)
            if len(known) != len(pieces):
                raise StepError(
                    f"{call} before the first step has {len(pieces)} pieces, and {len(known)} on the worker whose "
                    f"state is copied: call it alike on all workers"
                )
            self.results_before_steps.append(known)
            return list(writable(self.results_before_steps[-1]))
        what = call if call == "run.once" else f"{call} of {len(pieces)} pieces"
        whole, trace = self.node.trace.begin(), self.node.trace
        done: tuple[int, Sums] | None = None
        while isinstance(answer := self.ask(len(pieces), what, done), int):
            seed_generators(derived_seed(self.node.spec.seed, self.position, PIECE, answer))
            if self.watch is not None:
                self.watch.before_piece()
            mark = trace.begin()
            with self.running_user_function(call):
                value = encode([function(pieces[answer])], what=f"the result of {call}")
            if modules is not None:
                modules.put_back()
            trace.keep(mark, "loop", f"piece {answer} of {call}")
            if self.watch is not None:
                value = self.watch.after_piece(call, self.position, answer, value)
            done = answer, Sums.of({}, {answer: value})
        trace.keep(whole, "loop", call)
        if answer.layout != Sums.of({}).layout or len(answer.collected) != len(pieces):
            raise error_of_wrong_call(self.node.name, what)
        results = [decode(value)[0] for value in answer.collected.values()]
        if not self.in_steps:
            self.results_before_steps.append(results)
        self.seed(SUMMED)
        return list(writable(results))  # a copy: user code may change it, and a newcomer gets what it was
