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
from kept_kit import KeptEtcd
from processes_kit import becomes, gone, running

import taskgraph
from taskgraph.clusters.credentials import job_certificates
from taskgraph.coordination.embedded import EmbeddedEtcd, find_etcd
from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.coordination.public import PublicEtcd
from taskgraph.errors import CoordinationError, Unavailable
from taskgraph.protocol.kv import Put, Txn

ROOT = Path(taskgraph.__file__).parent.parent
GUARD = ROOT / "taskgraph" / "coordination" / "guard.py"


def private_dirs(root: Path) -> list[Path]:
    return sorted(root.glob("taskgraph-etcd-*"))


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's private directories are made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.smoke
async def test_embedded_etcd_is_private(temporary: Path) -> None:
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


async def test_without_a_binary_it_says_the_three_ways_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CoordinationError) as raised:
        await EmbeddedEtcd().start()
    for way in ("taskgraph-aio[embedded]", "PATH", "--etcd"):
        assert way in str(raised.value)


async def test_an_etcd_that_does_not_start_says_why_and_leaves_nothing(temporary: Path) -> None:
    with pytest.raises(CoordinationError, match="no-such-flag"):
        await KeptEtcd(arguments=["--no-such-flag"]).start()
    assert private_dirs(temporary) == []


async def test_it_may_have_as_many_files_open_as_its_clients_need(temporary: Path) -> None:
    """With 151 it kept all out, with 160 every other node of 16."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (151, hard))
    try:
        async with EmbeddedEtcd(nodes=16) as etcd:
            most = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
            allowed, _ = resource.prlimit(etcd.pid, resource.RLIMIT_NOFILE)
            assert allowed in (most, hard), "newer builds of etcd take all that they may have"
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


#: Writes 4 MiB, which is not cut yet, and one line more; waits until its log is short again, and has last
#: words at once: they come after what is kept.
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


@pytest.mark.smoke
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
async def test_killed_guard_ends_its_command() -> None:
    process = await guard("--", "sleep", "1000")
    child = await child_of(process)
    process.kill()
    await process.communicate()
    await gone(child)


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
            async with asyncio.timeout(30):
                assert await coordinator.get("/taskgraph/none") is None


async def test_etcd_for_other_hosts_goes_on_elsewhere_with_its_data(temporary: Path) -> None:
    """Clients find it by the file with its address, over TLS for a fixed name; a lease outlives the move."""
    for name, data in job_certificates("fit").items():
        (temporary / name).write_bytes(data)
    access = {name: str(temporary / f"{name}.pem") for name in ("ca", "cert", "key")}
    public = PublicEtcd(host="localhost", data=temporary / "data", tls=access, name="fit")
    address = temporary / "address"
    with pytest.raises(Unavailable, match="address"):
        await EtcdCoordinator.connect(f"file:{address}", **access)
    async with EmbeddedEtcd(public=public) as first:
        address.write_text(f"{first.endpoint} fit\n")
        client = await EtcdCoordinator.connect(f"file:{address}", **access)
        await client.txn(Txn(success=(Put("/a", b"1"),)))
        lease = await client.lease(5.0, stall_limit_s=60.0)
        with pytest.raises(Unavailable):
            await EtcdCoordinator.connect(first.endpoint.replace("https", "http"))
    address.unlink()
    async with client, EmbeddedEtcd(public=public) as second:
        assert second.endpoint != first.endpoint
        address.write_text(f"{second.endpoint} fit\n")
        found = await client.get("/a")
        assert found is not None and found.value == b"1"
        before = lease.valid_until()
        while lease.valid_until() == before:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert not lease.lost()
        await lease.close(revoke=True)
    assert private_dirs(temporary) == []
