"""Jobs on a real Slurm of this host, submitted and watched as a user does it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from slurm_kit import GRACE_S, Slurm, why_not

from taskgraph.cli import main
from taskgraph.coordination.embedded import EmbeddedEtcd

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"), pytest.mark.timeout(600)]

DRIVERS = Path(__file__).parent / "drivers"
GRAPH = str(DRIVERS / "steady.py")
PACED = (GRAPH, "-o", "epochs=1000000", "-o", "pace_s=0.4")
ELASTIC = (str(DRIVERS / "elastic_fit.py"), "-o", "passes=90", "-o", "pause_s=0.1")
PREEMPTIBLE = ("--partition", "core", "--nodes", "1", "--extra-priority", "low", "--extra-nodes")


class Site:
    """A cluster with its login node: a working directory that all machines see."""

    def __init__(self, slurm: Slurm, folder: Path, runtime: Path) -> None:
        self.slurm = slurm
        self.folder = folder
        self._env = {**slurm.env, "TASKGRAPH_RUNTIME_DIR": str(runtime)}

    def call(self, *words: str, fails: bool = False) -> str:
        """Runs `taskgraph ...`, in this process, which has loaded what it needs; returns what it prints."""
        out, complaint = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, self._env),
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(complaint),
        ):
            code = main(words)
        assert fails == (code != 0), f"{words}: {out.getvalue()}{complaint.getvalue()}"
        return complaint.getvalue() if fails else out.getvalue()

    def submit(self, name: str, *words: str) -> None:
        """Submits a job whose nodes leave within Slurm's grace time, and which lasts until its end is asked for."""
        finish = "finish" if GRAPH in words else "hurry"
        self.call(
            "submit",
            *words,
            "-o",
            f"{finish}={self.folder}/{name}.finish",
            "--set",
            f"drain_s={GRACE_S - 3}",
            "--name",
            name,
            "--on",
            "slurm",
            "--listen",
            "127.0.0.1",
        )

    def finishes(self, name: str) -> None:
        """Lets a job finish. It has the values of one without faults, in one process."""
        (self.folder / f"{name}.finish").touch()
        self.slurm.until((self.folder / f"{name}.taskgraph" / "ended").exists, bool)
        result = json.loads(self.call("result", name, "--json"))
        graph = (GRAPH, "-o", f"epochs={result['epochs']}", "-o", "pace_s=0")
        job = (*ELASTIC, "-o", f"hurry={self.folder}") if name == "elastic" else graph
        alone = self.call("run", *job, "--nodes", "0", "--json", "--name", "alone")
        assert result["values"] == json.loads(alone.splitlines()[-1])["values"]

    def status(self, name: str) -> dict[str, Any]:
        """Returns what `status --json` says; {}: the job is not there yet, or its etcd is not."""
        try:
            found: dict[str, Any] = json.loads(self.call("status", name, "--json"))
        except AssertionError:
            return {}
        return found

    def patch(self, *lines: str) -> str:
        """Writes a patch file; returns its path."""
        path = self.folder / "patch"
        path.write_text("".join(f"{line}\n" for line in lines))
        return str(path)

    def until(self, name: str, fits: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        return self.slurm.until(lambda: self.status(name), fits)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.call("events", name, "--json").splitlines()]

    def kinds(self, name: str) -> set[str]:
        """Returns the kinds of the events that the companion wrote; none while the job's etcd is away."""
        try:
            return {event["kind"] for event in self.events(name) if event["node"] == "slurm"}
        except AssertionError:
            return set()

    def values(self, name: str) -> Any:
        return json.loads(self.call("result", name, "--json"))["values"]


def names(status: dict[str, Any]) -> set[str]:
    """Returns the names of the job's nodes."""
    return {node["name"] for node in status.get("nodes", ())}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    slurm = Slurm()
    with tempfile.TemporaryDirectory(prefix="tg-rt-") as runtime:
        try:
            slurm.start()
            made = Site(slurm, tmp_path_factory.mktemp("50% of #3"), Path(runtime))
            kept = (made.folder / "checkpoints").as_uri()  # waits for Slurm, while other tests run
            one = ("--time", "1", "--partition", "core", "--nodes", "1", "--insecure-listen")
            made.submit("timed", *PACED, "-o", f"checkpoint={kept}", *one)
            yield made
        finally:
            slurm.stop()


def begun(status: dict[str, Any]) -> bool:
    return bool(status) and status["state"] == "running" and bool(status.get("epoch") or status.get("step"))


def with_nodes(count: int) -> Callable[[dict[str, Any]], bool]:
    return lambda status: begun(status) and len(status["nodes"]) == count


def backed_up(status: dict[str, Any]) -> bool:
    return with_nodes(2)(status) and all(len(task["in_sync"]) == 2 for task in status["tasks"])


@pytest.fixture(scope="module")
def lost_at(site: Site) -> int:
    """Kills the machine of a job's first element, which has its etcd; returns the job's epoch before."""
    alone = site.patch("#SBATCH --exclusive")
    site.submit("lost", *PACED, "--nodes", "2", "--partition", "spare", "--patch", alone)
    before: int = site.until("lost", backed_up)["epoch"]
    site.slurm.kill_machine(site.slurm.machine("lost", 0))
    return before


@pytest.mark.usefixtures("lost_at")  # Slurm takes its time for that, too
def test_preempted_jobs_shrink_and_grow_and_compute_the_same(site: Site, embedded_etcd: EmbeddedEtcd) -> None:
    slurm = site.slurm
    site.submit("graph", *PACED, *PREEMPTIBLE, "2")
    given = ("--etcd", embedded_etcd.endpoint, "--insecure-listen")
    site.submit("elastic", *ELASTIC, *given, *PREEMPTIBLE, "1")
    site.until("graph", with_nodes(3))
    site.until("elastic", with_nodes(2))

    # A job of higher priority takes all machines of the extra nodes, and keeps them until the file is there.
    over = slurm.folder / "over"
    script = f"until [ -e {over} ]; do sleep 0.2; done"
    slurm.run("sbatch", "--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap", script)
    at = site.until("graph", with_nodes(1))["epoch"]
    site.until("graph", lambda status: status["epoch"] > at + 2)
    site.until("elastic", with_nodes(1))
    over.touch()
    site.until("graph", with_nodes(3))
    site.until("elastic", with_nodes(2))
    site.finishes("elastic")

    # The user changes their number.
    assert "1 more" in site.call("scale", "graph", "4")
    site.until("graph", with_nodes(4))
    assert "3 hands over" in site.call("scale", "graph", "3")
    slurm.run("scancel", f"{slurm.arrays('graph')[1]}_1")  # what a user may do without us
    slurm.until(partial(slurm.elements, "graph"), lambda there: there == {"0": "RUNNING", "2": "RUNNING"})
    assert "shutdown" in site.call("scale", "graph", "0", fails=True)
    assert "taskgraph.events" in site.call("logs", "graph", "--node", "0.0")
    assert "runs already" in site.call("submit", *PACED, "--name", "graph", "--on", "slurm", fails=True)
    slurm.until(partial(site.kinds, "graph"), lambda kinds: kinds == {"preempted", "scaled", "cancelled"})

    site.finishes("graph")
    for name in ("graph", "elastic"):
        assert "rolled back" not in {event["kind"] for event in site.events(name)}
        assert "preempted" in site.kinds(name)
    slurm.until(partial(slurm.elements, "graph"), lambda there: not there)
    assert site.status("graph")["state"] == "finished", "although its etcd is gone"
    assert "has ended (finished)" in site.call("kill", "graph", "--task", "0", fails=True)
    assert json.loads((site.folder / "graph.taskgraph" / "result.json").read_text())["values"] == site.values("graph")


def test_job_outlives_the_machine_of_its_etcd(site: Site, lost_at: int) -> None:
    status = site.until("lost", lambda status: "0.1" in names(status))
    assert status["epoch"] >= lost_at
    site.slurm.until(partial(site.kinds, "lost"), bool)
    site.finishes("lost")
    assert "rolled back" not in {event["kind"] for event in site.events("lost")}


def test_job_outlives_its_time_limit(site: Site) -> None:
    """Its only node is queued again half a minute after its start, and goes on from the checkpoint."""
    slurm = site.slurm
    slurm.until(partial(site.kinds, "timed"), lambda kinds: "timeout" in kinds)
    site.finishes("timed")
    values = site.values("timed")
    for _ in range(2):  # the second one finds nothing to do
        site.call("shutdown", "timed")
    assert site.values("timed") == values
    assert "is forgotten" in site.call("forget", "timed")
    assert "No job 'timed'" in site.call("status", "timed", fails=True)


def test_shutdown_leaves_nothing_in_the_queue(site: Site) -> None:
    site.call("run", *PACED, "-o", f"finish={site.folder}", "--nodes", "1", "--name", "early")  # a trial before
    site.submit("early", *PACED, "--nodes", "9")
    assert site.slurm.elements("early")
    assert not site.status("early") or site.status("early")["state"] == "running", "not what is known of the trial"
    assert "has ended" not in site.call("kill", "early", "--node", "none", fails=True)
    site.slurm.run("scancel", "--name", "early")
    site.slurm.until(partial(site.slurm.elements, "early"), lambda there: not there)
    assert "all were cancelled" in site.call("status", "early", fails=True)
    site.call("shutdown", "early")  # perhaps before its etcd ran
    assert not site.slurm.elements("early")
