"""When a lease has ended, as whoever asks etcd finds out."""

from __future__ import annotations

import math
import random

import pytest

from taskgraph.protocol.lease_end import LeaseEnd


class Etcd:
    """A lease that is renewed at some times, and what etcd says of it."""

    def __init__(self, ttl_s: float, renewals: list[float]) -> None:
        self.ttl_s = ttl_s
        self._renewals = renewals

    def ends_at(self, now: float) -> float:
        return max(at for at in self._renewals if at <= now) + self.ttl_s

    def left_s(self, now: float) -> int:
        return max(0, math.floor(self.ends_at(now) - now))


@pytest.mark.parametrize("ttl_s", [2.0, 3.0, 5.0, 10.0])
@pytest.mark.parametrize("phase_s", [0.0, 0.3, 0.7, 0.999])
def test_lease_end_is_found_soon(ttl_s: float, phase_s: float) -> None:
    etcd, end, now = Etcd(ttl_s, [10.0 + phase_s, 11.0 + phase_s]), LeaseEnd(ttl_s), 12.0
    while not end.ended:
        sent_at, now = now, now + 0.002
        left_s = etcd.left_s(now)
        now += 0.002
        pause_s = end.on_answer(left_s, sent_at=sent_at, received_at=now)
        if not end.ended:
            now += pause_s
    assert etcd.ends_at(now) < now < etcd.ends_at(now) + 0.12


@pytest.mark.parametrize("ttl_s", [2.0, 5.0])
def test_renewed_lease_never_counts_as_ended(ttl_s: float) -> None:
    """Slow answers, a stopped asking node, late renewals."""
    found = 0
    for seed in range(2000):
        rng = random.Random(seed)
        renewals = [0.0]
        while len(renewals) < 6:
            renewals.append(renewals[-1] + ttl_s * rng.choice((rng.random(), 0.999, 0.2)))
        etcd, end, now = Etcd(ttl_s, renewals), LeaseEnd(ttl_s), 0.0
        while now < renewals[-1] + 4 * ttl_s:
            sent_at = now
            now += rng.choice((0.001, 0.001, 0.001, rng.random() * ttl_s))
            left_s, over = etcd.left_s(now), etcd.ends_at(now) <= now
            now += rng.choice((0.001, 0.001, 0.001, rng.random() * ttl_s))
            pause_s = end.on_answer(left_s, sent_at=sent_at, received_at=now)
            assert over or not end.ended, f"seed {seed}: alive until {etcd.ends_at(now)}, taken for ended at {now}"
            now += pause_s if rng.random() < 0.8 else rng.random() * 2 * ttl_s
        found += end.ended
    assert found > 100


def test_extended_lease_is_alive_again() -> None:
    """The leader of etcd changed just after the end."""
    end = LeaseEnd(5.0)
    for at in (10.0, 10.5, 11.1):
        end.on_answer(0, sent_at=at, received_at=at)
    assert end.ended
    end.on_answer(None, sent_at=11.2, received_at=11.2)
    assert end.ended, "its keys are gone: who watches them knows"
    assert end.on_answer(4, sent_at=11.3, received_at=11.3) == 3.0
    assert not end.ended


def test_revoked_lease_is_left_to_the_watch() -> None:
    end = LeaseEnd(5.0)
    for at in (10.0, 11.0, 12.0):
        end.on_answer(None, sent_at=at, received_at=at)
    assert not end.ended


def test_questions_are_rare_for_living_leases() -> None:
    end = LeaseEnd(5.0)
    assert end.on_answer(4, sent_at=0.0, received_at=0.0) == 3.0
    assert end.on_answer(1, sent_at=3.0, received_at=3.0) == 0.05, "it may be 0 at any moment"
    assert end.on_answer(0, sent_at=3.5, received_at=3.5) == 0.05
    assert end.on_answer(0, sent_at=4.48, received_at=4.48) == pytest.approx(0.02), "certain in so long"
    assert end.on_answer(0, sent_at=4.499, received_at=4.499) == pytest.approx(0.002)
    assert not end.ended
    assert end.on_answer(0, sent_at=4.5, received_at=4.501) == 0.05
    assert end.ended
