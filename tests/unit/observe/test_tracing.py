"""Spans: bounded, told in the order they ended, and the same after they travelled."""

from __future__ import annotations

import pytest

from taskgraph.errors import DecodeError, TaskGraphError
from taskgraph.observe._proto import control_pb2 as pb
from taskgraph.observe.events import EventLog
from taskgraph.observe.trace import Tracing, clock
from taskgraph.observe.trace_chunks import Packer, Unpacker
from taskgraph.protocol.messages import Stamp


def on(room: int = 100) -> Tracing:
    tracing = Tracing(room)
    tracing.start()
    return tracing


async def test_spans_are_told_in_the_order_they_ended() -> None:
    tracing = on()
    outer, inner = clock(), clock()
    tracing.add("code", inner, 3, Stamp(2, 17), 4, name="add")
    tracing.add("epoch", outer, 3, Stamp(2, 17), 4)
    tracing.moment("put", 3, Stamp(2, 17), 4, name="x", peer=1, size=8)
    (code, epoch, put), lost = tracing.fetch()
    assert lost == 0 and tracing.fetch() == ([], 0)
    assert code[:4] == ("code", "add", "", inner) and code[5:] == (3, 17, 2, 4, -1)
    assert epoch[3] <= code[3] <= code[4] <= epoch[4], "they nest"
    assert put[:3] == ("put", "x", 1) and put[3] == put[4] and put[9] == 8


async def test_what_does_not_fit_is_counted_and_what_was_fetched_makes_room() -> None:
    tracing = on(room=3)
    for _ in range(5):
        tracing.moment("put")
    spans, lost = tracing.fetch()
    assert (len(spans), lost) == (3, 2)
    tracing.moment("put")
    assert [len(tracing.fetch()[0]), tracing.fetch()[1]] == [1, 0]


async def test_off_nothing_is_kept_also_of_what_began_before() -> None:
    tracing = on()
    began = clock()
    tracing.stop()
    tracing.add("pull", began)
    assert tracing.fetch() == ([], 0)
    tracing.start()
    assert tracing.fetch() == ([], 0)


async def test_events_are_moments_while_it_is_on() -> None:
    events, tracing = EventLog("n1"), Tracing()
    events.emit("commit", "before")
    tracing.start(events)
    events.emit("takeover", "task 3: n1 is primary", task=3, epoch=7, attempt=2, term=5)
    tracing.stop()
    events.emit("commit", "after")
    tracing.start(events)
    events.emit("evicted", "task 3: n2 is out", task=3)
    (evicted,), _ = tracing.fetch()
    assert evicted[:3] == ("event", "evicted", "task 3: n2 is out") and evicted[5:] == (3, -1, 0, 0, -1)


async def test_one_at_a_time() -> None:
    tracing = on()
    with pytest.raises(TaskGraphError, match="somebody else traces"):
        tracing.start()


async def test_whoever_fetches_is_woken_before_room_runs_out() -> None:
    tracing = on(room=1 << 14)
    for _ in range(1 << 13):
        tracing.moment("put")
    await tracing.filled()
    tracing.fetch()
    assert tracing._wake is not None and not tracing._wake.is_set()


async def test_chunks_give_back_what_they_were_made_of() -> None:
    tracing = on()
    tracing.add("pull", clock(), 3, Stamp(1, 0), 1, name="x", peer=1, size=800)
    tracing.add("offer", clock(), -1, None, peer="n2")
    tracing.moment("put", 3, Stamp(1, 0), 1, name="x", peer=12, size=0)
    first, _ = tracing.fetch()
    tracing.add("pull", clock(), 4, Stamp(1, 1), 1, name="y", peer=1)
    second, _ = tracing.fetch()
    packer, unpacker, found = Packer(), Unpacker(), []
    for spans in (first, second):
        chunk = pb.TraceChunk.FromString(packer.pack(spans, epoch=3).SerializeToString())
        found += list(unpacker.unpack(chunk))
    expected = [(s[0], s[1], f"task {s[2]}" if isinstance(s[2], int) else s[2], *s[3:]) for s in (*first, *second)]
    assert found == expected
    assert list(chunk.names) == ["y"], "a text travels once"


async def test_columns_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(DecodeError, match="not spans"):
        list(Unpacker().unpack(pb.TraceChunk(kind=[1], name=[0])))
    chunk = Packer().pack([("put", "", "", 1, 1, 0, 0, 0, 0, 0)], epoch=0)
    chunk.kind[0] = 9
    with pytest.raises(DecodeError, match="not spans"):
        list(Unpacker().unpack(chunk))


async def test_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskgraph.observe.trace_chunks._MAX_TEXTS", 4)
    spans = [("event", f"text {n}", "", 1, 1, 0, 0, 0, 0, 0) for n in range(10)]
    found = list(Unpacker().unpack(Packer().pack(spans, epoch=0)))
    assert [s[1] for s in found[:2]] == ["text 0", "text 1"] and {s[1] for s in found[2:]} <= {"...", "text 2", ""}
