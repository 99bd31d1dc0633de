"""How warm does a plate get? The heat equation on a grid of tasks that exchange the edges of their blocks.

One edge of a square plate is kept at 100 degrees, the other three at 0. In every epoch each inner cell becomes the mean
of its four neighbors (Jacobi's method), until no cell changes by more than the tolerance. Every task holds a block of
the plate. It needs one row or column of each block beside it, and the largest change anywhere, which travels up a tree.

    taskgraph run examples/heat.py --nodes 4
    taskgraph run examples/heat.py --nodes 4 -o rows=3 -o cols=4 -o size=300 -o tolerance=0.01
    python examples/heat.py

The plate is the one that `alone` computes without tasks, to the last bit, on any number of nodes, whatever is killed.
docs/guide.md makes this program step by step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import taskgraph as tg

HOT = 100.0


def sweep(plate: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of the four neighbors of each inner cell; two rows and two columns smaller than the plate."""
    return (plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]) / 4


def alone(size: int, sweeps: int) -> NDArray[np.float64]:
    """The inner cells of the plate, (size, size), after so many sweeps: a loop in one process."""
    plate = np.zeros((size + 2, size + 2))
    plate[0] = HOT
    for _ in range(sweeps):
        plate[1:-1, 1:-1] = sweep(plate)
    return plate[1:-1, 1:-1]


class Block(tg.Task, state=["cells", "change"]):
    """One block of the plate: `cells`, (height, width), and by how much the last sweep changed one of them at most."""

    def __init__(self, shape: tuple[int, int], tolerance: float) -> None:
        self.shape = shape
        self.tolerance = tolerance

    def setup(self) -> None:
        self.cells = np.zeros(self.shape)
        self.change = HOT

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.send, outbound={"up": "north", "down": "south", "left": "west", "right": "east"})
        edges = {"up": "south", "down": "north", "left": "east", "right": "west"}  # what comes from the south went up
        if self.task_id == 0:
            epoch.processor(self.decide, inbound={"change": "children"})
        else:
            epoch.processor(self.gather, inbound={"change": "children"}, outbound={"change": "parents"})
        epoch.processor(self.update, inbound=edges)

    def send(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("up", self.cells[0])  # at the plate's edge nobody is there: it goes nowhere
        outs.put("down", self.cells[-1])
        outs.put("left", self.cells[:, 0])
        outs.put("right", self.cells[:, -1])

    def gather(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        outs.put("change", max([self.change, *ins.all("change").values()]))

    def decide(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        change = max([self.change, *ins.all("change").values()])
        epoch.report(change=change)
        if change <= self.tolerance:
            epoch.finish()

    def update(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        plate = np.pad(self.cells, 1)  # zeros around it: the cold edges
        plate[0] = HOT  # where no other block lies above
        around = {"down": plate[0, 1:-1], "up": plate[-1, 1:-1], "right": plate[1:-1, 0], "left": plate[1:-1, -1]}
        for tag, edge in around.items():
            if tag in ins:
                edge[:] = ins[tag]
        cells = sweep(plate)
        self.change = float(abs(cells - self.cells).max())
        self.cells = cells

    def result(self) -> NDArray[np.float64]:
        return self.cells


@tg.job
def heat(rows: int = 2, cols: int = 2, size: int = 100, tolerance: float = 0.02) -> tg.Job:
    """A plate of size x size cells, in rows x cols blocks.

    Args:
        rows: blocks from the hot edge to the one opposite
        cols: blocks from left to right
        size: cells along each edge of the plate
        tolerance: degrees; the job ends when no cell changes by more
    """
    if size < max(rows, cols):
        raise ValueError(f"{rows} x {cols} blocks of {size} x {size} cells: each needs a cell: size must be larger")
    if tolerance < 0:
        raise ValueError("tolerance must be 0 at least: else the job never ends")

    def block(task_id: int) -> Block:
        row, col = divmod(task_id, cols)  # as tg.grid numbers them
        height, width = tg.shard(size, row, rows), tg.shard(size, col, cols)
        return Block((height.stop - height.start, width.stop - width.start), tolerance)

    return tg.Job(tasks=rows * cols, builder=block, topology=tg.grid(rows, cols) | tg.tree())


if __name__ == "__main__":
    tg.main(heat)
