"""The work that elastic jobs are measured with: an MLP of two sizes, or sums of nothing, and a log of every step.

Each worker appends a line to a file of its own whenever it holds the total of a step: the step's number, the clock
(`time.monotonic_ns`, one for all processes of a host), the CPU time of its process, the workers of the
view, and the parts that it computed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

import taskgraph as tg
from taskgraph.transport import endpoints

APART = "TASKGRAPH_BENCH_APART"
if APART in os.environ:  # in a worker: no other one is on its host
    endpoints.can_dial = lambda endpoint: endpoint.startswith("tcp:")

HIDDEN = {"0.27M": 256, "5.8M": 2048}
"""Parameters of the model -> width of its hidden layers."""
INPUTS, CLASSES, ROWS = 784, 10, 2400


class Line(NamedTuple):
    """A step of one worker: when it held the total, its CPU time and the view then, and the parts that it computed."""

    step: int
    at_ns: int
    cpu_ns: int
    workers: tuple[str, ...]
    parts: tuple[int, ...]


def read_log(folder: Path) -> dict[str, list[Line]]:
    """worker -> its lines, as far as they are written."""
    found: dict[str, list[Line]] = {}
    for path in sorted(folder.glob("*.log")):
        lines = path.read_text().splitlines(keepends=True)
        fields = [line.split() for line in lines if line.endswith("\n")]
        found[path.stem] = [
            Line(int(f[0]), int(f[1]), int(f[2]), tuple(f[3].split(",")), tuple(map(int, f[4:]))) for f in fields
        ]
    return found


def note(out: TextIO, run: tg.Run, step: int, parts: list[int]) -> None:
    """Writes the line of a step."""
    print(step, time.monotonic_ns(), time.process_time_ns(), ",".join(run.workers), *parts, file=out)


def net(hidden: int) -> Any:
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(INPUTS, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, hidden), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(hidden, CLASSES))


def data() -> tuple[Any, Any]:
    """Returns images and labels."""
    import torch

    of = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, INPUTS, generator=of), torch.randint(0, CLASSES, (ROWS,), generator=of)


@tg.elastic(name="benchmark-fit")
def fit(run: tg.Run, log: str, model: str = "0.27M", parts: int = 24, batch: int = 240, steps: int = 100) -> int:
    import torch
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)
    mlp, (images, labels) = net(HIDDEN[model]), data()
    optimizer = torch.optim.SGD(mlp.parameters(), 0.01, momentum=0.9)
    run.state(model=mlp, optimizer=optimizer)
    with (Path(log) / f"{run.worker}.log").open("a", buffering=1) as out:
        for step in run.steps(rows=ROWS, batch=batch, parts=parts):
            if step.number == steps:
                return steps
            computed: list[int] = []
            for part in step:
                part.backward(cross_entropy(mlp(images[part.rows]), labels[part.rows]))
                computed.append(part.number)
            optimizer.step()
            note(out, run, step.number, computed)
    raise AssertionError("the steps ended")


@tg.elastic(name="benchmark-add")
def add(run: tg.Run, log: str, n: int = 1, state_mib: int = 0, parts: int = 24, steps: int = 100) -> int:
    """Sums n float64 of each part; the state has so many MiB besides."""
    ones = np.ones(n)
    state = run.state(w=np.zeros(n), ballast=np.ones(state_mib << 17))
    with (Path(log) / f"{run.worker}.log").open("a", buffering=1) as out:
        for step in run.steps(rows=100 * parts, batch=parts, parts=parts):
            if step.number == steps:
                return steps
            computed: list[int] = []
            for part in step:
                part.add(g=ones)
                computed.append(part.number)
            state.w += step["g"]
            note(out, run, step.number, computed)
    raise AssertionError("the steps ended")
