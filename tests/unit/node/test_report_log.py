"""What tasks reported, packed for those who have none of it: all of it, and the cost of what is new."""

from __future__ import annotations

import math
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_kit import IN_STEP, Counting, play

import taskgraph as tg
from taskgraph.errors import DecodeError
from taskgraph.graph.values import decode, encode, value_end
from taskgraph.launch.collect import assemble
from taskgraph.launch.inprocess import InProcessCluster
from taskgraph.node import replica as replica_module
from taskgraph.node import reports
from taskgraph.node.reports import ReportLog, Rows, carried, with_log
from taskgraph.observe.status import ReportRow, TaskResult
from taskgraph.protocol.messages import Encoded


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_BLOCK_BYTES", 2048)


def rows_of(epoch: int) -> Rows:
    return {task: {"loss": epoch + task / 10, "steps": float(epoch)} for task in range(3)}


def log_of(epochs: int) -> ReportLog:
    log = ReportLog()
    for epoch in range(epochs):
        log.add(epoch, rows_of(epoch))
    return log


def unpacked(log: ReportLog) -> ReportLog:
    made = ReportLog()
    made.fold(ReportLog.unpacked(log.packed()))
    return made


def same(log: ReportLog, other: ReportLog) -> bool:
    """Whether they are the same, and go on as the same."""
    assert list(log.rows()) == list(other.rows())
    for one in (log, other):
        for epoch in range(500, 600):
            one.add(epoch, rows_of(epoch))
    return log.packed() == other.packed()


@pytest.mark.parametrize("epochs", [0, 1, 2, 35, 36, 37, 38, 300])
def test_what_was_packed_is_all_of_it(epochs: int) -> None:
    log = log_of(epochs)
    assert dict(log.rows()) == {epoch: rows_of(epoch) for epoch in range(epochs)}
    assert unpacked(log).packed() == log.packed() and bool(log) == (epochs > 0)
    assert [log.of(epoch) for epoch in range(epochs)] == [rows_of(epoch) for epoch in range(epochs)]
    assert log.of(epochs) == {} and same(unpacked(log), log)


def test_numbers_come_back_exactly() -> None:
    log = ReportLog()
    nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_DEAD_BEEF))[0]
    log.add(3, {0: {"tiny": 5e-324, "a": 0.1 + 0.2, "inf": -math.inf, "zero": -0.0}, 7: {"\n'\u2028": nan}})
    for _ in range(2):
        assert list(unpacked(log).of(3)[0].items()) == list(log.of(3)[0].items())
        assert math.copysign(1.0, unpacked(log).of(3)[0]["zero"]) == -1.0
        assert struct.pack("<d", unpacked(log).of(3)[7]["\n'\u2028"]) == struct.pack("<d", nan)
        log.add(4, rows_of(4))


def test_names_may_change_from_epoch_to_epoch() -> None:
    log, expected = ReportLog(), {}
    for epoch in range(0, 400, 2):
        rows = rows_of(epoch) if epoch % 10 else {1: {f"only in {epoch}": 1.0}, 2: {"loss": 0.5}}
        log.add(epoch, rows)
        expected[epoch] = rows
    assert dict(unpacked(log).rows()) == expected == dict(log.rows())
    assert [log.of(epoch) for epoch in range(400)] == [expected.get(epoch, {}) for epoch in range(400)]


def test_what_was_packed_does_not_change() -> None:
    log = log_of(70)
    packed = log.packed()
    before = list(packed)
    log.add(70, {0: {"loss": 1.0}})
    log.cut(10)
    assert packed == before


def test_what_is_full_is_not_packed_again() -> None:
    log = log_of(200)
    first = log.packed()
    log.add(200, {0: {"loss": 1.0}})
    second = log.packed()
    assert len(first) == len(second) == 7
    assert all(one is other for one, other in zip(first[:5], second[:5], strict=True))
    folded = ReportLog()
    folded.fold(ReportLog.unpacked(first))
    assert all(one is other for one, other in zip(first[:5], folded.packed()[:5], strict=True)), "as they came"


def test_an_epoch_costs_what_is_reported_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them were gone through where a node joined, in the leader and in the node: both stood still."""
    seen: list[int] = []
    read, packed = reports._Block.of, reports._Block.packed

    def spied(block: reports._Block, level: int) -> bytes:
        seen.append(sum(len(epochs) for epochs, _ in block.groups.values()))
        return packed(block, level)

    monkeypatch.setattr(reports._Block, "packed", spied)
    monkeypatch.setattr(reports._Block, "of", lambda data: pytest.fail("none is read again"))
    log = log_of(3000)
    log.packed()
    assert sum(seen) == 3000 and max(seen) <= 40
    monkeypatch.setattr(reports._Block, "of", read)
    blocks = log.packed()
    assert sum(map(len, blocks)) < 3000 * (7 * 8) * 1.1, "the numbers, and little more"


@pytest.mark.parametrize("rows", [rows_of(5), {0: {"loss": 9.0}}, {4: {"loss": 9.0}}])
def test_of_an_epoch_that_is_over_nothing_comes_any_more(rows: Rows) -> None:
    log, other = log_of(200), log_of(200)
    log.add(5, rows)
    assert same(log, other)


@pytest.mark.parametrize("epoch", [0, 1, 35, 36, 37, 38, 100, 128, 199, 200, 1000])
def test_what_was_undone_is_not_in_it(epoch: int) -> None:
    log = log_of(200)
    log.cut(epoch)
    assert same(unpacked(log), log_of(min(epoch, 200)))
    log = log_of(200)
    log.cut(epoch)
    assert same(log, log_of(min(epoch, 200)))


def test_all_that_was_carried_counts_where_it_reaches_as_far() -> None:
    """A node may have read what the primary has not: that must not be lost. Else the primary's is right."""
    log = log_of(100)
    log.fold(ReportLog.unpacked(log_of(99).packed()))
    assert same(log, log_of(100))
    log, other = log_of(100), log_of(100)
    other.add(99, {7: {"more": 1.0}})
    log.fold(ReportLog.unpacked(other.packed()))
    assert same(log, other)
    log = ReportLog()
    log.fold({4: {0: {"loss": 1.0}}, 5: {}})
    assert dict(log.rows()) == {4: {0: {"loss": 1.0}}}


def damaged(epochs: int, damage: Any) -> list[bytes]:
    blocks = log_of(epochs).packed()
    return damage(blocks)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "damage",
    [
        lambda blocks: blocks[:-1],
        lambda blocks: blocks[1:] + blocks[:1],
        lambda blocks: [blocks[0][:-1], *blocks[1:]],
        lambda blocks: [blocks[0] + b"x", *blocks[1:]],
        lambda blocks: [blocks[0].replace(b"loss", b'l"ss'), *blocks[1:]],
        lambda blocks: [blocks[0].replace(b'"loss"', b"123456"), *blocks[1:]],
        lambda blocks: [blocks[0][:8] + b"[[-1]]" + blocks[0][14:], *blocks[1:]],
        lambda blocks: [b"", *blocks],
        lambda blocks: [None, *blocks],
        lambda blocks: 7,
        lambda blocks: [b'{"3":{"0":{"loss":1.0}}}'],
    ],
)
def test_what_is_no_log_is_refused(damage: Any) -> None:
    value = encode({"state": None, "numbers": {}, "log": damaged(100, damage)})
    with pytest.raises(DecodeError, match=r"these are no reports|this is no boundary"):
        carried(value)


def test_a_boundary_with_all_reports_is_otherwise_the_same() -> None:
    state = {"big": np.arange(10_000.0), "small": np.arange(3)}
    value = encode({"state": state, "numbers": {"loss": 1.0}, "log": {4: {0: {"loss": 1.0}}}})
    whole = with_log(value, log_of(130).packed())
    made = decode(whole)
    assert np.array_equal(made["state"]["big"], state["big"])
    assert made["numbers"] == {"loss": 1.0}
    log = ReportLog()
    log.fold(carried(whole))
    assert same(log, log_of(130))
    assert carried(value) == {4: {0: {"loss": 1.0}}}


def test_arrays_that_lived_on_a_device_still_do() -> None:
    value = encode({"state": [np.arange(3), np.arange(10_000.0)], "numbers": {}, "log": {}})
    on_device = struct.pack("<3I", 0, 1, 2)
    value = Encoded(value.meta[: value_end(value.meta)] + on_device, value.buffers, value.digest)
    made = with_log(value, log_of(5).packed())
    assert made.meta[value_end(made.meta) :] == on_device


def test_the_same_rows_are_the_same_bytes_in_whatever_order_they_came() -> None:
    """A zombie wrote its file of a checkpoint over its successor's: other bytes, so the checkpoint was refused."""
    one, other = ReportLog(), ReportLog()
    one.add(3, {0: {"b": 1.0, "a": 2.0}, 1: {"x": 3.0}, 2: {"y": 4.0}})
    other.add(3, {2: {"y": 4.0}})
    other.add(3, {1: {"x": 3.0}, 0: {"b": 1.0, "a": 2.0}})
    assert one.packed() == other.packed()


class Telling(Counting, state=["total"]):
    async def count(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        await super().count(epoch, ins, outs)
        epoch.report(**{f"{self.task_id}-{at}": self.total / 7 + at for at in range(200)})


def test_no_event_loop_looks_at_all_reports_when_a_node_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader's stood still, and its lease ended; or the joiner's: it was evicted, and invited again, for ever."""
    seen: list[tuple[str, bool]] = []

    def spied(what: str, real: Any) -> Any:
        def call(*args: Any) -> Any:
            if not isinstance(args[-1], dict):  # an epoch's
                seen.append((what, threading.current_thread() is threading.main_thread()))
            return real(*args)

        return call

    async def lose_the_backup(cluster: InProcessCluster, node: str) -> None:
        (backup,) = [other.id for other in cluster.nodes if other.id != node and 0 in other.roles.replicas]
        cluster.crash(backup)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        return await cluster.result()

    monkeypatch.setattr(replica_module, "with_log", spied("offered", reports.with_log))
    monkeypatch.setattr(ReportLog, "unpacked", spied("read", ReportLog.unpacked))
    job = tg.Job(tasks=2, epochs=40, builder=lambda _: Telling(), backups=1, settings=IN_STEP)
    result = play(job, scenario, nodes=3, stages={("compose", 0, 20): lose_the_backup})
    assert ("offered", False) in seen and ("read", False) in seen
    assert [what for what, on_loop in seen if on_loop] == ["read"], "by whoever asked for the result"
    assert [report.epoch for report in result.reports] == list(range(40))
    expected = {task: {f"{task}-{at}": 40 / 7 + at for at in range(200)} for task in range(2)}
    assert result.reports[-1].by_task == expected


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(ReportLog, "most_bytes", 16 << 10)
    return 16 << 10


def size(log: ReportLog) -> int:
    return sum(map(len, log.packed()))


def test_of_too_many_the_early_ones_are_thinned(few: int) -> None:
    log = log_of(200)
    assert size(log) < few and not log.thinned
    largest = 0
    for epoch in range(200, 9000):
        log.add(epoch, rows_of(epoch))
        if not epoch % 500:
            largest = max(largest, size(log))
    assert log.thinned and few / 2 < largest < few + 3 * 2048
    kept = dict(log.rows())
    assert all(rows == rows_of(epoch) for epoch, rows in kept.items())
    steps = np.diff(list(kept))
    assert next(iter(kept)) == 0 and set(steps[-20:]) == {1}, "from the first to the newest"
    assert 16 <= max(steps) <= 128 and len(kept) > 150, "and no large gap: it would take 36 for all to be as far apart"


def test_an_epoch_costs_no_more_where_they_are_thinned(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    log, read, seen = log_of(3000), reports._Block.of, []
    monkeypatch.setattr(reports._Block, "of", lambda data: seen.append(len(data)) or read(data))
    for epoch in range(3000, 6000):
        log.add(epoch, rows_of(epoch))
    assert sum(seen) < 3 * (3000 * 7 * 8), "two blocks for each that is full"


@pytest.mark.parametrize("at", [100, 299, 300, 301, 1777, 2500])
def test_what_is_left_follows_from_what_was_reported(few: int, at: int) -> None:
    """Whoever joined, or went back to a checkpoint, has what everybody has."""
    log, checkpoint = log_of(2600), log_of(at).packed()
    joined = ReportLog()
    for behind in (joined, log):
        behind.cut(at)  # the one had gone on, and thinned what is here whole
        behind.fold(ReportLog.unpacked(checkpoint))
        for epoch in range(at, 2600):
            behind.add(epoch, rows_of(epoch))
    assert log.packed() == joined.packed() == log_of(2600).packed()


def test_what_is_reported_now_and_then_is_not_always_left_out(few: int) -> None:
    log = ReportLog()
    for epoch in range(9000):
        log.add(epoch, rows_of(epoch) | ({7: {"accuracy": epoch / 3}} if epoch % 100 == 99 else {}))
    accuracies = [epoch for epoch, rows in log.rows() if 7 in rows]
    assert len(accuracies) > 5, "of 90, as few as of all others"
    for one in (ReportLog(), ReportLog()):
        for epoch in range(3000):
            one.add(epoch, {epoch % 3: {f"of {epoch}": 0.5}})
        assert size(one) < few + 3 * 2048, "nor do names that never come again fill the memory"


def test_what_takes_more_than_all_may_is_the_newest_alone(few: int) -> None:
    log = ReportLog()
    for epoch in range(20):
        log.add(epoch, {0: {f"{at}": 0.5 for at in range(2000)}})
    assert len(list(log.rows())) <= 3 and log.of(19)


@pytest.mark.parametrize("backups", [1, 0], ids=["a successor", "a checkpoint"])
def test_that_they_are_thinned_is_said_once_and_failures_change_nothing(few: int, backups: int, tmp_path: Path) -> None:
    async def kill(cluster: InProcessCluster, node: str) -> None:
        cluster.crash(node)

    async def scenario(cluster: InProcessCluster) -> tg.JobResult:
        result = await cluster.result()
        texts.append([event.text for event in cluster.events if event.kind == "reports thinned"])
        return result

    def job(checkpoint: Path) -> tg.Job:
        return tg.Job(
            tasks=2,
            epochs=60,
            builder=lambda _: Telling(),
            backups=backups,
            checkpoint=None if backups else f"file://{checkpoint}",
            settings=tg.Settings(admit_wait_s=0.5),
        )

    texts: list[list[str]] = []
    whole = play(job(tmp_path / "whole"), scenario, nodes=3)
    harmed = play(job(tmp_path / "harmed"), scenario, nodes=3, stages={("compose", 0, 41): kill})
    assert [len(of_a_run) for of_a_run in texts] == [1, 1]
    assert texts[0][0].startswith("what the tasks reported takes more than ")
    assert (harmed.failovers if backups else harmed.restarts) > 0 and harmed.reports == whole.reports
    epochs = [report.epoch for report in whole.reports]
    assert len(epochs) < 60 and epochs[0] == 0 and epochs[-2:] == [58, 59]


@pytest.mark.parametrize("epochs", [3, 300, *range(1000, 1037)])
def test_whether_the_leader_knew_of_the_last_epoch_changes_nothing(few: int, epochs: int) -> None:
    """Results may be collected before it hears that its last commit happened."""

    def result(log: ReportLog) -> tuple[tg.EpochReport, ...]:
        rows = {task: (ReportRow(epochs - 1, task, numbers),) for task, numbers in rows_of(epochs - 1).items()}
        found = [
            TaskResult(task, epochs, 1, None, rows[task], tuple(log.packed()) if not task else ()) for task in rows
        ]
        return assemble("fit", found[::-1], (), 0.0).reports

    whole = result(log_of(epochs))
    assert result(log_of(epochs - 1)) == whole
    assert [report.epoch for report in whole] == [epoch for epoch, _ in log_of(epochs).rows()]
    assert whole[-1].by_task == rows_of(epochs - 1) and whole[-1].numbers == rows_of(epochs - 1)[0]
