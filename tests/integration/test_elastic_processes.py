"""Elastic jobs on real processes with real signals: workers die, leave, freeze and join, and the value has the same
bits."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli, Command
from processes_kit import becomes, stop

import taskgraph as tg
from taskgraph.driver.loading import load_driver

DRIVER = str(Path(__file__).parent / "drivers" / "elastic_fit.py")
CRASH = Path(__file__).parent / "drivers" / "elastic_crash.py"
UNFINISHED = Path(__file__).parent / "drivers" / "elastic_unfinished.py"


@pytest.fixture(scope="module")
def calm() -> Any:
    """What it returns on one worker in one process."""
    job: Any = load_driver(DRIVER)
    return json.loads(tg.run(job(pause_s=0.0), nodes=0, timeout_s=60).to_json())["values"]


async def at_gate(cli: Cli, nodes: int, *options: str) -> Command:
    """A run whose workers compute parts of step 5, until `cli.open` is called."""
    gate = ("-o", f"gate={cli.gate}", "-o", f"hurry={cli.root / 'hurry'}", *options)
    run = await cli.start("run", DRIVER, "--nodes", str(nodes), "--json", *gate)
    await becomes(lambda: len(list(cli.root.glob("gate-n*"))) == nodes)
    return run


def be_quick(cli: Cli) -> None:
    """Parts take no time from now on: nothing has to happen before the end any longer."""
    (cli.root / "hurry").touch()


async def pid_of(cli: Cli, node: str) -> int:
    nodes = json.loads((await cli("status", "fit", "--json")).out)["nodes"]
    (pid,) = [known["pid"] for known in (nodes.values() if isinstance(nodes, dict) else nodes) if known["name"] == node]
    return int(pid)


async def value_of(run: Command) -> Any:
    done = await run.done(60.0)
    assert done.code == 0, done.err
    return json.loads(done.out.splitlines()[-1])["values"]


@pytest.mark.smoke
async def test_workers_die_and_join(cli: Cli, calm: Any) -> None:
    run = await at_gate(cli, 3, "-o", "pause_s=0.05")
    assert "give --node NAME" in (await cli("kill", "fit", "--task", "0")).err
    killed = await cli("kill", "fit", "--node", "n2")
    assert killed.out.startswith("sent SIGKILL to n2 ") and killed.out.endswith(", one of 3 workers\n")
    await run.until("n2 died (SIGKILL): n1 n3 go on; next step after")
    launch = await cli.start("launch", "fit", "--nodes", "1")
    await cli.registered("fit", "n4")
    cli.open()
    await launch.until("n4 joined after")
    assert (await cli("kill", "fit", "--node", "n1")).code == 0
    be_quick(cli)
    assert await value_of(run) == calm
    assert (await launch.done()).code == 0
    await cli.nothing_left()


async def test_worker_drains(cli: Cli, calm: Any) -> None:
    run = await at_gate(cli, 2)
    assert (await cli("drain", "fit", "--node", "n1")).code == 0
    await run.until("n1 leaves")
    be_quick(cli)
    cli.open()
    assert await value_of(run) == calm
    await cli.nothing_left()


async def test_only_worker_drains_once_another_has_the_state(cli: Cli, calm: Any) -> None:
    run = await at_gate(cli, 1, "-o", "pause_s=0.02")
    drained = await cli("drain", "fit", "--node", "n1")
    assert "leaves once another worker has the state" in drained.out
    assert (
        "n1 leaves once another worker has the state: `taskgraph launch`" in (await cli("status", "fit", "--json")).out
    )
    launch = await cli.start("launch", "fit", "--nodes", "1")
    await cli.registered("fit", "n2")
    cli.open()
    await launch.until("n2 joined after")
    be_quick(cli)
    assert await value_of(run) == calm
    done = await launch.done()
    assert done.code == 0 and "goes on" not in done.err
    await cli.nothing_left()


async def test_frozen_worker_enters_again(cli: Cli, calm: Any) -> None:
    run = await at_gate(cli, 3, "-o", "pause_s=0.05")
    pid = await pid_of(cli, "n2")
    stop(pid)
    try:
        await run.until("n2 does not answer")
        cli.open()
    finally:
        os.kill(pid, signal.SIGCONT)
    await run.until("n2 joined after")
    be_quick(cli)
    assert await value_of(run) == calm
    await cli.nothing_left()


async def test_worker_that_computes_something_else_enters_again(cli: Cli, calm: Any) -> None:
    run = await at_gate(cli, 3, "-o", "pause_s=0.02", "-o", "wrong=n2")
    cli.open()
    await run.until("n2 was excluded, since it differs from the other workers: it copies the state, and enters again")
    await run.until("n2 joined after")
    be_quick(cli)
    assert await value_of(run) == calm
    await cli.nothing_left()


async def test_trace_shows_steps_and_a_death(cli: Cli) -> None:
    run = await at_gate(cli, 2)
    tracing = await cli.start("trace", "fit", "--steps", "8", "-o", "t.json")
    await tracing.until("tracing steps 6 to 13 on 2 nodes")
    assert (await cli("kill", "fit", "--node", "n2")).code == 0
    be_quick(cli)
    cli.open()
    done = await tracing.done()
    assert done.code == 0 and "t.json: steps 6 to 13, of job fit: " in done.out, done.err
    assert "missing: node n2: what it did from step 5 on: " in done.err
    assert (await run.done(60.0)).code == 0
    whole = json.loads((cli.cwd / "t.json").read_text())
    about, events = whole["otherData"], whole["traceEvents"]
    assert (about["first_step"], about["last_step"]) == (6, 13)
    spans = [e for e in events if e["ph"] == "X"]
    steps = {
        name: {s["args"]["step"] for s in spans if s["name"] == name} for name in ("part 7", "your code", "step 9")
    }
    assert steps == {"part 7": {*range(6, 14)}, "your code": {*range(6, 14)}, "step 9": {9}}
    (change,) = [s for s in spans if s["name"] == "change to view 1: n1"]
    assert any(e["ph"] == "i" and e["name"] == "lost" and e["ts"] < change["ts"] for e in events)
    await cli.nothing_left()


async def test_commands_that_look(cli: Cli) -> None:
    run = await at_gate(cli, 2)
    status = await cli("status", "fit")
    assert status.out.splitlines()[-1].startswith("more: --json; logs:"), status.out
    refused = await cli("status", "fit", "--tasks")
    assert refused.code == 2 and "the workers of an elastic job have no tasks" in refused.err
    refused = await cli("kill", "fit", "--task", "0")
    assert refused.code == 2 and "give --node NAME" in refused.err
    be_quick(cli)
    cli.open()
    assert (await run.done(60.0)).code == 0
    printed = await cli("result", "fit", "--json")
    assert json.loads(printed.out)["values"].keys() == {"0"}
    await cli.nothing_left()


@pytest.mark.slow
async def test_code_that_ends_all_workers_fails_the_job(cli: Cli, tmp_path: Path) -> None:
    done = await cli("run", str(CRASH), "--nodes", "1", "--replace", "-o", f"checkpoint=file://{tmp_path}/kept")
    assert done.code == 1
    said = r"all workers have ended 2 times \(fatal_deaths=2\) before the job got past sum ([1-3]), and would again: n"
    assert (found := re.search(said, done.err)) is not None, done.err
    assert f"its checkpoint of sum {found[1]} is complete" in done.err


async def test_run_without_final_manifest_is_resumed(cli: Cli, tmp_path: Path) -> None:
    """The only worker dies after etcd, which ends with the run, names a checkpoint, before its final manifest."""

    async def values_of(where: str, *options: str) -> tuple[Any, str]:
        done = await cli("run", str(UNFINISHED), "--json", "-o", f"checkpoint=file://{tmp_path}/{where}", *options)
        return json.loads(done.out.splitlines()[-1]).get("values"), done.err

    values, said = await values_of("kept", "--nodes", "1", "-o", "dies=yes")
    assert values is None and "its checkpoint of sum " in said and " is complete: go on from there" in said
    resumed, said = await values_of("kept", "--nodes", "2", "--resume")
    assert "the job goes on from the checkpoint of sum " in said
    calm, _ = await values_of("calm", "--nodes", "0")
    assert resumed == calm
