"""What a node says of the queues and maps that it deals."""

from __future__ import annotations

import json

import pytest

from taskgraph.observe.queues import QueueStatus, Rate
from taskgraph.observe.queues_text import merge_queues, set_aside_text, shards_json, shards_text
from taskgraph.protocol.dealing import QueueLedger


def test_status_is_that_of_the_ledger() -> None:
    ledger = QueueLedger(4, passes=2, straggler=2)
    slow, first, _ = ledger.deal("a", 3, 0)
    ledger.count("a", first, 1, rows=5)
    found = QueueStatus.of("rows", "queue", ledger, 9)
    assert (found.pieces, found.passes, found.left, found.set_aside) == (4, 2, 7, 0)
    assert found.counts == ((0, 1, 2, 1, 0, 5),)
    assert found.slow[0] == (0, slow.piece, "a", 9)


def test_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate()
    assert rate.at(100) == 0
    for second in range(5):
        rate.add(100 + second, 20)
    assert rate.at(105) == pytest.approx(100 / 5)
    assert rate.at(200) == 0
    rate.add(200, 50)
    assert rate.at(205) == pytest.approx(50 / 10)


def test_each_queue_is_shown_once_as_the_furthest_node_knows_it() -> None:
    ledger = QueueLedger(3, straggler=2)
    before = QueueStatus.of("rows", "queue", ledger, 0)
    first, _ = ledger.deal("task 1", 2, 0)
    ledger.count("task 1", first, 1, rows=5)
    after = QueueStatus.of("rows", "queue", ledger, 9, rows_per_s=1234.5)
    (found,) = merge_queues([before, after, before])
    assert found == after
    assert shards_text([found]).splitlines() == [
        "queue rows: 3 pieces, 1 pass; 2 left; 1,234 rows/s",
        "  pass  done  dealt  open  set aside  rows",
        "  0     1     1      1     0          5",
        "  slow: piece 1 of pass 0, on task 1 for 9.0 s",
    ]
    (plain,) = json.loads(json.dumps(shards_json([found])))
    assert plain["counts"] == [{"pass_number": 0, "done": 1, "dealt": 1, "open": 1, "set_aside": 0, "rows": 5}]
    assert plain["slow"][0]["holder"] == "task 1"


def test_pieces_set_aside_are_named() -> None:
    assert set_aside_text({}) == ""
    assert set_aside_text({"rows": [17, 3]}) == "2 pieces of rows set aside: 3, 17; --json has the errors"
    assert "12 pieces of rows set aside: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...;" in set_aside_text({"rows": [*range(12)]})
