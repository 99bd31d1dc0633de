"""With a wrong token nodes wait for the right one, and commands refuse at once."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from commands_kit import ETCD, in_memory, options

from taskgraph.cli import parser
from taskgraph.commands import joining, submitting
from taskgraph.commands.looking import _result, _status
from taskgraph.coordination.memory import MemoryCoordinator, MemoryStore
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import JobError
from taskgraph.jobs import Job
from taskgraph.launch.submit import submit
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put, Txn
from taskgraph.protocol.records import JobStatus, NodeRecord, StatusRecord
from taskgraph.task import Task
from taskgraph.transport.hello import token_mark

KEYS = Keys("fit")
OLD, NEW = "ab" * 32, "cd" * 32
DRIVER = """
import taskgraph as tg
@tg.job
def fit(): return tg.Job(tasks=1, epochs=9, builder=tg.Task)
"""


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MemoryCoordinator:
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    return in_memory(monkeypatch)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The token file of an earlier run."""
    path = tmp_path / "token"
    path.write_text(OLD)
    return path


async def submitted(etcd: MemoryCoordinator, token_mark: str) -> None:
    spec = JobSpec.local(Job(tasks=1, builder=lambda task_id: Task(), epochs=9, name="fit"))
    await submit(etcd, dataclasses.replace(spec, token_mark=token_mark))


def token_of_node(etcd: MemoryCoordinator, path: Path) -> Coroutine[Any, Any, tuple[JobSpec, str]]:
    node = parser().parse_args(["node", "--job", "fit", "--etcd", ETCD, "--token-file", str(path)])
    return joining._wait_for_job_and_token(etcd, node, ETCD, OLD)


async def test_node_with_old_token_waits(
    etcd: MemoryCoordinator, old: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joining, "_TOKEN_AGAIN_S", 0.01)
    await submitted(etcd, token_mark(bytes.fromhex(NEW)))
    waiting = asyncio.ensure_future(token_of_node(etcd, old))
    async with asyncio.timeout(30):
        while not caplog.records:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    (said,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "job 'fit' was submitted with another token" in said and "--token-file" in said
    await asyncio.to_thread(old.write_text, NEW)
    async with asyncio.timeout(30):
        spec, token = await waiting
    assert token == NEW and spec.name == "fit"


@pytest.mark.parametrize("token_mark", ["", token_mark(bytes.fromhex(OLD))])
async def test_node_with_right_token_joins(etcd: MemoryCoordinator, old: Path, token_mark: str) -> None:
    await submitted(etcd, token_mark)
    async with asyncio.timeout(30):
        assert (await token_of_node(etcd, old))[1] == OLD


async def test_status_with_another_token_asks_no_node(
    etcd: MemoryCoordinator, old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await submitted(etcd, token_mark(bytes.fromhex(NEW)))
    spec = await etcd.get(KEYS.spec)
    assert spec is not None
    run = JobSpec.from_bytes(spec.value).run
    for name in ("n1", "n2"):
        node = NodeRecord(name=name, run=run, host="h", pid=1, endpoints=(), control="", fingerprint="", lease=0)
        await etcd.txn(Txn(success=(Put(KEYS.node(f"{name}-7f"), node.to_bytes()),)))
    assert await _status(options("status", "--token-file", str(old))) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "n1, n2: job 'fit' was submitted with another token: give the file" in said and "not asked" in said


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("command", [_result, joining._launch])
async def test_commands_refuse_another_token(
    etcd: MemoryCoordinator, old: Path, command: Callable[[Any], Coroutine[Any, Any, Any]], given: bool
) -> None:
    await submitted(etcd, token_mark(bytes.fromhex(NEW)))
    await etcd.txn(Txn(success=(Put(KEYS.status, StatusRecord(state=JobStatus.FINISHED).to_bytes()),)))
    words = ["--token-file", str(old)] if given else []
    more = [] if command is _result else ["--nodes", "1"]
    with pytest.raises(JobError, match=r"another token.*--token-file" if given else "token of job 'fit'.*--token-file"):
        async with asyncio.timeout(30):
            await command(options("result" if command is _result else "launch", *more, *words))


class Connected(MemoryCoordinator):
    """As what `connect` returns."""

    async def __aenter__(self) -> Connected:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Does nothing."""


def test_submit_marks_token(old: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(DRIVER)
    etcd = Connected(MemoryStore())

    monkeypatch.setattr(submitting, "opened", lambda *access: etcd)
    words = ["submit", str(tmp_path / "fit.py"), "--etcd", ETCD, "--token-file", str(old)]
    assert submitting.submit(parser().parse_args(words)) == 0
    spec = asyncio.run(etcd.get(KEYS.spec))
    assert spec is not None and JobSpec.from_bytes(spec.value).token_mark == token_mark(bytes.fromhex(OLD))
    assert OLD.encode() not in spec.value
