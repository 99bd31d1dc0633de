"""`taskgraph chaos` shows events since its start, by any node's clock, and says what it waits for."""

from __future__ import annotations

import asyncio
import time

import pytest
from commands_kit import in_memory, options

from taskgraph.commands import acting, chaos
from taskgraph.driver.spec import JobSpec
from taskgraph.jobs import Job
from taskgraph.launch.submit import submit
from taskgraph.observe.events import Event
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import JobStatus, NodeRecord, StatusRecord
from taskgraph.task import Task

KEYS = Keys("fit")


def told(text: str, ahead_s: float) -> Put:
    """An event of a node whose clock is ahead of ours."""
    event = Event(time.time() + ahead_s, "n1", "takeover", text)
    return Put(KEYS.event(f"{event.at:017.6f}-n1-1"), event.to_bytes())


async def test_chaos_shows_new_events_despite_clocks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    etcd, begun = in_memory(monkeypatch), asyncio.Event()

    def pause_s(*_: object) -> float:
        begun.set()
        return 1000.0

    monkeypatch.setattr(chaos, "pause_s", pause_s)
    monkeypatch.setattr(acting, "can_signal", lambda record: True)
    spec = JobSpec.local(Job(tasks=1, builder=lambda task_id: Task(), epochs=9, name="fit"))
    node = NodeRecord(name="n1", run=spec.run, host="h", pid=1, endpoints=(), control="", fingerprint="", lease=0)
    await submit(etcd, spec)
    await etcd.txn(Txn(success=(Put(KEYS.node("n1-7f"), node.to_bytes()), told("long before", 3600.0))))
    async with asyncio.timeout(30):
        running = asyncio.ensure_future(chaos._chaos(options("chaos"), ("kill",), 1))
        await begun.wait()
        finished = StatusRecord(state=JobStatus.FINISHED)
        await etcd.txn(Txn(success=(told("meanwhile", -3600.0), Put(KEYS.status, finished.to_bytes()))))
        assert await running == 0
    shown = capsys.readouterr().out
    assert "meanwhile" in shown and "long before" not in shown


@pytest.mark.parametrize("lossy", [False, True])
async def test_chaos_says_what_it_waits_for(
    lossy: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    etcd = in_memory(monkeypatch)
    monkeypatch.setattr(chaos, "pause_s", lambda *_: 0.0)
    monkeypatch.setattr(acting, "can_signal", lambda record: True)
    spec = JobSpec.local(Job(tasks=1, builder=lambda task_id: Task(), epochs=9, name="fit"))
    node = NodeRecord(
        name="n1", run=spec.run, host="h", pid=1, endpoints=(), control="", fingerprint="", lease=0, draining=True
    )
    await submit(etcd, spec)
    await etcd.txn(Txn(success=(Put(KEYS.node("n1-7f"), node.to_bytes()),)))
    given = options("chaos", "--for-s", "0.2", *(("--lossy",) if lossy else ()))
    assert await chaos._chaos(given, ("kill",), 1) == 0
    shown = capsys.readouterr().out
    assert "waiting: every node" in shown and "(more nodes: `taskgraph launch fit`" in shown
    assert ("--lossy" in shown, "every node of this host was hit already, or leaves" in shown) == (not lossy, lossy)
