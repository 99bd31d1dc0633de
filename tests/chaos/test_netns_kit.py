"""What a killed test left is removed by the next one, which keeps out of the way of one that runs."""

from __future__ import annotations

import asyncio
import os
import re
import signal
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
    return subprocess.run(["ip", *command], check=True, capture_output=True, text=True, timeout=60).stdout


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
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None and ended.si_status == signal.SIGKILL
        # As long as it is a zombie no other test removes it.
        assert f"tg{process.pid}-1" in _shown("netns", "list")
        assert f"tg{process.pid}h" in _shown("route")
    return process.pid


async def test_what_a_killed_test_left_is_removed_by_the_next() -> None:
    killed = _left_by_a_killed_test()
    async with network(2):
        shown = _shown("netns", "list") + _shown("link") + _shown("route")
        assert not re.search(rf"tg{killed}\D", shown)


async def test_two_have_addresses_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = (os.getpid(), 1)
    async with network(1) as one:
        monkeypatch.setattr(netns_kit.os, "getpid", lambda: 1)  # no test, and alive
        async with network(1) as other:
            assert one.address(1) != other.address(1)
            for net in (one, other):
                with pytest.raises(ConnectionRefusedError):  # an answer: nobody listens there
                    await asyncio.wait_for(asyncio.open_connection(net.address(1), 9), 10)
    assert not any(f"tg{pid}h" in _shown("route") for pid in pids)


def test_hosts_beyond_the_block_are_refused() -> None:
    with pytest.raises(ValueError, match="numbered 1 to 14"):
        netns_kit.Network((1, 15))
