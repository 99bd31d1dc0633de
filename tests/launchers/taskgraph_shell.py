"""A launcher of another package: each node is a process of this host, which is ended by its pid in a folder.

It needs `--etcd` and `--token-file`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from taskgraph.clusters.api import Request
from taskgraph.clusters.tailing import follow_files
from taskgraph.errors import JobError

TASKGRAPH = (sys.executable, "-m", "taskgraph")


class ShellLauncher:
    """Starts nodes as `nice` processes."""

    def add_place_options(self, group: argparse._ArgumentGroup) -> None:
        group.add_argument("--pids", default="pids", metavar="DIR", help="where the pids of nodes are (pids)")

    def add_options(self, group: argparse._ArgumentGroup) -> None:
        group.add_argument("--nice", type=int, default=0, metavar="N", help="how nice its nodes are (0)")

    def place(self, options: argparse.Namespace) -> dict[str, str]:
        return {"pids": str(Path(options.pids).absolute())}

    def text(self, request: Request) -> str:
        if not request.etcd:
            raise JobError("--on shell needs --etcd")
        return "".join(f"{shlex.join(words)}\n" for words in (self._submit(request), self._node(request)))

    async def start(self, request: Request) -> dict[str, str]:
        done = await asyncio.create_subprocess_exec(*self._submit(request), stdout=subprocess.DEVNULL)
        if await done.wait():
            raise JobError(f"job {request.job!r} was not submitted")
        where = {**self.place(request.options), "node": shlex.join(self._node(request))}
        for number in range(request.nodes):
            self._begin(where, number + 1)
        return where

    async def scale(self, job: str, where: Mapping[str, str], nodes: int) -> str:
        there = self._pids(where)
        for number in sorted(there)[nodes:]:
            os.kill(there[number], signal.SIGTERM)
            (Path(where["pids"]) / str(number)).unlink()
        for number in range(len(there) + 1, nodes + 1):
            self._begin(where, number)
        return f"{len(there)} before"

    async def logs(self, job: str, where: Mapping[str, str], node: str | None, *, follow: bool) -> AsyncIterator[str]:
        folder = Path(where["pids"])
        async for line in follow_files(lambda: sorted(folder.glob(f"{node or '*'}.log")), ended=lambda: not follow):
            yield line

    async def stop(self, job: str, where: Mapping[str, str]) -> None:
        for pid in self._pids(where).values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    async def waiting(self, job: str, where: Mapping[str, str]) -> list[str]:
        if not self._pids(where):
            raise JobError("the folder of pids is gone")
        return [f"node {number} waits\nfor its turn" for number in range(10)]

    def _submit(self, request: Request) -> list[str]:
        words = ("--etcd", request.etcd, "--token-file", request.token_file)
        return [*TASKGRAPH, "submit", request.driver, *request.words, *words]

    def _node(self, request: Request) -> list[str]:
        words = ("--etcd", request.etcd, "--token-file", request.token_file)
        return ["nice", "-n", str(request.options.nice), *TASKGRAPH, "node", "--job", request.job, *words]

    def _begin(self, where: Mapping[str, str], number: int) -> None:
        folder = Path(where["pids"])
        folder.mkdir(exist_ok=True)
        with (folder / f"{number}.log").open("wb") as log:
            words = [*shlex.split(where["node"]), "--name", f"s{number}"]
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        (folder / str(number)).write_text(str(process.pid))

    def _pids(self, where: Mapping[str, str]) -> dict[int, int]:
        return {int(path.name): int(path.read_text()) for path in Path(where["pids"]).glob("[0-9]")}
