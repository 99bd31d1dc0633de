"""Hosts that are network namespaces of this one, joined by a router that can be told to drop what goes from A to B.

Needs root, and `ip`. Everything is made under names of our own and removed, by the next run where this one is killed.
The addresses are a /20 of 198.18.0.0/15, which is set aside for tests of networks, that nothing here has a route to.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

_BLOCKS = tuple(ipaddress.ip_network("198.18.0.0/15").subnets(new_prefix=20))
_HOSTS = range(1, 15)
_OF_THE_TEST = 15


def why_not() -> str:
    """Why there can be no network namespaces here; "" where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (iproute2)"
    name = f"tg{os.getpid()}x"
    tried = subprocess.run(
        f"ip netns add {name} && ip -n {name} rule add from 198.18.1.2 to 198.18.2.2 blackhole; "
        f"code=$?; ip netns del {name}; exit $code",
        shell=True,
        capture_output=True,
        text=True,
    )
    return f"this machine makes no network namespaces: {tried.stderr.strip()}" if tried.returncode else ""


async def _sh(script: str) -> None:
    process = await asyncio.create_subprocess_exec(
        "sh", "-ec", script, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 0, f"{script}\n{said.decode()}"


def _listed(*command: str) -> list[str]:
    return subprocess.run(["ip", *command], check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()


def _of_the_dead(names: list[str]) -> list[str]:
    """Those of `names` that a test made which is no more."""
    made = ((name, re.match(r"tg(\d+)\D", name)) for name in names)
    return [name for name, by in made if by and not os.path.exists(f"/proc/{by[1]}")]


def remove_left() -> None:
    """Removes what tests have left that were killed before they could. Another that begins now does so, too."""
    links = [line.split()[0].partition("@")[0] for line in _listed("-br", "link", "show", "type", "veth")]
    spaces = [line.split()[0] for line in _listed("netns", "list")]
    for name in _of_the_dead(links):
        subprocess.run(["ip", "link", "del", name], check=False, timeout=60)
    for name in _of_the_dead(spaces):
        subprocess.run(["ip", "netns", "del", name], check=False, timeout=60)


def _free_block() -> ipaddress.IPv4Network:
    """Addresses that this machine has no route to."""
    words = (line.split()[0] for line in _listed("-4", "route", "show", "table", "all"))
    taken = [ipaddress.IPv4Network(word) for word in words if re.fullmatch(r"[\d.]+(/\d+)?", word)]
    turn = os.getpid() % len(_BLOCKS)  # so that two that begin at once take others
    for block in _BLOCKS[turn:] + _BLOCKS[:turn]:
        if not any(block.overlaps(other) for other in taken):
            return block
    raise RuntimeError("this machine has routes to all of 198.18.0.0/15: see `ip route`")


class Network:
    """Hosts by number, from 1 on, and the test itself, which reaches all of them and is never cut off."""

    def __init__(self, hosts: tuple[int, ...]) -> None:
        if not set(hosts) <= set(_HOSTS):
            raise ValueError(f"hosts are numbered {_HOSTS[0]} to {_HOSTS[-1]}, not {hosts}")
        self._prefix = f"tg{os.getpid()}"
        self._hosts = hosts
        self._block = _free_block()
        self._nets = tuple(self._block.subnets(new_prefix=24))

    def address(self, host: int) -> str:
        return str(self._nets[host][2])

    def _router(self, host: int) -> str:
        return str(self._nets[host][1])

    def _name(self, host: int | str) -> str:
        return f"{self._prefix}-{host}"

    def on(self, host: int) -> tuple[str, ...]:
        """What Python is called with, by `Cli.start(python=...)`, to run taskgraph on that host."""
        words = ["ip", "netns", "exec", self._name(host), sys.executable, "-m", "taskgraph"]
        return ("-c", f"import os, sys; os.execvp('ip', {words!r} + sys.argv[1:])")

    def command_on(self, host: int, *command: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self._name(host), *command)

    async def make(self) -> None:
        router = self._name("r")
        lines = [f"ip netns add {router}", f"ip netns exec {router} sysctl -qw net.ipv4.ip_forward=1"]
        for host in [*self._hosts, _OF_THE_TEST]:
            here, there = f"{self._prefix}h{host}", f"{self._prefix}r{host}"
            name = self._name(host)
            lines += [
                f"ip link add {here} type veth peer name {there}",
                f"ip link set {there} netns {router}",
                f"ip -n {router} addr add {self._router(host)}/24 dev {there}",
                f"ip -n {router} link set {there} up",
            ]
            if host == _OF_THE_TEST:
                lines += [
                    f"ip addr add {self.address(host)}/24 dev {here}",
                    f"ip link set {here} up",
                    f"ip route add {self._block} via {self._router(host)}",
                ]
                continue
            lines += [
                f"ip netns add {name}",
                f"ip link set {here} netns {name}",
                f"ip -n {name} link set lo up",
                f"ip -n {name} addr add {self.address(host)}/24 dev {here}",
                f"ip -n {name} link set {here} up",
                f"ip -n {name} route add default via {self._router(host)}",
            ]
        await _sh("\n".join(lines))

    async def remove(self) -> None:
        names = [self._name(host) for host in ("r", *self._hosts)]
        mine = f"{self._prefix}h{_OF_THE_TEST}"
        await _sh("\n".join([f"ip link del {mine} || true", *(f"ip netns del {name} || true" for name in names)]))

    @contextlib.contextmanager
    def cut(self, *ways: tuple[int, int]) -> Iterator[None]:
        """What goes from the first to the second of each pair is dropped without a word."""
        rules = [
            ["ip", "-n", self._name("r"), "rule", verb, "from", self.address(a), "to", self.address(b), "blackhole"]
            for verb in ("add", "del")
            for a, b in ways
        ]
        for rule in rules[: len(ways)]:
            subprocess.run(rule, check=True, timeout=60)
        try:
            yield
        finally:
            for rule in rules[len(ways) :]:
                subprocess.run(rule, check=True, timeout=60)


def both(a: int, b: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (a, b), (b, a)


@contextlib.asynccontextmanager
async def network(count: int, *more: int) -> AsyncIterator[Network]:
    """Hosts 1 to `count`, and `more`."""
    remove_left()
    made = Network((*range(1, count + 1), *more))
    try:
        await made.make()
        yield made
    finally:
        await made.remove()
