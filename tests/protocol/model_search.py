"""Exhaustive search over rows of small numbers, breadth first, a level at a time, in arrays.

A state is a row; what may happen is told by a `Machine` for many rows at once. Visited states are kept as 64 bits each
(hash compaction): a search of n states misses one of them, by taking it for another, with a chance of about
n^2 / 2^65, which is 3e-6 for ten million and 3e-4 for a hundred million.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from model_states import Violation
from numpy.typing import NDArray

__all__ = ["BrokenAt", "Explored", "Machine", "Memo", "Numbers", "Picked", "Rows", "Step", "search"]

Rows = NDArray[np.int32]
"""One column per part of a state, one row of numbers per part: `rows[part, state]`."""
Numbers = NDArray[np.int32]
Picked = NDArray[np.intp]
"""Which rows."""
Marks = NDArray[np.uint64]

_CHUNK = 100_000  # states whose successors are held at once
_KEPT = 1_000_000  # states that a search remembers for the way to a violation
_BITS = {1: 62, 2: 31, 3: 21}  # of each number in a memo's key, by how many there are


@dataclass
class Step:
    """One thing that may happen in some of the rows it was asked for.

    Attributes:
        what: for people: who does what.
        kind: what it is counted as.
        origins: in which of the rows.
        after: the rows that follow, one for each origin.
    """

    what: str
    kind: str
    origins: Picked
    after: Rows


class BrokenAt(Exception):
    """An invariant broke in a step of one of the rows, or in the row itself."""

    def __init__(self, message: str, at: int, last: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.at = at
        self.last = last  # the step that was made, where it is not the row itself that is broken


class Machine(Protocol):
    """What is searched."""

    def steps(self, rows: Rows) -> Iterator[Step]:
        """Everything that may happen in these rows. Raises BrokenAt."""

    def check(self, rows: Rows) -> None:
        """Looks at rows that were not seen before. Raises BrokenAt."""


class Memo:
    """A function of up to three numbers, made once for each distinct input, and looked up for many inputs at once.

    The function returns None where it does not apply, or its results as numbers. One that raises Violation is raised
    for the first state that has its input.
    """

    def __init__(self, function: Callable[..., int | tuple[int, ...] | None], inputs: int, results: int = 1) -> None:
        self._function = function
        self._bits = _BITS[inputs]
        self._shifts = [self._bits * i for i in reversed(range(inputs))]
        self._index: _Index | _Direct = _Index() if inputs > 1 else _Direct()
        self._results = [np.empty(0, np.int32) for _ in range(results)]
        self._broken: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._index)

    def __call__(self, *columns: Numbers) -> tuple[Picked, list[Numbers]]:
        """Where the function applies, and its results there."""
        keys = np.zeros(len(columns[0]), np.int64)
        for column, shift in zip(columns, self._shifts, strict=True):
            if len(column) and column.max() >> self._bits:
                raise OverflowError(f"more than {1 << self._bits} parts of a kind")
            keys |= column.astype(np.int64) << shift
        places = self._index.places(keys)
        new = places < 0
        if new.any():
            self._learn(np.unique(keys[new]))
            places[new] = self._index.places(keys[new])
        if self._broken:
            for at in np.flatnonzero(self._results[0][places] == -2):
                raise BrokenAt(self._broken[int(keys[at])], int(at))
        first = self._results[0][places]
        found = np.flatnonzero(first >= 0)
        if len(found) == len(first):
            return found, [first, *(result[places] for result in self._results[1:])]
        return found, [first[found], *(result[places[found]] for result in self._results[1:])]

    def _learn(self, keys: NDArray[np.int64]) -> None:
        made = [np.empty(len(keys), np.int32) for _ in self._results]
        mask = (1 << self._bits) - 1
        for at, key in enumerate(keys.tolist()):
            try:
                results = self._function(*(key >> shift & mask for shift in self._shifts))
            except Violation as violation:
                self._broken[key] = str(violation)
                results = (-2,) * len(made)
            if results is None:
                results = (-1,) * len(made)
            elif isinstance(results, int):
                results = (results,)
            for column, result in zip(made, results, strict=True):
                column[at] = result
        self._index.add(keys)
        self._results = [np.concatenate([old, new]) for old, new in zip(self._results, made, strict=True)]


class _Index:
    """Where each of a growing set of keys is: a hash table with open addresses, for many keys at once."""

    def __init__(self) -> None:
        self._keys = np.empty(0, np.int64)
        self._resize(6)

    def __len__(self) -> int:
        return len(self._keys)

    def places(self, keys: NDArray[np.int64]) -> Picked:
        """The keys' places in the order they were added, or -1."""
        slots = self._first(keys)
        places = self._table[slots]
        rest = np.flatnonzero((places >= 0) & (self._there[slots] != keys))
        while len(rest):  # another key sits there: the next slot
            slots[rest] = (slots[rest] + 1) & (len(self._table) - 1)
            places[rest] = self._table[slots[rest]]
            rest = rest[(places[rest] >= 0) & (self._there[slots[rest]] != keys[rest])]
        return places

    def add(self, keys: NDArray[np.int64]) -> None:
        """They must be distinct and new."""
        first = len(self._keys)
        self._keys = np.concatenate([self._keys, keys])
        if 3 * len(self._keys) > len(self._table):
            self._resize((3 * len(self._keys)).bit_length())
        else:
            self._put(np.arange(first, len(self._keys)))

    def _resize(self, bits: int) -> None:
        self._bits = bits
        self._table = np.full(1 << bits, -1, np.intp)
        self._there = np.full(1 << bits, -1, np.int64)
        self._put(np.arange(len(self._keys)))

    def _put(self, places: Picked) -> None:
        slots = self._first(self._keys[places])
        while len(places):
            free = self._table[slots] < 0
            self._table[slots[free]] = places[free]  # of those who want the same slot one gets it
            self._there[slots[free]] = self._keys[places[free]]
            rest = self._table[slots] != places
            places, slots = places[rest], (slots[rest] + 1) & (len(self._table) - 1)

    def _first(self, keys: NDArray[np.int64]) -> Picked:
        mixed = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (mixed >> np.uint64(64 - self._bits)).astype(np.intp)


class _Direct:
    """The same for small keys, such as the numbers of parts: a place for each key there may be."""

    def __init__(self) -> None:
        self._count = 0
        self._places = np.full(64, -1, np.intp)

    def __len__(self) -> int:
        return self._count

    def places(self, keys: NDArray[np.int64]) -> Picked:
        lacking = int(keys.max(initial=0)) + 1 - len(self._places)
        if lacking > 0:
            self._places = np.concatenate([self._places, np.full(lacking + len(self._places), -1, np.intp)])
        found: Picked = self._places[keys]
        return found

    def add(self, keys: NDArray[np.int64]) -> None:
        self._places[keys] = np.arange(self._count, self._count + len(keys))
        self._count += len(keys)


_MIX = np.random.default_rng(20).integers(0, 1 << 63, 64, np.uint64) * np.uint64(2) + np.uint64(1)


def marks(rows: Rows) -> Marks:
    """64 bits for each row."""
    mixed = np.zeros(rows.shape[1], np.uint64)
    for column, factor in zip(rows, _MIX, strict=False):
        mixed += column.astype(np.uint64) * factor
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return mixed


class _Visited:
    """A set of marks, as a few sorted runs."""

    def __init__(self) -> None:
        self._runs: list[Marks] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def new(self, sorted_marks: Marks) -> NDArray[np.bool_]:
        """Which of these are not in the set."""
        new = np.ones(len(sorted_marks), np.bool_)
        for run in self._runs:
            places = np.minimum(np.searchsorted(run, sorted_marks), len(run) - 1)
            new &= run[places] != sorted_marks
        return new

    def add(self, sorted_marks: Marks) -> None:
        """They must not be in the set."""
        if not len(sorted_marks):
            return
        self._runs.append(sorted_marks)
        while len(self._runs) > 1 and len(self._runs[-2]) < 2 * len(self._runs[-1]):
            merged = np.concatenate([self._runs.pop(), self._runs.pop()])
            merged.sort()
            self._runs.append(merged)


@dataclass
class Explored:
    """What a search saw: how many states, how many steps deep, and how often each kind of step was taken.

    `epochs`, as many as were committed in one history, is for who knows what a row means to fill in.
    """

    states: int = 1
    depth: int = 0
    epochs: int = 0
    steps: Counter[str] = field(default_factory=Counter)


def search(
    machine: Machine, begin: Rows, *, limit: int, level: Callable[[Explored, int], None] | None = None
) -> Explored:
    """Every row that can be reached, each checked.

    Args:
        limit: more states than that are an error.
        level: told after each level what was seen, and how many states the level has.

    Raises:
        Violation: an invariant broke; the message holds a shortest way there.
    """
    for kept in (_KEPT, limit):
        levels: list[Rows] = []  # who came from where; a second search is worth the memory for many states
        try:
            return _search(machine, begin, limit, level, levels, kept)
        except BrokenAt as broken:
            if levels:
                trail = _trail(machine, levels, broken.at)
                raise Violation("\n  ".join([broken.message, *trail, *broken.last])) from None
    raise AssertionError("a violation was found once and not again")


def _search(
    machine: Machine,
    begin: Rows,
    limit: int,
    told: Callable[[Explored, int], None] | None,
    levels: list[Rows],
    kept: int,
) -> Explored:
    """Fills `levels`, which end empty if there are more states than `kept`."""
    explored, visited, rows = Explored(), _Visited(), begin
    visited.add(marks(begin))
    while rows.shape[1]:
        levels.append(rows)
        if explored.states > kept:
            levels.clear()
        machine.check(rows)
        found = []
        for first in range(0, rows.shape[1], _CHUNK):
            try:
                found.append(_successors(machine, rows[:, first : first + _CHUNK], visited, explored))
            except BrokenAt as broken:
                raise BrokenAt(broken.message, broken.at + first, broken.last) from None
        rows = np.concatenate(found, axis=1)
        explored.depth += bool(rows.shape[1])
        if told is not None:
            told(explored, rows.shape[1])
        if explored.states > limit:
            raise AssertionError(f"more than {limit} states: {explored}")
    return explored


def _successors(machine: Machine, rows: Rows, visited: _Visited, explored: Explored) -> Rows:
    """What follows and was not seen before; it is now."""
    parts = []
    for step in machine.steps(rows):
        explored.steps[step.kind] += len(step.origins)
        parts.append(step.after)
    after = np.concatenate(parts, axis=1)
    marked, places = np.unique(marks(after), return_index=True)
    new = visited.new(marked)
    visited.add(marked[new])
    explored.states += int(new.sum())
    return after[:, places[new]]


def _trail(machine: Machine, levels: list[Rows], at: int) -> list[str]:
    """How the row `at` of the last level came about, and what its own last step was."""
    names: list[str] = []
    row = levels[-1][:, at : at + 1]
    for before in reversed(levels[:-1]):
        name, row = _origin(machine, before, row)
        names.append(name)
    names.reverse()
    return names


def _origin(machine: Machine, before: Rows, row: Rows) -> tuple[str, Rows]:
    for first in range(0, before.shape[1], _CHUNK):
        chunk = before[:, first : first + _CHUNK]
        for step in machine.steps(chunk):
            same = np.flatnonzero((step.after == row).all(axis=0))
            if len(same):
                origin = int(step.origins[same[0]])
                return step.what, chunk[:, origin : origin + 1]
    raise AssertionError("a state that nothing leads to")
