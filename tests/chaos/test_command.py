"""`taskgraph chaos`: random faults on a running job, which ends with the same bits all the same."""

from __future__ import annotations

import asyncio
import re
import signal

import pytest
from chaos_kit import LIMIT_S, NAME, chaos

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def all_said(out: str) -> bool:
    """Whether it told of two faults, of what followed, and that it came to its end of what can be spared."""
    hit = re.findall(r"SIG(?:KILL|STOP|TERM) to n\d+ \(process \d+\), (?:primary|backup|which)", out)
    followed = "is primary after" in out and re.search(r"committed [\d.]+ s after the fault", out)
    return len(hit) >= 2 and bool(followed) and "has the only replica of some task" in out


async def test_chaos_hits_a_running_job_and_says_what_followed() -> None:
    async with chaos("--nodes", "5") as job:
        await job.began()
        mischief = await job.cli.start("chaos", NAME, "--mtbf", "0.3", "--seed", "7", "--for-s", "600")
        async with asyncio.timeout(LIMIT_S):
            while not all_said("".join(mischief.out)):
                await mischief.until("", out=True)
        mischief.interrupt()
        done = await mischief.done()
        assert done.code == 0, done.err
        assert "a fault every 0.3 s, seed 7" in done.out
        assert f"job {NAME}: running" in done.out
        await job.finishes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])  # Ctrl-C, or its terminal is closed
async def test_a_signal_ends_it_and_wakes_whom_it_stopped(number: signal.Signals) -> None:
    async with chaos("--nodes", "4", ttl_s=30.0) as job:
        await job.began()
        mischief = await job.cli.start("chaos", NAME, "--mtbf", "0.05", "--kinds", "stop")
        await mischief.until("SIGSTOP to", out=True)
        mischief.process.send_signal(number)
        done = await mischief.done()
        stops = done.out.count("SIGSTOP to")  # perhaps another one before the signal came
        assert done.code == 0 and f"faults: {stops} stop" in done.out, done.out + done.err
        await job.finishes()
