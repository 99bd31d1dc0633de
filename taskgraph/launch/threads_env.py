"""How many threads BLAS and OpenMP take: set before numpy is imported, so this module imports nothing of ours."""

from __future__ import annotations

import os

__all__ = ["NAMES", "set_thread_env", "thread_env"]

NAMES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def thread_env(threads: int) -> dict[str, str]:
    """The environment for a node: the same number for any number of nodes, so that sums are bit-equal.

    What the user set in the environment stays; what `set_thread_env` set there does not.
    """
    return {name: str(threads) for name in NAMES if name not in os.environ or name in _set_by_us}


def set_thread_env(threads: int) -> None:
    """The same for this process, as long as it has not imported numpy, and for what it starts."""
    found = thread_env(threads)
    _set_by_us.update(found)
    os.environ.update(found)


_set_by_us: set[str] = set()
