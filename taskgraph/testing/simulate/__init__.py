"""Simulates jobs with the real node logic in one process, under virtual time, with failures drawn from a seed.

    python -m taskgraph.testing.simulate --seeds 0:1000
    python -m taskgraph.testing.simulate --seed 17 --verbose
    python -m taskgraph.testing.simulate --elastic --seeds 0:1000

Everything follows from the seed: the job, its nodes, the delays, what fails and when. A seed replays exactly.
"""

from taskgraph.testing.simulate.seed import Outcome, run_seed

__all__ = ["Outcome", "run_seed"]
