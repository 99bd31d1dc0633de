"""Jobs on a coordinator that another package offers, by its entry point: an SQLite file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_kit import DRIVER, Cli, printed
from processes_kit import becomes
from test_cli_access import everything
from test_elastic_processes import DRIVER as ELASTIC
from test_elastic_processes import calm, value_of  # noqa: F401  # a fixture

PACKAGES = Path(__file__).parents[1] / "membership"


@pytest.fixture
def where(cli: Cli) -> tuple[str, str]:
    """The option that names the coordinator; `cli` has its package."""
    cli.env["PYTHONPATH"] = os.pathsep.join([str(PACKAGES), *filter(None, [cli.env.get("PYTHONPATH")])])
    return "--etcd", f"sqlite://{cli.root}/store"


async def test_every_command(cli: Cli, where: tuple[str, str]) -> None:
    await everything(cli, "file", *where)


async def test_node_of_a_task_graph_dies(cli: Cli, where: tuple[str, str]) -> None:
    run = await cli.paused("--nodes", "3", *where)
    assert (await cli("kill", "sums", "--node", "n2")).code == 0
    await run.until("n2 died")
    cli.open()
    done = await run.done()
    assert done.code == 0 and done.out == printed(), done.err


@pytest.mark.smoke
async def test_worker_of_an_elastic_job_dies(cli: Cli, where: tuple[str, str], calm: object) -> None:  # noqa: F811
    run = await cli.start("run", ELASTIC, "--nodes", "3", "--json", "-o", f"gate={cli.gate}", *where)
    await becomes(lambda: len(list(cli.root.glob("gate-n*"))) == 3)
    assert (await cli("kill", "fit", "--node", "n2")).code == 0
    await run.until("n2 died (SIGKILL): n1 n3 go on")
    cli.open()
    assert await value_of(run) == calm
    await cli.nothing_left()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "zoo://h:1",
            ("package offers zoo://", "(offered: broken://, sqlite://)", "HOST:PORT of an etcd"),
        ),
        ("broken://h", ("taskgraph_sqlite:no_such_function of the package taskgraph-sqlite cannot be loaded",)),
        ("sqlite://relative/x", ("write sqlite:///absolute/path",)),
        ("sqlite:///nowhere/x", ("/nowhere/x cannot be opened",)),
    ],
)
async def test_messages_say_what_to_do(cli: Cli, where: tuple[str, str], url: str, words: tuple[str, ...]) -> None:
    done = await cli("run", str(DRIVER), "--nodes", "1", "--etcd", url)
    assert done.code == 3 and "Traceback" not in done.err, done.err
    assert all(word in done.err for word in words), done.err
