"""How alike are two genes? Smith-Waterman scores of many pairs, in a chain of tasks that all work at once.

The score of two sequences comes from a table in which each row follows from the one above. A task has a block of its
rows, so it waits for the last row of the task before: of one pair, which is one epoch, a single task at a time has
anything to do. But the pairs do not depend on each other, and a task that is done with its rows goes on with those of
the next pair at once. (It may be up to `epochs_ahead` epochs ahead of what is committed.) While the last task is at
pair 0, the one before is at pair 1, and so on.

    taskgraph run examples/alignment.py --nodes 4
    taskgraph run examples/alignment.py --nodes 4 -o length=2000
    taskgraph run examples/alignment.py --nodes 4 -o length=2000 --set epochs_ahead=0     # one pair after another
    python examples/alignment.py

The scores are those of `score`, which needs no tasks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import taskgraph as tg

Row = NDArray[np.int64]
MATCH, MISMATCH, GAP = 2, -1, 2


def pair(number: int, length: int) -> tuple[Row, Row]:
    """Two genes, the second one with mutations: any task can make them again, so they need not travel."""
    rng = np.random.default_rng([number, 17])
    one = rng.integers(0, 4, length)
    where = rng.integers(0, length, number % length)
    other = one.copy()
    other[where] = rng.integers(0, 4, len(where))
    return one, other


def block(letters: Row, other: Row, above: Row) -> tuple[Row, int]:
    """The last of so many rows of the table, and the best score in them; `above` is the row before them."""
    columns = GAP * np.arange(len(other))
    best = 0
    for letter in letters:
        diagonal = np.concatenate(([0], above[:-1])) + np.where(other == letter, MATCH, MISMATCH)
        row = np.maximum(0, np.maximum(diagonal, above - GAP))
        above = np.maximum.accumulate(row + columns) - columns  # from the left: a gap costs as much in each column
        best = max(best, int(above.max()))
    return above, best


def score(number: int, length: int) -> int:
    """Of one pair: a loop in one process."""
    one, other = pair(number, length)
    return block(one, other, np.zeros(length, np.int64))[1]


class Rows(tg.Task, state=["scores"]):
    """Some rows of each pair's table; the last task has the `scores`."""

    def __init__(self, length: int) -> None:
        self.length = length

    def setup(self) -> None:
        self.rows = tg.shard(self.length, self.task_id, self.tasks)
        self.scores: list[int] = []

    def compose(self, epoch: tg.Epoch) -> None:
        if self.task_id < self.tasks - 1:  # to the north of the first task nobody is
            epoch.processor(self.align, inbound={"row": "north"}, outbound={"row": "south"})
        else:
            epoch.processor(self.record, inbound={"row": "north"})

    def align(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("row", self.work(epoch, ins))

    def record(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.scores.append(self.work(epoch, ins)[1])

    def work(self, epoch: tg.Epoch, ins: tg.Inputs) -> tuple[Row, int]:
        one, other = pair(epoch.number, self.length)
        above, best = ins["row"] if "row" in ins else (np.zeros(self.length, np.int64), 0)
        last, here = block(one[self.rows], other, above)
        return last, max(best, here)

    def result(self) -> list[int] | None:
        return self.scores if self.task_id == self.tasks - 1 else None


@tg.job
def alignment(tasks: int = 4, epochs: int = 100, length: int = 400) -> tg.Job:
    """One pair of genes in each epoch.

    Args:
        tasks: blocks of rows
        epochs: how many pairs
        length: letters of a gene
    """
    if length < 1:
        raise ValueError("length must be 1 at least: a gene has letters")
    return tg.Job(tasks=tasks, epochs=epochs, builder=lambda task_id: Rows(length), topology=tg.grid(tasks, 1))


if __name__ == "__main__":
    tg.main(alignment)
