"""Real processes that lose every replica of a task, or everything: the result is bit for bit that of a calm run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cli_kit import Cli, Command, Done, shell
from etcd_kit import becomes
from safetensors.numpy import load_file

import taskgraph as tg
from taskgraph.coordination.embedded import EmbeddedEtcd
from taskgraph.driver import load_driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

DRIVER = Path(__file__).parent / "drivers" / "kept.py"


@pytest.fixture
async def cli() -> AsyncIterator[Cli]:
    async with shell() as made:
        yield made


@pytest.fixture(scope="module")
def calm() -> dict[str, object]:
    """The result without faults, made in one process."""
    result = tg.run(load_driver(str(DRIVER))(), nodes=0, timeout_s=100)
    return json.loads(result.to_json())


def check(done: Done, calm: dict[str, object]) -> dict[str, object]:
    assert done.code == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert result["values"] == calm["values"]
    assert result["reports"] == calm["reports"], "every epoch reported once, with the same numbers"
    return result


def complete(where: Path) -> list[Path]:
    return sorted(manifest.parent for manifest in where.glob("kept/*/manifest.json"))


async def started(cli: Cli, where: Path, *arguments: str, count: int = 2) -> Command:
    """A run that has so many checkpoints."""
    command = await cli.start("run", str(DRIVER), "--json", "-o", f"where=file://{where}", *arguments)
    await becomes(lambda: len(complete(where)) >= count, 60)
    return command


async def holders(cli: Cli, task: int) -> list[int]:
    """Process ids of the nodes that hold a task."""
    now = json.loads((await cli("status", "kept", "--json")).out)
    names = {now["tasks"][task]["primary"], *now["tasks"][task]["in_sync"]}
    return [node["pid"] for node in now["nodes"] if node["name"] in names]


@pytest.mark.parametrize("task", [0, 3])
async def test_every_replica_of_a_task_is_killed(cli: Cli, calm: dict[str, object], tmp_path: Path, task: int) -> None:
    command = await started(cli, tmp_path, "--nodes", "4")
    for pid in await holders(cli, task):
        os.kill(pid, signal.SIGKILL)
    result = check(await command.done(), calm)
    assert result["restarts"] == 1
    story = (await cli("events", "kept")).out
    assert "lost every replica" in story
    assert "the job goes back from epoch" in story
    assert "rolled back" in story
    await cli.nothing_left()


@pytest.mark.parametrize("nodes", ["1", "5"])
async def test_everything_is_killed_and_the_job_is_resumed_on_another_number_of_nodes(
    cli: Cli, calm: dict[str, object], tmp_path: Path, nodes: str
) -> None:
    command = await started(cli, tmp_path, "--nodes", "3")
    command.process.kill()
    for pid in cli.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await command.process.communicate()
    await becomes(lambda: not cli.processes(), 5)
    arguments = ("run", str(DRIVER), "--json", "-o", f"where=file://{tmp_path}", "--nodes", nodes)

    refused = await cli(*arguments)
    assert refused.code == 2
    assert "--resume" in refused.err and "--fresh" in refused.err

    newest = complete(tmp_path)[-1]
    done = await cli(*arguments, "--resume")
    result = check(done, calm)
    assert result["restarts"] == 1
    assert f"the job goes on from the checkpoint of epoch {int(newest.name.split('-e')[1][:9])}" in done.err
    await becomes(lambda: not cli.processes(), 5)


async def test_other_tools_open_what_a_run_leaves(cli: Cli, calm: dict[str, object], tmp_path: Path) -> None:
    check(await (await started(cli, tmp_path, "--nodes", "2")).done(), calm)
    newest = complete(tmp_path)[-1]
    for task in range(5):
        tensors = load_file(newest / f"task-{task:06d}.safetensors")
        assert tensors["place"].shape == (1000,)
    assert len(complete(tmp_path)) <= 3


async def test_fresh_begins_anew(cli: Cli, calm: dict[str, object], tmp_path: Path) -> None:
    check(await (await started(cli, tmp_path, "--nodes", "2")).done(), calm)
    done = await cli("run", str(DRIVER), "--json", "-o", f"where=file://{tmp_path}", "--nodes", "2", "--fresh")
    assert check(done, calm)["restarts"] == 0
    assert {path.name[:5] for path in complete(tmp_path)} == {"s0002"}


async def test_a_torn_checkpoint_is_refused_by_name_and_the_one_before_is_used(
    cli: Cli, calm: dict[str, object], tmp_path: Path
) -> None:
    check(await (await started(cli, tmp_path, "--nodes", "2")).done(), calm)
    torn = complete(tmp_path)[-1] / "task-000002.safetensors"
    os.truncate(torn, torn.stat().st_size // 2)
    done = await cli("run", str(DRIVER), "--json", "-o", f"where=file://{tmp_path}", "--nodes", "2", "--resume")
    check(done, calm)
    assert f"{torn} is torn" in done.err


async def test_submit_resumes_too(
    cli: Cli, calm: dict[str, object], tmp_path: Path, embedded_etcd: EmbeddedEtcd
) -> None:
    """One etcd for both runs: what it knows of the first is not in the way of the second."""
    etcd = embedded_etcd.endpoint
    arguments = (str(DRIVER), "-o", f"where=file://{tmp_path}", "--etcd", etcd)
    done = await cli("run", *arguments, "-o", "epochs=100", "--nodes", "2")
    assert done.code == 0, done.err
    refused = await cli("submit", *arguments)
    assert refused.code == 2
    assert not list(cli.cwd.iterdir()), "no token is left behind"
    submitted = await cli("submit", *arguments, "--resume")
    assert submitted.code == 0, submitted.err
    launched = await cli("launch", "kept", "--nodes", "3", "--etcd", etcd, "--token-file", "kept.token")
    assert launched.code == 0, launched.err
    result = json.loads((await cli("result", "kept", "--etcd", etcd, "--json")).out)
    assert result["values"] == calm["values"]
    assert result["reports"] == calm["reports"]
