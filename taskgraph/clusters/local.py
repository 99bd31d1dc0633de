"""`submit --on local`: nodes of this host, in the background. The command returns, and the job goes on."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from taskgraph.clusters.api import Request
from taskgraph.clusters.tailing import follow_files
from taskgraph.coordination.opening import opened
from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.errors import JobError, TaskGraphError
from taskgraph.launch.begin import command
from taskgraph.launch.follow import client_of
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.protocol.records import name_of

__all__ = ["LocalLauncher"]

_LOOK_S = 0.05
_STARTS_S = 60.0
_TAIL = 20
"""Lines of a command that failed to show."""


class LocalLauncher:
    """Starts `taskgraph run` in the background. Without `--etcd` the job's etcd is its own."""

    submits = True

    def add_place_options(self, group: argparse._ArgumentGroup) -> None:
        """There is one place: this host."""

    def add_options(self, group: argparse._ArgumentGroup) -> None:
        """There are no others."""

    def place(self, options: argparse.Namespace) -> dict[str, str]:
        return {}

    def text(self, request: Request) -> str:
        return f"{shlex.join(['taskgraph', *_words(request)])}\n"

    async def start(self, request: Request) -> dict[str, str]:
        words, log = _words(request), Runtime().placed() / f"{request.job}.log"
        await _started(request.job, words, log)
        return {"log": str(log)}

    async def scale(self, job: str, where: Mapping[str, str], nodes: int) -> str:
        entry = _entry(job)
        async with opened(entry.etcd, entry.tls) as coordinator:
            keeper = ViewKeeper(coordinator, job, refresh_s=0.1)
            await keeper.load()
            live = keeper.view.live_nodes(entry.run)
            staying = sorted(node for node, record in live.items() if not record.draining)
            for node in staying[nodes:]:
                async with client_of(live[node], entry.token_bytes, entry.node_access) as client:
                    await client.drain("taskgraph scale")
        if leaving := staying[nodes:]:
            return f"{', '.join(map(name_of, leaving))} hand over and leave"
        if more := nodes - len(staying):
            log = Runtime().placed() / f"{job}-more.log"
            await _started(job, ["launch", job, "--nodes", str(more), "--replace"], log, first=False)
            return f"{more} more started"
        return f"it has {nodes} already"

    async def logs(self, job: str, where: Mapping[str, str], node: str | None, *, follow: bool) -> AsyncIterator[str]:
        runtime = Runtime()
        folder = runtime.logs(job) or runtime.kept_logs(job)

        def files() -> Sequence[Path]:
            return sorted(folder.glob(f"{node}.log" if node else "n*.log"))

        if not files():
            named = f"node {node!r}" if node else "its nodes"
            known = ", ".join(path.stem for path in sorted(folder.glob("n*.log"))) or "none"
            raise JobError(f"job {job!r}: no log of {named} is on this host; there are: {known}")
        async for line in follow_files(files, ended=lambda: not follow or runtime.find(job) is None):
            yield line

    async def stop(self, job: str, where: Mapping[str, str]) -> None:
        """The commands in the background end with the job."""

    async def waiting(self, job: str, where: Mapping[str, str]) -> list[str]:
        return []


def _words(request: Request) -> list[str]:
    if request.extra_nodes:
        raise JobError("--extra-nodes: nodes of this host have no priorities: give all of them with --nodes")
    access = [word for name, value in request.etcd_access.items() for word in (f"--etcd-{name}", value)]
    tls = [word for name, value in request.node_tls.items() for word in (f"--tls-{name}", value)]
    etcd = ["--etcd", request.etcd] if request.etcd else []
    token = ["--token-file", request.token_file] if request.token_file else []
    return [
        *("run", request.driver, *request.words, "--nodes", str(request.nodes), "--replace"),
        *(*etcd, *access, *token, *tls),
    ]


def _entry(job: str) -> JobEntry:
    if (entry := Runtime().find(job)) is None:
        raise JobError(f"job {job!r} has no nodes on this host any longer")
    return entry


async def _started(job: str, words: Sequence[str], log: Path, *, first: bool = True) -> None:
    """Starts a command in the background; returns once it has begun the job (or at once, to join it).

    Raises:
        JobError: it ended before, with its last lines.
    """
    runtime = Runtime()
    process = _in_background(words, log)
    for _ in range(round(_STARTS_S / _LOOK_S)):
        if not first or runtime.find(job) is not None:
            return
        if process.poll() is not None:
            if process.returncode == 0:  # a short job has ended
                return
            raise JobError(f"job {job!r} was not started:\n{_last_lines(log)}")
        await asyncio.sleep(_LOOK_S)
    raise TaskGraphError(f"job {job!r} has not begun after {_STARTS_S:g} s: its command prints to {log}")


def _in_background(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            command("taskgraph", *words), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL:])
