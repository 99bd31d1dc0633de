"""The examples on real node processes and a real etcd: the same numbers on any number of nodes, whatever is killed.

What is killed is killed as a user would: `taskgraph kill`, from another process, while the job runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import taskgraph as tg
from taskgraph.cli import main
from taskgraph.driver.loading import load_driver

ROOT = Path(__file__).parents[2]
BOTH_STYLES = ["framework_regression", "framework_regression_events"]
LIMIT_S = 100.0
#: Where a job waits for the next kill, so that it is over neither before the last one nor long after it, however fast
#: the machine is: it goes on a moment before the kill.
HOLDS = (20, 40, 60, 80)
EPOCHS = 100
AHEAD = 16
"""Epochs that a task may be ahead of the commit: fewer than there are from one hold to the next."""

pytestmark = pytest.mark.timeout(300)  # kills wait until the one before was made good


def job(example: str, **options: object) -> tg.Job:
    return load_driver(str(ROOT / "examples" / f"{example}.py"))(**options)


@pytest.mark.parametrize("nodes", [2])
@pytest.mark.parametrize("example", BOTH_STYLES)
def test_regression_on_nodes(example: str, nodes: int) -> None:
    result = tg.run(job(example), nodes=nodes, timeout_s=LIMIT_S)
    assert result.value == [0, 105, 210, 315, 420, 525, 630, 735, 840, 945, 1050]
    assert [report.numbers["value"] for report in result.reports] == result.value
    assert result.epochs == 11


def test_linear_regression_is_the_same_on_any_number_of_nodes() -> None:
    least_squares, result = (tg.run(job("linear_regression"), nodes=nodes, timeout_s=LIMIT_S) for nodes in (1, 3))
    assert least_squares.value["largest relative difference to numpy.linalg.lstsq"] < 1e-6
    assert result.value == least_squares.value
    assert result.reports == least_squares.reports


def test_readmes_program_is_the_same_on_any_number_of_nodes() -> None:
    one, four = (tg.run(job("readme"), nodes=nodes, timeout_s=LIMIT_S) for nodes in (1, 4))
    assert one.value.tobytes() == four.value.tobytes()
    assert one.value == pytest.approx([1.0, 2.0, 3.0])
    assert one.reports == four.reports


def test_the_plate_is_the_one_of_the_loop_whatever_is_killed() -> None:
    driver = load_driver(str(ROOT / "examples" / "heat.py"))
    alone = driver.__wrapped__.__globals__["alone"]
    result = tg.run(driver(rows=2, cols=3, size=50, tolerance=0.2), nodes=4, timeout_s=LIMIT_S)
    blocks = [result.values[task] for task in range(6)]
    assert (np.block([blocks[:3], blocks[3:]]) == alone(50, sweeps=result.epochs)).all()


# -- with kills -------------------------------------------------------------------------------------------------------


def taskgraph(*arguments: str) -> str:
    """Runs the command line to its end; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "taskgraph", *arguments], capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT
    )
    assert done.returncode == 0, f"taskgraph {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout


def asked(*arguments: str) -> tuple[int, str]:
    """The same in this process, for what is asked again and again: another takes seconds to start on a busy machine."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = main(arguments)
    return code, out.getvalue() or err.getvalue()


def living(status: dict[str, Any]) -> set[str]:
    """The nodes that answer: one that was killed just now may be among the others for a moment."""
    return {node["name"] for node in status["nodes"] if node["answers"]}


def tells(story: str, killed: str) -> bool:
    """Whether a story says that the node is lost to which `taskgraph kill` says it sent a signal.

    Who tells it is whoever knows it first: a node whose connection broke, or the launcher, which knows what it ran.
    """
    name = killed.removeprefix("sent SIGKILL to ").split()[0]
    return f"{name} died" in story or f"{name} was killed by SIGKILL while it ran " in story


class Running:
    """`taskgraph run` in a process of its own."""

    def __init__(self, name: str, process: subprocess.Popen[str], holds: list[Path]) -> None:
        self.name = name
        self.process = process
        self.holds = holds
        self.killed: list[str] = []

    def until(self, what: str, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Asks for the status until `reached`; a job that ended before is the test's mistake: it was too short."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            assert self.process.poll() is None, f"the job ended before {what}: {self.process.communicate()}"
            code, said = asked("status", self.name, "--json")
            if code == 0 and reached(status := json.loads(said)):
                return status
            assert time.monotonic() < deadline, f"no {what} within {LIMIT_S:g} s: {said}"
            time.sleep(0.1)

    def ready(self, backups: int) -> dict[str, Any]:
        """Waits until the job is held again and every task has its backups, and lets it go on."""
        hold = self.holds.pop(0)
        epoch = int(hold.name.partition("epoch=")[2])
        status = self.until(
            f"{backups} backups for every task, in epoch {epoch}",
            lambda status: (
                # It may be held with epochs before this one that were to be committed with it.
                epoch - AHEAD <= status["epoch"] <= epoch
                and all(len(living(status) & set(task["in_sync"])) == backups + 1 for task in status["tasks"])
            ),
        )
        hold.unlink()
        return status

    def kill(self, *whom: str, backups: int) -> None:
        self.ready(backups)
        self.killed.append(taskgraph("kill", self.name, *whom))

    def result(self, backups: int) -> dict[str, Any]:
        """Lets the job go on to its end, once what was killed last was made good and told: a loss of its last moment is
        no loss to anybody, and the story need not tell of it."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            _, story = asked("events", self.name)
            untold = [killed for killed in self.killed if not tells(story, killed)]
            if not untold:
                break
            assert time.monotonic() < deadline, f"nobody told that {untold} had an effect"
            time.sleep(0.1)
        self.ready(backups)
        for hold in self.holds:
            hold.unlink()
        out, err = self.process.communicate(timeout=LIMIT_S)
        assert self.process.returncode == 0, err
        self.story = err
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found


@contextmanager
def running(example: str, nodes: int, holds: Path, *options: str) -> Iterator[Running]:
    """`holds`: an empty folder."""
    files = [holds / f"hold,commit,epoch={epoch}" for epoch in HOLDS]
    for file in files:
        file.touch()
    name = f"{example}-{os.getpid()}-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "taskgraph", "run", f"examples/{example}.py", "--name", name, "--json"]
    command += ["--set", f"epochs_ahead={AHEAD}"]
    command += ["--nodes", str(nodes), *(part for option in options for part in ("-o", option))]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TASKGRAPH_INJECT": str(holds)},
    )
    try:
        yield Running(name, process, files)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(LIMIT_S)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.mark.parametrize(
    ("example", "endless"),
    [("readme", {}), ("gpu_kmeans", {"tolerance": -1.0, "points": 20_000})],
)
def test_a_fit_is_the_same_to_the_last_bit_when_primaries_and_a_backup_are_killed(
    example: str, endless: dict[str, float], tmp_path: Path
) -> None:
    options = {"epochs": EPOCHS, **endless}
    undisturbed = json.loads(tg.run(job(example, **options), nodes=2, timeout_s=LIMIT_S).to_json())
    with running(example, 5, tmp_path, *(f"{name}={value}" for name, value in options.items())) as killed:
        killed.kill("--task", "0", backups=1)
        killed.kill("--task", "5", backups=1)
        killed.kill("--task", "3", "--backup", backups=1)
        result = killed.result(backups=1)
    assert result["failovers"] >= 2
    assert result["epochs"] == EPOCHS
    assert result["values"] == undisturbed["values"]
    assert result["reports"] == undisturbed["reports"]
