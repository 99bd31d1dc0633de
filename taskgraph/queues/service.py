"""The task that has the ledger of a named queue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from taskgraph.protocol.dealing import QueueLedger
from taskgraph.queues.plan import EpochPlan, plan_of
from taskgraph.results import SET_ASIDE
from taskgraph.shape import handles
from taskgraph.task import Task

if TYPE_CHECKING:
    from taskgraph.channels import Inputs, Outputs
    from taskgraph.epoch import Epoch

__all__ = ["QueueTask"]


class QueueTask(Task, state=["pieces", "digest", "ledger_state"]):
    """Has the ledger of a queue, and counts pieces at its sync point: so in the commit of their results.

    Args:
        find: finds the pieces; returns how many there are, and their digest.
        begin: makes the ledger before the first piece, from the number of pieces and the seed of the job.
        name: of the queue.

    Attributes:
        pieces: how many the source has; None before `setup`.
        digest: of the pieces.
        ledger_state: as `QueueLedger.state()`; None before the first piece counted.
    """

    def __init__(
        self, find: Callable[[], tuple[int, str]], begin: Callable[[int, int], QueueLedger], name: str
    ) -> None:
        self.find, self.begin = find, begin
        self.name = name
        self.pieces: int | None = None
        self.digest = ""
        self.ledger_state: dict[str, Any] | None = None

    def setup(self) -> None:
        """Finds the pieces, in the thread of user code: it may read all files."""
        self.pieces, self.digest = self.find()

    def compose(self, epoch: Epoch) -> None:
        """Declares the sync point that counts."""
        epoch.scratch.counted = {}
        epoch.processor(self.settle)

    def ledger(self, seed: int) -> QueueLedger:
        """Returns the committed ledger.

        Args:
            seed: of the job.
        """
        assert self.pieces is not None
        return self.begin(self.pieces, seed) if self.ledger_state is None else QueueLedger.of(self.ledger_state)

    def plan(self, upto: int | None, seed: int) -> EpochPlan:
        """Returns the plan of the epoch at work: its next `upto` pieces; None: the rest of the pass."""
        return plan_of(self.ledger(seed), upto)

    @handles("count")
    async def count(self, epoch: Epoch, sender: int, payload: Mapping[str, Any]) -> None:
        """Keeps a task's message for `settle`: pass, number and rows of each piece that it put; pieces set aside."""
        epoch.scratch.counted[sender] = payload

    @handles("left", pure=True)
    async def left(self, epoch: Epoch, sender: int, payload: None) -> tuple[int, bool]:
        """Returns the pieces left before this epoch, and whether the queue is over."""
        ledger = self.ledger(epoch._work.seed)
        return ledger.left, ledger.over

    async def settle(self, epoch: Epoch, ins: Inputs, outs: Outputs) -> None:
        """The sync point: counts the pieces of all tasks' `count` messages of this epoch in the ledger."""
        counted: dict[int, Mapping[str, Any]] = epoch.scratch.counted
        if not counted:
            return
        ledger = self.ledger(epoch._work.seed)
        _settle(ledger, [payload for _, payload in sorted(counted.items())])
        self.ledger_state = ledger.state()

    def result(self) -> Any:
        """Returns the pieces that were set aside, for `JobResult.set_aside`; None: there is none."""
        aside = [] if self.ledger_state is None else self.ledger_state["aside"]
        return {SET_ASIDE: self.name, "pieces": aside} if aside else None


def _settle(ledger: QueueLedger, counted: Sequence[Mapping[str, Any]]) -> None:
    """Counts the pieces in these messages, pass after pass: a pass opens when the one before has no open piece."""
    rows: dict[int, dict[int, int]] = {}
    aside: dict[int, dict[int, tuple[str, str]]] = {}
    for payload in counted:
        for e, piece, count in payload["done"].tolist():
            rows.setdefault(e, {})[piece] = count
        for e, piece, text, node in payload["aside"]:
            aside.setdefault(e, {})[piece] = text, node
    for e in sorted({*rows, *aside}):
        done, failed = rows.get(e, {}), aside.get(e, {})
        for ticket in ledger.claim("", e, done.keys(), 0.0):
            ledger.count("", ticket, 0.0, done[ticket.piece])
        for piece, (text, node) in failed.items():
            for ticket in ledger.claim(node, e, [piece], 0.0):
                ledger.put_aside(node, ticket, text)
