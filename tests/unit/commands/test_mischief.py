"""`taskgraph chaos` draws faults by a seed, and spares the last replica in sync."""

from __future__ import annotations

import random

import pytest

from taskgraph.commands.mischief import KINDS, draw, kinds_of, pause_s, survivable
from taskgraph.errors import JobError
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import KeyEvent, KeyValue
from taskgraph.protocol.records import EpochRecord, MemberRecord, NodeRecord, PrimaryRecord, Record, WorkersRecord
from taskgraph.protocol.view import JobView

KEYS = Keys("job")


def job(*tasks: str, nodes: str = "abc", draining: str = "", evicted: str = "") -> JobView:
    """A view in which the nodes with the letters of `tasks[i]` hold task i, the primary first."""
    records: list[tuple[str, Record]] = [(KEYS.epoch, EpochRecord(epoch=5, attempt=1))]
    for node in nodes:
        record = NodeRecord(
            name=node, run="r", host="h", pid=1, endpoints=(), control="", fingerprint="", lease=1,
            draining=node in draining,
        )  # fmt: skip
        records.append((KEYS.node(node), record))
    for task, held in enumerate(tasks):
        records.append((KEYS.primary(task), PrimaryRecord(node=held[0], term=1, stateful=True)))
        for node in held:
            until = 5 if node in evicted else None
            records.append((KEYS.member(task, node), MemberRecord(until=until, attempt=1)))
    view = JobView("job")
    found = [
        KeyValue(key=key, value=record.to_bytes(), create_revision=i, mod_revision=i)
        for i, (key, record) in enumerate(records, start=1)
    ]
    view.reset(len(found), found)
    return view


def targets(view: JobView, *, unwell: str = "", lossy: bool = False, here: str = "abc") -> set[str]:
    """Returns every node that some seed hits."""
    rng = random.Random(1)
    drawn = [draw(rng, view, here=here, unwell=unwell, lossy=lossy) for _ in range(100)]
    return {fault.node for fault in drawn if fault is not None}


def test_last_replica_is_spared() -> None:
    assert targets(job("ab", "bc", "ca")) == {"a", "b", "c"}
    assert targets(job("ab", "bc", "c")) == {"a", "b"}, "c holds task 2 alone"
    assert targets(job("a", "b", "c")) == set()
    assert targets(job("a", "b", "c"), lossy=True) == {"a", "b", "c"}


def test_unreliable_nodes_do_not_count() -> None:
    pair = ("ab", "ab")
    assert survivable(job(*pair), "a", "")
    assert not survivable(job(*pair), "a", "b")
    assert not survivable(job(*pair, draining="b"), "a", "")
    assert not survivable(job(*pair, evicted="b"), "a", "")
    assert not survivable(job(*pair, nodes="ac"), "a", "")
    assert targets(job(*pair), unwell="b") == {"c"}, "c holds nothing: it can always be spared"


def test_last_healthy_worker_is_spared() -> None:
    def elastic(workers: str, **more: str) -> JobView:
        view = job(**more)
        record = WorkersRecord(number=0, lineage=0, workers=tuple((worker, 0) for worker in workers))
        view.apply(9, [KeyEvent("put", KeyValue(KEYS.workers, record.to_bytes(), 9, 9))])
        return view

    assert targets(elastic("abc")) == {"a", "b", "c"}
    assert targets(elastic("ab"), unwell="b") == {"c"}, "c is not in the view yet"
    assert targets(elastic("ab", draining="b")) == {"c"}
    assert targets(elastic("a"), lossy=True) == {"a", "b", "c"}


def test_only_healthy_local_nodes_are_hit() -> None:
    view = job("ab", "bc", "ca", draining="")
    assert targets(view, here="b") == {"b"}
    assert "a" not in targets(view, unwell="a")
    assert "b" not in targets(job("abc", "abc", draining="b"))
    assert targets(JobView("job")) == set(), "nothing began yet"


def test_seed_repeats_choice() -> None:
    view = job("ab", "bc", "ca")
    first = [draw(random.Random(seed), view, here="cba", unwell=()) for seed in range(60)]
    again = [draw(random.Random(seed), view, here="abc", unwell=()) for seed in range(60)]
    assert first == again
    assert {fault.kind for fault in first if fault} == set(KINDS)
    stops = [fault.lasts_s for fault in first if fault and fault.kind == "stop"]
    assert min(stops) < 5.0 < max(stops), "some wake up within their TTL"
    only = [draw(random.Random(seed), view, here="abc", unwell=(), kinds=("term",)) for seed in range(9)]
    assert {fault.kind for fault in only if fault} == {"term"}


def test_mean_pause_is_mtbf() -> None:
    rng = random.Random(3)
    pauses = [pause_s(rng, 15.0) for _ in range(4000)]
    assert 13.5 < sum(pauses) / len(pauses) < 16.5 and max(pauses) <= 75.0


def test_wrong_kind_is_error() -> None:
    assert kinds_of("kill, stop,kill") == ("kill", "stop")
    for wrong in ("", "kill,shoot", ","):
        with pytest.raises(JobError, match="kill,stop,term"):
            kinds_of(wrong)
