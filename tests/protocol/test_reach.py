"""Which nodes cannot speak with each other, and what each is told to do."""

from __future__ import annotations

import msgspec
import pytest
from protocol_kit import node_record

from taskgraph.protocol.reach import can_use_unix_socket, describe_unreached, refusal_reason
from taskgraph.protocol.records import NodeRecord


def at(host: str, *endpoints: str, token: str = "t") -> NodeRecord:
    return msgspec.structs.replace(node_record(f"on-{host}"), host=host, endpoints=endpoints, token_mark=token)


HERE, HERE_TOO, LISTENS_HERE = at("a", "unix:A:/x"), at("a", "unix:A:/y"), at("a", "unix:A:/x", "tcp:a:1")
THERE, LISTENS_THERE = at("b", "unix:B:/x"), at("b", "unix:B:/x", "tcp:b:1")


@pytest.mark.parametrize(
    ("ours", "other"),
    [
        (HERE, HERE_TOO),
        (HERE, LISTENS_HERE),
        (LISTENS_HERE, LISTENS_THERE),
        (node_record("n1"), node_record("n2")),  # in one process
        (at("a", "tcp:a:1"), HERE),  # nobody knows that this is another host
        (at("a", "unix:A:/x", token=""), at("a", "unix:A:/y", token="u")),
    ],
)
def test_reachable_nodes_may_join(ours: NodeRecord, other: NodeRecord) -> None:
    assert refusal_reason(ours, other) == refusal_reason(other, ours) == ""


@pytest.mark.parametrize("first", [THERE, LISTENS_THERE])
def test_unreachable_node_is_refused(first: NodeRecord) -> None:
    why = refusal_reason(HERE, first)
    assert why.startswith("on-a on a cannot be reached by on-b on b: ")
    assert "Start it with --listen HOST, a name or address of this host" in why


def test_refusal_names_the_unreachable_node() -> None:
    why = refusal_reason(LISTENS_HERE, THERE)
    assert why.startswith("on-b on b cannot be reached by on-a on a: ")
    assert "Start that one again with --listen HOST, or all nodes on its host" in why


def test_two_users_need_tcp() -> None:
    """Both registered, and never met."""
    one, other = at("a", "unix:A.1:/x"), at("a", "unix:A.2:/y")
    loopback = at("a", "unix:A.2:/y", "tcp:127.0.0.1:1")
    why = refusal_reason(one, other)
    assert why.startswith("on-a on a cannot be reached by on-a on a, which is another user's: it listens at a unix ")
    assert "Start it with --listen HOST, or all nodes of this host as one user" in why
    assert "another user's" in refusal_reason(loopback, one) and "Start that one again" in refusal_reason(loopback, one)
    assert refusal_reason(loopback, at("a", "unix:A.1:/x", "tcp:127.0.0.1:2")) == "", "they dial each other"
    assert refusal_reason(one, at("a", "unix:A.1:/z")) == ""


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "[::1]"])
def test_loopback_only_node_is_refused(address: str) -> None:
    """Debian's installer writes `127.0.1.1 HOST` into a host's own /etc/hosts: `--listen HOST` is loopback there."""
    ours = at("a", "unix:A:/x", f"tcp:{address}:1")
    assert refusal_reason(ours, HERE_TOO) == ""
    why = refusal_reason(ours, LISTENS_THERE)
    assert why.startswith(f"on-a on a cannot be reached by on-b on b: it listens at {address.strip('[]')}, ")
    assert "Start it with --listen HOST, a name or address of this host" in why
    assert "Start that one again with --listen HOST" in refusal_reason(LISTENS_THERE, ours)
    assert refusal_reason(ours, LISTENS_HERE) == ""  # of the same host


def test_different_tokens_are_refused() -> None:
    why = refusal_reason(HERE, at("a", "unix:A:/y", token="other"))
    assert why.startswith("on-a on a has another token than on-a on a") and "--token-file" in why


def test_nodes_of_a_host_share_unix_sockets() -> None:
    assert can_use_unix_socket(HERE, LISTENS_HERE) and can_use_unix_socket(LISTENS_HERE, HERE_TOO)
    assert not can_use_unix_socket(LISTENS_HERE, LISTENS_THERE)
    assert not can_use_unix_socket(at("a", "tcp:a:1"), LISTENS_HERE)
    assert not can_use_unix_socket(at("a", "unix:A.1:/x"), at("a", "unix:A.2:/x"))


def test_unreached_node_is_explained() -> None:
    why = describe_unreached(HERE, LISTENS_THERE, "no connection within 5 s", connected=False)
    assert why.startswith("on-a on a cannot reach on-b on b at tcp:b:1 (no connection within 5 s). ")
    assert "to that port pass the firewall of b" in why and "--listen HOST" in why


def test_connected_node_needs_no_advice() -> None:
    """Of another authority's certificate it was said, besides, to look at the firewall."""
    error = "certificate verify failed: give all hosts certificates of one authority"
    why = describe_unreached(HERE, LISTENS_THERE, error, connected=True)
    assert why.startswith(f"on-a on a cannot reach on-b on b at tcp:b:1 ({error}). That port takes connections")
    assert "its lease ends" in why and "firewall" not in why and "--" not in why
