"""The runtime directory: private, found from any shell, and never wrong about what is over."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from taskgraph.coordination import embedded
from taskgraph.errors import JobError, TaskGraphError
from taskgraph.launch import runtime as runtime_module
from taskgraph.launch.kept import KeptJob
from taskgraph.launch.runtime import JobEntry, Runtime, alive
from taskgraph.system import host

TOKEN = "ab" * 32


def entry(name: str = "fit", pid: int | None = None) -> JobEntry:
    return JobEntry(name=name, etcd="127.0.0.1:1", token=TOKEN, pid=pid or os.getpid(), embedded=True, tls={})


def launcher(pid: int | None = None) -> JobEntry:
    """Of who launches nodes for a job on an etcd of its own."""
    return replace(entry("fit", pid), embedded=False)


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    return Runtime(tmp_path / "taskgraph")


@pytest.fixture
def ended_pid() -> int:
    """The id of a process that ended and was waited for."""
    return int(subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True).stdout)


@pytest.fixture
def zombie() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it ended, and stays until it is waited for
    yield process.pid
    process.wait()


@pytest.fixture
def another() -> Iterator[int]:
    """The id of another process, which lives."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate(b"\n")


def test_a_job_is_found_by_name_and_only_its_owner_can_read_it(runtime: Runtime) -> None:
    runtime.put(entry())
    found = runtime.find("fit")
    assert found is not None and found.token_bytes == bytes.fromhex(TOKEN) and found.created > 0
    assert [job.name for job in runtime.jobs()] == ["fit"]
    file = runtime.folder("fit") / "job.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for folder in (runtime.root, runtime.root / "jobs", file.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    runtime.remove("fit")
    assert runtime.find("fit") is None and runtime.jobs() == []


def test_a_job_whose_launcher_ended_is_not_found(runtime: Runtime, ended_pid: int, zombie: int) -> None:
    assert alive(os.getpid()) and not alive(ended_pid) and not alive(zombie)
    runtime.put(entry("ended", ended_pid))
    runtime.put(entry("zombie", zombie))
    assert runtime.find("ended") is None and runtime.find("zombie") is None and runtime.jobs() == []


def test_the_last_of_several_launchers_takes_the_job_with_it(runtime: Runtime, another: int) -> None:
    runtime.join(launcher())
    (runtime.folder("fit") / "n1.log").write_text("of the first")
    runtime.join(launcher(another))
    (runtime.folder("fit") / "n2.log").write_text("of the second")
    assert [job.name for job in runtime.jobs()] == ["fit"]
    runtime.leave(launcher())
    found = runtime.find("fit")
    assert found is not None and found.pid == another
    assert sorted(path.name for path in runtime.folder("fit").glob("*.log")) == ["n1.log", "n2.log"]
    assert runtime.logs("fit") == runtime.folder("fit")
    runtime.join(launcher())
    runtime.leave(launcher(another))
    found = runtime.find("fit")
    assert found is not None and found.pid == os.getpid()
    runtime.leave(launcher())
    assert runtime.find("fit") is None and not (runtime.root / "jobs" / "fit").exists()


def test_a_launcher_of_another_container_lives_as_long_as_it_holds_its_entry(
    runtime: Runtime, ended_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is not seen there: it was taken for dead, and what it had written was removed."""
    theirs, ours = replace(launcher(ended_pid), pids="theirs"), launcher()

    def inside(container: str) -> None:
        monkeypatch.setattr(host, "pids", lambda: container, raising=False)

    inside("theirs")
    runtime.join(theirs)
    file = runtime.folder("fit") / "job.json"
    (log := file.with_name("n1.log")).write_text("of theirs")
    inside("ours")
    found = runtime.find("fit")
    assert found is not None and found.pid == ended_pid and "lives" not in file.read_text()
    runtime.join(ours)
    runtime.leave(ours)
    runtime.leave(replace(ours, pid=ended_pid))  # the same number here is another process
    assert log.read_text() == "of theirs" and runtime.find("fit") == found
    assert [path.name for path in file.parent.glob("*.json")] == ["job.json"]
    runtime_module._let_go(file)  # as the kernel does when its process ends
    killed = runtime.killed("fit")
    assert runtime.find("fit") is None and killed is not None and killed.pid == ended_pid
    runtime.join(ours)
    assert not log.exists() and [job.pid for job in runtime.jobs()] == [os.getpid()]
    runtime.leave(ours)
    assert file not in runtime_module._holding


def test_a_launcher_is_found_though_the_first_was_killed(runtime: Runtime, another: int, ended_pid: int) -> None:
    runtime.put(entry("fit", ended_pid))
    runtime._write(launcher(another), f"launcher-{another}.json")
    found = runtime.find("fit")
    assert found is not None and found.pid == another
    runtime.put(entry("new"))
    assert [job.name for job in runtime.jobs()] == ["fit", "new"]


def test_what_launchers_left_that_were_killed_does_not_grow_beside_one_that_lives(
    runtime: Runtime, another: int, ended_pid: int
) -> None:
    """Each left an entry for as long as the job had a launcher here, and whoever looked for it read all of them."""
    runtime.join(launcher())
    folder = runtime.root / "jobs" / "fit"
    for number in range(5):
        runtime.join(launcher(ended_pid))
        left = next(folder.glob(f"launcher-{ended_pid}-*.json"))
        left.rename(folder / f"launcher-{ended_pid}-{number}.json")
    runtime.join(launcher(another))
    assert [path.name.split("-")[1] for path in folder.glob("launcher-*")] == [str(another)]
    found = runtime.find("fit")
    assert found is not None and found.pid == os.getpid()


def test_the_last_launcher_that_lives_takes_what_a_killed_one_left_with_it(runtime: Runtime, ended_pid: int) -> None:
    runtime.join(launcher())
    runtime.join(launcher(ended_pid))
    (runtime.folder("fit") / "n2.log").write_text("of one that was killed")
    runtime.leave(launcher())
    assert not (runtime.root / "jobs" / "fit").exists()


def test_a_launcher_beside_a_run_with_its_own_etcd_leaves_that_alone(runtime: Runtime, another: int) -> None:
    runtime.put(entry("fit", another))
    runtime.join(launcher())
    assert [path.name for path in runtime.folder("fit").iterdir()] == ["job.json"]
    runtime.leave(launcher())
    found = runtime.find("fit")
    assert found is not None and found.pid == another
    runtime.remove("fit")
    with runtime.claim("fit"):
        (runtime.folder("fit") / "etcd.log").write_text("of a run that just begins again")
        runtime.leave(launcher())
        assert (runtime.folder("fit") / "etcd.log").exists()


def test_a_launcher_whose_nodes_began_as_the_run_with_its_own_etcd_ended_leaves_nothing(
    runtime: Runtime, another: int, ended_pid: int
) -> None:
    runtime.put(entry("fit", another))
    runtime.join(launcher())
    runtime.remove("fit")
    (runtime.folder("fit") / "n3.log").write_text("of a node that did not find its job")
    runtime.leave(launcher())
    assert list((runtime.root / "jobs").iterdir()) == []
    runtime.put(entry("fit", ended_pid))
    runtime.leave(launcher())
    assert runtime.killed("fit") is not None, "what is left of a run that was killed may be wanted"


_HOLDS = """
import sys
from pathlib import Path
from taskgraph.launch.runtime import Runtime
with Runtime(Path(sys.argv[1]))._joining():
    print("held", flush=True)
    input()
"""


@pytest.fixture
def holder(runtime: Runtime) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher that does not come to the end of joining a job."""
    command = [sys.executable, "-c", _HOLDS, str(runtime.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        yield process
        process.kill()


@pytest.mark.parametrize("act", [Runtime.join, Runtime.leave])
def test_a_launcher_that_takes_for_ever_to_join_a_job_is_named(
    act: Callable[[Runtime, JobEntry], None],
    runtime: Runtime,
    holder: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime_module, "_JOINING_S", 0.2)
    with pytest.raises(TaskGraphError, match=rf"locked for 0\.2 s by process {holder.pid}\b.*End it") as caught:
        act(runtime, launcher())
    assert not Path("/proc/self/cmdline").exists() or sys.executable in str(caught.value)
    holder.kill()
    holder.wait(30)
    act(runtime, launcher())
    assert not (runtime.root / "joining.lock").exists()


def test_a_launcher_waits_for_another_that_is_just_joining(
    runtime: Runtime, holder: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 3:
            holder.communicate(b"\n")

    monkeypatch.setattr(runtime_module.time, "sleep", sleep)
    runtime.join(launcher())
    assert len(pauses) == 3 and runtime.find("fit") is not None


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells when a process began")
def test_another_process_with_the_launchers_id_is_not_the_launcher(runtime: Runtime) -> None:
    runtime.put(entry())
    file = runtime.folder("fit") / "job.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "started": "12"}))
    assert runtime.find("fit") is None


def test_what_a_newer_version_wrote_is_read_and_what_is_broken_is_said(runtime: Runtime) -> None:
    runtime.put(entry())
    runtime.put(entry("other"))
    file = runtime.folder("fit") / "job.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "of_a_newer_version": 1}))
    assert runtime.find("fit") is not None
    file.write_text("{")
    with pytest.raises(TaskGraphError, match=r"job\.json cannot be read .* remove it"):
        runtime.find("fit")
    assert [job.name for job in runtime.jobs()] == ["other"]


def test_what_killed_launchers_left_is_forgotten_but_for_the_last(runtime: Runtime, ended_pid: int) -> None:
    for number in range(8):
        runtime.put(replace(entry(f"old{number}", ended_pid), created=float(number + 1)))
    runtime.put(entry("new"))
    assert sorted(path.name for path in (runtime.root / "jobs").iterdir()) == ["new", "old4", "old5", "old6", "old7"]


def test_what_launchers_left_that_were_killed_before_their_job_began_is_forgotten(runtime: Runtime) -> None:
    """Only another run of the same name removed it."""
    for name in ("killed", "begins", "claimed"):
        (runtime.folder(name) / "etcd.log").write_text("it starts")
    for name in ("killed", "claimed"):
        os.utime(runtime.folder(name), (1.0, 1.0))
    with runtime.claim("claimed"):
        runtime.put(entry("new"))
    assert sorted(path.name for path in (runtime.root / "jobs").iterdir()) == ["begins", "claimed", "new"]


def test_what_a_killed_launcher_left_is_not_removed_where_the_job_begins_again_meanwhile(
    runtime: Runtime, ended_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        runtime.put(replace(entry(f"old{number}", ended_pid), created=float(number + 1)))
    found = list(runtime._entries())
    monkeypatch.setattr(runtime, "_entries", lambda: iter(found))  # what is read before the others begin
    with runtime.claim("old0") as ours:
        assert ours
        runtime.remove("old0")
        (runtime.folder("old0") / "n1.log").write_text("it begins")  # there is no entry yet
        runtime.put(entry("new"))
        assert (runtime.folder("old0") / "n1.log").exists()
    runtime.put(entry("old0"))
    runtime.put(entry("newer"))
    assert runtime.find("old0") is not None
    assert not list((runtime.root / "jobs").glob("*.lock"))


def test_a_lock_has_no_name_that_a_job_may_have(runtime: Runtime) -> None:
    runtime.put(entry("x.lock"))
    with runtime.claim("x") as ours:
        assert ours
    with runtime.claim("y"):
        runtime.put(entry("y.lock"))
    assert {job.name for job in runtime.jobs()} == {"x.lock", "y.lock"}


def test_a_directory_that_cannot_be_made_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TaskGraphError, match=r"must be a directory .*: remove it, or set TASKGRAPH_RUNTIME_DIR"):
        Runtime(tmp_path / "file")
    for root in (tmp_path / "file" / "taskgraph", tmp_path / "absent" / "taskgraph"):
        with pytest.raises(
            TaskGraphError, match=r"cannot be made .*: set TASKGRAPH_RUNTIME_DIR to a directory of your"
        ):
            Runtime(root).folder("fit")


def test_a_directory_in_one_of_another_user_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, mode: int = 0o777, exist_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(
        TaskGraphError, match=r"taskgraph cannot be made \(Permission denied\): set TASKGRAPH_RUNTIME_DIR"
    ):
        Runtime(tmp_path / "taskgraph").folder("fit")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells it")
def test_a_process_whose_name_is_no_text_is_known() -> None:
    """The kernel cuts names at 15 bytes, wherever that is."""
    name = Path(f"/proc/{os.getpid()}/comm")
    before = name.read_bytes()
    name.write_bytes(b"\xe4 ) ")
    try:
        assert alive(os.getpid()) and host.state(os.getpid()) in ("R", "S") and host.began(os.getpid()).isdigit()
    finally:
        name.write_bytes(before)


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "../../etc", "a\0b", "x" * 101])
def test_a_name_that_is_none_touches_no_file(runtime: Runtime, name: str) -> None:
    assert runtime.find(name) is None and runtime.finished(name) is None
    for act in (runtime.folder, runtime.sockets, runtime.remove, lambda n: runtime.keep_finished(n, {})):
        with pytest.raises(JobError, match="is no job's name"):
            act(name)
    assert not runtime.root.exists()


def test_a_directory_that_others_can_read_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "taskgraph"
    root.mkdir()
    root.chmod(0o755)
    with pytest.raises(TaskGraphError, match="only you can read"):
        Runtime(root).put(entry())


def test_what_another_user_has_made_in_its_place_is_not_read(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """In /tmp anybody may make it first: `status` asked the etcd that it names, and `token` printed its token."""
    runtime.put(entry())
    monkeypatch.setattr("os.getuid", lambda: runtime.root.stat().st_uid + 1)
    with pytest.raises(TaskGraphError, match=r"is another user's \(id \d+\): set TASKGRAPH_RUNTIME_DIR"):
        Runtime(runtime.root)


def test_a_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "taskgraph").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TaskGraphError, match="must be a directory"):
        Runtime(tmp_path / "taskgraph").put(entry())


def test_it_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("ours", "xdg", "tmp"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.delenv("TASKGRAPH_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert Runtime().root == tmp_path / "tmp" / f"taskgraph-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert Runtime().root == tmp_path / "tmp" / f"taskgraph-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    assert Runtime().root == tmp_path / "xdg" / "taskgraph"
    with monkeypatch.context() as of_another_user:  # as after `su`
        of_another_user.setattr("os.access", lambda path, mode: path != str(tmp_path / "xdg"))
        assert Runtime().root == tmp_path / "tmp" / f"taskgraph-{os.getuid()}"
    with monkeypatch.context() as root:  # who may write wherever another user may, e.g. user 12345 there
        found = os.stat
        root.setattr("os.stat", lambda path, **how: os.stat_result((*found(path, **how)[:4], 12345, *[0] * 5)))
        assert Runtime().root == tmp_path / "tmp" / f"taskgraph-{os.getuid()}"
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path / "ours"))
    assert Runtime().root == tmp_path / "ours" / "taskgraph"
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path / "gone"))
    with pytest.raises(TaskGraphError, match="no such directory"):
        Runtime()


def test_it_needs_no_directory_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the root is read-only, as a container's may be, there is none: every command failed."""

    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", none)
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    assert Runtime().root == tmp_path / "taskgraph"
    monkeypatch.delenv("TASKGRAPH_RUNTIME_DIR")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with pytest.raises(FileNotFoundError, match="No usable temporary directory"):
        Runtime()


@pytest.mark.parametrize("below", ["t", "a-very-long-name-" * 6])
def test_sockets_have_short_paths_and_private_folders_wherever_the_directory_is(tmp_path: Path, below: str) -> None:
    runtime = Runtime(tmp_path / below)
    first, second = runtime.sockets("fit"), runtime.sockets("fit")
    try:
        assert first.path != second.path
        assert len(os.fsencode(first.path / "12345678" / "0123456789abcdef")) < 100
        assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    finally:
        for folder in (first, second):
            folder.remove()
    assert not first.path.exists() and not second.path.exists()


@pytest.mark.parametrize("name", ["t", "\xe9", "a#b", "a?b", "a%41b", "a,b", "a|b", os.fsdecode(b"\xe9")])
def test_sockets_are_elsewhere_where_an_address_cannot_say_their_path(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC takes it for a URI: nodes listened at one path and were asked at another, or could not listen. What is not
    text in UTF-8 ended every run with a UnicodeEncodeError."""
    with tempfile.TemporaryDirectory(prefix="tg-", dir="/tmp") as short:
        folders = [Runtime(Path(short) / name).sockets("fit")]
        monkeypatch.setattr(tempfile, "tempdir", os.path.join(short, name))  # as TMPDIR has it
        folders.append(embedded._new_folder(short=True))
        for folder in folders:
            folder.remove()
            assert folder.path.is_relative_to(short) == (name in ("t", "\xe9"))


@pytest.mark.parametrize("below", ["t", "a-very-long-name-" * 6])
def test_sockets_of_a_launcher_that_was_killed_are_removed_by_the_next_and_those_of_one_that_lives_are_not(
    tmp_path: Path, below: str
) -> None:
    code = (
        "import pathlib, sys, time; from taskgraph.launch.runtime import Runtime;"
        "folder = Runtime(pathlib.Path(sys.argv[1])).sockets('fit'); (folder.path / 'node').mkdir();"
        "print(folder.path, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / below)], stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        left = Path(launcher.stdout.readline().strip())
        runtime = Runtime(tmp_path / below)
        try:
            ours = runtime.sockets("fit")
            assert (left / "node").is_dir()
        finally:
            launcher.kill()
        launcher.wait()
        other = runtime.sockets("other")
        try:
            assert not left.exists()
            assert ours.path.is_dir() and other.path.is_dir()
        finally:
            ours.remove()
            other.remove()


@pytest.mark.parametrize("when", ["locked", "removed", "removed when it is open"])
def test_who_takes_a_new_folder_for_one_that_was_left_does_no_harm(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Another launcher finds ours between our making and our locking it."""
    made: list[Path] = []
    make, lock, locks = tempfile.mkdtemp, fcntl.flock, list[int]()

    def mkdtemp(prefix: str, dir: Path) -> str:
        made.append(Path(make(prefix=prefix, dir=dir)))
        if len(made) == 1 and when == "locked":
            locks.append(os.open(made[0], os.O_RDONLY))
            lock(locks[0], fcntl.LOCK_EX)
        if len(made) == 1 and when == "removed":
            made[0].rmdir()
        return str(made[-1])

    def flock(file: int, how: int) -> None:
        if len(made) == 1 and when == "removed when it is open":
            made[0].rmdir()
        lock(file, how)

    monkeypatch.setattr("tempfile.mkdtemp", mkdtemp)
    monkeypatch.setattr("fcntl.flock", flock)
    sockets = runtime.sockets("fit")
    try:
        assert len(made) == 2 and sockets.path == made[1] and sockets.path.is_dir()
    finally:
        sockets.remove()
        for held in locks:
            os.close(held)


def test_where_no_folder_can_be_locked_none_is_removed(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    first, second = runtime.sockets("fit"), runtime.sockets("fit")
    assert first.path.is_dir() and second.path.is_dir()
    for folder in (first, second):
        folder.remove()


def test_one_launcher_at_a_time_runs_a_job_of_a_name(runtime: Runtime) -> None:
    with runtime.claim("fit") as first, runtime.claim("fit") as second, runtime.claim("other") as other:
        assert first and not second and other
    with runtime.claim("fit") as again:
        assert again
    assert list((runtime.root / "jobs").iterdir()) == []


def test_a_lock_that_cannot_be_removed_costs_its_holder_nothing(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system that is read-only by then refuses that, too."""

    def held() -> str:
        with runtime.claim("fit") as alone:
            assert alone
            path = runtime.root / "jobs" / ".fit.lock"
            path.unlink()
            path.mkdir()
            return "what it came to"

    assert held() == "what it came to"
    assert [record.message for record in caplog.records] == [
        f"{runtime.root}/jobs/.fit.lock cannot be removed: {os.strerror(errno.EISDIR)}"
    ]


def test_a_lock_that_was_removed_between_its_opening_and_its_locking_lets_nobody_in_twice(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who had it ends meanwhile: a lock of a file without a name keeps no other out, who makes one of that name."""
    lock, had = fcntl.flock, contextlib.ExitStack()
    assert had.enter_context(runtime.claim("fit"))

    def flock(file: int, how: int) -> None:
        had.close()
        lock(file, how)

    monkeypatch.setattr("fcntl.flock", flock)
    with runtime.claim("fit") as second, runtime.claim("fit") as third:
        assert second and not third
    with runtime.claim("fit") as again:
        assert again


def test_the_last_finished_jobs_are_kept_with_their_logs(runtime: Runtime) -> None:
    for number in range(34):
        name = f"job{number:02}"
        (runtime.folder(name) / "n1.log").write_text("it said this")
        runtime.keep_finished(name, {"status": {}, "result": {"number": number}, "events": []})
        os.utime(runtime.root / "finished" / f"{name}.json", (number, number))
    assert runtime.finished("job00") is None and runtime.finished("job01") is None
    for number in (2, 33):
        assert (runtime.finished(f"job{number:02}") or KeptJob()).result == {"number": number}
    logs = sorted(path.name for path in (runtime.root / "finished").glob("*.logs"))
    assert len(logs) == 32 and logs[0] == "job02.logs"
    assert (runtime.root / "finished" / "job33.logs" / "n1.log").read_text() == "it said this"


@pytest.mark.parametrize("run", ["one", ""])
def test_the_launcher_of_a_run_that_ends_last_keeps_the_logs_that_another_one_has_kept(
    runtime: Runtime, run: str
) -> None:
    """`run` and `launch` on one host: whoever was first took the logs of all nodes, and the other removed them."""
    for name, text in (("n1.log", "it said this"), ("n2.log", "and that"), ("n3.log", "")):
        (runtime.folder("fit") / name).write_text(text)
    runtime.keep_finished("fit", {"run": "one"})
    (runtime.folder("fit") / "n3.log").write_text("it ended later")
    runtime.keep_finished("fit", {"run": run})
    logs = {path.name: path.read_text() for path in runtime.kept_logs("fit").glob("n*.log")}
    later = {"n3.log": "it ended later"}
    assert logs == ({"n1.log": "it said this", "n2.log": "and that", **later} if run else later)
    runtime.keep_finished("fit", {"run": "another"})
    assert not runtime.kept_logs("fit").exists(), "what an earlier run said is not told of this one"


def test_launchers_of_a_run_that_end_at_one_time_keep_the_logs_of_all(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One looked whose logs are kept, another one kept all that there were, and the first took those for an earlier
    run's: of thirty nodes five logs were left, and it said that nothing was kept, since some had gone meanwhile."""
    names = {f"n{number}.log" for number in range(30)}
    for name in names:
        (runtime.folder("fit") / name).write_text("it said this")
    look = runtime_module._run_of
    other = threading.Thread(target=runtime.keep_finished, args=("fit", {"run": "one"}))

    def looks(logs: Path) -> str:
        found = look(logs)
        if threading.current_thread() is not other:
            other.start()
            other.join(0.5)
        return found

    monkeypatch.setattr(runtime_module, "_run_of", looks)
    runtime.keep_finished("fit", {"run": "one"})
    other.join()
    assert {path.name for path in runtime.kept_logs("fit").glob("*.log")} == names


def test_a_launcher_does_not_wait_for_ever_for_another_one_that_keeps_logs(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "_JOINING_S", 0.05)
    (runtime.folder("fit") / "n1.log").write_text("it said this")
    (runtime.root / "finished").mkdir(mode=0o700)
    file = os.open(runtime.root / "finished", os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        runtime.keep_finished("fit", {"run": "one"})
    finally:
        os.close(file)
    assert (runtime.kept_logs("fit") / "n1.log").read_text() == "it said this"


@pytest.mark.parametrize(
    "text", ["", "[]", "3", '"status"', "{}", '{"status": {}}', '{"result": 1}', '{"status": 1, "result": 1}']
)
def test_what_is_no_record_of_a_finished_job_is_none(runtime: Runtime, text: str) -> None:
    runtime.keep_finished("fit", {"status": {}})
    (runtime.root / "finished" / "fit.json").write_text(text)
    assert runtime.finished("fit") is None


def test_where_the_disk_is_full_logs_are_kept_and_no_earlier_job_of_that_name(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.keep_finished("fit", {"number": 1})
    (runtime.folder("fit") / "n1.log").write_text("it said this")

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(runtime_module, "write_whole", full)
    with pytest.raises(OSError, match="No space left on device"):
        runtime.keep_finished("fit", {"number": 2})
    assert runtime.finished("fit") is None
    assert (runtime.kept_logs("fit") / "n1.log").read_text() == "it said this"
