"""The sums of a task: equal over all tasks exactly when every edge has both its ends."""

from __future__ import annotations

import random
from itertools import combinations
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskgraph.errors import TaskGraphError
from taskgraph.protocol.messages import LedgerEntry
from taskgraph.protocol.sums import ContentConflict, Kind, MessageLedger, entry_hash, explain, total

A, B = b"a" * 16, b"b" * 16

entry = st.tuples(
    st.sampled_from(get_args(Kind)),
    st.integers(0, 4),
    st.integers(0, 4),
    st.text(max_size=4),
    st.binary(max_size=4),
)


def test_identity_tells_every_field_apart() -> None:
    fields = [
        ("item", 1, 2, "x", A),
        ("flag", 1, 2, "x", A),
        ("item", 2, 1, "x", A),
        ("item", 1, 2, "y", A),
        ("item", 1, 2, "x", B),
        ("item", 12, 2, "x", A),
        ("item", 1, 22, "x", A),
        ("ite", 1, 2, "mx", A),
        ("item", 1, 2, "xa", A[1:]),
        ("item", 1, 2, "", b"x" + A),
        ("item", 1, 2, "x\n1 2 3 4\n", A),
        ("item", 1, 2, "\udc80", A),
    ]
    assert len({entry_hash(*f) for f in fields}) == len(fields)
    assert all(0 <= entry_hash(*f) < 1 << 128 for f in fields)
    assert entry_hash(*fields[0]) == entry_hash(*fields[0])


@given(entry, entry)
def test_identity_is_a_function_of_the_fields(a: tuple, b: tuple) -> None:
    assert (entry_hash(*a) == entry_hash(*b)) == (a == b)


def test_identity_stays_what_it_is() -> None:
    # Two nodes of a job may run on different machines: the number must not depend on the process.
    assert entry_hash("item", 3, 1, "grad", bytes(16)) == 0x37BAA033FC3254120D01605A8D9CE367


@given(st.lists(entry, max_size=30), st.randoms(use_true_random=False))
def test_sums_agree_whatever_the_order_and_however_often(entries: list[tuple], rnd: random.Random) -> None:
    unique = {e[:4]: e for e in entries}
    ledgers = {t: MessageLedger() for t in range(5)}
    for e in unique.values():
        ledgers[e[1]].count_sent(*e)
    arriving = list(unique.values()) * 2
    rnd.shuffle(arriving)
    for e in arriving:
        ledgers[e[2]].count_received(*e)
    assert total(x.sent_sum for x in ledgers.values()) == total(x.received_sum for x in ledgers.values())
    assert explain({t: x.entries() for t, x in ledgers.items()}) == []
    if unique:
        lost = next(iter(unique.values()))
        other = MessageLedger()
        for e in unique.values():
            if e[2] == lost[2] and e is not lost:
                other.count_received(*e)
        ledgers_less = {**ledgers, lost[2]: other}
        assert total(x.sent_sum for x in ledgers.values()) != total(x.received_sum for x in ledgers_less.values())


def test_counts_an_identity_once() -> None:
    ledger = MessageLedger()
    assert ledger.count_sent("item", 0, 1, "x", A) is True
    before = ledger.sent_sum
    assert ledger.count_sent("item", 0, 1, "x", A) is False
    assert ledger.count_sent("item", 0, 1, "x", bytes(bytearray(A))) is False
    assert ledger.sent_sum == before == entry_hash("item", 0, 1, "x", A)
    assert ledger.received_sum == 0


def test_empty_digest_counts_once_too() -> None:
    ledger = MessageLedger()
    assert not ledger.has_received("flag", 0, 1, "")
    assert [ledger.count_received("flag", 0, 1, "", b"") for _ in range(3)] == [True, False, False]
    assert ledger.received_sum == entry_hash("flag", 0, 1, "", b"")
    assert ledger.has_received("flag", 0, 1, "")
    assert not ledger.has_received("item", 0, 1, "")


@pytest.mark.parametrize("side", ["sent", "received"])
def test_another_content_of_the_same_identity_is_a_conflict(side: str) -> None:
    ledger = MessageLedger()
    add = getattr(ledger, f"count_{side}")
    add("request", 0, 1, "push#0", A)
    sums = ledger.sent_sum, ledger.received_sum
    with pytest.raises(
        ContentConflict, match=r"task 0 sent task 1 two different contents of request 'push#0'"
    ) as caught:
        add("request", 0, 1, "push#0", B)
    error = caught.value
    assert isinstance(error, TaskGraphError)
    assert (error.sent, error.kind, error.sender, error.receiver, error.name) == (
        side == "sent",
        "request",
        0,
        1,
        "push#0",
    )
    assert (error.known, error.other) == (A, B)
    assert (ledger.sent_sum, ledger.received_sum) == sums
    assert [e.digest for e in ledger.entries()] == [A]


def test_task_may_send_to_itself() -> None:
    ledger = MessageLedger()
    ledger.count_sent("item", 2, 2, "x", A)
    ledger.count_received("item", 2, 2, "x", A)
    assert ledger.sent_sum == ledger.received_sum != 0
    assert explain({2: ledger.entries()}) == []


def test_sum_wraps() -> None:
    sums = [entry_hash("item", 0, 1, str(i), A) for i in range(100)]
    ledger = MessageLedger()
    for i in range(100):
        ledger.count_sent("item", 0, 1, str(i), A)
    assert ledger.sent_sum == sum(sums) % 2**128 == total(sums)
    assert sum(sums) >= 2**128


def test_distinct_sets_of_entries_have_distinct_sums() -> None:
    edges = [("item", s, r, n, A) for s in range(3) for r in range(3) for n in "xy"]
    seen = [total(entry_hash(*e) for e in c) for k in range(4) for c in combinations(edges, k)]
    assert len(set(seen)) == len(seen)


def pages(*entries: tuple[bool, str, int, int, str, bytes], tasks: int = 6) -> dict[int, list[LedgerEntry]]:
    result: dict[int, list[LedgerEntry]] = {t: [] for t in range(tasks)}
    for e in entries:
        result[e[2] if e[0] else e[3]].append(LedgerEntry(*e))
    return result


def test_explains_each_disagreement() -> None:
    assert explain(
        pages(
            (True, "item", 0, 1, "fine", A),
            (False, "item", 0, 1, "fine", A),
            (True, "item", 3, 5, "x", A),
            (False, "item", 3, 4, "y", A),
            (True, "item", 4, 5, "z", A),
            (False, "item", 4, 5, "z", B),
            (True, "flag", 1, 2, "stop", A),
            (False, "request", 1, 3, "push#0", A),
            (True, "answer", 3, 1, "push#1", A),
            (False, "answer", 3, 1, "push#1", B),
        )
    ) == [
        "task 1 sent flag 'stop' to task 2, which did not count it",
        "task 3 counted request 'push#0' from task 1, which did not send it",
        "task 3 sent another answer 'push#1' than task 1 has",
        "task 4 took 'y' from task 3, which does not put it (declare it as outbound of one of its processors)",
        "task 3 put 'x' for task 5, which does not take it (declare it as inbound of one of its processors)",
        "task 4 sent another 'z' than task 5 has",
    ]


def test_explains_nothing_about_a_task_that_did_not_answer() -> None:
    known = pages((True, "item", 0, 1, "x", A), (True, "item", 0, 1, "y", A), (True, "item", 0, 2, "x", A))
    del known[1]
    assert explain(known) == [
        "task 0 put 'x' for task 2, which does not take it (declare it as inbound of one of its processors)",
    ]


def test_names_an_entry_in_the_wrong_ledger() -> None:
    [line] = explain({0: [LedgerEntry(True, "item", 3, 5, "x", A)], 3: [], 5: []})
    assert line.startswith("the ledger of task 0 has an entry of another task: item 'x' from task 3 to task 5")


def test_explanations_are_bounded() -> None:
    lines = explain(pages(*((True, "item", 0, 1, f"x{i:03}", A) for i in range(500))), limit=10)
    assert len(lines) == 11
    assert lines[-1] == "and 490 more"
