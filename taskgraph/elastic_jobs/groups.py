"""Loops of another shape than steps and parts: operations of the workers of a view, each with a tree of its own.

    group = run.group()          a boundary: the state may be copied here
    total = group.allreduce(...) every member has got it, or every member raises ViewChanged

An operation is a position of the protocol, with one part for each member. As long as the view has the members of the
group, each worker is dealt its own part. After a change some worker is dealt the part of another: it contributes that
it is gone, with the view that it has read. Such a total is held by all workers, too, so all of them raise the same
error, and go on with the same members.

All of it is used in the thread of user code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from taskgraph.elastic_jobs.differing import error_of_wrong_call, is_checked
from taskgraph.elastic_jobs.libraries import pytorch
from taskgraph.elastic_jobs.progress import PIECE, SUMMED, RunProgress
from taskgraph.elastic_jobs.seeding import derived_seed, seed_generators
from taskgraph.elastic_jobs.state import check_parameters
from taskgraph.errors import StepError, ViewChanged
from taskgraph.graph.reported import plain_numbers
from taskgraph.graph.sums import Sums
from taskgraph.graph.values import decode, encode

if TYPE_CHECKING:
    from taskgraph.protocol.messages import Encoded

__all__ = ["Group", "GroupTurns"]

_NOTHING: Final = Sums.of({}).layout
"""The layout of contributions without a tree to add up."""


class RunForTurns(Protocol):
    """What `GroupTurns` uses of `run.Run`.

    Attributes:
        progress: where user code is.
        named: the state that `run.state` named; None: none.
    """

    progress: RunProgress
    named: Any


class GroupTurns:
    """The turns of a user's loop: each call of `run.group()` begins one, and returns the group of its workers.

    Attributes:
        number: the number of the turn that begins next.
        members: the names of the group's workers, the most senior one first; (): the workers have not agreed yet.
    """

    def __init__(self, run: RunForTurns) -> None:
        progress, state = run.progress, run.named
        self.run = run
        self.number = 0
        self.members: tuple[str, ...] = ()
        check_parameters(state)
        copied = progress.begin(state)
        if copied is not None:
            self.number, self.members = copied, progress.copied_group_members
            if progress.watch is not None:
                progress.watch.on_copied_state(self.number)

    def begin_turn(self) -> Group:
        """Begins a turn, and returns its group. The state may be captured for newcomers and checkpoints here."""
        progress, state = self.run.progress, self.run.named
        progress.cross_boundary(self.number, state, self.members)
        digest = b""
        if is_checked(self.number) and not progress.node.is_behind(progress.position):
            found = progress.digests(state)
            digest = hashlib.blake2b(repr(sorted(found.items())).encode(), digest_size=16).digest()
            progress.node.note_digests(self.number, found)
        if not self.members:
            self.members = self._agree_on_members()
        self.number += 1
        return Group(self, self.number - 1, self.members, digest)

    def _agree_on_members(self) -> tuple[str, ...]:
        """Runs a round in which the workers agree on the first members: the view's workers, as one of them read it."""
        progress, done = self.run.progress, None
        while isinstance(answer := progress.ask(1, "run.group", done), int):
            done = answer, Sums.of({}, {answer: encode({"view": progress.node.view})})
        (found,) = _decode_all(answer.collected.values())
        return tuple(found["view"][1])


class Group:
    """The workers of a view, for operations of all of them. Begin each turn of the loop with `run.group()`.

    All workers call the same operations in the same order. What an operation gets may be a function: it is called only
    if the worker's contribution is needed, so that a newcomer that catches up does not compute in vain.

    Attributes:
        members: the names of the workers, the most senior one first.
        number: the number of the turn, from 0.
    """

    def __init__(self, turns: GroupTurns, number: int, members: tuple[str, ...], digest: bytes) -> None:
        self.members = members
        self.number = number
        self._turns = turns
        self._what = b"%d " % number + digest + b" ".join(name.encode() for name in members)
        self._operations = 0

    def __len__(self) -> int:
        return len(self.members)

    @property
    def index(self) -> int:
        """This worker's place in the group, from 0; -1 for a newcomer that catches up: what it computes is not used."""
        name = self._turns.run.progress.node.name
        return self.members.index(name) if name in self.members else -1

    def allreduce(self, tree: Any) -> Any:
        """Returns the sum of the trees of all members, added in a fixed order; the same bits on all workers.

        Args:
            tree: numbers, arrays, and dicts, lists and tuples of them, alike on all members; or a function of no
                arguments that returns it.

        Raises:
            ViewChanged: the operation is complete on no worker.
            StepError: the trees differ in names, shapes or dtypes.
        """
        total = self._exchange("allreduce", lambda _: Sums.of({"value": _tree_of(tree)}), is_sum=True)
        return total.tree()["value"]

    def broadcast(self, tree: Any, root: str | None = None) -> Any:
        """Returns the tree of one member, of values that travel.

        Args:
            tree: or a function that returns it; called on the root only.
            root: a member's name; None: the most senior one.

        Raises:
            ViewChanged: the operation is complete on no worker.
        """
        root = self.members[0] if root is None else root
        if root not in self.members:
            raise StepError(f"group.broadcast(root={root!r}): the members are {', '.join(self.members)}")
        name = self._turns.run.progress.node.name

        def contribute(slot: int) -> Sums:
            if name != root:
                return Sums.of({})
            return Sums.of({}, {slot: encode({"value": _tree_of(tree)}, what="group.broadcast")})

        return self._values(self._exchange("broadcast", contribute, values=1))[0]

    def allgather(self, tree: Any) -> list[Any]:
        """Returns the trees of all members, in their order; see `broadcast`."""

        def contribute(slot: int) -> Sums:
            return Sums.of({}, {slot: encode({"value": _tree_of(tree)}, what="group.allgather")})

        return self._values(self._exchange("allgather", contribute, values=len(self.members)))

    def barrier(self) -> None:
        """Returns once all members have come here.

        Raises:
            ViewChanged: the operation is complete on no worker.
        """
        self._exchange("barrier", lambda _: Sums.of({}))

    def report(self, **numbers: Any) -> None:
        """Reports numbers of this turn, once all workers hold what its operations gave."""
        progress = self._turns.run.progress
        given = plain_numbers(numbers, lambda: f"turn {self.number}")
        progress.node.report(progress.position, self.number, given)

    def _exchange(
        self, operation: str, contribute: Callable[[int], Sums], *, is_sum: bool = False, values: int = 0
    ) -> Sums:
        """Contributes to an operation, and returns its total.

        Args:
            contribute: returns this worker's contribution, from its place among the members. It may not be called.
            is_sum: members contribute a tree to add up.
            values: how many of them contribute a value.

        Raises:
            ViewChanged: a member did not contribute.
            StepError: other workers have a total of another call at this position.
        """
        turns, progress = self._turns, self._turns.run.progress
        if turns.number != self.number + 1 or turns.members != self.members:
            raise StepError(f"group.{operation}(...) of an earlier turn: call run.group() first")
        self._operations += 1
        call = f"group.{operation}, operation {self._operations} of turn {self.number}"
        done: tuple[int, Sums] | None = None
        while isinstance(answer := progress.ask(len(self.members), call, done, detail=self._what), int):
            with progress.running_user_function(f"group.{operation}"):
                done = answer, self._contribution(answer, contribute)
        progress.seed(SUMMED)
        self._check_complete(answer)
        if (answer.layout != _NOTHING) != is_sum or len(answer.collected) != values:
            raise error_of_wrong_call(progress.node.name, call)
        return answer

    def _contribution(self, slot: int, contribute: Callable[[int], Sums]) -> Sums:
        """Returns this worker's contribution if `slot` is its own; else the view, which that member has left."""
        progress = self._turns.run.progress
        if self.members[slot] != progress.node.name:
            return Sums.of({}, {slot: encode({"view": progress.node.view})})
        seed_generators(derived_seed(progress.node.spec.seed, progress.position, PIECE, slot))
        return contribute(slot)

    def _check_complete(self, total: Sums) -> None:
        """Raises ViewChanged if a member did not contribute: on all workers, which go on with the same members."""
        views = [tuple(found["view"]) for found in _decode_all(total.collected.values()) if "view" in found]
        if views:
            _, now = max(views)
            self._turns.members = tuple(now)
            raise ViewChanged(
                left=tuple(name for name in self.members if name not in now),
                entered=tuple(name for name in now if name not in self.members),
            )

    def _values(self, total: Sums) -> list[Any]:
        """Decodes and returns what each member gave to an operation, in the order of the members."""
        return [found["value"] for found in _decode_all(total.collected.values())]


def _tree_of(tree: Any) -> Any:
    """Returns a tree, or what a function that was given in its place returns."""
    return tree() if callable(tree) else tree


def _decode_all(values: Any) -> list[dict[str, Any]]:
    """Decodes what the members collected."""
    pytorch()
    found: list[Encoded] = list(values)
    return [decode(value) for value in found]
