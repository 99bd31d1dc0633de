"""The command line without a job: parsing, sources of options, exit codes."""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import taskgraph as tg
from taskgraph import cli
from taskgraph.commands import common, submitting
from taskgraph.commands.acting import signal_number
from taskgraph.commands.arguments import add_access_options
from taskgraph.commands.common import access_of, etcd_of, find_entry, token_of, token_of_new_job
from taskgraph.commands.drivers import job_of
from taskgraph.commands.running import print_result
from taskgraph.coordination.api import AccessRefused
from taskgraph.errors import DecodeError, JobError, JobRunning, Unavailable, UnknownJob
from taskgraph.launch import resuming
from taskgraph.launch.kept import KeptJob
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.protocol.records import JobStatus, StatusRecord
from taskgraph.system.environment import THREADS

RUNS = f"{__file__}:fit"
WAITS = "time.sleep(1.5); sys.exit(3)"
"""The end of a program that goes on for longer than its threads."""


@tg.job
def fit(tasks: int = 3, rate: float = 0.1) -> tg.Job:
    return tg.Job(tasks=tasks, builder=lambda task_id: tg.Task(), epochs=1)


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Hides the user's settings, and restores the environment."""
    for name in list(os.environ):
        if name.startswith("TASKGRAPH_"):
            monkeypatch.delenv(name)
    for name in (*THREADS, "PYTHONHASHSEED"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(*arguments: str) -> argparse.Namespace:
    made = argparse.ArgumentParser()
    made.add_argument("job", nargs="?")
    add_access_options(made)
    return made.parse_args(arguments)


def entry(name: str, *, pid: int | None = None) -> JobEntry:
    pid = os.getpid() if pid is None else pid
    return JobEntry(name=name, etcd="127.0.0.1:7", token="ab" * 32, pid=pid, embedded=True, tls={})


# -- parsing --------------------------------------------------------------------------------------------------


def test_main_takes_no_driver_argument() -> None:
    parse = cli.parser(driver=fit).parse_args
    assert parse(["run", "-o", "tasks=3"]).option == ["tasks=3"]
    assert parse(["launch"]).job is None
    with pytest.raises(SystemExit):
        parse(["run", "d.py"])


def test_no_command_lists_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == cli.USAGE
    said = capsys.readouterr()
    assert said.out == "" and "usage: taskgraph" in said.err and "\n  status " in said.err


def test_main_runs_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def main(arguments: list[str], function: object) -> int:
        assert function is fit
        seen.append(arguments)
        return 0

    monkeypatch.setattr(cli, "main", main)
    for given in ([], ["--nodes", "2"], ["status", "x"], ["--help"]):
        monkeypatch.setattr("sys.argv", ["fit.py", *given])
        with pytest.raises(SystemExit) as ended:
            tg.main(fit)
        assert ended.value.code == 0
    assert seen == [["run"], ["run", "--nodes", "2"], ["status", "x"], ["--help"]]


def test_spellings_of_signals() -> None:
    for text in ("SIGSTOP", "STOP", "stop", str(int(signal.SIGSTOP))):
        assert signal_number(text) is signal.SIGSTOP
    for text in ("SIGNONE", "999", ""):
        with pytest.raises(JobError, match="no such signal"):
            signal_number(text)


def test_options_and_name_of_job() -> None:
    job = job_of(
        argparse.Namespace(option=["tasks=5", "rate=0.5"], name="other", set=["gather-s=0.5"], min_nodes=3), fit
    )
    assert (job.tasks, job.name, job.settings.gather_s, job.min_nodes) == (5, "other", 0.5, 3)
    assert job.origin()[1] == {"tasks": 5, "rate": 0.5}, "nodes make the same job"
    assert job_of(argparse.Namespace(option=None, name=None, set=None, min_nodes=None), fit).name == "fit"
    for name in ("../x", "..", "a b"):
        with pytest.raises(JobError, match="a name has"):
            job_of(argparse.Namespace(option=None, name=name, set=None, min_nodes=None), fit)
    with pytest.raises(JobError, match="did you mean 'tasks'"):
        job_of(argparse.Namespace(option=["task=5"], name=None, set=None, min_nodes=None), fit)


# -- where etcd and the token are -------------------------------------------------------------------------------


def test_etcd_from_option_environment_file(monkeypatch: pytest.MonkeyPatch, apart: Path) -> None:
    assert etcd_of(options()) is None
    (apart / "taskgraph.toml").write_text('etcd = ["a:1", "b:2"]\netcd_ca = "ca.pem"\n')
    assert etcd_of(options()) == "a:1,b:2"
    files = access_of(options("--etcd-key", "k.pem", "--cert", "c.pem"))  # as etcdctl calls it
    assert files == {name: str(apart / f"{file}.pem") for name, file in (("ca", "ca"), ("cert", "c"), ("key", "k"))}
    monkeypatch.setenv("TASKGRAPH_ETCD", "env:3")
    monkeypatch.setenv("TASKGRAPH_ETCD_CA", "env.pem")
    monkeypatch.setenv("TASKGRAPH_ETCD_KEY", "/env.key")
    assert etcd_of(options()) == "env:3"
    assert access_of(options()) == {"ca": str(apart / "env.pem"), "key": "/env.key"}
    assert etcd_of(options("--etcd", "given:4")) == "given:4"


def test_password_of_etcd_user(monkeypatch: pytest.MonkeyPatch, apart: Path) -> None:
    assert access_of(options()) == {}
    with pytest.raises(JobError, match="user 'worker' is missing: name a file with --etcd-password-file"):
        access_of(options("--etcd-user", "worker"))
    (apart / "word").write_text("from file\n")
    (apart / "empty").write_text("\n")
    found = access_of(options("--etcd-user", "worker", "--etcd-password-file", "word"))
    again = {"password_file": str(apart / "word")}
    assert found == {"username": "worker", "password": "from file", **again}
    for file, says in (("absent", "No such file"), ("empty", "is empty")):
        with pytest.raises(JobError, match=says):
            access_of(options("--etcd-user", "worker", "--etcd-password-file", file))
    (apart / "taskgraph.toml").write_text('etcd_user = "other"\netcd_password_file = "word"\n')
    assert access_of(options()) == {"username": "other", "password": "from file", **again}
    monkeypatch.setenv("TASKGRAPH_ETCD_PASSWORD", "from environment")
    assert access_of(options()) == {"username": "other", "password": "from environment"}
    (apart / "taskgraph.toml").unlink()
    with pytest.raises(JobError, match="Give --etcd-user"):
        access_of(options())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('etcd = ["a:1", 2]', "etcd = ['a:1', 2]: must be \"HOST:PORT,...\", or a list of such texts"),
        ("etcd = 5", "etcd = 5: must be"),
        ("etcd = []", "etcd = []: must be"),
        ('etcd = ""', "etcd = '': must be"),
        ("tls_ca = true", "tls_ca = True: must be a text"),
        ("insecure_listen = 2", "insecure_listen = 2: must be true or false"),
        ('etc = "a:1"', "nothing here is called 'etc'; it may say etcd, etcd_ca, etcd_cert, etcd_key, etcd_user, "),
        ('[taskgraph]\netcd = "a:1"', "insecure_listen, outside of any table"),
    ],
)
def test_wrong_configuration_file_is_error(
    line: str, says: str, apart: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (apart / "taskgraph.toml").write_text(line)
    assert cli.main(["status", "fit"]) == cli.USAGE
    said = capsys.readouterr().err
    assert f"{apart / 'taskgraph.toml'}: " in said and says in said


@pytest.mark.skipif(sys.platform != "linux", reason="a working directory cannot be removed everywhere")
def test_removed_working_directory_is_named(
    monkeypatch: pytest.MonkeyPatch, apart: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (apart / "clone").mkdir()
    monkeypatch.chdir(apart / "clone")
    (apart / "clone").rmdir()
    for arguments in (["run", "examples/fit.py"], ["status", "fit"]):
        if arguments[0] == "status":
            monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", ".")
        assert cli.main(arguments) == cli.FAILED
        assert capsys.readouterr().err == "taskgraph: the working directory was removed: `cd` to one that is there\n"


def test_configuration_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, apart: Path) -> None:
    (apart / "taskgraph.toml").write_text('etcd = "theirs:1"')
    stat, theirs = os.stat, os.getuid() + 1

    def found(path: object, *args: object, **how: object) -> os.stat_result:
        said = stat(path, *args, **how)  # type: ignore[call-overload]
        return os.stat_result((*said[:4], theirs, *said[5:])) if str(path).endswith(".toml") else said

    monkeypatch.setattr("os.stat", found)
    assert etcd_of(options()) == "theirs:1", "a directory that some users share is in their hands"
    apart.chmod(0o1777)
    with pytest.raises(JobError, match=rf"is another user's \(id {theirs}\), in a directory where everybody may write"):
        etcd_of(options())


def test_token_from_file(monkeypatch: pytest.MonkeyPatch, apart: Path) -> None:
    assert token_of(options()) is None
    (apart / "good").write_text("ab" * 32 + "\n")
    (apart / "bad").write_text("not hex")
    assert token_of(options("--token-file", "good")) == "ab" * 32
    monkeypatch.setenv("TASKGRAPH_TOKEN_FILE", "good")
    assert token_of(options()) == "ab" * 32
    with pytest.raises(JobError, match="not a token"):
        token_of(options("--token-file", "bad"))
    (apart / "empty").write_text("\n")
    with pytest.raises(JobError, match="not a token"):
        token_of(options("--token-file", "empty"))
    with pytest.raises(JobError, match=r"there is no such file\. `taskgraph submit` writes it"):
        token_of(options("--token-file", "absent"))


def test_token_file_counts_for_jobs_of_this_host(apart: Path) -> None:
    Runtime().put(entry("fit"))
    (apart / "other").write_text("cd" * 32)
    assert find_entry(options("fit", "--token-file", "other")).token == "cd" * 32
    with pytest.raises(JobError, match="--token-file absent: there is no such file"):
        find_entry(options("fit", "--token-file", "absent"))


def test_new_job_writes_token_file(apart: Path) -> None:
    assert token_of_new_job(options()) is None
    made = token_of_new_job(options("--token-file", "new"))
    assert made is not None and made.written and (apart / "new").stat().st_mode & 0o777 == 0o600
    assert token_of(options("--token-file", "new")) == made.token
    again = token_of_new_job(options("--token-file", "new"))
    assert again is not None and again.token == made.token and not again.written
    again.discard()
    assert (apart / "new").exists(), "it is somebody else's"
    made.discard()
    assert not (apart / "new").exists()
    other = token_of_new_job(options(), Path("job.token"))
    assert other is not None and other.written
    with pytest.raises(JobError, match=r"job\.token exists already: use its token with --token-file job\.token"):
        token_of_new_job(options(), Path("job.token"))
    with pytest.raises(JobError, match="cannot be written: No such file"):
        token_of_new_job(options("--token-file", "no/such/folder"))


class Connected:
    """In place of a connection to etcd."""

    async def __aenter__(self) -> Connected:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("meets", ["opened", "plan", "begin"])
@pytest.mark.parametrize(
    "error",
    [AccessRefused("may not"), JobRunning("it runs"), DecodeError("what?"), Unavailable("away"), KeyboardInterrupt()],
)
def test_failed_submit_leaves_no_token(
    monkeypatch: pytest.MonkeyPatch, apart: Path, meets: str, error: BaseException
) -> None:
    def opened(*_: Any) -> Connected:
        return Connected()

    async def plan(*_: Any, **__: Any) -> tuple[None, None]:
        return None, None

    async def fail(*_: Any, **__: Any) -> None:
        raise error

    def fail_at_once(*_: Any) -> None:
        raise error

    fails = fail_at_once if meets == "opened" else fail
    for name, does in {"opened": opened, "plan": plan, "begin": plan, meets: fails}.items():
        monkeypatch.setattr(submitting if name == "opened" else resuming, name, does)
    given = cli.parser(driver=fit).parse_args(["submit", "--etcd", "127.0.0.1:1"])
    with pytest.raises(type(error)):
        submitting.submit(given, fit)
    # Once it is sent it is not known what became of it, unless it was refused: then nodes need the token.
    sent = meets == "begin" and isinstance(error, Unavailable | KeyboardInterrupt)
    assert (apart / "fit.token").exists() == sent


def test_job_found_by_name_or_alone() -> None:
    # Not that there is none: root, or a shell with another TMPDIR, looks elsewhere than who started it.
    none = f"No job was started on this host (looked in {Runtime().root}). Elsewhere: give its name and --etcd."
    with pytest.raises(UnknownJob, match=re.escape(none)):
        find_entry(options())
    Runtime().put(entry("one"))
    assert find_entry(options()).name == "one"
    assert find_entry(options("one")).etcd == "127.0.0.1:7"
    Runtime().put(entry("two"))
    with pytest.raises(JobError, match="name one of one, two"):
        find_entry(options())
    with pytest.raises(UnknownJob, match=r"No job 'three' runs here\. Running here: one, two\. Elsewhere: --etcd\."):
        find_entry(options("three"))


@pytest.mark.parametrize("command", ["shutdown", "status", "events", "result", "token", "launch"])
@pytest.mark.parametrize("etcd", [(), ("--etcd", "a:1")])
def test_empty_job_name_is_error(command: str, etcd: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    Runtime().put(entry("one"))
    assert cli.main([command, "", *etcd]) == cli.USAGE
    assert "the job's name is empty" in capsys.readouterr().err
    assert cli.main(["launch", ""], fit) == cli.USAGE


def test_absent_etcd_is_two_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskgraph.coordination.etcd.coordinator._FIRST_CONTACT_S", 0.5)
    assert cli.main(["status", "fit", "--etcd", "127.0.0.1:1"]) == cli.UNREACHABLE
    said = capsys.readouterr().err
    assert said.startswith("taskgraph: No etcd answers at 127.0.0.1:1 (connection refused): start one ")
    assert said.count("\n") == 1 and len(said) <= 160


def gone(name: str, *, embedded: bool) -> JobEntry:
    """An entry of a killed launcher."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return JobEntry(name=name, etcd="10.0.0.1:7", token="ab" * 32, pid=done.pid, embedded=embedded, tls={})


def test_ended_jobs_are_named() -> None:
    for number, name in enumerate(("a", "b", "c", "d", "e", "f")):
        Runtime().keep_finished(name, KeptJob(status=StatusRecord(state=JobStatus.FINISHED)))
        os.utime(Runtime().root / "finished" / f"{name}.json", (number, number))
    found = "No job runs here. Ended here: f, e, d, c, b, ... Elsewhere: give its name and --etcd."
    with pytest.raises(UnknownJob, match=re.escape(found)):
        find_entry(options())
    with pytest.raises(
        UnknownJob, match=r"No job 'x' runs here\. Ended here: f, e, d, c, b, \.\.\. Elsewhere: --etcd\."
    ):
        find_entry(options("x"))


@pytest.mark.parametrize("embedded", [True, False])
def test_killed_launcher_hides_earlier_run(embedded: bool, capsys: pytest.CaptureFixture[str]) -> None:
    runtime = Runtime()
    runtime.keep_finished("fit", KeptJob(status=StatusRecord(state=JobStatus.FINISHED)))
    runtime.put(killed := gone("fit", embedded=embedded))
    (runtime.make_job_folder("fit") / "n1.log").write_text("hello")
    for command in ("status", "events", "result"):
        assert cli.main([command, "fit"]) == cli.UNREACHABLE
        said = capsys.readouterr()
        assert said.out == "" and f"the launcher of job 'fit' (process {killed.pid}) was killed" in said.err
        assert ("its etcd ended with it" in said.err) == embedded == ("--etcd 10.0.0.1:7" not in said.err)
        assert f"logs of its nodes: {runtime.make_job_folder('fit')}" in said.err


@pytest.mark.parametrize("command", [("kill", "fit", "--task", "0"), ("shutdown", "fit"), ("status",)])
@pytest.mark.parametrize("then", ["finished", "began again", "killed", "nothing", "runs"])
def test_job_ends_while_command_connects(
    command: tuple[str, ...], then: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = Runtime()
    runtime.put(found := entry("fit"))

    def connect(*access: object) -> None:
        if then != "runs":
            runtime.remove("fit")
        if then == "finished":
            runtime.keep_finished("fit", KeptJob(status=StatusRecord(state=JobStatus.FINISHED)))
        elif then == "began again":
            runtime.put(replace(found, etcd="127.0.0.1:8"))
        elif then == "killed":
            runtime.put(gone("fit", embedded=True))
        raise Unavailable("No etcd answers at 127.0.0.1:7")

    monkeypatch.setattr(common, "opened", connect)
    assert cli.main([*command]) == cli.UNREACHABLE
    said = capsys.readouterr().err
    says = {
        "finished": "job 'fit' has ended (finished): see `taskgraph status fit`",
        "began again": "another run of job 'fit' has begun",
        "killed": "was killed, and its etcd ended with it",
        "nothing": "job 'fit' has just ended",
        "runs": "No etcd answers at 127.0.0.1:7",
    }
    assert says[then] in said and ("No etcd answers" in said) == (then == "runs")


# -- exit codes and threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["run", "nowhere.py"], 2, "there is no file"),
        (["run", "no_such_module_of_anyone"], 2, "no module"),
        (["run", "raises.py"], 2, "fit(...) of raises.py failed: KeyError: 'XX' (at "),
        (["submit", "raises.py", "--etcd", "a:1"], 2, "KeyError: 'XX' (at "),
        (["launch", "raises.py"], 2, "raises.py, line 4)"),
        (["status"], 3, "No job was started on this host"),
        (["result", "x"], 3, "No job 'x' runs here."),
        (["kill", "x", "--task", "0"], 3, "No job 'x' runs here."),
        (["submit", f"{__file__}:fit"], 2, "submit needs your etcd"),
        (["node", "--job", "x"], 2, "give --etcd"),
        (["node", "--job", "x", "--etcd", "a:1"], 2, "--token-file"),
        (["node", "--job", "x/y", "--etcd", "a:1"], 2, "--job 'x/y': no job can have that name: a name has 1 to 100"),
        (["launch", "x", "-o", "a=1"], 2, "--resume-changed and --fresh go with a driver, or with `submit`"),
        (["launch", "x", "--timeout", "9"], 2, "--timeout and --json go with a driver; "),
        (["launch", "x", "--json"], 2, "`taskgraph result x --json`"),
        (
            ["map", "os.path:getsize", "--files", __file__, "--output", "no/such"],
            2,
            "--output no/such: there is no directory no",
        ),
    ],
)
def test_errors_and_exit_codes(
    arguments: list[str], code: int, says: str, apart: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (apart / "raises.py").write_text("import taskgraph as tg\n@tg.job\ndef fit():\n    return {}['XX']\n")
    assert cli.main(arguments) == code
    said = capsys.readouterr()
    assert said.out == "" and says in said.err
    assert said.err.startswith("taskgraph: ") and "Traceback" not in said.err


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "Too many open files: `ulimit -n 1024` allows more"),
        (
            OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
            "no process can be started (Resource temporarily unavailable)",
        ),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x"), "taskgraph: /x: No space left on device"),
        (RuntimeError("can't start new thread"), "can't start new thread: a limit of this process (`ulimit -u`"),
    ],
)
def test_system_limit_is_one_line(
    error: Exception, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(_: object) -> int:
        raise error

    monkeypatch.setattr(cli, "_load_command", lambda _: command)
    assert cli.main(["status"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("taskgraph: ") and says in line


def test_too_few_open_files(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (20, 20))
    assert cli.main(["status"]) == 1
    assert capsys.readouterr().err == (
        "taskgraph: only 20 files may be open at a time here: `ulimit -n 1024` allows more\n"
    )
    monkeypatch.setattr("resource.getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)  # a number below all others
    monkeypatch.setattr(cli, "_load_command", lambda _: lambda _: 0)
    assert cli.main(["status"]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "d.py", "tasks=3"], "(an option of the job is set with -o tasks=3); see `taskgraph run --help`"),
        (["run", "d.py", "--taks", "3"], "unrecognized arguments: --taks 3; see `taskgraph run --help`"),
        (["run", "d.py", "--nodes", "x"], "argument --nodes: invalid int value: 'x'; see `taskgraph run --help`"),
        (["run", "d.py", "--node", "2"], "unrecognized arguments: --node 2 (did you mean --nodes?); see"),
        (["kill", "x", "--task", "1", "--back"], "unrecognized arguments: --back (did you mean --backup?); see"),
        (["events", "x", "--folow"], "unrecognized arguments: --folow (did you mean --follow?); see"),
        (["status", "x", "y=1"], "unrecognized arguments: y=1; see `taskgraph status --help`"),
        (["status", "x", "y"], "unrecognized arguments: y; see `taskgraph status --help`"),
        (["--taks", "run", "d.py"], "unrecognized arguments: --taks; see `taskgraph --help`"),
        (["stauts"], "taskgraph: no command 'stauts'; did you mean status? See `taskgraph --help`"),
        (["fit.py"], "no command 'fit.py'; a driver is run with `taskgraph run fit.py`; see"),
        (["run", __file__ + ":fit", "--rate", "5"], "rate is an option of fit: -o rate=5; see `taskgraph run --help`"),
        (["run", __file__ + ":fit", "--rate=5"], "rate is an option of fit: -o rate=5; see `taskgraph run --help`"),
        (["drain", "x"], "--node; see `taskgraph drain --help`"),
        (["run", "d.py", "--etcd", ""], "argument --etcd: it is empty: give a value, or leave it out; see"),
        (["submit", "d.py", "--name="], "argument --name: it is empty: give a value, or leave it out; see"),
        (["shutdown", "fit", "--etcd", ""], "argument --etcd: it is empty: give a value, or leave it out; see"),
        (["launch", "fit", "--tls", ""], "argument --tls: it is empty: give a value, or leave it out; see"),
        (["drain", "fit", "--node", ""], "argument --node: it is empty: give a value; see"),
        (["run", ""], "argument DRIVER: it is empty: give a value; see"),
        (["certs", ""], "argument DIR: it is empty: give a value; see"),
    ],
)
def test_mistyped_command_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert says in said.err and said.err.startswith("taskgraph") and said.err.count("\n") == 1


def test_help_begins_with_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    for command, own in (("chaos", "--mtbf"), ("kill", "--signal"), ("launch", "--nodes"), ("drain", "--node")):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        usage = capsys.readouterr().out
        assert usage.index(own) < usage.index("--etcd") and "--tls" not in usage, usage
        with pytest.raises(SystemExit):
            cli.main([command, "--help-all"])
        usage = capsys.readouterr().out
        assert usage.index(own) < usage.index("--etcd-user") < usage.index("--tls"), usage


@pytest.mark.parametrize("words", [("chaos", "x", "--mtbf"), ("chaos", "x", "--for-s"), ("run", RUNS, "--timeout")])
@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_times_must_be_positive(words: tuple[str, ...], seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words[:-1], f"{words[-1]}={seconds}"]) == 2
    assert "seconds above 0" in capsys.readouterr().err


@pytest.mark.parametrize(("as_json", "kept"), [(True, True), (False, True), (False, False)])
def test_full_disk_names_command_with_values(
    as_json: bool, kept: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def prints(options: argparse.Namespace) -> int:
        result = tg.JobResult(name="fit", values={0: [1, 2]})
        print_result(result, as_json=as_json, kept=kept)
        return 0

    monkeypatch.setattr(cli, "_load_command", lambda name: prints)
    monkeypatch.setattr(cli, "drop_unwritten", lambda: True)
    monkeypatch.setattr(sys.stdout, "write", write)
    assert cli.main(["status"]) == 1
    said = "taskgraph: the job finished: `taskgraph result fit` has its values, as far as they are kept\n" * kept
    assert capsys.readouterr().err == f"taskgraph: standard output: No space left on device\n{said}"


@pytest.mark.parametrize(
    ("failures", "says"),
    [
        (1, "job fit: 1,000 epochs in 2.00 s, 1 failover (7 tasks), 1 restart\n"),
        (0, ", 7 tasks failed over, 1 restart\n"),
    ],
)
def test_summary_counts_failures_and_tasks(failures: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = tg.JobResult(name="fit", epochs=1000, failovers=7, restarts=1, wall_s=2.0)
    print_result(result, as_json=False, kept=True, failures=failures)
    assert capsys.readouterr().err.endswith(says)


SEARCHED = '''import taskgraph as tg


@tg.job
def searched(where: str, depth: int = 3, rate: float | None = None) -> tg.Job:
    """A job with a docstring.

    Args:
        where: a folder,
            which is searched.
        rate: a second.
    """
    return tg.Job(tasks=1, builder=lambda task_id: tg.Task(), epochs=1)
'''

OPTIONS = [
    "options of searched:",
    "  -o where=...  str           a folder, which is searched.",
    "  -o depth=3    int",
    "  -o rate=None  float | None  a second.",
]


@pytest.mark.parametrize("command", ["run", "submit"])
def test_help_lists_options_of_driver(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(SEARCHED)
    with pytest.raises(SystemExit) as left:
        cli.main([command, str(driver), "--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    at = lines.index(OPTIONS[0])
    assert lines[at : at + 4] == OPTIONS
    assert out.index(OPTIONS[0]) < out.index("  --name NAME") < out.index("  --etcd HOST"), "before all others"
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "options of" not in capsys.readouterr().out


def test_help_of_launch_marks_driver_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["launch", "--help"])
    said = " ".join(capsys.readouterr().out.partition("options:\n")[2].split())
    of_a_driver = ("--option NAME=VALUE", "--set NAME=VALUE", "--name NAME", "--timeout S", "--json", "--resume")
    for option in (*of_a_driver, "--resume-changed", "--fresh"):
        assert f"{option} with a driver: " in said, option
    assert "--logs with" not in said and "--nodes N with" not in said
    with pytest.raises(SystemExit):
        cli.main(["launch", "--help"], fit)
    assert "a driver as for run; without it: as run" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "with a driver" not in said and "0: all in this process" in said


def test_ctrl_c_during_import() -> None:
    code = """
import runpy, sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "taskgraph.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
runpy.run_module("taskgraph", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "taskgraph: interrupted\n")


def test_main_needs_job_function() -> None:
    for wrong, named in ((fit(), "the job that it makes"), (entry, "entry")):
        with pytest.raises(JobError, match=rf"takes a function decorated with @tg\.job, as in .*, not {named}"):
            tg.main(wrong)


class Talks(tg.Task, state=["x"]):
    def setup(self) -> None:
        self.x = 0

    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.talk)

    def talk(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        self.x += 1
        print("no end", end="")
        self.log.info("said")


@tg.job
def talks() -> tg.Job:
    return tg.Job(tasks=1, epochs=1, builder=Talks)


def test_logs_and_json_in_one_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert cli.main(["run", "--nodes", "0", "--json", "--logs"], talks) == 0
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["name"] == "talks" and said.out.startswith("no end\n")
    assert "taskgraph.task.0 INFO said" in said.err.splitlines()


class Fails(tg.Task):
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.processor(self.run)

    def run(self, epoch: tg.Epoch, ins: tg.Inputs, outs: tg.Outputs) -> None:
        print("no end", end="")
        raise ValueError("on purpose")


@tg.job
def fails() -> tg.Job:
    return tg.Job(tasks=1, epochs=1, builder=Fails)


def test_json_of_failed_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--nodes", "0", "--json"], fails) == 1
    said = capsys.readouterr()
    seen = json.loads(said.out.splitlines()[-1])
    assert (seen["name"], seen["state"], seen["task"], seen["where"]) == ("fails", "failed", 0, "run")
    assert "on purpose" in seen["reason"] and "ValueError: on purpose" in seen["traceback"]
    assert seen["result"] is None and "job failed: task 0" in said.err
    assert cli.main(["run", "--nodes", "0"], fails) == 1
    assert capsys.readouterr().out == "no end"


class Refuses(tg.Task):
    def compose(self, epoch: tg.Epoch) -> None:
        epoch.map("rows", "rows", self.half)

    def half(self, epoch: tg.Epoch, row: int) -> int:
        if row % 2:
            raise ValueError("odd")
        return row // 2


@tg.job
def refuses() -> tg.Job:
    queue = tg.WorkQueue(range(5), attempts=1, on_error="set aside")
    return tg.Job(tasks=1, epochs=1, builder=Refuses, queues={"rows": queue})


def test_run_names_pieces_set_aside(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--nodes", "0"], refuses) == 0
    assert "2 pieces of rows set aside: 1, 3; --json has the errors" in capsys.readouterr().err


def test_token_outlives_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    killed = gone("fit", embedded=False)
    Runtime().put(killed)
    assert find_entry(options("fit", "--etcd", killed.etcd)).token == killed.token
    assert find_entry(options("fit", "--etcd", "another:1")).token == ""
    for etcd in ((), ("--etcd", killed.etcd)):
        assert cli.main(["token", "fit", *etcd]) == 0
        assert capsys.readouterr().out == f"{killed.token}\n"
    Runtime().put(gone("fit", embedded=True))
    assert cli.main(["token", "fit"]) == cli.UNREACHABLE, "its etcd is gone"


@pytest.mark.parametrize(
    ("daemon", "then", "reported"), [(False, "sys.exit(3)", True), (True, "sys.exit(3)", False), (False, WAITS, False)]
)
def test_waiting_for_thread_is_reported(daemon: bool, then: str, reported: bool) -> None:
    program = f"""
import sys, threading, time
from taskgraph import cli
cli._THREADS_S = 0.1
threading.Thread(target=time.sleep, args=(1.0,), name="metrics", daemon={daemon}).start()
cli.report_threads()
{then}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    said = "taskgraph: done; waiting for threads that the driver started: metrics (Ctrl-C ends them"
    assert done.returncode == 3 and done.stderr.startswith(said) is reported
