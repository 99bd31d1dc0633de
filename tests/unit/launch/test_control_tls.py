"""The control service over TLS: both sides verify, names are checked, and strangers are told apart in the log only."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import socket
from pathlib import Path

import pytest
from test_control import STATUS, TOKEN, serving

from taskgraph.commands.certifying import make_certs
from taskgraph.errors import PeerLost, TaskGraphError, TransportError
from taskgraph.node.control import ControlServer
from taskgraph.observe.control_client import ControlClient, credential
from taskgraph.observe.events import EventLog
from taskgraph.tls import CA, CERT, KEY, Tls


def files(folder: Path) -> Tls:
    return Tls(folder / CA, folder / CERT, folder / KEY)


@pytest.fixture
def ours(tmp_path: Path) -> Tls:
    make_certs(tmp_path / "ours", force=False)
    return files(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Tls:
    """Of another authority; trusts ours."""
    make_certs(tmp_path / "theirs", force=False)
    shutil.copy(tmp_path / "ours" / CA, tmp_path / "theirs" / CA)
    return files(tmp_path / "theirs")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_with_a_certificate_of_the_authority_and_the_token(ours: Tls, host: str) -> None:
    async with serving(tcp_host=host, tls=ours) as service, service.client(tls=ours) as client:
        assert await client.status() == STATUS


async def test_the_socket_needs_none(ours: Tls, tmp_path: Path) -> None:
    async with serving(tmp_path / "c", tls=ours) as service, service.client(tls=ours) as client:
        assert await client.status() == STATUS


async def test_a_certificate_does_not_replace_the_token(ours: Tls, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tcp_host="127.0.0.1", tls=ours) as service, service.client(bytes(32), ours) as client:
        for _ in range(5):
            with pytest.raises(TaskGraphError, match="token is missing or wrong"):
                await client.status()
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(said) == 1 and "a call with a wrong token" in said[0]
    assert bytes(32).hex() not in said[0] and credential(bytes(32)) not in said[0]


async def test_the_token_does_not_replace_a_certificate(ours: Tls, theirs: Tls) -> None:
    async with serving(tcp_host="127.0.0.1", tls=ours) as service:
        async with service.client(tls=theirs) as client:
            with pytest.raises(PeerLost, match="signed by the same --tls authority"):
                await client.status()
        async with service.client() as client:
            with pytest.raises(PeerLost, match="give --tls"):
                await client.status()
            with pytest.raises(PeerLost, match="give --tls"):  # a kill that did not arrive is none
                await client.kill(signal.SIGKILL)


async def test_a_client_does_not_tell_an_impostor(ours: Tls, tmp_path: Path) -> None:
    """Whoever listens there with a certificate of another authority gets no call, and so no credential."""
    make_certs(tmp_path / "alien", force=False)
    alien = files(tmp_path / "alien")
    async with serving(tcp_host="127.0.0.1", tls=alien) as service, service.client(tls=ours) as client:
        with pytest.raises(PeerLost):
            await client.status()


async def test_a_certificate_that_does_not_name_the_host_is_said_by_the_node_that_has_it(ours: Tls) -> None:
    server = ControlServer(EventLog("n1"), TOKEN)
    with pytest.raises(TransportError, match=r"cert\.pem cannot be used.*others reach this node as 'far\.example'"):
        await server.start(tcp_host="127.0.0.1", advertise="far.example", tls=ours)
    with pytest.raises(TransportError, match="without TLS"):
        await server.start(tcp_host="0.0.0.0", advertise="far.example")


async def test_strangers_without_a_word_cost_nothing_else(ours: Tls) -> None:
    async with serving(tcp_host="127.0.0.1", tls=ours) as service:
        host, port = service.control.removeprefix("tcp:").rsplit(":", 1)
        silent = [socket.create_connection((host, int(port))) for _ in range(50)]
        try:
            for sock in silent[::2]:
                sock.sendall(b"\x00\xff not TLS at all" * 10)
            async with asyncio.timeout(5), service.client(tls=ours) as client:
                assert await client.status() == STATUS
        finally:
            for sock in silent:
                sock.close()


async def test_what_travels_for_the_token_is_not_the_token() -> None:
    assert TOKEN.hex() not in credential(TOKEN) and len(credential(TOKEN)) == 64
    async with ControlClient("127.0.0.1:1", TOKEN) as client:
        assert TOKEN.hex() not in repr(vars(client))


async def test_servers_end_while_strangers_are_about(ours: Tls) -> None:
    """They crashed the process with gRPC's credentials that look for renewed files."""
    for _ in range(20):
        async with serving(tcp_host="127.0.0.1", tls=ours) as service:
            host, port = service.control.removeprefix("tcp:").rsplit(":", 1)
            strangers = [socket.create_connection((host, int(port))) for _ in range(20)]
            for sock in strangers[::2]:
                sock.sendall(b"no TLS")
            async with service.client(tls=ours) as client:
                assert await client.status() == STATUS
            for sock in strangers:
                sock.close()
