"""Where many nodes share cores, commits are rarer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import taskgraph as tg
from taskgraph.node.primary import gathering
from taskgraph.node.primary.due import Due
from taskgraph.node.primary.gathering import Gathering, longer
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import KeyEvent, KeyValue
from taskgraph.protocol.records import EpochRecord, GoneRecord, NodeRecord, PrimaryRecord, Record
from taskgraph.protocol.view import JobView
from taskgraph.testing.clock import FastForwardLoop

KEYS = Keys("fit")


@pytest.mark.parametrize(
    ("nodes", "cores", "expected"),
    [(1, 64, 0.02), (4, 2, 0.02), (5, 2, 0.025), (8, 2, 0.04), (20, 2, 0.1), (1000, 2, 0.1), (15, 15, 0.02)],
)
def test_from_two_nodes_a_core_on_it_is_longer_up_to_five_times(nodes: int, cores: int, expected: float) -> None:
    assert longer(0.02, nodes, cores) == pytest.approx(expected)
    assert longer(0.0, nodes, cores) == 0.0, "nothing is gathered where that was set"


class _Keeper:
    def __init__(self) -> None:
        self.view = JobView("fit")
        self._revision = 0

    def write(self, key: str, record: Record | None) -> None:
        self._revision += 1
        kv = KeyValue(key, b"" if record is None else record.to_bytes(), self._revision, self._revision)
        self.view.apply(self._revision, [KeyEvent("delete" if record is None else "put", kv)])

    def node(self, name: str, host: str, run: str = "r1", machine: str = "") -> None:
        record = NodeRecord(
            name=name,
            run=run,
            host=host,
            pid=1,
            endpoints=(),
            control="",
            fingerprint="",
            lease=1,
            machine=machine,
            writer="w",
        )
        self.write(KEYS.node(name), record)


class _Node:
    host, machine = "here", ""

    def __init__(self, own_process: bool = True) -> None:
        self.keeper = _Keeper()
        self.own_process = own_process
        self.settings = tg.Settings(gather_s=0.02)

    class spec:
        run = "r1"


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "allowed_cores", lambda: 2)


def primary(node: str) -> PrimaryRecord:
    return PrimaryRecord(node=node, term=1, stateful=True, writer="w")


def test_nodes_of_the_leaders_host_count_as_they_come_and_go() -> None:
    node: Any = _Node()
    subject = Gathering(node)
    for number in range(8):
        node.keeper.node(f"n{number}", "here")
        node.keeper.node(f"m{number % 7}", "there")
        node.keeper.node(f"old{number}", "here", run="r0")
    assert subject.seconds(64) == pytest.approx(0.04), "there is no leader yet: its own host"
    node.keeper.write(KEYS.primary(0), primary("m1"))
    assert subject.seconds(64) == pytest.approx(0.035)
    node.keeper.write(KEYS.gone("m2"), GoneRecord(reason="killed", writer="w"))
    node.keeper.write(KEYS.node("m3"), None)
    assert subject.seconds(64) == pytest.approx(0.025)
    node.keeper.write(KEYS.primary(0), primary("n3"))
    assert subject.seconds(64) == pytest.approx(0.04)


def test_containers_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a host's name of its own, and counted as one node alone on its host."""
    monkeypatch.setattr(gathering, "all_cores", lambda: 4)
    node: Any = _Node()
    subject = Gathering(node)
    for number in range(16):
        node.keeper.node(f"n{number}", f"pod-{number}", machine="m1")
        node.keeper.node(f"m{number}", f"pod-{number + 16}", machine="m2")
    node.keeper.write(KEYS.primary(0), primary("n3"))
    assert subject.seconds(64) == pytest.approx(0.04)
    for number in range(12):  # in one of them, which has but two of the four cores
        node.keeper.node(f"k{number}", "pod-3", machine="m1")
    assert subject.seconds(64) == pytest.approx(0.07)
    monkeypatch.setattr(gathering, "all_cores", lambda: 64)
    node.keeper.node("k13", "pod-3", machine="m1")
    assert subject.seconds(64) == pytest.approx(0.07)


def test_a_commit_alone_is_no_reason_to_count_again() -> None:
    node: Any = _Node()
    subject = Gathering(node)
    node.keeper.node("n1", "here")
    assert subject.seconds(64) == 0.02
    view = node.keeper.view
    node.keeper.write(KEYS.epoch, EpochRecord(epoch=1, attempt=1, writer="w"))
    assert view.stamp is not None
    view.nodes = None  # who counts now fails
    assert subject.seconds(64) == 0.02


def test_nodes_of_one_process_are_woken_together() -> None:
    node: Any = _Node(own_process=False)
    for number in range(99):
        node.keeper.node(f"n{number}", "here")
    assert Gathering(node).seconds(64) == 0.02


def test_where_epochs_are_so_large_that_fewer_may_be_ahead_it_stays_as_set() -> None:
    node: Any = _Node()
    for number in range(8):
        node.keeper.node(f"n{number}", "here")
    subject = Gathering(node)
    assert subject.seconds(node.settings.epochs_ahead) == pytest.approx(0.04)
    assert subject.seconds(node.settings.epochs_ahead - 1) == 0.02


async def _due(node: _Node) -> Due:
    node.gathering = Gathering(node)  # type: ignore[attr-defined, arg-type]
    return Due(node, 0.5)  # type: ignore[arg-type]


def test_what_is_gathered_goes_some_time_before_the_next_commit() -> None:
    async def scenario() -> None:
        node, clock = _Node(), asyncio.get_running_loop().time
        due = await _due(node)
        assert due.at(0.25) - clock() == pytest.approx(0.005, abs=1e-3), "nothing is known of a commit"
        assert not due.early(node.keeper.view)
        due.committed()
        at = due.at(0.25)
        assert at - clock() == pytest.approx(0.01, abs=1e-3)
        assert due.early(node.keeper.view)
        await asyncio.sleep(0.005)
        assert due.at(0.25) == at
        due.went()
        assert due.at(0.25) - clock() == pytest.approx(0.02, abs=1e-3), "once between two commits"
        due.committed()
        assert due.at(0.25) - clock() == pytest.approx(0.01, abs=1e-3)
        due.forget()
        assert not due.early(node.keeper.view)

    with asyncio.Runner(loop_factory=FastForwardLoop) as runner:
        runner.run(scenario())


def test_after_a_takeover_nothing_is_early() -> None:
    async def scenario() -> None:
        node = _Node()
        due = await _due(node)
        due.committed()
        assert due.early(node.keeper.view)
        node.keeper.view.generation_revision += 1
        assert not due.early(node.keeper.view)

    with asyncio.Runner(loop_factory=FastForwardLoop) as runner:
        runner.run(scenario())
