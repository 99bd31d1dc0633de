"""Node processes on this host: started, watched, ended.

When a node's process ends, its launcher is the first to know: it says so in etcd (`gone/{node}`) and revokes the
node's lease, within milliseconds. It restarts none. Everything it started ends when it does, however it ends: each
node holds the read end of a pipe whose write end is ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from taskgraph.coordination.api import Coordinator
from taskgraph.errors import CoordinationError
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.launch.threads_env import thread_env
from taskgraph.node.process import NodeConfig
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Compare, Put, Txn
from taskgraph.protocol.records import GoneRecord, NodeRecord

__all__ = ["LocalNodes"]

log = logging.getLogger("taskgraph.launch")

_TAIL_BYTES = 4000
_TRIES = 20
_RETRY_S = 0.25


@dataclasses.dataclass
class _Process:
    name: str
    process: asyncio.subprocess.Process
    log_path: Path
    watch: asyncio.Task[None]
    code: int | None = None


class LocalNodes:
    """The nodes one launcher started for one job."""

    def __init__(
        self,
        entry: JobEntry,
        coordinator: Coordinator,
        runtime: Runtime,
        *,
        blas_threads: int = 1,
        listen: str = "",
        on_exit: Callable[[str, int], None] | None = None,
    ) -> None:
        self._entry = entry
        self._coordinator = coordinator
        self._runtime = runtime
        self._blas_threads = blas_threads
        self._listen = listen
        self._on_exit = on_exit
        self._keys = Keys(entry.name)
        self._processes: dict[str, _Process] = {}
        self._sockets: Path | None = None
        self._stopping = False

    async def start(self, count: int, taken: Collection[str] = ()) -> None:
        """Starts that many nodes, named n1, n2, ..., without names that are `taken`."""
        self._sockets = self._runtime.sockets(self._entry.name)
        free = (f"n{i}" for i in itertools.count(1) if f"n{i}" not in taken)
        for name in itertools.islice(free, count):
            await self._start(name)

    async def _start(self, name: str) -> None:
        assert self._sockets is not None
        folder = self._runtime.folder(self._entry.name)
        read_end, write_end = os.pipe()
        config = NodeConfig(
            job=self._entry.name,
            name=name,
            etcd=self._entry.etcd,
            token=self._entry.token,
            tls=self._entry.tls,
            sockets=str(self._sockets),
            listen=self._listen,
            parent_fd=read_end,
        )
        path = self._sockets / f"{name}.json"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(dataclasses.asdict(config), file)
        log_path = folder / f"{name}.log"
        with log_path.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "taskgraph.node.process",
                str(path),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(read_end,),
                start_new_session=True,  # a Ctrl-C on the terminal is for the launcher alone
                env={**os.environ, **thread_env(self._blas_threads)},
            )
        os.close(read_end)
        watch = asyncio.get_running_loop().create_task(self._watch(name, write_end), name=f"watch {name}")
        self._processes[name] = _Process(name, process, log_path, watch)

    @property
    def alive(self) -> int:
        return sum(1 for p in self._processes.values() if p.code is None)

    def pids(self) -> dict[str, int]:
        return {p.name: p.process.pid for p in self._processes.values() if p.code is None}

    def codes(self) -> dict[str, int]:
        """Exit codes of the nodes that ended; negative: the signal that ended it."""
        return {p.name: p.code for p in self._processes.values() if p.code is not None}

    def log_tail(self, name: str, lines: int = 20) -> str:
        """The end of what a node printed."""
        path = self._processes[name].log_path
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except OSError as error:
            return f"({path} cannot be read: {error})"

    async def _watch(self, name: str, pipe: int) -> None:
        """Waits for the end of one process, and tells."""
        await asyncio.sleep(0)  # until `_processes` has it
        entry = self._processes[name]
        try:
            entry.code = code = await entry.process.wait()
        finally:
            os.close(pipe)
        if self._on_exit is not None:
            self._on_exit(name, code)
        if code != 0 and not self._stopping:  # 0: it left by itself, and said so
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            await self._tell_gone(entry.process.pid, how)

    async def _tell_gone(self, pid: int, how: str) -> None:
        for _ in range(_TRIES):
            try:
                listing = await self._coordinator.list(self._keys.nodes)
                for kv in listing.items:
                    record = NodeRecord.from_bytes(kv.value)
                    if record.pid == pid and record.name in self._processes:
                        node = kv.key[len(self._keys.nodes) :]
                        gone = GoneRecord(reason=how, writer=f"launcher {os.getpid()}")
                        txn = Txn((Compare(self._keys.gone(node), 0),), (Put(self._keys.gone(node), gone.to_bytes()),))
                        await self._coordinator.txn(txn)
                        await self._coordinator.revoke(record.lease)
                return
            except CoordinationError as error:
                log.warning("cannot tell that process %d %s: %s", pid, how, error)
                await asyncio.sleep(_RETRY_S)

    async def wait(self, timeout_s: float | None) -> None:
        """Waits until all nodes ended by themselves, at most `timeout_s`; None: for as long as it takes."""
        watches = [p.watch for p in self._processes.values()]
        if watches:
            await asyncio.wait(watches, timeout=timeout_s)

    async def stop(self, grace_s: float) -> None:
        """Ends every node: SIGTERM twice (a drain has nowhere to go), after `grace_s` SIGKILL."""
        self._stopping = True
        try:
            for _ in range(2 if grace_s > 0 else 0):
                self._signal(signal.SIGTERM)
                await asyncio.sleep(0.01)
            await self.wait(grace_s)
        finally:  # whoever waits here may be cancelled, and a node that is stopped (SIGSTOP) obeys nothing else
            self._signal(signal.SIGKILL)
            await asyncio.gather(*(p.watch for p in self._processes.values()), return_exceptions=True)
            if self._sockets is not None:
                shutil.rmtree(self._sockets, ignore_errors=True)

    def kill_now(self) -> None:
        """SIGKILL for all, at once; for a second Ctrl-C."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for entry in self._processes.values():
            if entry.code is None:
                with contextlib.suppress(ProcessLookupError):
                    entry.process.send_signal(number)
