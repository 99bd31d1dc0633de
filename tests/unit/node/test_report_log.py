"""What tasks reported, packed for those who have none of it: all of it, and the cost of what is new."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from taskgraph.errors import DecodeError
from taskgraph.graph.values import decode, encode, value_end
from taskgraph.node.reports import ReportLog, with_log
from taskgraph.protocol.messages import Encoded


def log_of(epochs: int) -> ReportLog:
    log = ReportLog()
    for epoch in range(epochs):
        log.add(epoch, {task: {"loss": epoch + task / 10, "steps": float(epoch)} for task in range(3)})
    return log


def unpacked(log: ReportLog) -> ReportLog:
    made = ReportLog()
    made.fold(log.packed())
    return made


@pytest.mark.parametrize("epochs", [0, 1, 63, 64, 65, 128, 300])
def test_what_was_packed_is_all_of_it(epochs: int) -> None:
    log = log_of(epochs)
    for _ in range(2):
        assert unpacked(log).all() == log.all()


def test_numbers_come_back_exactly() -> None:
    log = ReportLog()
    log.add(3, {0: {"a": 0.1 + 0.2, "tiny": 5e-324, "inf": -math.inf, "zero": -0.0, "nan": math.nan}})
    numbers = unpacked(log).of(3)[0]
    assert math.isnan(numbers.pop("nan"))
    assert repr(numbers) == repr({"a": 0.1 + 0.2, "tiny": 5e-324, "inf": -math.inf, "zero": -0.0})


def test_what_was_packed_does_not_change() -> None:
    log = log_of(70)
    packed = log.packed()
    before = list(packed)
    log.add(70, {0: {"loss": 1.0}})
    log.cut(10)
    assert packed == before


def test_what_is_old_is_not_packed_again() -> None:
    log = log_of(64 * 5 + 3)
    first = log.packed()
    log.add(64 * 5 + 3, {0: {"loss": 1.0}})
    second = log.packed()
    assert len(first) == len(second) == 6
    assert all(one is other for one, other in zip(first[:5], second[:5], strict=True))
    assert unpacked(log).all() == log.all()


def test_what_came_late_is_packed_too() -> None:
    log = log_of(200)
    log.packed()
    log.add(5, {4: {"loss": 9.0}})
    assert unpacked(log).of(5)[4] == {"loss": 9.0}
    log.add(500, {0: {"loss": 1.0}})
    assert unpacked(log).all() == log.all()


@pytest.mark.parametrize("epoch", [0, 1, 63, 64, 100, 128, 199, 200, 1000])
def test_what_was_undone_is_not_in_it(epoch: int) -> None:
    log = log_of(200)
    log.packed()
    log.cut(epoch)
    assert unpacked(log).all() == log.all() == log_of(min(epoch, 200)).all()
    log.add(epoch, {0: {"loss": -1.0}})
    assert unpacked(log).all() == log.all()


@pytest.mark.parametrize("carried", [[b"{"], [b"[]"], [b'{"x": {}}'], [b'{"1": {"2": 3}}'], 7])
def test_what_is_no_log_is_refused(carried: object) -> None:
    with pytest.raises(DecodeError, match="these are no reports"):
        ReportLog().fold(carried)  # type: ignore[arg-type]


def test_a_boundary_with_all_reports_is_otherwise_the_same() -> None:
    state = {"big": np.arange(10_000.0), "small": np.arange(3)}
    value = encode({"state": state, "numbers": {"loss": 1.0}, "log": {4: {0: {"loss": 1.0}}}})
    made = decode(with_log(value, log_of(130).packed()))
    assert np.array_equal(made["state"]["big"], state["big"])
    assert made["numbers"] == {"loss": 1.0}
    log = ReportLog()
    log.fold(made["log"])
    assert log.all() == log_of(130).all()


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
