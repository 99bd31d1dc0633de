"""Faults at named moments: the names of their files, and that each happens once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from taskgraph.errors import JobError
from taskgraph.node.inject import VARIABLE, Injection, injection_point


def test_file_name_describes_fault() -> None:
    assert Injection.parse("kill,commit") == Injection("kill", "commit")
    assert Injection.parse("block=2.5,done,task=3,epoch=7") == Injection("block", "done", 2.5, 3, 7)
    assert Injection.parse("stop,sync,task=0").matches("sync", 0, 9)
    assert not Injection.parse("stop,sync,task=0").matches("sync", 1, 9)
    assert not Injection.parse("stop,sync,epoch=8").matches("sync", 0, 9)
    assert not Injection.parse("stop,sync").matches("done", 0, 9)


@pytest.mark.parametrize(
    "name", ["", "kill", "kill,nowhere", "shoot,commit", "kill,commit,task=x", "kill,commit,when=3", "block=x,commit"]
)
def test_unknown_fault_is_refused(name: str) -> None:
    with pytest.raises(JobError, match="is no fault"):
        Injection.parse(name)


async def test_fault_happens_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "faults"))
    point = injection_point()
    assert point is not None
    await point("commit", 0, 1)  # no directory yet: nothing to do
    (tmp_path / "faults").mkdir()
    fault = tmp_path / "faults" / "block=0.05,commit,epoch=3"
    fault.touch()
    (tmp_path / "faults" / ".kill,commit").touch()  # being made
    await point("commit", 0, 2)
    assert fault.exists()
    began = time.monotonic()
    await point("commit", 0, 3)
    assert time.monotonic() - began >= 0.05 and not fault.exists()


async def test_hold_lasts_until_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    point = injection_point()
    assert point is not None
    hold = tmp_path / "hold,commit,epoch=3"
    hold.touch()
    await point("commit", 0, 2)
    held = [asyncio.create_task(point("commit", 0, 3)) for _ in range(2)]  # every process that comes there
    await asyncio.sleep(0.1)
    assert hold.exists() and not any(task.done() for task in held)
    hold.unlink()
    async with asyncio.timeout(30):
        await asyncio.gather(*held)
