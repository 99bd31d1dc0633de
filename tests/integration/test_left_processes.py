"""Processes that user code starts in a node end with it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from cli_kit import Cli
from processes_kit import becomes

pytestmark = pytest.mark.timeout(120)

DRIVER = str(Path(__file__).parent / "drivers" / "pools.py")


@pytest.fixture
def cli(cli: Cli) -> Cli:
    cli.gate.mkdir()
    return cli


async def only_what_was_to_go_on(cli: Cli) -> None:
    """It has a session of its own. Ends it, too."""
    going_on = {int(path.name.rpartition("-")[2]) for path in cli.gate.glob("goes-on-*")}
    with contextlib.suppress(TimeoutError):
        await becomes(lambda: cli.processes().keys() == going_on)
    assert cli.processes().keys() == going_on
    for pid in going_on:
        os.kill(pid, signal.SIGKILL)
    assert len(list(cli.gate.glob("memory-*"))) >= 4
    forgotten = [Path("/dev/shm") / path.name.removeprefix("memory-") for path in cli.gate.glob("memory-*")]
    assert not [path for path in forgotten if path.exists()]


@pytest.mark.parametrize(("dies", "method"), [(False, "fork"), (True, "forkserver")])
async def test_forgotten_pool_ends_with_its_node(cli: Cli, dies: bool, method: str) -> None:
    """Its workers lived on, with the sockets and the log of a node that had ended. So did a directory of the fork
    server, which is the default from Python 3.14 on."""
    options = ("-o", f"folder={cli.gate}", "-o", f"dies={dies}", "-o", f"method={method}")
    done = await cli("run", DRIVER, "--nodes", "2", *options, "--timeout", "100")
    assert done.code == 0 and done.out == "all 2 tasks: 10\n", done.err
    assert (cli.gate / "died").exists() == dies
    await only_what_was_to_go_on(cli)
    await cli.nothing_left()


@pytest.mark.smoke
async def test_pool_ends_when_launcher_is_killed(cli: Cli) -> None:
    run = await cli.start("run", DRIVER, "--nodes", "2", "-o", f"folder={cli.gate}", "-o", "epochs=1000000")
    await run.until("epoch ")
    run.process.send_signal(signal.SIGKILL)
    await run.process.communicate()
    await only_what_was_to_go_on(cli)
