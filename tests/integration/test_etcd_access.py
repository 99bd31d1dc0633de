"""Getting in: TLS with client certificates, users and passwords, tokens that etcd forgets."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from etcd_kit import Certificates, etcd_with_tls, etcd_with_users, following, make_certificates
from processes_kit import becomes

from taskgraph.coordination.etcd import EtcdCoordinator
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
            lease = await node.lease(6.0, stall_limit_s=60.0)
            granted_until = lease.valid_until()
            start = (await node.txn(put("/a", b"", lease.id))).revision
            async with following(node, "/", start) as follower:
                await follower.until(start)
            await becomes(lambda: lease.valid_until() > granted_until)
            assert await node.lease_left(lease.id) in range(1, 6)
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
        node = await EtcdCoordinator.connect(endpoint, timeout_s=60.0, **arguments)
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
async def test_user_gets_only_granted_keys() -> None:
    async with etcd_with_users("/job/") as etcd:
        async with await EtcdCoordinator.connect(etcd.endpoint, username="root", password="secret") as root:
            await root.txn(put("/other/a"))
        with pytest.raises(CoordinationError, match="invalid user ID or password"):
            await EtcdCoordinator.connect(etcd.endpoint, username="root", password="wrong")
        with pytest.raises(CoordinationError, match="user name is empty"):
            await EtcdCoordinator.connect(etcd.endpoint)
        async with await EtcdCoordinator.connect(etcd.endpoint, username="worker", password="word") as node:
            lease = await node.lease(6.0, stall_limit_s=60.0)
            granted_until = lease.valid_until()
            start = (await node.txn(put("/job/a", b"", lease.id))).revision
            async with following(node, "/job/", start) as follower:
                await follower.until(start)
            await becomes(lambda: lease.valid_until() > granted_until)
            assert await node.lease_left(lease.id) in range(1, 6)
            with pytest.raises(CoordinationError, match="permission denied"):
                await node.get("/other/a")
            with pytest.raises(CoordinationError, match="permission denied"):
                await anext(aiter(node.watch("/other/", start)))
            await lease.close(revoke=True)
            assert await node.get("/job/a") is None
