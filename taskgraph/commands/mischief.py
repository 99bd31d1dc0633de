"""Which fault comes next: a pure function of a random generator and of what etcd says of the job."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from taskgraph.errors import JobError
from taskgraph.protocol.view import JobView

__all__ = ["KINDS", "Fault", "draw", "kinds_of", "pause_s", "survivable"]

KINDS = ("kill", "stop", "term")
"""SIGKILL; SIGSTOP and, later, SIGCONT; SIGTERM, upon which a node hands over and leaves."""
_STOPS = (0.3, 2.0)
"""How long a stopped node stays so, in TTLs: some wake up in time, most do not."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to one node; `lasts_s` of a stop."""

    kind: str
    node: str
    lasts_s: float = 0.0


def kinds_of(text: str) -> tuple[str, ...]:
    """`kill,stop` as a tuple; raises JobError."""
    kinds = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not kinds or not set(kinds) <= set(KINDS):
        raise JobError(f"--kinds {text}: some of {','.join(KINDS)}")
    return kinds


def pause_s(rng: random.Random, mtbf_s: float) -> float:
    """Time to the next fault: without a memory, as failures are, and never longer than five times the mean."""
    return min(rng.expovariate(1.0 / mtbf_s), 5.0 * mtbf_s)


def survivable(view: JobView, node: str, unwell: Collection[str]) -> bool:
    """Whether every task has a replica in sync on another node that is registered, stays, and was not hit already.

    Members that were evicted do not count, although they hold the committed boundary for a moment longer.
    """
    return all(
        any(
            member.record.until is None
            and holder != node
            and holder not in unwell
            and holder in view.nodes
            and not view.nodes[holder].record.draining
            for holder, member in view.members_of(task).items()
        )
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
    """The next fault, or None where no node can be spared at the moment.

    Args:
        here: nodes of this host, which can be hit.
        unwell: those that were hit and are not back: they are not hit again, and nobody counts on them.
        lossy: whether the last replica in sync of a task may be hit, too.
    """
    spared = sorted(  # sorted, so that the same seed at the same view is the same fault
        node
        for node in here
        if node in view.nodes
        and node not in unwell
        and not view.nodes[node].record.draining
        and (lossy or survivable(view, node, unwell))
    )
    if not spared or not view.primaries:
        return None
    kind, node = rng.choice(tuple(kinds)), rng.choice(spared)
    return Fault(kind, node, ttl_s * rng.uniform(*_STOPS) if kind == "stop" else 0.0)
