"""The command line without a job: parsing, where things come from, exit codes."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import taskgraph as tg
from taskgraph import cli
from taskgraph.commands import common, running
from taskgraph.commands.acting import signal_number
from taskgraph.commands.arguments import add_etcd_options
from taskgraph.commands.common import access_of, etcd_of, find_entry, token_for, token_of
from taskgraph.commands.running import job_of, print_result
from taskgraph.coordination.api import AccessRefused
from taskgraph.errors import DecodeError, JobError, JobRunning, Unavailable, UnknownJob
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.system.environment import THREADS
from taskgraph.system.files import write_whole


@tg.job
def fit(tasks: int = 3, rate: float = 0.1) -> tg.Job:
    return tg.Job(tasks=tasks, builder=lambda task_id: tg.Task(), epochs=1)


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing of this host's user is seen, and nothing of these tests is left in the environment."""
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
    add_etcd_options(made)
    return made.parse_args(arguments)


def entry(name: str, *, pid: int | None = None) -> JobEntry:
    pid = os.getpid() if pid is None else pid
    return JobEntry(name=name, etcd="127.0.0.1:7", token="ab" * 32, pid=pid, embedded=True, tls={})


# -- parsing --------------------------------------------------------------------------------------------------


def test_every_command_parses_as_documented() -> None:
    parse = cli.parser().parse_args
    run = parse(["run", "d.py", "--nodes", "7", "-o", "tasks=15", "-o", "epochs=11", "--name", "x", "--timeout", "9"])
    assert (run.driver, run.nodes, run.option, run.name) == ("d.py", 7, ["tasks=15", "epochs=11"], "x")
    assert (run.timeout, run.json) == (9.0, False)
    assert parse(["run", "d.py"]).nodes == 4
    node = parse(["node", "--job", "x", "--listen", "h", "--token-file", "t", "--etcd", "a:1,b:2"])
    assert (node.job, node.listen, node.token_file, node.etcd) == ("x", "h", "t", "a:1,b:2")
    kill = parse(["kill", "x", "--task", "3", "--backup"])
    assert (kill.job, kill.task, kill.backup, kill.node, kill.signal) == ("x", 3, True, None, "SIGKILL")
    assert parse(["status", "--watch", "--json"]).job is None
    assert parse(["launch", "x", "--nodes", "2"]).job == "x"
    for command in (
        "submit d.py",
        "events x --follow",
        "result x --json",
        "drain x --node n1",
        "shutdown x",
        "token x",
    ):
        assert parse(command.split()).command == command.split()[0]


def test_a_driver_of_its_own_needs_no_name() -> None:
    parse = cli.parser(driver=fit).parse_args
    assert parse(["run", "-o", "tasks=3"]).option == ["tasks=3"]
    assert parse(["launch"]).job is None
    with pytest.raises(SystemExit):
        parse(["run", "d.py"])


def test_without_a_command_there_is_the_list_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == cli.USAGE
    said = capsys.readouterr()
    assert said.out == "" and "usage: taskgraph" in said.err and "\n  status " in said.err


@pytest.mark.parametrize("arguments", [["fly"], ["run"], ["run", "d.py", "--nodes", "x"], ["drain", "x"]])
def test_a_wrong_command_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "see `taskgraph" in capsys.readouterr().err


def test_main_of_a_driver_runs_without_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_signal_has_three_spellings() -> None:
    for text in ("SIGSTOP", "STOP", "stop", str(int(signal.SIGSTOP))):
        assert signal_number(text) is signal.SIGSTOP
    for text in ("SIGNONE", "999", ""):
        with pytest.raises(JobError, match="no such signal"):
            signal_number(text)


def test_options_and_a_name_make_the_job() -> None:
    job = job_of(argparse.Namespace(option=["tasks=5", "rate=0.5"], name="other", set=["gather-s=0.5"]), fit)
    assert (job.tasks, job.name, job.settings.gather_s) == (5, "other", 0.5)
    assert job.origin()[1] == {"tasks": 5, "rate": 0.5}, "nodes make the same job"
    assert job_of(argparse.Namespace(option=None, name=None, set=None), fit).name == "fit"
    for name in ("../x", "..", "a b"):
        with pytest.raises(JobError, match="a name has"):
            job_of(argparse.Namespace(option=None, name=name, set=None), fit)
    with pytest.raises(JobError, match="did you mean 'tasks'"):
        job_of(argparse.Namespace(option=["task=5"], name=None, set=None), fit)


# -- where etcd and the token are -------------------------------------------------------------------------------


def test_etcd_comes_from_the_option_else_the_environment_else_the_file(
    monkeypatch: pytest.MonkeyPatch, apart: Path
) -> None:
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


def test_a_password_comes_from_a_file_or_the_environment_and_belongs_to_a_user(
    monkeypatch: pytest.MonkeyPatch, apart: Path
) -> None:
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


def test_a_file_that_is_no_toml_is_named(apart: Path) -> None:
    (apart / "taskgraph.toml").write_text("etcd = [")
    with pytest.raises(JobError, match=r"taskgraph\.toml cannot be read"):
        etcd_of(options())


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
def test_a_file_with_something_wrong_is_not_passed_over(
    line: str, says: str, apart: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong type ended in a traceback, or in an error of somebody else's server; a wrong key was not noticed."""
    (apart / "taskgraph.toml").write_text(line)
    assert cli.main(["status", "fit"]) == cli.USAGE
    told = capsys.readouterr().err
    assert f"{apart / 'taskgraph.toml'}: " in told and says in told


def test_a_working_directory_that_may_not_be_entered_has_no_file(monkeypatch: pytest.MonkeyPatch, apart: Path) -> None:
    """As after `su` in another user's home: every command ended with "Permission denied: 'taskgraph.toml'"."""
    stat, access, entered = os.stat, os.access, False

    def refused(path: object, *args: object, **how: object) -> os.stat_result:
        if str(path).endswith("taskgraph.toml"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "taskgraph.toml")
        return stat(path, *args, **how)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr("os.stat", refused)
    monkeypatch.setattr("os.access", lambda path, mode: entered if path == "." else access(path, mode))
    assert etcd_of(options()) is None
    entered = True  # then it is the file's own fault, e.g. that of a link
    (apart / "taskgraph.toml").symlink_to("elsewhere")
    with pytest.raises(JobError, match=f"{apart / 'taskgraph.toml'} cannot be read: Permission denied"):
        etcd_of(options())


@pytest.mark.skipif(sys.platform != "linux", reason="a working directory cannot be removed everywhere")
def test_a_working_directory_that_was_removed_is_named(
    monkeypatch: pytest.MonkeyPatch, apart: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As that of a shell, where a clone was made anew from another one: it ended in a traceback."""
    (apart / "clone").mkdir()
    monkeypatch.chdir(apart / "clone")
    (apart / "clone").rmdir()
    for arguments in (["run", "examples/fit.py"], ["status", "fit"]):
        if arguments[0] == "status":
            monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", ".")
        assert cli.main(arguments) == cli.FAILED
        assert capsys.readouterr().err == "taskgraph: the working directory was removed: `cd` to one that is there\n"


def test_a_file_that_another_user_has_put_where_everybody_may_is_refused(
    monkeypatch: pytest.MonkeyPatch, apart: Path
) -> None:
    """As into /tmp: whoever is asked for etcd by it decides what code our nodes run."""
    (apart / "taskgraph.toml").write_text('etcd = "theirs:1"')
    stat, theirs = os.stat, os.getuid() + 1

    def found(path: object, *args: object, **how: object) -> os.stat_result:
        told = stat(path, *args, **how)  # type: ignore[call-overload]
        return os.stat_result((*told[:4], theirs, *told[5:])) if str(path).endswith(".toml") else told

    monkeypatch.setattr("os.stat", found)
    assert etcd_of(options()) == "theirs:1", "a directory that some users share is in their hands"
    apart.chmod(0o1777)
    with pytest.raises(JobError, match=rf"is another user's \(id {theirs}\), in a directory where everybody may write"):
        etcd_of(options())


def test_a_link_that_another_user_has_put_where_everybody_may_is_refused_though_it_leads_to_a_file_of_ours(
    monkeypatch: pytest.MonkeyPatch, apart: Path
) -> None:
    """They say which of our files is meant: a file of another site's etcd, or one that a program wrote for us."""
    (apart / "ours").write_text('etcd = "ours:1"')
    (apart / "taskgraph.toml").symlink_to("ours")
    lstat, theirs = os.lstat, os.getuid() + 1

    def found(path: str | os.PathLike[str]) -> os.stat_result:
        told = lstat(path)
        return os.stat_result((*told[:4], theirs, *told[5:])) if str(path).endswith(".toml") else told

    apart.chmod(0o1777)
    assert etcd_of(options()) == "ours:1"
    monkeypatch.setattr("os.lstat", found)
    with pytest.raises(JobError, match=rf"is another user's \(id {theirs}\), in a directory where everybody may write"):
        etcd_of(options())


def test_a_file_that_is_no_text_is_named_and_one_that_is_may_have_any_characters(
    monkeypatch: pytest.MonkeyPatch, apart: Path
) -> None:
    (apart / "taskgraph.toml").write_bytes(b'etcd = "caf\xe9:1"')
    with pytest.raises(JobError, match=r"taskgraph\.toml cannot be read: 'utf-8' codec"):
        etcd_of(options())
    (apart / "taskgraph.toml").write_bytes('etcd = "café:1"'.encode())
    monkeypatch.setattr("io.text_encoding", lambda *_: "ascii")  # of a locale that is not UTF-8
    assert etcd_of(options()) == "café:1"


def test_a_token_comes_from_a_file(monkeypatch: pytest.MonkeyPatch, apart: Path) -> None:
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


def test_a_job_that_begins_uses_the_token_file_or_writes_it(apart: Path) -> None:
    assert token_for(options()) is None
    made = token_for(options("--token-file", "new"))
    assert made is not None and made.written and (apart / "new").stat().st_mode & 0o777 == 0o600
    assert token_of(options("--token-file", "new")) == made.token
    again = token_for(options("--token-file", "new"))
    assert again is not None and again.token == made.token and not again.written
    again.forget()
    assert (apart / "new").exists(), "it is somebody else's"
    made.forget()
    assert not (apart / "new").exists()
    other = token_for(options(), Path("job.token"))
    assert other is not None and other.written
    with pytest.raises(JobError, match=r"job\.token exists already: use its token with --token-file job\.token"):
        token_for(options(), Path("job.token"))
    with pytest.raises(JobError, match="cannot be written: No such file"):
        token_for(options("--token-file", "no/such/folder"))


class Connected:
    """In place of a connection to etcd."""

    async def __aenter__(self) -> Connected:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("meets", ["connect", "plan", "begin"])
@pytest.mark.parametrize(
    "error",
    [AccessRefused("may not"), JobRunning("it runs"), DecodeError("what?"), Unavailable("away"), KeyboardInterrupt()],
)
def test_a_submit_that_comes_to_nothing_leaves_no_token(
    monkeypatch: pytest.MonkeyPatch, apart: Path, meets: str, error: BaseException
) -> None:
    """The next one, with what had been missing, was told that the file exists already."""

    async def connect(*_: Any) -> Connected:
        return Connected()

    async def plan(*_: Any, **__: Any) -> tuple[None, None]:
        return None, None

    async def fail(*_: Any, **__: Any) -> None:
        raise error

    for name, does in {"connect": connect, "plan": plan, "begin": plan, meets: fail}.items():
        monkeypatch.setattr(running, name, does)
    given = cli.parser(driver=fit).parse_args(["submit", "--etcd", "127.0.0.1:1"])
    with pytest.raises(type(error)):
        running.submit_command(given, fit)
    # Once it is sent it is not known what became of it, unless it was refused: then nodes need the token.
    sent = meets == "begin" and isinstance(error, Unavailable | KeyboardInterrupt)
    assert (apart / "fit.token").exists() == sent


def test_a_submit_that_lacks_a_password_leaves_no_token(apart: Path) -> None:
    given = cli.parser(driver=fit).parse_args(["submit", "--etcd", "127.0.0.1:1", "--etcd-user", "me"])
    with pytest.raises(JobError, match="the password of etcd's user 'me' is missing"):
        running.submit_command(given, fit)
    assert not (apart / "fit.token").exists()


def test_a_job_of_this_host_is_found_by_name_or_as_the_only_one() -> None:
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
def test_an_empty_name_is_no_job_and_not_the_only_one(
    command: str, etcd: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """`taskgraph shutdown "$JOB"` ended the only job where the variable was empty."""
    Runtime().put(entry("one"))
    assert cli.main([command, "", *etcd]) == cli.USAGE
    assert "the job's name is empty" in capsys.readouterr().err
    assert cli.main(["launch", ""], fit) == cli.USAGE


def gone(name: str, *, embedded: bool) -> JobEntry:
    """As a launcher that was killed left it."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return JobEntry(name=name, etcd="10.0.0.1:7", token="ab" * 32, pid=done.pid, embedded=embedded, tls={})


def test_without_a_running_job_those_that_ended_are_named() -> None:
    for number, name in enumerate(("a", "b", "c", "d", "e", "f")):
        Runtime().keep_finished(name, {"status": {"state": "finished"}, "result": None, "events": []})
        os.utime(Runtime().root / "finished" / f"{name}.json", (number, number))
    found = "No job runs here. Ended here: f, e, d, c, b, ... Elsewhere: give its name and --etcd."
    with pytest.raises(UnknownJob, match=re.escape(found)):
        find_entry(options())
    with pytest.raises(
        UnknownJob, match=r"No job 'x' runs here\. Ended here: f, e, d, c, b, \.\.\. Elsewhere: --etcd\."
    ):
        find_entry(options("x"))


@pytest.mark.parametrize("embedded", [True, False])
def test_of_a_run_that_was_killed_nothing_of_an_earlier_one_is_told(
    embedded: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its status was that of the run before."""
    runtime = Runtime()
    runtime.keep_finished("fit", {"status": {"state": "finished"}, "result": None, "events": []})
    runtime.put(killed := gone("fit", embedded=embedded))
    (runtime.folder("fit") / "n1.log").write_text("hello")
    for command in ("status", "events", "result"):
        assert cli.main([command, "fit"]) == cli.UNREACHABLE
        told = capsys.readouterr()
        assert told.out == "" and f"its launcher (process {killed.pid}) was killed" in told.err
        assert ("its etcd ended with it" in told.err) == embedded == ("--etcd 10.0.0.1:7" not in told.err)
        assert f"logs of its nodes: {runtime.folder('fit')}" in told.err


@pytest.mark.parametrize("command", [("kill", "fit", "--task", "0"), ("shutdown", "fit"), ("status",)])
@pytest.mark.parametrize("then", ["finished", "began again", "killed", "nothing", "runs"])
def test_a_job_that_ends_while_a_command_looks_for_its_etcd_is_said_to_have_ended(
    command: tuple[str, ...], then: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user was told how to start an etcd."""
    runtime = Runtime()
    runtime.put(found := entry("fit"))

    async def connect(*access: object) -> None:
        if then != "runs":
            runtime.remove("fit")
        if then == "finished":
            runtime.keep_finished("fit", {"status": {"state": "finished"}, "result": None, "events": []})
        elif then == "began again":
            runtime.put(replace(found, etcd="127.0.0.1:8"))
        elif then == "killed":
            runtime.put(gone("fit", embedded=True))
        raise Unavailable("No etcd answers at 127.0.0.1:7")

    monkeypatch.setattr(common, "connect", connect)
    assert cli.main([*command]) == cli.UNREACHABLE
    told = capsys.readouterr().err
    says = {
        "finished": "job 'fit' does not run any more, it finished: see `taskgraph status fit`",
        "began again": "another run of job 'fit' has begun",
        "killed": "was killed, and its etcd ended with it",
        "nothing": "job 'fit' has just ended",
        "runs": "No etcd answers at 127.0.0.1:7",
    }
    assert says[then] in told and ("No etcd answers" in told) == (then == "runs")


def test_a_job_at_an_etcd_that_is_named_needs_its_name() -> None:
    with pytest.raises(JobError, match="name the job"):
        find_entry(options("--etcd", "a:1"))
    Runtime().put(entry("one"))
    assert find_entry(options("one", "--etcd", "a:1")).token == "", "a token is told to no other etcd's job"
    assert find_entry(options("one", "--etcd", "127.0.0.1:7")).token == "ab" * 32


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
        (["node", "--job", "x"], 2, "Give --etcd"),
        (["node", "--job", "x", "--etcd", "a:1"], 2, "--token-file"),
        (["node", "--job", "x/y", "--etcd", "a:1"], 2, "--job 'x/y': no job has that name: a name has 1 to 100"),
        (["launch", "x", "-o", "a=1"], 2, "--resume-changed and --fresh go with a driver, or with `submit`"),
        (["launch", "x", "--timeout", "9"], 2, "--timeout and --json go with a driver: "),
        (["launch", "x", "--json"], 2, "`taskgraph result x --json`"),
    ],
)
def test_an_error_is_one_paragraph_and_a_code(
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
        (RuntimeError("can't start new thread"), "can't start new thread: a limit of this process (`ulimit -u`"),
    ],
)
def test_a_limit_of_the_system_is_told_in_one_line_with_what_to_do(
    error: Exception, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(_: object) -> int:
        raise error

    monkeypatch.setattr(cli, "_command", lambda _: command)
    assert cli.main(["status"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("taskgraph: ") and says in line


def test_a_process_that_may_open_next_to_no_files_is_told_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It failed wherever it happened to be, with tracebacks of the event loop around."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (20, 20))
    assert cli.main(["status"]) == 1
    assert capsys.readouterr().err == (
        "taskgraph: only 20 files may be open at a time here: `ulimit -n 1024` allows more\n"
    )
    monkeypatch.setattr("resource.getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)  # a number below all others
    monkeypatch.setattr(cli, "_command", lambda _: lambda _: 0)
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
        (["status", "x", "y"], "unrecognized arguments: y; see `taskgraph status --help`"),
        (["--taks", "run", "d.py"], "unrecognized arguments: --taks; see `taskgraph --help`"),
        (["stauts"], "taskgraph: no command 'stauts'; did you mean status?; see `taskgraph --help`"),
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
def test_a_command_that_is_mistyped_is_told_in_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert says in said.err and said.err.startswith("taskgraph") and said.err.count("\n") == 1


def test_help_begins_with_what_the_command_itself_takes(capsys: pytest.CaptureFixture[str]) -> None:
    for command, own in (("chaos", "--mtbf"), ("kill", "--signal"), ("launch", "--nodes"), ("drain", "--node")):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        usage = capsys.readouterr().out
        assert usage.index(own) < usage.index("--etcd") and "--tls" not in usage, usage
        with pytest.raises(SystemExit):
            cli.main([command, "--help-all"])
        usage = capsys.readouterr().out
        assert usage.index(own) < usage.index("--etcd-user") < usage.index("--tls"), usage


@pytest.mark.parametrize(
    "command", ["launch", "status", "events", "result", "trace", "kill", "drain", "chaos", "shutdown", "token"]
)
def test_help_says_where_the_job_may_be_left_out(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "; may be left out if only one job runs on this host and --etcd is not given" in told


@pytest.mark.parametrize("option", ["--mtbf", "--for-s"])
@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_chaos_of_no_time_is_refused(option: str, seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chaos", "x", f"{option}={seconds}"]) == 2
    assert "seconds above 0" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{}", "[]", "1", '{"status": 1, "result": null}', '{"status": {}}'])
def test_what_is_no_record_of_a_finished_job_is_passed_over(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Runtime().keep_finished("fit", {})
    (Runtime().root / "finished" / "fit.json").write_text(text)
    for command in ("status", "events", "result"):
        assert cli.main([command, "fit"]) == cli.UNREACHABLE
        assert "No job 'fit' runs here." in capsys.readouterr().err


def test_of_a_job_that_was_deleted_there_is_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    Runtime().keep_finished("fit", {"status": {}, "result": None, "events": []})
    assert cli.main(["result", "fit"]) == cli.FAILED
    assert "job 'fit' was cancelled" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_a_timeout_of_no_time_is_refused_before_anything_is_started(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", f"{__file__}:fit", f"--timeout={seconds}"]) == 2
    assert "seconds above 0" in capsys.readouterr().err


def test_a_disk_that_is_full_is_told_and_not_shown_as_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def full(options: argparse.Namespace) -> int:
        write_whole(tmp_path / "job.json", b"x")
        return 0

    monkeypatch.setattr(cli, "_command", lambda name: full)
    assert cli.main(["status"]) == 0
    monkeypatch.setattr(os, "fdopen", lambda descriptor, mode: contextlib.closing(Failing(descriptor)))
    assert cli.main(["status"]) == 1
    said = capsys.readouterr().err
    assert said == f"taskgraph: [Errno {errno.ENOSPC}] No space left on device: '{tmp_path / 'job.json'}'\n"
    assert [path.name for path in tmp_path.glob("*job*")] == ["job.json"], "no part of it is left"


@pytest.mark.parametrize(("as_json", "kept"), [(True, True), (False, True), (False, False)])
def test_where_values_cannot_be_written_it_is_said_who_has_them(
    as_json: bool, kept: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was only said that some device has no space left."""

    def write(text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def prints(options: argparse.Namespace) -> int:
        result = tg.JobResult(name="fit", values={0: [1, 2]})
        print_result(result, as_json=as_json, kept=kept)
        return 0

    monkeypatch.setattr(cli, "_command", lambda name: prints)
    monkeypatch.setattr(cli, "drop_unwritten", lambda: True)
    monkeypatch.setattr(sys.stdout, "write", write)
    assert cli.main(["status"]) == 1
    told = "taskgraph: the job finished: `taskgraph result fit` has its values, as far as they were kept\n" * kept
    assert capsys.readouterr().err == f"taskgraph: standard output: No space left on device\n{told}"


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


def test_a_host_without_room_for_temporary_files_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/no/such"])
    monkeypatch.delenv("TASKGRAPH_RUNTIME_DIR")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert cli.main(["status"]) == 1
    said = "taskgraph: No usable temporary directory found in ['/no/such']: set TMPDIR to a directory that can be "
    assert capsys.readouterr().err == f"{said}written\n"


class Failing:
    """A file on a full disk."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        os.close(self._descriptor)


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
def test_help_behind_a_driver_tells_the_options_of_its_job(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_help_of_a_driver_that_is_run_tells_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "-h"], function=fit)
    out = capsys.readouterr().out
    assert "\n\noptions of fit:\n  -o tasks=3   int\n  -o rate=0.1  float\n\noptions:\n" in out


def test_help_of_launch_says_what_goes_with_a_driver(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["launch", "--help"])
    told = " ".join(capsys.readouterr().out.partition("options:\n")[2].split())
    of_a_driver = ("--option NAME=VALUE", "--set NAME=VALUE", "--name NAME", "--timeout S", "--json", "--resume")
    for option in (*of_a_driver, "--resume-changed", "--fresh"):
        assert f"{option} with a driver: " in told, option
    assert "--logs with" not in told and "--nodes N with" not in told
    with pytest.raises(SystemExit):
        cli.main(["launch", "--help"], fit)
    assert "a driver as for run; without it: as run" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "with a driver" not in told and "0: all in this process" in told


def test_ctrl_c_while_the_program_is_imported_is_no_traceback() -> None:
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


def test_help_behind_what_is_no_driver_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "nowhere.py", "--help"]) == cli.USAGE
    assert "there is no file" in capsys.readouterr().err


def test_an_error_of_the_system_that_is_ours_is_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(options: argparse.Namespace) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(cli, "_command", lambda name: broken)
    with pytest.raises(OSError, match="Bad file descriptor"):
        cli.main(["status"])


def test_unbuffered_output_is_written_whole() -> None:
    """What a pipe takes only in part (a signal came) is lost where there is no buffer."""
    script = """
        import io, sys
        from taskgraph.cli import main
        assert isinstance(sys.stdout.buffer, io.FileIO)
        try:
            main(["--version"])
        finally:
            print(isinstance(sys.stdout.buffer, io.BufferedWriter))
    """
    done = subprocess.run([sys.executable, "-u", "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "True"


def test_main_takes_the_job_function_itself() -> None:
    for wrong, named in ((fit(), "the job that it makes"), (entry, "entry")):
        with pytest.raises(JobError, match=rf"takes a function decorated with @tg\.job, as in .*, not {named}"):
            tg.main(wrong)


async def test_main_is_refused_where_a_loop_runs_and_says_what_to_call() -> None:
    with pytest.raises(JobError, match=r"tg\.main cannot be called where .*: `await tg\.arun\(fit\(\.\.\.\)\)`"):
        tg.main(fit)


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


def test_in_one_process_too_logs_are_shown_and_json_is_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_program_that_reads_json_reads_why_a_job_failed(capsys: pytest.CaptureFixture[str]) -> None:
    """It read nothing at all, but for what tasks had printed."""
    assert cli.main(["run", "--nodes", "0", "--json"], fails) == 1
    said = capsys.readouterr()
    told = json.loads(said.out.splitlines()[-1])
    assert (told["name"], told["state"], told["task"], told["where"]) == ("fails", "failed", 0, "run")
    assert "on purpose" in told["reason"] and "ValueError: on purpose" in told["traceback"]
    assert told["result"] is None and "job failed: task 0" in said.err
    assert cli.main(["run", "--nodes", "0"], fails) == 1
    assert capsys.readouterr().out == "no end"


def test_the_token_of_a_job_in_an_etcd_of_ones_own_outlives_its_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    """Such a job goes on with `taskgraph launch`, which wanted a file that nobody had."""
    killed = gone("fit", embedded=False)
    Runtime().put(killed)
    assert find_entry(options("fit", "--etcd", killed.etcd)).token == killed.token
    assert find_entry(options("fit", "--etcd", "another:1")).token == ""
    for etcd in ((), ("--etcd", killed.etcd)):
        assert cli.main(["token", "fit", *etcd]) == 0
        assert capsys.readouterr().out == f"{killed.token}\n"
    Runtime().put(gone("fit", embedded=True))
    assert cli.main(["token", "fit"]) == cli.UNREACHABLE, "its etcd is gone"


@pytest.mark.parametrize("daemon", [False, True])
def test_a_command_that_waits_for_a_thread_of_the_driver_says_so(daemon: bool) -> None:
    """`run` told the values, and then stood for ever, without a word."""
    program = f"""
import sys, threading, time
from taskgraph import cli
cli._THREADS_S = 0.1
threading.Thread(target=time.sleep, args=(1.5,), name="metrics", daemon={daemon}).start()
cli.tell_of_threads()
sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    said = "taskgraph: it is done, and waits for threads that the driver started: metrics (Python ends without them if"
    assert done.returncode == 3 and done.stderr.startswith(said) is not daemon


def test_a_driver_that_goes_on_after_its_job_waits_for_no_thread() -> None:
    """A shell in which a driver was run was told that it is done, while it went on."""
    program = """
import threading, time
from taskgraph import cli
cli._THREADS_S = 0.1
threading.Thread(target=time.sleep, args=(1,)).start()
cli.tell_of_threads()
time.sleep(0.7)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
