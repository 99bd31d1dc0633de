"""A trace as Chrome's trace-event format."""

from __future__ import annotations

import io
import json
from typing import Any

from taskgraph.observe.clocks import ClockReading, NodeClock
from taskgraph.observe.trace import Span
from taskgraph.observe.trace_file import TraceFile

OURS = NodeClock([ClockReading(0, 0, 10, "here")], "here")
AHEAD = NodeClock([ClockReading(0, 1_000_000, 10, "there")], "here")


def span(kind: str, begin: int, end: int, *, name: str = "", peer: str = "", task: int = 3, epoch: int = 7) -> Span:
    return (kind, name, peer, begin, end, task, epoch, 1, 2, 8)


def written(*nodes: tuple[str, NodeClock, list[Span]], epochs: tuple[int, int] = (0, 100)) -> dict[str, Any]:
    file = io.BytesIO()
    out = TraceFile(file, epochs, base_ns=1_000)
    for name, clock, spans in nodes:
        out.node(name, "host", clock, spans)
    out.close({"job": "fit"})
    found: dict[str, Any] = json.loads(file.getvalue())
    return found


def named(found: dict[str, Any], kind: str) -> dict[tuple[int, int], str]:
    """(pid, tid) -> name of every process or track."""
    metas = [e for e in found["traceEvents"] if e["ph"] == "M" and e["name"] == kind]
    return {(e["pid"], e.get("tid", 0)): e["args"]["name"] for e in metas}


def rows(found: dict[str, Any], phase: str = "X") -> list[dict[str, Any]]:
    return [e for e in found["traceEvents"] if e["ph"] == phase]


def test_nothing_is_a_trace_too() -> None:
    assert written() == {"displayTimeUnit": "ms", "traceEvents": [], "otherData": {"job": "fit"}}


def test_a_node_is_a_process_and_a_task_is_a_track() -> None:
    spans = [
        span("code", 2_000, 3_000, name="compose"),
        span("code", 4_000, 6_500, name="add"),
        span("code", 6_700, 6_800, name="handler push"),
        span("epoch", 2_000, 7_000),
        span("pull", 3_000, 4_000, name="x", peer="task 1"),
    ]
    found = written(("n1", OURS, spans), ("n2", OURS, []))
    assert named(found, "process_name") == {(1, 0): "n1", (2, 0): "n2"}
    tracks = named(found, "thread_name")
    by_name = {(e["name"], e["cat"]): e for e in rows(found)}
    assert by_name.keys() == {
        ("compose", "hook"),
        ("add", "processor"),
        ("handler push", "handler"),
        ("epoch", "epoch"),
        ("pull x", "pull"),
    }
    compose, pull = by_name["compose", "hook"], by_name["pull x", "pull"]
    assert (compose["ts"], compose["dur"]) == (1.0, 1.0), "microseconds, from the trace's beginning"
    assert tracks[1, compose["tid"]] == "task 3" and tracks[1, pull["tid"]] == "task 3: pulls"
    assert pull["args"] == {
        "epoch": 7,
        "attempt": 1,
        "task": 3,
        "from_term": 2,
        "tag": "x",
        "from": "task 1",
        "bytes": 8,
    }


def test_what_would_overlap_goes_to_another_track_of_that_name() -> None:
    spans = [
        span("code", 2_000, 4_000, name="a"),
        span("code", 3_000, 5_000, name="b"),
        span("code", 4_500, 6_000, name="c"),
        span("pull", 2_000, 5_000, name="x"),
        span("pull", 2_000, 6_000, name="y"),  # would be drawn as if it had made the other
    ]
    found = written(("n1", OURS, spans))
    tracks = named(found, "thread_name")
    where = {e["name"]: tracks[1, e["tid"]] for e in rows(found)}
    assert where == {
        "a": "task 3",
        "b": "task 3 (2)",
        "c": "task 3",
        "pull x": "task 3: pulls",
        "pull y": "task 3: pulls (2)",
    }


def test_epochs_that_are_worked_on_at_a_time_are_on_tracks_of_their_own() -> None:
    """Spans come as they end. What is of epoch 8 is within epoch 7's time, and nothing of it."""
    spans = [
        span("code", 2_000, 2_100, name="compose", epoch=7),
        span("code", 2_200, 2_300, name="compose", epoch=8),
        span("turn", 2_300, 3_000, name="add", epoch=8),
        span("code", 2_400, 3_000, name="add", epoch=7),
        span("epoch", 2_000, 3_100, epoch=7),
        span("code", 3_200, 3_300, name="compose", epoch=9),
        span("held by backups", 3_150, 3_350, epoch=7),
        span("epoch", 2_200, 3_400, epoch=8),
        span("code", 3_500, 3_600, name="compose", epoch=10),
        span("epoch", 3_200, 3_800, epoch=9),
    ]
    found = written(("n1", OURS, spans))
    tracks = named(found, "thread_name")
    where = {(e["name"], e["args"]["epoch"]): tracks[1, e["tid"]] for e in rows(found)}
    assert where == {
        ("compose", 7): "task 3",
        ("add", 7): "task 3",
        ("epoch", 7): "task 3",
        ("compose", 8): "task 3 (2)",
        ("add waits for its turn", 8): "task 3 (2)",
        ("epoch", 8): "task 3 (2)",
        ("compose", 9): "task 3",
        ("epoch", 9): "task 3",
        ("held by backups", 7): "task 3 (3)",  # it is over, and others are under way
        ("compose", 10): "task 3 (2)",
    }


def test_an_epoch_whose_end_was_lost_keeps_its_track_for_a_while() -> None:
    spans = [span("code", 2_000, 2_100, name="lost", epoch=7)]
    for epoch in range(8, 90):
        at = 3_000 + 100 * epoch
        spans += [span("code", at, at + 10, name=str(epoch), epoch=epoch), span("epoch", at, at + 50, epoch=epoch)]
    found = written(("n1", OURS, spans))
    tracks = named(found, "thread_name")
    where = {e["name"]: tracks[1, e["tid"]] for e in rows(found) if e["cat"] == "processor"}
    assert where["8"] == where["71"] == "task 3 (2)"
    assert where["lost"] == where["73"] == where["89"] == "task 3"


def test_a_nodes_times_are_put_on_our_clock() -> None:
    found = written(("n1", AHEAD, [span("code", 1_002_000, 1_003_000, name="add")]))
    assert [(e["ts"], e["dur"]) for e in rows(found)] == [(1.0, 1.0)]


def test_an_arrow_leads_from_the_put_to_the_pull_of_the_same_item() -> None:
    puts = [span("put", 2_000, 2_000, name="x", peer=f"task {t}", task=1) for t in (3, 4)]
    pull = span("pull", 1_500, 2_500, name="x", peer="task 1", task=3)
    found = written(("n1", OURS, puts), ("n2", OURS, [pull]))
    (finish,) = rows(found, "f")
    (start,) = [e for e in rows(found, "s") if e["id"] == finish["id"]]
    assert (start["pid"], finish["pid"], finish["bp"]) == (1, 2, "e")
    assert start["ts"] < finish["ts"] < 1.5, "within the pull"
    assert {e["cat"] for e in (start, finish)} == {"item"} == {e["name"] for e in (start, finish)}
    int(start["id"], 16)


def test_other_epochs_are_left_out_and_what_belongs_to_none_is_not() -> None:
    spans = [span("code", 2_000, 3_000, name=str(epoch), epoch=epoch) for epoch in (-1, 6, 7, 8, 9)]
    found = written(("n1", OURS, spans), epochs=(7, 9))
    assert [(e["name"], e["args"].get("epoch")) for e in rows(found)] == [("-1", None), ("7", 7), ("8", 8)]


def test_events_are_moments_and_a_commit_is_the_leaders_span() -> None:
    spans: list[Span] = [
        ("event", "takeover", 'task 3: "n1" is primary', 2_000, 2_000, 3, 7, 1, 2, -1),
        ("event", "commit", "epoch 7 committed", 2_500, 2_500, -1, 7, 1, 0, -1),
        span("commit", 2_000, 2_400, task=0),
        span("restart", 2_600, 2_700, task=0, name="task 3 was replaced"),
    ]
    found = written(("n1", OURS, spans))
    (event,) = rows(found, "i")
    assert (event["name"], event["s"], event["args"]["text"]) == ("takeover", "p", 'task 3: "n1" is primary')
    tracks = named(found, "thread_name")
    assert [(e["name"], tracks[1, e["tid"]]) for e in rows(found)] == [("commit", "leader"), ("restart", "leader")]
    assert rows(found)[1]["args"]["why"] == "task 3 was replaced"


def test_tracks_are_in_order() -> None:
    spans = [span(kind, 2_000, 3_000, task=task) for task in (10, 9) for kind in ("hold", "pull", "code", "done")]
    found = written(("n1", OURS, [*spans, span("commit", 2_000, 3_000, task=0)]))
    tracks = named(found, "thread_name")
    metas = [e for e in found["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_sort_index"]
    order = [tracks[e["pid"], e["tid"]] for e in sorted(metas, key=lambda e: e["args"]["sort_index"])]
    assert order == [tracks[at] for at in sorted(tracks)], "by number, too: not every viewer looks at the index"
    parts = ("", ": pulls", ": reports", ": held for its primary")
    assert order == ["leader", *(f"task {t}{part}" for t in (9, 10) for part in parts)]


def test_more_than_the_parts_that_are_side_by_side() -> None:
    spans = [span("pull", 2_000, 3_000, name=str(n)) for n in range(501)]
    spans += [span("pull", 2_000, 3_000, task=2), span("hold", 2_000, 3_000)]
    found = written(("n1", OURS, spans))
    assert len({e["tid"] for e in rows(found)}) == 503 == len(named(found, "thread_name"))
