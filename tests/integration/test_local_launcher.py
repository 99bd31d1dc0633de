"""`submit --on`: a job in the background of this host, and a launcher of another package."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli_kit import DRIVER, Cli, printed, sums
from processes_kit import becomes

from taskgraph.coordination.embedded import EmbeddedEtcd

PACKAGES = Path(__file__).parents[1] / "launchers"


async def submit(cli: Cli, *words: str) -> None:
    """Submits a job that waits in epoch 2."""
    done = await cli("submit", str(DRIVER), "-o", "pause_at=2", "-o", f"gate={cli.gate}", "--on", *words)
    assert done.code == 0, done.err
    assert f"submitted job sums on {words[0]}: `taskgraph status sums`" in done.out


async def has_nodes(cli: Cli, *names: str, options: tuple[str, ...] = ()) -> None:
    """Returns once these nodes and no others are there, which do not leave."""
    await cli.status(
        "sums", lambda now: sorted(n["name"] for n in now["nodes"] if not n.get("draining")) == [*names], *options
    )


async def test_job_in_the_background(cli: Cli) -> None:
    await submit(cli, "local", "--nodes", "2")
    again = await cli("submit", str(DRIVER), "--on", "local")
    assert again.code == 2 and "job 'sums' runs on this host already" in again.err, again.err
    following = await cli.start("logs", "--follow")
    await following.until("the job began", out=True)
    for nodes, says in (("3", "1 more started"), ("3", "it has 3 already"), ("2", "n3 hands over and leaves")):
        done = await cli("scale", "sums", nodes)
        assert done.out == f"job sums on local, {nodes} nodes: {says}\n", done.err
    await has_nodes(cli, "n1", "n2")
    cli.open()
    done = await following.done()
    assert done.code == 0 and done.out.count("the job finished") == 1, done.err
    assert done.out.count("the job began") == 1, "each line once, although the logs were moved"
    assert (await cli("result", "sums")).out == printed()
    only = await cli("logs", "sums", "--node", "n3")
    assert "n3 leaves: taskgraph scale" in only.out and "the job began" not in only.out
    assert (await cli("shutdown", "sums")).code == 0
    await cli.nothing_left()


async def test_job_in_an_etcd(cli: Cli, embedded_etcd: EmbeddedEtcd) -> None:
    etcd = ("--etcd", embedded_etcd.endpoint)
    await submit(cli, "local", "--nodes", "1", *etcd, "--token-file", "token")
    await has_nodes(cli, "n1")
    await has_nodes(cli, "n1", options=etcd)  # with the token that this host knows
    assert (await cli("token", "sums")).out == (cli.cwd / "token").read_text()
    assert "was ended" in (await cli("shutdown")).out
    await becomes(lambda: not cli.processes())
    assert (await cli("forget", "sums", *etcd)).code == 0
    kept = await cli("logs", "sums")
    assert kept.code == 0 and "the job began" in kept.out, kept.err


async def test_job_that_does_not_begin(cli: Cli) -> None:
    wrong = await cli("submit", str(DRIVER), "--on", "local", "--resume")
    assert wrong.code == 2 and "the command that starts it ended with 2. Its last lines:\ntaskgraph: " in wrong.err
    assert "keeps no checkpoints" in wrong.err.splitlines()[-1], wrong.err
    await cli.nothing_left()


@pytest.fixture
def shell(cli: Cli, embedded_etcd: EmbeddedEtcd) -> tuple[str, ...]:
    """The options of a launcher of another package; `cli` has that package."""
    cli.env["PYTHONPATH"] = os.pathsep.join([str(PACKAGES), *filter(None, [cli.env.get("PYTHONPATH")])])
    return ("shell", "--etcd", embedded_etcd.endpoint, "--token-file", "token")


async def test_launcher_of_another_package(cli: Cli, shell: tuple[str, ...]) -> None:
    shown = await cli("submit", "--on", "shell", "--help")
    assert "options of this launcher:\n  --pids DIR" in shown.out and "--nice N" in shown.out
    text = await cli("submit", str(DRIVER), "--on", *shell, "--nice", "3", "--dry-run")
    assert "nice -n 3 " in text.out and not (cli.cwd / "token").exists(), text.err
    await submit(cli, *shell, "--nodes", "2")
    await becomes(lambda: (cli.cwd / "pids" / "2").exists())
    await has_nodes(cli, "s1", "s2")
    status = await cli("status")  # the only job that was submitted here
    assert status.out.splitlines()[-5:] == [
        *(rf"node {number} waits\nfor its turn" for number in range(4)),
        "and 6 more lines of shell",
    ]
    done = await cli("scale", "sums", "1")
    assert done.out == "job sums on shell, 1 node: 2 before\n", done.err
    left = ("logs", "--on", "shell", "sums", "--node", "2")
    await cli.once(lambda done: "s2 leaves: SIGTERM" in done.out, *left)
    (cli.cwd / "pids").rename(cli.cwd / "elsewhere")
    assert "shell does not say which nodes it has not started yet: the folder of" in (await cli("status", "sums")).out
    (cli.cwd / "elsewhere").rename(cli.cwd / "pids")
    cli.open()
    await cli.once(lambda done: "finished" in done.out, "status", "sums")
    assert json.loads((await cli("result", "sums", "--json")).out)["values"]["0"] == sums()
    assert (await cli("shutdown", "sums")).out.endswith("its nodes on shell are gone, and what was made for them\n")
