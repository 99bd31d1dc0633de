"""Parses endpoints of nodes, and decides which nodes can connect.

    unix:HOSTKEY:/path   for processes of the same user with the same file system on the same host
    tcp:host:port        for all processes; an IPv6 address is in brackets

Two nodes of a job must reach each other and have the same token. A joining node that cannot connect to a registered
node is refused, so that other nodes do not wait for it.
"""

from __future__ import annotations

import ipaddress

from taskgraph.protocol.records import NodeRecord

__all__ = ["can_use_unix_socket", "describe_unreached", "host_of", "refusal_reason", "tcp_address", "unix_socket"]


def unix_socket(endpoint: str) -> tuple[str, str]:
    """Splits the endpoint of a unix socket into HOSTKEY and path. Both are "" for other endpoints."""
    kind, _, rest = endpoint.partition(":")
    key, _, path = rest.partition(":")
    return (key, path) if kind == "unix" else ("", "")


def tcp_address(endpoint: str) -> tuple[str, str]:
    """Splits a TCP endpoint into host and port. Both are "" for other endpoints."""
    kind, _, rest = endpoint.partition(":")
    host, _, port = rest.rpartition(":")
    return (host.removeprefix("[").removesuffix("]"), port) if kind == "tcp" else ("", "")


def host_of(key: str) -> str:
    """Returns the part of a HOSTKEY that is the same for all users of the host."""
    return key.partition(".")[0]


def can_use_unix_socket(one: NodeRecord, other: NodeRecord) -> bool:
    """True if the nodes reach each other by unix sockets: they are of one user on one host."""
    return not set(_unix_keys(one)).isdisjoint(_unix_keys(other))


def describe_unreached(ours: NodeRecord, other: NodeRecord, error: str, *, connected: bool) -> str:
    """Describes a registered node on another host that did not answer, and what to do.

    Args:
        error: the error of the call to it.
        connected: its port accepts connections from here, so only the answer is missing.
    """
    where = " and ".join(endpoint for endpoint in other.endpoints if not endpoint.startswith("unix:"))
    what = f"{ours.name} on {ours.host} cannot reach {other.name} on {other.host} at {where} ({error}). "
    gone = "here that one is gone this is over once its lease ends"
    if connected:
        return f"{what}That port takes connections from here; w{gone}"
    return (
        f"{what}W{gone}; else let this host's connections to that port pass the firewall of {other.host} (a node takes "
        f"any free port; with --ports, one of those), or start {other.name} with --listen HOST or --advertise NAME, a "
        f"name or address that this host can reach"
    )


def refusal_reason(ours: NodeRecord, other: NodeRecord) -> str:
    """Returns why node `ours` cannot work with the registered node `other`, and what to do; "" if it can."""
    us, them = f"{ours.name} on {ours.host}", f"{other.name} on {other.host}"
    if ours.token_mark and other.token_mark and ours.token_mark != other.token_mark:
        return (
            f"{us} has another token than {them}, so that neither talks to the other: give all nodes the file that "
            f"`taskgraph submit` wrote (--token-file)"
        )
    if _out_of_reach(ours, other):
        if _on_same_host(ours, other):
            return (
                f"{us} cannot be reached by {them}, which is another user's: it listens at a unix socket alone, which "
                f"is for its own user. Start it with --listen HOST, or all nodes of this host as one user"
            )
        return (
            f"{us} cannot be reached by {them}: it listens at {_address_of(ours)}, which is for its own host. Start it "
            f"with --listen HOST, a name or address of this host that the others know"
        )
    if _out_of_reach(other, ours):
        if _on_same_host(ours, other):
            return (
                f"{them} cannot be reached by {us}, which is another user's: it listens at a unix socket alone, which "
                f"is for its own user. Start that one again with --listen HOST, or all nodes of this host as one user"
            )
        return (
            f"{them} cannot be reached by {us}: it listens at {_address_of(other)}, which is for its own host. Start "
            f"that one again with --listen HOST, or all nodes on its host"
        )
    return ""


def _out_of_reach(node: NodeRecord, other: NodeRecord) -> bool:
    """True if `other` certainly cannot connect to `node`. False if that is not known."""
    keys, theirs = _unix_keys(node), _unix_keys(other)
    if not keys or not theirs or can_use_unix_socket(node, other):
        return False
    loopbacks = [] if _on_same_host(node, other) else _loopback_addresses(node)
    return len(keys) + len(loopbacks) == len(node.endpoints)


def _on_same_host(one: NodeRecord, other: NodeRecord) -> bool:
    """True if both nodes are on one host, maybe as two users."""
    return not set(map(host_of, _unix_keys(one))).isdisjoint(map(host_of, _unix_keys(other)))


def _address_of(node: NodeRecord) -> str:
    """Describes where a node listens that other hosts cannot reach: at its loopback addresses, or a unix socket."""
    return " and ".join(_loopback_addresses(node)) or "a unix socket alone"


def _unix_keys(record: NodeRecord) -> list[str]:
    return [key for endpoint in record.endpoints if (key := unix_socket(endpoint)[0])]


def _loopback_addresses(record: NodeRecord) -> list[str]:
    """Returns the loopback addresses of a node, also 127.0.1.1, which many hosts have for their own name."""
    return [host for endpoint in record.endpoints if _is_loopback(host := tcp_address(endpoint)[0])]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name, or none
        return False
