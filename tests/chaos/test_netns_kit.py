"""What a killed test left is removed by the next one, which keeps out of the way of one that runs."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import netns_kit
import pytest
from netns_kit import network, why_not


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    if why := why_not():
        pytest.skip(why)


def _shown(*command: str) -> str:
    return subprocess.run(["ip", *command], check=True, capture_output=True, text=True, timeout=10).stdout


def _left_by_a_killed_test() -> int:
    """The id of a process that made two hosts and was killed."""
    script = (
        "import asyncio, netns_kit, os, signal\n"
        "async def main():\n"
        "    await netns_kit.Network((1, 2)).make()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    folder = netns_kit.__file__.rpartition("/")[0]
    with subprocess.Popen([sys.executable, "-c", script], cwd=folder) as process:
        assert process.wait(30) == -9
    return process.pid


async def test_what_a_killed_test_left_is_removed_by_the_next() -> None:
    killed = _left_by_a_killed_test()
    assert f"tg{killed}-1" in _shown("netns", "list")
    assert f"tg{killed}h" in _shown("route")
    async with network(2):
        assert f"tg{killed}" not in _shown("netns", "list") + _shown("link") + _shown("route")


async def test_two_have_addresses_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async with network(1) as one:
        monkeypatch.setattr(netns_kit.os, "getpid", lambda: 1)  # no test, and alive
        async with network(1) as other:
            assert one.address(1) != other.address(1)
            for net in (one, other):
                with pytest.raises(ConnectionRefusedError):  # an answer: nobody listens there
                    await asyncio.wait_for(asyncio.open_connection(net.address(1), 9), 10)
            made = (one.address(1), other.address(1))
    assert not any(address.rpartition(".")[0] in _shown("route") for address in made)


def test_hosts_beyond_the_block_are_refused() -> None:
    with pytest.raises(ValueError, match="numbered 1 to 14"):
        netns_kit.Network((1, 15))
