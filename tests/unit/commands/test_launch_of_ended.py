"""`taskgraph launch` of a job that has ended starts no nodes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import taskgraph as tg
from taskgraph import cli
from taskgraph.commands import joining
from taskgraph.commands.common import FoundJob
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.driver.spec import JobSpec
from taskgraph.launch.collector import Collector
from taskgraph.launch.kept import KeptJob
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.launch.submit import submit
from taskgraph.protocol import transactions
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import JobStatus, StatusRecord
from taskgraph.results import JobResult

KEYS = Keys("fit")
ENTRY = JobEntry(name="fit", etcd="a:1", token="ab" * 32, pid=0, embedded=False, tls={})


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Counts the nodes that would be started."""
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    counts: list[int] = []

    async def launch_nodes(*arguments: object, **options: object) -> tuple[StatusRecord, None]:
        counts.append(1)
        return StatusRecord(state=JobStatus.FINISHED), None

    monkeypatch.setattr(joining, "launch_nodes", launch_nodes)
    return counts


async def launched(monkeypatch: pytest.MonkeyPatch, status: StatusRecord, *puts: Put, entry: JobEntry = ENTRY) -> int:
    """Runs `taskgraph launch fit` for a job with this status."""
    coordinator = MemoryCoordinator(MemoryStore())
    spec = dataclasses.replace(JobSpec.local(tg.Job(tasks=1, builder=tg.Task, name="fit")), run="r")
    await submit(coordinator, spec)
    await coordinator.txn(Txn(success=(Put(KEYS.status, status.to_bytes()), *puts)))

    @contextlib.asynccontextmanager
    async def reach(options: object) -> AsyncIterator[FoundJob]:
        yield FoundJob("fit", entry, spec, coordinator)  # type: ignore[arg-type]

    monkeypatch.setattr(joining, "reach", reach)
    async with asyncio.timeout(30):
        return await joining._launch(cli.parser().parse_args(["launch", "fit", "--nodes", "1"]))


@pytest.mark.parametrize("state", [JobStatus.FAILED, JobStatus.CANCELLED])
async def test_failed_job_gets_no_nodes(started: list[int], monkeypatch: pytest.MonkeyPatch, state: JobStatus) -> None:
    with pytest.raises(tg.JobFailed, match="for a reason") as failed:
        await launched(monkeypatch, StatusRecord(state=state, reason="for a reason"))
    assert "no nodes were started; `taskgraph submit` starts it again" in failed.value.__notes__[0] and not started


async def test_finished_job_names_its_values(
    started: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = StatusRecord(state=JobStatus.FINISHED)
    kept = Put(KEYS.collected, KeptJob(result="{}").to_bytes())
    assert await launched(monkeypatch, finished, kept) == 0
    says = "has finished already: no nodes were started; its values: `taskgraph result fit{}`"
    assert says.format(" --etcd a:1") in capsys.readouterr().err
    for run, where in (("before", " --etcd a:1"), ("r", "")):  # an earlier run's values are not this one's
        Runtime().keep_finished("fit", KeptJob(run=run, status=finished))
        assert await launched(monkeypatch, finished, kept) == 0
        assert says.format(where) in capsys.readouterr().err
    too_many = Put(KEYS.collected, KeptJob(not_kept="too many").to_bytes())
    assert await launched(monkeypatch, finished, too_many) == 0
    assert "no nodes were started; its values are not kept: too many" in capsys.readouterr().err
    assert not started


async def test_uncollected_results_need_nodes(started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert await launched(monkeypatch, StatusRecord(state=JobStatus.FINISHED)) == 0
    assert started == [1]


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("how", ["given up", "gone", "taken"])
async def test_lost_values_fail_launch(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def launch_nodes(
        entry: JobEntry, coordinator: MemoryCoordinator, follower: Collector, *arguments: object, **options: object
    ) -> tuple[StatusRecord, JobResult]:
        here: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        follower.only_on_nodes = "they are too large"
        waiting = asyncio.ensure_future(follower.wait_until_taken(here))
        if how == "given up":
            await coordinator.txn(transactions.give_results_up(follower.view, "nobody came", by="launcher", writer="w"))
        elif how == "taken":
            await follower.mark_taken()
        else:
            here.set_result(None)
            follower.keeper.notify_later()
        await waiting
        return StatusRecord(state=JobStatus.FINISHED), JobResult(name="fit", values={0: 1.5})

    monkeypatch.setattr(joining, "launch_nodes", launch_nodes)
    code = await launched(monkeypatch, StatusRecord(state=JobStatus.FINISHED))
    said = capsys.readouterr()
    assert said.out == "1.5\n" and code == (0 if how == "taken" else 1)
    lost = "nobody came" if how == "given up" else "its last node left before anyone collected them"
    says = "they are too large; `taskgraph result --json` wrote them" if how == "taken" else f"values are lost: {lost}"
    assert says in said.err


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("state", [JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.FINISHED])
async def test_result_is_of_the_last_run(
    state: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = JobResult(name="fit", values={0: 1.5}).to_json()
    Runtime().keep_finished("fit", KeptJob(run="before", status=StatusRecord(state=JobStatus.FINISHED), result=earlier))

    async def launch_nodes(*arguments: object, **options: object) -> tuple[StatusRecord, None]:
        return StatusRecord(state=state, reason="for a reason"), None

    monkeypatch.setattr(joining, "launch_nodes", launch_nodes)
    running = StatusRecord(state=JobStatus.RUNNING)
    with contextlib.suppress(tg.JobFailed):
        assert await launched(monkeypatch, running) == 0
    capsys.readouterr()
    code = cli.main(["result", "fit"])
    said = capsys.readouterr()
    says, ends = ("`taskgraph result fit --etcd a:1` asks", 3) if state == JobStatus.FINISHED else ("for a reason", 1)
    assert (said.out, code) == ("", ends) and says in said.err
