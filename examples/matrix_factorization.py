"""Which items will a user like? Matrix factorization of sparse ratings, with the factors in two tables.

A rating is nearly the product of two short vectors, one of the user and one of the item. Each task has a share of the
ratings, and in each epoch draws some of them, pulls the vectors that these need, and pushes gradients. The rows of both
tables are spread over servers, tasks of their own with backups, so no task has all of them.

    taskgraph run examples/matrix_factorization.py --nodes 4
    taskgraph run examples/matrix_factorization.py --nodes 4 --replace -o epochs=400 -o tasks=7 -o servers=3
    python examples/matrix_factorization.py

Every push counts once, and the servers add gradients in a fixed order. So the result is that of `alone()`, a loop
without tasks over two arrays, to the last bit: on any number of nodes and servers, whatever is killed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import taskgraph as tg

USERS, ITEMS, RANK = 3000, 1000, 8
RATINGS, TESTED = 120_000, 20_000
LR, DECAY = 0.4, 0.02

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class Ratings(NamedTuple):
    """Who rated what, and how: arrays of the same length."""

    users: Ids
    items: Ids
    given: Floats

    def some(self, which: Any) -> Ratings:
        return Ratings(self.users[which], self.items[which], self.given[which])


def tables(servers: int | None = None) -> dict[str, tg.Table]:
    """Both tables know how many rows they have: any other id is an error."""
    users = tg.Table(RANK, rows=USERS, scale=0.3, optimizer="adagrad", lr=LR, servers=servers)
    items = tg.Table(RANK, rows=ITEMS, scale=0.3, optimizer="adagrad", lr=LR, servers=servers)
    return {"users": users, "items": items}


def made_up(seed: int) -> tuple[Ratings, Ratings]:
    """Ratings to learn from, and others to test with; a few items have most of them."""
    rng = np.random.default_rng(seed)
    tastes, kinds = rng.normal(size=(USERS, 4)), rng.normal(size=(ITEMS, 4)) / 2
    users, items = rng.integers(0, USERS, RATINGS + TESTED), (ITEMS * rng.random(RATINGS + TESTED) ** 2).astype(int)
    given = np.einsum("ij,ij->i", tastes[users], kinds[items]) + 0.1 * rng.normal(size=len(users))
    every = Ratings(users, items, given.astype(np.float32))
    return every.some(slice(RATINGS)), every.some(slice(RATINGS, None))


def draw(share: Ratings, seed: int, task: int, epoch: int, size: int) -> Ratings:
    rng = np.random.default_rng((seed, task, epoch))
    return share.some(rng.integers(0, len(share.given), size))


def gradients(user: Floats, item: Floats, given: Floats) -> tuple[Floats, Floats]:
    """Of the squared error of each rating, and of the squared length of both vectors."""
    wrong = ((user * item).sum(axis=1) - given)[:, None]
    return wrong * item + np.float32(DECAY) * user, wrong * user + np.float32(DECAY) * item


def error(user: Floats, item: Floats, given: Floats) -> float:
    """The root of the mean squared error of some ratings."""
    wrong = (user * item).sum(axis=1) - given
    return float(np.sqrt(np.mean(wrong.astype(np.float64) ** 2)))


class Learner(tg.Task, state=["error"]):
    """Trains in all epochs but the last, in which task 0 tests what was learned.

    Task 0 reports the error: of the ratings that it learns from, before it does; in the last epoch of others.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed

    def setup(self) -> None:
        learned, self.tested = made_up(self.seed)
        self.share = learned.some(tg.shard(RATINGS, self.task_id, self.tasks))
        self.error: float | None = None

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.flag(self.task_id)  # to itself: it begins to work
        epoch.processor(self.keep)

    def on_flag(self, epoch: tg.Epoch, sender: int, meta: None) -> None:
        if epoch.last and self.task_id != 0:
            return
        users, items = epoch.table("users"), epoch.table("items")
        batch = self.tested if epoch.last else draw(self.share, self.seed, self.task_id, epoch.number, self.size)
        user, item = users.pull(batch.users), items.pull(batch.items)
        if self.task_id == 0:
            epoch.scratch.error = error(user, item, batch.given)
            epoch.report(error=epoch.scratch.error)
        if not epoch.last:
            of_users, of_items = gradients(user, item, batch.given)
            users.push(batch.users, of_users)
            items.push(batch.items, of_items)

    def keep(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        if self.task_id == 0:
            self.error = epoch.scratch.error

    def result(self) -> float | None:
        return self.error


def alone(tasks: int = 4, epochs: int = 200, size: int = 1000, seed: int = 0) -> float:
    """The same without tasks: the error at the end."""
    learned, tested = made_up(seed)
    shares = [learned.some(tg.shard(RATINGS, task, tasks)) for task in range(tasks)]
    rows = {name: table.first_rows(name, np.arange(table.rows or 0)) for name, table in tables().items()}
    squares = {name: np.zeros_like(array) for name, array in rows.items()}
    for epoch in range(epochs - 1):
        sums = {name: np.zeros_like(array) for name, array in rows.items()}
        for task, share in enumerate(shares):
            batch = draw(share, seed, task, epoch, size)
            of_users, of_items = gradients(rows["users"][batch.users], rows["items"][batch.items], batch.given)
            np.add.at(sums["users"], batch.users, of_users)
            np.add.at(sums["items"], batch.items, of_items)
        for name, gradient in sums.items():  # Adagrad
            squares[name] += gradient * gradient
            rows[name] -= LR * gradient / (np.sqrt(squares[name]) + 1e-10)
    return error(rows["users"][tested.users], rows["items"][tested.items], tested.given)


@tg.job
def matrix_factorization(
    tasks: int = 4, epochs: int = 200, size: int = 1000, servers: int = 2, seed: int = 0
) -> tg.Job:
    """Matrix factorization of made-up ratings.

    Args:
        tasks: tasks that learn; each has a share of the ratings
        epochs: all but the last one are for learning
        size: ratings that each task learns from in an epoch
        servers: tasks that the rows of each table are spread over
        seed: of the ratings, and of what is drawn
    """
    if size < 1:
        raise ValueError("size must be 1 at least: nothing would be learned")
    return tg.Job(tasks=tasks, epochs=epochs, builder=lambda _: Learner(size, seed), tables=tables(servers))


if __name__ == "__main__":
    tg.main(matrix_factorization)
