"""`tg.map`, `taskgraph map` and `run.shards` on real processes with real signals: each piece counts once."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli, Command
from processes_kit import becomes, kill, running, stop

from taskgraph.maps.records import RecordKind, RecordReader

DRIVERS = Path(__file__).parent / "drivers"
MAPPED, SHARDED = str(DRIVERS / "mapped.py"), str(DRIVERS / "sharded.py")


def computed(cli: Cli) -> Counter[str]:
    """Piece -> how often it was computed."""
    folder = cli.cwd / "computed"
    return Counter(path.name.partition("-")[0] for path in folder.iterdir()) if folder.exists() else Counter()


def workers(cli: Cli) -> Counter[int]:
    """Process -> how many pieces it has computed."""
    return Counter(int(path.name.split("-")[1]) for path in (cli.cwd / "computed").iterdir())


def kept(folder: Path) -> set[str]:
    """The pieces whose results are in files."""
    records = (record for path in folder.rglob("*.results") for record in RecordReader(path).read())
    return {str(record.piece) for record in records if record.kind == RecordKind.RESULT}


async def pids(cli: Cli, job: str) -> dict[str, int]:
    nodes: Any = json.loads((await cli("status", job, "--json")).out or '{"nodes": []}')["nodes"]
    return {node["name"]: node["pid"] for node in (nodes.values() if isinstance(nodes, dict) else nodes)}


@pytest.mark.smoke
async def test_nodes_die_and_each_piece_has_its_result(cli: Cli) -> None:
    run = await cli.start("200", "0.02", python=(MAPPED,))
    killed = set[int]()
    for count in (20, 60):
        await becomes(lambda count=count: len(computed(cli)) > count)
        pid = max(pid for pid in workers(cli) if running(pid))
        await kill(pid)
        killed.add(pid)
    (cli.cwd / "hurry").touch()
    done = await run.done()
    assert done.code == 0 and done.out == f"{3 * sum(range(200))}\n", done.err
    found = computed(cli)
    theirs, last = sum(workers(cli)[pid] for pid in killed), 20  # the last ones are not left to one worker
    assert len(found) == 200 and found.total() <= 200 + theirs + last
    await cli.nothing_left()


async def test_killed_caller_goes_on_with_what_is_missing(cli: Cli) -> None:
    run = await cli.start("120", "0.02", python=(MAPPED,))
    folder = cli.root / "run" / "taskgraph" / "maps"
    await becomes(lambda: len(kept(folder)) > 40)
    run.process.send_signal(signal.SIGKILL)
    await run.done()
    await becomes(lambda: not cli.processes())
    before, has = computed(cli), kept(folder)
    assert len(has) <= 100
    (cli.cwd / "hurry").touch()
    done = await cli("120", "0.02", "resume", python=(MAPPED,))
    assert done.code == 0 and done.out == f"{3 * sum(range(120))}\n", done.err
    found = computed(cli)
    assert len(found) == 120 and not [piece for piece in has if found[piece] != before[piece]]
    await cli.nothing_left()


async def test_interrupted_command_goes_on(cli: Cli) -> None:
    (cli.cwd / "slow.py").write_text(
        "import os, time\ndef slow(line):\n    while int(line) >= 100 and not os.path.exists('go'):\n"
        "        time.sleep(0.02)\n    return int(line) + 1\n"
    )
    (cli.cwd / "lines").write_text("".join(f"{number}\n" for number in range(150)))
    words = ("map", "slow.py:slow", "--lines", "lines", "--nodes", "2", "--output", "found")
    run = await cli.start(*words)
    folder = cli.root / "run" / "taskgraph" / "maps" / "slow"
    await becomes(lambda: any(path.stat().st_size > 2000 for path in folder.glob("*.results")))
    run.interrupt()
    done = await run.done()
    assert done.code == 130 and "--resume" in done.err, done.err
    assert not (cli.cwd / "found").exists()
    (cli.cwd / "go").touch()
    done = await cli(*words, "--resume")
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (cli.cwd / "found").read_text().splitlines()]
    assert lines == [{"piece": str(number), "result": number + 1} for number in range(150)]
    await cli.nothing_left()


async def test_piece_that_ends_its_process_is_named(cli: Cli) -> None:
    (cli.cwd / "fatal.py").write_text("import os\ndef fatal(line):\n    return int(line) or os._exit(9)\n")
    (cli.cwd / "lines").write_text("1\n2\n0\n3\n")
    done = await cli("map", "fatal.py:fatal", "--lines", "lines", "--nodes", "1")
    assert done.code == 1 and "map 'fatal': piece 2 ended its process 3 times" in done.err, done.err
    await cli.nothing_left()


async def test_map_does_not_wait_for_a_piece_that_another_node_has_done(cli: Cli) -> None:
    (cli.cwd / "stuck.py").write_text(
        "import os, time\ndef stuck(line):\n    if line == '3' and not os.path.exists('flag'):\n"
        "        open('flag', 'w').close()\n        time.sleep(600)\n    return line\n"
    )
    (cli.cwd / "lines").write_text("".join(f"{number}\n" for number in range(40)))
    done = await cli("map", "stuck.py:stuck", "--lines", "lines", "--nodes", "2")
    assert done.code == 0 and done.out.count('"result"') == 40, done.err
    assert (cli.cwd / "flag").exists()
    await cli.nothing_left()


async def at_gate(cli: Cli, nodes: int) -> Command:
    """A run whose workers wait with a piece each, until `cli.open` is called."""
    options = ("-o", f"gate={cli.gate}", "-o", f"finish={cli.root / 'finish'}")
    run = await cli.start("run", SHARDED, "--nodes", str(nodes), "--json", *options)
    await becomes(lambda: len(list(cli.root.glob("gate-n*"))) == nodes)
    return run


async def value_of(cli: Cli, run: Command) -> Any:
    (cli.root / "finish").touch()
    done = await run.done()
    assert done.code == 0, done.err
    return json.loads(done.out.splitlines()[-1])["values"]["0"]


async def test_shards_with_deaths_joins_and_drains(cli: Cli) -> None:
    run = await at_gate(cli, 3)
    assert (await cli("kill", "sharded", "--node", "n1")).code == 0
    await run.until("n1 died (SIGKILL): n2 n3 go on")
    launch = await cli.start("launch", "sharded", "--nodes", "1")
    await launch.until("n4 joined after")
    assert (await cli("drain", "sharded", "--node", "n2")).code == 0
    await run.until("n2 leaves")
    cli.open()
    assert await value_of(cli, run) == [400, 1]
    assert (await launch.done()).code == 0
    await cli.nothing_left()


async def test_shards_of_a_frozen_worker_go_to_others(cli: Cli) -> None:
    run = await at_gate(cli, 2)
    pid = (await pids(cli, "sharded"))["n2"]
    stop(pid)
    try:
        await run.until("n2 does not answer")
        cli.open()
    finally:
        os.kill(pid, signal.SIGCONT)
    await run.until("n2 joined after")
    assert await value_of(cli, run) == [400, 1]
    await cli.nothing_left()
