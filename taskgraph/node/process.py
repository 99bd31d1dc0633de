"""A node as a process: connects, loads the driver, serves, and really ends.

    python -m taskgraph.node.process CONFIG.json     (how a launcher starts one)

Exit codes: 0 the job is over, or the node drained; 1 it cannot go on; 3 etcd cannot be reached; 4 its driver is not
the one the job was submitted with; 130 and 143 told to end at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from taskgraph.coordination.api import Coordinator
from taskgraph.coordination.etcd import EtcdCoordinator
from taskgraph.driver import JobSpec
from taskgraph.errors import CoordinationError, FingerprintMismatch, TaskGraphError
from taskgraph.graph.devices import device_count
from taskgraph.graph.values import verify
from taskgraph.node.control import ControlServer
from taskgraph.node.node import Node
from taskgraph.observe.events import EventLog, keep_events
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.records import State, StatusRecord
from taskgraph.transport.endpoints import host_key, tcp_endpoint
from taskgraph.transport.stream import StreamTransport

__all__ = ["NodeConfig", "main", "run_node", "wait_for_job"]

log = logging.getLogger("taskgraph.node")

OK, CANNOT_GO_ON, UNREACHABLE, OTHER_DRIVER = 0, 1, 3, 4
_SAY_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """What a node process is told; by a file or a form, never on a command line, since it holds the token.

    Attributes:
        etcd: endpoints; tls: further arguments of `EtcdCoordinator.connect`.
        token: the job's token, hex.
        sockets: a private directory for unix sockets, or "" for none.
        listen: the host or address to listen on for TCP, or "" for none.
        parent_fd: a pipe whose end means that the launcher is gone, or -1.
    """

    job: str
    name: str
    etcd: str
    token: str
    tls: dict[str, str] = field(default_factory=dict)
    sockets: str = ""
    listen: str = ""
    parent_fd: int = -1


async def run_node(config: NodeConfig) -> int:
    """Runs one node to its end; returns the exit code."""
    try:
        coordinator = await EtcdCoordinator.connect(config.etcd, **config.tls)  # type: ignore[arg-type]
    except CoordinationError as error:
        print(f"taskgraph node: {error}", file=sys.stderr)
        return UNREACHABLE
    async with coordinator:
        try:
            spec = await wait_for_job(coordinator, config.job)
            job = spec.load_job()
            return await _run(config, coordinator, spec, job)
        except FingerprintMismatch as error:
            print(f"taskgraph node: refused: {error}", file=sys.stderr)
            return OTHER_DRIVER
        except CoordinationError as error:
            print(f"taskgraph node: {error}", file=sys.stderr)
            return UNREACHABLE
        except TaskGraphError as error:
            print(f"taskgraph node: {error}", file=sys.stderr)
            return CANNOT_GO_ON


async def wait_for_job(coordinator: Coordinator, name: str) -> JobSpec:
    """The spec of the running job, as soon as it is submitted."""
    keys = Keys(name)
    told = False
    while True:
        listing = await coordinator.list(keys.root)
        found = {kv.key: kv.value for kv in listing.items}
        status = found.get(keys.status)
        if keys.spec in found and status and StatusRecord.from_bytes(status).state == State.RUNNING:
            return JobSpec.from_bytes(found[keys.spec])
        if not told:
            log.info("waiting for job %r to be submitted", name)
            told = True
        watch = coordinator.watch(keys.status, listing.revision + 1)
        try:
            async with asyncio.timeout(_SAY_AGAIN_S):
                async for batch in watch:
                    if batch.events:
                        break
        except TimeoutError:
            told = False
        finally:
            await watch.aclose()  # type: ignore[attr-defined]


async def _run(config: NodeConfig, coordinator: Coordinator, spec: JobSpec, job: Any) -> int:
    node_id = f"{config.name}-{uuid.uuid4().hex[:8]}"
    token = bytes.fromhex(config.token)
    events = EventLog(config.name)
    folder = Path(config.sockets) / node_id[-8:] if config.sockets else None
    if folder is not None:
        folder.mkdir(mode=0o700)
    transport = StreamTransport(
        job.settings,
        token,
        job=spec.name,
        verify=verify,
        unix_dir=folder,
        tcp_host=config.listen or None,
        advertise=socket.gethostname() if config.listen in ("0.0.0.0", "::") else None,
    )
    holder: list[Node] = []
    control = ControlServer(_Late(holder), events, token)
    unix_path = folder / "c" if folder is not None else None
    port = await control.start(unix_path=unix_path, tcp_host=config.listen or None)
    endpoints = [f"unix:{host_key()}:{unix_path}"] if unix_path is not None else []
    if port:
        host = socket.gethostname() if config.listen in ("0.0.0.0", "::") else config.listen
        endpoints.append(tcp_endpoint(host, port))
    node = Node(
        spec=spec,
        job=job,
        coordinator=coordinator,
        transport=transport,
        name=config.name,
        node_id=node_id,
        events=events,
        control="|".join(endpoints),
        devices=device_count(),
    )
    holder.append(node)
    kept = job.settings.events_kept
    keeper = asyncio.ensure_future(keep_events(events, coordinator, spec.name, node_id=node_id, kept=kept))
    _handle_signals(node)
    if config.parent_fd >= 0:
        _follow_parent(config.parent_fd)
    try:
        await node.run()
        return OK
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await control.stop()
        if folder is not None and folder.exists():
            for left in folder.iterdir():
                left.unlink(missing_ok=True)
            folder.rmdir()
            with contextlib.suppress(OSError):  # others use it, too
                folder.parent.rmdir()
                folder.parent.parent.rmdir()


class _Late:
    """The control service starts before the node, since the node's key says where it listens."""

    def __init__(self, holder: list[Node]) -> None:
        self._holder = holder

    def status(self) -> Any:
        return self._holder[0].status()

    def drain(self, why: str) -> None:
        self._holder[0].drain(why)

    async def results(self) -> Any:
        return await self._holder[0].results()


def _handle_signals(node: Node) -> None:
    """SIGTERM and SIGINT drain; the second one ends at once."""
    told = False

    def handle(number: int) -> None:
        nonlocal told
        if told:
            os._exit(128 + number)
        told = True
        node.drain(signal.Signals(number).name)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)


def _follow_parent(descriptor: int) -> None:
    """Ends this process when its launcher is gone: nothing it started outlives it."""

    def look() -> None:
        if not os.read(descriptor, 4096):
            print("taskgraph node: the launcher is gone", file=sys.stderr, flush=True)
            os._exit(CANNOT_GO_ON)

    os.set_blocking(descriptor, False)
    asyncio.get_running_loop().add_reader(descriptor, look)


def main(config: NodeConfig) -> None:
    """Runs a node and ends the process: a compute that never returns must not keep it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    code = CANNOT_GO_ON
    try:
        code = uvloop.run(run_node(config))
    except KeyboardInterrupt:
        code = 130
    except Exception:
        log.exception("the node cannot go on")
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(NodeConfig(**json.loads(Path(sys.argv[1]).read_text())))
