"""`taskgraph trace` of jobs that run, that lose nodes and get new ones, and that end meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from cli_kit import DRIVER, LIMIT_S, Cli, Command

STEADY = DRIVER.with_name("steady.py")
FAST = Path(__file__).parents[2] / "benchmarks" / "tree.py"
IN_STEP = ("-o", "ahead=0")
"""No task is ahead of the commit: which epoch is traced first can be told in advance."""


class Trace:
    """A trace file, after all that its format asks for was checked."""

    def __init__(self, path: Path) -> None:
        whole = json.loads(path.read_text())
        self.about: dict[str, Any] = whole["otherData"]
        self.events: list[dict[str, Any]] = whole["traceEvents"]
        self.spans = [e for e in self.events if e["ph"] == "X"]
        self.nodes = {e["pid"]: e["args"]["name"] for e in self.events if e["name"] == "process_name"}
        for event in self.events:
            assert event["ph"] in "XMisf" and event["pid"] in self.nodes
            assert event["ph"] == "M" or (event["ts"] >= 0 and isinstance(event["tid"], int))
        self._nests()
        self.arrows = self._arrows()

    def _nests(self) -> None:
        """On one track, spans are within one another or do not touch."""
        tracks = defaultdict(list)
        for span in self.spans:
            tracks[span["pid"], span["tid"]].append((span["ts"], -span["dur"], span["name"]))
        for spans in tracks.values():
            ends: list[float] = []
            for ts, negative, name in sorted(spans):
                while ends and ends[-1] <= ts + 1e-3:
                    ends.pop()
                assert not ends or ts - negative <= ends[-1] + 1e-3, f"{name} at {ts} does not nest"
                ends.append(ts - negative)

    def _arrows(self) -> int:
        """No pull ended before its item was put, on whatever nodes; how many arrows between nodes there are."""
        starts = {e["id"]: e for e in self.events if e["ph"] == "s"}
        finishes = [e for e in self.events if e["ph"] == "f" and e["id"] in starts]
        for finish in finishes:
            assert starts[finish["id"]]["ts"] <= finish["ts"], (starts[finish["id"]], finish)
        return sum(starts[e["id"]]["pid"] != e["pid"] for e in finishes)

    def epochs(self, name: str, **args: int) -> set[int]:
        """Epochs in which a span of that name, with these arguments, is there."""
        wanted = args.items()
        return {s["args"]["epoch"] for s in self.spans if s["name"] == name and wanted <= s["args"].items()}


async def joins(cli: Cli) -> str:
    """The name of a fourth node, once it holds something."""

    def fourth(now: dict[str, Any]) -> set[str]:
        held = {name for task in now["tasks"] for name in task["in_sync"]}
        return held & {node["name"] for node in now["nodes"]} - {"n1", "n2", "n3"}

    (name,) = fourth(await cli.status("steady", lambda now: bool(fourth(now))))
    return name


async def reached(run: Command, epoch: int) -> None:
    """Returns once the run says that it is beyond this epoch."""
    async with asyncio.timeout(LIMIT_S):
        while not (at := re.match(r"epoch (\d+)/", await run.until("epoch "))) or int(at[1]) <= epoch:
            pass


async def test_every_task_of_every_epoch_on_every_node(cli: Cli) -> None:
    run = await cli.start("run", str(STEADY), "--nodes", "3", "-o", "epochs=4000")
    await run.until("the job began")
    done = await cli("trace", "--epochs", "10", "-o", "t.json")
    assert done.code == 0, done.err
    run.interrupt()
    trace = Trace(cli.cwd / "t.json")
    assert "t.json: epochs " in done.out and "spans on 3 nodes, all on one clock" in done.out
    assert sorted(trace.nodes.values()) == ["n1", "n2", "n3"] and trace.about["missing"] == []
    first, last = trace.about["first_epoch"], trace.about["last_epoch"]
    epochs = set(range(first, last + 1))
    assert len(epochs) == 10
    assert {s["args"]["epoch"] for s in trace.spans if "epoch" in s["args"]} == epochs
    for task in range(7):
        relays = ("publish", "update") if task == 0 else ("relay", "add")
        for name in ("epoch", "compose", *relays, "snapshot", "done"):
            assert trace.epochs(name, task=task) == epochs, f"{name} of task {task}"
        for name in ("held by backups", "offer", "hold"):  # of boundaries that wait or travel together one is told
            assert set() < trace.epochs(name, task=task) <= epochs, f"{name} of task {task}"
        if task:
            assert trace.epochs("pull theta", task=task) == epochs
        if task > 2:  # what a leaf adds, it has since it relayed it
            assert trace.epochs("waits for add's items", task=task) == set()
    # On a busy machine what a task takes may be there by then: the root is ahead of it, or its own turn comes late.
    waits = [s for s in trace.spans if s["name"].startswith("waits for ")]
    assert {s["name"].split()[2] for s in waits} <= {"update's", "relay's", "add's"} and waits
    assert trace.epochs("commit") == epochs
    assert trace.epochs("commit awaited") <= epochs, "only of who waited for it"
    assert trace.arrows > 10
    # The same clock, seen from both ends: nobody holds a boundary before it is offered, or after that was acknowledged.
    offers = {(s["args"]["epoch"], s["args"]["task"]): s for s in trace.spans if s["name"] == "offer"}
    holds = [s for s in trace.spans if s["name"] == "hold"]
    for hold in holds:
        offer = offers[hold["args"]["epoch"], hold["args"]["task"]]
        assert offer["ts"] <= hold["ts"] and hold["ts"] + hold["dur"] <= offer["ts"] + offer["dur"]
    for node in trace.about["nodes"]:
        assert node["shares_our_clock"] and abs(node["clock_offset_us"]) <= node["clock_within_us"]
    await run.done()
    await cli.nothing_left()


async def test_a_node_that_is_killed_and_one_that_joins_are_named(cli: Cli) -> None:
    run = await cli.start("run", str(STEADY), "--nodes", "3", "-o", "epochs=100000", "-o", "pace_s=0.1")
    await run.until("the job began")
    tracing = await cli.start("trace", "--epochs", "90000", "--every", "1", "-o", "t.json")
    begins = re.search(r"tracing epochs (\d+) ", await tracing.until("tracing epochs"))
    assert begins is not None
    await reached(run, int(begins[1]))  # what happens before is not in the trace
    assert (await cli("kill", "--node", "n2")).code == 0
    await run.until(" moved to ")
    launched = await cli.start("launch", "steady", "--nodes", "1")
    joined_node = await joins(cli)
    tracing.interrupt()
    done = await tracing.done()
    assert done.code == 130, done.err
    run.interrupt()
    await run.done()
    await launched.done()
    trace = Trace(cli.cwd / "t.json")
    first, last = trace.about["first_epoch"], trace.about["last_epoch"]
    assert trace.epochs("epoch") >= set(range(first, last + 1)), "the others tell all of theirs"
    assert f"missing: epochs {last + 1} to {first + 89999}" in done.err
    killed = next(n for n in trace.about["nodes"] if n["name"] == "n2")
    assert killed["missing"].startswith("what it did from epoch ")
    assert f"missing: node n2: {killed['missing']}" in done.err
    joined = [n for n in trace.about["nodes"] if "it joined at epoch" in n["missing"]]
    assert [n["name"] for n in joined] == [joined_node] and len(trace.nodes) == 4
    taken = [s for s in trace.spans if s["name"] == "takeover"]
    told = [e for e in trace.events if e["ph"] == "i" and e["name"] == "takeover"]
    assert taken and {s["args"]["task"] for s in taken} == {e["args"]["task"] for e in told}
    assert all(trace.nodes[s["pid"]] != "n2" for s in taken)


async def test_of_a_fast_job_a_long_trace_has_whole_epochs_some_apart(cli: Cli) -> None:
    run = await cli.start("run", str(FAST), "--nodes", "3", "-o", "epochs=10000000")
    await run.until("the job began")
    while True:
        tracing = await cli.start("trace", "--epochs", "1000000", "-o", "t.json")
        line = await tracing.until("tracing epochs")
        if found := re.search(r"tracing epochs (\d+) to \d+, one of (\d+)", line):
            break
        tracing.interrupt()  # the job was slow when it was looked at: others had the processors
        await tracing.done()
    await reached(run, int(found[1]) + 6 * int(found[2]))
    tracing.interrupt()
    done = await tracing.done()
    assert done.code == 130, done.err
    run.interrupt()
    await run.done()
    trace = Trace(cli.cwd / "t.json")
    first, last, every = (trace.about[key] for key in ("first_epoch", "last_epoch", "every"))
    assert every > 1 and f", one of {every}" in done.err and f", one of {every}, of job tree" in done.out
    epochs = set(range(first, last + 1, every))
    assert len(epochs) > 3, "however busy the machine is"
    for task in range(7):
        for name in ("epoch", "done", *(("snapshot",) if task == 0 else ())):
            found = trace.epochs(name, task=task)
            assert epochs <= found and not any(epoch % every for epoch in found), f"{name} of task {task}"
    for name in ("held by backups", "offer", "hold"):  # of those that travel together one is told
        found = trace.epochs(name, task=0)
        assert len(found & epochs) > 1 and not any(epoch % every for epoch in found), name
    assert trace.epochs("commit") - epochs, "all of them are there: they commit what was traced"


@pytest.mark.smoke
async def test_trace_to_the_end_is_complete(cli: Cli) -> None:
    """It waited for epochs that cannot exist, and called every node missing from the last one on."""
    run = await cli.paused("--nodes", "3", *IN_STEP)
    tracing = await cli.start("trace", "sums", "-o", "t.json")
    await tracing.until("tracing epochs 3 to 5 on 3 nodes")
    cli.open()
    done = await tracing.done()
    assert (done.code, "missing" in done.err) == (0, False), done.err
    trace = Trace(cli.cwd / "t.json")
    assert (trace.about["first_epoch"], trace.about["last_epoch"], trace.about["missing"]) == (3, 5, [])
    assert trace.epochs("commit") == {3, 4, 5}
    assert (await run.done()).code == 0


async def test_a_job_that_fails_meanwhile_leaves_what_was_seen(cli: Cli) -> None:
    run = await cli.paused("--nodes", "2", "-o", "epochs=30", "-o", "fail_at=4", *IN_STEP)
    tracing = await cli.start("trace", "sums", "--epochs", "20", "-o", "t.json")
    await tracing.until("tracing epochs 3 to 22 on 2 nodes")
    cli.open()
    done = await tracing.done()
    assert done.code == 0, done.err
    assert "the job failed meanwhile" in done.err and "one shard is empty" in done.err
    assert "missing: epochs 4 to 22: they did not commit" in done.err
    trace = Trace(cli.cwd / "t.json")
    assert (trace.about["first_epoch"], trace.about["last_epoch"]) == (3, 3)
    assert trace.epochs("record") == {3}
    assert 4 in trace.epochs("compose", task=2), "the epoch it failed in is there, too"
    assert (await run.done()).code == 1


async def test_an_interrupted_trace_leaves_no_half_a_file(cli: Cli) -> None:
    run = await cli.paused("--nodes", "2", "-o", "epochs=30", *IN_STEP)
    (cli.cwd / "t.json").write_text("of yesterday")
    tracing = await cli.start("trace", "sums", "-o", "t.json")
    await tracing.until("tracing epochs 3 to 22")
    again = await cli("trace", "sums", "-o", "other.json")
    assert again.code == 2 and "somebody else traces this node at the moment" in again.err
    await tracing.until("the job is at epoch 2; waiting for n1, n2")
    tracing.interrupt()
    done = await tracing.done()
    assert done.code == 130 and "not one epoch from 3 on was traced" in done.err
    assert "epochs 3 to 22: they did not commit while the job was traced" in done.err
    assert [path.name for path in cli.cwd.iterdir()] == ["t.json"]
    assert (cli.cwd / "t.json").read_text() == "of yesterday"
    cli.open()
    assert (await run.done()).code == 0
    done = await cli("trace", "sums")
    assert done.code == 3 and "job 'sums' has ended (finished)" in done.err


async def test_what_cannot_be_traced_is_said(cli: Cli) -> None:
    done = await cli("trace", "nobody")
    assert done.code == 3 and "No job 'nobody' runs here." in done.err
    done = await cli("trace", "nobody", "--epochs", "0")
    assert done.code == 2 and "at least 1" in done.err
    done = await cli("trace", "nobody", "--every", "0")
    assert done.code == 2 and "at least 1" in done.err
    done = await cli("trace", "nobody", "-o", "no/folder/t.json")
    assert done.code == 2 and "there is no directory no/folder" in done.err
