"""Sources and tables of elastic jobs on real processes: workers die and join, and each row and push counts once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Cli
from processes_kit import becomes

import taskgraph as tg
from taskgraph.driver.loading import load_driver

DRIVER = str(Path(__file__).parent / "drivers" / "elastic_reading.py")


@pytest.fixture
def url(tmp_path: Path) -> str:
    for name in range(9):
        lines = [f"w{name} w{line % 7} w{line % 11 * name} {line}" for line in range(60 + 3 * name)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    return f"{tmp_path}/*.txt"


def be_quick(cli: Cli) -> None:
    """Nothing has to happen before the end any longer."""
    cli.gate.with_name(f"{cli.gate.name}-hurry").touch()


async def value_with_kills(cli: Cli, job: str, url: str) -> Any:
    """Runs a job on three workers. One dies, another one joins, then the first one dies."""
    options = ("-o", f"url={url}", "-o", f"gate={cli.gate}")
    run = await cli.start("run", f"{DRIVER}:{job}", "--nodes", "3", "--json", *options)
    await becomes(lambda: len(list(cli.root.glob("gate-n*"))) == 3)
    assert (await cli("kill", "read", "--node", "n2")).code == 0
    await run.until("n2 died (SIGKILL): n1 n3 go on")
    launch = await cli.start("launch", "read", "--nodes", "1")
    await cli.registered("read", "n4")
    cli.open()
    await launch.until("n4 joined after")
    assert (await cli("kill", "read", "--node", "n1")).code == 0
    be_quick(cli)
    done = await run.done(60.0)
    assert done.code == 0, done.err
    (value,) = json.loads(done.out.splitlines()[-1])["values"].values()
    return value


async def test_lanes_and_tables_with_kills(cli: Cli, url: str) -> None:
    job: Any = load_driver(f"{DRIVER}:reading")
    calm_gate = cli.root / "calm"
    for opened in (calm_gate, cli.root / "calm-hurry"):
        opened.touch()
    calm = await tg.arun(job(url=url, gate=str(calm_gate)), nodes=0)
    (wanted,) = json.loads(calm.to_json())["values"].values()
    assert await value_with_kills(cli, "reading", url) == wanted
    await cli.nothing_left()


async def test_each_word_is_counted_once_by_shards(cli: Cli, url: str) -> None:
    lines = tg.lines(url)
    counts = Counter(word for piece in lines.pieces() for line in lines.read(piece) for word in line.split())
    found = await value_with_kills(cli, "sharing", url)
    assert sorted(found) == sorted(counts.values())
    await cli.nothing_left()
