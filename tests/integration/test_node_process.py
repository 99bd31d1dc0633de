"""Nodes as processes: they compute, are killed, leave, and never outlive their launcher."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import trustme
from etcd_kit import following
from processes_kit import becomes, kill, running

from taskgraph.coordination.embedded import EmbeddedEtcd
from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.driver.loading import load_driver
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import PeerGone
from taskgraph.graph.values import decode
from taskgraph.launch.follow import follow_events
from taskgraph.launch.inprocess import arun_inprocess
from taskgraph.launch.local import LocalNodes
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.launch.submit import submit
from taskgraph.network.listening import NOWHERE, Listening
from taskgraph.network.tls import CA, CERT, KEY
from taskgraph.node.config import NodeConfig
from taskgraph.node.process import wait_for_job
from taskgraph.observe.control_client import ControlClient, control_address
from taskgraph.observe.status import TaskResult
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import GoneRecord, JobStatus, NodeRecord, StatusRecord
from taskgraph.system import host
from taskgraph.transport.endpoints import host_key

DRIVER = Path(__file__).parent / "drivers" / "held.py"
LIMIT_S = 100.0


async def eventually(true: Callable[[], Awaitable[bool]], limit_s: float) -> None:
    """Asks again until it is so: a node tells nobody when it takes notice of something."""
    async with asyncio.timeout(limit_s):
        while not await true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def present(etcd: EtcdCoordinator, key: str, limit_s: float) -> bytes:
    """The key's value, as soon as there is one."""

    async def there() -> bool:
        return await etcd.get(key) is not None

    await eventually(there, limit_s)
    kv = await etcd.get(key)
    assert kv is not None
    return kv.value


async def absent(etcd: EtcdCoordinator, key: str, limit_s: float) -> None:
    async def away() -> bool:
        return await etcd.get(key) is None

    await eventually(away, limit_s)


@dataclass
class Rig:
    """One submitted job, its nodes, and what a launcher knows."""

    spec: JobSpec
    entry: JobEntry
    etcd: EtcdCoordinator
    nodes: LocalNodes
    folder: Path
    told: set[str]

    @property
    def keys(self) -> Keys:
        return Keys(self.spec.name)

    def hold(self, epoch: int) -> None:
        (self.folder / f"hold-{epoch}").touch()

    def release(self, epoch: int) -> None:
        (self.folder / f"hold-{epoch}").unlink()

    def id_of(self, name: str) -> str:
        """A node's id, by its name."""
        return self.nodes._processes[name].node_id

    async def record(self, name: str) -> NodeRecord:
        """What a node registered, as soon as it has."""
        key = self.keys.node(self.id_of(name))
        return NodeRecord.from_bytes(await present(self.etcd, key, LIMIT_S))

    async def client(self, name: str) -> ControlClient:
        address = control_address((await self.record(name)).control, host_key())
        return ControlClient(address, self.entry.token_bytes, self.entry.node_access)

    async def committed(self, epoch: int) -> None:
        """Waits until that epoch has committed."""

        async def has() -> bool:
            kv = await self.etcd.get(self.keys.epoch)
            return kv is not None and json.loads(kv.value)["epoch"] > epoch

        await eventually(has, LIMIT_S)

    async def ended(self) -> tuple[str, int]:
        """The next node whose process has ended, and its exit code."""
        await becomes(lambda: self.nodes.codes().keys() > self.told, LIMIT_S)
        name, code = next((name, code) for name, code in self.nodes.codes().items() if name not in self.told)
        self.told.add(name)
        return name, code

    async def status(self) -> StatusRecord:
        kv = await self.etcd.get(self.keys.status)
        assert kv is not None
        return StatusRecord.from_bytes(kv.value)

    async def leader(self) -> str:
        """The name of the node that leads."""
        found: list[str] = []

        async def leads() -> bool:
            for name in self.nodes.pids():
                async with await self.client(name) as client:
                    if (await client.status(LIMIT_S)).leader:
                        found.append(name)
            return bool(found)

        await eventually(leads, LIMIT_S)
        return found[0]

    async def draining(self, name: str) -> None:
        """Waits until a node knows that it is to leave."""
        async with await self.client(name) as client:

            async def drains() -> bool:
                return (await client.status(LIMIT_S)).draining

            await eventually(drains, LIMIT_S)

    async def gone(self, name: str) -> str:
        """Why a node is declared gone, as soon as it is."""
        data = await present(self.etcd, self.keys.gone(self.id_of(name)), LIMIT_S)
        return GoneRecord.from_bytes(data).reason

    async def results(self) -> dict[int, np.ndarray]:
        """What the job computed, asked of the nodes; then they may leave."""
        found: list[TaskResult] = []
        async with asyncio.timeout(LIMIT_S):
            for name in self.nodes.pids():
                async with await self.client(name) as client:
                    found += await client.results()
        assert (await self.status()).state == JobStatus.FINISHED
        assert {(r.epoch) for r in found} == {self.spec.epochs}
        await self.etcd.txn(Txn(success=(Put(self.keys.collected, b"{}"),)))
        return {r.task: decode(r.value) for r in found if r.value is not None}


@contextlib.asynccontextmanager
async def launched(
    etcd: EmbeddedEtcd,
    count: int,
    *,
    driver: Path = DRIVER,
    listening: Listening = NOWHERE,
    node_tls: dict[str, str] | None = None,
    launcher: type[LocalNodes] = LocalNodes,
    between: Callable[[], None] = lambda: None,
    **options: object,
) -> AsyncIterator[Rig]:
    """A job with that many nodes; whatever happens, they are gone afterwards, and nothing of them is left."""
    folder = Path(tempfile.mkdtemp(prefix="tg-"))
    name = f"held-{uuid.uuid4().hex[:8]}"
    (folder / "gate").mkdir()
    job = load_driver(str(driver))(name=name, folder=str(folder / "gate"), **options)
    spec = JobSpec.of(job, expected_nodes=count)
    entry = JobEntry(
        name=name,
        etcd=etcd.endpoint,
        token=secrets.token_hex(32),
        pid=os.getpid(),
        embedded=False,
        tls={},
        node_tls=node_tls or {},
    )
    runtime = Runtime(folder / "run")
    runtime.put(entry)
    try:
        async with await EtcdCoordinator.connect(etcd.endpoint) as coordinator:
            nodes = launcher(
                entry,
                coordinator,
                runtime,
                listening=listening,
            )
            rig = Rig(spec, entry, coordinator, nodes, folder / "gate", set())
            await submit(coordinator, spec)
            between()
            try:
                yield rig
            finally:
                await nodes.stop(0.0)
                assert nodes.alive_count == 0 and list((folder / "run" / "s").iterdir()) == []
    finally:
        shutil.rmtree(folder)


async def calm(**options: int) -> dict[int, np.ndarray]:
    """What the same job computes when nothing fails."""
    found = await arun_inprocess(load_driver(str(DRIVER))(**options))
    return dict(found.values)


def same(found: dict[int, np.ndarray], expected: dict[int, np.ndarray]) -> bool:
    return found.keys() == expected.keys() and all(np.array_equal(found[t], expected[t]) for t in expected)


async def test_nodes_leave_after_collection(embedded_etcd: EmbeddedEtcd) -> None:
    async with launched(embedded_etcd, 3) as rig:
        await rig.nodes.start(3)
        assert rig.nodes.alive_count == 3 and sorted(rig.nodes.pids()) == ["n1", "n2", "n3"]
        for name, pid in rig.nodes.pids().items():
            command = command_of(pid)
            assert rig.entry.token not in command and rig.entry.etcd not in command
            assert os.getsid(pid) == pid, "a Ctrl-C on the terminal is for the launcher alone"
            record = await rig.record(name)
            assert (record.pid, record.machine) == (pid, host.boot_id())
        assert same(await rig.results(), await calm())
        await rig.nodes.wait(LIMIT_S)
        assert rig.nodes.codes() == {"n1": 0, "n2": 0, "n3": 0}
        assert {await rig.gone(name) for name in ("n1", "n2", "n3")} == {"it left"}
        assert (await rig.etcd.list(rig.keys.nodes)).items == ()


@pytest.mark.smoke
async def test_killed_node_is_declared_gone(embedded_etcd: EmbeddedEtcd) -> None:
    lease_ttl_s = 60.0
    async with launched(embedded_etcd, 3, lease_ttl_s=lease_ttl_s) as rig:
        rig.hold(3)
        await rig.nodes.start(3)
        await rig.committed(2)
        leader = await rig.leader()
        node = rig.id_of(leader)
        record = await rig.record(leader)
        start = (await rig.etcd.list(rig.keys.root)).revision + 1
        async with following(rig.etcd, rig.keys.gone(node), start) as told:
            killed_at = time.monotonic()
            os.kill(rig.nodes.pids()[leader], signal.SIGKILL)
            async with asyncio.timeout(LIMIT_S), told.changed:
                await told.changed.wait_for(lambda: told.events)
        assert GoneRecord.from_bytes(told.events[0].kv.value).reason == "killed by SIGKILL"
        assert await rig.ended() == (leader, -signal.SIGKILL)
        # Its lease was revoked: the key is gone long before it would have expired.
        await absent(rig.etcd, rig.keys.node(node), LIMIT_S)
        assert time.monotonic() - killed_at < lease_ttl_s * 2 / 3
        (unix,) = [e for e in record.endpoints if e.startswith("unix:")]
        assert not Path(unix.split(":", 2)[2]).parent.exists(), "its sockets are removed"
        async with ControlClient(control_address(record.control, host_key()), rig.entry.token_bytes) as client:
            with pytest.raises(PeerGone):
                await client.status()
        rig.release(3)
        assert same(await rig.results(), await calm())
        await rig.nodes.wait(LIMIT_S)
        assert sorted(rig.nodes.codes().values()) == [-signal.SIGKILL, 0, 0]


async def test_node_warns_of_expiring_certificate(embedded_etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    now, hour = datetime.datetime.now(datetime.UTC), datetime.timedelta(hours=1)
    authority = trustme.CA()
    files = {n: str(tmp_path / f) for n, f in (("ca", CA), ("cert", CERT), ("key", KEY))}
    authority.cert_pem.write_to_path(files["ca"])

    def issue(after: datetime.timedelta) -> None:
        issued = authority.issue_cert("127.0.0.1", not_before=now - 24 * hour, not_after=now + after)
        issued.private_key_pem.write_to_path(files["key"])
        issued.cert_chain_pems[0].write_to_path(files["cert"])

    issue(hour)
    async with launched(embedded_etcd, 1, listening=Listening(host="127.0.0.1"), node_tls=files) as rig:
        rig.hold(0)
        await rig.nodes.start(1)
        async with asyncio.timeout(LIMIT_S):
            async for event in follow_events(rig.etcd, rig.spec.name):
                if event.kind == "certificate":
                    break
        assert f"the certificate in {files['cert']} ends at" in event.text
        issue(999 * hour)
        tcp = control_address((await rig.record("n1")).control, "another host")
        async with ControlClient(tcp, rig.entry.token_bytes, rig.entry.node_access) as client:
            assert (await client.status(LIMIT_S)).name == "n1"
        rig.release(0)
        assert same(await rig.results(), await calm())


@pytest.mark.smoke
async def test_sigterm_hands_tasks_over(embedded_etcd: EmbeddedEtcd) -> None:
    async with launched(embedded_etcd, 3) as rig:
        rig.hold(2)
        rig.hold(7)
        await rig.nodes.start(3)
        await rig.committed(1)
        leader = await rig.leader()
        os.kill(rig.nodes.pids()[leader], signal.SIGTERM)
        await rig.draining(leader)
        rig.release(2)
        assert await rig.ended() == (leader, 0)
        assert (await rig.status()).state == JobStatus.RUNNING
        rig.release(7)
        assert same(await rig.results(), await calm())


async def test_second_sigterm_ends_the_node(embedded_etcd: EmbeddedEtcd) -> None:
    async with launched(embedded_etcd, 1) as rig:
        rig.hold(1)
        await rig.nodes.start(1)
        await rig.committed(0)
        os.kill(rig.nodes.pids()["n1"], signal.SIGTERM)
        await rig.draining("n1")
        assert rig.nodes.alive_count == 1, "there is nobody to hand over to"
        await asyncio.sleep(1.0)  # what comes sooner is the same order
        os.kill(rig.nodes.pids()["n1"], signal.SIGTERM)
        assert await rig.ended() == ("n1", 143), "long before it would have left by itself (drain_s)"
        assert await rig.gone("n1") == "exited with code 143"


async def test_endless_compute_does_not_keep_the_process(embedded_etcd: EmbeddedEtcd) -> None:
    async with launched(embedded_etcd, 1, stuck="thread") as rig:
        await rig.nodes.start(1)
        await becomes((rig.folder / "stuck").exists, LIMIT_S)
        ended = StatusRecord(state=JobStatus.CANCELLED, reason="enough")
        await rig.etcd.txn(Txn(success=(Put(rig.keys.status, ended.to_bytes()),)))
        assert await rig.ended() == ("n1", 0)


async def test_node_that_dies_early_is_declared_gone(
    embedded_etcd: EmbeddedEtcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "held_and_dies.py"
    driver.write_text(
        DRIVER.read_text().replace(
            "import time\n", "import os\nimport sys\nimport time\n\nif os.environ.get('DIE'): sys.exit('no licence')\n"
        )
    )
    async with launched(embedded_etcd, 1, driver=driver, between=lambda: monkeypatch.setenv("DIE", "1")) as rig:
        await rig.nodes.start(1)
        assert await rig.ended() == ("n1", 1)
        assert "ended with sys.exit('no licence')" in rig.nodes.log_tail("n1")
        assert await rig.gone("n1") == "exited with code 1"


@pytest.mark.parametrize("stuck", ["", "loop", "thread"])
async def test_killed_launcher_leaves_nothing(stuck: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="tg-"))
    (folder / "run").mkdir(mode=0o700)
    (folder / "hold-1").touch()
    try:
        launcher = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "taskgraph", "run", str(DRIVER), "--nodes", "2"),
            *("-o", f"folder={folder}", "-o", f"stuck={stuck}"),
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, "TASKGRAPH_RUNTIME_DIR": str(folder / "run"), "TMPDIR": str(folder)},
        )
        runtime = Runtime(folder / "run" / "taskgraph")
        try:
            await becomes(lambda: runtime.find("held") is not None, LIMIT_S)
            entry = runtime.find("held")
            assert entry is not None
            await two_registered(entry.etcd)
            if stuck:
                await becomes(lambda: (folder / "stuck").exists(), LIMIT_S)
            # Two nodes, etcd and its guard; what the nodes were forked from ends a moment after them.
            await becomes(lambda: len(descendants(launcher.pid)) == 4, LIMIT_S)
            started = descendants(launcher.pid)
            assert len(started) == 4
        finally:
            await kill_and_reap(launcher)
        await becomes(lambda: not any(running(pid) for pid in started))
        assert runtime.find("held") is None, "what the launcher left is known to be stale"
        assert list((runtime.root / "s").iterdir()) == []
        assert [name for name in os.listdir(folder) if name.startswith("taskgraph-etcd-")] == []
    finally:
        shutil.rmtree(folder)


async def two_registered(endpoint: str) -> None:
    async with await EtcdCoordinator.connect(endpoint) as etcd:

        async def registered() -> bool:
            return len((await etcd.list(Keys("held").nodes)).items) == 2

        await eventually(registered, LIMIT_S)


async def kill_and_reap(process: asyncio.subprocess.Process) -> None:
    await kill(process.pid)
    await process.wait()


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in path.read_text().split():
                found |= {int(child)} | descendants(int(child))
    return found


@pytest.mark.smoke
async def test_node_waits_for_its_job() -> None:
    coordinator = MemoryCoordinator(MemoryStore())
    spec = JobSpec.of(load_driver(str(DRIVER))(name="later"))
    keys = Keys("later")
    old = dataclasses.replace(spec, run="an earlier one")
    puts = (Put(keys.spec, old.to_bytes()), Put(keys.status, StatusRecord(state=JobStatus.FINISHED).to_bytes()))
    await coordinator.txn(Txn(success=(*puts, Put(keys.collected, b"{}"))))
    waiting = asyncio.ensure_future(wait_for_job(coordinator, "later"))
    await asyncio.sleep(0)
    assert not waiting.done(), "a job that has ended is not the one it waits for"
    await submit(coordinator, spec)
    async with asyncio.timeout(5):
        assert (await waiting)[0].run == spec.run
    await coordinator.close()


@pytest.mark.smoke
def test_configuration_hides_the_token() -> None:
    config = NodeConfig(job="held", name="n1", etcd="e:1", token="5ec4e7")
    assert "5ec4e7" not in repr(config) and config.folder is None
