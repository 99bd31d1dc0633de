"""Messages of a launcher that did not follow its job to the end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import JobError, JobFailed, PeerLost, Unavailable
from taskgraph.jobs import Job
from taskgraph.launch import supervise
from taskgraph.launch.collector import Collector
from taskgraph.launch.forkserver import NodeProcess, NotStarted
from taskgraph.launch.kept import KeptJob
from taskgraph.launch.local import LocalNodes
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.launch.submit import submit
from taskgraph.launch.supervise import FrontEndHooks, Supervisor, end_reason, launch_nodes
from taskgraph.network.listening import NOWHERE
from taskgraph.node.config import NodeConfig
from taskgraph.node.usercode import lastwords
from taskgraph.observe.events import Event
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import GoneRecord, JobStatus, NodeRecord, PrimaryRecord, RunningCode, StatusRecord
from taskgraph.results import JobResult
from taskgraph.settings import Settings
from taskgraph.task import Task

SPEC = JobSpec.local(Job(tasks=1, builder=lambda task_id: Task(), epochs=1, name="fit"))
RESULT = JobResult(name="fit", values={0: 1}, reports=(), epochs=1, failovers=0, restarts=0, wall_s=1.0)
ENTRY = JobEntry(name="fit", etcd="a:1", token="", pid=0, embedded=True, tls={})


def supervisor(*, finished: bool, unreachable: PeerLost | None = None) -> Supervisor:
    follower: Any = SimpleNamespace(view=SimpleNamespace(finished=finished), unreachable=unreachable)
    return Supervisor(SPEC, ENTRY, coordinator=None, follower=follower, hooks=FrontEndHooks())  # type: ignore[arg-type]


async def test_timeout_after_the_last_epoch_names_the_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = "its epochs were done, and its results not yet here: "
    assert (
        await supervisor(finished=True)._waits()
        == f"{done}`result()` of some task was still at work, or they were on their way"
    )
    assert await supervisor(finished=True, unreachable=PeerLost("n1 is away"))._waits() == f"{done}n1 is away"

    async def statuses(*_: object) -> dict[str, Any]:
        return {"n1-1": PeerLost("n1 is away")}

    monkeypatch.setattr(supervise, "node_statuses", statuses)
    assert await supervisor(finished=False)._waits() == "none of its nodes answers: n1 is away"


def test_end_reason_names_the_launchers_error() -> None:
    assert end_reason(asyncio.CancelledError()) == end_reason(KeyboardInterrupt()) == "interrupted"
    assert end_reason(PeerLost("away")) == "its launcher could not go on: PeerLost: away"


async def test_nodes_that_cannot_start_fail_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, said = supervisor(finished=False), []

    async def start(count: int) -> None:
        raise NotStarted("node n1 cannot be started: the fork server has ended")

    async def cancel_job(reason: str, *, state: str) -> None:
        said.append((reason, state))

    monkeypatch.setattr(job._nodes, "start", start)
    monkeypatch.setattr(job._follower, "cancel_job", cancel_job, raising=False)
    with pytest.raises(JobFailed, match="node n1 cannot be started") as failed:
        await job._start(1)
    assert failed.value.job == "fit" and said == [(str(failed.value), JobStatus.FAILED)]
    assert not issubclass(NotStarted, JobError), "trying again may well give something else"


_HANDS_OVER = """touch "$0"; read told; sleep 0.5; exit 0"""
_NEVER_LEAVES = """trap '' TERM; touch "$0"; while :; do sleep 0.02; done"""


class Scripted(LocalNodes):
    """Nodes that are shell scripts."""

    script = _HANDS_OVER

    def _forkserver(self) -> Any:
        return contextlib.nullcontext()

    async def _spawn(self, server: Any, config: NodeConfig, log_path: Path) -> NodeProcess:
        ready = log_path.with_name("ready")
        ready.parent.mkdir(parents=True, exist_ok=True)
        read_end, pipe = os.pipe()
        process = await asyncio.create_subprocess_exec("sh", "-c", self.script, str(ready), stdin=read_end)
        os.close(read_end)
        while not ready.exists():  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.005)
        return NodeProcess(process, pipe, log_path)


class Launched:
    """A launcher of one scripted node; it gives nodes 0.05 s to end after the job."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        script: str,
        settings: Settings,
        follower: Collector | None = None,
        *,
        etcd_ends: bool = False,
    ) -> None:
        monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
        monkeypatch.setattr(supervise, "LocalNodes", Scripted)
        monkeypatch.setattr(supervise, "_NODE_END_S", 0.05)
        monkeypatch.setattr(supervise, "_ALL_ENDED_S", 0.01)
        monkeypatch.setattr(Scripted, "script", script)
        job = Job(tasks=1, builder=lambda task_id: Task(), epochs=1, name="fit", settings=settings)
        self.leave, self.started, self._never = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.nodes: LocalNodes | None = None
        keeper = SimpleNamespace(notify_later=lambda: None)
        idle: Any = SimpleNamespace(
            wait_for_end=self._never.wait, wait_until_broken=self._never.wait, finished=False, keeper=keeper
        )
        etcd = MemoryCoordinator(MemoryStore())
        self.work = asyncio.ensure_future(
            launch_nodes(
                ENTRY,
                etcd,
                follower or idle,
                JobSpec.local(job),
                1,
                NOWHERE,
                self._on_start,
                self.leave,
                etcd_ends=etcd_ends,
            )
        )

    def _on_start(self, nodes: LocalNodes) -> None:
        self.nodes = nodes
        self.started.set()

    async def ended(self) -> tuple[StatusRecord | None, dict[str, int]]:
        """Returns the job's status, or None if the launcher was cancelled, and the exit codes of nodes."""
        async with asyncio.timeout(30):
            (found,) = await asyncio.gather(self.work, return_exceptions=True)
        assert self.nodes is not None
        return None if isinstance(found, asyncio.CancelledError) else found[0], self.nodes.codes()


async def test_ending_launcher_lets_its_nodes_hand_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched = Launched(monkeypatch, tmp_path, _HANDS_OVER, Settings())
    await launched.started.wait()
    launched.leave.set()
    status, codes = await launched.ended()
    assert status is not None and status.state == JobStatus.RUNNING
    assert codes == {"n1": 0}


async def test_node_is_killed_after_drain_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched = Launched(monkeypatch, tmp_path, _NEVER_LEAVES, Settings(drain_s=0.1))
    await launched.started.wait()
    launched.leave.set()
    _, codes = await launched.ended()
    assert codes == {"n1": -signal.SIGKILL}


async def test_second_order_kills_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched = Launched(monkeypatch, tmp_path, _NEVER_LEAVES, Settings(drain_s=1000.0))
    await launched.started.wait()
    launched.leave.set()
    await asyncio.sleep(0.05)
    assert not launched.work.done()
    launched.work.cancel()
    assert await launched.ended() == (None, {"n1": -signal.SIGKILL})


@pytest.mark.parametrize(("script", "why"), [("exit 0", ""), ("exit 1", "ended with exit code 1")])
async def test_drained_nodes_are_no_failure(
    script: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched = Launched(monkeypatch, tmp_path, f"""touch "$0"; {script}""", Settings())
    status, _ = await launched.ended()
    assert status is not None and status.state == JobStatus.RUNNING
    assert why in status.reason and bool(status.reason) == bool(why)


@pytest.mark.parametrize(("script", "seen"), [("exit 0", False), ("echo no such mount; exit 1", True)])
async def test_deaths_are_reported_after_the_job_finished(
    script: str, seen: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = asyncio.Event()

    async def ended() -> StatusRecord:
        await gone.wait()
        return StatusRecord(state=JobStatus.FINISHED)

    async def collect(_: object) -> JobResult:
        return RESULT

    finishes: Any = SimpleNamespace(
        wait_for_end=ended,
        collect=collect,
        wait_until_broken=asyncio.Event().wait,
        finished=True,
        only_on_nodes="",
        keeper=SimpleNamespace(notify_later=gone.set),
    )
    launched = Launched(monkeypatch, tmp_path, f"""touch "$0"; {script}""", Settings(), finishes)
    monkeypatch.setattr(LocalNodes, "log_tail", lambda nodes, name: f"the log of {name}")
    status, codes = await launched.ended()
    assert status is not None and status.state == JobStatus.FINISHED and codes == {"n1": int(seen)}
    said = [record.getMessage() for record in caplog.records if "every node started here" in record.getMessage()]
    assert len(said) == seen
    assert all("n1 ended with exit code 1; the end of its log:\nthe log of n1" in text for text in said)


async def test_lost_results_are_computed_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    etcd = MemoryCoordinator(MemoryStore())
    keys = Keys("fit")
    await submit(etcd, SPEC)
    await etcd.txn(Txn(success=(Put(keys.status, StatusRecord(state=JobStatus.FINISHED).to_bytes()),)))
    follower = Collector(etcd, SPEC, b"")
    await follower.start()
    try:
        launched = Launched(monkeypatch, tmp_path, _NEVER_LEAVES, Settings(), follower)
        await launched.started.wait()
        await asyncio.sleep(0.05)
        assert not launched.work.done()
        assert launched.nodes is not None
        launched.nodes.kill_now()
        status, _ = await launched.ended()
        assert status is not None and status.state == JobStatus.FINISHED
        assert follower.kept.not_kept == "its last node left before anyone collected them"
    finally:
        await follower.stop()


@pytest.mark.parametrize("etcd_ends", [True, False])
async def test_nodes_leave_before_their_runs_etcd_ends(
    etcd_ends: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    etcd = MemoryCoordinator(MemoryStore())
    await submit(etcd, SPEC)
    await etcd.txn(Txn(success=(Put(Keys("fit").status, StatusRecord(state=JobStatus.CANCELLED).to_bytes()),)))
    follower = Collector(etcd, SPEC, b"")
    await follower.start()
    try:
        launched = Launched(monkeypatch, tmp_path, _NEVER_LEAVES, Settings(), follower, etcd_ends=etcd_ends)
        status, codes = await launched.ended()
        assert status is not None and status.state == JobStatus.CANCELLED
        assert codes == {"n1": -signal.SIGKILL}
        assert bool(follower._services) == (not etcd_ends)
    finally:
        await follower.stop()


@pytest.mark.parametrize("kept", [True, False])
async def test_run_says_who_collected_its_results(kept: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(supervise, "_ALL_ENDED_S", 0.01)
    etcd, keys = MemoryCoordinator(MemoryStore()), Keys("fit")
    await submit(etcd, SPEC)
    record = KeptJob(result=RESULT.to_json()) if kept else KeptJob(not_kept="no launcher collected them within 300 s")
    collected = Put(keys.collected, record.to_bytes())
    finished = Put(keys.status, StatusRecord(state=JobStatus.FINISHED).to_bytes())
    await etcd.txn(Txn(success=(finished, collected)))
    follower = Collector(etcd, SPEC, b"")
    await follower.start()
    try:
        job = Supervisor(SPEC, ENTRY, etcd, follower, FrontEndHooks())
        with pytest.raises(JobFailed) as failed:
            async with asyncio.timeout(30):
                await job._wait_for_result()
        job._uncollected = "the run ended before they were collected"
        await job._finish(0.0, 0.0)
    finally:
        await follower.stop()
    says = "another process collected them first, and `taskgraph result fit` has its values" if kept else "within 300 s"
    assert "job 'fit' has finished, but this run did not collect its results" in str(failed.value) and says in str(
        failed.value
    )
    left = Runtime().find_finished("fit")
    assert left is not None and left.result == (RESULT.to_json() if kept else "")
    found = await etcd.get(keys.collected)
    assert found is not None and found.value == collected.value, "what the other one said of it stays"


async def test_result_on_this_host_counts_without_etcd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another process of this host collected it, and etcd ended before the run could ask."""
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(supervise, "_ALL_ENDED_S", 0.01)
    etcd, keys = MemoryCoordinator(MemoryStore()), Keys("fit")
    await submit(etcd, SPEC)
    puts = (
        Put(keys.status, StatusRecord(state=JobStatus.FINISHED).to_bytes()),
        Put(keys.collected, KeptJob().to_bytes()),
    )
    await etcd.txn(Txn(success=puts))
    Runtime().keep_finished("fit", KeptJob(run=SPEC.run, result=RESULT.to_json()))
    follower = Collector(etcd, SPEC, b"")
    await follower.start()

    async def silent(key: str) -> None:
        raise Unavailable(f"get {key!r}: no answer")

    monkeypatch.setattr(etcd, "get", silent)
    try:
        with pytest.raises(JobFailed, match="`taskgraph result fit` has its values"):
            async with asyncio.timeout(30):
                await Supervisor(SPEC, ENTRY, etcd, follower, FrontEndHooks())._wait_for_result()
    finally:
        await follower.stop()


@pytest.mark.parametrize("again", [False, True])
async def test_next_runs_events_are_not_kept(again: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The job may be submitted again while a launcher waits for its nodes to end."""
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    etcd, keys = MemoryCoordinator(MemoryStore()), Keys("fit")
    await submit(etcd, SPEC)
    finished = Put(keys.status, StatusRecord(state=JobStatus.FINISHED).to_bytes())
    await etcd.txn(Txn(success=(finished, Put(keys.event("1"), Event(1.0, "n1", "began", "").to_bytes()))))
    follower = Collector(etcd, SPEC, b"")
    await follower.start()
    try:
        follower.kept = KeptJob(result=RESULT.to_json())
        if again:
            await submit(etcd, dataclasses.replace(SPEC, run="another"))
            await etcd.txn(Txn(success=(Put(keys.event("2"), Event(2.0, "n1", "lost", "").to_bytes()),)))
        await Supervisor(SPEC, ENTRY, etcd, follower, FrontEndHooks())._finish(0.0, 0.0)
        left = Runtime().find_finished("fit")
        await follower.keep_end(follower.status)
    finally:
        await follower.stop()
    assert left is not None and left.state == "finished" and left.result
    assert [event.kind for event in left.events] == ([] if again else ["began"])
    assert (Runtime().find_finished("fit") or KeptJob()).events == left.events


async def _never() -> str:
    await asyncio.Event().wait()
    return ""


async def own_nodes_ended(etcd: MemoryCoordinator, spec: JobSpec) -> tuple[Collector, asyncio.Future[None]]:
    """A follower, and the task that fails the job once no node is left."""
    follower = Collector(etcd, spec, b"")
    await follower.start()
    job = Supervisor(spec, ENTRY, etcd, follower, FrontEndHooks())
    return follower, asyncio.ensure_future(job._fail_without_nodes())


@pytest.mark.parametrize("becomes", ["back", "gone", "nothing"])
async def test_absent_node_of_another_launcher_may_return(becomes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of its host or of etcd may have cost its lease."""
    monkeypatch.setattr(supervise, "_ALL_ENDED_S", 0.01)
    lost_after_s = 2.0 if becomes == "nothing" else 1000.0
    spec = dataclasses.replace(SPEC, settings={**SPEC.settings, "lost_after_s": lost_after_s})
    etcd, keys = MemoryCoordinator(MemoryStore()), Keys("fit")
    await submit(etcd, spec)
    primary = PrimaryRecord(node="n3-1", term=2, stateful=True, writer="n3-1:1")
    await etcd.txn(Txn(success=(Put(keys.primary(0), primary.to_bytes()),)))
    node = NodeRecord(name="n3", run=spec.run, host="", pid=1, endpoints=(), control="", fingerprint="", lease=0)
    then = {
        "back": Put(keys.node("n3-1"), node.to_bytes()),
        "gone": Put(keys.gone("n3-1"), GoneRecord(reason="killed", writer="launcher").to_bytes()),
    }
    follower, ends = await own_nodes_ended(etcd, spec)
    try:
        await asyncio.sleep(0.1)
        assert not ends.done() and follower.view.running
        if becomes in then:
            await etcd.txn(Txn(success=(then[becomes],)))
        if becomes == "back":
            await asyncio.sleep(0.1)
            assert not ends.done() and follower.view.running
            return
        silent = " or was silent for 2 s" if becomes == "nothing" else ""
        with pytest.raises(JobFailed, match=f"every node has ended{silent}, no node is left to go on"):
            await asyncio.wait_for(ends, 30)
    finally:
        ends.cancel()
        await follower.stop()


def test_failure_shows_the_last_logs() -> None:
    codes = {f"n{number}": 1 for number in range(1, 13)}
    nodes: Any = SimpleNamespace(codes=lambda: codes, deaths=dict, log_tail=lambda name: f"{name} says why")
    shown = supervise._log_tails(nodes)
    assert "n12 says why" in shown and "n5 says why" in shown and "n4 says why" not in shown
    assert shown.endswith("--- and 4 before")


def test_failure_shows_no_logs_of_nodes_that_left() -> None:
    """In good order, and perhaps hours before the others died."""
    codes, killed = {"n1": 0, "n2": 0, "n3": -9}, {"n2": GoneRecord(reason="x"), "n3": GoneRecord(reason="y")}
    nodes: Any = SimpleNamespace(codes=lambda: codes, deaths=lambda: killed, log_tail=lambda name: f"{name} says why")
    shown = supervise._log_tails(nodes)
    assert "n3 says why" in shown and "n2 says why" in shown and "n1" not in shown


@pytest.mark.parametrize(
    ("script", "code_s", "ends"),
    [("""trap '' TERM; touch "$0"; sleep 0.6; exit 0""", 60.0, 0), (_NEVER_LEAVES, 0.1, -signal.SIGKILL)],
)
async def test_finished_job_waits_for_teardown(
    script: str,
    code_s: float,
    ends: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Scripted, "script", script)
    monkeypatch.setattr("taskgraph.launch.local._RETRY_S", 0.02)
    teardown = lastwords.LastCalls((RunningCode("teardown", 3, 9),), True)
    monkeypatch.setattr(lastwords, "read", lambda folder: teardown)
    nodes = Scripted(ENTRY, MemoryCoordinator(MemoryStore()), Runtime(tmp_path))
    await nodes.start(1)
    try:
        async with asyncio.timeout(30):
            await nodes.wait_to_end(0.05, code_s)
    finally:
        await nodes.stop(0.0, tell=False)
    assert nodes.codes() == {"n1": ends}
    said = ["node n1 has not ended with the job, and is killed while it runs 'teardown' of task 3"]
    assert [record.message for record in caplog.records] == (said if ends else [])


@pytest.mark.parametrize("registered", [False, True])
async def test_node_that_still_starts_at_the_end(
    registered: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """To kill it is no alarm: it has taken no part in the job."""
    monkeypatch.setattr(Scripted, "script", """touch "$0"; sleep 60""")
    monkeypatch.setattr("taskgraph.launch.local._RETRY_S", 0.02)
    monkeypatch.setattr("taskgraph.launch.local._KEY_LOOK_S", 0.01)
    coordinator = MemoryCoordinator(MemoryStore())
    nodes = Scripted(ENTRY, coordinator, Runtime(tmp_path))
    caplog.set_level("INFO", "taskgraph")
    await nodes.start(1)
    try:
        if registered:
            (entry,) = nodes._processes.values()
            await coordinator.txn(Txn(success=(Put(nodes._keys.node(entry.node_id), b"x"),)))
        async with asyncio.timeout(30):
            await nodes.wait_to_end(0.1, 0.1)
    finally:
        await nodes.stop(0.0, tell=False)
    said = "has not ended with the job, and is killed" if registered else "was still starting when the job ended"
    level = "WARNING" if registered else "INFO"
    assert (caplog.records[0].levelname, caplog.records[0].message) == (level, f"node n1 {said}")


@pytest.mark.parametrize(("script", "how"), [("kill -9 $$", "was killed by SIGKILL"), ("exit 3", "exited with code 3")])
async def test_death_in_teardown_is_reported(
    script: str, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Scripted, "script", f"""touch "$0"; {script}""")
    teardown = lastwords.LastCalls((RunningCode("teardown", 3, 9),), False)
    monkeypatch.setattr(lastwords, "read", lambda folder: teardown)
    nodes = Scripted(ENTRY, MemoryCoordinator(MemoryStore()), Runtime(tmp_path))
    await nodes.start(1)
    try:
        await nodes.wait_to_end(5.0, 5.0)
    finally:
        await nodes.stop(0.0, tell=False)
    said = f"node n1 {how} while it ran 'teardown' of task 3: what that was to save may not be there"
    assert [record.message for record in caplog.records] == [said]


@pytest.mark.parametrize(
    ("finished", "says"),
    [(False, "no epoch can commit"), (True, "the results, of a job that had finished, cannot be collected")],
)
async def test_end_of_etcd_says_what_is_lost(finished: bool, says: str) -> None:

    async def ended() -> str:
        return "was killed by SIGKILL"

    job = supervisor(finished=finished)
    job._follower.resume_hint = lambda before: ""  # type: ignore[method-assign, assignment]
    with pytest.raises(JobFailed, match=f"its embedded etcd has ended, so that {says}. It was killed by SIGKILL"):
        await job._fail_without_etcd(ended)
