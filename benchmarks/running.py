"""A job that runs on node processes of this host and an etcd of its own, with the nodes in the benchmark's hands."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import deque
from contextlib import AsyncExitStack

import taskgraph as tg
from taskgraph.coordination.embedded import EmbeddedEtcd
from taskgraph.coordination.opening import opened
from taskgraph.driver.spec import JobSpec
from taskgraph.launch.collector import Collector
from taskgraph.launch.local import LocalNodes
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.launch.submit import submit
from taskgraph.network.listening import Listening
from taskgraph.observe.events import Event
from taskgraph.protocol.records import JobStatus
from taskgraph.protocol.view import JobView

__all__ = ["RunningJob"]

_KEPT = 10_000


class RunningJob:
    """A context: started when entered, ended and cleaned up when left."""

    def __init__(self, job: tg.Job, *, nodes: int, listen: str = "") -> None:
        self._job = job
        self._count = nodes
        self._listen = listen
        self._stack = AsyncExitStack()
        self.events: deque[Event] = deque(maxlen=_KEPT)
        """The last events, without commits."""
        self.commits: deque[tuple[float, int]] = deque(maxlen=_KEPT)
        """The last ones: (time.monotonic() at which it was read from etcd, committed epoch)."""

    async def __aenter__(self) -> RunningJob:
        stack = self._stack
        try:
            spec = JobSpec.of(self._job, expected_nodes=self._count)
            runtime = Runtime()
            if not stack.enter_context(runtime.claim(spec.name)):
                raise SystemExit(f"a job {spec.name} is running on this host already")
            embedded = await stack.enter_async_context(EmbeddedEtcd())
            entry = JobEntry(
                name=spec.name,
                etcd=embedded.endpoint,
                token=secrets.token_hex(32),
                pid=os.getpid(),
                embedded=True,
                tls={},
            )
            coordinator = await stack.enter_async_context(opened(entry.etcd, entry.tls))
            await submit(coordinator, spec)
            runtime.remove(spec.name)
            runtime.put(entry)
            stack.callback(runtime.remove, spec.name)
            self.run, self.token = spec.run, entry.token_bytes
            self.etcd_pid = embedded.pid
            self.follower = Collector(coordinator, spec, self.token)
            stack.push_async_callback(self.follower.stop)
            await self.follower.start(self._told)
            stack.callback(self.follower.keeper.on_change(self._changed))
            self.nodes = LocalNodes(entry, coordinator, runtime, listening=Listening(host=self._listen))
            stack.push_async_callback(self._end)
            await self.nodes.start(self._count)
        except BaseException:
            await stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _end(self) -> None:
        if self.view.running:
            await self.follower.cancel_job("the benchmark is over", state=JobStatus.CANCELLED)
        await self.nodes.stop(5.0)

    @property
    def view(self) -> JobView:
        return self.follower.view

    @property
    def committed(self) -> int:
        return self.commits[-1][1] if self.commits else 0

    def _told(self, event: Event) -> None:
        if event.kind != "commit":
            self.events.append(event)

    def _changed(self) -> None:
        stamp = self.view.stamp
        if stamp is not None and stamp.epoch > self.committed:
            self.commits.append((time.monotonic(), stamp.epoch))

    async def until(self, what: str, condition: object, *, timeout_s: float = 30.0) -> None:
        """Waits until `condition(view)`; says what it waited for in vain."""
        assert callable(condition)
        try:
            async with asyncio.timeout(timeout_s):
                await self.follower.keeper.wait_until(lambda view: bool(condition(view)) or not view.running)
        except TimeoutError:
            raise SystemExit(f"waited {timeout_s:g} s in vain for {what}") from None
        status = self.view.status
        if not condition(self.view) and status is not None:
            raise SystemExit(f"waited for {what}; the job {status.record.state}: {status.record.reason}")

    async def start_another(self) -> None:
        """One more node, under a new name."""
        await self.nodes.start(1)

    async def result(self) -> tg.JobResult:
        """Waits for the job's end, and collects its result.

        Raises:
            SystemExit: it did not finish.
        """
        status = await self.follower.wait_for_end()
        if status.state != JobStatus.FINISHED:
            raise SystemExit(f"the job {status.state}: {status.reason}")
        found = await self.follower.results()
        result = self.follower.assemble(found, 0.0)
        await self.follower.let_nodes_go(found, result)
        return result

    async def until_settled(self, nodes: int, *, timeout_s: float = 30.0) -> None:
        """As many nodes, every task with all its backups, and nothing moved for half a second."""
        tasks, backups = range(self._job.all_tasks), self._job.backups

        def whole(view: JobView) -> bool:
            live = set(view.live_nodes(self.run))
            return len(live) == nodes and all(
                view.primary_node(t) in live and len(live.intersection(view.in_sync(t))) > backups for t in tasks
            )

        while True:
            await self.until(f"{nodes} nodes with all replicas in sync", whole, timeout_s=timeout_s)
            structure = self.view.structure_revision
            await asyncio.sleep(0.5)
            if self.view.structure_revision == structure and whole(self.view):
                return
