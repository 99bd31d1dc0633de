"""What decides the last bits of what a node computes, and whether nodes of one job differ in it.

A failure changes no result because whoever takes over computes the same from the same input. A node with another
Python, numpy or processor need not: `sum` of floats is another algorithm since Python 3.12, numpy and its BLAS choose
their loops by what the processor has, and `python -O` leaves out what an `assert` does. The job is right with either,
so it is told and nothing more.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping

import numpy as np

from taskgraph.protocol.records import NodeRecord

__all__ = ["arithmetic", "why_unlike"]


def arithmetic() -> tuple[str, ...]:
    """Python, numpy and the processor of this node, as a person reads them."""
    features = np.show_config(mode="dicts")["SIMD Extensions"]
    found = [*features.get("baseline", ()), *features.get("found", ())]
    processor = f"{platform.machine()} ({' '.join(found)})" if found else platform.machine()
    optimized = f" -{'O' * sys.flags.optimize}" if sys.flags.optimize else ""
    return f"Python {sys.version_info[0]}.{sys.version_info[1]}{optimized}", f"numpy {np.__version__}", processor


def why_unlike(ours: NodeRecord, others: Mapping[str, NodeRecord]) -> str:
    """In what a node differs from the first of the others that it differs from; "" where they are all alike."""
    for other in others.values():
        mine, its = ours.arithmetic, other.arithmetic
        if mine[1:2] != its[1:2]:  # each numpy has names of its own for what a processor has
            mine, its = _without_features(mine), _without_features(its)
        pairs = [(a, b) for a, b in zip(mine, its, strict=False) if a != b]
        if pairs:
            here, there = (", ".join(side) for side in zip(*pairs, strict=True))
            return (
                f"{ours.name} on {ours.host} computes with {here}, {other.name} on {other.host} with {there}: the last "
                f"bits of their results may differ. Whatever fails, the job's result is that of one whole run, but it "
                f"may depend on which node computed what"
            )
    return ""


def _without_features(computes: tuple[str, ...]) -> tuple[str, ...]:
    return (*computes[:2], *[processor.partition(" (")[0] for processor in computes[2:]])
