"""The runtime directory: private, found from any shell, and right about living launchers."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from taskgraph.coordination import embedded
from taskgraph.errors import JobError, TaskGraphError
from taskgraph.launch import runtime as runtime_module
from taskgraph.launch.entries import lock_file
from taskgraph.launch.kept import KeptJob
from taskgraph.launch.runtime import JobEntry, Runtime

TOKEN = "ab" * 32
KILLED = 2**22 + 1
"""More than any process id: an entry of this launcher is locked by nobody."""
JOINS = """
import os, sys
from pathlib import Path
from taskgraph.launch.runtime import JobEntry, Runtime
entry = JobEntry(name="fit", etcd="127.0.0.1:1", token="", pid=os.getpid(), embedded=sys.argv[2] == "put", tls={})
getattr(Runtime(Path(sys.argv[1])), sys.argv[2])(entry)
print("joined", flush=True)
input()
"""


def entry(name: str = "fit", pid: int | None = None) -> JobEntry:
    return JobEntry(name=name, etcd="127.0.0.1:1", token=TOKEN, pid=pid or os.getpid(), embedded=True, tls={})


def launcher(pid: int | None = None) -> JobEntry:
    """The entry of a launcher for a job whose etcd goes on without it."""
    return replace(entry("fit", pid), embedded=False)


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    return Runtime(tmp_path / "taskgraph")


@pytest.fixture
def another(runtime: Runtime) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts another launcher that joins job `fit`, or puts it."""
    started = []

    def start(how: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", JOINS, str(runtime.root), how]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "joined\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


Another = Callable[[str], "subprocess.Popen[str]"]


def test_only_the_owner_can_read_a_job(runtime: Runtime) -> None:
    runtime.put(entry())
    found = runtime.find("fit")
    assert found is not None and found.token_bytes == bytes.fromhex(TOKEN) and found.created > 0
    assert [job.name for job in runtime.jobs()] == ["fit"]
    file = runtime.make_job_folder("fit") / "job.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for folder in (runtime.root, runtime.root / "jobs", file.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    runtime.remove("fit")
    assert runtime.find("fit") is None and runtime.jobs() == []


def test_job_of_a_killed_launcher_is_not_found(runtime: Runtime, another: Another) -> None:
    process = another("put")
    found = runtime.find("fit")
    assert found is not None and found.pid == process.pid and not found.stale
    process.kill()
    process.wait()
    killed = runtime.find_killed("fit")
    assert found.stale and killed is not None and killed.pid == process.pid
    assert runtime.find("fit") is None and runtime.jobs() == []


def test_forked_child_does_not_keep_its_launcher_alive(runtime: Runtime) -> None:
    forks = JOINS.replace("input()", "if not os.fork():\n    print(os.getpid(), flush=True)\ninput()")
    command = [sys.executable, "-c", forks, str(runtime.root), "put"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "joined\n"
        child = int(process.stdout.readline())
        process.kill()
        process.wait()
        try:
            assert os.path.exists(f"/proc/{child}") and runtime.find_killed("fit") is not None
        finally:
            os.kill(child, 9)


def test_last_launcher_removes_the_job(runtime: Runtime, another: Another) -> None:
    runtime.join(launcher())
    (runtime.make_job_folder("fit") / "n1.log").write_text("of the first")
    process = another("join")
    (runtime.make_job_folder("fit") / "n2.log").write_text("of the second")
    assert [job.name for job in runtime.jobs()] == ["fit"]
    runtime.leave(launcher())
    found = runtime.find("fit")
    assert found is not None and found.pid == process.pid
    assert sorted(path.name for path in runtime.make_job_folder("fit").glob("*.log")) == ["n1.log", "n2.log"]
    assert runtime.logs("fit") == runtime.make_job_folder("fit")
    runtime.join(launcher())
    process.kill()
    process.wait()
    runtime.leave(launcher())
    assert runtime.find("fit") is None and not (runtime.root / "jobs" / "fit").exists()


def test_living_launcher_removes_entries_of_killed_ones(runtime: Runtime, another: Another) -> None:
    runtime.join(launcher())
    for _ in range(3):
        runtime.join(launcher(KILLED))
    process = another("join")
    assert [path.name.split("-")[1] for path in runtime.make_job_folder("fit").glob("launcher-*")] == [str(process.pid)]
    found = runtime.find("fit")
    assert found is not None and found.pid == os.getpid()


def test_launcher_leaves_a_run_with_its_own_etcd_alone(runtime: Runtime, another: Another) -> None:
    process = another("put")
    runtime.join(launcher())
    assert [path.name for path in runtime.make_job_folder("fit").iterdir()] == ["job.json"]
    runtime.leave(launcher())
    found = runtime.find("fit")
    assert found is not None and found.pid == process.pid
    runtime.remove("fit")
    with runtime.claim("fit"):
        (runtime.make_job_folder("fit") / "etcd.log").write_text("of a run that just begins again")
        runtime.leave(launcher())
        assert (runtime.make_job_folder("fit") / "etcd.log").exists()


def test_launcher_of_late_nodes_leaves_nothing(runtime: Runtime) -> None:
    (runtime.make_job_folder("fit") / "n3.log").write_text("of a node that did not find its job")
    runtime.leave(launcher())
    assert runtime.find_killed("fit") is None and not (runtime.root / "jobs" / "fit").exists()
    runtime.put(entry("fit", KILLED))
    runtime.leave(launcher())
    assert runtime.find_killed("fit") is not None, "what is left of a run that was killed may be wanted"


@pytest.mark.parametrize("act", [Runtime.join, Runtime.leave])
def test_stopped_launcher_is_an_error_for_others(
    act: Callable[[Runtime, JobEntry], None], runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "_LOCK_WAIT_S", 0.1)
    runtime.put(entry())
    with runtime.claim("other"), lock_file(runtime.root / "locks" / "joining") as ours:
        assert ours
        with pytest.raises(TaskGraphError, match=r"locked .*/joining for 0\.1 s.*End it"):
            act(runtime, launcher())
    act(runtime, launcher())


def test_broken_entry_hides_no_other_job(runtime: Runtime) -> None:
    runtime.put(entry())
    runtime.put(entry("other"))
    file = runtime.make_job_folder("fit") / "job.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "of_a_newer_version": 1}))
    assert runtime.find("fit") is not None
    file.write_text("{")
    with pytest.raises(TaskGraphError, match=r"job\.json cannot be read .* remove it"):
        runtime.find("fit")
    assert [job.name for job in runtime.jobs()] == ["other"]


def test_only_the_last_killed_jobs_are_kept(runtime: Runtime) -> None:
    with runtime.claim("old0"):
        for number in range(8):
            if number % 2:
                runtime.put(entry(f"old{number}", KILLED))
            else:
                (runtime.make_job_folder(f"old{number}") / "etcd.log").write_text("killed before it had an entry")
            os.utime(runtime.make_job_folder(f"old{number}"), (number + 1, number + 1))
        runtime.put(entry("new"))
    assert [path.name for path in sorted((runtime.root / "jobs").iterdir())] == [
        "new", "old0", "old4", "old5", "old6", "old7"
    ]  # fmt: skip


@pytest.mark.parametrize("below", ["file", "file/taskgraph", "absent/taskgraph"])
def test_directory_that_cannot_be_made_says_what_to_set(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TaskGraphError, match="set TASKGRAPH_RUNTIME_DIR"):
        Runtime(tmp_path / below).make_job_folder("fit")


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "../../etc", "a\0b", "x" * 101, "\udce4"])
def test_wrong_name_touches_no_file(runtime: Runtime, name: str) -> None:
    assert runtime.find(name) is None and runtime.find_finished(name) is None
    for act in (
        runtime.make_job_folder,
        runtime.make_socket_folder,
        runtime.remove,
        lambda n: runtime.keep_finished(n, KeptJob()),
    ):
        with pytest.raises(JobError, match="is no job's name"):
            act(name)
    assert not runtime.root.exists()


def test_locale_without_the_names_letters_is_an_error() -> None:
    code = "from taskgraph.launch.runtime import Runtime; Runtime().make_job_folder('gr\\xf6\\xdfe')"
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | plain, capture_output=True, text=True)
    assert "ascii, has no such letters for the names of files: set LC_ALL=C.UTF-8" in done.stderr


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("readable", "only you can read"),
        ("a link", "must be a directory"),
        ("another user's", r"is another user's \(id \d+\): set TASKGRAPH_RUNTIME_DIR"),
    ],
)
def test_directory_that_is_not_private_is_refused(
    kind: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may make it first in /tmp."""
    root = tmp_path / "taskgraph"
    root.mkdir(mode=0o700)
    if kind == "readable":
        root.chmod(0o755)
    elif kind == "a link":
        root.rename(tmp_path / "elsewhere")
        root.symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.setattr("os.getuid", lambda: root.stat().st_uid + 1)
    with pytest.raises(TaskGraphError, match=says):
        Runtime(root).put(entry())


def test_environment_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("ours", "xdg", "tmp"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.delenv("TASKGRAPH_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    temporary = tmp_path / "tmp" / f"taskgraph-{os.getuid()}"
    assert Runtime().root == temporary
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert Runtime().root == temporary
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    assert Runtime().root == tmp_path / "xdg" / "taskgraph"
    with monkeypatch.context() as of_another_user:  # as after `su`; root may write there, too
        found = os.stat
        of_another_user.setattr(
            "os.stat", lambda path, **how: os.stat_result((*found(path, **how)[:4], 12345, *[0] * 5))
        )
        assert Runtime().root == temporary
    monkeypatch.setattr("tempfile.gettempdir", lambda: 1 / 0)  # a container may have none
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path / "ours"))
    assert Runtime().root == tmp_path / "ours" / "taskgraph"
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path / "gone"))
    with pytest.raises(TaskGraphError, match="no such directory"):
        Runtime()


@pytest.mark.parametrize("below", ["t", "a-very-long-name-" * 6])
def test_sockets_have_short_paths_and_private_folders(tmp_path: Path, below: str) -> None:
    runtime = Runtime(tmp_path / below)
    first, second = runtime.make_socket_folder("fit"), runtime.make_socket_folder("fit")
    try:
        assert first.path != second.path
        assert len(os.fsencode(first.path / "12345678" / "0123456789abcdef")) < 100
        assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    finally:
        for folder in (first, second):
            folder.remove()
    assert not first.path.exists() and not second.path.exists()


@pytest.mark.parametrize("name", ["t", "\xe9", "a#b", "a?b", "a%41b", "a,b", "a|b", os.fsdecode(b"\xe9")])
def test_sockets_need_a_path_that_fits_addresses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC parses a path as a URI."""
    with tempfile.TemporaryDirectory(prefix="tg-", dir="/tmp") as short:
        folders = [Runtime(Path(short) / name).make_socket_folder("fit")]
        monkeypatch.setattr(tempfile, "tempdir", os.path.join(short, name))  # as TMPDIR has it
        folders.append(embedded._new_folder(short=True))
        for folder in folders:
            folder.remove()
            assert folder.path.is_relative_to(short) == (name in ("t", "\xe9"))


def test_sockets_of_killed_launchers_alone_are_removed(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time; from taskgraph.launch.runtime import Runtime;"
        "folder = Runtime(pathlib.Path(sys.argv[1])).make_socket_folder('fit'); (folder.path / 'node').mkdir();"
        "print(folder.path, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "t")], stdout=subprocess.PIPE, text=True) as held:
        assert held.stdout is not None
        left = Path(held.stdout.readline().strip())
        runtime = Runtime(tmp_path / "t")
        try:
            ours = runtime.make_socket_folder("fit")
            assert (left / "node").is_dir()
        finally:
            held.kill()
        held.wait()
        other = runtime.make_socket_folder("other")
        try:
            assert not left.exists()
            assert ours.path.is_dir() and other.path.is_dir()
        finally:
            ours.remove()
            other.remove()


def test_sockets_stay_without_file_locks(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    first, second = runtime.make_socket_folder("fit"), runtime.make_socket_folder("fit")
    assert first.path.is_dir() and second.path.is_dir()
    for folder in (first, second):
        folder.remove()


def test_one_process_at_a_time_claims_a_name(runtime: Runtime) -> None:
    with runtime.claim("fit") as first, runtime.claim("fit") as second, runtime.claim("other") as other:
        assert first and not second and other
    with runtime.claim("fit") as again:
        assert again


def test_last_finished_jobs_are_kept_with_their_logs(runtime: Runtime) -> None:
    for number in range(34):
        name = f"job{number:02}"
        (runtime.make_job_folder(name) / "n1.log").write_text("it said this")
        runtime.keep_finished(name, KeptJob(result=str(number)))
        os.utime(runtime.root / "finished" / f"{name}.json", (number, number))
    assert runtime.find_finished("job00") is None and runtime.find_finished("job01") is None
    for number in (2, 33):
        assert (runtime.find_finished(f"job{number:02}") or KeptJob()).result == str(number)
    logs = sorted(path.name for path in (runtime.root / "finished").glob("*.logs"))
    assert len(logs) == 32 and logs[0] == "job02.logs"
    assert (runtime.root / "finished" / "job33.logs" / "n1.log").read_text() == "it said this"


@pytest.mark.parametrize("run", ["one", ""])
def test_launchers_of_a_run_keep_the_logs_of_all(runtime: Runtime, run: str) -> None:
    """As with `run` and `launch` on one host."""
    for name, text in (("n1.log", "it said this"), ("n2.log", "and that"), ("n3.log", "")):
        (runtime.make_job_folder("fit") / name).write_text(text)
    runtime.keep_finished("fit", KeptJob(run="one"))
    (runtime.make_job_folder("fit") / "n3.log").write_text("it ended later")
    runtime.keep_finished("fit", KeptJob(run=run))
    logs = {path.name: path.read_text() for path in runtime.kept_logs("fit").glob("n*.log")}
    later = {"n3.log": "it ended later"}
    assert logs == ({"n1.log": "it said this", "n2.log": "and that", **later} if run else later)
    runtime.keep_finished("fit", KeptJob(run="another"))
    assert not runtime.kept_logs("fit").exists(), "logs of an earlier run are not this run's"


def test_launcher_does_not_wait_forever_to_keep_logs(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_module, "_LOCK_WAIT_S", 0.05)
    (runtime.make_job_folder("fit") / "n1.log").write_text("it said this")
    with runtime.claim("fit"), lock_file(runtime.root / "locks" / "logs"):
        runtime.keep_finished("fit", KeptJob(run="one"))
    assert (runtime.kept_logs("fit") / "n1.log").read_text() == "it said this"


@pytest.mark.parametrize(
    "text", ["", "[]", "3", '"status"', '{"status": {}}', '{"result": 1}', '{"status": 1, "result": ""}']
)
def test_broken_record_of_a_finished_job_is_ignored(runtime: Runtime, text: str) -> None:
    runtime.keep_finished("fit", KeptJob())
    (runtime.root / "finished" / "fit.json").write_text(text)
    assert runtime.find_finished("fit") is None


def test_full_disk_keeps_logs_and_no_earlier_job(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.keep_finished("fit", KeptJob(result="1"))
    (runtime.make_job_folder("fit") / "n1.log").write_text("it said this")

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(runtime_module, "write_whole", full)
    with pytest.raises(OSError, match="No space left on device"):
        runtime.keep_finished("fit", KeptJob(result="2"))
    assert runtime.find_finished("fit") is None
    assert (runtime.kept_logs("fit") / "n1.log").read_text() == "it said this"
