"""Getting in: TLS with client certificates, users and passwords, tokens that etcd forgets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from etcd_kit import Certificates, etcd_with_tls, etcd_with_users, etcdctl, following, make_certificates
from processes_kit import becomes

from taskgraph.coordination.api import AccessRefused
from taskgraph.coordination.embedded import EmbeddedEtcd
from taskgraph.coordination.etcd import EtcdCoordinator, EtcdLease, coordinator
from taskgraph.coordination.etcd import v3_pb2 as v3
from taskgraph.coordination.etcd.login import Entered
from taskgraph.errors import CoordinationError, Unavailable
from taskgraph.protocol.kv import Put, Txn


def put(key: str, value: bytes = b"", lease: int = 0) -> Txn:
    return Txn(success=(Put(key, value, lease),))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.mark.smoke
async def test_tls_with_client_certificates(tmp_path: Path, certificates: Certificates) -> None:
    async with etcd_with_tls(tmp_path, certificates) as endpoint:
        async with await EtcdCoordinator.connect(
            f"https://{endpoint}", ca=certificates.ca, cert=certificates.client, key=certificates.client_key
        ) as node:
            lease = await node.lease(2.0, stall_limit_s=60.0)
            granted_until = lease.valid_until()
            start = (await node.txn(put("/a", b"", lease.id))).revision
            async with following(node, "/", start) as follower:
                await follower.until(start)
            await becomes(lambda: lease.valid_until() > granted_until)
            assert await node.lease_left(lease.id) == 1
            await lease.close(revoke=True)
        for arguments in ({"ca": certificates.ca}, {}):  # no client certificate; not even TLS
            with pytest.raises(Unavailable, match="No etcd answers"):
                await EtcdCoordinator.connect(endpoint, timeout_s=1.0, **arguments)


def given(folder: Path, made: Certificates) -> dict[str, Path]:
    """The files that a client is told of, from now on with these certificates."""
    for name in ("ca", "client", "client_key"):
        (folder / "new").write_bytes(getattr(made, name).read_bytes())
        (folder / "new").rename(folder / f"given-{name}")
    return {"ca": folder / "given-ca", "cert": folder / "given-client", "key": folder / "given-client_key"}


async def test_renewed_certificates_are_taken_up_when_etcd_is_connected_to_anew(
    tmp_path: Path, certificates: Certificates
) -> None:
    """An authority of its own stands for certificates that have expired: none of the old ones is taken any more."""
    give = partial(given, tmp_path)
    arguments = give(certificates)
    async with etcd_with_tls(tmp_path, certificates) as endpoint:
        node = await EtcdCoordinator.connect(endpoint, timeout_s=20.0, **arguments)
        start = (await node.txn(put("/a"))).revision
    async with node, following(node, "/", start + 1) as follower:
        (tmp_path / "renewed").mkdir()
        renewed = make_certificates(tmp_path / "renewed")
        port = int(endpoint.rpartition(":")[2])
        async with etcd_with_tls(tmp_path, renewed, port):
            reading = asyncio.ensure_future(node.get("/a"))
            await asyncio.wait([reading], timeout=1.0)
            assert not reading.done()  # the server's authority is another one
            give(renewed)
            found = await reading
            assert found is not None and found.mod_revision == start
            revision = (await node.txn(put("/b"))).revision
            await follower.until(revision)


@pytest.mark.smoke
async def test_a_user_gets_what_is_granted_and_nothing_else() -> None:
    async with etcd_with_users("/job/") as etcd:
        async with await EtcdCoordinator.connect(etcd.endpoint, username="root", password="secret") as root:
            await root.txn(put("/other/a"))
        with pytest.raises(CoordinationError, match="invalid user ID or password"):
            await EtcdCoordinator.connect(etcd.endpoint, username="root", password="wrong")
        with pytest.raises(CoordinationError, match="user name is empty"):
            await EtcdCoordinator.connect(etcd.endpoint)
        async with await EtcdCoordinator.connect(etcd.endpoint, username="worker", password="word") as node:
            lease = await node.lease(2.0, stall_limit_s=60.0)
            granted_until = lease.valid_until()
            start = (await node.txn(put("/job/a", b"", lease.id))).revision
            async with following(node, "/job/", start) as follower:
                await follower.until(start)
            await becomes(lambda: lease.valid_until() > granted_until)
            assert await node.lease_left(lease.id) == 1
            with pytest.raises(CoordinationError, match="permission denied"):
                await node.get("/other/a")
            with pytest.raises(CoordinationError, match="permission denied"):
                await anext(aiter(node.watch("/other/", start)))
            await lease.close(revoke=True)
            assert await node.get("/job/a") is None


async def test_a_watch_outlasts_another_password_and_a_permission_that_is_taken_away_for_a_while(
    tmp_path: Path,
) -> None:
    """It ended with the first refusal; of a token that etcd forgot it says that the watch is not permitted."""
    (tmp_path / "word").write_text("word\n")
    async with (
        etcd_with_users("/job/") as etcd,
        await EtcdCoordinator.connect(
            etcd.endpoint, username="worker", password="word", password_file=tmp_path / "word"
        ) as node,
    ):
        start = (await node.txn(put("/job/a"))).revision
        async with following(node, "/job/", start) as follower:
            await follower.until(start)

            async def root(*arguments: str) -> None:
                await asyncio.to_thread(etcdctl, etcd, "--user", "root:secret", *arguments)

            await root("role", "revoke-permission", "worker", "--prefix=true", "/job/")
            await root("user", "delete", "worker")
            await root("user", "add", "worker:other")
            await root("user", "grant-role", "worker", "worker")
            (stream,) = node._connection._streams
            stream.left = True  # as where calls to its endpoint fail
            stream.cancel()
            await asyncio.sleep(0.5)  # it is refused
            (tmp_path / "word").write_text("other\n")
            await asyncio.sleep(0.5)  # it is refused again, for another reason
            await root("role", "grant-permission", "worker", "--prefix=true", "readwrite", "/job/")
            last = (await node.txn(put("/job/b"))).revision
            await follower.until(last)
            assert follower.revisions == [start, last]
        forgotten = v3.AuthenticateResponse(token="forgotten.1")
        node._connection.login._entered = Entered(node._connection.endpoint, forgotten)
        batches = aiter(node.watch("/job/", last))
        assert (await anext(batches)).reopened and (await anext(batches)).revision == last


async def test_a_token_that_etcd_forgot_is_replaced_without_anybody_noticing() -> None:
    async with (
        etcd_with_users("/job/", "--auth-token-ttl", "1") as etcd,
        await EtcdCoordinator.connect(etcd.endpoint, username="worker", password="word") as node,
    ):
        lease = await node.lease(3.0, stall_limit_s=60.0)
        for number in range(2):
            await asyncio.sleep(2.5)
            start = (await node.txn(put("/job/a", bytes([number]), lease.id))).revision
            async with following(node, "/job/", start) as follower:
                await follower.until(start)
        assert not lease.lost() and lease.valid_until() > node.now() + 1.0
        await lease.close(revoke=True)


async def test_all_get_in_where_many_log_in_at_once_and_again_where_authentication_was_turned_off_and_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each login costs etcd a hash, given up or not: all gave up together, began again together, and none got in."""
    monkeypatch.setattr(coordinator, "_FIRST_CONTACT_S", 0.3)  # a hash takes 0.15 s of a processor
    async with etcd_with_users("/job/", "--bcrypt-cost", "11") as etcd, contextlib.AsyncExitStack() as stack:

        async def client(number: int) -> tuple[EtcdCoordinator, EtcdLease]:
            node = await again(lambda: EtcdCoordinator.connect(etcd.endpoint, username="worker", password="word"))
            stack.push_async_callback(node.close)
            lease = await node.lease(5.0, stall_limit_s=60.0)
            await node.txn(put(f"/job/{number}", b"", lease.id))
            return node, lease

        async def again(call: Callable[[], Awaitable[Any]]) -> Any:
            while True:
                with contextlib.suppress(Unavailable):
                    return await call()

        async with asyncio.timeout(60):
            clients = await asyncio.gather(*map(client, range(6)))
            await asyncio.to_thread(etcdctl, etcd, "--user", "root:secret", "auth", "disable")
            for node, _ in clients:
                with contextlib.suppress(AccessRefused):  # some versions take no token, and give none
                    await node.get("/job/0")
            await asyncio.to_thread(etcdctl, etcd, "auth", "enable")
            await asyncio.gather(*(again(partial(node.get, "/job/0")) for node, _ in clients))
            now = time.monotonic()
            for _, lease in clients:
                await becomes(lambda lease=lease: lease.valid_until() > now + 5.0)
        assert not any(lease.lost() or lease.trouble() for _, lease in clients)


async def test_credentials_are_made_of_the_files(certificates: Certificates) -> None:
    from taskgraph.coordination.etcd import EtcdOptions

    options = EtcdOptions.make("a:1", ca=certificates.ca, cert=certificates.client, key=certificates.client_key)
    assert isinstance(options.channel_credentials(), grpc.ChannelCredentials)


def _no_mounts() -> str:
    """Why a process cannot be given an /etc/hosts of its own here; "" where it can."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "another /etc/hosts needs root, and `unshare`"
    tried = subprocess.run(["unshare", "-m", "mount", "--bind", "/etc/hosts", "/etc/hosts"], capture_output=True)
    return f"nothing can be mounted here: {tried.stderr.decode().strip()}" if tried.returncode else ""


@pytest.mark.skipif(bool(_no_mounts()), reason=_no_mounts())
async def test_a_name_that_the_host_knows_needs_no_name_server(tmp_path: Path) -> None:
    """One that does not answer, as of a network that is away: what resolves names otherwise waits for it in vain."""
    hosts, resolver = tmp_path / "hosts", tmp_path / "resolv.conf"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        address = f"127.53.{os.getpid() >> 8 & 255}.{os.getpid() & 255 or 1}"
        silent.bind((address, 53))
        hosts.write_text("127.0.0.1 localhost known-here\n")
        resolver.write_text(f"nameserver {address}\n")
        async with EmbeddedEtcd() as etcd:
            port = etcd.endpoint.rpartition(":")[2]
            mounts = f"mount --bind {hosts} /etc/hosts && mount --bind {resolver} /etc/resolv.conf"
            asked = f"{sys.executable} -m taskgraph status nobodys --etcd known-here:{port}"
            process = await asyncio.create_subprocess_exec(
                *("unshare", "-m", "sh", "-ec", f"{mounts} && exec {asked}"),
                stderr=asyncio.subprocess.PIPE,
                env={name: value for name, value in os.environ.items() if name != "GRPC_DNS_RESOLVER"},
            )
            _, said = await process.communicate()
    assert f"no job 'nobodys' was submitted at known-here:{port}" in said.decode()
