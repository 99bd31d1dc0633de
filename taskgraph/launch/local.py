"""Node processes on this host: started, watched, ended.

When a node's process ends, its launcher is the first to know: it says so in etcd (`gone/{node}`) and revokes the
node's lease, within milliseconds. Where it is asked to, it starts another one in place of one that died. Everything it
started ends when it does, however it ends: each node holds the read end of a pipe whose write end is ours.
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
from taskgraph.launch.devices import deal, host_devices, sharing
from taskgraph.launch.forkserver import ForkServer, NodeProcess
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.launch.standing import Standing, standing_text, stopped
from taskgraph.launch.submit import UNKNOWN_PAUSE_S, UNKNOWN_TRIES
from taskgraph.network.listening import NOWHERE, Listening
from taskgraph.node.config import NodeConfig
from taskgraph.node.usercode import lastwords
from taskgraph.observe.events import Event, put_events
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Compare, Get, Put, Txn
from taskgraph.protocol.records import OUT_OF_MEMORY, GoneRecord, NodeRecord, Ran, State, StatusRecord
from taskgraph.system import host
from taskgraph.system.alongside import ended
from taskgraph.system.files import HeldFolder
from taskgraph.system.processes import Child, end_group, reap_session, signal_name, tell_child

__all__ = ["LocalNodes", "pause_before_another"]

log = logging.getLogger("taskgraph.launch")

_TAIL_LINES, _TAIL_BYTES = 20, 4000
_CRASH_BYTES = 64 << 10
"""More than the stack that `faulthandler` writes: 100 frames at most, and the names of extension modules."""
_RETRY_S = 0.25
_TELL_S = 30.0
"""etcd is told of a node's end for as long: by then, others have seen for themselves that its key is absent."""
_LAST_TELL_S = 1.0
"""The same, once we are told to stop."""
_REGISTERS_S = 5.0
"""A node that is not registered for so long is looked at, and again each time. Most are there in a second or two."""
_KEY_LOOK_S = 1.0
"""How often its key is looked for: one that was there may vanish, with its lease, in a pause of etcd."""
_WARNED = re.compile(r"^\S+ \S+ taskgraph\.\S+ WARNING (.*)$", re.MULTILINE)
"""What a node says that it waits for, in its log."""
_LOOK_S = 1.0
"""How often it is looked whether the event loop of a node stands still."""
_LIVED_S = 10.0
"""A node that was registered for as long was not ended by how it was started: another one takes its place at once."""
_REPLACE_S = 1.0
"""Else that waits for so long, and twice as long each time."""
_REPLACEMENTS = 5
"""So many that died early, one in place of the other: there is no sixth."""


@dataclasses.dataclass
class _Process:
    name: str
    node_id: str
    process: Child
    pipe: int
    log_path: Path
    folder: Path  # of its sockets, and of its last words
    devices: str | None = None  # as they were dealt to it
    sharing: int = 1
    early: int = 0  # nodes that died early, one after the other, in whose place it is
    came: float = math.inf  # when its key was found: to load a driver may take long, and not go well
    code: int | None = None
    death: GoneRecord | None = None
    stands: str = ""  # where its event loop stands still


class LocalNodes:
    """The nodes one launcher started for one job.

    Args:
        collects: we run the job: its results are ours to collect, and nodes keep them for us.
        ahead: what the first of them are forked from, where that was started ahead; it is ended then.
        replace: asked of each node that died, and not of one that left: True has another one started in its place.
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
        self._telling: set[asyncio.Task[None]] = set()
        self._sockets: HeldFolder | None = None
        self._told_waits: set[str] = set()
        self._stopping = False
        self._ended_well = False
        self._oom_kills = host.oom_kills()
        self._by_oom = 0  # nodes that ended so

    async def start(self, count: int) -> None:
        """Starts that many nodes, named n1, n2, ...: names that no other of this job has or had.

        Raises:
            CoordinationError: etcd refuses, or does not say what becomes of its writes.
            NotStarted: a process cannot be started.
        """
        first = await self._take_numbers(count)
        if self._sockets is None:
            self._sockets = self._runtime.sockets(self._entry.name)
        devices = deal(host_devices() if self._deal_devices else (), first - 1, count)
        async with self._forkserver() as server:
            for number, own, among in zip(itertools.count(first), devices, sharing(devices)):
                await self._start(server, f"n{number}", own, among)

    def _forkserver(self) -> contextlib.AbstractAsyncContextManager[ForkServer]:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            return contextlib.aclosing(ahead)
        return ForkServer(self._runtime.folder(self._entry.name), self._blas_threads)

    async def _take_numbers(self, count: int) -> int:
        """The first of so many numbers that this launcher alone gets, though others start nodes at this moment.

        An etcd that is away is waited for: it has just taken the job.
        """
        key, unknown, told = self._keys.names, 0, False
        while True:
            try:
                found = await self._coordinator.get(key)
                given, revision = (int(found.value), found.mod_revision) if found is not None else (0, 0)
                txn = Txn((Compare(key, revision),), (Put(key, str(given + count).encode()),))
                if (await self._coordinator.txn(txn)).succeeded:
                    return given + 1
            except Unavailable as error:
                if not told:
                    log.warning("nodes are started once etcd answers: %s", error)
                    told = True
                await asyncio.sleep(_RETRY_S)
            except OutcomeUnknown:  # then these numbers may be nobody's
                if (unknown := unknown + 1) == UNKNOWN_TRIES:
                    raise
                await asyncio.sleep(UNKNOWN_PAUSE_S)

    async def _start(self, server: ForkServer, name: str, devices: str | None, among: int, early: int = 0) -> None:
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
        started = await self._spawn(server, config, self._runtime.folder(self._entry.name) / f"{name}.log")
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
        _keep(self._watches, self._watch(entry), f"watch {name}")

    async def _spawn(self, server: ForkServer, config: NodeConfig, log_path: Path) -> NodeProcess:
        return await server.start(config, log_path)

    @property
    def alive(self) -> int:
        return sum(1 for p in self._processes.values() if p.code is None)

    def ids(self) -> frozenset[str]:
        """As they are registered, those that ended, too."""
        return frozenset(p.node_id for p in self._processes.values())

    def pids(self) -> dict[str, int]:
        return {p.name: p.process.pid for p in self._processes.values() if p.code is None}

    def logs(self) -> dict[str, Path]:
        """Where each node's output goes."""
        return {p.name: p.log_path for p in self._processes.values()}

    def codes(self) -> dict[str, int]:
        """Exit codes of the nodes that ended; negative: the signal that ended it."""
        return {p.name: p.code for p in self._processes.values() if p.code is not None}

    def deaths(self) -> dict[str, GoneRecord]:
        """How nodes ended that did not leave by themselves, in the order they were started."""
        return {p.name: p.death for p in self._processes.values() if p.death is not None}

    def log_tail(self, name: str) -> str:
        """The end of what a node printed."""
        path = self._processes[name].log_path
        try:
            return "\n".join(_end_of(path, _TAIL_BYTES).splitlines()[-_TAIL_LINES:])
        except OSError as error:
            return f"({path} cannot be read: {error})"

    @property
    def stands(self) -> tuple[str, ...]:
        """Where the event loops of nodes stand still, or did when they ended: one line each."""
        return tuple(entry.stands for entry in self._processes.values() if entry.stands)

    async def _look(self, entry: _Process) -> None:
        """Tells, until cancelled, where the event loop of a node stands still."""
        standing = Standing(entry.folder, entry.process.pid)
        while True:
            await asyncio.sleep(_LOOK_S)
            if (found := standing.look(time.monotonic())) is None:
                if not standing.reported:
                    entry.stands = ""
                continue
            ran, for_s = found
            text = entry.stands = standing_text(entry.name, ran, for_s, in_thread=standing.in_thread)
            event = Event(time.time(), entry.name, "stands", text, task=ran.task, epoch=max(ran.epoch, 0))
            log.info("%s", text)
            key = self._keys.event(f"{event.at:017.6f}-launcher{os.getpid()}-{entry.name}")
            with contextlib.suppress(CoordinationError):
                if revision := await self._run_to_tell():
                    await self._coordinator.txn(put_events(self._keys, revision, [(key, event)]))

    async def _look_for_key(self, entry: _Process) -> None:
        """Tells, until cancelled, why a node is not registered: nobody else can, where etcd takes no writes."""
        began = absent_since = time.monotonic()
        while True:
            await asyncio.sleep(_KEY_LOOK_S)
            asked = time.monotonic()
            try:
                if await self._coordinator.get(self._keys.node(entry.node_id)) is not None:
                    entry.came = time.monotonic()
                    return
            except CoordinationError:  # whoever follows the job waits for etcd, too, and says so
                absent_since = time.monotonic()
                continue
            now = time.monotonic()
            if now - asked > _KEY_LOOK_S:  # etcd was away: the node may have been there, and has to come back
                absent_since = now
            if now - absent_since < _REGISTERS_S:
                continue
            absent_since = now
            said = _WARNED.findall(self.log_tail(entry.name))
            if said and said[-1] not in self._told_waits:  # of several nodes mostly the same
                self._told_waits.add(said[-1])
                log.warning("%s is not registered after %.0f s: %s", entry.name, now - began, said[-1])

    async def _watch(self, entry: _Process) -> None:
        """Waits for the end of one process, and sees to it that everybody hears of it."""
        watching = [asyncio.ensure_future(self._look_for_key(entry)), asyncio.ensure_future(self._look(entry))]
        try:
            entry.code = code = await entry.process.wait()
            end_group(entry.process.pid)  # what user code started there, workers of a pool say
        finally:
            os.close(entry.pipe)
            await ended(*watching)
            for each in watching:
                if not each.cancelled() and (error := each.exception()) is not None:
                    log.error("node %s was not looked after to its end", entry.name, exc_info=error)
        left = lastwords.read(entry.folder)
        if code != 0 or (left is not None and not left.meant):  # else it left by itself, and said so
            record = GoneRecord(
                reason=f"killed by {self._killer(-code)}" if code < 0 else f"exited with code {code}",
                ran=left.ran if left is not None else (),
                at=_crashed_at(entry.log_path) if code < 0 else "",
                meant=self._stopping or (left is not None and left.meant),
                writer=f"launcher {os.getpid()}",
            )
            entry.death = record
            log.info("node %s (process %d) %s", entry.name, entry.process.pid, record.how_it_ended)
            _keep(self._telling, self._tell_gone(entry.node_id, record), f"tell of {entry.name}")
            if not self._stopping and self._replace():
                _keep(self._replacing, self._take_its_place(entry), f"replace {entry.name}")
        shutil.rmtree(entry.folder, ignore_errors=True)
        self._runtime.node_ended(self._entry.name, entry.log_path)

    async def _take_its_place(self, dead: _Process) -> None:
        await self._start_another(dead)
        # Where it died while another one was started, what it left became ours: zombies, for as long as we live.
        await reap_session(dead.process.pid)

    async def _start_another(self, dead: _Process) -> None:
        """In place of one that died, with its devices; but not where nodes there die again and again."""
        early = dead.early + 1 if time.monotonic() - dead.came < _LIVED_S else 0
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
            except (TaskGraphError, OSError) as error:  # etcd refuses, or this host does, for now
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

    def _killer(self, number: int) -> str:
        """The signal that ended a node, and whether it was the kernel's since memory was used up, as it seems."""
        before, now = self._oom_kills, host.oom_kills() if number == signal.SIGKILL else None
        if before is None or now is None or now - before <= self._by_oom:
            return signal_name(number)
        self._by_oom += 1
        return f"{signal_name(number)}, {OUT_OF_MEMORY} (the kernel killed {now - before} of its control group so far)"

    async def _tell_gone(self, node: str, record: GoneRecord) -> None:
        """Puts `gone/{node}` and revokes the node's lease: nobody has to wait until it expires."""
        gone, spec = self._keys.gone(node), self._keys.spec
        read = Get(self._keys.node(node))
        until, told = time.monotonic() + _TELL_S, set[str]()
        while True:
            try:
                if revision := await self._run_to_tell():
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
                if (why := str(error)) not in told:
                    told.add(why)
                    log.warning("cannot tell that node %s %s: %s", node, record.how_it_ended, why)
                if time.monotonic() > until:
                    return
                await asyncio.sleep(_RETRY_S)

    async def _run_to_tell(self) -> int:
        """The revision of the `spec` of the run that is to be told of a node's end; 0: there is none.

        Nodes that end because their job did leave no trace in somebody's etcd, nor do those of a job that it lost. And
        a run that was submitted under this name meanwhile must not count what the code of the one before has ended.
        """
        spec, status = await self._coordinator.get(self._keys.spec), await self._coordinator.get(self._keys.status)
        if spec is None or status is None:
            return 0
        try:
            run, state = JobSpec.from_bytes(spec.value).run, StatusRecord.from_bytes(status.value).state
        except DecodeError:  # somebody wrote something else there, which ends the job
            return 0
        over = self._stopping and state != State.RUNNING
        return 0 if over or self._entry.run not in ("", run) else spec.mod_revision

    async def wait(self, timeout_s: float | None) -> None:
        """Waits until all nodes ended by themselves, and no other ones are to take their place.

        Args:
            timeout_s: at most so long; None: for as long as it takes.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while going := self._watches | self._replacing:
                    await asyncio.wait(going)

    async def wait_to_end(self, timeout_s: float, code_s: float) -> None:
        """Waits until all nodes ended by themselves: `timeout_s` after they last ran code of the user's, the last of
        which (`teardown()`) may take `code_s`. Tells whose process that code ended: the job has its result all the
        same. From then on it is told whom `stop` kills."""
        self._ended_well = True
        until = time.monotonic() + timeout_s
        most = until + code_s
        while self.alive and time.monotonic() < min(until, most):
            await self.wait(_RETRY_S)
            if self._running():
                until = time.monotonic() + timeout_s
        for entry in self._processes.values():
            death = entry.death
            if death is not None and not death.meant and any(ran.where == "teardown" for ran in death.ran):
                log.warning("node %s %s: what that was to save may not be there", entry.name, death.how_it_ended)

    def _running(self) -> dict[str, tuple[Ran, ...]]:
        """The code of the user's that nodes run which nothing halts, by their names."""
        found = {}
        for entry in self._processes.values():
            if entry.code is None and not stopped(entry.process.pid):
                left = lastwords.read(entry.folder)
                if left is not None and left.ran:
                    found[entry.name] = left.ran
        return found

    async def leave(self, within_s: float) -> None:
        """Has every node hand over and leave; one that has not after `within_s` gets SIGKILL."""
        self._stopping = True
        await ended(*self._replacing)
        self._tell_to_leave()
        await self.wait(within_s)
        self.kill_now()

    async def stop(self, grace_s: float, *, tell: bool = True) -> None:
        """Ends every node: it is told to hand over and leave; after `grace_s` SIGKILL.

        Args:
            tell: nodes that do not leave by themselves are declared gone; False: there is no etcd any more.
        """
        self._stopping = True
        try:
            await ended(*self._replacing)
            if grace_s > 0:
                self._tell_to_leave()
                await self.wait(grace_s)
        finally:  # whoever waits here may be cancelled, and a node that is stopped (SIGSTOP) obeys nothing else
            if self._ended_well:
                running = self._running()
                for name in self.pids():
                    ran = f" while it runs {' and '.join(map(str, running[name]))}" if name in running else ""
                    log.warning("node %s has not ended with the job, and is killed%s", name, ran)
            self.kill_now()
            try:
                await asyncio.gather(*self._watches, return_exceptions=True)
                if self._telling:
                    await asyncio.wait(self._telling, timeout=_LAST_TELL_S if tell else 0.0)
                await ended(*self._telling)
            finally:  # also where somebody is in so much of a hurry that this is cancelled, too
                for telling in self._telling:
                    telling.cancel()
                if self._sockets is not None:
                    self._sockets.remove()
                    self._sockets = None

    def kill_now(self) -> None:
        """SIGKILL for all, at once; also for a second Ctrl-C."""
        for entry in self._processes.values():
            if entry.code is None:
                tell_child(entry.process, signal.SIGKILL)

    def _tell_to_leave(self) -> None:
        """By the pipe: a node that got a signal already, as all of our group may have, would take ours for a second."""
        for entry in self._processes.values():
            if entry.code is None:
                with contextlib.suppress(OSError):  # it has ended
                    os.write(entry.pipe, b"leave\n")


def pause_before_another(early: int) -> float | None:
    """How long the place of a node that died is left empty, in seconds; None: for good.

    Args:
        early: so many in that place died early, or could not be started, one after the other.
    """
    if early > _REPLACEMENTS:
        return None
    return _REPLACE_S * 2 ** (early - 1) if early else 0.0


def _keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None], name: str) -> None:
    """Begins it, and keeps it there until it is done."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _end_of(path: Path, size_bytes: int) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size_bytes))
        return file.read().decode(errors="replace")


def _crashed_at(log_path: Path) -> str:
    """The line of Python that crashed a node; "": its log does not say."""
    try:
        return lastwords.crashed_at(_end_of(log_path, _CRASH_BYTES))
    except OSError:
        return ""
