"""Several clocks as one."""

from __future__ import annotations

from taskgraph.observe.clocks import ClockReading, NodeClock


def test_a_shared_clock_is_taken_as_it_is() -> None:
    readings = [ClockReading(1_000, 40, 90, "here"), ClockReading(9_000, -60, 80, "here")]
    clock = NodeClock(readings, "here")
    assert clock.shared and clock.ours(5_000) == 5_000
    assert (clock.measured_ns, clock.within_ns) == (-60, 90), "what was measured is told nevertheless"


def test_the_same_host_with_another_clock_is_found_out() -> None:
    clock = NodeClock([ClockReading(1_000, 5_000, 90, "here")], "here")  # a container with a time of its own
    assert not clock.shared and clock.ours(6_000) == 1_000


def test_between_hosts_the_offset_follows_a_drift() -> None:
    readings = [ClockReading(0, 1_000_000, 50, "there"), ClockReading(10_000_000, 1_000_400, 70, "there")]
    clock = NodeClock(readings, "here")
    assert not clock.shared and clock.within_ns == 70
    assert clock.ours(1_000_000) == 0
    assert clock.ours(1_000_000 + 5_000_000) == 5_000_000 - 200
    assert clock.ours(1_000_400 + 10_000_000) == 10_000_000


def test_an_offset_of_another_host_within_its_uncertainty_is_still_applied() -> None:
    clock = NodeClock([ClockReading(0, 40, 90, "there")], "here")
    assert not clock.shared and clock.ours(140) == 100
