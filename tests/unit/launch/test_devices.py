"""CUDA devices of a host, and how they are dealt to nodes. Needs no device."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.device.cuda import array_module, device_count
from taskgraph.device.visible import PRETEND, VISIBLE, visible_devices
from taskgraph.launch.devices import count_sharing, deal, host_devices
from taskgraph.launch.local import LocalNodes
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.node.config import NodeConfig


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0,1", ("0", "1")),
        (" 3 , 2 ", ("3", "2")),
        ("GPU-8932f937-d72c,MIG-1f4c", ("GPU-8932f937-d72c", "MIG-1f4c")),
        ("0,-1,1", ("0",)),  # CUDA stops at the first that is none
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),  # what Slurm says to a job that asked for none
    ],
)
def test_variable_is_read_as_cuda_reads_it(text: str, found: tuple[str, ...]) -> None:
    assert visible_devices(text) == found


def test_assigned_devices_count(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert host_devices({VISIBLE: "3"}, tmp_path) == ("3",)
    assert host_devices({VISIBLE: ""}, tmp_path) == ()
    assert host_devices({}, tmp_path) == ("0", "1"), "CUDA counts what it sees"
    assert host_devices({}, tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("devices", "first", "nodes", "dealt"),
    [
        ("01", 0, 4, ["0", "1", "0", "1"]),
        ("0123", 0, 2, ["0,2", "1,3"]),
        ("01", 1, 1, ["1,0"]),  # the second node of a job, started by itself
        ("01", 3, 2, ["1", "0"]),
        ("", 0, 2, [None, None]),
        ("0", 0, 0, []),
    ],
)
def test_devices_are_dealt_round_robin(devices: str, first: int, nodes: int, dealt: list[str | None]) -> None:
    assert deal(devices, first, nodes) == dealt


@pytest.mark.parametrize(
    ("dealt", "shared"),
    [
        (["0", "1", "0"], [2, 1, 2]),
        (["0,2", "1,3"], [1, 1]),
        (["1,0"], [1]),
        ([None, None, None], [3, 3, 3]),  # all see the same, and compute on its first
        ([], []),
    ],
)
def test_sharing_is_counted(dealt: list[str | None], shared: list[int]) -> None:
    assert count_sharing(dealt) == shared


@given(st.integers(1, 16), st.integers(0, 40), st.integers(1, 40))
def test_every_device_is_dealt_evenly(devices: int, first: int, nodes: int) -> None:
    names = [str(i) for i in range(devices)]
    dealt = [(text or "").split(",") for text in deal(names, first, nodes)]
    times = Counter(device for own in dealt for device in own)
    assert set(times) == set(names)
    assert max(times.values()) - min(times.values()) <= 1
    assert max(times.values()) == 1 or all(len(own) == 1 for own in dealt), "two nodes share only where they must"
    begins = Counter(own[0] for own in dealt)
    assert max(begins.values()) - min(begins.get(name, 0) for name in names) <= 1


class StubNodes(LocalNodes):
    """Nodes that are told what to be, and of which none is started."""

    def __init__(self, root: Path, *, deal_devices: bool) -> None:
        entry = JobEntry(name="fit", etcd="a:1", token="ab" * 32, pid=1, embedded=False, tls={})
        super().__init__(entry, MemoryCoordinator(MemoryStore()), Runtime(root), deal_devices=deal_devices)
        self.told: list[NodeConfig] = []

    def _forkserver(self) -> Any:
        return contextlib.nullcontext()

    async def _spawn(self, server: Any, config: NodeConfig, log_path: Path) -> Any:
        self.told.append(config)
        return SimpleNamespace(process=SimpleNamespace(returncode=0), pipe=-1, log_path=log_path)

    async def _watch(self, entry: Any) -> None:
        pass


def _there(nodes: StubNodes) -> set[str]:
    """Returns the folders for sockets."""
    return {config.sockets for config in nodes.told if Path(config.sockets).is_dir()}


@pytest.mark.parametrize(("deal_devices", "shared"), [(True, [2, 1, 2]), (False, [3, 3, 3])])
async def test_nodes_know_how_many_share_their_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deal_devices: bool, shared: list[int]
) -> None:
    monkeypatch.setattr("taskgraph.launch.local.host_devices", lambda: ("0", "1"))
    nodes = StubNodes(tmp_path / "runtime", deal_devices=deal_devices)
    try:
        await nodes.start(3)
        assert [config.sharing for config in nodes.told] == shared
        await nodes.start(1)
        assert nodes.told[3].name == "n4" and nodes.told[3].sharing == 1
        assert len(there := _there(nodes)) == 1
    finally:
        await nodes.stop(0)
    assert there and not _there(nodes)


def test_pretended_devices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRETEND, "1")
    monkeypatch.setenv(VISIBLE, "0,1")
    assert device_count() == 2
    assert array_module(2) == (np, None)
    monkeypatch.delenv(VISIBLE)
    assert device_count() == 0
