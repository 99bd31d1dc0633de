"""Loops without steps on real processes: workers die in an operation and join, and each turn counts once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_kit import Cli
from processes_kit import becomes

DRIVER = str(Path(__file__).parent / "drivers" / "elastic_group.py")


async def test_workers_die_in_an_operation_and_join(cli: Cli) -> None:
    end = cli.root / "end"
    options = ("-o", f"gate={cli.gate}", "-o", f"until={end}")
    run = await cli.start("run", DRIVER, "--nodes", "3", "--json", *options)
    await becomes(lambda: len(list(cli.root.glob("gate-n*"))) == 3)
    assert (await cli("kill", "fit", "--node", "n2")).code == 0
    await run.until("n2 died (SIGKILL): n1 n3 go on")
    launch = await cli.start("launch", "fit", "--nodes", "1")
    cli.open()
    await launch.until("n4 joined after")
    assert (await cli("kill", "fit", "--node", "n1")).code == 0
    await run.until("n1 died (SIGKILL)")
    end.touch()
    done = await run.done(60.0)
    assert done.code == 0, done.err
    w, turns, first, member = json.loads(done.out.splitlines()[-1])["values"]["0"]
    assert turns >= 20 and w == pytest.approx([0.9**turns] * 4, rel=1e-5)
    assert first == member == "n3"
    assert (await launch.done()).code == 0
    await cli.nothing_left()
