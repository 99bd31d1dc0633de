"""The address and the ports on which a node listens for other hosts, and the address that it advertises."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from taskgraph.errors import JobError

__all__ = ["ANY_PORT", "NOWHERE", "Listening"]

ANY_PORT: Sequence[int] = (0,)
"""The kernel picks a free one."""
_OF_A_NODE = 2
"""Ports of a node: one for the other nodes, one for its control service."""
_WILDCARDS = ("0.0.0.0", "::")
_LAST_PORT = 65535
_DIGITS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """The options `--listen`, `--ports`, `--advertise` and `--insecure-listen`.

    Attributes:
        host: the name or address to listen on for TCP; "": none, only its own host reaches the node.
        ports: FIRST-LAST, of which a node takes two that are free; "": any.
        advertise: the name or address by which others reach `host`; "": `host` itself.
        insecure: `host` may be beyond loopback without TLS.

    Raises:
        JobError: `ports` is no range of ports, or too small for a node; `host` or `advertise` is no name or address, or
            has a port; `ports` or `advertise` without `host`.
    """

    host: str = ""
    ports: str = ""
    advertise: str = ""
    insecure: bool = False

    def __post_init__(self) -> None:
        for option, value in (("--ports", self.ports), ("--advertise", self.advertise)):
            if value and not self.host:
                raise JobError(f"{option} {value} is about where other hosts reach a node: give --listen HOST, too")
        if self.ports:
            self._port_range()
        if not _is_plain(self.host):
            raise JobError(f"--listen {self.host}: must be a name or an address of this host, no port, and no brackets")
        if self.advertise in _WILDCARDS or not _is_plain(self.advertise):
            raise JobError(f"--advertise {self.advertise}: must be a name or an address that others can dial, no port")

    def _port_range(self) -> range:
        """Returns the range of ports. Raises JobError if `ports` is none, or too small for a node."""
        first, dash, last = (part.strip() for part in self.ports.partition("-"))
        if not (dash and _is_number(first) and _is_number(last) and 1 <= int(first) <= int(last) <= _LAST_PORT):
            raise JobError(f"--ports {self.ports}: must read FIRST-LAST, two ports between 1 and {_LAST_PORT}")
        found = range(int(first), int(last) + 1)
        self._check_enough(found, 1)
        return found

    def _check_enough(self, found: range, nodes: int) -> None:
        """Raises JobError if the range has too few ports for this many nodes."""
        if len(found) < _OF_A_NODE * nodes:
            whose = "a node takes" if nodes == 1 else f"{nodes} nodes on this host take"
            raise JobError(f"--ports {self.ports} are {len(found)}: {whose} {_OF_A_NODE * nodes}")

    def check(self, nodes: int) -> None:
        """Raises JobError if the range has too few ports for this many nodes of one host."""
        if self.ports:
            self._check_enough(self._port_range(), nodes)

    def ports_to_try(self) -> Sequence[int]:
        """Returns the ports in the order to try them, from a random one on.

        So nodes that start together ask for different ports, and a node of another job does not take the port of a node
        that just died, and answer in its place.
        """
        if not self.ports:
            return ANY_PORT
        found = self._port_range()
        first = secrets.randbelow(len(found))
        return (*found[first:], *found[:first])

    @property
    def advertised(self) -> str:
        """Returns the name or address to advertise; "": the resolved `host`."""
        return self.advertise or (socket.gethostname() if self.host in _WILDCARDS else "")


def _is_plain(host: str) -> bool:
    """Returns True if a host has no port and no brackets."""
    if ":" not in host:
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).version == 6
    except ValueError:
        return False


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS


NOWHERE = Listening()
"""A node that other hosts cannot reach."""
