"""A trace as Chrome's trace-event format."""

from __future__ import annotations

import io
import json
from typing import Any

from taskgraph.observe.trace import Span
from taskgraph.observe.trace_file import TraceFile


def span(
    kind: str, begin: int, end: int, *, name: str = "", peer: int | str = "", task: int = 3, epoch: int = 7
) -> Span:
    return (kind, name, peer, begin, end, task, epoch, 1, 2, 8)


class Written:
    """The trace's file, read again."""

    def __init__(self, *nodes: list[Span], ahead_ns: int = 0, epochs: tuple[int, int] = (0, 100)) -> None:
        file = io.BytesIO()
        out = TraceFile(file, epochs, zero_ns=1_000)
        for number, spans in enumerate(nodes, 1):
            out.node(f"n{number}", "host", ahead_ns, spans)
        out.close({"job": "fit"})
        self.whole = json.loads(file.getvalue())

    def of(self, phase: str, name: str = "") -> list[dict[str, Any]]:
        return [e for e in self.whole["traceEvents"] if e["ph"] == phase and name in ("", e["name"])]

    @property
    def spans(self) -> list[dict[str, Any]]:
        return self.of("X")

    @property
    def tracks(self) -> dict[int, str]:
        return {e["tid"]: e["args"]["name"] for e in self.of("M", "thread_name")}


def test_empty_trace() -> None:
    assert Written().whole == {"displayTimeUnit": "ms", "traceEvents": [], "otherData": {"job": "fit"}}


def test_node_is_process_and_task_is_track() -> None:
    spans = [
        span("code", 2_000, 3_000, name="compose"),
        span("code", 4_000, 6_500, name="add"),
        span("code", 6_700, 6_800, name="handler push"),
        span("epoch", 2_000, 7_000),
        span("pull", 3_000, 4_000, name="x", peer=1),
    ]
    found = Written(spans, [])
    assert [(e["pid"], e["args"]["name"]) for e in found.of("M", "process_name")] == [(1, "n1"), (2, "n2")]
    by_name = {(e["name"], e["cat"]): e for e in found.spans}
    assert by_name.keys() == {
        ("compose", "hook"),
        ("add", "processor"),
        ("handler push", "handler"),
        ("epoch", "epoch"),
        ("pull x", "pull"),
    }
    compose, pull = by_name["compose", "hook"], by_name["pull x", "pull"]
    assert (compose["ts"], compose["dur"]) == (1.0, 1.0), "microseconds, from the trace's beginning"
    assert found.tracks[compose["tid"]] == "task 3" and found.tracks[pull["tid"]] == "task 3: pulls"
    expected = {"epoch": 7, "attempt": 1, "task": 3, "from_term": 2, "tag": "x", "from": "task 1", "bytes": 8}
    assert pull["args"] == expected


def test_overlapping_spans_have_different_tracks() -> None:
    spans = [
        span("code", 2_000, 4_000, name="a"),
        span("code", 3_000, 5_000, name="b"),
        span("code", 4_500, 6_000, name="c"),
        span("pull", 2_000, 5_000, name="x"),
        span("pull", 2_000, 6_000, name="y"),  # nests, and is no part of the other one
    ]
    found = Written(spans)
    assert {e["name"]: found.tracks[e["tid"]] for e in found.spans} == {
        "a": "task 3",
        "b": "task 3 (2)",
        "c": "task 3",
        "pull x": "task 3: pulls",
        "pull y": "task 3: pulls (2)",
    }


def test_epochs_in_flight_have_different_tracks() -> None:
    """Spans come in the order they end; spans of epoch 8 are within epoch 7's time, and no part of it."""
    spans = [
        span("code", 2_000, 2_100, name="compose", epoch=7),
        span("code", 2_200, 2_300, name="compose", epoch=8),
        span("turn", 2_300, 3_000, name="add", epoch=8),
        span("code", 2_400, 3_000, name="add", epoch=7),
        span("epoch", 2_000, 3_100, epoch=7),
        span("code", 3_200, 3_300, name="compose", epoch=9),
        span("epoch", 2_200, 3_400, epoch=8),
        span("epoch", 3_200, 3_800, epoch=9),
        span("code", 4_000, 4_100, name="compose", epoch=10),  # its epoch has not ended
    ]
    found = Written(spans)
    assert {(e["name"], e["args"]["epoch"]): found.tracks[e["tid"]] for e in found.spans} == {
        ("compose", 7): "task 3",
        ("add", 7): "task 3",
        ("epoch", 7): "task 3",
        ("compose", 8): "task 3 (2)",
        ("add waits for its turn", 8): "task 3 (2)",
        ("epoch", 8): "task 3 (2)",
        ("compose", 9): "task 3",
        ("epoch", 9): "task 3",
        ("compose", 10): "task 3",
    }


def test_node_times_are_put_on_our_clock() -> None:
    found = Written([span("code", 1_002_000, 1_003_000, name="add")], ahead_ns=1_000_000)
    assert [(e["ts"], e["dur"]) for e in found.spans] == [(1.0, 1.0)]


def test_arrow_leads_from_put_to_pull_of_the_same_item() -> None:
    puts = [span("put", 2_000, 2_000, name="x", peer=t, task=1) for t in (3, 4)]
    found = Written(puts, [span("pull", 1_500, 2_500, name="x", peer=1, task=3)])
    (finish,) = found.of("f")
    (start,) = [e for e in found.of("s") if e["id"] == finish["id"]]
    assert (start["pid"], finish["pid"], finish["bp"]) == (1, 2, "e")
    assert start["ts"] < finish["ts"] < 1.5, "within the pull"


def test_other_epochs_are_left_out() -> None:
    spans = [span("code", 2_000, 3_000, name=str(epoch), epoch=epoch) for epoch in (-1, 6, 7, 8, 9)]
    found = Written(spans, epochs=(7, 9))
    assert [(e["name"], e["args"].get("epoch")) for e in found.spans] == [("-1", None), ("7", 7), ("8", 8)]


def test_events_are_moments_and_commits_are_on_the_leaders_track() -> None:
    spans: list[Span] = [
        ("event", "takeover", 'task 3: "n1" is primary', 2_000, 2_000, 3, 7, 1, 2, -1),
        span("commit", 2_000, 2_400, task=0),
        span("restart", 2_600, 2_700, task=0, name="task 3 was replaced"),
    ]
    found = Written(spans)
    (event,) = found.of("i")
    assert (event["name"], event["s"], event["args"]["text"]) == ("takeover", "p", 'task 3: "n1" is primary')
    assert [(e["name"], found.tracks[e["tid"]]) for e in found.spans] == [("commit", "leader"), ("restart", "leader")]
    assert found.spans[1]["args"]["why"] == "task 3 was replaced"


def test_tracks_are_in_order() -> None:
    spans = [span(kind, 2_000, 3_000, task=task) for task in (10, 9) for kind in ("hold", "pull", "epoch", "done")]
    found = Written([*spans, span("commit", 2_000, 3_000, task=0)])
    order = [e["tid"] for e in sorted(found.of("M", "thread_sort_index"), key=lambda e: e["args"]["sort_index"])]
    assert order == sorted(found.tracks), "by number, too: not every viewer looks at the index"
    parts = ("", ": pulls", ": reports", ": held for its primary")
    assert [found.tracks[tid] for tid in order] == ["leader", *(f"task {t}{part}" for t in (9, 10) for part in parts)]


def test_hundreds_of_rows_of_one_track_keep_apart() -> None:
    spans = [span("pull", 2_000, 3_000, name=str(n)) for n in range(501)]
    spans += [span("pull", 2_000, 3_000, task=2), span("hold", 2_000, 3_000)]
    found = Written(spans)
    assert len({e["tid"] for e in found.spans}) == 503 == len(found.tracks)
