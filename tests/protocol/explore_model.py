"""Explores the model of `model_kit` with a budget of one's own: `python tests/protocol/explore_model.py --takeovers 2`.

Prints how many states each number of steps leads to, and in the end what was seen. A violation is printed with a
shortest way there.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import fields

from model_kit import Budget, Explored, Model, Violation, explore


def main() -> int:
    """Explores; 1 where an invariant broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--nodes", default="abc", help="a letter each")
    parser.add_argument("--members", default="ab", help="those in sync when the job begins")
    parser.add_argument("--limit", type=int, default=200_000_000, help="more states are an error")
    defaults = Budget(epochs=2, crashes=2, joins=1, takeovers=2)
    for field in fields(Budget):
        parser.add_argument(f"--{field.name}", type=int, default=getattr(defaults, field.name))
    given = parser.parse_args()
    budget = Budget(**{field.name: getattr(given, field.name) for field in fields(Budget)})
    began = time.monotonic()

    def told(explored: Explored, new: int) -> None:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024  # kilobytes, on Linux
        seconds = time.monotonic() - began
        print(f"{explored.depth} steps: {new} of {explored.states} states, {seconds:.0f} s, {memory} MB", flush=True)

    try:
        explored = explore(Model(given.tasks, given.nodes, budget, given.members), limit=given.limit, level=told)
    except Violation as violation:
        print(f"violated: {violation}")
        return 1
    steps = ", ".join(f"{kind} {count}" for kind, count in explored.steps.most_common())
    print(f"{budget}: no violation in {explored.states} states; {explored.epochs} epochs committed; steps: {steps}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
