"""Describes what a node's results depend on besides the input, to find nodes of one job that may compute differently.

A takeover changes no result because the new primary computes the same from the same input. A node with another
Python, numpy, PyTorch or processor may not: `sum` of floats is another algorithm since Python 3.12, numpy and its BLAS
choose their loops by the processor and the number of threads, and `python -O` drops each `assert`. The environment
counts too: a seed of `hash()`, a time zone, an encoding. The locale does not: Python ignores it until code calls
`locale.setlocale`.

A difference is an event and nothing more, since the job may not depend on it.
"""

from __future__ import annotations

import codecs
import locale
import os
import platform
import sys
import time
from collections.abc import Mapping

import numpy as np

from taskgraph.protocol.records import NodeRecord
from taskgraph.system.environment import THREADS

__all__ = ["describe_arithmetic", "why_unlike"]

_LAST_BITS = "the last bits of their results may differ"
_EFFECTS = (
    _LAST_BITS,
    _LAST_BITS,
    _LAST_BITS,
    _LAST_BITS,
    'hash("text") differs, and with it the order of a set and the task that a key is dealt to by its hash',
    "they have different local times",
    "they read and write text files differently",
    _LAST_BITS,
)
"""The consequences of a difference, in the order of `arithmetic`."""


def describe_arithmetic() -> tuple[str, ...]:
    """Returns descriptions, for people, of Python, numpy, processor, threads, hash seed, time zone and encoding of this
    process, and of PyTorch, if the driver imports it.
    """
    features = np.show_config(mode="dicts")["SIMD Extensions"]
    found = [*features.get("baseline", ()), *features.get("found", ())]
    processor = f"{platform.machine()} ({' '.join(found)})" if found else platform.machine()
    optimized = f" -{'O' * sys.flags.optimize}" if sys.flags.optimize else ""
    torch = getattr(sys.modules.get("torch"), "__version__", "none")
    seed = f"random ({hash('taskgraph') & 0xFFFF:04x})" if sys.flags.hash_randomization else "0"
    return (
        f"Python {sys.version_info[0]}.{sys.version_info[1]}{optimized}",
        f"numpy {np.__version__}",
        processor,
        _threads(),
        f"hash seed {seed}",
        f"time zone {time.tzname[0]} (UTC{-time.timezone / 3600:+g})",
        f"encoding {codecs.lookup(locale.getpreferredencoding(False)).name}",
        f"PyTorch {torch}",
    )


def _threads() -> str:
    """Returns the numbers of threads that the environment sets, and numba's, if the driver imports numba."""
    limits = {name: os.environ.get(name, "any") for name in THREADS}
    if (config := getattr(sys.modules.get("numba"), "config", None)) is not None:
        limits["NUMBA_NUM_THREADS"] = str(config.NUMBA_NUM_THREADS)
    if len(numbers := set(limits.values())) == 1:
        return f"threads {numbers.pop()}"
    return " ".join(f"{name}={number}" for name, number in limits.items())


def why_unlike(ours: NodeRecord, others: Mapping[str, NodeRecord]) -> str:
    """Returns text on how `ours` differs in arithmetic from the first other node that differs; "": none does."""
    for other in others.values():
        mine, its = ours.arithmetic, other.arithmetic
        if mine[1:2] != its[1:2]:  # each numpy has its own names for a processor's features
            mine, its = _without_features(mine), _without_features(its)
        differing = [(a, b, effect) for a, b, effect in zip(mine, its, _EFFECTS, strict=False) if a != b]
        if differing:
            here, there = (", ".join(pair[side] for pair in differing) for side in (0, 1))
            effects = "; ".join(dict.fromkeys(effect for _, _, effect in differing))
            return (
                f"{ours.name} on {ours.host} computes with {here}, {other.name} on {other.host} with {there}: "
                f"{effects}. The job's result may depend on which node computed what"
            )
    return ""


def _without_features(computes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a description of `describe_arithmetic` without the features of the processor."""
    return (*computes[:2], *[processor.partition(" (")[0] for processor in computes[2:3]], *computes[3:])
