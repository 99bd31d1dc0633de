"""Commands for a job whose nodes speak another protocol."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from commands_kit import in_memory, options

from taskgraph.commands.acting import drain, kill, shutdown
from taskgraph.commands.chaos import _chaos
from taskgraph.commands.joining import _launch
from taskgraph.commands.looking import _events, _status
from taskgraph.commands.tracing import _trace
from taskgraph.coordination.memory import MemoryCoordinator
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import FingerprintMismatch
from taskgraph.jobs import Job
from taskgraph.launch.submit import submit
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import JobStatus, NodeRecord, StatusRecord
from taskgraph.task import Task

KEYS = Keys("fit")


@pytest.fixture
async def etcd(monkeypatch: pytest.MonkeyPatch) -> MemoryCoordinator:
    """With a job of protocol 1, and a node that nobody may call: its address is none."""
    found = in_memory(monkeypatch)
    spec = JobSpec.local(Job(tasks=1, builder=lambda task_id: Task(), epochs=9, name="fit"))
    await submit(found, dataclasses.replace(spec, protocol=1))
    node = NodeRecord(name="n1", run=spec.run, host="h", pid=1, endpoints=(), control="none", fingerprint="", lease=0)
    await found.txn(Txn(success=(Put(KEYS.node("n1-7f"), node.to_bytes()),)))
    return found


Command = Callable[[], Coroutine[Any, Any, int]]


@pytest.mark.parametrize(
    "command",
    [
        lambda: kill(options("kill", "--node", "n1")),
        lambda: drain(options("drain", "--node", "n1")),
        lambda: _chaos(options("chaos"), ("kill",), 1),
        lambda: _trace(options("trace"), None),
    ],
    ids=["kill", "drain", "chaos", "trace"],
)
async def test_commands_refuse_another_protocol(etcd: MemoryCoordinator, command: Command) -> None:
    with pytest.raises(FingerprintMismatch, match="whose nodes speak protocol 1"):
        await command()


async def test_launch_refuses_another_protocol(
    etcd: MemoryCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "token").write_text(f"{'7' * 64}\n")
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(FingerprintMismatch, match="whose nodes speak protocol 1"):
        await _launch(options("launch", "--token-file", str(tmp_path / "token")))


async def test_status_without_asking_nodes(etcd: MemoryCoordinator, capsys: pytest.CaptureFixture[str]) -> None:
    assert await _status(options("status")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "fit running epoch 0/8" in said and "not asked" in said and "does not answer" not in said
    assert "n1: job 'fit' was submitted by taskgraph" in said and "whose nodes speak protocol 1" in said
    assert await _status(options("status", "--json")) == 0
    (node,) = json.loads(capsys.readouterr().out)["nodes"]
    assert not node["answers"] and "whose nodes speak protocol 1" in node["why_not"]


async def test_events_and_shutdown_work(etcd: MemoryCoordinator) -> None:
    assert await _events(options("events")) == 0
    assert await shutdown(options("shutdown")) == 0
    status = await etcd.get(KEYS.status)
    assert status is not None and StatusRecord.from_bytes(status.value).state == JobStatus.CANCELLED
