"""The packed log of reports."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest

from taskgraph.errors import DecodeError
from taskgraph.graph.values import encode
from taskgraph.node import reports
from taskgraph.node.reports import ReportLog, Rows, reports_in


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


def unpack(log: ReportLog) -> ReportLog:
    made = ReportLog()
    made.fold(ReportLog.unpack(log.packed()))
    return made


def same(log: ReportLog, other: ReportLog) -> bool:
    """True if two logs are equal, and stay equal with more rows."""
    assert list(log.rows()) == list(other.rows())
    for one in (log, other):
        for epoch in range(500, 600):
            one.add(epoch, rows_of(epoch))
    return log.packed() == other.packed()


def test_numbers_are_exact() -> None:
    log = ReportLog()
    nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_DEAD_BEEF))[0]
    log.add(3, {0: {"tiny": 5e-324, "a": 0.1 + 0.2, "inf": -math.inf, "zero": -0.0}, 7: {"\n'\u2028": nan}})
    for _ in range(2):
        assert list(unpack(log).rows_of(3)[0].items()) == list(log.rows_of(3)[0].items())
        assert math.copysign(1.0, unpack(log).rows_of(3)[0]["zero"]) == -1.0
        assert struct.pack("<d", unpack(log).rows_of(3)[7]["\n'\u2028"]) == struct.pack("<d", nan)
        log.add(4, rows_of(4))


def test_names_may_change_between_epochs() -> None:
    log, expected = ReportLog(), {}
    for epoch in range(0, 400, 2):
        rows = rows_of(epoch) if epoch % 10 else {1: {f"only in {epoch}": 1.0}, 2: {"loss": 0.5}}
        log.add(epoch, rows)
        expected[epoch] = rows
    assert dict(unpack(log).rows()) == expected == dict(log.rows())
    assert [log.rows_of(epoch) for epoch in range(400)] == [expected.get(epoch, {}) for epoch in range(400)]


@pytest.mark.parametrize("epoch", [0, 1, 35, 36, 37, 38, 100, 128, 199, 200, 1000])
def test_undone_epochs_are_removed(epoch: int) -> None:
    log = log_of(200)
    log.cut(epoch)
    assert same(unpack(log), log_of(min(epoch, 200)))
    log = log_of(200)
    log.cut(epoch)
    assert same(log, log_of(min(epoch, 200)))


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
def test_damaged_log_is_refused(damage: Any) -> None:
    value = encode({"state": None, "numbers": {}, "log": damaged(100, damage)})
    with pytest.raises(DecodeError, match=r"these are no reports|this is no boundary"):
        reports_in(value)


def test_order_of_arrival_changes_no_byte() -> None:
    """Two primaries, one of them stale, may write the same file of a checkpoint."""
    one, other = ReportLog(), ReportLog()
    one.add(3, {0: {"b": 1.0, "a": 2.0}, 1: {"x": 3.0}, 2: {"y": 4.0}})
    other.add(3, {2: {"y": 4.0}})
    other.add(3, {1: {"x": 3.0}, 0: {"b": 1.0, "a": 2.0}})
    assert one.packed() == other.packed()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(ReportLog, "most_bytes", 16 << 10)
    return 16 << 10


def size(log: ReportLog) -> int:
    return sum(map(len, log.packed()))


def test_early_reports_are_thinned(few: int) -> None:
    log = log_of(200)
    assert size(log) < few and not log.is_thinned
    largest = 0
    for epoch in range(200, 9000):
        log.add(epoch, rows_of(epoch))
        if not epoch % 500:
            largest = max(largest, size(log))
    assert log.is_thinned and few / 2 < largest < few + 3 * 2048
    kept = dict(log.rows())
    assert all(rows == rows_of(epoch) for epoch, rows in kept.items())
    steps = np.diff(list(kept))
    assert next(iter(kept)) == 0 and set(steps[-20:]) == {1}, "from the first to the newest"
    assert 16 <= max(steps) <= 128 and len(kept) > 150, "and no large gap: it would take 36 for all to be as far apart"


@pytest.mark.parametrize("at", [100, 299, 300, 301, 1777, 2500])
def test_thinning_depends_on_reports_alone(few: int, at: int) -> None:
    log, checkpoint = log_of(2600), log_of(at).packed()
    joined = ReportLog()
    for behind in (joined, log):
        behind.cut(at)  # the one had gone on, and thinned what is here whole
        behind.fold(ReportLog.unpack(checkpoint))
        for epoch in range(at, 2600):
            behind.add(epoch, rows_of(epoch))
    assert log.packed() == joined.packed() == log_of(2600).packed()
