"""The control service over TLS: both sides verify, and names are checked."""

from __future__ import annotations

import asyncio
import datetime
import logging
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from test_control import STATUS, TOKEN, Service, serving

from taskgraph.clusters.credentials import job_certificates
from taskgraph.commands.certifying import make_certs
from taskgraph.errors import PeerLost, TaskGraphError, TransportError
from taskgraph.network.tls import CA, CERT, KEY, Tls
from taskgraph.node.control import ControlServer
from taskgraph.observe.control_client import ControlClient, credential
from taskgraph.observe.events import EventLog


def files(folder: Path) -> Tls:
    return Tls(folder / CA, folder / CERT, folder / KEY)


def issued(folder: Path, authority: str, leaf: str, ended: str = "") -> Tls:
    """Makes files with keys of these kinds; one of them ("ca", "leaf") may have ended."""
    now = datetime.datetime.now(datetime.UTC)
    names = {kind: x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, kind)]) for kind in ("ca", "leaf")}
    ca_key, key = KEYS[authority](), KEYS[leaf]()
    digest = None if authority.startswith("Ed") else hashes.SHA256()
    made = []
    for kind, own in (("ca", ca_key), ("leaf", key)):
        built = (
            x509.CertificateBuilder()
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(hours=-1 if kind == ended else 24))
            .subject_name(names[kind])
            .issuer_name(names["ca"])
            .public_key(own.public_key())
            .add_extension(x509.BasicConstraints(ca=kind == "ca", path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        )
        made.append(built.sign(ca_key, digest).public_bytes(serialization.Encoding.PEM))
    folder.mkdir()
    (folder / CA).write_bytes(made[0])
    (folder / CERT).write_bytes(made[1])
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / KEY).write_bytes(key.private_bytes(serialization.Encoding.PEM, *plain))
    return files(folder)


KEYS: dict[str, Callable[[], Any]] = {
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
    "P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
    "Ed448": ed448.Ed448PrivateKey.generate,
}


@pytest.fixture
def ours(tmp_path: Path) -> Tls:
    make_certs(tmp_path / "ours", force=False)
    return files(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Tls:
    """Files of another authority; they trust ours."""
    make_certs(tmp_path / "theirs", force=False)
    shutil.copy(tmp_path / "ours" / CA, tmp_path / "theirs" / CA)
    return files(tmp_path / "theirs")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_certificate_and_token(ours: Tls, host: str) -> None:
    async with serving(tcp_host=host, tls=ours) as service, service.client(tls=ours) as client:
        assert await client.status() == STATUS


async def test_socket_needs_no_certificate(ours: Tls, tmp_path: Path) -> None:
    async with serving(tmp_path / "c", tls=ours) as service, service.client(tls=ours) as client:
        assert await client.status() == STATUS


async def test_certificate_without_token(ours: Tls, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tcp_host="127.0.0.1", tls=ours) as service, service.client(bytes(32), ours) as client:
        for _ in range(5):
            with pytest.raises(TaskGraphError, match="token is missing or wrong"):
                await client.status()
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(said) == 1 and "a call with a wrong token" in said[0]
    assert bytes(32).hex() not in said[0] and credential(bytes(32)) not in said[0]


async def test_token_without_certificate(ours: Tls, theirs: Tls) -> None:
    async with serving(tcp_host="127.0.0.1", tls=ours) as service:
        async with service.client(tls=theirs) as client:
            with pytest.raises(PeerLost, match="signed by the same --tls authority"):
                await client.status()
        async with service.client() as client:
            with pytest.raises(PeerLost, match="give --tls"):
                await client.status()
            with pytest.raises(PeerLost, match="give --tls"):  # a kill that did not arrive is none
                await client.kill(signal.SIGKILL)


async def test_impostor_gets_no_call(ours: Tls, tmp_path: Path) -> None:
    """So it gets no token either."""
    make_certs(tmp_path / "alien", force=False)
    alien = files(tmp_path / "alien")
    async with serving(tcp_host="127.0.0.1", tls=alien) as service, service.client(tls=ours) as client:
        with pytest.raises(PeerLost):
            await client.status()


async def test_certificate_must_name_the_host(ours: Tls) -> None:
    server = ControlServer(EventLog("n1"), TOKEN)
    with pytest.raises(TransportError, match=r"cert\.pem cannot be used.*others reach this node as 'far\.example'"):
        await server.start(tcp_host="127.0.0.1", advertise="far.example", tls=ours)
    with pytest.raises(TransportError, match="without TLS"):
        await server.start(tcp_host="0.0.0.0", advertise="far.example")


async def test_fixed_name_takes_the_place_of_the_host(tmp_path: Path) -> None:
    for name, content in job_certificates("fit").items():
        (tmp_path / name).write_bytes(content)
    fixed, other, plain = (Tls(tmp_path / CA, tmp_path / CERT, tmp_path / KEY, name) for name in ("fit", "other", ""))
    async with serving(tcp_host="127.0.0.1", tls=fixed) as service:
        async with service.client(tls=fixed) as client:
            assert await client.status() == STATUS
        for tls, says in ((other, "does not have the name 'other'"), (plain, "does not name that host")):
            async with service.client(tls=tls) as client:
                with pytest.raises(PeerLost, match=says):
                    await client.status()


@pytest.mark.parametrize(("ended", "file"), [("ca", CA), ("leaf", CERT)])
def test_ended_authority_is_named(ended: str, file: str, tmp_path: Path) -> None:
    tls = issued(tmp_path / "files", "P-256", "P-256", ended)
    with pytest.raises(TransportError, match=rf"/{file} cannot be used: certificate has expired"):
        tls.check("localhost")


async def test_silent_strangers(ours: Tls) -> None:
    async with serving(tcp_host="127.0.0.1", tls=ours) as service:
        host, port = service.control.removeprefix("tcp:").rsplit(":", 1)
        silent = [socket.create_connection((host, int(port))) for _ in range(50)]
        try:
            for sock in silent[::2]:
                sock.sendall(b"\x00\xff not TLS at all" * 10)
            async with asyncio.timeout(30), service.client(tls=ours) as client:
                assert await client.status() == STATUS
        finally:
            for sock in silent:
                sock.close()


async def test_token_does_not_travel() -> None:
    assert TOKEN.hex() not in credential(TOKEN) and len(credential(TOKEN)) == 64
    async with ControlClient("127.0.0.1:1", TOKEN) as client:
        assert TOKEN.hex() not in repr(vars(client))


def shown(service: Service, tls: Tls) -> bytes:
    """Returns the certificate of a new connection."""
    host, port = service.control.removeprefix("tcp:").rsplit(":", 1)
    context = tls.context(server=False)
    with (
        socket.create_connection((host, int(port)), timeout=5) as sock,
        context.wrap_socket(sock, server_hostname=host) as encrypted,
    ):
        found = encrypted.getpeercert(binary_form=True)
        assert found is not None
        return found


def renewed(folder: Path) -> Tls:
    """Makes newer files of the same authority."""
    new = folder.with_name("new")
    make_certs(new, authority=folder, force=True)
    return files(new)


def in_file(tls: Tls) -> bytes:
    return x509.load_pem_x509_certificate(tls.cert.read_bytes()).public_bytes(serialization.Encoding.DER)


async def test_renewed_files_are_used(ours: Tls) -> None:
    """A job outlives its certificates."""
    folder, loop = ours.ca.parent, asyncio.get_running_loop()
    async with serving(tcp_host="127.0.0.1", tls=ours) as service, service.client(tls=ours) as before:
        assert await before.status() == STATUS
        first = in_file(ours)
        assert await loop.run_in_executor(None, shown, service, ours) == first
        for _ in range(2):
            new = renewed(folder)
            new.cert.replace(ours.cert)  # and the key does not fit yet
            assert await loop.run_in_executor(None, shown, service, ours) == first
            async with service.client(tls=ours) as client:
                assert await client.status() == STATUS
            new.key.replace(ours.key)
            first = in_file(ours)
            assert await loop.run_in_executor(None, shown, service, ours) == first
            async with service.client(tls=ours) as client:
                assert await client.status() == STATUS
        assert await before.status() == STATUS  # whose connection stands


async def test_former_authority_is_refused(ours: Tls, tmp_path: Path) -> None:
    shutil.copytree(ours.ca.parent, tmp_path / "former")
    former = files(tmp_path / "former")
    make_certs(tmp_path / "next", force=False)
    async with serving(tcp_host="127.0.0.1", tls=ours) as service:
        async with service.client(tls=former) as client:
            assert await client.status() == STATUS
        for name in (KEY, CERT, CA):
            (tmp_path / "next" / name).replace(ours.ca.with_name(name))
        async with service.client(tls=former) as client:
            with pytest.raises(PeerLost, match="signed by the same --tls authority"):
                await client.status()
        async with service.client(tls=ours) as client:
            assert await client.status() == STATUS


async def test_ended_certificate_is_named(ours: Tls, tmp_path: Path) -> None:
    now, former = datetime.datetime.now(datetime.UTC), trustme.CA()
    ended = former.issue_cert(
        "127.0.0.1", not_before=now - datetime.timedelta(2), not_after=now - datetime.timedelta(1)
    )
    valid = former.issue_cert("127.0.0.1")
    async with serving(tcp_host="127.0.0.1", tls=ours) as service:
        former.cert_pem.write_to_path(str(ours.ca))
        renew = "the certificate of that node has ended: write a renewed one, and its key, to its files"
        if tuple(map(int, grpc.__version__.split(".")[:2])) < (1, 69):  # it did not say why it refused
            renew = "neither has ended"
        for said, given, mine in ((renew, ended, valid), ("neither has ended", valid, ended)):
            clients = Tls(ours.ca, tmp_path / "cert", tmp_path / "key")
            for issued, tls in ((given, ours), (mine, clients)):
                issued.private_key_pem.write_to_path(str(tls.key))
                issued.cert_chain_pems[0].write_to_path(str(tls.cert))
            async with service.client(tls=clients) as client:
                with pytest.raises(PeerLost, match=said):
                    await client.status()
