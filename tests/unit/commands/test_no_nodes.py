"""`status` of a job without nodes says whether this host starts some."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from commands_kit import ETCD, in_memory, options

from taskgraph.commands.looking import _status
from taskgraph.driver.spec import JobSpec
from taskgraph.jobs import Job
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.launch.submit import submit
from taskgraph.task import Task
from taskgraph.transport.hello import token_mark


async def test_status_while_launcher_starts_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    etcd, runtime = in_memory(monkeypatch), Runtime()
    spec = JobSpec.local(Job(tasks=1, builder=lambda task_id: Task(), epochs=9, name="fit"))
    await submit(etcd, dataclasses.replace(spec, expected_nodes=4))
    entry = JobEntry(name="fit", etcd=ETCD, token="", pid=os.getpid(), embedded=False, tls={})
    for known, said in (
        (entry, f"no nodes are registered yet: its launcher (process {os.getpid()}) is starting 4 nodes"),
        (dataclasses.replace(entry, etcd="another"), "no nodes are registered yet: it was submitted by a run"),
        (None, f"If that run has ended: `taskgraph launch fit --etcd {ETCD}` starts some"),
    ):
        runtime.remove("fit")
        if known is not None:
            runtime.put(known)
        assert await _status(options("status")) == 0
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(("configured", "words"), [(False, " --token-file FILE"), (True, "")])
async def test_hint_at_launch_names_the_token_that_it_needs(
    configured: bool,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A host that does not know the job has it in a file, which an option or the environment names."""
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    if configured:
        (tmp_path / "token").write_text("ab" * 32)
        monkeypatch.setenv("TASKGRAPH_TOKEN_FILE", str(tmp_path / "token"))
    spec = JobSpec.local(Job(tasks=1, builder=lambda task_id: Task(), epochs=9, name="fit"))
    await submit(in_memory(monkeypatch), dataclasses.replace(spec, token_mark=token_mark(b"ab" * 16)))
    assert await _status(options("status")) == 0
    assert f"start some with `taskgraph launch fit --etcd {ETCD}{words}`" in capsys.readouterr().out.replace("\n", " ")
