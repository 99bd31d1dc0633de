"""Draws the next fault of `chaos`: a pure function of a random generator and the job's view."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from taskgraph.errors import JobError
from taskgraph.protocol.view import JobView

__all__ = ["KINDS", "Fault", "draw", "kinds_of", "pause_s", "survivable"]

KINDS = ("kill", "stop", "term")
"""SIGKILL; SIGSTOP and, later, SIGCONT; SIGTERM, which makes a node hand over and leave."""
_STOPS = (0.3, 2.0)
"""How long a node is stopped, in TTLs of its lease: some wake up in time, most do not."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one node; a stop lasts `lasts_s`."""

    kind: str
    node: str
    lasts_s: float = 0.0


def kinds_of(text: str) -> tuple[str, ...]:
    """Parses `kill,stop`, and returns the kinds of faults. Raises JobError if there are others, or none."""
    kinds = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not kinds or not set(kinds) <= set(KINDS):
        raise JobError(f"--kinds {text}: some of {','.join(KINDS)}")
    return kinds


def pause_s(rng: random.Random, mtbf_s: float) -> float:
    """Draws the time to the next fault: exponentially distributed, like failures, but at most five times the mean."""
    return min(rng.expovariate(1.0 / mtbf_s), 5.0 * mtbf_s)


def survivable(view: JobView, node: str, unwell: Collection[str]) -> bool:
    """Returns True if the job survives the death of `node`: each task is in sync on another healthy node, or another
    worker is healthy.

    Evicted members do not count, although they have the committed boundary for a moment longer.
    """

    def is_healthy(other: str) -> bool:
        there = other != node and other not in unwell and other in view.nodes
        return there and not view.nodes[other].record.draining

    if view.workers is not None:
        return any(is_healthy(worker) for worker, _ in view.workers.record.workers)
    return all(
        any(member.record.until is None and is_healthy(holder) for holder, member in view.members_of(task).items())
        for task in view.primaries
    )


def draw(
    rng: random.Random,
    view: JobView,
    *,
    here: Collection[str],
    unwell: Collection[str],
    kinds: Sequence[str] = KINDS,
    ttl_s: float = 5.0,
    lossy: bool = False,
) -> Fault | None:
    """Draws the next fault; None: no node can be hit at the moment.

    Args:
        here: nodes of this host.
        unwell: nodes that were hit and are not back: they are not hit again, and do not count as healthy.
        lossy: also hit the only replica of a task, or the only worker.
    """
    targets = sorted(  # sorted, so that one seed draws one fault from one view
        node
        for node in here
        if node in view.nodes
        and node not in unwell
        and not view.nodes[node].record.draining
        and (lossy or survivable(view, node, unwell))
    )
    if not targets or not (view.primaries or view.workers):
        return None
    kind, node = rng.choice(tuple(kinds)), rng.choice(targets)
    return Fault(kind, node, ttl_s * rng.uniform(*_STOPS) if kind == "stop" else 0.0)
