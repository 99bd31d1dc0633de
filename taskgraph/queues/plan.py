"""The pieces of one epoch, and how they are dealt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from taskgraph.protocol.dealing import QueueLedger

__all__ = ["DEAL", "EpochPlan", "call_name", "plan_of", "plan_of_count", "processor_of"]

DEAL = "taskgraph.deal"
"""The method by which the processors of a map ask their dealer. No handler of a user has such a name, with a dot."""


def call_name(processor: str, epoch: int) -> str:
    """Returns the name of the calls that compute pieces for the processor of a map."""
    return f"{processor}{_PIECES}{epoch}"


def processor_of(call: str) -> str | None:
    """Returns the processor of a map for which a call of this name computes pieces; None: it is no such call."""
    processor, pieces, _ = call.rpartition(_PIECES)
    return processor if pieces else None


_PIECES: Final = ": pieces of epoch "


class EpochPlan(NamedTuple):
    """What an epoch computes: the same in every attempt, as it depends on the committed ledger alone.

    Attributes:
        pieces: (pass, piece) of each, in the order in which they are dealt. They are known by their place there.
        attempts, on_error, straggler: as in `QueueLedger`.
        left: pieces of the queue that are left after this epoch.
        over: the queue is over after this epoch.
    """

    pieces: Sequence[tuple[int, int]]
    attempts: int = 3
    on_error: str = "fail"
    straggler: float = 3.0
    left: int = 0
    over: bool = True


def plan_of_count(count: int, upto: int | None) -> EpochPlan:
    """Returns the plan of `count` values of an epoch's own: the first `upto` of them; None: all."""
    here = count if upto is None else min(count, upto)
    return EpochPlan([(0, piece) for piece in range(here)], left=count - here, over=here == count)


def plan_of(ledger: QueueLedger, upto: int | None) -> EpochPlan:
    """Returns the plan of an epoch of a queue: the next `upto` pieces; None: the rest of the pass at work."""
    later = QueueLedger.of(ledger.state())
    most = ledger.open_in_pass if upto is None else upto
    tickets = later.deal("", most, 0.0)
    left = ledger.left - len(tickets)
    over = ledger.over or (ledger.passes is not None and not left)
    options = ledger.options
    return EpochPlan(
        [(ticket.pass_number, ticket.piece) for ticket in tickets],
        options.attempts,
        options.on_error,
        options.straggler,
        left,
        over,
    )
