"""Processes that can become nodes: started before there is a job to take part in, told what to be through a pipe.

Most of a node's start is loading Python modules. Where a launcher also starts an etcd, which mostly waits for itself,
both are done at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from taskgraph.children import tell_child
from taskgraph.launch.threads_env import thread_env
from taskgraph.node.config import NodeConfig

__all__ = ["WarmNodes", "WarmProcess"]

_END_S = 1.0
"""One that nobody needs ends by itself within this time, or is killed."""


@dataclasses.dataclass(frozen=True, slots=True)
class WarmProcess:
    """A process that loads what a node needs and then reads what to be. It ends when `pipe` is closed before.

    Attributes:
        pipe: the write end, which tells it for all its life that its launcher is there.
        log_path: where its output goes.
    """

    process: asyncio.subprocess.Process
    pipe: int
    log_path: Path

    @classmethod
    async def start(cls, log_path: Path, blas_threads: int) -> WarmProcess:
        """Starts one. Cancelled meanwhile, none is left."""
        read_end, write_end = os.pipe()
        try:
            # What tasks print is their user's, whatever the umask.
            log_file = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(log_file, "ab") as output:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "taskgraph.node.process",
                    str(read_end),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(read_end,),
                    start_new_session=True,  # a Ctrl-C on the terminal is for the launcher alone
                    # gRPC tells of every stranger otherwise, as often as one knocks.
                    env={"GRPC_VERBOSITY": "ERROR", **os.environ, **thread_env(blas_threads)},
                )
        except BaseException:
            os.close(write_end)  # a process that was started nevertheless sees that, and ends
            raise
        finally:
            os.close(read_end)
        return cls(process, write_end, log_path)

    def tell(self, config: NodeConfig) -> None:
        """What to be. Where it ended meanwhile, its exit code says so."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.pipe, json.dumps(dataclasses.asdict(config)).encode() + b"\n")

    async def end(self) -> None:
        """Ends one that was told nothing."""
        os.close(self.pipe)
        try:
            async with asyncio.timeout(_END_S):
                await self.process.wait()
        except TimeoutError:
            pass
        finally:  # slow, or whoever waits is cancelled: it must not be left behind
            tell_child(self.process, signal.SIGKILL)
            await self.process.wait()


class WarmNodes:
    """Processes that were started ahead, by the names that nodes will have. An async context: what is not taken ends.

    Args:
        folder: for their logs.
    """

    def __init__(self, folder: Path, names: Sequence[str], blas_threads: int) -> None:
        self._folder = folder
        self._names = names
        self._blas_threads = blas_threads
        self._waiting: dict[str, WarmProcess] = {}

    async def __aenter__(self) -> WarmNodes:
        try:
            for name in self._names:
                started = await WarmProcess.start(self._folder / f"{name}.log", self._blas_threads)
                self._waiting[name] = started
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    def take(self, name: str, log_path: Path, blas_threads: int) -> WarmProcess | None:
        """The process that was started for a node of that name, if there is one and it was started as is needed."""
        found = self._waiting.get(name)
        if found is None or found.log_path != log_path or self._blas_threads != blas_threads:
            return None
        return self._waiting.pop(name)

    async def _end(self) -> None:
        waiting, self._waiting = list(self._waiting.values()), {}
        async with asyncio.TaskGroup() as group:
            for one in waiting:
                group.create_task(one.end())
