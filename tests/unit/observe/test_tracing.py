"""The buffer of a node's spans: bounded, in the order they ended, and empty while nobody traces."""

from __future__ import annotations

import pytest

from taskgraph.errors import TaskGraphError
from taskgraph.observe.events import EventLog
from taskgraph.observe.trace import NO_STAMP, Tracing, clock
from taskgraph.protocol.messages import Stamp


def started(room: int = 100, every: int = 1) -> Tracing:
    tracing = Tracing(room)
    tracing.start(every=every)
    return tracing


def test_fetch_gives_spans_in_the_order_they_ended() -> None:
    tracing = started()
    outer, inner = clock(), clock()
    tracing.keep("code", "add", "", inner, clock(), 3, Stamp(2, 17), 4, -1)
    tracing.add("epoch", outer, 3, Stamp(2, 17), 4)
    now = clock()
    tracing.keep("put", "x", 1, now, now, 3, Stamp(2, 17), 4, 8)
    (code, epoch, put), lost = tracing.fetch()
    assert code[:4] == ("code", "add", "", inner) and code[5:] == (3, 17, 2, 4, -1)
    assert epoch[3] <= code[3] <= code[4] <= epoch[4], "they nest"
    assert put == ("put", "x", 1, now, now, 3, 17, 2, 4, 8)
    assert lost == 0 and tracing.fetch() == ([], 0)


def test_spans_without_room_are_counted() -> None:
    tracing = started(room=3)
    for size in range(5):
        tracing.keep("put", "", "", 1, 1, -1, NO_STAMP, 0, size)
    spans, lost = tracing.fetch()
    assert [span[9] for span in spans] == [0, 1, 2] and lost == 2
    tracing.keep("put", "", "", 1, 1, -1, NO_STAMP, 0, 5)
    spans, lost = tracing.fetch()
    assert [span[9] for span in spans] == [5] and lost == 0


def test_stopped_trace_keeps_nothing() -> None:
    tracing = started()
    began = clock()
    tracing.add("pull", began, 3, None)
    tracing.stop()
    tracing.add("pull", began, 3, None)
    assert tracing.fetch() == ([], 0)
    tracing.start()
    tracing.add("takeover", began, 3, None)
    assert [span[0] for span in tracing.fetch()[0]] == ["takeover"]


def test_events_are_moments_while_it_is_on() -> None:
    events, tracing = EventLog("n1"), Tracing()
    events.emit("lost", "before")
    tracing.start(events)
    events.emit("takeover", "task 3: n1 is primary", task=3, epoch=7, attempt=2, term=5)
    tracing.stop()
    events.emit("lost", "after")
    tracing.start(events)
    events.emit("evicted", "task 3: n2 is out", task=3)
    events.emit("commit", "epoch 7 committed", epoch=7)  # the leader has a span for it
    ((evicted,), _) = tracing.fetch()
    assert evicted[:3] == ("event", "evicted", "task 3: n2 is out") and evicted[5:] == (3, -1, 0, 0, -1)


def test_second_trace_is_refused() -> None:
    with pytest.raises(TaskGraphError, match="somebody else traces"):
        started().start()


def test_epochs_left_out_begin_no_span() -> None:
    tracing = started(every=3)
    assert [epoch for epoch in range(-1, 10) if tracing.is_traced(epoch)] == [-1, 0, 3, 6, 9]
    assert [bool(tracing.begin(Stamp(1, epoch))) for epoch in range(4)] == [True, False, False, True]
    assert tracing.begin(None), "it belongs to no epoch"
    assert tracing.begin(Stamp(1, 7), boundary=True) and not tracing.begin(Stamp(1, 6), boundary=True)
