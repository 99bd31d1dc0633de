"""Spans: bounded, told in the order they ended, the same after they travelled, and nothing to the garbage collector."""

from __future__ import annotations

import asyncio
import gc

import pytest

from taskgraph.errors import DecodeError, TaskGraphError
from taskgraph.observe._proto import control_pb2 as pb
from taskgraph.observe.events import EventLog
from taskgraph.observe.trace import NO_STAMP, SPAN, Span, Tracing, clock
from taskgraph.observe.trace_chunks import Unpacker, chunks
from taskgraph.protocol.messages import Stamp


def on(room: int = 100) -> Tracing:
    tracing = Tracing(room)
    tracing.start()
    return tracing


def put(tracing: Tracing, *, name: str = "", size: int = -1) -> None:
    now = clock()
    tracing.keep("put", name, "", now, now, -1, NO_STAMP, 0, size)


class Told:
    """What one trace tells, as its reader sees it."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._unpacker = Unpacker()
        self.texts: list[str] = []
        """That travelled the last time."""
        self.lost = self.chunks = 0

    def spans(self) -> list[Span]:
        """Since it was asked last."""
        self.texts, self.lost, self.chunks = [], 0, 0
        found: list[Span] = []
        for sent in chunks(self._tracing):
            chunk = pb.TraceChunk.FromString(sent.SerializeToString())
            found += self._unpacker.unpack(chunk)
            self.texts += chunk.names
            self.lost += chunk.lost
            self.chunks += 1
        return found


async def test_spans_are_told_in_the_order_they_ended() -> None:
    tracing = on()
    told = Told(tracing)
    outer, inner = clock(), clock()
    tracing.keep("code", "add", "", inner, clock(), 3, Stamp(2, 17), 4, -1)
    tracing.add("epoch", outer, 3, Stamp(2, 17), 4)
    now = clock()
    tracing.keep("put", "x", 1, now, now, 3, Stamp(2, 17), 4, 8)
    code, epoch, put = told.spans()
    assert told.lost == 0 and told.spans() == []
    assert code[:4] == ("code", "add", "", inner) and code[5:] == (3, 17, 2, 4, -1)
    assert epoch[3] <= code[3] <= code[4] <= epoch[4], "they nest"
    assert put == ("put", "x", "task 1", now, now, 3, 17, 2, 4, 8)


async def test_what_does_not_fit_is_counted_and_what_was_fetched_makes_room() -> None:
    tracing = on(room=3)
    told = Told(tracing)
    for size in range(5):
        put(tracing, size=size)
    assert [s[9] for s in told.spans()] == [0, 1, 2] and told.lost == 2
    put(tracing, size=5)
    assert [s[9] for s in told.spans()] == [5] and told.lost == 0


async def test_what_nobody_fetches_is_bounded_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskgraph.observe.trace._LOOK_S", 0.01)
    tracing = on(room=3)
    told = Told(tracing)
    for _ in range(4):
        for size in range(5):
            put(tracing, size=size)
        async with asyncio.timeout(30):
            while tracing._spans.tell() > 3 * SPAN.size:  # noqa: ASYNC110 (no event tells)
                await asyncio.sleep(0.01)
    assert [s[9] for s in told.spans()] == [0, 1, 2] and told.lost == 17


async def test_off_nothing_is_kept_also_of_what_began_before() -> None:
    tracing = on()
    began = clock()
    tracing.add("pull", began, 3, None)
    tracing.stop()
    tracing.add("pull", began, 3, None)
    assert tracing.fetch() == (b"", [], 0)
    tracing.start()
    assert tracing.fetch() == (b"", [], 0)
    tracing.add("takeover", began, 3, None)
    assert [s[0] for s in Told(tracing).spans()] == ["takeover"]


async def test_off_nothing_of_it_runs() -> None:
    tracing = on()
    look = tracing._look_again
    tracing.stop()
    assert look is not None and look.cancelled()


async def test_events_are_moments_while_it_is_on() -> None:
    events, tracing = EventLog("n1"), Tracing()
    events.emit("lost", "before")
    tracing.start(events)
    events.emit("takeover", "task 3: n1 is primary", task=3, epoch=7, attempt=2, term=5)
    tracing.stop()
    events.emit("lost", "after")
    tracing.start(events)
    events.emit("evicted", "task 3: n2 is out", task=3)
    events.emit("commit", "epoch 7 committed", epoch=7)  # the leader's span tells it; of these there are many
    told = Told(tracing)
    (evicted,) = told.spans()
    assert evicted[:3] == ("event", "evicted", "task 3: n2 is out") and evicted[5:] == (3, -1, 0, 0, -1)
    assert sorted(told.texts) == ["event", "evicted", "task 3: n2 is out"]


async def test_one_at_a_time() -> None:
    tracing = on()
    with pytest.raises(TaskGraphError, match="somebody else traces"):
        tracing.start()


async def test_whoever_fetches_is_woken_before_room_runs_out() -> None:
    tracing = on(room=1 << 14)
    for _ in range(1 << 13):
        put(tracing)
    async with asyncio.timeout(30):
        await tracing.filled()
    tracing.fetch()
    assert tracing._wake is not None and not tracing._wake.is_set()


async def test_many_spans_are_a_few_messages() -> None:
    tracing = on(room=1 << 14)
    told = Told(tracing)
    for size in range(10_000):
        put(tracing, size=size)
    assert [s[9] for s in told.spans()] == [*range(10_000)] and told.chunks == 2


async def test_of_epochs_that_are_left_out_nothing_begins() -> None:
    tracing = Tracing()
    tracing.start(every=3)
    assert [epoch for epoch in range(10) if tracing.takes(epoch)] == [0, 3, 6, 9]
    before = clock()
    began = [tracing.began(Stamp(1, epoch)) for epoch in range(4)]
    assert began[1:3] == [0, 0] and before <= began[0] <= began[3] <= clock()
    assert tracing.began(None) >= began[3], "what belongs to none is told"
    assert tracing.takes(-1), "as in a report of none"
    assert tracing.began(Stamp(1, 7), boundary=True) and not tracing.began(Stamp(1, 6), boundary=True)
    tracing.stop()
    tracing.start()
    assert all(tracing.began(Stamp(1, epoch)) for epoch in range(10)), "the next trace has its own"


async def test_a_text_travels_once() -> None:
    tracing = on()
    told = Told(tracing)
    tracing.keep("pull", "x", 1, clock(), clock(), 3, Stamp(1, 0), 1, 800)
    tracing.keep("offer", "", "n2", clock(), clock(), -1, NO_STAMP, 0, -1)
    tracing.keep("put", "x", 12, clock(), clock(), 3, Stamp(1, 0), 1, 0)
    first = told.spans()
    assert [s[:3] for s in first] == [("pull", "x", "task 1"), ("offer", "", "n2"), ("put", "x", "task 12")]
    assert first[1][5:9] == (-1, -1, 0, 0)
    assert sorted(told.texts) == ["n2", "offer", "pull", "put", "task 1", "task 12", "x"]
    tracing.keep("pull", "y", 1, clock(), clock(), 4, Stamp(1, 1), 1, -1)
    assert [s[:3] for s in told.spans()] == [("pull", "y", "task 1")]
    assert told.texts == ["y"]


async def test_numbers_of_any_size_travel() -> None:
    tracing = on()
    most = (1 << 63) - 1
    tracing.keep("pull", "", "", 1, 2, most, Stamp(most - 1, most - 2), most - 3, most - 4)
    assert (Told(tracing).spans())[0][3:] == (1, 2, most, most - 2, most - 1, most - 3, most - 4)


async def test_spans_are_nothing_to_the_garbage_collector() -> None:
    tracing, stamp = on(room=2_000), Stamp(1, 0)
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        for _ in range(1_000):
            tracing.keep("pull", "x", 1, clock(), clock(), 3, stamp, 1, -1)
        assert gc.get_count()[0] - before < 10
    finally:
        gc.enable()
    assert len(Told(tracing).spans()) == 1_000


def one(kind: int, name: int, peer: int) -> bytes:
    return SPAN.pack(kind, name, peer, 1, 1, 0, 0, 0, 0, 0)


def chunk(spans: bytes) -> pb.TraceChunk:
    return pb.TraceChunk(names=["put"], spans=spans)


def test_what_a_node_tells_is_taken() -> None:
    assert list(Unpacker().unpack(chunk(one(2, 1, 0)))) == [("put", "...", "", 1, 1, 0, 0, 0, 0, 0)]
    assert list(Unpacker().unpack(chunk(b""))) == list(Unpacker().unpack(pb.TraceChunk())) == []


@pytest.mark.parametrize(
    "spans",
    [
        b"\0",
        one(2, 0, 0)[:-1],
        one(2, 0, 0) + b"\0",
        one(2, 0, 0) + one(3, 0, 0),
        one(3, 0, 0),
        one(2, 65535, 0),
        one(2, 0, 4),
    ],
)
def test_what_no_node_tells_is_refused(spans: bytes) -> None:
    with pytest.raises(DecodeError, match="not spans"):
        list(Unpacker().unpack(chunk(spans)))


async def test_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskgraph.observe.trace.MAX_TEXTS", 5)
    monkeypatch.setattr("taskgraph.observe.trace_chunks.MAX_TEXTS", 5)
    tracing = on()
    told = Told(tracing)
    for number in range(10):
        put(tracing, name=f"text {number}")
    found = told.spans()
    assert [s[1] for s in found] == ["text 0", "text 1", *["..."] * 8] and {s[0] for s in found} == {"put"}
    assert told.texts == ["put", "text 0", "text 1"]
    unpacker = Unpacker()
    list(unpacker.unpack(pb.TraceChunk(names=["a", "b"])))
    with pytest.raises(DecodeError, match="not spans of a node: more than 5 texts"):
        list(unpacker.unpack(pb.TraceChunk(names=["c", "d"])))
