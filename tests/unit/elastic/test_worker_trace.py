"""The spans of a worker of an elastic job, and their tracks."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

from elastic_cluster import pause, run_body

from taskgraph.elastic_jobs.tracing import WorkerTrace
from taskgraph.observe.trace import Span, Tracing
from taskgraph.observe.trace_file import TraceFile


def spans_of(tracing: Tracing) -> list[Span]:
    return tracing.fetch()[0]


def test_spans_belong_to_the_step_at_which_they_begin() -> None:
    tracing = Tracing()
    trace = WorkerTrace(tracing)
    assert trace.begin() is None, "nobody traces"
    tracing.start()
    trace.begin_view_change(3)
    trace.begin_step(6)
    mark = trace.begin()
    trace.begin_step(7)
    trace.keep(mark, "send", "parts to n2", peer="n2", size_bytes=8)
    trace.end_view_change("n1 n2")
    step, sent, change = spans_of(tracing)
    assert (step[:2], step[6:8]) == (("step", "step 6"), (6, 3))
    assert (sent[:3], sent[5:]) == (("send", "parts to n2", "n2"), (-1, 6, 3, 0, 8))
    assert (change[1], change[6]) == ("change to view 3: n1 n2", -1)


def test_wait_is_split_where_the_awaited_workers_change() -> None:
    tracing = Tracing()
    trace = WorkerTrace(tracing)
    tracing.start()
    for what in ("parts of n2, n3", "parts of n2, n3", "parts of n3", "", ""):
        trace.begin_wait_span(what)
    assert [span[1] for span in spans_of(tracing)] == ["waits for parts of n2, n3", "waits for parts of n3"]


def test_only_chosen_steps_are_traced() -> None:
    tracing = Tracing()
    trace = WorkerTrace(tracing)
    tracing.start(every=3)
    for number in range(7):
        trace.begin_step(number)
    assert [span[6] for span in spans_of(tracing)] == [0, 3]
    assert trace.begin(of_step=False) is not None, "it belongs to no step"


def test_span_that_began_in_an_earlier_trace_is_dropped() -> None:
    tracing = Tracing()
    trace = WorkerTrace(tracing)
    tracing.start()
    mark = trace.begin()
    tracing.stop()
    tracing.start()
    trace.keep(mark, "part", "part 3")
    assert spans_of(tracing) == []


def test_each_kind_has_its_track() -> None:
    tracing, file = Tracing(), io.BytesIO()
    trace = WorkerTrace(tracing)
    tracing.start()
    trace.begin_step(4)
    outer = trace.begin()
    for kind, text in (("part", "part 3"), ("send", "parts to n2"), ("copy", "copies the state of n2")):
        trace.keep(trace.begin(of_step=kind != "copy"), kind, text)
    trace.keep(outer, "loop", "your code")
    trace.begin_step(5)
    out = TraceFile(file, (4, 5), tracing.since)
    out.node("n1", "host", 0, spans_of(tracing))
    out.close({})
    events = json.loads(file.getvalue())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = {e["name"]: (tracks[e["tid"]], e["args"]) for e in events if e["ph"] == "X"}
    in_step = {"step": 4, "view": -1}
    assert found == {
        "part 3": ("user code", in_step),
        "parts to n2": ("messages", in_step),
        "copies the state of n2": ("copies of the state", {}),
        "your code": ("user code", in_step),
        "step 4": ("user code", in_step),
    }
    assert out.last == 4, "the last step that has ended"


def count(run: Any) -> int:
    s = run.state(total=0)
    for step in run.steps(rows=6, batch=6, parts=3, passes=40):
        for part in step:
            part.add(n=len(part.rows))
            pause()
        s.total += step["n"]
    return int(s.total)


async def test_newcomer_is_traced_before_it_is_in_the_view() -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
    assert await run_body(count, (1, "+"), traced=True) == 240
    assert not errors
