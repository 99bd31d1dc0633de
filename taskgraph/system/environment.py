"""The environment variables that decide what a node computes. numpy reads some of them once, when it is imported.

So this module imports nothing of ours.
"""

from __future__ import annotations

import os

__all__ = ["THREADS", "node_env", "set_thread_env", "user_env"]

THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_HASH_SEED = "0"
"""The seed of every node of every job. `hash("text")` is the same on all hosts and in a resumed run, so a key that is
dealt by its hash keeps its task. The launcher's own seed is random unless the user sets it."""
_set_by_us: set[str] = set()


def node_env(threads: int) -> dict[str, str]:
    """Returns what a node's environment has in addition to the launcher's.

    A number of threads that the user set stays. One that `set_thread_env` set does not.
    """
    free = [name for name in THREADS if name not in os.environ or name in _set_by_us]
    return {**dict.fromkeys(free, str(threads)), "PYTHONHASHSEED": _HASH_SEED}


def user_env() -> dict[str, str]:
    """Returns the environment without what `set_thread_env` set: for commands that start nodes by other means."""
    return {name: value for name, value in os.environ.items() if name not in _set_by_us}


def set_thread_env(threads: int) -> None:
    """Sets the number of threads for this process, if it has not imported numpy yet, and for those it starts."""
    for name in THREADS:
        if name not in os.environ or name in _set_by_us:
            _set_by_us.add(name)
            os.environ[name] = str(threads)
