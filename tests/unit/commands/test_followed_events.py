"""`taskgraph events --follow` beside an etcd that does not answer at once."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from commands_kit import in_memory, options

from taskgraph.commands import looking
from taskgraph.coordination.api import Listing
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import Unavailable
from taskgraph.jobs import Job
from taskgraph.launch.kept import KeptJob
from taskgraph.launch.submit import submit
from taskgraph.observe.events import Event
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn
from taskgraph.settings import Settings
from taskgraph.task import Task


async def test_an_etcd_that_is_away_at_the_start_is_not_taken_for_the_jobs_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended at once, with 0, and had shown nothing."""
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


async def test_what_was_shown_of_a_long_job_is_not_remembered_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever followed it for months held every event that there ever was."""
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    etcd, keys, counts = in_memory(monkeypatch), Keys("fit"), list[int]()
    settings = Settings(events_kept=5)
    await submit(
        etcd, JobSpec.local(Job(tasks=1, builder=lambda task_id: Task(), epochs=9, name="fit", settings=settings))
    )
    follow = looking._follow

    async def counted(reached: looking.Reached, printed: deque[Event], *, as_json: bool) -> None:
        await follow(reached, printed, as_json=as_json)
        counts.append(len(printed))

    monkeypatch.setattr(looking, "_follow", counted)
    following = asyncio.ensure_future(looking._events(options("events", "--follow")))
    for number in range(40):
        event = Event(kind="lost" if number < 39 else "finished", node="n1", at=1.0 + number, text=f"event {number}")
        await etcd.txn(Txn(success=(Put(keys.event(f"{number:03}"), event.to_bytes()),)))
    assert await following == 0
    shown = capsys.readouterr().out
    assert all(f"event {number}\n" in shown for number in range(40))
    assert counts and counts[0] <= 10


async def test_what_a_long_job_still_keeps_of_its_beginning_is_shown_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was shown again at the end, since it was not among the last that were remembered."""
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    etcd, keys, ended = in_memory(monkeypatch), Keys("fit"), asyncio.Event()
    job = Job(tasks=1, builder=lambda task_id: Task(), epochs=9, name="fit", settings=Settings(events_kept=5))
    await submit(etcd, JobSpec.local(job))
    told = [Event(kind="began", node="n1", at=1.0, text="event 0")]
    told += [Event(kind="takeover", node="n1", at=1.0 + at, text=f"event {at}", task=0) for at in range(1, 40)]
    last = Event(kind="finished", node="n1", at=41.0, text="event 40")
    shown: list[str] = []

    def show(event: Event, *, as_json: bool) -> None:
        shown.append(event.text)
        if event == told[-1]:
            ended.set()

    async def until_ended(_: object) -> None:
        await ended.wait()

    monkeypatch.setattr(looking, "print_event", show)
    monkeypatch.setattr(looking, "_ended", until_ended)
    monkeypatch.setattr(looking, "check_launcher", lambda entry: None)
    kept = KeptJob(events=(told[0], *told[-4:], last))
    monkeypatch.setattr(looking.Runtime, "finished", lambda runtime, name: kept)
    following = asyncio.ensure_future(looking._events(options("events", "--follow")))
    for number, event in enumerate(told):
        await etcd.txn(Txn(success=(Put(keys.event(f"{number:03}"), event.to_bytes()),)))
    assert await following == 0
    assert shown == [f"event {number}" for number in range(41)]
