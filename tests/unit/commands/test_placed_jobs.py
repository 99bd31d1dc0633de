"""Jobs that this host submitted with `--on`: how commands find them, and what they say of others."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest
from commands_kit import ETCD, in_memory, options

from taskgraph import cli
from taskgraph.clusters.api import Request
from taskgraph.clusters.local import LocalLauncher
from taskgraph.clusters.placed import PlacedJob, find_placed, forget_placed, keep_placed, placed_names
from taskgraph.commands.common import NotSubmitted, find_entry, reach
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import JobError, TaskGraphError, UnknownJob
from taskgraph.jobs import Job
from taskgraph.launch.follow import Follower
from taskgraph.launch.kept import KeptJob
from taskgraph.launch.runtime import Runtime
from taskgraph.launch.submit import submit
from taskgraph.protocol.records import JobStatus, StatusRecord
from taskgraph.task import Task

PACKAGES = Path(__file__).parents[2] / "launchers"
DRIVER = Path(__file__).parents[2] / "integration" / "drivers" / "sums.py"
TOKEN = "ab" * 32


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("TASKGRAPH_ETCD", raising=False)
    monkeypatch.chdir(tmp_path)


def placed(job: str, on: str = "slurm", etcd: str = "etcd1:2379") -> PlacedJob:
    made = PlacedJob(job=job, on=on, where={"folder": "/srv"}, etcd=etcd, token=TOKEN, node_tls={"ca": "ca.pem"})
    keep_placed(made)
    return made


def found(*words: str) -> tuple[str, str, str]:
    entry = find_entry(cli.parser().parse_args(["status", *words]))
    return entry.name, entry.etcd, entry.token


def test_job_is_found_by_its_name_or_alone() -> None:
    assert find_placed("fit") is None and placed_names() == []
    assert find_placed(placed("fit").job) == placed("fit")
    assert found() == found("fit") == found("fit", "--etcd", "etcd1:2379") == ("fit", "etcd1:2379", TOKEN)
    assert found("fit", "--etcd", "other:2379") == ("fit", "other:2379", ""), "another job may have that name there"
    placed("grow")
    with pytest.raises(JobError, match="several jobs were submitted here: name one of fit, grow"):
        found()
    ended = KeptJob(run="r", status=StatusRecord(state=JobStatus.FINISHED))
    Runtime().keep_finished("fit", ended)
    assert found() == ("grow", "etcd1:2379", TOKEN), "the other one has ended"
    forget_placed("grow")
    placed("near", on="local", etcd="")  # its etcd ended with it
    with pytest.raises(UnknownJob, match="No job runs here"):
        found()


def test_only_the_owner_reads_the_token(tmp_path: Path) -> None:
    placed("fit")
    (file,) = tmp_path.rglob("fit.json")
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    file.write_text("{}")
    with pytest.raises(TaskGraphError, match=r"fit\.json cannot be read .*: remove it"):
        find_placed("fit")


async def test_an_earlier_run_is_not_taken_for_the_one_submitted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd = in_memory(monkeypatch)
    spec = JobSpec.local(Job(tasks=1, builder=lambda task_id: Task(), epochs=9, name="fit"))
    keep_placed(dataclasses.replace(placed("fit", etcd=ETCD), where={"run": "next"}))
    here, there = cli.parser().parse_args(["result", "fit"]), options("result")
    with pytest.raises(NotSubmitted, match="has no job 'fit'"):
        await run_of(here)
    await submit(etcd, spec)
    await run_of(here)  # a run that goes on is shown, whoever submitted it
    await Follower(etcd, spec, b"").cancel_job("enough")
    with pytest.raises(NotSubmitted, match="and not yet the one that was submitted here"):
        await run_of(here)
    assert await run_of(there) == spec.run
    keep_placed(dataclasses.replace(placed("fit", etcd=ETCD), where={"run": spec.run}))
    assert await run_of(here) == spec.run


async def run_of(words: argparse.Namespace) -> str:
    async with reach(words) as reached:
        return reached.spec.run


def test_nothing_is_made_if_it_could_not_be_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Runtime().make_placed_folder().rmdir()
    (tmp_path / "taskgraph" / "placed").touch()
    monkeypatch.syspath_prepend(str(PACKAGES))
    assert cli.main(["submit", str(DRIVER), "--on", "shell", "--etcd", ETCD, "--token-file", "token"]) != 0
    said = capsys.readouterr()
    assert "placed cannot be made" in said.err and not said.out
    assert [each.name for each in tmp_path.iterdir()] == ["taskgraph"], "not even a token"


def test_command_line_of_the_local_launcher_has_no_password() -> None:
    access = {"ca": "ca.pem", "username": "me", "password": "secret", "password_file": "word"}
    request = Request(
        job="fit",
        driver="fit.py",
        words=("--name", "my job"),
        nodes=3,
        min_nodes=1,
        etcd="etcd1:2379",
        etcd_access=access,
        token=TOKEN,
        token_file="fit.token",
        node_tls={"ca": "ca.pem", "cert": "cert.pem", "key": "key.pem", "name": "fit"},
        drain_s=60.0,
        options=argparse.Namespace(),
    )
    assert LocalLauncher().text(request) == (
        "taskgraph run fit.py --name 'my job' --nodes 3 --replace --etcd etcd1:2379 --etcd-ca ca.pem --etcd-user me "
        "--etcd-password-file word --token-file fit.token --tls-ca ca.pem --tls-cert cert.pem --tls-key key.pem "
        "--tls-name fit\n"
    )
    assert "secret" not in repr(request) and TOKEN not in repr(request)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("scale sums 0", "0 nodes: leave at least 1, or end the job with `taskgraph shutdown sums`"),
        ("scale sums -1", "-1 nodes: leave at least 1"),
        ("scale sums 3", "has no nodes on this host any longer: `taskgraph status sums` says how it ended"),
        ("logs sums --node n9", "no log of node 'n9' is on this host; there are: none"),
        ("logs sums", "no log of its nodes is on this host; there are: none"),
        ("scale other 3", "job 'other' was not submitted with `--on` on this host (there are: sums): say where"),
        ("logs run --node n9", "no log of node 'n9' is on this host; there are: none"),
        ("scale run 3", "job 'run' has no nodes on this host any longer"),
        ("scale sums 3 --on nowhere", "--on nowhere: there is no such launcher; installed: broken, "),
        ("submit fit.py --on broken", "launcher taskgraph_shell:NoSuchLauncher cannot be loaded"),
    ],
)
def test_wrong_words(
    words: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(PACKAGES))
    placed("sums", on="local", etcd="")
    (Runtime().make_job_folder("run") / "n1.log").touch()
    assert cli.main(words.split()) in (2, 3)
    assert says in capsys.readouterr().err
