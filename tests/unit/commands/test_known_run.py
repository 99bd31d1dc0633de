"""Commands find the token of a run that was started on this host, by any list of its etcd's members."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from commands_kit import ETCD, in_memory, options

from taskgraph.cli import parser
from taskgraph.commands.common import find_entry, reach
from taskgraph.driver.spec import JobSpec
from taskgraph.jobs import Job
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.launch.submit import submit
from taskgraph.task import Task

TOKEN = "ab" * 32


async def test_token_found_by_another_endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    etcd, runtime = in_memory(monkeypatch), Runtime()
    spec = JobSpec.local(Job(tasks=1, builder=lambda task_id: Task(), epochs=9, name="fit"))
    await submit(etcd, spec)
    local = JobEntry(name="fit", etcd="a:1,b:1", token=TOKEN, pid=os.getpid(), embedded=False, tls={}, run=spec.run)
    for known, token in (
        (local, TOKEN),
        (dataclasses.replace(local, node_tls={"ca": "/ca.pem"}), TOKEN),
        (dataclasses.replace(local, run="another"), ""),
        (dataclasses.replace(local, run=""), ""),
        (dataclasses.replace(local, run="", etcd=ETCD), TOKEN),
    ):
        runtime.put(known)
        async with reach(options("status")) as reached:
            assert reached.entry.token == token and reached.entry.node_tls == (known.node_tls if token else {})
            assert reached.entry.etcd == ETCD
    runtime.put(local)
    (file := tmp_path / "token").write_text("cd" * 32)
    async with reach(options("status", "--token-file", str(file))) as reached:
        assert reached.entry.token == "cd" * 32, "the one that is given counts"


def test_given_tls_overrides_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TASKGRAPH_RUNTIME_DIR", str(tmp_path))
    entry = JobEntry(name="fit", etcd="a:1", token=TOKEN, pid=os.getpid(), embedded=False, tls={}, run="r")
    folder = tmp_path / "tls"
    folder.mkdir()
    files = {what: str(folder / f"{what}.pem") for what in ("ca", "cert", "key")}
    for path in files.values():
        Path(path).touch()
    known: dict[str, str]
    for known in ({}, {"ca": "/a", "cert": "/b", "key": "/c"}):
        Runtime().put(dataclasses.replace(entry, node_tls=known))
        for job in (["fit"], []):
            assert find_entry(parser().parse_args(["status", *job])).node_tls == known
            assert find_entry(parser().parse_args(["status", *job, "--tls", str(folder)])).node_tls == files
