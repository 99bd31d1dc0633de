"""`submit --on local`: nodes of this host, in the background. The command returns, and the job goes on."""

from __future__ import annotations

import argparse
import asyncio
import glob
import shlex
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from taskgraph.clusters.api import Request
from taskgraph.clusters.tailing import follow_files
from taskgraph.coordination.opening import opened
from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.errors import JobError, TaskGraphError
from taskgraph.launch.begin import command
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.observe.format import counted
from taskgraph.protocol.records import name_of
from taskgraph.protocol.view import JobView
from taskgraph.system.environment import user_env

__all__ = ["LocalLauncher"]

_LOOK_S = 0.05
_STARTS_S = 60.0
_TAIL = 20
"""Lines of a command that failed to show."""
_ACCESS = {
    "ca": "--etcd-ca",
    "cert": "--etcd-cert",
    "key": "--etcd-key",
    "username": "--etcd-user",
    "password_file": "--etcd-password-file",
}
"""The options for what `EtcdCoordinator.connect` takes. A password is in the environment, which the command inherits:
all users of the host can read a command line."""


class LocalLauncher:
    """Starts `taskgraph run` in the background. Without `--etcd` that command brings the job's etcd."""

    def add_place_options(self, group: argparse._ArgumentGroup) -> None:
        """Adds none: there is one place, this host."""

    def add_options(self, group: argparse._ArgumentGroup) -> None:
        """Adds none."""

    def place(self, options: argparse.Namespace) -> dict[str, str]:
        return {}

    def text(self, request: Request) -> str:
        return f"{shlex.join(['taskgraph', *_run_words(request)])}\n"

    async def start(self, request: Request) -> dict[str, str]:
        job, words, runtime = request.job, _run_words(request), Runtime()
        if (running := runtime.find(job)) is not None:
            raise JobError(
                f"job {job!r} runs on this host already (process {running.pid}): `taskgraph shutdown {job}` ends it, "
                f"or give this one another --name"
            )
        log = _command_log(job)
        log.unlink(missing_ok=True)
        process = _start_in_background(words, log)

        async def has_begun() -> bool:
            entry = runtime.find(job)
            return entry is not None and entry.pid == process.pid

        try:
            await _wait_for(process, log, f"job {job!r}", has_begun)
        except JobError:
            log.unlink()
            raise
        return {"log": str(log)}

    async def scale(self, job: str, where: Mapping[str, str], nodes: int) -> str:
        entry = _find_entry(job)
        view = await _load_view(entry)
        staying = _staying_nodes(entry, view)
        if leaving := staying[nodes:]:
            return await _drain_nodes(entry, view, leaving)
        if not (more := nodes - len(staying)):
            return f"it has {nodes} already"

        async def have_come() -> bool:
            if runtime.find(job) is None:  # the job has ended meanwhile
                return True
            return len(_staying_nodes(entry, await _load_view(entry))) >= nodes

        log, runtime = _command_log(job), Runtime()
        process = _start_in_background(["launch", job, "--nodes", str(more), "--replace"], log)
        await _wait_for(process, log, f"{counted(more, 'more node')} of job {job!r}", have_come)
        return f"{more} more started"

    async def logs(self, job: str, where: Mapping[str, str], node: str | None, *, follow: bool) -> AsyncIterator[str]:
        files, runtime = partial(_log_files, job, node), Runtime()
        runs = runtime.find(job) is not None
        if not files() and (node is not None or not (runs and follow)):
            named = f"node {node!r}" if node else "its nodes"
            known = ", ".join(path.stem for path in _log_files(job)) or "none"
            raise JobError(f"job {job!r}: no log of {named} is on this host; there are: {known}")
        async for line in follow_files(files, ended=lambda: not follow or runtime.find(job) is None):
            yield line

    async def stop(self, job: str, where: Mapping[str, str]) -> None:
        """Waits for the end of the background command, after the job's. Raises TaskGraphError if that takes long."""
        runtime = Runtime()
        try:
            async with asyncio.timeout(_STARTS_S):
                while runtime.find(job) is not None:  # noqa: ASYNC110 (no event tells)
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise TaskGraphError(
                f"job {job!r} has ended, but its command still runs after {_STARTS_S:g} s; it prints to "
                f"{_command_log(job)}"
            ) from None

    async def waiting(self, job: str, where: Mapping[str, str]) -> list[str]:
        return []


def _run_words(request: Request) -> list[str]:
    if request.extra_nodes:
        raise JobError("--extra-nodes: nodes of this host have no priorities: give all of them with --nodes")
    if request.insecure:
        raise JobError("--insecure-listen: nodes of this host listen for no other host; leave the option out")
    access = [
        word for name, option in _ACCESS.items() if (value := request.etcd_access.get(name)) for word in (option, value)
    ]
    tls = [word for name, value in request.node_tls.items() for word in (f"--tls-{name}", value)]
    etcd = ["--etcd", request.etcd] if request.etcd else []
    token = ["--token-file", request.token_file] if request.token_file else []
    return [
        *("run", request.driver, *request.words, "--nodes", str(request.nodes), "--replace"),
        *(*etcd, *access, *token, *tls),
    ]


def _find_entry(job: str) -> JobEntry:
    if (entry := Runtime().find(job)) is None:
        raise JobError(f"job {job!r} has no nodes on this host any longer: `taskgraph status {job}` says how it ended")
    return entry


async def _load_view(entry: JobEntry) -> JobView:
    async with opened(entry.etcd, entry.tls) as coordinator:
        keeper = ViewKeeper(coordinator, entry.name, refresh_s=_LOOK_S)
        await keeper.load()
        return keeper.view


def _staying_nodes(entry: JobEntry, view: JobView) -> list[str]:
    """Returns the ids of the job's nodes that do not leave, the oldest first."""
    live = view.live_nodes(entry.run)
    return sorted((n for n in live if not live[n].draining), key=lambda n: view.nodes[n].create_revision)


async def _drain_nodes(entry: JobEntry, view: JobView, nodes: Sequence[str]) -> str:
    """Asks nodes to leave; returns a sentence."""
    from taskgraph.launch.follow import client_of  # loads gRPC

    for node in nodes:
        async with client_of(view.nodes[node].record, entry.token_bytes, entry.node_access) as client:
            await client.drain("taskgraph scale")
    names = ", ".join(map(name_of, nodes))
    return f"{names} hands over and leaves" if len(nodes) == 1 else f"{names} hand over and leave"


def _command_log(job: str) -> Path:
    """Returns the file to which commands in the background print."""
    return Runtime().make_placed_folder() / f"{job}.log"


def _log_files(job: str, node: str | None = None) -> Sequence[Path]:
    """Returns the logs of the job's nodes, or of one, where they are now: they are moved when the job ends."""
    runtime = Runtime()
    ended = runtime.find(job) is None and runtime.find_killed(job) is None
    folder = runtime.kept_logs(job) if ended else runtime.left_logs(job)
    return sorted(folder.glob(f"{glob.escape(node)}.log" if node else "n*.log")) if folder is not None else []


def _start_in_background(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            command("taskgraph", *words),
            env=user_env(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


async def _wait_for(
    process: subprocess.Popen[bytes], log: Path, what: str, done: Callable[[], Awaitable[bool]]
) -> None:
    """Waits until `done`, or until the command in the background has ended well: a short job is over at once.

    Args:
        what: what the command starts, for messages.

    Raises:
        JobError: the command failed; with its last lines.
        TaskGraphError: the command takes too long.
    """
    for _ in range(round(_STARTS_S / _LOOK_S)):
        code = process.poll()
        if code == 0 or await done():
            return
        if code is not None:
            raise JobError(f"{what}: the command that starts it ended with {code}. Its last lines:\n{_last_lines(log)}")
        await asyncio.sleep(_LOOK_S)
    raise TaskGraphError(f"{what}: not there after {_STARTS_S:g} s; the command that starts it prints to {log}")


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL:])
