"""Node processes on this host: started, watched, ended.

When a node's process ends, its launcher knows first: within milliseconds it writes `gone/{node}` to etcd and revokes
the node's lease. If asked to (`--replace`), it starts another node in place of one that died. Each node holds the read
end of a pipe of its launcher, and so ends with it, however the launcher ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from taskgraph.coordination.api import Coordinator
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import CoordinationError, DecodeError, OutcomeUnknown, TaskGraphError, Unavailable
from taskgraph.launch.devices import count_sharing, deal, host_devices
from taskgraph.launch.forkserver import ForkServer, NodeProcess
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.launch.standing import StalledLoop, is_stopped, stall_text
from taskgraph.launch.submit import UNKNOWN_PAUSE_S, UNKNOWN_TRIES
from taskgraph.network.listening import NOWHERE, Listening
from taskgraph.node.config import NodeConfig
from taskgraph.node.usercode import lastwords
from taskgraph.observe.events import Event, put_events
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Compare, Get, Put, Txn
from taskgraph.protocol.records import OUT_OF_MEMORY, GoneRecord, JobStatus, NodeRecord, RunningCode, StatusRecord
from taskgraph.system import host
from taskgraph.system.alongside import cancel_and_wait
from taskgraph.system.files import LockedFolder
from taskgraph.system.processes import Child, end_group, reap_session, signal_child, signal_name

__all__ = ["LocalNodes", "pause_before_another"]

log = logging.getLogger("taskgraph.launch")

_TAIL_LINES, _TAIL_BYTES = 20, 4000
_CRASH_BYTES = 64 << 10
"""More than the stack that `faulthandler` writes: 100 frames at most, and the names of extension modules."""
_RETRY_S = 0.25
_WRITE_S = 30.0
"""The time limit for writing a node's end. By then other nodes have seen that its key is absent."""
_LAST_WRITE_S = 1.0
"""The limit of `_WRITE_S` while the launcher stops."""
_REGISTERS_S = 5.0
"""A node that is not registered after this time is reported, and again each time. Most need a second or two."""
_KEY_LOOK_S = 1.0
"""How often the node's key is looked for: a key may vanish with its lease in a pause of etcd."""
_WARNED = re.compile(r"^\S+ \S+ taskgraph\.\S+ WARNING (.*)$", re.MULTILINE)
"""Finds the warnings in a node's log, which say what the node waits for."""
_LOOK_S = 1.0
"""How often the launcher looks whether the event loop of a node stands still."""
_LIVED_S = 10.0
"""A node that was registered for this time did not die of its start: it is replaced at once."""
_REPLACE_S = 1.0
"""Otherwise its replacement waits for this time, and twice as long after each early death."""
_REPLACEMENTS = 5
"""After this many early deaths in one place no node is replaced."""


@dataclasses.dataclass
class _Process:
    """A node's process as its launcher knows it, with its end."""

    name: str
    node_id: str
    process: Child
    pipe: int
    log_path: Path
    folder: Path  # of its sockets, and of its last words
    devices: str | None = None  # as they were dealt to it
    sharing: int = 1
    early: int = 0  # early deaths in its place, one after the other
    registered_at: float = math.inf
    code: int | None = None
    death: GoneRecord | None = None
    stall: str = ""  # where its event loop stands still


class LocalNodes:
    """The nodes that one launcher started for one job.

    Args:
        collects: this process runs the job, and collects its results: nodes keep them for it.
        ahead: a fork server for the first nodes; it is ended after their start.
        replace: called for each node that died; True: start another one in its place.
    """

    def __init__(
        self,
        entry: JobEntry,
        coordinator: Coordinator,
        runtime: Runtime,
        *,
        blas_threads: int = 1,
        deal_devices: bool = True,
        listening: Listening = NOWHERE,
        collects: bool = False,
        ahead: ForkServer | None = None,
        replace: Callable[[], bool] = lambda: False,
    ) -> None:
        self._entry = entry
        self._coordinator = coordinator
        self._runtime = runtime
        self._blas_threads = blas_threads
        self._deal_devices = deal_devices
        self._listening = listening
        self._collects = collects
        self._ahead = ahead
        self._replace = replace
        self._keys = Keys(entry.name)
        self._processes: dict[str, _Process] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._replacing: set[asyncio.Task[None]] = set()
        self._writing_ends: set[asyncio.Task[None]] = set()
        self._sockets: LockedFolder | None = None
        self._reported_waits: set[str] = set()
        self._stopping = False
        self._ended_well = False
        self._oom_kills = host.oom_kills()
        self._by_oom = 0  # nodes that ended so

    async def start(self, count: int) -> None:
        """Starts `count` nodes. Their names n1, n2, ... are new to this job.

        Raises:
            CoordinationError: etcd refuses, or does not say what becomes of its writes.
            NotStarted: a process cannot be started.
        """
        first = await self._take_numbers(count)
        if self._sockets is None:
            self._sockets = self._runtime.make_socket_folder(self._entry.name)
        devices = deal(host_devices() if self._deal_devices else (), first - 1, count)
        async with self._forkserver() as server:
            for number, own, among in zip(itertools.count(first), devices, count_sharing(devices)):
                await self._start(server, f"n{number}", own, among)

    def _forkserver(self) -> contextlib.AbstractAsyncContextManager[ForkServer]:
        """Returns a context with a fork server: the one given for the first nodes, or a new one."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            return contextlib.aclosing(ahead)
        return ForkServer(self._runtime.make_job_folder(self._entry.name), self._blas_threads)

    async def _take_numbers(self, count: int) -> int:
        """Reserves `count` numbers for names, and returns the first. Other launchers reserve others.

        It waits for an etcd that is away, since the job was just written there.
        """
        key, unknown, reported = self._keys.names, 0, False
        while True:
            try:
                found = await self._coordinator.get(key)
                given, revision = (int(found.value), found.mod_revision) if found is not None else (0, 0)
                txn = Txn((Compare(key, revision),), (Put(key, str(given + count).encode()),))
                if (await self._coordinator.txn(txn)).succeeded:
                    return given + 1
            except Unavailable as error:
                if not reported:
                    log.warning("nodes are started once etcd answers: %s", error)
                    reported = True
                await asyncio.sleep(_RETRY_S)
            except OutcomeUnknown:  # these numbers may stay unused
                if (unknown := unknown + 1) == UNKNOWN_TRIES:
                    raise
                await asyncio.sleep(UNKNOWN_PAUSE_S)

    async def _start(self, server: ForkServer, name: str, devices: str | None, among: int, early: int = 0) -> None:
        """Starts one node, and begins to watch its process."""
        assert self._sockets is not None
        config = NodeConfig(
            job=self._entry.name,
            name=name,
            node_id=NodeConfig.new_id(name),
            etcd=self._entry.etcd,
            token=self._entry.token,
            tls=self._entry.tls,
            sockets=str(self._sockets.path),
            listening=self._listening,
            node_tls=self._entry.node_tls,
            parent_pid=os.getpid(),
            devices=devices,
            sharing=among,
            path=[folder for folder in sys.path if isinstance(folder, str)],
            collects=self._collects,
        )
        started = await self._spawn(server, config, self._runtime.make_job_folder(self._entry.name) / f"{name}.log")
        entry = self._processes[name] = _Process(
            name,
            config.node_id,
            started.process,
            started.pipe,
            started.log_path,
            self._sockets.path / config.node_id.rpartition("-")[2],
            devices=devices,
            sharing=among,
            early=early,
        )
        _start_task(self._watches, self._watch(entry), f"watch {name}")

    async def _spawn(self, server: ForkServer, config: NodeConfig, log_path: Path) -> NodeProcess:
        return await server.start(config, log_path)

    @property
    def alive_count(self) -> int:
        """The number of nodes whose process runs."""
        return sum(1 for p in self._processes.values() if p.code is None)

    def ids(self) -> frozenset[str]:
        """Returns the ids of all nodes, also of those that ended."""
        return frozenset(p.node_id for p in self._processes.values())

    def pids(self) -> dict[str, int]:
        """Returns the process ids of the nodes that run."""
        return {p.name: p.process.pid for p in self._processes.values() if p.code is None}

    def logs(self) -> dict[str, Path]:
        """Returns the log of each node."""
        return {p.name: p.log_path for p in self._processes.values()}

    def codes(self) -> dict[str, int]:
        """Returns exit codes of nodes that ended; negative: the signal."""
        return {p.name: p.code for p in self._processes.values() if p.code is not None}

    def deaths(self) -> dict[str, GoneRecord]:
        """Returns how nodes ended that did not leave by themselves, in the order of their start."""
        return {p.name: p.death for p in self._processes.values() if p.death is not None}

    def log_tail(self, name: str) -> str:
        """Returns the end of a node's log."""
        path = self._processes[name].log_path
        try:
            return "\n".join(_read_end(path, _TAIL_BYTES).splitlines()[-_TAIL_LINES:])
        except OSError as error:
            return f"({path} cannot be read: {error})"

    @property
    def stalls(self) -> tuple[str, ...]:
        """Texts about the nodes whose event loop stands still, or did when they ended."""
        return tuple(entry.stall for entry in self._processes.values() if entry.stall)

    async def _report_stalls(self, entry: _Process) -> None:
        """Writes events about where a node's event loop stands still, until cancelled."""
        standing = StalledLoop(entry.folder, entry.process.pid)
        while True:
            await asyncio.sleep(_LOOK_S)
            if (found := standing.find_stalled_call(time.monotonic())) is None:
                if not standing.reported:
                    entry.stall = ""
                continue
            ran, for_s = found
            text = entry.stall = stall_text(entry.name, ran, for_s, in_thread=standing.in_thread)
            event = Event(time.time(), entry.name, "stands", text, task=ran.task, epoch=max(ran.epoch, 0))
            log.info("%s", text)
            key = self._keys.event(f"{event.at:017.6f}-launcher{os.getpid()}-{entry.name}")
            with contextlib.suppress(CoordinationError):
                if revision := await self._spec_revision():
                    await self._coordinator.txn(put_events(self._keys, revision, [(key, event)]))

    async def _report_unregistered(self, entry: _Process) -> None:
        """Logs why a node is not registered, again and again, until it is. Only reads: etcd may refuse writes."""
        began = absent_since = time.monotonic()
        while True:
            await asyncio.sleep(_KEY_LOOK_S)
            asked = time.monotonic()
            try:
                if await self._coordinator.get(self._keys.node(entry.node_id)) is not None:
                    entry.registered_at = time.monotonic()
                    return
            except CoordinationError:  # the follower waits for etcd, too, and says so
                absent_since = time.monotonic()
                continue
            now = time.monotonic()
            if now - asked > _KEY_LOOK_S:  # etcd was away, and the node may have to register again
                absent_since = now
            if now - absent_since < _REGISTERS_S:
                continue
            absent_since = now
            said = _WARNED.findall(self.log_tail(entry.name))
            if said and said[-1] not in self._reported_waits:  # several nodes mostly wait for the same
                self._reported_waits.add(said[-1])
                log.warning("%s is not registered after %.0f s: %s", entry.name, now - began, said[-1])

    async def _watch(self, entry: _Process) -> None:
        """Waits for the end of one process, and ends what user code has started there.

        If the node died, begins to write that to etcd, and to start another one in its place if `_replace()` says so.
        """
        watching = [
            asyncio.ensure_future(self._report_unregistered(entry)),
            asyncio.ensure_future(self._report_stalls(entry)),
        ]
        try:
            entry.code = code = await entry.process.wait()
            end_group(entry.process.pid)  # what user code started there, such as workers of a pool
        finally:
            os.close(entry.pipe)
            await cancel_and_wait(*watching)
            for each in watching:
                if not each.cancelled() and (error := each.exception()) is not None:
                    log.error("watching node %s failed", entry.name, exc_info=error)
        left = lastwords.read(entry.folder)
        if code != 0 or (left is not None and not left.intended):  # else it left, and wrote that itself
            record = GoneRecord(
                reason=f"killed by {self._explain_signal(-code)}" if code < 0 else f"exited with code {code}",
                running_code=left.ran if left is not None else (),
                at=_crash_place(entry.log_path, -code),
                intended=self._stopping or (left is not None and left.intended),
                writer=f"launcher {os.getpid()}",
            )
            entry.death = record
            log.info("node %s (process %d) %s", entry.name, entry.process.pid, record.how_it_ended)
            _start_task(self._writing_ends, self._write_gone(entry.node_id, record), f"write the end of {entry.name}")
            if not self._stopping and self._replace():
                _start_task(self._replacing, self._replace_dead(entry), f"replace {entry.name}")
        shutil.rmtree(entry.folder, ignore_errors=True)
        self._runtime.note_node_ended(self._entry.name, entry.log_path)

    async def _replace_dead(self, dead: _Process) -> None:
        """Starts another node in place of a dead one, unless too many died early; reaps what the dead one left."""
        await self._start_another(dead)
        # While a node is started, this process adopts orphans: those of the dead node would stay zombies.
        await reap_session(dead.process.pid)

    async def _start_another(self, dead: _Process) -> None:
        """Starts a node in place of one that died, with its devices, unless too many died early in that place."""
        early = dead.early + 1 if time.monotonic() - dead.registered_at < _LIVED_S else 0
        while (pause_s := pause_before_another(early)) is not None:
            if early > 1:
                log.warning("another node is started in place of %s in %g s: %d died early", dead.name, pause_s, early)
            await asyncio.sleep(pause_s)
            if not self._replace():
                return
            try:
                name = f"n{await self._take_numbers(1)}"
                async with self._forkserver() as server:
                    await self._start(server, name, dead.devices, dead.sharing, early)
            except (TaskGraphError, OSError) as error:  # etcd or this host refuses for now
                early += 1
                log.warning("no node is started in place of %s yet: %s", dead.name, error)
            else:
                log.info("node %s is started in place of %s", name, dead.name)
                return
        log.warning(
            "no other node is started in place of %s: %d of them, one after the other, could not be started, or died "
            "before they had been in the job for %g s; the log of %s is %s",
            dead.name,
            early,
            _LIVED_S,
            dead.name,
            dead.log_path,
        )

    def _explain_signal(self, number: int) -> str:
        """Names the signal that ended a node. Says, and counts, if the kernel sent it because memory was used up."""
        before, now = self._oom_kills, host.oom_kills() if number == signal.SIGKILL else None
        if before is None or now is None or now - before <= self._by_oom:
            return signal_name(number)
        self._by_oom += 1
        return f"{signal_name(number)}, {OUT_OF_MEMORY} (the kernel killed {now - before} of its control group so far)"

    async def _write_gone(self, node: str, record: GoneRecord) -> None:
        """Writes `gone/{node}` and revokes the node's lease, so that others need not wait until it expires."""
        gone, spec = self._keys.gone(node), self._keys.spec
        read = Get(self._keys.node(node))
        until, reported = time.monotonic() + _WRITE_S, set[str]()
        while True:
            try:
                if revision := await self._spec_revision():
                    # A node that died before it registered has no key. Where its registration is still on its way to
                    # etcd it counts for nothing, since it is gone already.
                    as_read = (Compare(gone, 0), Compare(spec, revision))
                    txn = Txn(as_read, (Put(gone, record.to_bytes()), read), (read,))
                    found = list((await self._coordinator.txn(txn)).reads[0])
                else:
                    kv = await self._coordinator.get(self._keys.node(node))
                    found = [kv] if kv is not None else []
                for kv in found:
                    await self._coordinator.revoke(NodeRecord.from_bytes(kv.value).lease)
                return
            except CoordinationError as error:
                if (why := str(error)) not in reported:
                    reported.add(why)
                    log.warning("etcd does not take that node %s %s: %s", node, record.how_it_ended, why)
                if time.monotonic() > until:
                    return
                await asyncio.sleep(_RETRY_S)

    async def _spec_revision(self) -> int:
        """Returns the revision of the run's `spec`; 0: a node's end is not to be written.

        The job may have ended, with its nodes; etcd may have lost it; or another run may have this name now.
        """
        spec, status = await self._coordinator.get(self._keys.spec), await self._coordinator.get(self._keys.status)
        if spec is None or status is None:
            return 0
        try:
            run, state = JobSpec.from_bytes(spec.value).run, StatusRecord.from_bytes(status.value).state
        except DecodeError:  # no spec or status of ours: the job is lost
            return 0
        over = self._stopping and state != JobStatus.RUNNING
        return 0 if over or self._entry.run not in ("", run) else spec.mod_revision

    async def wait(self, timeout_s: float | None) -> None:
        """Waits until all nodes have ended and none is to be replaced.

        Args:
            timeout_s: None: without a limit.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while going := self._watches | self._replacing:
                    await asyncio.wait(going)

    async def wait_to_end(self, timeout_s: float, code_s: float) -> None:
        """Waits for nodes to end by themselves after the job's end, and logs which of them died in `teardown()`.

        Args:
            timeout_s: limit without user code running.
            code_s: limit for the last user code, `teardown()`.
        """
        self._ended_well = True
        until = time.monotonic() + timeout_s
        most = until + code_s
        while self.alive_count and time.monotonic() < min(until, most):
            await self.wait(_RETRY_S)
            if self._running_code():
                until = time.monotonic() + timeout_s
        for entry in self._processes.values():
            death = entry.death
            if death is not None and not death.intended and any(ran.where == "teardown" for ran in death.running_code):
                log.warning("node %s %s: what that was to save may not be there", entry.name, death.how_it_ended)

    def _running_code(self) -> dict[str, tuple[RunningCode, ...]]:
        """Returns the user code that nodes run, by their names; not of nodes that a signal halted."""
        found = {}
        for entry in self._processes.values():
            if entry.code is None and not is_stopped(entry.process.pid):
                left = lastwords.read(entry.folder)
                if left is not None and left.ran:
                    found[entry.name] = left.ran
        return found

    def _is_starting(self, name: str) -> bool:
        """Returns True if a node's key has not been seen in etcd yet."""
        return any(each.name == name and each.registered_at == math.inf for each in self._processes.values())

    async def drain_or_kill(self, within_s: float) -> None:
        """Asks every node to hand over and leave; kills those that have not after `within_s`."""
        self._stopping = True
        await cancel_and_wait(*self._replacing)
        self._ask_to_leave()
        await self.wait(within_s)
        self.kill_now()

    async def stop(self, grace_s: float, *, tell: bool = True) -> None:
        """Ends every node: lets it hand over and leave; after `grace_s` it gets SIGKILL.

        Args:
            tell: wait a moment until etcd has the ends of killed nodes; False: there is no etcd left.
        """
        self._stopping = True
        try:
            await cancel_and_wait(*self._replacing)
            if grace_s > 0:
                self._ask_to_leave()
                await self.wait(grace_s)
        finally:  # also if this is cancelled; a node that is stopped (SIGSTOP) obeys nothing but SIGKILL
            if self._ended_well:
                running = self._running_code()
                for name in self.pids():
                    ran = f" while it runs {' and '.join(map(str, running[name]))}" if name in running else ""
                    if not ran and self._is_starting(name):
                        log.info("node %s was still starting when the job ended", name)
                        continue
                    log.warning("node %s has not ended with the job, and is killed%s", name, ran)
            self.kill_now()
            try:
                await asyncio.gather(*self._watches, return_exceptions=True)
                if self._writing_ends:
                    await asyncio.wait(self._writing_ends, timeout=_LAST_WRITE_S if tell else 0.0)
                await cancel_and_wait(*self._writing_ends)
            finally:  # also if this is cancelled again
                for writing in self._writing_ends:
                    writing.cancel()
                if self._sockets is not None:
                    self._sockets.remove()
                    self._sockets = None

    def kill_now(self) -> None:
        """Sends SIGKILL to all nodes."""
        for entry in self._processes.values():
            if entry.code is None:
                signal_child(entry.process, signal.SIGKILL)

    def _ask_to_leave(self) -> None:
        """Asks nodes by the pipe: a signal would be their second one if their whole group had got one already."""
        for entry in self._processes.values():
            if entry.code is None:
                with contextlib.suppress(OSError):  # it has ended
                    os.write(entry.pipe, b"leave\n")


def pause_before_another(early: int) -> float | None:
    """Returns the pause before a dead node is replaced, in seconds; None: it is not replaced.

    Args:
        early: early deaths and failed starts in its place, one after the other.
    """
    if early > _REPLACEMENTS:
        return None
    return _REPLACE_S * 2 ** (early - 1) if early else 0.0


def _start_task(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None], name: str) -> None:
    """Starts an asyncio task, which is in the set `tasks` until it is done."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _read_end(path: Path, size_bytes: int) -> str:
    """Reads the last bytes of a file, as text."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size_bytes))
        return file.read().decode(errors="replace")


def _crash_place(log_path: Path, number: int) -> str:
    """Returns the line of Python at which this signal ended a node; "": its log does not say."""
    try:
        return lastwords.crash_place(_read_end(log_path, _CRASH_BYTES), number)
    except OSError:
        return ""
