"""What a node says of the queues and maps that it deals."""

from __future__ import annotations

from taskgraph.observe.queues import QueueStatus, Rate
from taskgraph.protocol.dealing import Ledger


def test_status_is_that_of_the_ledger() -> None:
    ledger = Ledger(4, passes=2, straggler=2)
    slow, first, _ = ledger.deal("a", 3, 0)
    ledger.count("a", first, 1, rows=5)
    found = QueueStatus.of("rows", "queue", ledger, 9)
    assert (found.pieces, found.passes, found.left, found.set_aside) == (4, 2, 7, 0)
    assert found.counts == ((0, 1, 2, 1, 0, 5),)
    assert found.slow[0] == (0, slow.piece, "a", 9)


def test_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate()
    assert rate.note(0, 0) == 0
    assert rate.note(5, 100) == 20
    assert rate.note(20, 100) == 0
