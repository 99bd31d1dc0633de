"""Where a node is reached, as text; and whether two nodes of a job can speak: each must reach the other, and both must
have the same token.

    unix:HOSTKEY:/path   usable by processes of the same user that see the same file system on the same host
    tcp:host:port        usable by everybody; an IPv6 address stands in brackets

A node that cannot speak with one that is there already is refused, instead of one that others wait for in vain.
"""

from __future__ import annotations

import ipaddress

from taskgraph.protocol.records import NodeRecord

__all__ = ["host_of", "share_host", "tcp_address", "unix_socket", "why_refused", "why_unreached"]


def unix_socket(endpoint: str) -> tuple[str, str]:
    """The HOSTKEY and the path of a unix socket; both are "" of what is none."""
    kind, _, rest = endpoint.partition(":")
    key, _, path = rest.partition(":")
    return (key, path) if kind == "unix" else ("", "")


def tcp_address(endpoint: str) -> tuple[str, str]:
    """The host and the port, as far as it has them; both are "" of what is no address for TCP."""
    kind, _, rest = endpoint.partition(":")
    host, _, port = rest.rpartition(":")
    return (host.removeprefix("[").removesuffix("]"), port) if kind == "tcp" else ("", "")


def host_of(key: str) -> str:
    """What the `HOSTKEY`s of one host have in common, whatever their users."""
    return key.partition(".")[0]


def share_host(one: NodeRecord, other: NodeRecord) -> bool:
    """Whether they speak over unix sockets, which nothing comes between: of one user on one host."""
    return not set(_unix_keys(one)).isdisjoint(_unix_keys(other))


def why_unreached(ours: NodeRecord, other: NodeRecord, error: str, *, connected: bool) -> str:
    """What to do about a node that is registered on another host and did not answer.

    Args:
        error: why it did not, and what to do about that, where it says so.
        connected: its port takes connections from here, so that this is not to be mended.
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


def why_refused(ours: NodeRecord, other: NodeRecord) -> str:
    """Why a node may not take part beside one that is registered, and what to do; "" where it may."""
    us, them = f"{ours.name} on {ours.host}", f"{other.name} on {other.host}"
    if ours.token_mark and other.token_mark and ours.token_mark != other.token_mark:
        return (
            f"{us} has another token than {them}, so that neither talks to the other: give all nodes the file that "
            f"`taskgraph submit` wrote (--token-file)"
        )
    if _out_of_reach(ours, other):
        if _neighbours(ours, other):
            return (
                f"{us} cannot be reached by {them}, which is another user's: it listens at a unix socket alone, which "
                f"is for its own user. Start it with --listen HOST, or all nodes of this host as one user"
            )
        return (
            f"{us} cannot be reached by {them}: it listens at {_where(ours)}, which is for its own host. Start it "
            f"with --listen HOST, a name or address of this host that the others know"
        )
    if _out_of_reach(other, ours):
        if _neighbours(ours, other):
            return (
                f"{them} cannot be reached by {us}, which is another user's: it listens at a unix socket alone, which "
                f"is for its own user. Start that one again with --listen HOST, or all nodes of this host as one user"
            )
        return (
            f"{them} cannot be reached by {us}: it listens at {_where(other)}, which is for its own host. Start "
            f"that one again with --listen HOST, or all nodes on its host"
        )
    return ""


def _out_of_reach(node: NodeRecord, other: NodeRecord) -> bool:
    """Whether `node` listens nowhere where the other can dial it. Where nothing is known of that: no."""
    keys, theirs = _unix_keys(node), _unix_keys(other)
    if not keys or not theirs or share_host(node, other):
        return False
    loopbacks = [] if _neighbours(node, other) else _loopbacks(node)
    return len(keys) + len(loopbacks) == len(node.endpoints)


def _neighbours(one: NodeRecord, other: NodeRecord) -> bool:
    """Whether they are on one host, be it as two users."""
    return not set(map(host_of, _unix_keys(one))).isdisjoint(map(host_of, _unix_keys(other)))


def _where(node: NodeRecord) -> str:
    """Where a node listens that is out of reach."""
    return " and ".join(_loopbacks(node)) or "a unix socket alone"


def _unix_keys(record: NodeRecord) -> list[str]:
    return [key for endpoint in record.endpoints if (key := unix_socket(endpoint)[0])]


def _loopbacks(record: NodeRecord) -> list[str]:
    """127.0.1.1 among them, which many hosts have for their own name."""
    return [host for endpoint in record.endpoints if _is_loopback(host := tcp_address(endpoint)[0])]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name, or none
        return False
