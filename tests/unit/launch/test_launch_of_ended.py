"""`taskgraph launch` of a job that has ended: there is nothing for nodes to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import taskgraph as tg
from taskgraph import cli
from taskgraph.commands import joining
from taskgraph.commands.common import Reached
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.driver import JobSpec
from taskgraph.launch.runtime import JobEntry
from taskgraph.launch.submit import submit
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import State, StatusRecord

KEYS = Keys("fit")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """How many nodes were started; none is really."""
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    counts: list[int] = []

    async def launch_nodes(*arguments: object, **options: object) -> tuple[StatusRecord, None]:
        counts.append(1)
        return StatusRecord(state=State.FINISHED), None

    monkeypatch.setattr(joining, "launch_nodes", launch_nodes)
    return counts


async def launched(monkeypatch: pytest.MonkeyPatch, status: StatusRecord, *puts: Put) -> int:
    """`taskgraph launch fit`, of a job with this status."""
    coordinator, spec = MemoryCoordinator(MemoryStore()), JobSpec.local(tg.Job(tasks=1, builder=tg.Task, name="fit"))
    await submit(coordinator, spec)
    await coordinator.txn(Txn(success=(Put(KEYS.status, status.to_bytes()), *puts)))
    entry = JobEntry(name="fit", etcd="a:1", token="ab" * 32, pid=0, embedded=False, tls={})

    @contextlib.asynccontextmanager
    async def reach(options: object) -> AsyncIterator[Reached]:
        yield Reached("fit", entry, spec, coordinator)  # type: ignore[arg-type]

    monkeypatch.setattr(joining, "reach", reach)
    async with asyncio.timeout(5):
        return await joining._launch(cli.parser().parse_args(["launch", "fit", "--nodes", "1"]))


@pytest.mark.parametrize("state", [State.FAILED, State.CANCELLED])
async def test_no_node_is_started_for_a_job_that_failed_or_was_ended(
    started: list[int], monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    """They were, and told of everything that had happened once more, for seven seconds."""
    with pytest.raises(tg.JobFailed, match="for a reason") as failed:
        await launched(monkeypatch, StatusRecord(state=state, reason="for a reason"))
    assert "no nodes were started; `taskgraph submit` begins it again" in failed.value.__notes__[0] and not started


async def test_nor_for_one_that_finished_and_it_is_said_where_its_values_are(
    started: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = StatusRecord(state=State.FINISHED)
    kept = (Put(KEYS.collected, b"{}"), Put(KEYS.result, b"{}"))
    assert await launched(monkeypatch, finished, *kept) == 0
    assert "has finished already: no nodes were started; its values: `taskgraph result fit`" in capsys.readouterr().err
    assert (
        await launched(monkeypatch, finished, Put(KEYS.collected, json.dumps({"not_kept": "too many"}).encode())) == 0
    )
    assert "no nodes were started; its values are not kept: too many" in capsys.readouterr().err
    assert not started


async def test_one_whose_results_nobody_has_collected_still_needs_nodes(
    started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await launched(monkeypatch, StatusRecord(state=State.FINISHED)) == 0
    assert started == [1]
