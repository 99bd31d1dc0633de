"""The command line: runs many seeds and prints what they covered, or one seed and prints its transcript."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from taskgraph.testing.simulate.drawing import KINDS
from taskgraph.testing.simulate.elastic import run_elastic_seed
from taskgraph.testing.simulate.seed import Outcome, run_seed

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Runs the seeds that the arguments name. Returns 1 if a seed found a problem, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m taskgraph.testing.simulate", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--seeds", default="0:100", metavar="FROM:TO", help="which seeds (TO is not one of them)")
    parser.add_argument("--seed", type=int, help="one seed, with its transcript")
    parser.add_argument("--verbose", action="store_true", help="messages, too")
    parser.add_argument("--for-s", type=float, default=None, metavar="S", help="stop after S seconds")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first seed that finds something")
    parser.add_argument("--mistakes", action="store_true", help="jobs whose own code raises somewhere")
    parser.add_argument("--elastic", action="store_true", help="elastic jobs in place of task graphs")
    given = parser.parse_args(argv)
    run = run_elastic_seed if given.elastic else partial(run_seed, mistakes=given.mistakes)
    if given.seed is not None:
        outcome = run(given.seed)
        print(outcome.transcript.text(messages=given.verbose))
        print(describe(outcome))
        return 1 if outcome.problem else 0
    first, _, last = given.seeds.partition(":")
    return _run_seeds(range(int(first), int(last or first)), given.for_s, given.keep_going, run)


def _run_seeds(seeds: range, limit_s: float | None, keep_going: bool, run: Callable[[int], Outcome]) -> int:
    """Runs seeds, and prints how they ended and what they covered. Returns 1 if a seed found a problem, else 0.

    Args:
        limit_s: starts no seed after this time.
        keep_going: runs the other seeds, too, after a problem.
    """
    began = time.monotonic()
    faults: Counter[str] = Counter()
    states: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    found: list[int] = []
    count, virtual_s = 0, 0.0
    for seed in seeds:
        if limit_s is not None and time.monotonic() - began > limit_s:
            break
        outcome = run(seed)
        count += 1
        virtual_s += outcome.virtual_s
        faults += outcome.transcript.faults
        states += outcome.transcript.states
        if outcome.problem:
            found.append(seed)
            print(describe(outcome), flush=True)
            if not keep_going:
                print(outcome.transcript.text(messages=False))
                break
        else:
            ends[outcome.ended] += 1
    wall_s = time.monotonic() - began
    print(
        f"{count} seeds in {wall_s:.1f} s ({count / max(wall_s, 1e-9):.1f} per second, {virtual_s / 60:.0f} virtual "
        f"minutes): {', '.join(f'{n} {end}' for end, n in sorted(ends.items()))}; {len(found)} with a problem"
    )
    print("faults:", ", ".join(f"{kind} {faults[kind]}" for kind in KINDS))
    print("reached:", ", ".join(f"{kind} {n}" for kind, n in sorted(states.items())))
    if found:
        print("seeds with a problem:", " ".join(map(str, found)))
    return 1 if found else 0


def describe(outcome: Outcome) -> str:
    """Describes the outcome of a seed in one line."""
    end = f"PROBLEM: {outcome.problem}" if outcome.problem else outcome.ended
    return (
        f"seed {outcome.seed}: {end} ({outcome.described}; {outcome.virtual_s:.2f} virtual s, {outcome.steps} steps, "
        f"{outcome.wall_s:.3f} s)"
    )


if __name__ == "__main__":
    sys.exit(main())
