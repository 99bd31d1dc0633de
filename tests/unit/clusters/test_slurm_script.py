"""The batch script of `submit --on slurm`, read by bash, and what the lines of Slurm's commands say."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from taskgraph.clusters.slurm.commands import queued_elements, run_slurm
from taskgraph.clusters.slurm.folder import Folder
from taskgraph.clusters.slurm.resources import Resources
from taskgraph.clusters.slurm.script import ElementSpec, array_words, script
from taskgraph.clusters.slurm.state import (
    QueuedElement,
    departures,
    parse_queue,
    surplus_elements,
    waiting_lines,
    why_ended,
    why_left,
)
from taskgraph.errors import JobError, TransportError

JOB = "JobId=9 ArrayJobId=7 JobState={state} Requeue={requeue} RunTime={ran} TimeLimit={limit} PreemptTime={preempted} "


def job(
    state: str = "RUNNING", *, requeue: int = 1, ran: str = "00:01:00", limit: str = "", preempted: str = ""
) -> str:
    """Returns what `scontrol --oneliner show job` says, in short."""
    limit, preempted = limit or "UNLIMITED", preempted or "None"
    return JOB.format(state=state, requeue=requeue, ran=ran, limit=limit, preempted=preempted)


def element(
    folder: Path, python: str = "python3", *, own_etcd: bool = True, listen: str = "$(hostname)"
) -> ElementSpec:
    kept = Folder(folder)
    return ElementSpec(
        job="fit",
        python=python,
        directory=folder.parent,
        folder=kept,
        own_etcd=own_etcd,
        access={"ETCD": f"file:{kept.etcd_at}" if own_etcd else "e1:2379", "TOKEN_FILE": str(kept.token)},
        submit=("submit", "fit.py", "-o", "text=it's; $HOME"),
        listen=listen,
        drain_s=60.0,
    )


def header(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_header_asks_for_what_the_user_wants(tmp_path: Path) -> None:
    wanted = Resources(partition="long", account="a1", qos="q", time="2:00:00", memory="4G", cpus=8, gpus=2)
    lines = header(script(element(tmp_path), wanted, 8, "#SBATCH --licenses=x:1\nmodule load cuda\n"))
    assert lines[:2] == ["--job-name=fit", "--array=0-7"]
    for line in ("partition=long", "account=a1", "qos=q", "time=2:00:00", "mem=4G", "cpus-per-task=8", "gres=gpu:2"):
        assert f"--{line}" in lines
    assert "--signal=TERM@90" in lines, "a node has drain_s, and a margin, before its time is over"
    assert lines[-1] == "--licenses=x:1"


def test_folders_with_odd_names(tmp_path: Path) -> None:
    """Slurm takes `#` for a comment, and `%` for a pattern in names of files only."""
    lines = header(script(element(tmp_path / "50% of #3" / "job"), Resources(), 1))
    assert f'--chdir="{tmp_path}/50% of #3"' in lines
    assert f'--output="{tmp_path}/50%% of #3/job/logs"/%a.log --open-mode=append' in lines


def test_lines_of_the_patch_run_before_the_node(tmp_path: Path) -> None:
    text = script(element(tmp_path), Resources(), 1, "module load cuda\n")
    assert text.index("module load cuda") < text.index("srun")


@pytest.mark.parametrize(
    "patch",
    [
        "#SBATCH --array=0-3",
        "#SBATCH -o x.log",
        "#SBATCH --no-requeue",
        "#SBATCH --chdir=/",
        "#SBATCH --signal=B:USR1@60",
    ],
)
def test_patch_may_not_break_what_the_launcher_relies_on(tmp_path: Path, patch: str) -> None:
    with pytest.raises(JobError, match="taskgraph sets"):
        script(element(tmp_path), Resources(), 1, patch)


@pytest.mark.parametrize("value", ["a b", 'a"b', "a\nb", "$(x)"])
def test_value_that_no_line_can_hold_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(JobError, match="--partition"):
        script(element(tmp_path), Resources(partition=value), 1)


@pytest.mark.parametrize("time", ["1", "1:30", "0:01:30", "0-0:1:30"])
def test_time_in_which_a_node_cannot_even_leave_is_refused(tmp_path: Path, time: str) -> None:
    with pytest.raises(JobError, match="drain_s"):
        script(element(tmp_path), Resources(time=time), 1)


@pytest.mark.parametrize("time", ["0", "2", "1:31", "1:00:00", "1-0", "0-1:00", "0-0:02:00"])
def test_time_as_sbatch_takes_it(tmp_path: Path, time: str) -> None:
    assert f"--time={time}" in header(script(element(tmp_path), Resources(time=time), 1))


def test_further_arrays_have_their_own_numbers_and_partition() -> None:
    assert array_words(8, 2, "low") == ["--array=8-9", "--partition=low"]
    assert array_words(5, 1) == ["--array=5"]


class Host:
    """Runs the script as Slurm would, with commands that write down how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "job folder"
        for name in ("bin", "job folder/left", "job folder/logs"):
            (folder / name).mkdir(parents=True)
        self.calls = folder / "calls"
        self.bin = folder / "bin"
        self.command("hostname", "echo m1")
        self.command("scontrol", f"[ $1 = --oneliner ] && {{ echo '{job()}'; exit; }}; touch {folder}/requeued")
        self.command("sleep", f"[ -e {folder}/requeued ] && kill -9 $PPID; true")

    def command(self, name: str, script: str) -> Path:
        path = self.bin / name
        write = f'{{ flock 9; printf "%s\\n" "{name}" "$@" ""; }} 9>>"{self.calls}" >&9'  # bash writes line by line
        path.write_text(f"#!/bin/bash\n{write}\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def run(self, text: str, number: int = 3) -> int:
        env = {
            **os.environ,
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": str(number),
            "SLURM_JOB_ID": "7",
        }
        return subprocess.run(["bash", "-c", text], env=env, timeout=20, check=False).returncode

    def called(self, name: str) -> list[list[str]]:
        calls = [call.splitlines() for call in self.calls.read_text().split("\n\n")] if self.calls.exists() else []
        return [call[1:] for call in calls if call and call[0] == name]


def test_element_starts_a_node_and_ends_with_its_job(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.command("srun", f'echo "$TASKGRAPH_ETCD $TASKGRAPH_TOKEN_FILE" > "{host.folder}/access"')
    assert host.run(script(element(host.folder, own_etcd=False), Resources(cpus=2), 4)) == 0
    (node,) = host.called("srun")
    assert node[:3] == ["--quiet", "--ntasks=1", "--cpus-per-task=2"]
    assert node[node.index("--name") + 1] == "3.0"
    assert node[node.index("--listen") + 1] == "m1"
    assert (host.folder / "access").read_text() == f"e1:2379 {host.folder / 'token'}\n"
    assert not host.called("scontrol")


def test_drained_element_is_queued_again_by_its_own_name(tmp_path: Path) -> None:
    """The job id of one element is that of the whole array: to requeue it would requeue all of them."""
    host = Host(tmp_path)
    host.command("srun", "exit 75")
    host.run(script(element(host.folder, own_etcd=False), Resources(), 4))
    assert ["requeue", "7_3"] in host.called("scontrol")


@pytest.mark.parametrize("said", [job(requeue=0), job(state="COMPLETING")], ids=["scaled down", "cancelled"])
def test_element_that_is_not_wanted_back_only_ends(tmp_path: Path, said: str) -> None:
    host = Host(tmp_path)
    host.command("srun", "exit 75")
    host.command("scontrol", f"echo '{said}'")
    assert host.run(script(element(host.folder, own_etcd=False), Resources(), 4)) == 0
    assert "requeue" not in [call[0] for call in host.called("scontrol")]


def test_node_that_dies_is_started_again(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.command("srun", f"mkdir {tmp_path}/died 2>/dev/null && exit 137; exit 0")
    assert host.run(script(element(host.folder, own_etcd=False), Resources(), 4)) == 0
    assert len(host.called("srun")) == 2


def test_element_that_starts_after_the_end_ends_at_once(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.command("srun", "exit 0")
    Folder(host.folder).ended.write_text("0\n")
    assert host.run(script(element(host.folder), Resources(), 4)) == 0
    assert not host.called("srun")


def test_first_element_runs_the_companion_with_the_users_words(tmp_path: Path) -> None:
    host, folder = Host(tmp_path), Folder(tmp_path / "job folder")
    host.command("srun", "exit 0")
    python = host.command("python", f'touch "{folder.etcd_at}"; echo 4 > "{folder.ended}"')
    assert host.run(script(element(folder.path, str(python)), Resources(), 4), number=0) == 4, "the job's code"
    (words,) = host.called("python")
    assert words[words.index("--own-etcd") + 1] == "m1"
    assert words[words.index("--") + 1 :][:4] == ["submit", "fit.py", "-o", "text=it's; $HOME"]


def test_companion_that_fails_is_started_again_after_longer_and_longer_pauses(tmp_path: Path) -> None:
    host, folder = Host(tmp_path), Folder(tmp_path / "job folder")
    host.command("srun", "exit 0")
    tries = f'echo >> "{tmp_path}/tries"; [ "$(wc -l < "{tmp_path}/tries")" = 4 ] && echo 0 > "{folder.ended}"; exit 1'
    python = host.command("python", tries)
    assert host.run(script(element(folder.path, str(python)), Resources(), 4), number=0) == 0
    assert [pause for (pause,) in host.called("sleep")][:3] == ["1", "2", "4"]


QUEUE = """7_0|RUNNING|None|m1
7_1|PENDING|BeginTime|
7_2|PENDING|BeginTime|
8_10|PENDING|Resources|
9|RUNNING|None|m2
"""


def test_lines_of_the_queue() -> None:
    found = parse_queue(QUEUE)
    assert [each.name for each in found] == ["7_0", "7_1", "7_2", "8_10"]
    assert [each.running for each in found] == [True, False, False, False]
    first, second = waiting_lines(found)
    assert first.startswith("elements 1-2 of the array: BeginTime") and "cred_expire" in first
    assert second == "element 10 of the array: Resources: no machine is free"


def test_first_element_stays_even_while_it_waits() -> None:
    elements = [
        QueuedElement(7, 0, "PENDING", "Resources", ""),
        *(QueuedElement(7, n, "RUNNING", "None", f"m{n}") for n in (1, 2)),
    ]
    elements.append(QueuedElement(8, 3, "PENDING", "Resources", ""))
    assert [[each.number for each in surplus_elements(elements, nodes)] for nodes in (4, 3, 2, 1)] == [
        [],
        [3],
        [3, 2],
        [3, 2, 1],
    ]


def test_element_that_moved_has_left_its_machine() -> None:
    before = [QueuedElement(7, number, "RUNNING", "None", f"m{number}") for number in range(4)]
    now = [
        before[0],
        QueuedElement(7, 1, "PENDING", "BeginTime", ""),
        QueuedElement(7, 2, "RUNNING", "None", "m9"),
        QueuedElement(7, 3, "COMPLETING", "None", "m3"),
    ]
    assert [gone.number for gone in departures(before, now)] == [1, 2]
    assert [gone.number for gone in departures(now, [])] == [0, 2, 3]


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (job(preempted="2026-11-29T17:00:00"), "preempted"),
        (job(requeue=0), "scaled"),
        (job(state="COMPLETING"), "cancelled"),
        (job(ran="00:29:00", limit="00:30:00"), "timeout"),
        (job(ran="00:01:00", limit="1-00:30:00"), "signalled"),
    ],
)
def test_why_an_element_left(said: str, kind: str) -> None:
    assert why_left(said, notice_s=90.0)[0] == kind


def test_why_an_element_ended_without_a_word() -> None:
    assert why_ended(job(state="OUT_OF_MEMORY"), machine_is_down=False)[0] == "oom"
    assert why_ended(job(state="PENDING"), machine_is_down=True)[0] == "lost"
    assert why_ended(job(state="PENDING"), machine_is_down=False)[0] == "requeued"
    assert why_ended("", machine_is_down=False)[0] == "ended"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(tmp_path)
    monkeypatch.setenv("PATH", f"{made.bin}:{os.environ['PATH']}")
    return made


async def test_busy_controller_is_asked_again(host: Host, tmp_path: Path) -> None:
    busy = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    host.command("squeue", f"mkdir {tmp_path}/asked 2>/dev/null && {{ {busy}; }}; echo '7_0|RUNNING|None|m1'")
    assert [each.name for each in await queued_elements([7])] == ["7_0"]


async def test_submission_that_may_have_happened_is_not_repeated(host: Host) -> None:
    host.command("sbatch", "echo 'error: Socket timed out on send/recv operation' >&2; exit 1")
    with pytest.raises(TransportError, match="squeue --me"):
        await run_slurm("sbatch", "x", again=False)
    assert len(host.called("sbatch")) == 1


async def test_job_that_slurm_has_forgotten_has_no_elements(host: Host) -> None:
    host.command("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert await queued_elements([7]) == []


async def test_host_without_slurm_says_where_to_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JobError, match="login node"):
        await run_slurm("sbatch", "x")
