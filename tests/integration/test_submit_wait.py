"""`submit --wait`: what a launcher's pod, or the first element of an array, runs, and runs again if it was ended."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from cli_kit import DRIVER, Cli, Command, Done, printed, sums
from kept_kit import KeptEtcd
from processes_kit import free_port

from taskgraph.coordination.embedded import EmbeddedEtcd
from taskgraph.launch.runtime import Runtime


class Submitter:
    """A script that submits one run, and may be started again."""

    def __init__(self, cli: Cli, name: str, *options: str) -> None:
        self.cli, self.name, self.options = cli, name, options

    def words(self, *more: str) -> tuple[str, ...]:
        return ("submit", str(DRIVER), "--name", self.name, "--wait", "--run", f"{self.name}-1", *self.options, *more)

    async def start(self, *more: str) -> Command:
        command = await self.cli.start(*self.words(*more))
        await command.until(f"submitted job {self.name}", out=True)
        return command

    async def again(self, *more: str) -> Done:
        return await self.cli(*self.words(*more))

    async def launch(self, nodes: int = 2) -> Command:
        return await self.cli.start("launch", self.name, "--nodes", str(nodes), "--token-file", f"{self.name}.token")


@pytest.fixture
def user(cli: Cli, embedded_etcd: EmbeddedEtcd) -> Cli:
    (cli.cwd / "taskgraph.toml").write_text(f'etcd = "{embedded_etcd.endpoint}"\n')
    return cli


def values(path: Path) -> list[int]:
    found: list[int] = json.loads(path.read_text())["values"]["0"]
    return found


async def test_values_are_printed_and_written(user: Cli) -> None:
    script, file = Submitter(user, "waits"), user.cwd / "out" / "result.json"
    waiting = await script.start("--result", "waits.token/result.json", "--nodes", "2")
    launch = await script.launch()
    done = await waiting.done()
    assert done.code == 2 and "--result waits.token/result.json: the values cannot be written" in done.err, done.err
    done = await script.again("--result", "out/result.json")  # they stayed on the nodes
    assert "submitted job waits before (--run): this command follows it" in done.out
    assert done.code == 0 and done.out.endswith(printed()), done.err
    assert values(file) == sums()
    assert (await launch.done()).code == 0
    file.unlink()
    done = await script.again("--result", "out/result.json")  # a launcher of Kubernetes may start it once more
    assert done.code == 0 and done.out.endswith(printed()) and "has finished" not in done.err, done.err
    assert values(file) == sums()
    assert (await user("events", "waits")).out.count("the job began") == 1, "it did not run again"
    await user.nothing_left()


async def test_ended_command_follows_the_job_again(user: Cli) -> None:
    script = Submitter(user, "again", "-o", "pause_at=2", "-o", f"gate={user.gate}")
    waiting = await script.start()
    launch = await script.launch()
    await waiting.until("epoch 2 waits")
    waiting.process.send_signal(signal.SIGTERM)
    done = await waiting.done()
    assert done.code == 130 and "this command was ended; job again goes on" in done.err, done.err
    waiting = await script.start()
    user.open()
    done = await waiting.done()
    assert done.code == 0 and done.out.endswith(printed()), done.err
    assert (await launch.done()).code == 0


async def test_failed_job(user: Cli) -> None:
    script = Submitter(user, "fails", "-o", "fail_at=2")
    waiting = await script.start("--result", "result.json")
    await waiting.until("job fails has no nodes: it waits until some are started")
    launch = await script.launch(1)
    done = await waiting.done()
    assert done.code == 1 and "one shard is empty" in done.err, done.err
    assert not (user.cwd / "result.json").exists()
    kept = Runtime(Path(user.env["TASKGRAPH_RUNTIME_DIR"]) / "taskgraph").find_finished("fails")
    assert kept is not None and kept.events[-1].kind == "failed", kept
    assert (await launch.done()).code == 1
    done = await script.again()
    assert done.code == 1 and "one shard is empty" in done.err, "as the first one, and it did not run again"


async def test_restart_of_etcd(cli: Cli) -> None:
    data, port = cli.root / "data", free_port()
    (cli.cwd / "taskgraph.toml").write_text(f'etcd = "127.0.0.1:{port}"\n')
    etcd = KeptEtcd(data, port=port)
    await etcd.start()
    options = ("-o", "pause_at=2", "-o", f"gate={cli.gate}", "-o", "lease_ttl_s=60")  # longer than etcd is away
    script = Submitter(cli, "restarts", *options)
    try:
        waiting = await script.start()
        launch = await script.launch()
        await waiting.until("epoch 2 waits")
        await etcd.stop()
        cli.open()
        etcd = KeptEtcd(data, port=port)
        await etcd.start()
        done = await waiting.done()
        assert done.code == 0 and done.out.endswith(printed()), done.err
        assert (await launch.done()).code == 0
    finally:
        await etcd.stop()
