"""Real processes that lose every replica of a task, or everything: the result is bit for bit that of a calm run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import glob
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from cli_kit import LIMIT_S, Cli, Command, Done, kill_at_once, shell
from processes_kit import becomes, stop
from safetensors.numpy import load_file

import taskgraph as tg
from taskgraph.checkpoint import Manifest
from taskgraph.coordination.embedded import EmbeddedEtcd
from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.driver.loading import load_driver
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Delete, Txn

pytestmark = pytest.mark.timeout(180)

DRIVER = Path(__file__).parent / "drivers" / "kept.py"


@cache
def calm(**options: int) -> dict[str, object]:
    """The result without faults, made in one process."""
    job = load_driver(str(DRIVER))(**options)
    with ThreadPoolExecutor(1) as thread:  # here there is a loop already
        return json.loads(thread.submit(tg.run, job, nodes=0, timeout_s=100).result().to_json())


def check(done: Done, **options: int) -> dict[str, object]:
    assert done.code == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert result["values"] == calm(**options)["values"]
    assert result["reports"] == calm(**options)["reports"], "every epoch reported once, with the same numbers"
    return result


def complete(where: Path) -> list[Path]:
    return sorted(manifest.parent for manifest in found(where, "*/manifest.json"))


def found(where: Path, pattern: str) -> list[Path]:
    """`Path.glob` of Python 3.11 fails when a folder is removed meanwhile."""
    return [where / "kept" / name for name in glob.glob(pattern, root_dir=where / "kept", include_hidden=True)]


def epoch_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-e")[1][:9])


def attempt_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-a")[1][:6])


async def started(cli: Cli, where: Path, *arguments: str, count: int = 2, scheme: str = "file") -> Command:
    """A run that has so many checkpoints."""
    options = ("-o", f"where={scheme}://{where}", "-o", f"waits={count}")
    command = await cli.start("run", str(DRIVER), "--json", *options, *arguments)
    await becomes(lambda: len(complete(where)) >= count, LIMIT_S)
    return command


def standing(cli: Cli, *epochs: int, **options: int) -> list[str]:
    """Arguments of a run that stands still in these epochs until `go_on`."""
    given = {"stops": ",".join(map(str, epochs)), "gate": cli.gate, **options}
    return [text for name, value in given.items() for text in ("-o", f"{name}={value}")]


def go_on(cli: Cli, epoch: int = 50) -> None:
    Path(f"{cli.gate}{epoch}").touch()


async def node_pids(cli: Cli) -> list[int]:
    return [node["pid"] for node in (await cli.status("kept"))["nodes"]]


async def holders(cli: Cli, task: int) -> list[int]:
    """Process ids of the nodes that hold a task, once they stay the same: on a busy machine replicas still move."""
    names, before = set[str](), None
    async with asyncio.timeout(LIMIT_S):
        while names != before or len(names) != 2:
            await asyncio.sleep(0.2)
            now = await cli.status("kept")
            before, names = names, {now["tasks"][task]["primary"], *now["tasks"][task]["in_sync"]}
    return [node["pid"] for node in now["nodes"] if node["name"] in names]


@pytest.mark.smoke
@pytest.mark.parametrize("task", [0, 3])
async def test_lost_task_rolls_the_job_back(cli: Cli, tmp_path: Path, task: int) -> None:
    command = await started(cli, tmp_path, "--nodes", "4", *standing(cli, 50))
    kill_at_once(await holders(cli, task))
    go_on(cli)
    result = check(await command.done())
    assert result["restarts"] == 1
    story = (await cli("events", "kept")).out
    assert "lost every replica" in story
    assert "the job goes back from epoch" in story
    assert "rolled back" in story
    assert attempt_of(complete(tmp_path)[-1]) > 1, "the counter goes on: nothing of the epochs undone can count"
    await cli.nothing_left()


async def test_resume_on_more_nodes(cli: Cli, tmp_path: Path) -> None:
    command = await started(cli, tmp_path, "--nodes", "2", *standing(cli, 50))
    command.process.kill()
    kill_at_once(list(cli.processes()))
    await command.process.communicate()
    await becomes(lambda: not cli.processes())
    arguments = ("run", str(DRIVER), "--json", "-o", f"where=file://{tmp_path}", "--nodes", "3")

    refused = await cli(*arguments)
    assert refused.code == 2
    assert "--resume" in refused.err and "--fresh" in refused.err

    newest = complete(tmp_path)[-1]
    done = await cli(*arguments, "--resume")
    result = check(done)
    assert result["restarts"] == 1
    assert f"the job goes on from the checkpoint of epoch {epoch_of(newest)}" in done.err
    await becomes(lambda: not cli.processes())


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves."""
    where = tmp_path_factory.mktemp("left")

    async def run() -> None:
        async with shell() as cli:
            check(await (await started(cli, where, "--nodes", "1", "-o", "epochs=150", count=3)).done(), epochs=150)

    with ThreadPoolExecutor(1) as thread:  # the loop of the tests is each test's own
        thread.submit(asyncio.run, run()).result()
    return where


def test_other_tools_open_what_a_run_leaves(left_behind: Path) -> None:
    newest = complete(left_behind)[-1]
    for task in range(5):
        tensors = load_file(newest / f"task-{task:06d}.safetensors")
        assert tensors["place"].shape == (1000,)
    assert 3 <= len(complete(left_behind)) <= 4, "the last three; a fourth while it is being removed"


async def test_fresh_begins_anew(cli: Cli, tmp_path: Path, left_behind: Path) -> None:
    shutil.copytree(left_behind, tmp_path, dirs_exist_ok=True)
    options = ("-o", f"where=file://{tmp_path}", "-o", "waits=1")
    done = await cli("run", str(DRIVER), "--json", *options, "--nodes", "1", "--fresh")
    assert check(done)["restarts"] == 0
    assert {path.name[:5] for path in complete(tmp_path)} == {"s0002"}


def torn(checkpoint: Path) -> tuple[Path, str]:
    file = checkpoint / "task-000002.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    return file, "is torn"


def corrupt(checkpoint: Path) -> tuple[Path, str]:
    file = checkpoint / "task-000004.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 4
    file.write_bytes(data)
    return file, "is corrupt"


def of_another_job(checkpoint: Path) -> tuple[Path, str]:
    for file in checkpoint.glob("manifest*.json"):
        manifest = Manifest.from_bytes(file.read_bytes(), path=str(file))
        file.write_bytes(dataclasses.replace(manifest, job="other").to_bytes())
    return checkpoint, "is foreign: job is other, here it is kept"


Damage = Callable[[Path], tuple[Path, str]]


@pytest.mark.parametrize("damages", [(torn, corrupt), (of_another_job,)])
async def test_damaged_checkpoints_are_skipped(
    cli: Cli, tmp_path: Path, left_behind: Path, damages: tuple[Damage, ...]
) -> None:
    shutil.copytree(left_behind, tmp_path, dirs_exist_ok=True)
    newest_first = complete(tmp_path)[::-1]
    damaged = [damage(checkpoint) for damage, checkpoint in zip(damages, newest_first, strict=False)]
    arguments = ("-o", f"where=file://{tmp_path}", "-o", "epochs=170", "--nodes", "1")
    done = await cli("run", str(DRIVER), "--json", *arguments, "--resume")
    check(done, epochs=170)
    for path, text in damaged:
        assert f"{path} {text}" in done.err
    before = newest_first[len(damages)]
    assert f"the job goes on from the checkpoint of epoch {epoch_of(before)}" in done.err


async def test_changed_driver_resumes(cli: Cli, tmp_path: Path) -> None:
    """Its own files and those of the driver before are read, and a state that does not fit is named."""
    driver = tmp_path / "kept.py"
    text = DRIVER.read_text()
    driver.write_text(text.replace("        self.steps += 1\n", "        self.steps += 1 // (epoch.number != 50)\n"))
    options = ("-o", f"where=file://{tmp_path}", "-o", "epochs=100", "--nodes")
    command = await cli.start("run", str(driver), *options, "2", *standing(cli, 50, waits=2))
    await becomes(lambda: len(complete(tmp_path)) == 2, LIMIT_S)
    go_on(cli)
    failed = await command.done()
    assert failed.code == 1
    assert "ZeroDivisionError" in failed.err
    hint = "taskgraph: its checkpoint of epoch 40 is complete: go on from there with --resume (--resume-changed if"
    assert hint in failed.err.splitlines()[-1]

    here = await cli("run", str(driver), *options, "0", "--resume-changed")
    assert here.code == 1 and hint in here.err.splitlines()[-1], "of nodes in one process, too"

    driver.write_text(text.replace('"steps"]', '"steps", "more"]').replace("steps = 0", "steps = self.more = 0"))
    refused = await cli("run", str(driver), *options, "1", "--resume")
    assert refused.code == 2
    assert "or taskgraph was changed since" in refused.err and "--resume-changed" in refused.err
    unfit = await cli("run", str(driver), *options, "1", "--resume-changed")
    assert unfit.code == 1
    assert "the snapshot lacks 'more'; the state declared is: place, steps, more" in unfit.err

    driver.write_text(text)
    resumed = (*options, "3", *standing(cli, 45), "--resume-changed")
    command = await cli.start("run", str(driver), "--json", *resumed)
    await command.until("the job goes on from the checkpoint of epoch 40")
    await cli.status("kept", lambda now: now["epoch"] == 45)
    kill_at_once(await holders(cli, 1))
    go_on(cli, 45)
    done = await command.done()
    check(done, epochs=100)
    assert "goes back from epoch 45 to the checkpoint of epoch 40" in (await cli("events", "kept")).out
    check(await cli("run", str(driver), "--json", *options, "1", "--resume"), epochs=100)
    await cli.nothing_left()


@pytest.mark.smoke
async def test_launcher_says_how_to_resume(cli: Cli, tmp_path: Path) -> None:
    command = await started(cli, tmp_path, "--nodes", "3", *standing(cli, 50))
    kill_at_once(await node_pids(cli))
    done = await command.done()
    assert done.code == 1
    assert "every node has ended" in done.err
    assert "--resume" in done.err
    go_on(cli)
    arguments = ("-o", f"where=file://{tmp_path}", "--nodes", "2", *standing(cli, 50))
    resumed = await cli("run", str(DRIVER), "--json", *arguments, "--resume")
    check(resumed)
    assert "the job goes on from the checkpoint of epoch 40" in resumed.err


# -- while it is written ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(where: Path, size: str) -> Iterator[None]:
    """A file system of its own."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", where], capture_output=True)
    if done.returncode:
        pytest.skip(f"no mount here: {done.stderr.decode()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", where], check=True)


async def told(cli: Cli, text: str) -> None:
    """Until an event says so."""
    async with asyncio.timeout(LIMIT_S):
        while text not in (await cli("events", "kept")).out:  # noqa: ASYNC110 - as a user looks
            await asyncio.sleep(0.2)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
async def test_full_disk_costs_only_checkpoints(cli: Cli, tmp_path: Path) -> None:
    """It fills up for a while."""
    with small_disk(tmp_path, "4m"):
        command = await started(cli, tmp_path, "--nodes", "2", *standing(cli, 50, 110, 130, epochs=160))
        with contextlib.suppress(OSError), (tmp_path / "ballast").open("wb", buffering=0) as ballast:
            while True:
                ballast.write(bytes(4096))
        go_on(cli)
        await told(cli, "No space left on device; the job goes on with the one before")
        assert [epoch_of(found) for found in complete(tmp_path)] == [20, 40]
        (tmp_path / "ballast").unlink()
        go_on(cli, 110)
        await becomes(lambda: epoch_of(complete(tmp_path)[-1]) > 110)  # once there is space it goes on
        go_on(cli, 130)
        check(await command.done(), epochs=160)
    await cli.nothing_left()


async def test_killed_writer_leaves_no_checkpoint(cli: Cli, tmp_path: Path) -> None:
    """Killed with the file open: its successor writes it anew, and what is left of it goes with its checkpoint."""
    stops = (15, 25, 35, 45, 55)
    # After the last one come checkpoints of epochs 70, 80 and 90: the one with the half-written file must go.
    options = {"epochs": 95, "size": 2_000_000, "tasks": 2, "every": 10}
    command = await started(cli, tmp_path, "--nodes", "3", *standing(cli, *stops, **options), count=1)
    pids, writers = await node_pids(cli), list[int]()
    for epoch in stops:
        go_on(cli, epoch)
        async with asyncio.timeout(LIMIT_S):
            while not writers and epoch_of(complete(tmp_path)[-1]) < epoch:
                await asyncio.sleep(0)
                writers = caught_half_way(tmp_path, pids)
    assert writers, "none was caught in one of five checkpoints"
    kill_at_once(writers)
    assert half_written(tmp_path)
    for pid in set(pids) - set(writers):
        os.kill(pid, signal.SIGCONT)
    check(await command.done(), **options)
    assert "takeover" in (await cli("events", "kept")).out
    assert epoch_of(complete(tmp_path)[-1]) > 20
    assert not half_written(tmp_path)


def caught_half_way(where: Path, pids: list[int]) -> list[int]:
    """Who has a file of task 1 open that is half written; all are stopped then. Where it was written by then, they go
    on."""
    pattern = "*/.task-000001.*.tmp"
    if not half_written(where, pattern):
        return []
    stop(*pids)
    writers = [pid for pid in pids if any(open_in(pid, half) for half in half_written(where, pattern))]
    for pid in pids if not writers else []:
        os.kill(pid, signal.SIGCONT)
    return writers


def half_written(where: Path, pattern: str = "*/*.tmp") -> list[Path]:
    return found(where, pattern)


def open_in(pid: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(os.readlink(fd) == str(path) for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


# -- elsewhere ----------------------------------------------------------------------------------------------------


async def test_any_place_that_fsspec_opens(cli: Cli, tmp_path: Path) -> None:
    """A scheme that the driver registers: lost, and resumed."""
    command = await started(cli, tmp_path, "--nodes", "3", *standing(cli, 50, epochs=100), scheme="disk")
    kill_at_once(await holders(cli, 3))
    go_on(cli)
    assert check(await command.done(), epochs=100)["restarts"] == 1
    newest = complete(tmp_path)[-1]
    assert load_file(newest / "task-000003.safetensors")["place"].shape == (1000,)
    arguments = ("-o", f"where=disk://{tmp_path}", "--nodes", "1", *standing(cli, 50, epochs=130))
    resumed = await cli("run", str(DRIVER), "--json", *arguments, "--resume")
    check(resumed, epochs=130)
    assert f"the job goes on from the checkpoint of epoch {epoch_of(newest)}" in resumed.err


async def test_lost_results_are_computed_again(cli: Cli, tmp_path: Path, embedded_etcd: EmbeddedEtcd) -> None:
    """A launch ended at once, and well; it said that the values were there, and nodes waited for ever."""
    driver, etcd = str(DRIVER.with_name("slow_result.py")), ("--etcd", embedded_etcd.endpoint)
    token = ("--token-file", "slow_result.token")
    options = ("-o", f"gate={cli.gate}", "-o", "epochs=5", "-o", "pace_s=0.1", "-o", f"where=file://{tmp_path}")
    submitted = await cli("submit", driver, *options, "--set", "lost_after_s=0.5", "--set", "lease_ttl_s=60", *etcd)
    assert submitted.code == 0, submitted.err
    launch = await cli.start("launch", "slow_result", "--nodes", "2", *etcd, *token)
    await launch.until("finished after epoch 4")
    launch.process.kill()
    await launch.done()
    await becomes(lambda: not cli.processes())
    async with await EtcdCoordinator.connect(embedded_etcd.endpoint) as coordinator:  # as if their leases had ended
        await coordinator.txn(Txn(success=(Delete(Keys("slow_result").nodes, prefix=True),)))
    lost = await cli("result", "slow_result", *etcd, *token)
    assert lost.code == 3 and "its last node left before anyone collected them" in lost.err, lost.err
    assert "or with new nodes for this run (`taskgraph launch slow_result`)" in lost.err
    cli.open()
    again = await cli("launch", "slow_result", "--nodes", "1", *etcd, *token)
    assert again.code == 0 and again.out == "5\n", again.err
    assert "lost every replica" in again.err and "to the checkpoint of epoch" in again.err
    assert (await cli("result", "slow_result", *etcd, *token)).out == "5\n"
    await cli.nothing_left()


async def test_submit_resumes_a_job(cli: Cli, tmp_path: Path, embedded_etcd: EmbeddedEtcd) -> None:
    """One etcd for both runs: what it knows of the first is not in the way of the second."""
    etcd = embedded_etcd.endpoint
    arguments = (str(DRIVER), "-o", f"where=file://{tmp_path}", "--etcd", etcd)
    done = await cli("run", *arguments, "-o", "epochs=50", "--nodes", "1")
    assert done.code == 0, done.err
    refused = await cli("submit", *arguments)
    assert refused.code == 2
    assert not list(cli.cwd.iterdir()), "no token is left behind"
    submitted = await cli("submit", *arguments, "--resume")
    assert submitted.code == 0, submitted.err
    launched = await cli("launch", "kept", "--nodes", "2", "--etcd", etcd, "--token-file", "kept.token")
    assert launched.code == 0, launched.err
    result = json.loads((await cli("result", "kept", "--etcd", etcd, "--json")).out)
    assert result["values"] == calm()["values"]
    assert result["reports"] == calm()["reports"]
