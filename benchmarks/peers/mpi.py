"""mpi4py on Open MPI: the tree, point to point, between buffers that stay. No fault tolerance.

Starts itself once for every task, by mpirun.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from work import WARM_EPOCHS, WARM_PART, Array, arguments, check, children, parent, plan, tell


class Task:
    def __init__(self, n: int) -> None:
        from mpi4py import MPI

        self.waitall = MPI.Request.Waitall
        self.world = MPI.COMM_WORLD
        self.id, self.tasks = self.world.Get_rank(), self.world.Get_size()
        self.below = children(self.id, self.tasks)
        self.x: Array = np.zeros(n)
        self.total: Array = np.zeros(n)
        self.sums = [np.zeros(n) for _ in self.below]

    def epochs(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            coming = [self.world.Irecv(s, child) for s, child in zip(self.sums, self.below, strict=True)]
            if self.id:
                self.world.Recv(self.x, parent(self.id))
            else:
                self.x.fill(float(number))
            going = [self.world.Isend(self.x, child) for child in self.below]
            np.multiply(self.x, float(self.id), out=self.total)
            self.waitall(coming)
            for one in self.sums:
                np.add(self.total, one, out=self.total)
            if self.id:
                self.world.Send(self.total, parent(self.id))
            else:
                check(self.total, self.tasks, number)
            self.waitall(going)


def main(n: int, seconds: float) -> None:
    mine, done = Task(n), WARM_EPOCHS
    began = time.monotonic()
    mine.epochs(0, WARM_EPOCHS)
    more = plan(seconds * WARM_PART, WARM_EPOCHS, time.monotonic() - began)
    for _ in range(2):  # a longer warm-up, by which the root says how many are to be measured
        count = mine.world.bcast(more, 0)
        began = time.monotonic()
        mine.epochs(done, count)
        elapsed = time.monotonic() - began
        done += count
        more = plan(seconds, count, elapsed)
    if mine.id == 0:
        tell({"rate": count / elapsed, "epochs": count, "seconds": elapsed})


if __name__ == "__main__":
    given = arguments(__doc__)
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        main(given.n, given.seconds)
    else:
        beside = Path(sys.executable).with_name("mpirun")
        mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
        if mpirun is None:
            raise SystemExit("there is no mpirun")
        # As root in a container, too; and tasks that wait give their core away where there are more tasks than cores.
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        mca = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        os.execv(mpirun, [mpirun, *root, *mca, "-n", str(given.tasks), sys.executable, *sys.argv])
