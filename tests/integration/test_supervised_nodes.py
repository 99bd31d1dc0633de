"""What a supervisor needs of `taskgraph node`: a name for all certificates, a file for its probe, an exit code."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import pytest
from cli_kit import DRIVER, Cli, Command, sums
from processes_kit import becomes

from taskgraph.clusters.credentials import certificate_name, job_certificates
from taskgraph.coordination.embedded import EmbeddedEtcd

HOSTS = Path(__file__).parent / "hosts"
ELASTIC = DRIVER.with_name("elastic_fit.py")
LEFT = 75
LIMIT_S = 100.0


def on_host(name: str) -> dict[str, str]:
    """The environment of a process on another host."""
    return {"TASKGRAPH_TEST_HOST": name, "PYTHONPATH": os.pathsep.join((str(HOSTS), os.environ.get("PYTHONPATH", "")))}


@pytest.fixture
def submitted(cli: Cli, embedded_etcd: EmbeddedEtcd) -> tuple[str, ...]:
    """The options by which commands find etcd and the token."""
    (cli.cwd / "taskgraph.toml").write_text(f'etcd = "{embedded_etcd.endpoint}"\ntoken_file = "fit.token"\n')
    return ("--drained-code", str(LEFT))


async def submit(cli: Cli, name: str, driver: Path, *options: str) -> None:
    words = [word for option in options for word in ("-o", option)]
    done = await cli("submit", str(driver), "--name", name, *words)
    assert done.code == 0, done.err


def until_finish(cli: Cli) -> tuple[str, ...]:
    """Options of a job that lasts until a node has left it."""
    return "epochs=1000000", f"finish={cli.root / 'finish'}"


async def test_certificates_with_a_fixed_name(cli: Cli, submitted: tuple[str, ...]) -> None:
    """Nodes of two hosts have one certificate, which names neither; clients of a third host ask them over TLS."""
    (cli.cwd / "tls").mkdir()
    for name, content in job_certificates("fit").items():
        (cli.cwd / "tls" / name).write_bytes(content)
    await submit(cli, "tls-name", DRIVER, "pause_at=2", f"gate={cli.gate}", "min_nodes=2", *until_finish(cli))
    tls = ("--tls", "tls", "--tls-name", "fit")
    listen = ("node", "--job", "tls-name", *submitted, "--listen", "127.0.0.1", "--advertise", "localhost")

    wrong = await cli(*listen, "--tls", "tls", "--tls-name", "other")
    assert wrong.code == 1 and "--tls-name other requires it: `taskgraph certs DIR --host other`" in wrong.err
    without = await cli(*listen, "--tls-name", "fit")
    assert without.code == 2 and "give --tls DIR" in without.err

    one, two = [await cli.start(*listen, *tls, "--name", name, **on_host(name)) for name in ("one", "two")]
    laptop = {**on_host("laptop"), "TASKGRAPH_TLS": "tls", "TASKGRAPH_TLS_NAME": "fit"}
    found: list[dict[str, object]] = []
    until = time.monotonic() + LIMIT_S
    while len(found) < 2 or not all(node["answers"] for node in found):
        assert time.monotonic() < until, found
        await asyncio.sleep(0.2)
        found = json.loads((await cli("status", "tls-name", "--json", **laptop)).out)["nodes"]
    for name, says in (("other", "does not have the name 'other'"), ("", "does not name that host: give --tls-name")):
        refused = await cli("status", "tls-name", **{**laptop, "TASKGRAPH_TLS_NAME": name})
        assert says in " ".join(refused.out.split()), refused.out

    done = await cli("drain", "tls-name", "--node", "two", **laptop)
    assert done.code == 0, done.err
    cli.open()
    assert (await two.done()).code == LEFT
    (cli.root / "finish").touch()
    await cli.once(lambda done: "finished" in done.out, "events", "tls-name")
    result = await cli("result", "tls-name", "--json", **laptop)
    values = json.loads(result.out)["values"]["0"]
    assert values == sums(epochs=len(values)), result.err
    assert (await one.done()).code == 0
    await cli.nothing_left()


async def test_ready_file_and_drained_code(cli: Cli, submitted: tuple[str, ...]) -> None:
    setup_gate, ready = cli.root / "setup", [cli.cwd / name for name in ("a.ready", "b.ready")]
    setup_gate.touch()
    paused = cli.root / "paused"
    options = ("pause_at=3", f"gate={cli.gate}", f"paused={paused}", f"setup_gate={setup_gate}", *until_finish(cli))
    await submit(cli, "ready", DRIVER, *options)
    ready[0].touch()  # a killed node left it

    async def start(name: str) -> Command:
        words = ("node", "--job", "ready", "--name", name, *submitted)
        return await cli.start(*words, "--ready-file", f"{name}.ready")

    a = await start("a")
    await becomes(lambda: not ready[0].exists())
    await becomes(paused.exists)  # before the job begins, a node is ready, too
    await becomes(ready[0].exists)
    setup_gate.unlink()  # backups on b wait
    b = await start("b")
    await becomes(lambda: not ready[0].exists())
    assert not ready[1].exists()
    setup_gate.touch()
    await becomes(lambda: all(path.exists() for path in ready))
    b.process.terminate()
    await becomes(lambda: not ready[1].exists())
    assert b.process.returncode is None, "it stays until the epoch at work is committed"
    cli.open()
    assert (await b.done()).code == LEFT
    (cli.root / "finish").touch()
    await cli.once(lambda done: done.code == 0, "result", "ready")
    assert (await a.done()).code == 0 and not ready[0].exists()


async def test_elastic_job(cli: Cli, submitted: tuple[str, ...]) -> None:
    ready = [cli.cwd / name for name in ("a.ready", "b.ready")]
    await submit(cli, "grows", ELASTIC, f"gate={cli.gate}", "passes=100000")  # until its shutdown
    words = ("node", "--job", "grows", *submitted)
    a = await cli.start(*words, "--name", "a", "--ready-file", "a.ready")
    await becomes(lambda: any(cli.root.glob("gate-*")))  # it waits in step 5
    await becomes(ready[0].exists)
    b = await cli.start(*words, "--name", "b", "--ready-file", "b.ready")
    await cli.registered("grows", "b")
    assert ready[0].exists() and not ready[1].exists(), "b copies the state"
    cli.open()
    await becomes(ready[1].exists)
    done = await cli("drain", "grows", "--node", "b")
    assert done.code == 0, done.err
    assert (await b.done()).code == LEFT and not ready[1].exists()
    assert (await cli("shutdown", "grows")).code == 0
    assert (await a.done()).code == 0


async def test_node_that_waits_for_its_job(cli: Cli, submitted: tuple[str, ...]) -> None:
    await submit(cli, "other", DRIVER)
    waiting = await cli.start("node", "--job", "absent", *submitted)
    await waiting.until("waiting for job 'absent'")
    waiting.process.terminate()
    assert (await waiting.done()).code == LEFT
    for option, says in ((("--drained-code", "3"), "0, or 6 to 125"), (("--ready-file", "no/such"), "No such file")):
        wrong = await cli("node", "--job", "absent", *option)
        assert wrong.code == 2 and says in wrong.err, wrong.err


@pytest.mark.parametrize(
    ("job", "name"), [("fit", "fit"), ("My_Job.2", "my-job-2"), ("ä", "taskgraph"), ("x" * 70, "x" * 63)]
)
def test_names_of_certificates(job: str, name: str) -> None:
    assert certificate_name(job) == name
