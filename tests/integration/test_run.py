"""`tg.run` from a program: its result, its errors, and being cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_kit import TIMEOUTS_S

import taskgraph as tg
from taskgraph.coordination.embedded import EmbeddedEtcd
from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.driver.loading import load_driver
from taskgraph.driver.spec import JobSpec
from taskgraph.launch.collector import Collector
from taskgraph.launch.local import LocalNodes
from taskgraph.launch.runtime import Runtime
from taskgraph.launch.supervise import FrontEndHooks
from taskgraph.observe.events import Event
from taskgraph.protocol.keys import Keys

DRIVER = str(Path(__file__).parent / "drivers" / "sums.py")
VALUES = [0, 21, 42, 63, 84, 105]


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """A runtime directory of our own; at the end nothing of a running job is in it."""
    root = tempfile.mkdtemp(prefix="tg-")  # short, for the paths of sockets
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", root)
    found = Runtime()
    yield found
    left = [path for path in found.root.rglob("*") if not path.is_dir() and not {"finished", "locks"} & {*path.parts}]
    shutil.rmtree(root)
    assert not left


def sums(**options: object) -> tg.Job:
    return load_driver(DRIVER)(**options)


@pytest.mark.smoke
def test_a_run_returns_what_the_tasks_computed() -> None:
    result = tg.run(sums(lease_ttl_s=60.0), nodes=2, timeout_s=100)
    assert result.value == VALUES and type(result.value) is list
    assert [report.numbers["value"] for report in result.reports] == VALUES
    assert (result.name, result.status, result.epochs, result.failovers, result.restarts) == (
        "sums",
        "finished",
        6,
        0,
        0,
    )
    later = tg.result("sums")
    assert later.value == VALUES and later.reports == result.reports and later.epochs == 6


@pytest.mark.smoke
def test_a_failure_carries_the_users_own_traceback() -> None:
    with pytest.raises(tg.JobFailed) as caught:
        tg.run(sums(fail_at=3), nodes=2, timeout_s=100)
    error = caught.value
    assert (error.job, error.task, error.epoch, error.where) == ("sums", 2, 3, "add")
    assert error.traceback_text.rstrip().endswith("ZeroDivisionError: one shard is empty")
    assert "in add" in error.traceback_text and DRIVER in error.traceback_text
    with pytest.raises(tg.JobFailed, match="one shard is empty"):
        tg.result("sums")


@pytest.mark.parametrize("fails", [False, True])
def test_result_returns_if_it_cannot_be_kept(fails: bool, runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    runtime.root.mkdir(mode=0o700)
    (runtime.root / "finished").touch()  # a full disk refuses what is written there, too
    if fails:
        with pytest.raises(tg.JobFailed, match="one shard is empty"):
            tg.run(sums(fail_at=3), nodes=1, timeout_s=100)
    else:
        assert tg.run(sums(), nodes=1, timeout_s=100).value == VALUES
    assert [record.message for record in caplog.records if "not kept on this host" in record.message]
    assert str(runtime.root / "finished") in caplog.text


def test_a_timeout_names_what_was_waited_for() -> None:
    for timeout_s in TIMEOUTS_S:
        with pytest.raises(tg.JobTimeout, match=f"did not end within {timeout_s} s; ") as caught:
            tg.run(sums(pause_at=1, gate="/nowhere"), nodes=1, timeout_s=timeout_s)
        if "record" in str(caught.value):
            break
    assert caught.value.job == "sums"
    said = rf"did not end within {timeout_s} s; it waits: .*record"
    assert re.search(said, str(caught.value))
    with pytest.raises(tg.JobFailed, match=said) as kept:
        tg.result("sums")
    assert not isinstance(kept.value, tg.JobCancelled), "nobody ended it"


async def test_run_where_a_loop_runs_says_what_to_write() -> None:
    with pytest.raises(tg.JobError, match=r"await tg\.arun"):
        tg.run(sums())
    with pytest.raises(tg.JobError, match="to_thread"):
        tg.result("sums", etcd="127.0.0.1:1")
    result = await tg.arun(sums(), nodes=1, timeout_s=100)
    assert result.value == VALUES


@pytest.mark.smoke
async def test_invalid_run_arguments_are_refused() -> None:
    with pytest.raises(tg.JobError, match="keeps no checkpoints"):
        await tg.arun(sums(), resume=True)
    for unknown in ("yes", 1, None):
        with pytest.raises(tg.JobError, match="must be True, False, or 'changed'"):
            await tg.arun(sums(), resume=unknown)  # type: ignore[arg-type]
    with pytest.raises(tg.JobError, match="nodes=-2"):
        await tg.arun(sums(), nodes=-2)


@pytest.mark.parametrize("nodes", ["4", 2.5, None, True])
async def test_nodes_that_are_no_number_are_refused(nodes: Any) -> None:
    with pytest.raises(tg.JobError, match=f"nodes={re.escape(repr(nodes))}: must be an int of at least 1, or 0 for"):
        await tg.arun(sums(), nodes=nodes)


@pytest.mark.parametrize("seconds", ["5", 1j, True])
async def test_a_timeout_that_is_no_number_is_refused(seconds: Any) -> None:
    with pytest.raises(tg.JobError, match=f"timeout_s={re.escape(repr(seconds))}: must be None or a number of seconds"):
        await tg.arun(sums(), nodes=0, timeout_s=seconds)


async def test_an_etcd_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(tg.Unavailable, match=r"127\.0\.0\.1:1"):
        await tg.arun(sums(), nodes=1, etcd="127.0.0.1:1")


def test_job_without_driver_is_refused() -> None:
    with pytest.raises(tg.JobError, match="nodes=0"):
        tg.run(tg.Job(tasks=1, builder=lambda task_id: tg.Task(), epochs=1), nodes=1)


@pytest.mark.smoke
async def test_cancelling_ends_the_job_and_its_processes(runtime: Runtime) -> None:
    began, started, pids = asyncio.Event(), asyncio.Event(), []

    def on_event(event: Event) -> None:
        if event.kind == "began":
            began.set()

    def on_start(follower: Collector, nodes: LocalNodes) -> None:
        pids.extend(nodes.pids().values())
        started.set()

    job = sums(pause_at=1, gate="/nowhere")
    running = asyncio.ensure_future(tg.arun(job, nodes=2, hooks=FrontEndHooks(on_event, on_start)))
    async with asyncio.timeout(100):
        await began.wait()
        await started.wait()  # the launcher may hear of the beginning first
    assert len(pids) == 2 and runtime.find("sums") is not None
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert running.cancelled()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert runtime.find("sums") is None
    kept = runtime.find_finished("sums")
    assert kept is not None and kept.state == "cancelled"
    assert "cancelled" in [event.kind for event in kept.events]


async def test_failed_cleanup_costs_no_result(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """Nor does a runtime directory that is not there any more."""

    def on_start(follower: Collector, nodes: LocalNodes) -> None:
        (entry,) = (runtime.root / "jobs").rglob("*.json")
        entry.unlink()
        entry.mkdir()
        monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", "/nowhere")

    with pytest.MonkeyPatch.context() as monkeypatch:
        result = await tg.arun(sums(), nodes=1, timeout_s=100, hooks=FrontEndHooks(on_start=on_start))
    assert result.value == VALUES
    told = [record.message for record in caplog.records if "cannot be removed" in record.message]
    assert len(told) == 1 and ".json cannot be removed" in told[0]


@pytest.mark.smoke
async def test_job_survives_removed_sockets(runtime: Runtime, tmp_path: Path) -> None:
    """As a cleaner of temporary files does it. Then a node is killed, so that others have to find one another anew."""
    pids: list[int] = []
    told: list[str] = []

    def on_start(follower: Collector, nodes: LocalNodes) -> None:
        pids.extend(nodes.pids().values())

    def on_event(event: Event) -> None:
        if event.kind == "began":
            for folder in (runtime.root / "s").iterdir():
                shutil.rmtree(folder, ignore_errors=True)  # a node makes its own anew meanwhile
        if event.kind == "sockets":
            told.append(event.node)
            if len(told) == 3:
                os.kill(pids[0], signal.SIGKILL)
                (tmp_path / "gate").touch()

    job = sums(pause_at=3, gate=str(tmp_path / "gate"))
    result = await tg.arun(job, nodes=3, timeout_s=100, hooks=FrontEndHooks(on_event, on_start))
    assert result.value == VALUES and result.failovers > 0
    assert sorted(told) == ["n1", "n2", "n3"]


async def test_cancelled_while_it_starts_it_leaves_nothing() -> None:
    for pause_s in (0.0, 0.05, 0.3, 0.6):  # somewhere in the start of etcd, of the job, of its nodes
        running = asyncio.ensure_future(tg.arun(sums(pause_at=0, gate="/nowhere"), nodes=1))
        await asyncio.sleep(pause_s)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert running.cancelled()


async def test_two_that_begin_at_once_cannot_both_run() -> None:
    found = await asyncio.gather(*(tg.arun(sums(), nodes=1, timeout_s=100) for _ in range(2)), return_exceptions=True)
    assert sorted(type(each).__name__ for each in found) == ["JobResult", "JobRunning"]
    assert "another name: --name, or name=... of tg.run" in str(next(e for e in found if isinstance(e, tg.JobRunning)))


async def test_under_another_name_two_of_a_job_run_at_a_time() -> None:
    one, other = await asyncio.gather(tg.arun(sums(), nodes=1), tg.arun(sums(), nodes=1, name="other"))
    assert (one.name, other.name) == ("sums", "other") and one.values == other.values


async def spec_at(endpoint: str) -> JobSpec:
    async with await EtcdCoordinator.connect(endpoint) as etcd:
        found = await etcd.get(Keys("sums").spec)
    assert found is not None
    return JobSpec.from_bytes(found.value)


def test_the_result_of_a_job_on_ones_own_etcd_is_read_there(embedded_etcd: EmbeddedEtcd, runtime: Runtime) -> None:
    tg.run(sums(), nodes=1, etcd=embedded_etcd.endpoint, timeout_s=100)
    assert tg.result("sums", etcd=embedded_etcd.endpoint).value == VALUES
    assert len(asyncio.run(spec_at(embedded_etcd.endpoint)).token_mark) == 16, "nodes with another token wait"
    with pytest.raises(tg.UnknownJob, match="'absent'"):
        tg.result("absent", etcd=embedded_etcd.endpoint)
    with pytest.raises(tg.UnknownJob, match="'absent'"):
        tg.result("absent")


async def test_result_of_a_running_job_is_an_error(embedded_etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    began, gate = asyncio.Event(), tmp_path / "gate"

    def on_event(event: Event) -> None:
        if event.kind == "began":
            began.set()

    job, hooks = sums(pause_at=3, gate=str(gate)), FrontEndHooks(on_event)
    running = asyncio.ensure_future(
        tg.arun(job, nodes=1, etcd=embedded_etcd.endpoint, name="more", timeout_s=100, hooks=hooks)
    )
    await began.wait()
    for etcd in (None, embedded_etcd.endpoint):
        with pytest.raises(tg.JobFailed, match="'more' has not finished: `taskgraph status more`"):
            await asyncio.to_thread(tg.result, "more", etcd)
    gate.touch()
    await running
    assert (await asyncio.to_thread(tg.result, "more", embedded_etcd.endpoint)).value == VALUES


_FORKS = """
import gc, os, signal, sys
import taskgraph as tg
from taskgraph.network import rpc
from taskgraph.driver.loading import load_driver

gc.disable()
job = load_driver(sys.argv[1])(**eval(sys.argv[2]))
try:
    print(tg.run(job, nodes=1, progress=True).epochs)
except tg.JobFailed as error:
    kept = error
    print(error.where)
print(len(rpc.living_channels()), flush=True)
if child := os.fork():
    print(os.waitpid(child, 0)[1])
else:
    signal.alarm(60)
    gc.collect()
    os._exit(0)
"""


@pytest.mark.parametrize(("options", "says"), [({}, "6"), ({"fail_at": 3}, "add")])
def test_children_forked_after_a_run_inherit_nothing(options: dict[str, int], says: str) -> None:
    """They hung in their first garbage collection, at full speed: they inherited a connection in a cycle."""
    command = [sys.executable, "-W", "ignore", "-c", _FORKS, DRIVER, repr(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == [says, "0", "0"], done.stderr
