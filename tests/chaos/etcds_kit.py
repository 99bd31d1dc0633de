"""etcd servers that are killed, frozen and started again on their data: one, or a cluster of three."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from etcd_kit import find_etcdctl
from processes_kit import free_port

from taskgraph.coordination.embedded import find_etcd, version_of
from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.coordination.public import durability_options
from taskgraph.errors import Unavailable

_LIMIT_S = 100.0


class Etcds:
    """Members by number, from 0. They answer on loopback, and keep their data when they are killed."""

    def __init__(self, folder: Path, count: int, host: str = "127.0.0.1", prefix: tuple[str, ...] = ()) -> None:
        self._folder = folder
        self._host = host
        self._prefix = prefix
        self._ports = [(free_port(), free_port()) for _ in range(count)]
        self._running: dict[int, asyncio.subprocess.Process] = {}

    @property
    def endpoints(self) -> str:
        """Of all members, as `--etcd` takes them."""
        return ",".join(f"{self._host}:{client}" for client, _ in self._ports)

    async def start(self, *members: int) -> None:
        """Starts members, and waits until the cluster answers."""
        options = durability_options(await version_of(find_etcd()))
        cluster = ",".join(f"m{i}=http://{self._host}:{peer}" for i, (_, peer) in enumerate(self._ports))
        for i in members:
            client, peer = (f"http://{self._host}:{port}" for port in self._ports[i])
            with (self._folder / f"m{i}.log").open("ab") as log:
                self._running[i] = await asyncio.create_subprocess_exec(
                    *(*self._prefix, str(find_etcd()), "--name", f"m{i}", "--data-dir", str(self._folder / f"m{i}")),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", cluster, "--log-level", "warn", "--unsafe-no-fsync"),
                    *options,
                    stdout=log,
                    stderr=log,
                    env={name: value for name, value in os.environ.items() if not name.startswith("ETCD_")},
                )
        async with asyncio.timeout(_LIMIT_S):
            while True:
                for i in members:
                    if self._running[i].returncode is not None:
                        log_text = (self._folder / f"m{i}.log").read_text()
                        raise AssertionError(f"etcd m{i} did not start: {log_text[-2000:]}")
                with contextlib.suppress(Unavailable):
                    async with await EtcdCoordinator.connect(self.endpoints, timeout_s=1.0) as etcd:
                        await etcd.members()
                        return

    async def leader(self) -> int:
        """The member that leads, once there is one."""
        async with asyncio.timeout(_LIMIT_S):
            while True:
                process = await asyncio.create_subprocess_exec(
                    *(str(find_etcdctl()), "--endpoints", self.endpoints, "endpoint", "status", "-w", "json"),
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    env={"ETCDCTL_API": "3"},
                )
                out, _ = await process.communicate()
                for found in json.loads(out or "null") or []:
                    if found["Status"]["header"]["member_id"] == found["Status"]["leader"]:
                        return self.endpoints.split(",").index(found["Endpoint"])

    async def kill(self, member: int) -> None:
        process = self._running.pop(member)
        with contextlib.suppress(ProcessLookupError):  # it did not start
            process.kill()
        await process.wait()

    @contextlib.contextmanager
    def frozen(self, *members: int) -> Iterator[None]:
        """These members do not run within the block."""
        for member in members:
            self._running[member].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for member in members:
                self._running[member].send_signal(signal.SIGCONT)

    async def end(self) -> None:
        for member in tuple(self._running):
            await self.kill(member)


@contextlib.asynccontextmanager
async def etcds(
    folder: Path, count: int = 1, *, host: str = "127.0.0.1", prefix: tuple[str, ...] = ()
) -> AsyncIterator[Etcds]:
    """So many members, at an address of this machine; `prefix` is before their command (a network namespace)."""
    made = Etcds(folder, count, host, prefix)
    try:
        await made.start(*range(count))
        yield made
    finally:
        await made.end()
