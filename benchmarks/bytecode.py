"""How much code an epoch runs: bytecode instructions, by function, of the tree on a node for every task.

    python benchmarks/bytecode.py [--tasks 7] [--n 1] [--in-flight 1] [--gather-s 0.02] [--epochs 40] [--top 40]

They are counted one by one, with `sys.settrace`, so the count does not depend on how busy the machine is: two counts of
the same code differ by what follows from commits alone, of which slow epochs have more each (`--gather-s 1` leaves
hardly any). What is not seen is time within C: system calls, numpy, digests.

Prints, of an epoch of all tasks together: instructions, their part of all, calls, and instructions a call. Leaves are
counted in one task, in-between tasks in one, the root by itself; all that its node does in the main thread counts.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from tree import Tree
from work import children

import taskgraph as tg

__all__ = ["Counting", "Instructions", "bytecode", "counted", "roles"]

_FIRST = 1000
"""The first epoch that is counted; by then everything is known that is found out once."""
_BETWEEN = 100
"""Epochs between one task's count and the next one's, which so does not wait for a process that is traced."""
_ROOT = f"{Path(tg.__file__).parent}{os.sep}"


class Instructions:
    """Counts those of this thread, from `start` to `stop`, by function.

    Since Python 3.12 those of a function are seen from the second time on that it runs: `clear` when all have run.
    """

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._names: dict[Any, str] = {}

    def start(self) -> None:
        sys.settrace(self._called)
        frame: FrameType | None = sys._getframe()
        while frame is not None:  # what runs already
            frame.f_trace, frame.f_trace_opcodes, frame.f_trace_lines = self._ran, True, False
            frame = frame.f_back

    def clear(self) -> None:
        self.ran.clear()
        self.calls.clear()

    def stop(self) -> None:
        sys.settrace(None)
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            frame.f_trace, frame.f_trace_opcodes, frame.f_trace_lines = None, False, True
            frame = frame.f_back

    def _called(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.calls[self._name(frame)] += 1
        return self._ran

    def _ran(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "opcode":
            self.ran[self._name(frame)] += 1
        return self._ran

    def _name(self, frame: FrameType) -> str:
        code = frame.f_code
        if code not in self._names:
            self._names[code] = f"{code.co_qualname} {code.co_filename.removeprefix(_ROOT)}"
        return self._names[code]


class Counting(Tree, state=["count"]):
    """The tree; a task in `begins` counts the instructions of its node from that epoch on."""

    def __init__(self, n: int, begins: dict[int, int], epochs: int) -> None:
        super().__init__(n, 0.0)
        self._begins, self._epochs, self._counts = begins, epochs, Instructions()

    # Counted from one call of these to the next: a `compose` that asked for the epoch would be called in each.

    @tg.stateless
    async def publish(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self._count(epoch)
        self._publish(epoch, outs)

    @tg.stateless
    async def add(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self._count(epoch)
        self._add(ins, outs)

    def _count(self, epoch: tg.Epoch) -> None:
        begin = self._begins.get(self.task_id)
        if begin is not None and epoch.number == begin - 1:
            self._counts.start()
        elif epoch.number == begin:
            self._counts.clear()
        elif begin is not None and epoch.number == begin + self._epochs:
            self._counts.stop()

    def result(self) -> Any:
        return [dict(self._counts.ran), dict(self._counts.calls)] if self.task_id in self._begins else None


def roles(tasks: int) -> dict[int, int]:
    """A task of each role -> how many tasks have it: the root, those in between by their children, a leaf."""
    found = {0: 1}
    for number in (2, 1, 0):
        if alike := [task for task in range(1, tasks) if len(children(task, tasks)) == number]:
            found[alike[-1]] = len(alike)
    return found


@tg.job
def bytecode(tasks: int = 7, n: int = 1, in_flight: int = 1, gather_s: float = 0.02, epochs: int = 40) -> tg.Job:
    begins = {task: _FIRST + nth * (epochs + _BETWEEN) for nth, task in enumerate(roles(tasks))}
    return tg.Job(
        tasks=tasks,
        epochs=max(begins.values()) + epochs + _BETWEEN,
        builder=lambda _: Counting(n, begins, epochs),
        topology=tg.tree(),
        backups=0,
        settings=tg.Settings(epochs_in_flight=in_flight, gather_s=gather_s),
    )


def counted(result: tg.JobResult, tasks: int, epochs: int) -> tuple[Counter[str], Counter[str]]:
    """function -> instructions, and calls, of an epoch of all tasks."""
    found: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    for task, count in roles(tasks).items():
        for into, counts in zip(found, result.values[task], strict=True):
            for name, number in counts.items():
                into[name] += number * count / epochs
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=7)
    parser.add_argument("--n", type=int, default=1, help="numbers in an item")
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--gather-s", type=float, default=0.02)
    parser.add_argument("--epochs", type=int, default=40, help="that are counted")
    parser.add_argument("--top", type=int, default=40, help="functions that are listed")
    given = parser.parse_args()
    options = {"tasks": given.tasks, "n": given.n, "in_flight": given.in_flight, "gather_s": given.gather_s}
    result = tg.run(bytecode(**options, epochs=given.epochs), nodes=given.tasks, timeout_s=600)
    of_each, calls = counted(result, given.tasks, given.epochs)
    whole = sum(of_each.values())
    print(f"{whole:.0f} instructions and {sum(calls.values()):.0f} calls an epoch")
    for name, number in of_each.most_common(given.top):
        part, called = 100 * number / whole, calls[name]
        print(f"{number:8.0f} {part:5.1f} % {called:7.1f} {number / max(called, 1):6.0f}  {name}")


if __name__ == "__main__":
    main()
