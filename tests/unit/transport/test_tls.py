"""TLS between nodes: whose certificate is not our authority's is refused, and nobody stands in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from transport_kit import JOB, TOKEN, Cluster, certified, cluster_of, encoded, item, pull, verify

from taskgraph.errors import PeerLost, TransportError
from taskgraph.network import tls as module
from taskgraph.network.tls import CERT, KEY, Tls, check_listener
from taskgraph.protocol import messages as m
from taskgraph.settings import Settings
from taskgraph.transport import accepting, endpoints
from taskgraph.transport.api import Peer
from taskgraph.transport.stream import StreamTransport

SEAL = m.Seal(m.Stamp(1, 1), 1, 1)


@pytest.fixture
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    async with cluster_of("tls", folder) as cluster:
        yield cluster


def port_of(peer: Peer) -> int:
    return int(peer.endpoints[0].rpartition(":")[2])


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


async def test_tls_hides_values(cluster: Cluster) -> None:
    """A proxy sees neither the name of the job nor a value."""
    a, b = await cluster.node(), await cluster.node()
    tapped = bytearray()

    async def tap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to = await asyncio.open_connection("127.0.0.1", port_of(b.peer))

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                tapped.extend(data)
                sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, to), pump(there, writer))

    async def answer(caller: str, call: m.Call) -> m.Reply:
        assert isinstance(call, m.Pull)
        return item(call, encoded(b"", b"a secret of mine" * 10_000))

    b.handler = answer
    async with await asyncio.start_server(tap, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        reply = await a.call(Peer(b.name, (endpoints.tcp_endpoint("127.0.0.1", port),)), pull())
        assert isinstance(reply, m.Item) and reply.value.size_bytes == 160_000
        await a.transport.close()
    assert len(tapped) > 160_000
    assert b"secret" not in tapped and b"node-" not in tapped and TOKEN not in tapped


@pytest.mark.parametrize("side", ["dialler", "listener"])
async def test_certificate_of_another_authority_is_refused(
    cluster: Cluster, folder: Path, side: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also with the right token."""
    impostor = certified(folder / "tls" / "impostor", by="theirs", trusting="ours")
    good, bad = await cluster.node(), await cluster.node(tls=impostor)
    one, other = (bad, good) if side == "dialler" else (good, bad)
    for _ in range(3):
        with pytest.raises(PeerLost, match=r"may not accept our certificate|certificate verify failed"):
            await one.call(other, SEAL)
    assert good.served == bad.served == []
    if side == "dialler":
        assert len([text for text in warnings_of(caplog) if "certificate verify failed" in text]) == 1


@pytest.mark.parametrize("side", ["dialler", "listener"])
@pytest.mark.parametrize(
    ("given", "todo"),
    [
        ({"by": "theirs"}, "give all hosts certificates of one authority, and the same ca.pem"),
        ({"valid_in_days": -7}, "look at this host's clock, and at the other's certificate"),
        ({"valid_in_days": 7}, "look at this host's clock, and at the other's certificate"),
    ],
    ids=["another-authority", "expired", "not-yet-valid"],
)
async def test_certificate_refusal_says_what_to_do(
    cluster: Cluster, folder: Path, side: str, given: dict[str, Any], todo: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = certified(folder / "tls" / "bad", **given)
    good, other = await cluster.node(), await cluster.node(tls=bad)
    one, two = (other, good) if side == "dialler" else (good, other)
    with pytest.raises(PeerLost) as caught:
        await one.call(two, SEAL)
    # The one that refuses: by its log where it was dialled.
    assert todo in (str(caught.value) if side == "listener" else "\n".join(warnings_of(caplog)))


def deaf(stack: contextlib.ExitStack) -> int:
    """A port whose listener accepts no connections, with a full backlog."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    while True:
        waiting = stack.enter_context(socket.socket())
        waiting.settimeout(0.1)
        try:
            waiting.connect(listener.getsockname())
        except TimeoutError:
            return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("silent", "says"),
    [
        ("at TLS", "connected, but the TLS handshake did not end within {} s: the network drops large"),
        ("in TLS", "connected with TLS, but no hello came within {} s: the network drops large packets"),
        ("without TLS", "connected, but no hello came within {} s: another program listens there"),
        ("at all", "no connection within {} s"),
    ],
)
@pytest.mark.parametrize("probe", [False, True])
async def test_timeout_names_the_missing_step(cluster: Cluster, silent: str, says: str, probe: bool) -> None:
    """Where the network drops what is large, the handshake alone does not come through: it was said that nobody had
    answered at all."""
    assert cluster.tls is not None
    if silent == "without TLS":
        cluster.tls = None
    context = cluster.tls.context(server=True) if cluster.tls and silent == "in TLS" else None
    with contextlib.ExitStack() as stack:
        if silent == "at all":
            port = deaf(stack)
        else:
            server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=context)
            stack.callback(server.close)
            port = server.sockets[0].getsockname()[1]
        peer = Peer("n2", (endpoints.tcp_endpoint("127.0.0.1", port),))
        for limit_s in (0.2, 1.0, 5.0):  # how long the steps before take depends on the machine
            node = await cluster.node(settings=Settings(connect_s=limit_s))
            with pytest.raises(PeerLost) as caught:
                if probe:
                    await node.transport.probe(peer, timeout_s=limit_s)
                else:
                    await node.call(peer, SEAL)
            if (said := says.format(f"{limit_s:g}")) in str(caught.value):
                break
    assert said in str(caught.value)
    assert not probe or caught.value.connected == (silent != "at all")


async def test_certificate_refusal_says_connected(cluster: Cluster, folder: Path) -> None:
    impostor = certified(folder / "tls" / "impostor", by="theirs", trusting="ours")
    good, bad = await cluster.node(), await cluster.node(tls=impostor)
    for one, other in ((bad, good), (good, bad)):
        with pytest.raises(PeerLost) as caught:
            await one.transport.probe(other.peer, timeout_s=5.0)
        assert caught.value.connected


async def test_certificate_is_required(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    b = await cluster.node()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(b.peer), ssl=context)
    with contextlib.suppress(OSError):
        assert await reader.read() == b""
    writer.close()
    assert any("did not return a certificate" in text for text in warnings_of(caplog))


async def test_older_tls_is_refused(cluster: Cluster, folder: Path) -> None:
    b = await cluster.node()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(folder / "tls" / CERT, folder / "tls" / KEY)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("127.0.0.1", port_of(b.peer), ssl=context)


@pytest.mark.parametrize("which", ["dialler", "listener"])
async def test_tls_and_plain_do_not_connect(
    cluster: Cluster, folder: Path, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = StreamTransport(Settings(), TOKEN, job=JOB, verify=verify)
    node = await cluster.node()

    async def serve(caller: str, call: m.Call) -> m.Reply:
        return m.Accepted(1)

    await plain.start("plain", serve, lambda lost: None)
    try:
        with pytest.raises(PeerLost) as caught:
            if which == "dialler":
                await plain.call(node.peer, SEAL)
            else:
                await node.call(Peer("plain", plain.endpoints), SEAL)
        hint = "perhaps it speaks TLS only: give --tls"
        if which == "listener":
            hint = "no TLS handshake: its end closed the connection"
        assert hint in str(caught.value)
    finally:
        await plain.close()
    said = "wrong version number" if which == "dialler" else "TLS, which this node does not speak here"
    assert any(said in text for text in warnings_of(caplog))
    assert node.served == []


async def test_proxy_with_a_certificate_is_detected(cluster: Cluster, folder: Path) -> None:
    """It ends TLS on both sides and passes every byte on: proofs are bound to the connection they were made for."""
    a, b = await cluster.node(), await cluster.node()
    middle = certified(folder / "tls" / "middle")
    passed = bytearray()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to = await asyncio.open_connection(
            "127.0.0.1", port_of(b.peer), ssl=middle.context(server=False), server_hostname=""
        )

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(1 << 16):
                    passed.extend(data)
                    sink.write(data)
            except OSError:
                return
            finally:
                sink.close()

        await asyncio.gather(pump(reader, to), pump(there, writer))

    async with await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=middle.context(server=True)) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(PeerLost, match="wrong token"):
            await a.call(Peer(b.name, (endpoints.tcp_endpoint("127.0.0.1", port),)), SEAL)
    assert passed and b.served == []


async def test_silent_tls_connections_are_bounded(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from taskgraph.transport import stream

    monkeypatch.setattr(stream, "MAX_STRANGERS", 8)
    a, b = await cluster.node(), await cluster.node()
    silent = []
    for _ in range(30):
        sock = socket.create_connection(("127.0.0.1", port_of(b.peer)))
        sock.setblocking(False)
        silent.append(sock)
    try:
        assert await a.call(b, SEAL) == m.Accepted(1)
        loop = asyncio.get_running_loop()
        closed = 0
        async with asyncio.timeout(30):
            for sock in silent[:-9]:  # the oldest; the call above was one, too
                with contextlib.suppress(ConnectionError):
                    assert await loop.sock_recv(sock, 1) == b""
                closed += 1
        assert closed == 21
        listener = b.transport._servers[0]  # type: ignore[attr-defined]
        assert isinstance(listener, accepting.TlsListener) and len(listener._handshakes) <= 8
    finally:
        for sock in silent:
            sock.close()
    assert len([text for text in warnings_of(caplog) if "without a TLS handshake" in text]) == 1


async def test_silent_tls_connection_is_closed(cluster: Cluster) -> None:
    b = await cluster.node(settings=Settings(connect_s=0.2))
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(b.peer))
    async with asyncio.timeout(30):
        with contextlib.suppress(OSError):
            assert await reader.read() == b""
    writer.close()


async def test_renewed_tls_files_are_used(cluster: Cluster, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """File by file, as whoever renews them writes them."""
    files = folder / "tls" / "mine"
    tls = certified(files)
    before = tls.context(server=True)
    assert tls.context(server=True) is before
    key = (files / KEY).read_bytes()
    certified(files)
    renewed = (files / KEY).read_bytes()
    (files / KEY).write_bytes(key)  # the certificate is new, its key is not there yet
    assert tls.context(server=True) is before
    assert any("key values mismatch" in text for text in warnings_of(caplog))
    (files / KEY).write_bytes(renewed)
    os.utime(files / KEY, ns=(1, 1))
    assert tls.context(server=True) is not before
    a, b = await cluster.node(tls=tls), await cluster.node()
    assert await a.call(b, SEAL) == m.Accepted(1)


@pytest.mark.parametrize("left", ["one of two", "none"])
def test_unfinished_renewal_is_logged_once(
    folder: Path, left: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tls = certified(folder)
    tls.context(server=True)
    read = []
    load_files = module.load_files
    monkeypatch.setattr(module, "load_files", lambda *given: (read.append(given), load_files(*given)))
    for told in (1, 2):
        if left == "none":
            (folder / KEY).unlink(missing_ok=True)
        certified(folder / "new")
        (folder / "new" / CERT).replace(folder / CERT)
        for _ in range(20):
            tls.context(server=True)
        assert len([text for text in warnings_of(caplog) if "going on with the files of before" in text]) == told
        assert len(read) <= told
    later = time.monotonic() + 60
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: later))
    for _ in range(20):
        tls.context(server=True)
    assert len(warnings_of(caplog)) == 3
    shutil.copy(folder / "new" / KEY, folder / KEY)
    before = len(read)
    tls.context(server=True)
    tls.context(server=True)
    assert len(read) == before + 2


@pytest.mark.parametrize("missing", ["ca.pem", "cert.pem", "key.pem"])
async def test_missing_or_broken_tls_file_is_named(folder: Path, missing: str) -> None:
    tls = certified(folder)
    (folder / missing).write_text("not a PEM")
    with pytest.raises(TransportError, match=missing):
        tls.context(server=True)
    (folder / missing).unlink()
    node = StreamTransport(Settings(), TOKEN, job=JOB, verify=verify, tls=tls)
    with pytest.raises(TransportError, match=rf"{missing} cannot be used: No such file"):
        await node.start("n", lambda caller, call: None, lambda lost: None)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        (CERT, b"", "there is no certificate in it, as PEM"),
        (KEY, b"", "there is no private key in it, as PEM"),
        (CERT, "UTF-16", "there is no certificate in it, as PEM"),
        (KEY, "encrypted", "it is encrypted; `openssl pkey -in .* -out FILE` writes it without a password"),
    ],
)
def test_unusable_tls_file_is_explained(folder: Path, name: str, content: str | bytes, why: str) -> None:
    tls = certified(folder)
    path = folder / name
    if content == "encrypted":
        plain = serialization.load_pem_private_key(path.read_bytes(), None)
        how = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
        content = plain.private_bytes(serialization.Encoding.PEM, *how)
    path.write_bytes(content if isinstance(content, bytes) else path.read_text().encode(content))
    with pytest.raises(TransportError, match=rf"the TLS file {path} cannot be used: {why}"):
        tls.context(server=True)


async def test_certificate_without_the_fixed_name_is_refused(cluster: Cluster, folder: Path) -> None:
    """One authority may have signed certificates of several jobs."""
    sets = {name: certified(folder / "tls" / name, host=f"{name}.example") for name in ("fit", "other")}
    fit, twin, other = [
        await cluster.node(tls=Tls(sets[name].ca, sets[name].cert, sets[name].key, f"{name}.example"))
        for name in ("fit", "fit", "other")
    ]
    await fit.call(twin, SEAL)
    with pytest.raises(PeerLost, match=r"not valid for 'fit\.example'.*and the same --tls-name"):
        await fit.call(other, SEAL)


def test_certificate_must_match_the_host_name(folder: Path) -> None:
    tls = certified(folder, host="node7.example")
    tls.check("node7.example")
    with pytest.raises(TransportError, match=r"others reach this node as '10\.0\.0\.7'"):
        tls.check("10.0.0.7")
    with pytest.raises(TransportError, match="unable to get local issuer"):
        certified(folder, by="theirs").check("127.0.0.1")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", ""])
def test_loopback_needs_no_tls(host: str) -> None:
    check_listener(host, tls=False, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "2001:db8::1", "::ffff:192.0.2.1"])
def test_public_address_needs_tls_or_a_flag(host: str) -> None:
    with pytest.raises(TransportError, match=rf"listen on {host} without TLS.*--tls DIR.*--insecure-listen"):
        check_listener(host, tls=False, insecure=False)
    check_listener(host, tls=True, insecure=False)
    check_listener(host, tls=False, insecure=True)


async def test_transport_refuses_public_address_without_tls(folder: Path) -> None:
    async def serve(caller: str, call: m.Call) -> m.Reply:
        return m.Accepted(1)

    for tls, insecure in ((None, False), (None, True), (certified(folder), False)):
        node = StreamTransport(
            Settings(),
            TOKEN,
            job=JOB,
            verify=verify,
            tcp_host="0.0.0.0",
            advertise="127.0.0.1",
            tls=tls,
            insecure=insecure,
        )
        if tls is None and not insecure:
            with pytest.raises(TransportError, match="without TLS"):
                await node.start("n", serve, lambda lost: None)
        else:
            await node.start("n", serve, lambda lost: None)
            await node.close()


def test_no_files_mean_no_tls() -> None:
    assert Tls.of({}) is None
