"""Events in etcd, as `taskgraph events --follow` and `taskgraph status` read them."""

from __future__ import annotations

import asyncio

import pytest
from commands_kit import in_memory, options

from taskgraph.commands import looking
from taskgraph.coordination.api import Listing
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import JobError, Unavailable
from taskgraph.jobs import Job
from taskgraph.launch.submit import submit
from taskgraph.observe.events import Event
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn
from taskgraph.task import Task


async def test_events_wait_for_etcd_at_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    etcd, keys = in_memory(monkeypatch), Keys("fit")
    await submit(etcd, JobSpec.local(Job(tasks=1, builder=lambda task_id: Task(), epochs=9, name="fit")))
    listed, refused = etcd.list, asyncio.Event()

    async def away_once(prefix: str) -> Listing:
        if prefix == keys.root and not refused.is_set():
            refused.set()
            raise Unavailable("etcd is away")
        return await listed(prefix)

    monkeypatch.setattr(etcd, "list", away_once)
    following = asyncio.ensure_future(looking._events(options("events", "--follow")))
    await asyncio.wait([following, asyncio.ensure_future(refused.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert (await asyncio.wait([following], timeout=0.1))[1], "it goes on following"
    finished = Event(kind="finished", node="n1", at=1.0, text="the job finished after epoch 8")
    await etcd.txn(Txn(success=(Put(keys.event("001"), finished.to_bytes()),)))
    assert await following == 0
    assert "the job finished after epoch 8" in capsys.readouterr().out


async def test_status_counts_a_failover_before_its_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run reports it once no more events come; a job that no command follows has no report."""
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    etcd, keys = in_memory(monkeypatch), Keys("fit")
    await submit(etcd, JobSpec.local(Job(tasks=1, builder=lambda task_id: Task(), epochs=9, name="fit")))
    lost = Event(1.0, "n1", "lost", "n2 died: its port refuses connections", fields={"lost": "n2"})
    moved = Event(1.1, "n1", "takeover", "task 0: n1 is primary after n2", task=0, fields={"from": "n2"})
    await etcd.txn(Txn(success=tuple(Put(keys.event(f"{e.at}"), e.to_bytes()) for e in (lost, moved))))
    assert await looking._status(options("status")) == 0
    assert "\n1 failover, at " in capsys.readouterr().out
    with pytest.raises(JobError, match=r"--task 3-1: write numbers of tasks, such as 5 or 3-7,12"):
        await looking._status(options("status", "--task", "3-1"))
