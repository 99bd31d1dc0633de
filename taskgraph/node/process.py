"""A node as a process: connects, loads the driver, serves, and really ends.

    python -P launch/begin.py taskgraph.node.process FD     (how a launcher starts them; this socket tells what to be)

Exit codes: 0 the job is over, or the node drained; 1 it cannot go on; 3 etcd cannot be reached; 4 its driver is not
the one the job was submitted with; 5 its CUDA device cannot be used any more; 130 and 143 told to end at once.

Its launcher tells it to leave by the pipe that is there for all its life, not by a signal: where a whole group of
processes gets SIGTERM, that of the launcher would be the second one here, which means something else.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import faulthandler
import gc
import logging
import multiprocessing.process
import os
import resource
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import uvloop

from taskgraph.coordination.api import Coordinator, WatchCompacted
from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.device.cuda import bound_memory, device_count
from taskgraph.device.visible import VISIBLE
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import CoordinationError, FingerprintMismatch, TaskGraphError, Unavailable, no_thread
from taskgraph.graph.values import digesting, verify
from taskgraph.jobs import Job
from taskgraph.network.tls import Tls
from taskgraph.node.config import NodeConfig
from taskgraph.node.control import ControlServer
from taskgraph.node.expiring import Expiring
from taskgraph.node.forkserver import serve
from taskgraph.node.garbage import search_garbage_less_often
from taskgraph.node.inject import injected
from taskgraph.node.loop import NodeLoop
from taskgraph.node.membership.deviceloss import DeviceLost
from taskgraph.node.node import Node
from taskgraph.node.sockets import keep_sockets
from taskgraph.node.usercode import lastwords
from taskgraph.node.usercode.ended import pass_ended_threads_over, tell_unnoticed
from taskgraph.observe.events import EventLog, keep_events
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Get, Txn
from taskgraph.protocol.records import State, StatusRecord
from taskgraph.protocol.view import JobView
from taskgraph.system.alongside import alongside
from taskgraph.system.processes import end_mine
from taskgraph.system.signals import Orders
from taskgraph.system.streams import Untaken
from taskgraph.transport.hello import mark
from taskgraph.transport.stream import StreamTransport

__all__ = ["end_on_sigterm", "main", "run_node", "wait_for_job"]

log = logging.getLogger("taskgraph.node")

OK, CANNOT_GO_ON, UNREACHABLE, OTHER_DRIVER, DEVICE_LOST = 0, 1, 3, 4, 5
_SAY_AGAIN_S = 5.0
_ETCD_AGAIN_S = 0.5
_PARENT_CHECK_S = 1.0
"""The pipe tells of the launcher's death at once, unless a process that the launcher forked still holds it."""
_LAST_READ_S = 2.0
"""What etcd told before it ended is read within this time."""
_EXIT_HANDLERS_S = 2.0
_FILES = 65_536
"""As many files a node may have open, where the system allows that. Not more: what closes all that it might have open,
as a program that it starts may do, takes as long as there are numbers."""


async def run_node(config: NodeConfig, untaken: Untaken | None = None) -> int:
    """Runs one node to its end; returns the exit code.

    Args:
        untaken: knows of what the streams of this process did not take, for an event.
    """
    try:
        async with await _connected(config) as coordinator:
            spec, revision = await wait_for_job(coordinator, config.job)
            if config.path:
                sys.path[:] = config.path  # not sooner: what Python itself needs is not to be found beside a driver
            job = spec.load_job()
            await _run(config, coordinator, spec, revision, job, untaken)
            return OK
    except FingerprintMismatch as error:
        return _say(f"refused: {error}", OTHER_DRIVER)
    except CoordinationError as error:
        return _say(str(error), UNREACHABLE)
    except DeviceLost as error:
        return _say(str(error), DEVICE_LOST)
    except TaskGraphError as error:
        return _say(str(error), CANNOT_GO_ON)


async def _connected(config: NodeConfig) -> EtcdCoordinator:
    """A node that was launched waits for an etcd that is away: its launcher, which it ends with, has reached it.

    Raises:
        CoordinationError: etcd refuses; or nobody launched this node, so that the address may be wrong.
    """
    told = False
    while True:
        try:
            return await EtcdCoordinator.connect(config.etcd, **config.tls)
        except Unavailable as error:
            if not config.parent_pid:
                raise
            if not told:
                log.warning("waiting for etcd, which the launcher has reached: %s", error)
                told = True
            await asyncio.sleep(_ETCD_AGAIN_S)


def _say(text: str, code: int) -> int:
    print(f"taskgraph node: {text}", file=sys.stderr, flush=True)
    return code


def _say_last(text: str) -> None:
    """By no logger: code of users may have silenced them all, and whoever asks why the node ended reads this."""
    with contextlib.suppress(OSError, ValueError):  # or closed this
        _say(text, CANNOT_GO_ON)


async def wait_for_job(coordinator: Coordinator, name: str) -> tuple[JobSpec, int]:
    """The spec of the running job, as soon as it is submitted, and its revision. Says now and then what it waits for.

    One that has finished still needs nodes, until its results were collected: those that had them may all be gone.

    Raises:
        CoordinationError: etcd refuses. A pause of it is waited out.
    """
    keys = Keys(name)
    while True:
        revision = 0
        try:
            read = await coordinator.txn(Txn(success=(Get(keys.spec), Get(keys.status), Get(keys.collected))))
            spec, status, collected = read.reads
            state = StatusRecord.from_bytes(status[0].value).state if status else ""
            if spec and (state == State.RUNNING or (state == State.FINISHED and not collected)):
                return JobSpec.from_bytes(spec[0].value), spec[0].mod_revision
            revision = read.revision
            log.info("waiting for job %r to be submitted%s", name, f" again (it has {state})" if state else "")
        except Unavailable as error:
            log.warning("waiting for etcd: %s", error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SAY_AGAIN_S):
                await _changed(coordinator, keys.status, revision)


async def _changed(coordinator: Coordinator, key: str, revision: int) -> None:
    """Returns when `key` was written after `revision`, or may have been."""
    if not revision:
        await asyncio.sleep(_SAY_AGAIN_S)
        return
    watch = coordinator.watch(key, revision + 1)
    try:
        async for batch in watch:
            if batch.events:
                return
    except WatchCompacted:
        return
    finally:
        await watch.aclose()  # type: ignore[attr-defined]


async def _run(
    config: NodeConfig,
    coordinator: EtcdCoordinator,
    spec: JobSpec,
    spec_revision: int,
    job: Job,
    untaken: Untaken | None,
) -> None:
    """From the first socket to the last, with a node in between."""
    token = bytes.fromhex(config.token)
    listening = config.listening
    tls = Tls.of(config.node_tls)
    events = EventLog(config.name)
    async with AsyncExitStack() as stack:
        folder = config.folder
        if folder is not None:
            folder.mkdir(mode=0o700)
            _keep_files_of_pools(folder)
            lastwords.listen(folder)
            stack.callback(_remove_sockets, config)
        transport = StreamTransport(
            job.settings,
            token,
            job=spec.name,
            verify=verify,
            digesting=digesting,
            unix_dir=folder,
            tcp_host=listening.host or None,
            tcp_ports=listening.to_try(),
            advertise=listening.told or None,
            tls=tls,
            insecure=listening.insecure,
        )
        devices = device_count()
        bound_memory(devices, job.settings.device_memory, config.sharing)
        control = ControlServer(events, token)
        stack.push_async_callback(control.stop)
        node = Node(
            spec=spec,
            job=job,
            coordinator=coordinator,
            transport=transport,
            name=config.name,
            node_id=config.node_id,
            events=events,
            control=await control.start(
                unix_path=folder / "c" if folder is not None else None,
                tcp_host=listening.host or None,
                tcp_ports=listening.to_try(),
                advertise=listening.told or None,
                tls=tls,
                insecure=listening.insecure,
            ),
            token_mark=mark(token),
            devices=devices,
            point=injected(),
            own_process=True,
            kept_on=config.collects,
        )
        control.attach(node)
        _obey(config, node)
        loop = asyncio.get_running_loop()
        if untaken is not None:
            untaken.tell(partial(_emit_soon, loop, events, "log"))
        tell_unnoticed(partial(_emit_soon, loop, events, "raised"))
        stack.callback(tell_unnoticed, None)
        if folder is not None:
            await stack.enter_async_context(_while(keep_sockets(folder, (transport, control), events)))
        if tls is not None:
            await stack.enter_async_context(_while(Expiring(tls, events, config.name, node.host).watch()))
        kept = job.settings.events_kept
        keeping = keep_events(
            events, coordinator, spec.name, spec_revision=spec_revision, node_id=config.node_id, kept=kept
        )
        async with _while(keeping):
            gc.freeze()  # what was imported lives as long as the process: no collection needs to look at it again
            await node.run()
        ended = node.keeper.view.status
        if ended is not None and not config.parent_pid:
            _tell_end(spec.name, ended.record)


def _tell_end(job: str, status: StatusRecord) -> None:
    """Who was launched has a launcher, which tells how the job ended. Of others the log is all that there is."""
    if status.state == State.FAILED:
        log.error("job %r failed: %s", job, "\n\n".join(filter(None, (status.reason, status.traceback.rstrip()))))
    elif status.state == State.CANCELLED:
        log.warning("job %r was ended: %s", job, status.reason)


def _emit_soon(loop: asyncio.AbstractEventLoop, events: EventLog, kind: str, text: str) -> None:
    """From whatever thread prints, or ends."""
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(events.emit, kind, text)


@contextlib.asynccontextmanager
async def _while(service: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs a service within a block. That it failed is told, and costs the node nothing."""
    async with alongside(service) as (task,):
        task.add_done_callback(_tell_failed)
        yield


def _tell_failed(service: asyncio.Future[None]) -> None:
    if not service.cancelled() and (error := service.exception()) is not None:
        log.error("a service failed", exc_info=error)


def _keep_files_of_pools(folder: Path) -> None:
    """Has `multiprocessing` make the sockets of user code in the node's own directory, which is removed however a node
    ends. One for itself, as it needs for its fork server (the default from Python 3.14 on) and for managers, it would
    remove at an exit of Python's alone, which a node has not.
    """
    said = getattr(multiprocessing.process.current_process(), "_config", None)  # what its children are told, too
    if isinstance(said, dict):
        said.setdefault("tempdir", str(folder))


def _remove_sockets(config: NodeConfig, *, launcher_gone: bool = False) -> None:
    """The node's own directory, and the one it is in where it was the last and no launcher is there to do that.

    A launcher may be about to start more nodes there.
    """
    if config.folder is None:
        return
    shutil.rmtree(config.folder, ignore_errors=True)
    if launcher_gone or not config.parent_pid or os.getppid() != config.parent_pid:
        with contextlib.suppress(OSError):  # not the last
            config.folder.parent.rmdir()


def end_on_sigterm(config: NodeConfig | None = None) -> None:
    """Until there is a node, SIGTERM ends this process at once; that of a container, too, which ignores it else."""

    def end(number: int, _: object) -> None:
        if config is not None:
            _remove_sockets(config)
        _exit(128 + number)

    signal.signal(signal.SIGTERM, end)


_leave: Callable[[], object] | None = None
"""Has the node leave that runs here, from any thread; None: there is none yet."""


_view: JobView | None = None
"""What the node that runs here has read of its job."""


def _obey(config: NodeConfig, node: Node) -> None:
    """SIGTERM, SIGINT and the launcher drain; a later signal ends at once."""
    global _leave, _view
    orders, drained = Orders(), False

    def handle(number: int) -> None:
        nonlocal drained
        if not orders.is_new(number):
            return
        if drained:
            _remove_sockets(config)
            _exit(128 + number)
        drained = True
        node.drain(signal.Signals(number).name)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    _view = node.keeper.view
    _leave = partial(loop.call_soon_threadsafe, node.drain, "its launcher is told to end")


def _follow_parent(config: NodeConfig) -> None:
    """Ends this process when its launcher is gone: nothing it started outlives it. Has it leave when it is told to.

    In a thread of its own, since a main loop may be stuck in user code.
    """
    poll = select.poll()
    if config.parent_fd >= 0:
        poll.register(config.parent_fd, select.POLLIN | select.POLLHUP)
    while True:
        told = [os.read(fd, 4096) for fd, _ in poll.poll(_PARENT_CHECK_S * 1000)]
        if b"" in told or (config.parent_pid and os.getppid() != config.parent_pid):
            _remove_sockets(config, launcher_gone=True)
            _exit(_say("the launcher is gone", CANNOT_GO_ON))
        if not told:
            continue
        if _leave is None:
            _remove_sockets(config)
            _exit(128 + signal.SIGTERM)
        with contextlib.suppress(RuntimeError):  # its loop has ended
            _leave()


def _end_with(gone: Callable[[], bool], config: NodeConfig) -> None:
    """Ends this process when the job is gone, with the etcd that a node would wait for."""
    while not gone():
        time.sleep(_PARENT_CHECK_S)
    time.sleep(_LAST_READ_S)
    if _view is None or _view.status is None or _view.open:  # else the node ends by itself: its job is over
        _remove_sockets(config)
        _exit(_say("the job has ended with its launcher, whose etcd it was in", UNREACHABLE))


def _exit(code: int, *, meant: bool = True) -> NoReturn:
    """Ends the process now: a compute that never returns must not keep it. Without a launcher, the children of this
    process are ended here.

    Args:
        meant: False where code of the user's may have ended it.
    """
    if meant:
        lastwords.mean()
    # Nobody may read what we say; and a signal may come while it is said.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        sys.stdout.flush()
        sys.stderr.flush()
    end_mine()
    os._exit(code)


def _run_exit_handlers() -> None:
    """Runs handlers of `atexit`, as coverage, profilers and trackers have, and ends the process if they take long."""
    overdue = threading.Timer(_EXIT_HANDLERS_S, _exit, (OK,))
    overdue.daemon = True
    try:
        overdue.start()
        atexit._run_exitfuncs()
    except BaseException as error:  # also a SystemExit of theirs
        log.warning("a handler of atexit raised", exc_info=error)
    overdue.cancel()


def log_to_stderr() -> None:
    """A node tells what it does and what it waits for; twice is no error."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)


def allow_more_files() -> None:
    """Lets this process have more files open at a time: many systems allow 1024 unless asked for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # macOS has another limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def main(config: NodeConfig, *, gone: Callable[[], bool] | None = None) -> NoReturn:
    """Runs a node and ends the process.

    Args:
        gone: for a node that nobody launched, of a job whose etcd ends with a launcher: whether that is gone.
    """
    untaken = Untaken()
    log_to_stderr()
    with contextlib.suppress(OSError):  # not another one that user code puts in the place of standard error
        faulthandler.enable(os.dup(2), all_threads=False)
    pass_ended_threads_over()
    allow_more_files()
    search_garbage_less_often()  # a driver, which is loaded later, may say otherwise
    if config.devices is not None:
        os.environ[VISIBLE] = config.devices  # before the driver is loaded: CUDA reads it once
    if not config.node_id:
        config = dataclasses.replace(config, node_id=NodeConfig.new_id(config.name))
    end_on_sigterm(config)
    if config.parent_fd >= 0 or config.parent_pid:
        threading.Thread(target=_follow_parent, args=(config,), name="launcher", daemon=True).start()
    if gone is not None:
        threading.Thread(target=_end_with, args=(gone, config), name="etcd", daemon=True).start()
    code, meant = CANNOT_GO_ON, True
    try:
        code = uvloop.run(run_node(config, untaken), loop_factory=NodeLoop)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except SystemExit as error:
        _say_last(f"user code called sys.exit({error.code!r}) in an asyncio task of its own, which ends the process")
        meant = False
    except BaseException as error:
        why = no_thread(error)
        _say_last(f"the node cannot go on: {why}" if why else f"the node cannot go on\n{traceback.format_exc()}")
        meant = False
    if code == OK:
        lastwords.mean()
        _run_exit_handlers()
    _exit(code, meant=meant)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].isdigit():
        sys.exit("taskgraph.node.process FD is how launchers begin nodes; by hand: taskgraph node")
    serve(socket.socket(fileno=int(sys.argv[1])), main)
