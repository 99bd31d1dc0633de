"""A launcher writes the deaths of its nodes to etcd, or says why it cannot."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from pathlib import Path

import msgspec
import pytest

import taskgraph as tg
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import CoordinationError
from taskgraph.launch.local import LocalNodes, _Process
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.launch.submit import submit
from taskgraph.protocol.fatal import find_deadly_code
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Delete, Put, Txn, TxnResult
from taskgraph.protocol.records import GoneRecord, JobStatus, NodeRecord, RunningCode, StatusRecord
from taskgraph.protocol.view import JobView

KEYS = Keys("dead")
ENTRY = JobEntry(name="dead", etcd="a:1", token="ab" * 32, pid=0, embedded=False, tls={})
RECORD = GoneRecord(reason="killed by SIGKILL", writer="launcher 1")


class Refusing(MemoryCoordinator):
    """An etcd that refuses writes."""

    def __init__(self, *reasons: str) -> None:
        super().__init__(MemoryStore())
        self.reasons = list(reasons)

    async def txn(self, txn: Txn) -> TxnResult:
        if self.reasons:
            raise CoordinationError(self.reasons.pop(0))
        return await super().txn(txn)


async def with_node(coordinator: Refusing) -> LocalNodes:
    """Makes a job with a node that has a lease."""
    reasons, coordinator.reasons = coordinator.reasons, []
    spec = JobSpec.local(tg.Job(tasks=1, epochs=1, builder=lambda task: tg.Task(), name="dead"))
    await submit(coordinator, spec)
    lease = coordinator.store.grant(60.0)
    record = NodeRecord(name="n1", run=spec.run, host="h", pid=1, endpoints=(), control="", fingerprint="", lease=lease)
    await coordinator.txn(Txn(success=(Put(KEYS.node("n1-1"), record.to_bytes(), lease),)))
    coordinator.reasons = reasons
    return LocalNodes(ENTRY, coordinator, Runtime())


async def left(coordinator: Refusing) -> list[str]:
    return [kv.key for kv in (await coordinator.list(KEYS.root)).items]


async def test_refusal_of_etcd_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("taskgraph.launch.local._RETRY_S", 0.0)
    coordinator = Refusing(*["permission denied", "no space"] * 5)
    nodes = await with_node(coordinator)
    await nodes._write_gone("n1-1", RECORD)
    assert [record.message for record in caplog.records] == [
        "etcd does not take that node n1-1 was killed by SIGKILL: permission denied",
        "etcd does not take that node n1-1 was killed by SIGKILL: no space",
    ]
    there = await left(coordinator)
    assert KEYS.gone("n1-1") in there and KEYS.node("n1-1") not in there
    await coordinator.close()


async def test_unregistered_node_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("taskgraph.launch.local._REGISTERS_S", 0.001)
    monkeypatch.setattr("taskgraph.launch.local._KEY_LOOK_S", 0.001)
    coordinator, why = Refusing(), "waiting for etcd: database space exceeded; it takes no writes before ..."
    nodes = await with_node(coordinator)
    entries = []
    for name in ("n1", "n2", "n3"):
        (log := tmp_path / f"{name}.log").write_text(
            "2026-11-27 01:44:24,655 hello\n" + f"2026-11-27 01:44:24,655 taskgraph.node WARNING {why}\nhello\n" * 2
        )
        entries.append(_Process(name, f"{name}-1", None, 0, log, log.parent))  # type: ignore[arg-type]
        nodes._processes[name] = entries[-1]
    looking = [asyncio.ensure_future(nodes._report_unregistered(entry)) for entry in entries]
    await looking[0]  # this one is registered
    async with asyncio.timeout(30):
        while not caplog.records:  # noqa: ASYNC110 - its log tells
            await asyncio.sleep(0.001)
    (tmp_path / "n3.log").write_text("2026-11-27 01:44:39,655 taskgraph.node WARNING another\n")
    async with asyncio.timeout(30):
        while len(caplog.records) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    for each in looking:
        each.cancel()
    await asyncio.gather(*looking, return_exceptions=True)
    assert [record.message for record in caplog.records] == [
        f"n2 is not registered after 0 s: {why}",
        "n3 is not registered after 0 s: another",
    ]
    await coordinator.close()


async def test_death_is_not_written_for_a_lost_job() -> None:
    coordinator = Refusing()
    nodes = await with_node(coordinator)
    for key in await left(coordinator):
        if key != KEYS.node("n1-1"):
            await coordinator.txn(Txn(success=(Delete(key),)))
    await nodes._write_gone("n1-1", RECORD)
    assert await left(coordinator) == [], "its lease ended all the same"
    await coordinator.close()


async def test_death_is_not_written_for_the_next_run() -> None:
    coordinator = Refusing()
    nodes = await with_node(coordinator)
    spec = await coordinator.get(KEYS.spec)
    assert spec is not None
    nodes._entry = dataclasses.replace(ENTRY, run=JobSpec.from_bytes(spec.value).run)
    ended = StatusRecord(state=JobStatus.CANCELLED, writer="a person")
    await coordinator.txn(Txn(success=(Put(KEYS.status, ended.to_bytes()),)))
    await submit(coordinator, JobSpec.local(tg.Job(tasks=1, epochs=1, builder=lambda task: tg.Task(), name="dead")))
    for number in range(1, 4):
        await nodes._write_gone(
            f"n{number}-1", msgspec.structs.replace(RECORD, running_code=(RunningCode("fit", 0, 0),))
        )
    listing, view = await coordinator.list(KEYS.root), JobView("dead")
    view.reset(listing.revision, listing.items)
    assert find_deadly_code(view, 3) is None
    assert not view.gone
    assert KEYS.node("n1-1") not in await left(coordinator), "its lease ended all the same"
    await coordinator.close()


async def test_last_logs_of_ended_nodes_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("taskgraph.launch.runtime._LOGS_KEPT", 3, raising=False)
    coordinator = Refusing()
    launchers = [await with_node(coordinator), LocalNodes(ENTRY, coordinator, Runtime())]
    folder = Runtime().make_job_folder("dead")

    async def ends(number: int) -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "", start_new_session=True)
        pipe, log = os.open(os.devnull, os.O_WRONLY), folder / f"n{number}.log"
        await launchers[number % 2]._watch(_Process(f"n{number}", f"n{number}-1", process, pipe, log, folder / "s"))

    for number in range(1, 10):
        (folder / f"n{number}.log").write_text("it said this")
    for number in range(2, 9):
        await ends(number)
    assert sorted(path.stem for path in folder.glob("*.log")) == ["n1", "n6", "n7", "n8", "n9"], "two of them live"
    Runtime().remove("dead")
    await ends(9)
    assert not folder.exists(), "nothing is left behind by a job that has ended"
    await coordinator.close()
