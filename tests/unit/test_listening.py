"""Where a node listens for others: the ports it may take, and the address it advertises."""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from taskgraph.cli import main
from taskgraph.commands.arguments import add_access_options, add_listen_options
from taskgraph.commands.common import listening_of
from taskgraph.errors import JobError, TransportError
from taskgraph.network.listening import ANY_PORT, NOWHERE, Listening
from taskgraph.node.config import NodeConfig
from taskgraph.node.control import ControlServer
from taskgraph.observe.events import EventLog
from taskgraph.transport import endpoints

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("LISTEN", "PORTS", "ADVERTISE", "INSECURE_LISTEN", "TLS"):
        monkeypatch.delenv(f"TASKGRAPH_{name}", raising=False)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_access_options(parser)
    add_listen_options(parser, "")
    return parser.parse_args(words)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that is taken, whose neighbor is free."""
    while True:
        with socket.create_server((HOST, 0)) as listener:
            port = listener.getsockname()[1]
            if port < 65535 and endpoints.is_port_free(HOST, port + 1):
                yield port
                return


def test_port_in_time_wait_is_free() -> None:
    """A node that replaces one that just ended has the same --ports."""
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection((HOST, port)) as there:
            listener.accept()[0].close()
            assert there.recv(1) == b""  # who ended it first waits for what may come late
    assert endpoints.is_port_free(HOST, port)


@pytest.mark.parametrize(
    "ports", ["7000", "7000-", "-7000", "7001-7000", "0-9", "65535-65536", "a-b", "7000-7002x", "\u0663-\u0669"]
)
def test_bad_ports_are_refused(ports: str) -> None:
    with pytest.raises(JobError, match=f"--ports {ports}: must read FIRST-LAST, two ports between 1 and 65535"):
        Listening(host=HOST, ports=ports)


def test_too_few_ports_are_refused() -> None:
    with pytest.raises(JobError, match="--ports 7000-7000 are 1: a node takes 2"):
        Listening(host=HOST, ports="7000-7000")
    listening = Listening(host=HOST, ports="7000-7006")
    listening.check(3)
    with pytest.raises(JobError, match="--ports 7000-7006 are 7: 4 nodes on this host take 8"):
        listening.check(4)
    with pytest.raises(JobError, match="4 nodes on this host take 8"):
        listening_of(options("--listen", HOST, "--ports", "7000-7006"), 4)
    NOWHERE.check(1000)


def test_ports_are_tried_from_a_random_one() -> None:
    tried = {tuple(Listening(host=HOST, ports="7000-7002").ports_to_try()) for _ in range(200)}
    assert tried == {(7000, 7001, 7002), (7001, 7002, 7000), (7002, 7000, 7001)}
    assert Listening(host=HOST).ports_to_try() == ANY_PORT


@pytest.mark.parametrize("given", [{"ports": "7000-7009"}, {"advertise": "host1"}])
def test_ports_need_a_host(given: dict[str, str]) -> None:
    with pytest.raises(JobError, match=r"is about where other hosts reach a node: give --listen HOST, too"):
        Listening(**given)


@pytest.mark.parametrize("host", ["[::1]", "127.0.0.1:5000", "localhost:0"])
def test_host_has_no_port(host: str) -> None:
    """Else the error would be that the name is unknown."""
    with pytest.raises(JobError, match="must be a name or an address of this host, no port, and no brackets"):
        Listening(host=host)
    for usable in ("::1", "::", "fe80::1%eth0", HOST, "localhost", ""):
        Listening(host=usable)


def test_advertised_address() -> None:
    assert Listening(host="0.0.0.0").advertised == Listening(host="::").advertised == socket.gethostname()
    assert Listening(host=HOST).advertised == "", "the address itself"
    assert Listening(host="0.0.0.0", advertise="host1").advertised == "host1"
    assert Listening(host="::", advertise="2001:db8::7").advertised == "2001:db8::7"
    for not_told in ("0.0.0.0", "::", "host1:7000", "[2001:db8::7]"):
        with pytest.raises(JobError, match="must be a name or an address that others can dial, no port"):
            Listening(host="0.0.0.0", advertise=not_told)


def test_config_of_a_node_process() -> None:
    import dataclasses
    import json

    config = NodeConfig(
        job="fit", name="n1", etcd="a:1", token="ab", listening=Listening(host=HOST, ports="1-9", advertise="b")
    )
    assert NodeConfig.of(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_from_options_environment_and_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert listening_of(options(), 4) == NOWHERE
    (tmp_path / "taskgraph.toml").write_text('ports = "7000-7099"\n')
    assert listening_of(options(), 4) == NOWHERE, "they are for nodes that listen"
    assert listening_of(options("--listen", HOST), 4) == Listening(host=HOST, ports="7000-7099")
    monkeypatch.setenv("TASKGRAPH_LISTEN", HOST)
    monkeypatch.setenv("TASKGRAPH_ADVERTISE", "host1")
    assert listening_of(options(), 4) == Listening(host=HOST, ports="7000-7099", advertise="host1")
    found = listening_of(options("--ports", "8000-8099", "--advertise", "host2"), 4)
    assert found == Listening(host=HOST, ports="8000-8099", advertise="host2")


def test_taken_port_is_skipped(taken: int) -> None:
    assert not endpoints.is_port_free(HOST, taken)
    with endpoints.listen_tcp(HOST, (taken, taken + 1)) as listener:
        assert listener.getsockname() == (HOST, taken + 1)
    with pytest.raises(TransportError, match=f"ports {taken}-{taken} are all taken.*give it a wider range of --ports"):
        endpoints.listen_tcp(HOST, (taken,))


def test_bad_address_is_tried_once() -> None:
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.1 port 7000: .*assign requested address"):
        endpoints.listen_tcp("192.0.2.1", (7000, 7001))


async def test_control_service_skips_a_taken_port(taken: int, capfd: pytest.CaptureFixture[str]) -> None:
    server = ControlServer(EventLog("n1"), bytes(32))
    try:
        found = await server.start(tcp_host=HOST, tcp_ports=(taken, taken + 1), advertise="localhost")
        assert found == f"tcp:localhost:{taken + 1}"
        async with grpc.aio.insecure_channel(f"{HOST}:{taken + 1}") as channel:
            async with asyncio.timeout(30):
                await channel.channel_ready()
        other = ControlServer(EventLog("n2"), bytes(32))
        with pytest.raises(TransportError, match=f"its ports {taken}-{taken + 1} are all taken"):
            await other.start(tcp_host=HOST, tcp_ports=(taken, taken + 1))
        await other.stop()
    finally:
        await server.stop()
    assert "bind" not in capfd.readouterr().err, "gRPC logs what it cannot bind to"


def test_command_names_the_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("ab" * 32)
    command = ["node", "--job", "j", "--etcd", "h:1", "--token-file", "token"]
    assert main([*command, "--ports", "7000-7009"]) == 2
    assert "give --listen HOST, too" in capsys.readouterr().err
    assert main([*command, "--listen", HOST, "--ports", "7000"]) == 2
    assert "must read FIRST-LAST" in capsys.readouterr().err
