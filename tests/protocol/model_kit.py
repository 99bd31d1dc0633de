"""A job of a few nodes as a state machine, made of the real decisions and the real transactions.

A state holds etcd, and for every node its view (as old as the node has not read), its boundaries, and what its
primaries know. A step is one thing that one node does: read etcd, make a snapshot, have another node hold one, begin,
execute or learn of a write, commit, restart, take over, or die. `explore` tries every order of steps, breadth first,
and checks after each one what must never break:

- the committed epoch grows by one, by a commit, and by nothing else; attempts and terms only grow;
- a commit counts the current primary of every task, and every living member that may take over from then on holds
  the very boundaries that were committed (invariant I3), also after it reads that they were;
- whoever takes over finds the committed boundary in its own hands.

Messages that are lost, late or doubled are steps that come late, or views that are old: what a node holds or writes is
decided from its own view, by the classes that nodes use.

What makes it small, none of which loses a history that could break an invariant (the reasons are where it is done):

- parts of states are kept once, and revisions counted per key (`model_states`);
- transactions that are refused change nothing; a refused write is known at once (`Steps.execute`, `Write`);
- a task is done as soon as it may be, and what was reported may come to any leader, or not (`_settle`, `Steps.commit`);
- boundaries are held and acknowledged at once, and a candidate is one from its first boundary on (`Steps.offer`);
- a dead node is forgotten, and so is a done of an epoch that is over.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import product

import numpy as np
from model_search import BrokenAt, Explored, Memo, Numbers, Picked, Rows, Step, search
from model_states import Etcd, Interned, Key, Violation, twin
from model_steps import Plants, Steps
from numpy.typing import NDArray
from protocol_kit import World

__all__ = ["Budget", "Explored", "Model", "Plants", "Violation", "explore"]

_ETCD, _COMMITTED, _BUDGET, _DONES, _VIEWS = range(5)
_PAIR = 1 << 20  # more than there are commits
_DECISION, _WHOM, _NOW, _SEEN, _NONE, _TERM, _BEFORE, _ROLES, _OUTCOME = range(
    -9, 0
)  # columns that a step needs while it is made
Part = Callable[..., int | tuple[int, ...] | None]


@dataclass(frozen=True)
class Budget:
    """How much may happen in one history; every number bounds the state space.

    To replace or evict a dead node costs nothing but its crash; `takeovers` and `evictions` are of the living, who are
    suspected wrongly.
    """

    epochs: int = 2
    crashes: int = 0
    takeovers: int = 0
    joins: int = 0
    evictions: int = 0
    restarts: int = 0


@dataclass
class Model:
    """A job that just began.

    Attributes:
        members: those that are in sync; of two, each is primary of one of two tasks. Or those of task 0, a space, and
            those of task 1.
        reduced: False explores what is merged otherwise: views that a node cannot tell apart, and whether the eviction
            of a dead node is known. Only to show that the same is reached.
    """

    tasks: int
    names: str
    budget: Budget
    members: str = "ab"
    plants: Plants = field(default_factory=Plants)
    reduced: bool = True

    def __post_init__(self) -> None:
        self._steps = Steps(self.names, self.tasks, self.budget.epochs, self.plants, self.reduced)
        self._reached: set[int] = set()
        self._budgets: Interned[Budget] = Interned(lambda budget: budget)
        self._memos: dict[tuple[str | int, ...], Memo] = {}
        self._alike: dict[Hashable, int] = {}

    def begin(self) -> Rows:
        """The first state."""
        world, steps = World(*self.names), self._steps
        for task in range(self.tasks):
            members = self._members(task)
            first = members[task % len(members)]
            world.first(task, first)
            for other in members:
                if other != first:
                    world.admit(task, first, other)
        etcd = steps.etcds.number(Etcd.of(world.store))
        slots = [
            steps.first_slot(node, task, etcd, self._members(task))
            for node in range(len(self.names))
            for task in range(self.tasks)
        ]
        views = []
        for node in range(len(self.names)):
            roles = 0
            for task in range(self.tasks):
                roles = self._add_role(task, slots[node * self.tasks + task], roles)
            views.append(self._relevant(node, etcd, roles))
        row = [etcd, 0, self._budgets.number(self.budget), 0, *views, *slots]
        return np.array([row], np.int32).T

    def _members(self, task: int) -> str:
        groups = self.members.split()
        return groups[task % len(groups)]

    def reached(self) -> set[tuple[Hashable, tuple[Key, ...]]]:
        """What etcd held, and which boundaries were committed then, in all states explored so far."""
        pairs = (divmod(pair, _PAIR) for pair in self._reached)
        return {(self._steps.etcd(etcd).key, self._steps.committed[committed]) for etcd, committed in pairs}

    def epochs(self) -> int:
        """The most that was committed in a history explored so far."""
        return max(self._steps.etcd(pair // _PAIR).stamp.epoch for pair in self._reached)

    # -- columns ------------------------------------------------------------------------------------

    def _view(self, node: int) -> int:
        return _VIEWS + node

    def _slot(self, node: int, task: int) -> int:
        return _VIEWS + len(self.names) + node * self.tasks + task

    def memo(self, function: Part, who: tuple[int, ...], inputs: int, results: int) -> Memo:
        """`function(*who, ...)`, remembered."""
        label: tuple[str | int, ...] = (str(getattr(function, "__name__", function)), *who)
        if label not in self._memos:
            self._memos[label] = Memo(partial(function, *who), inputs, results)
        return self._memos[label]

    def _first_alike(self, kind: Hashable, etcd: int) -> int:
        """The first etcd of its kind: what looks at nothing but the kind may as well look at that."""
        return self._alike.setdefault(kind, etcd)

    def _at(self, etcd: int) -> int:
        """Stands for etcd to who asks for nothing but the stamp."""
        return self._first_alike(self._steps.etcd(etcd).stamp, etcd)

    def _of_task(self, task: int, etcd: int) -> int:
        """Stands for etcd to who asks for the stamp and the primary of one task."""
        at = self._steps.etcd(etcd)
        return self._first_alike(("task", at.stamp, task, at.view.primary_node(task), at.view.term(task)), etcd)

    def _of_member(self, other: int, task: int, etcd: int) -> int:
        """Stands for etcd to who asks for the stamp and one member of one task."""
        at, name = self._steps.etcd(etcd), self.names[other]
        member = at.view.members_of(task).get(name)
        return self._first_alike(("member", at.stamp, other, task, member, name in at.view.nodes), etcd)

    def _membership(self, node: int, task: int, etcd: int) -> int:
        """Stands for etcd to who asks for the stamp and whether one node may take over one task."""
        at = self._steps.etcd(etcd)
        return self._first_alike(("heir", at.stamp, node, task, self.names[node] in at.view.in_sync(task)), etcd)

    def _add_role(self, task: int, slot: int, roles: int) -> int:
        found = self._steps.slots[slot]
        return roles | (found is not None and found.role is not None) << task

    def _relevant(self, node: int, view: int, roles: int) -> int:
        """Stands for what a node read: the first etcd that is the same in all that this node ever looks at.

        That is, besides the stamp and the node's own key: of every task the primary and the node's own member key; of
        a task that it is primary of all member keys and who is registered, as it admits and evicts; if it leads,
        `generation`; and everything, where it may start a task from nothing. It becomes a primary in a step that reads
        everything (`_read` is part of it), so what does not matter now never will.
        """
        at, name = self._steps.etcd(view), self.names[node]
        seen = at.view
        if not self.reduced or any(self._steps.take_over_from_nothing(node, task, view) for task in range(self.tasks)):
            return view
        kind = (
            node,
            at.stamp,
            tuple((seen.primary_node(t), seen.term(t), seen.members_of(t).get(name)) for t in range(self.tasks)),
            tuple(tuple(sorted(seen.members_of(t).items())) for t in range(self.tasks) if roles & 1 << t),
            tuple(sorted(seen.nodes)) if roles else (),
            seen.generation_revision if roles & 1 else 0,
            roles,
        )
        return self._first_alike(kind, view)

    # -- a machine, as `search` wants it ------------------------------------------------------------

    def check(self, rows: Rows) -> None:
        self._reached.update(np.unique(rows[_ETCD].astype(np.int64) * _PAIR + rows[_COMMITTED]).tolist())
        for node, task in product(range(len(self.names)), range(self.tasks)):
            moves = _Moves(self, rows).where(self._view(node))
            moves = moves.make(self._membership, (node, task), (_ETCD,), (_NOW,))
            moves.make(self._steps.check_member, (node, task), (self._slot(node, task), _NOW, _COMMITTED))

    def steps(self, rows: Rows) -> Iterator[Step]:
        self._roles = np.array([slot is not None and slot.role is not None for slot in self._steps.slots.parts])
        for node, name in enumerate(self.names):
            alive = _Moves(self, rows).where(self._view(node))
            yield self._read(alive.named(f"{name} reads etcd", "reads"), node)
            yield self._die(alive.named(f"{name} dies", "dies"), node)
            for task in range(self.tasks):
                primary = alive.where(self._slot(node, task), self._roles)
                yield from self._steps_of_primary(primary, node, task)
                backup = alive.where(self._slot(node, task), ~self._roles)
                yield from self._steps_of_successor(backup, node, task)
            yield from self._steps_of_leader(alive.where(self._slot(node, 0), self._roles), node)

    def _steps_of_primary(self, primary: _Moves, node: int, task: int) -> Iterator[Step]:
        steps, name, slot, view = self._steps, self.names[node], self._slot(node, task), self._view(node)
        moves = primary.named(f"{name} makes the next boundary of {task}", "makes")
        moves = moves.make(self._at, (), (view,), (_SEEN,))
        yield self._settled(moves.make(steps.snapshot, (), (slot, _SEEN), (slot,)), node, task)
        for other, receiver in enumerate(self.names):
            if other == node:
                continue
            primary = primary.make(self._of_member, (other, task), (view,), (_SEEN,))
            moves = primary.named(f"{name} decides to admit {receiver} to {task}", "admits")
            yield moves.make(steps.begin_admit, (node, other, task), (slot, _SEEN), (slot,)).step()

            for living, cost in ((True, "evictions"), (False, "")):
                moves = primary.where(self._view(other), living=living)
                moves = moves.named(f"{name} decides to evict {receiver} from {task}", "evicts")
                moves = moves.make(steps.begin_evict, (node, other, task), (slot, _SEEN), (slot,))
                yield self._spend(moves, cost).step()

            moves = primary.named(f"{name}'s write about {receiver} at {task} is executed", "writes")
            moves = moves.make(steps.pending, (other,), (slot,), (_DECISION,))
            moves = moves.make(steps.write, (other,), (_DECISION, _ETCD), (_ETCD, _OUTCOME))
            yield self._settled(moves.make(steps.written, (other,), (slot, _OUTCOME), (slot,)), node, task)

            moves = primary.named(f"{name} learns of its write about {receiver} at {task}", "learns")
            yield self._settled(moves.make(steps.learn, (other,), (slot,), (slot,)), node, task)

            for invited, cost in ((True, "joins"), (False, "")):
                yield self._offer(primary.where(self._view(other)), node, other, task, invited, cost)

    def _offer(self, moves: _Moves, node: int, other: int, task: int, invited: bool, cost: str) -> Step:
        steps, name, receiver = self._steps, self.names[node], self.names[other]
        slot, others = self._slot(node, task), self._slot(other, task)
        kind = "invites" if invited else "offers"
        moves = self._spend(moves.named(f"{name} has {receiver} hold a boundary of {task} ({kind})", kind), cost)
        moves = moves.make(self._of_task, (task,), (self._view(other),), (_SEEN,))
        moves = moves.make(steps.offer, (node, other, task, invited), (slot, others, _SEEN), (slot, others))
        if self.plants.joiner_puts_key:
            moves = moves.make(steps.put_own_key, (other, task), (slot, _ETCD), (_ETCD,))
        return self._settled(moves, node, task)

    def _steps_of_successor(self, backup: _Moves, node: int, task: int) -> Iterator[Step]:
        steps, name, slot, view = self._steps, self.names[node], self._slot(node, task), self._view(node)
        for nothing, decide in enumerate((steps.take_over, steps.take_over_from_nothing)):
            how = " from nothing" if nothing else ""
            moves = backup.named(f"{name} takes over {task}{how}", "takes" + how)
            moves = moves.make(decide, (node, task), (view,), (_DECISION, _WHOM))
            moves = moves.make(steps.execute, (), (_DECISION, _ETCD), (_NOW, _NONE))
            for whom in range(len(self.names)):
                replaced = moves.only(_WHOM, whom)
                for living, cost in ((True, "takeovers"), (False, "")):
                    taken = self._spend(replaced.where(self._view(whom), living=living), cost)
                    taken = taken.make(steps.begin_term, (node, task, nothing), (slot, view, _NOW), (slot,))
                    taken = taken.copied(_NOW, _ETCD)
                    taken.make(steps.check_taken, (node, task), (slot, _ETCD, _COMMITTED))
                    yield self._read(taken, node)  # a new primary catches up with its own write before it works

    def _steps_of_leader(self, leader: _Moves, node: int) -> Iterator[Step]:
        steps, name, slot, view = self._steps, self.names[node], self._slot(node, 0), self._view(node)
        leader = leader.make(steps.revision, (), (slot,), (_TERM,))
        choices = steps.choices()
        for choice in range(choices.max()):
            moves = leader.where(_DONES, choices > choice).named(f"{name} commits", "commits")
            moves = moves.make(steps.commit, (choice,), (_TERM, view, _DONES), (_DECISION,))
            moves = moves.make(steps.execute, (), (_DECISION, _ETCD), (_ETCD, _COMMITTED))
            yield moves.zeroed(_DONES).step()
        moves = self._spend(leader.named(f"{name} restarts", "restarts"), "restarts")
        moves = moves.make(steps.restart, (), (_TERM, view), (_DECISION,))
        yield moves.make(steps.execute, (), (_DECISION, _ETCD), (_ETCD, _NONE)).zeroed(_DONES).step()

    def _read(self, moves: _Moves, node: int) -> Step:
        """The node reads etcd; no step where there is nothing new to it."""
        view, slots = self._view(node), [self._slot(node, task) for task in range(self.tasks)]
        moves = moves.make(self._at, (), (view,), (_SEEN,)).copied(view, _BEFORE)
        for task, slot in enumerate(slots):
            moves = moves.make(self._of_task, (task,), (_ETCD,), (_NOW,))
            moves = moves.make(self._steps.read, (node, task), (slot, _SEEN, _NOW), (slot,))
        moves = moves.zeroed(_ROLES)
        for task, slot in enumerate(slots):
            moves = moves.make(self._add_role, (task,), (slot, _ROLES), (_ROLES,))
        moves = moves.make(self._relevant, (node,), (_ETCD, _ROLES), (view,)).differing(view, _BEFORE)
        for task in range(self.tasks):
            moves = self._settle(moves, node, task)
        return moves.step()

    def _die(self, moves: _Moves, node: int) -> Step:
        moves = self._spend(moves, "crashes").make(self._steps.die, (node,), (_ETCD,), (_ETCD,))
        return moves.zeroed(self._view(node), *(self._slot(node, task) for task in range(self.tasks))).step()

    def _spend(self, moves: _Moves, cost: str) -> _Moves:
        if not cost:
            return moves
        return moves.make(self._spent, (self._costs.index(cost),), (_BUDGET,), (_BUDGET,))

    _costs = tuple(f.name for f in fields(Budget))

    def _spent(self, cost: int, budget: int) -> int | None:
        left, name = self._budgets[budget], self._costs[cost]
        if not getattr(left, name):
            return None
        return self._budgets.number(replace(left, **{name: getattr(left, name) - 1}))

    def _settled(self, moves: _Moves, node: int, task: int) -> Step:
        return self._settle(moves, node, task).step()

    def _settle(self, moves: _Moves, node: int, task: int) -> _Moves:
        """A task is done with the epoch at work as soon as it may be.

        Nothing is lost: that it is done only allows a leader to commit, which it need not; and for an epoch that is
        over, nobody commits with success.
        """
        moves = moves.make(self._at, (), (self._view(node),), (_SEEN,)).make(self._at, (), (_ETCD,), (_NOW,))
        moves = moves.zeroed(_TERM).replace(self._done, (), (self._slot(node, task), _SEEN, _NOW), _TERM)
        return moves.replace(self._report, (task,), (_TERM, _DONES), _DONES)

    def _done(self, slot: int, seen: int, now: int) -> int | None:
        return self._steps.done(slot, seen) if seen == now else None

    def _report(self, task: int, term: int, dones: int) -> int | None:
        known = self._steps.dones
        return known.number(known[dones] | {(task, term)}) if term else None


class _Moves:
    """One kind of step, made in many rows: which ones, and what changes there."""

    def __init__(self, model: Model, rows: Rows) -> None:
        self._model = model
        self._rows = rows
        self._at: Picked = np.arange(rows.shape[1])
        self._changed: dict[int, Numbers] = {}
        self._name = ("", "")

    def named(self, what: str, kind: str) -> _Moves:
        named = twin(self)
        named._name = (what, kind)
        return named

    def _column(self, column: int) -> Numbers:
        if column in self._changed:
            return self._changed[column]
        if not len(self._at):  # the columns of a step that nothing makes may be missing
            return np.empty(0, np.int32)
        numbers: Numbers = self._rows[column][self._at]
        return numbers

    def _picked(self, found: Picked) -> _Moves:
        if len(found) == len(self._at):
            return twin(self)  # `found` is in order: all of them
        picked = twin(self)
        picked._at = self._at[found]
        picked._changed = {column: numbers[found] for column, numbers in self._changed.items()}
        return picked

    def where(self, column: int, holds: NDArray[np.bool_] | None = None, *, living: bool = True) -> _Moves:
        """Only rows whose number there is one that `holds`; without that: is not 0, the number of the dead."""
        numbers = self._column(column)
        return self._picked(np.flatnonzero((numbers != 0) == living if holds is None else holds[numbers]))

    def only(self, column: int, number: int) -> _Moves:
        return self._picked(np.flatnonzero(self._column(column) == number))

    def differing(self, one: int, other: int) -> _Moves:
        return self._picked(np.flatnonzero(self._column(one) != self._column(other)))

    def copied(self, origin: int, into: int) -> _Moves:
        return self._with(into, self._column(origin))

    def zeroed(self, *columns: int) -> _Moves:
        moves = self
        for column in columns:
            moves = moves._with(column, np.zeros(len(self._at), np.int32))
        return moves

    def _with(self, column: int, numbers: Numbers) -> _Moves:
        changed = twin(self)
        changed._changed = {**self._changed, column: numbers}
        return changed

    def make(self, part: Part, who: tuple[int, ...], read: tuple[int, ...], into: tuple[int, ...] = ()) -> _Moves:
        """Makes the step in those rows where it applies; reads some columns and writes its results into others."""
        if not len(self._at):
            return self
        found, results = self._call(part, who, read, max(1, len(into)))
        moves = self._picked(found)
        moves._changed = {**moves._changed, **dict(zip(into, results, strict=bool(into)))}
        return moves

    def replace(self, part: Part, who: tuple[int, ...], read: tuple[int, ...], into: int) -> _Moves:
        """Writes the result where the step applies, and keeps the other rows as they are."""
        if not len(self._at):
            return self
        found, (results,) = self._call(part, who, read, 1)
        if not len(found):
            return self
        numbers = self._column(into).copy()
        numbers[found] = results
        return self._with(into, numbers)

    def _call(
        self, part: Part, who: tuple[int, ...], read: tuple[int, ...], results: int
    ) -> tuple[Picked, list[Numbers]]:
        memo = self._model.memo(part, who, len(read), results)
        try:
            return memo(*(self._column(column) for column in read))
        except BrokenAt as broken:
            last = [f"at last: {self._name[0]}"] if self._name[0] else []
            raise BrokenAt(broken.message, int(self._at[broken.at]), last) from None

    def step(self) -> Step:
        after = self._rows[:, self._at]
        for column, numbers in self._changed.items():
            if column >= 0:
                after[column] = numbers
        return Step(*self._name, self._at, after)


def explore(model: Model, *, limit: int, level: Callable[[Explored, int], None] | None = None) -> Explored:
    """Every state that can be reached, breadth first, each checked; see `search`."""
    explored = search(model, model.begin(), limit=limit, level=level)
    explored.epochs = model.epochs()
    return explored
