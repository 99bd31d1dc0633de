"""Dead nodes, and the nodes that a launcher starts in their place."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import taskgraph as tg
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.errors import TaskGraphError
from taskgraph.launch import local
from taskgraph.launch.forkserver import NodeProcess, NotStarted
from taskgraph.launch.local import LocalNodes, pause_before_another
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.node.config import NodeConfig
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import NodeRecord
from taskgraph.system import host
from taskgraph.system.processes import adopting, can_adopt

ENTRY = JobEntry(name="fit", etcd="a:1", token="ab" * 32, pid=0, embedded=False, tls={})
WAITS = "read told"
"""As a node does that is told to leave."""


class Scripted(LocalNodes):
    """Nodes that are shell scripts."""

    scripts: list[str]
    error: type[Exception] = NotStarted
    joins = True
    store: MemoryStore
    configs: list[NodeConfig]

    def _forkserver(self) -> Any:
        return contextlib.nullcontext()

    async def _spawn(self, server: Any, config: NodeConfig, log_path: Path) -> NodeProcess:
        self.configs.append(config)
        script = self.scripts.pop(0) if self.scripts else WAITS
        if script == "":
            raise self.error(f"node {config.name} cannot be started")
        read_end, pipe = os.pipe()
        process = await asyncio.create_subprocess_exec("sh", "-c", script, stdin=read_end, start_new_session=True)
        os.close(read_end)
        if self.joins:
            lease = self.store.grant(60.0)
            record = NodeRecord(name="", run="", host="", pid=1, endpoints=(), control="", fingerprint="", lease=lease)
            await self._coordinator.txn(Txn((), (Put(self._keys.node(config.node_id), record.to_bytes(), lease),)))
        return NodeProcess(process, pipe, log_path)


@contextlib.asynccontextmanager
async def launched(
    tmp_path: Path, count: int, *scripts: str, replace: Callable[[], bool] = lambda: True
) -> AsyncIterator[Scripted]:
    coordinator = MemoryCoordinator(MemoryStore())
    nodes = Scripted(ENTRY, coordinator, Runtime(tmp_path), replace=replace)
    nodes.scripts, nodes.configs, nodes.store = list(scripts), [], coordinator.store
    try:
        await nodes.start(count)
        yield nodes
    finally:
        await nodes.stop(0.0)
        assert nodes.alive_count == 0 and not nodes._replacing and not nodes._watches
        await coordinator.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.005)


def test_replace_needs_node_processes() -> None:
    job = tg.Job(tasks=1, epochs=1, builder=lambda task: tg.Task(), name="fit")
    with pytest.raises(tg.JobError, match="no node to replace"):
        tg.run(job, nodes=0, replace=True)


def test_pause_before_a_replacement_doubles() -> None:
    assert [pause_before_another(early) for early in range(8)] == [0, 1, 2, 4, 8, 16, None, None]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_REPLACE_S", 0.005)
    monkeypatch.setattr(local, "_KEY_LOOK_S", 0.001)


async def test_replacement_has_the_devices_and_a_new_name(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_LIVED_S", 0.0)  # so all that were there have been for long
    monkeypatch.setattr(local, "_REPLACE_S", 60.0)
    monkeypatch.setattr(local, "host_devices", lambda: ("0", "1", "2"))
    async with launched(tmp_path, 3) as nodes:
        for name, another in (("n2", "n4"), ("n4", "n5"), ("n1", "n6")):
            await until(lambda name=name: nodes._processes[name].registered_at < math.inf)  # type: ignore[misc]
            os.kill(nodes.pids()[name], signal.SIGKILL)
            await until(lambda another=another: another in nodes.pids())  # type: ignore[misc]
        assert sorted(nodes.pids()) == ["n3", "n5", "n6"]
        dealt = {config.name: (config.devices, config.sharing) for config in nodes.configs}
        assert dealt["n4"] == dealt["n5"] == dealt["n2"] and dealt["n6"] == dealt["n1"] != dealt["n2"]
        assert list(nodes.logs()) == ["n1", "n2", "n3", "n4", "n5", "n6"], "what they print is shown, too"


async def test_node_that_left_is_not_replaced(tmp_path: Path, quick: None) -> None:
    async with launched(tmp_path, 2, "exit 4", "exit 0") as nodes:
        await until(lambda: "n3" in nodes.pids() and "n2" in nodes.codes())
        assert nodes.codes() == {"n1": 4, "n2": 0} and list(nodes.pids()) == ["n3"]


async def test_no_node_is_replaced_unless_asked(tmp_path: Path, quick: None) -> None:
    async with launched(tmp_path, 2, "kill -KILL $$", replace=lambda: False) as nodes:
        await until(lambda: "n1" in nodes.codes())
        await asyncio.sleep(0.05)
        assert list(nodes.pids()) == ["n2"] and len(nodes.configs) == 2


async def test_early_deaths_end_replacement(tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture) -> None:
    async with launched(tmp_path, 1, *["exit 9"] * 99) as nodes:
        await asyncio.wait_for(nodes.wait(None), 30)
        assert list(nodes.codes()) == [f"n{number}" for number in range(1, 7)], "the first, and five in its place"
    assert "another node is started in place of n2 in 0.01 s: 2 died early" in caplog.text
    assert "no other node is started in place of n6: 6 of them, one after the other, " in caplog.text
    assert f"the log of n6 is {nodes.logs()['n6']}" in caplog.text, "what it died of is said there alone"


async def test_node_that_never_registered_died_early(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_LIVED_S", 0.01)
    monkeypatch.setattr(Scripted, "joins", False)
    async with launched(tmp_path, 1, *["sleep 0.05; exit 4"] * 99) as nodes:
        await asyncio.wait_for(nodes.wait(None), 30)
        assert list(nodes.codes()) == [f"n{number}" for number in range(1, 7)]


@pytest.mark.parametrize("error", [NotStarted, OSError, TaskGraphError])
async def test_failed_replacement_is_tried_again(
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    quick: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """OSError: a folder cannot be made, as on a full disk."""
    monkeypatch.setattr(Scripted, "error", error)
    async with launched(tmp_path, 1, "exit 9", "", "") as nodes:
        await until(lambda: "n4" in nodes.pids())
    said = re.findall(r"no node is started in place of n1 yet: node (n\d) cannot be started", caplog.text)
    assert said == ["n2", "n3"]


@pytest.mark.skipif(not can_adopt(), reason="there is nobody to adopt")
async def test_orphans_of_a_dead_node_are_reaped(tmp_path: Path, quick: None) -> None:
    """While the launcher adopts orphans, they are its children."""
    with adopting():  # as where another one is started
        async with launched(tmp_path, 1, "sleep 60 & sleep 60 & kill -KILL $$") as nodes:
            (died,) = nodes.pids().values()
            await until(lambda: "n2" in nodes.pids())
            await until(lambda: not nodes._replacing)
            assert not host.children(session=died)


async def test_ending_launcher_replaces_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_REPLACE_S", 60.0)
    async with launched(tmp_path, 2, "exit 9", "read said; exit 9") as nodes:
        await until(lambda: bool(nodes._replacing))
        waiting = asyncio.ensure_future(nodes.wait(None))
        await nodes.drain_or_kill(10.0)
        await asyncio.wait_for(waiting, 30)
        assert nodes.codes() == {"n1": 9, "n2": 9} and len(nodes.configs) == 2


async def test_cancelled_stop_leaves_no_sockets(tmp_path: Path) -> None:
    async with launched(tmp_path, 1, "sleep 60") as nodes:
        assert nodes._sockets is not None and nodes._sockets.path.exists()
        path, ending = nodes._sockets.path, asyncio.ensure_future(nodes.stop(60.0))
        await asyncio.sleep(0)
        for _ in range(4):
            ending.cancel()
            await asyncio.sleep(0)
        with contextlib.suppress(asyncio.CancelledError):
            await ending
        assert nodes._sockets is None and not path.exists()
        died = nodes._processes["n1"]
        died.code = await asyncio.wait_for(died.process.wait(), 30)  # nobody watches it any more
        assert died.code == -signal.SIGKILL and not nodes._writing_ends
