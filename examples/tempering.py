"""How deep are two wells? Parallel tempering: chains at several temperatures, which exchange states with a partner.

A particle sits in a landscape of two wells with a high wall between them. A cold Markov chain stays in the well where
it began. A hot one crosses the wall. So every task runs a chain at a temperature of its own, and in each epoch it may
exchange states with a neighbor: with the next hotter one and the next colder one in turn. Its link `partner` is a
function of the epoch.

    taskgraph run examples/tempering.py --nodes 4
    taskgraph run examples/tempering.py --nodes 4 -o tasks=9 -o epochs=5000
    python examples/tempering.py

The coldest chain should be in the left well as often as `left_share` says. All numbers that are drawn follow from the
seed, the task and the epoch, so the result is the same to the last bit on any number of nodes, whatever is killed.
"""

from __future__ import annotations

import numpy as np

import taskgraph as tg

STEPS = 10


def energy(x: float) -> float:
    """Two wells, at -1 and 1; the left one is deeper."""
    return 20 * (x * x - 1) ** 2 + x / 2


def left_share() -> float:
    """The probability of x < 0 at temperature 1, by a sum over a fine grid."""
    x = np.linspace(-3, 3, 100_001)
    weight = np.exp(-(20 * (x * x - 1) ** 2 + x / 2))
    return float(weight[x < 0].sum() / weight.sum())


def partner(task_id: int, tasks: int, epoch: int) -> list[int]:
    """0-1, 2-3, ... in even epochs, 1-2, 3-4, ... in odd ones. Each of a pair names the other, so one link does."""
    other = task_id + 1 if (task_id + epoch) % 2 == 0 else task_id - 1
    return [other] if 0 <= other < tasks else []


class Chain(tg.Task, state=["x", "left"]):
    """One chain: where it is, `x`, and in how many epochs that was the left well."""

    def setup(self) -> None:
        self.cold = 0.5**self.task_id  # one over the temperature
        self.x = 1.0  # all begin in the well that is less deep
        self.left = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.walk, outbound={"state": "partner"})
        epoch.processor(self.exchange, inbound={"state": "partner"})

    def walk(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        x = self.x
        for _ in range(STEPS):  # Metropolis
            to = x + 0.3 * epoch.rng.normal()
            if np.log(epoch.rng.random()) < self.cold * (energy(x) - energy(to)):
                x = to
        epoch.scratch.x = x  # the state changes in a sync point only: this is for `exchange`
        epoch.scratch.luck = float(epoch.rng.random())
        outs.put("state", (x, self.cold, epoch.scratch.luck))  # at either end nobody may be there: it goes nowhere

    def exchange(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.x = epoch.scratch.x
        if "state" in ins:
            x, cold, luck = ins["state"]
            if self.cold > cold:  # both come to one decision, each from its own end: the colder one's luck counts
                luck = epoch.scratch.luck
            if np.log(luck) < (self.cold - cold) * (energy(self.x) - energy(x)):
                self.x = x
        self.left += self.x < 0
        epoch.report(left=self.left / (epoch.number + 1))  # shown: that of task 0, the coldest

    def result(self) -> int:
        return self.left


@tg.job
def tempering(tasks: int = 6, epochs: int = 2000, seed: int = 0) -> tg.Job:
    """Chains at temperatures 1, 2, 4, ...

    Args:
        tasks: how many
        epochs: exchanges, each after ten steps
        seed: of all that is drawn
    """
    return tg.Job(tasks=tasks, epochs=epochs, seed=seed, builder=Chain, topology={"partner": partner})


if __name__ == "__main__":
    tg.main(tempering)
