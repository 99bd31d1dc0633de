"""A node as a process: connects, loads the driver, serves, and really ends.

    python -P launch/begin.py taskgraph.node.process FD     (how launchers start it; the configuration comes by socket
    FD)

Exit codes: 0 the job is over, or the node drained; 1 it cannot go on; 3 etcd cannot be reached; 4 its driver differs
from the submitted one; 5 its CUDA device is lost; 130 and 143 ended at once by a signal. `NodeConfig.drained_code`, if
it is not 0, takes the place of 0, 130 and 143 unless the job is over.

The launcher tells a node to leave by their pipe, not by a signal: if a whole process group gets SIGTERM, another one
from the launcher would be the second, which ends a node at once.
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
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import uvloop

import taskgraph.coordination.etcd  # noqa: F401  # the fork server loads it once for all nodes
from taskgraph.coordination.api import Coordinator, WatchCompacted
from taskgraph.coordination.opening import open_coordinator
from taskgraph.device.cuda import bound_memory, device_count
from taskgraph.device.visible import VISIBLE
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import (
    CoordinationError,
    FingerprintMismatch,
    JobError,
    TaskGraphError,
    Unavailable,
    no_thread_text,
)
from taskgraph.graph.values import begin_digest, verify
from taskgraph.jobs import Job
from taskgraph.network.tls import Tls
from taskgraph.node.certificate_expiry import CertificateExpiryWatch
from taskgraph.node.config import NodeConfig
from taskgraph.node.control import ControlServer
from taskgraph.node.forkserver import serve
from taskgraph.node.garbage import search_garbage_less_often
from taskgraph.node.inject import injection_point
from taskgraph.node.life import NodeLife
from taskgraph.node.loop import NodeLoop
from taskgraph.node.membership.deviceloss import DeviceLost
from taskgraph.node.node import Node
from taskgraph.node.ready_file import keep_ready_file
from taskgraph.node.sockets import keep_sockets
from taskgraph.node.usercode import lastwords
from taskgraph.node.usercode.uncaught import set_reporter, silence_expected_ends
from taskgraph.observe.events import EventLog, keep_events
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Get, Txn
from taskgraph.protocol.records import JobStatus, StatusRecord
from taskgraph.protocol.view import JobView
from taskgraph.system.alongside import alongside
from taskgraph.system.processes import end_children
from taskgraph.system.signals import StopSignals
from taskgraph.system.streams import DroppingOutput
from taskgraph.transport.hello import token_mark
from taskgraph.transport.stream import StreamTransport

__all__ = ["end_on_sigterm", "main", "run_node", "wait_for_job"]

log = logging.getLogger("taskgraph.node")

OK, CANNOT_GO_ON, UNREACHABLE, OTHER_DRIVER, DEVICE_LOST = 0, 1, 3, 4, 5
_LOG_AGAIN_S = 5.0
_ETCD_RETRY_S = 0.5
_PARENT_CHECK_S = 1.0
"""How often the parent is checked: a child of the launcher may hold the pipe open, which hides the launcher's death."""
_LAST_READ_S = 2.0
"""Time to read the last events of an etcd that ended."""
_EXIT_HANDLERS_S = 2.0
_FILES = 65_536
"""Open files that a node may have, if the system allows as many. Not more: a program that closes all possible
descriptors takes time for each."""


async def run_node(config: NodeConfig, lost_output: DroppingOutput | None = None) -> int:
    """Runs one node to its end; returns the exit code.

    Args:
        lost_output: knows which output the streams of this process dropped, for an event.
    """
    try:
        async with _connected(config) as coordinator:
            spec, revision = await wait_for_job(coordinator, config.job)
            if config.path:
                sys.path[:] = config.path  # not earlier: Python's own modules must not be found beside a driver
            job = spec.load_job()
            return await _run(config, coordinator, spec, revision, job, lost_output)
    except FingerprintMismatch as error:
        return _print_and_return(f"refused: {error}", OTHER_DRIVER)
    except CoordinationError as error:
        return _print_and_return(str(error), UNREACHABLE)
    except DeviceLost as error:
        return _print_and_return(str(error), DEVICE_LOST)
    except TaskGraphError as error:
        return _print_and_return(str(error), CANNOT_GO_ON)


@asynccontextmanager
async def _connected(config: NodeConfig) -> AsyncIterator[Coordinator]:
    """Connects to etcd, or to a coordinator in its place, for a block.

    A launched node waits until it answers, since its launcher has reached it.

    Raises:
        CoordinationError: etcd refuses; or it does not answer a node without a launcher, whose address may be wrong.
    """
    logged = False
    while True:
        try:
            coordinator = await open_coordinator(config.etcd, config.tls)
            break
        except Unavailable as error:
            if not config.parent_pid:
                raise
            if not logged:
                log.warning("waiting for etcd, which the launcher has reached: %s", error)
                logged = True
            await asyncio.sleep(_ETCD_RETRY_S)
    try:
        yield coordinator
    finally:
        await coordinator.close()


def _print_and_return(text: str, code: int) -> int:
    """Prints why the node ends, and returns its exit code."""
    print(f"taskgraph node: {text}", file=sys.stderr, flush=True)
    return code


def _print_last(text: str) -> None:
    """Prints why the node ends. It uses no logger, since user code may have silenced all loggers."""
    with contextlib.suppress(OSError, ValueError):  # user code may have closed the stream
        _print_and_return(text, CANNOT_GO_ON)


async def wait_for_job(coordinator: Coordinator, name: str) -> tuple[JobSpec, int]:
    """Waits for the job's spec while the job needs nodes; returns it with its revision. Logs the wait now and then.

    A finished job needs nodes until its results are collected: all nodes that had them may have died.

    Raises:
        CoordinationError: etcd refuses. (If etcd does not answer, the node waits.)
    """
    keys = Keys(name)
    while True:
        revision = 0
        try:
            read = await coordinator.txn(Txn(success=(Get(keys.spec), Get(keys.status), Get(keys.collected))))
            spec, status, collected = read.reads
            state = StatusRecord.from_bytes(status[0].value).state if status else ""
            if spec and (state == JobStatus.RUNNING or (state == JobStatus.FINISHED and not collected)):
                return JobSpec.from_bytes(spec[0].value), spec[0].mod_revision
            revision = read.revision
            log.info("waiting for job %r to be submitted%s", name, f" again (it has {state})" if state else "")
        except Unavailable as error:
            log.warning("waiting for etcd: %s", error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOG_AGAIN_S):
                await _wait_for_change(coordinator, keys.status, revision)


async def _wait_for_change(coordinator: Coordinator, key: str, revision: int) -> None:
    """Waits until `key` may have been written after `revision`; 0: it is unknown, waits for `_LOG_AGAIN_S`."""
    if not revision:
        await asyncio.sleep(_LOG_AGAIN_S)
        return
    watch = coordinator.watch(key, revision + 1)
    try:
        async for batch in watch:
            if batch.events:
                return
    except WatchCompacted:
        return
    finally:
        await watch.aclose()


async def _run(
    config: NodeConfig,
    coordinator: Coordinator,
    spec: JobSpec,
    spec_revision: int,
    job: Job,
    lost_output: DroppingOutput | None,
) -> int:
    """Runs the node; returns the exit code. Opens all that it needs before (sockets, services), and closes it."""
    token = bytes.fromhex(config.token)
    listening = config.listening
    tls = Tls.of(config.node_tls)
    if tls is not None and job.elastic is not None and job.elastic.communicator:
        raise JobError(
            f"communicator={job.elastic.communicator!r} sends sums without TLS, and this node was started with TLS: "
            f"leave one of them out"
        )
    events = EventLog(config.name)
    async with AsyncExitStack() as stack:
        folder = config.folder
        if folder is not None:
            folder.mkdir(mode=0o700)
            _keep_files_of_pools(folder)
            lastwords.start(folder)
            stack.callback(_remove_sockets, config)
        transport = StreamTransport(
            job.settings,
            token,
            job=spec.name,
            verify=verify,
            digesting=begin_digest,
            unix_dir=folder,
            tcp_host=listening.host or None,
            tcp_ports=listening.ports_to_try(),
            advertise=listening.advertised or None,
            tls=tls,
            insecure=listening.insecure,
        )
        devices = device_count()
        bound_memory(devices, job.settings.device_memory, config.sharing)
        control = ControlServer(events, token)
        stack.push_async_callback(control.stop)
        node = (Node if job.elastic is None else job.elastic.node())(
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
                tcp_ports=listening.ports_to_try(),
                advertise=listening.advertised or None,
                tls=tls,
                insecure=listening.insecure,
            ),
            token_mark=token_mark(token),
            devices=devices,
            point=injection_point(),
            own_process=True,
            keep_results=config.collects,
        )
        control.attach(node)
        _handle_signals(config, node)
        loop = asyncio.get_running_loop()
        if lost_output is not None:
            lost_output.report_to(partial(_emit_soon, loop, events, "log"))
        set_reporter(partial(_emit_soon, loop, events, "raised"))
        stack.callback(set_reporter, None)
        if folder is not None:
            await stack.enter_async_context(_running_beside(keep_sockets(folder, (transport, control), events)))
        if config.ready_file:
            stack.enter_context(keep_ready_file(Path(config.ready_file), node))
        if tls is not None:
            await stack.enter_async_context(
                _running_beside(CertificateExpiryWatch(tls, events, config.name, node.host).run())
            )
        kept = job.settings.events_kept
        keeping = keep_events(
            events, coordinator, spec.name, spec_revision=spec_revision, node_id=config.node_id, kept=kept
        )
        async with _running_beside(keeping):
            gc.freeze()  # imported modules live as long as the process: no collection should look at them again
            await node.run()
        ended = node.keeper.view.status
        if ended is not None and not config.parent_pid:
            _log_end(spec.name, ended.record)
        return config.drained_code if node.draining and not _is_over(node.keeper.view) else OK


def _is_over(view: JobView) -> bool:
    """True if the view shows that the job needs no nodes any longer: it is over, or replaced."""
    return view.superseded or (view.revision > 0 and not view.has_work)


def _log_end(job: str, status: StatusRecord) -> None:
    """Logs how the job ended, for a node without a launcher that would print it."""
    if status.state == JobStatus.FAILED:
        log.error("job %r failed: %s", job, "\n\n".join(filter(None, (status.reason, status.traceback.rstrip()))))
    elif status.state == JobStatus.CANCELLED:
        log.warning("job %r was ended: %s", job, status.reason)


def _emit_soon(loop: asyncio.AbstractEventLoop, events: EventLog, kind: str, text: str) -> None:
    """Emits an event from any thread."""
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(events.emit, kind, text)


@contextlib.asynccontextmanager
async def _running_beside(service: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs a service beside a block. An error of the service is logged, and the node goes on."""
    async with alongside(service) as (task,):
        task.add_done_callback(_log_failed)
        yield


def _log_failed(service: asyncio.Future[None]) -> None:
    if not service.cancelled() and (error := service.exception()) is not None:
        log.error("a service failed", exc_info=error)


def _keep_files_of_pools(folder: Path) -> None:
    """Puts the sockets of `multiprocessing` into the node's own directory, which is always removed at the end.

    By default a fork server or a manager would remove them only when Python exits normally.
    """
    config = getattr(multiprocessing.process.current_process(), "_config", None)  # its children get it, too
    if isinstance(config, dict):
        config.setdefault("tempdir", str(folder))


def _remove_sockets(config: NodeConfig, *, launcher_gone: bool = False) -> None:
    """Removes the node's directory; without a launcher, which may start more nodes there, also its empty parent."""
    if config.folder is None:
        return
    shutil.rmtree(config.folder, ignore_errors=True)
    if launcher_gone or not config.parent_pid or os.getppid() != config.parent_pid:
        with contextlib.suppress(OSError):  # other nodes have folders there
            config.folder.parent.rmdir()


def end_on_sigterm(config: NodeConfig | None = None, *, drained_code: int = 0) -> None:
    """Makes SIGTERM end this process at once, until there is a node: a container's first process would ignore it.

    The exit code is `drained_code`; 0: 143.
    """

    def end(number: int, _: object) -> None:
        if config is not None:
            _remove_sockets(config)
        _exit(drained_code or 128 + number)

    signal.signal(signal.SIGTERM, end)


_leave: Callable[[], object] | None = None
"""Makes the node of this process drain; may be called in any thread. None: there is no node yet."""


_view: JobView | None = None
"""The view of the node of this process."""


def _handle_signals(config: NodeConfig, node: NodeLife) -> None:
    """Makes SIGTERM, SIGINT and the launcher's order drain the node; a later signal ends the process at once."""
    global _leave, _view
    orders, drained = StopSignals(), False

    def handle(number: int) -> None:
        nonlocal drained
        if not orders.is_new(number):
            return
        if drained:
            _remove_sockets(config)
            _exit(config.drained_code or 128 + number)
        drained = True
        node.drain(signal.Signals(number).name)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    _view = node.keeper.view
    _leave = partial(loop.call_soon_threadsafe, node.drain, "its launcher ends")


def _follow_parent(config: NodeConfig) -> None:
    """Ends this process when its launcher ends, and drains the node when the launcher orders it by the pipe.

    This runs in a thread of its own, since the event loop may be stuck in user code.
    """
    poll = select.poll()
    if config.parent_fd >= 0:
        poll.register(config.parent_fd, select.POLLIN | select.POLLHUP)
    while True:
        orders = [os.read(fd, 4096) for fd, _ in poll.poll(_PARENT_CHECK_S * 1000)]
        if b"" in orders or (config.parent_pid and os.getppid() != config.parent_pid):
            _remove_sockets(config, launcher_gone=True)
            _exit(_print_and_return("the launcher is gone", CANNOT_GO_ON))
        if not orders:
            continue
        if _leave is None:
            _remove_sockets(config)
            _exit(128 + signal.SIGTERM)
        with contextlib.suppress(RuntimeError):  # its loop has ended
            _leave()


def _end_with_etcd(gone: Callable[[], bool], config: NodeConfig) -> None:
    """Waits, in a thread, until the job's etcd has ended for good; then ends this process unless its job is over."""
    while not gone():
        time.sleep(_PARENT_CHECK_S)
    time.sleep(_LAST_READ_S)
    if _view is None or _view.status is None or _view.has_work:  # else the node ends by itself
        _remove_sockets(config)
        _exit(_print_and_return("the job has ended with its launcher, whose etcd it was in", UNREACHABLE))


def _exit(code: int, *, intended: bool = True) -> NoReturn:
    """Ends the process now, even if a compute never returns. Without a launcher it ends the children, too.

    Args:
        intended: False if user code may have ended the process.
    """
    if intended:
        lastwords.intend_end()
    # The reader may be gone, and a signal may interrupt a write.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        sys.stdout.flush()
        sys.stderr.flush()
    end_children()
    os._exit(code)


def _run_exit_handlers(code: int) -> None:
    """Runs handlers of `atexit`, as coverage, profilers and trackers have, and ends the process if they take long."""
    overdue = threading.Timer(_EXIT_HANDLERS_S, _exit, (code,))
    overdue.daemon = True
    try:
        overdue.start()
        atexit._run_exitfuncs()
    except BaseException as error:  # also a SystemExit of theirs
        log.warning("a handler of atexit raised", exc_info=error)
    overdue.cancel()


def log_to_stderr() -> None:
    """Logs to standard error. A second call changes nothing."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)


def allow_more_files() -> None:
    """Raises the limit of open files, which is 1024 on many systems."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # macOS has another limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def main(config: NodeConfig, *, gone: Callable[[], bool] | None = None) -> NoReturn:
    """Runs a node and ends the process.

    Args:
        gone: returns True once the job's etcd has ended for good; None: the etcd does not end with a launcher.
    """
    lost_output = DroppingOutput()
    log_to_stderr()
    with contextlib.suppress(OSError):  # a copy, since user code may replace standard error
        faulthandler.enable(os.dup(2), all_threads=False)
    silence_expected_ends()
    allow_more_files()
    search_garbage_less_often()  # a driver may change that later
    if config.devices is not None:
        os.environ[VISIBLE] = config.devices  # before the driver is loaded: CUDA reads it once
    if not config.node_id:
        config = dataclasses.replace(config, node_id=NodeConfig.new_id(config.name))
    end_on_sigterm(config, drained_code=config.drained_code)
    if config.parent_fd >= 0 or config.parent_pid:
        threading.Thread(target=_follow_parent, args=(config,), name="launcher", daemon=True).start()
    if gone is not None:
        threading.Thread(target=_end_with_etcd, args=(gone, config), name="etcd", daemon=True).start()
    code, intended = CANNOT_GO_ON, True
    try:
        code = uvloop.run(run_node(config, lost_output), loop_factory=NodeLoop)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except SystemExit as error:
        _print_last(f"user code called sys.exit({error.code!r}) in an asyncio task of its own, which ends the process")
        intended = False
    except BaseException as error:
        why = no_thread_text(error)
        _print_last(f"the node cannot go on: {why}" if why else f"the node cannot go on\n{traceback.format_exc()}")
        intended = False
    if code in (OK, config.drained_code):
        lastwords.intend_end()
        _run_exit_handlers(code)
    _exit(code, intended=intended)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].isdigit():
        sys.exit("taskgraph.node.process FD is how launchers begin nodes; by hand: taskgraph node")
    serve(socket.socket(fileno=int(sys.argv[1])), main)
