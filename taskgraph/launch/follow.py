"""Follows a job from outside: its view, its events, its failures, its end. Can end the job, too."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

from msgspec import structs

from taskgraph.coordination.api import Coordinator, WatchCompacted
from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import CoordinationError, OutcomeUnknown, TaskGraphError
from taskgraph.launch.kept import KeptJob, collected_record, resume_hint
from taskgraph.launch.runtime import Runtime
from taskgraph.network.tls import Tls
from taskgraph.observe.control_client import ControlClient, control_address
from taskgraph.observe.events import (
    MERGED_KINDS,
    Event,
    guarded_listener,
    put_events,
    readable_events,
    sort_by_revision,
)
from taskgraph.observe.incidents import FAILOVER, Incidents
from taskgraph.observe.status import NodeStatus
from taskgraph.protocol import transactions
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Put
from taskgraph.protocol.records import JobStatus, NodeRecord, StatusRecord
from taskgraph.protocol.view import JobView
from taskgraph.system.alongside import alongside, any_done, cancel_and_wait
from taskgraph.transport.endpoints import host_key

__all__ = ["DELETED", "Follower", "client_of", "find_kept", "ignoring_etcd_failures", "kept_events", "node_statuses"]

log = logging.getLogger("taskgraph.follow")

DELETED = (
    "the job was deleted from etcd, or etcd was started without its data, or from a backup; with --resume the job goes "
    "on from its checkpoint, if there is one"
)
"""The reason if a job's keys are missing."""
_RETRY_S = 0.1
_CANCEL_TRIES = 5
_REMEMBERED = 8192
"""Events remembered to drop duplicates: twice as many as a leader may send again."""
_REST_S = 1.0
_LOOK_S = 0.1
"""How often open incidents are looked at."""


def client_of(record: NodeRecord, token: bytes, tls: Tls | None = None) -> ControlClient:
    """Makes a client of a node's control service; raises TaskGraphError if we cannot reach it."""
    return ControlClient(control_address(record.control, host_key()), token, tls)


@contextlib.asynccontextmanager
async def ignoring_etcd_failures(within_s: float) -> AsyncIterator[None]:
    """Runs a block that may be given up: ends it silently if etcd refuses, or after `within_s`."""
    with contextlib.suppress(CoordinationError, TimeoutError):
        async with asyncio.timeout(within_s):
            yield


async def kept_events(coordinator: Coordinator, job: str) -> list[Event]:
    """Returns the events in etcd, in the order they were written."""
    return list(readable_events(kv.value for kv in sort_by_revision(await coordinator.list(Keys(job).events))))


async def find_kept(coordinator: Coordinator, name: str) -> KeptJob | None:
    """Returns what etcd has of a job, also while the job runs; None: there is no such job.

    If etcd does not have the whole result, and this host keeps the result of the same run, returns what this host has.
    """
    keys = Keys(name)
    spec, status = await coordinator.get(keys.spec), await coordinator.get(keys.status)
    kept = collected_record(await coordinator.get(keys.collected))
    if status is None:
        return None
    if (kept.not_kept or not kept.result) and spec is not None:
        here = Runtime().find_finished(name, JobSpec.from_bytes(spec.value).run)
        if here is not None and here.result:
            return here
    return structs.replace(kept, status=StatusRecord.from_bytes(status.value))


async def node_statuses(
    view: JobView, run: str, token: bytes, tls: Tls | None = None
) -> dict[str, NodeStatus | TaskGraphError]:
    """Asks every registered node for its status; a node that does not answer has an error in its place."""

    async def ask(record: NodeRecord) -> NodeStatus | TaskGraphError:
        try:
            async with client_of(record, token, tls) as client:
                return await client.status()
        except TaskGraphError as error:
            return error

    live = view.live_nodes(run)
    return dict(zip(live, await asyncio.gather(*(ask(record) for record in live.values())), strict=True))


class Follower:
    """Follows one job until it ends, and reports its failures. `cancel_job` ends the job; `Collector` takes results."""

    def __init__(self, coordinator: Coordinator, spec: JobSpec, token: bytes, tls: Tls | None = None) -> None:
        self.keeper = ViewKeeper(coordinator, spec.name, refresh_s=spec.setting("refresh_s"))
        self._coordinator = coordinator
        self._spec = spec
        self._token = token
        self._tls = tls
        self._services: list[asyncio.Task[None]] = []
        self._run_at = 0  # the revision of the followed run's spec
        self._on_event: Callable[[Event], None] | None = None
        self._reported: OrderedDict[tuple[float, str, str], None] = OrderedDict()
        self._incidents = Incidents(spec.tasks, spec.backups, time.monotonic, spec.services)

    @property
    def view(self) -> JobView:
        return self.keeper.view

    def resume_hint(self, before: str = "") -> str:
        """Returns how to go on from the job's checkpoint, after `before`; "" without one."""
        pointer = self.view.checkpoint
        return before + resume_hint(pointer.record, self._spec.unit) if pointer is not None else ""

    @property
    def _run_has_name(self) -> bool:
        """True while the job's name belongs to the followed run."""
        spec = self.view.spec
        return spec is not None and JobSpec.from_bytes(spec).run == self._spec.run

    @property
    def has_work(self) -> bool:
        """True while the followed run goes on, or has results that are not collected."""
        return self.view.has_work and self.view.spec_revision == self._run_at

    @property
    def finished(self) -> bool:
        """True once the followed run has committed its last epoch."""
        return self.view.finished and self.view.spec_revision == self._run_at

    @property
    def status(self) -> StatusRecord | None:
        """Returns the status of the followed run; None: its keys are gone."""
        status = self.view.status
        return status.record if status is not None and self._run_has_name else None

    async def events_of_run(self) -> list[Event]:
        """Returns the followed run's events in etcd; none if another run has the job's name now.

        Raises:
            CoordinationError: etcd does not answer.
        """
        found = await kept_events(self._coordinator, self._spec.name)
        # A later run with the same name deletes the events of this one.
        spec = await self._coordinator.get(self.view.keys.spec)
        return found if spec is None or JobSpec.from_bytes(spec.value).run == self._spec.run else []

    async def start(self, on_event: Callable[[Event], None] | None = None) -> None:
        """Starts following. Waits for etcd if it does not answer.

        Args:
            on_event: gets every event once, and every commit at least once: a new leader may repeat the last. If it
                raises, it gets no more events (`guarded_listener`).
        """
        await self.keeper.load_persistently()
        if self._run_has_name:
            self._run_at = self.view.spec_revision
        loop = asyncio.get_running_loop()
        self._services.append(loop.create_task(self.keeper.run(), name="view"))
        if on_event is not None:
            self._on_event = on_event = guarded_listener(on_event)
            self._services.append(loop.create_task(self._follow_kept(), name="events"))
            self._services.append(loop.create_task(self._follow_leader(on_event), name="commits"))
            self._services.append(loop.create_task(self._report_incidents(), name="incidents"))

    async def wait_until_broken(self) -> None:
        """Waits until a service that follows the job fails, and raises its error."""
        done, _ = await asyncio.wait(self._services, return_when=asyncio.FIRST_COMPLETED)
        for service in done:
            await service

    async def stop(self) -> None:
        """Stops following: cancels the services that `start` started, and waits for their end."""
        await cancel_and_wait(*self._services)
        self._services.clear()  # their frames refer to this object

    async def _follow_kept(self) -> None:
        """Reports the events in etcd, as they come, until cancelled."""
        async for event in follow_events(self._coordinator, self._spec.name):
            self._report(event)

    def _report(self, event: Event) -> None:
        """Passes an event to `on_event` and to the incidents, unless it was passed before."""
        # Other followers word the cost of the same failure with their own times of commits.
        known = (event.at, event.node, str(event.fields.get("node")) if event.kind == FAILOVER else event.text)
        if self._on_event is None or known in self._reported:
            return
        self._reported[known] = None
        if len(self._reported) > _REMEMBERED:
            self._reported.popitem(last=False)
        self._incidents.note_event(event)
        self._on_event(event)

    async def _report_incidents(self) -> None:
        """Reports what each failure cost, once that is known, and writes it to the job's events, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if not self._incidents.any_open:
                continue
            for event in self._incidents.take_finished(self.view):
                self._report(event)
                if event.kind == FAILOVER:
                    await self._write_report(event)

    async def _write_report(self, event: Event) -> None:
        """Writes the report of a failover to the job's events in etcd."""
        key = self.view.keys.event(f"{event.at:017.6f}-{event.kind}-{event.fields['node']}")
        try:
            await self._coordinator.txn(put_events(self.view.keys, self._run_at, [(key, event)]))
        except CoordinationError as error:
            log.warning("the report of a failover is not kept: %s", error)

    async def keep_event(self, event: Event) -> None:
        """Reports an event of this process, and writes it to the job's events, so that `taskgraph events` shows it.

        An etcd that does not answer, or refuses, is logged.
        """
        self._report(event)
        key = self.view.keys.event(f"{event.at:017.6f}-{event.kind}-{uuid.uuid4().hex}")
        try:
            await self._coordinator.txn(put_events(self.view.keys, self._run_at, [(key, event)]))
        except CoordinationError as error:
            log.warning("an event is not kept: %s (%s)", event.text, error)

    def _say(self, kind: str, text: str) -> None:
        """Reports something that only this process knows: as an event, or in the log if nothing takes events."""
        if self._on_event is None:
            log.warning("%s", text)
        self._report(Event(time.time(), "launcher", kind, text))

    async def report_last_events(self) -> None:
        """Reports the last events from etcd: a job may end before they are read."""
        if self._on_event is None:
            return
        try:
            async with asyncio.timeout(_REST_S):
                found = await self.events_of_run()
        except (CoordinationError, TimeoutError) as error:
            log.warning("the last events of job %r were not read: %s", self._spec.name, str(error) or "no answer")
            return
        for event in found:
            self._report(event)
        for event in self._incidents.take_finished(self.view, over=True):
            self._report(event)

    async def _follow_leader(self, on_event: Callable[[Event], None]) -> None:
        """Streams events, mainly commits, from the leader and its successors, until cancelled. etcd has no commits."""
        last = -1
        while True:
            await self.keeper.wait_until(lambda v: v.leading_node in v.nodes, structure=True)
            node = self.view.leading_node
            assert node is not None
            commits = self._stream_commits(self.view.nodes[node].record, last, on_event)
            async with alongside(self._wait_for_other_leader(node), commits) as (changed, streaming):
                await any_done(changed, streaming)
                if streaming.done():
                    last = max(last, streaming.result())
                    await asyncio.sleep(_RETRY_S)

    async def _wait_for_other_leader(self, node: str) -> None:
        """Waits until another node leads."""
        await self.keeper.wait_until(lambda view: view.leading_node != node, structure=True)

    async def _stream_commits(self, record: NodeRecord, last: int, on_event: Callable[[Event], None]) -> int:
        """Passes on the events that the leader streams, commits after epoch `last` too; returns the last epoch when the
        stream ends.
        """
        try:
            async with client_of(record, self._token, self._tls) as client:
                async for event, _ in client.events(follow=True):
                    if event.kind != "commit":
                        if not event.transient and event.kind not in MERGED_KINDS:  # etcd has these, gathered
                            self._report(event)
                        continue
                    epoch = event.epoch or 0
                    if epoch > last:
                        last = epoch
                        self._incidents.note_commit(event.at, last)
                    if epoch == last:  # a step may report several times
                        on_event(event)
        except TaskGraphError as error:
            log.debug("the leader's events: %s", error)
        return last

    async def wait_for_end(self) -> StatusRecord:
        """Waits for the end of the followed run; returns its status, "cancelled" if its keys are gone."""
        await self.keeper.wait_until(
            lambda view: not view.running or view.spec_revision != self._run_at, structure=True
        )
        status = self.view.status
        if self.view.spec_revision != self._run_at:  # its keys are gone
            reason = f"job {self._spec.name!r} has ended, and another one was submitted under its name"
            return StatusRecord(state=JobStatus.CANCELLED, reason=reason if status else DELETED)
        return status.record if status else StatusRecord(state=JobStatus.CANCELLED, reason=DELETED)

    async def cancel_job(self, reason: str, *, state: str = JobStatus.CANCELLED) -> bool:
        """Ends the job if it runs: writes `state`, and an event of that kind. Returns True if this call ended the job.

        Raises:
            CoordinationError: etcd does not answer, or others write faster than we read.
        """
        writer = f"launcher {uuid.uuid4().hex}"
        status = StatusRecord(state=state, reason=reason, writer=writer)
        event = Event(time.time(), "launcher", state, f"the job was ended: {reason}")
        why = "others write faster than we read"
        for _ in range(_CANCEL_TRIES):
            await self.keeper.load()
            found = self.view.status
            if found is None or found.record.state != JobStatus.RUNNING or not self._run_has_name:
                return found is not None and found.record.writer == writer
            txn = transactions.fail(self.view, status)
            put = Put(self.view.keys.event(f"{event.at:017.6f}-{writer.replace(' ', '-')}"), event.to_bytes())
            try:
                if (await self._coordinator.txn(dataclasses.replace(txn, success=(*txn.success, put)))).succeeded:
                    return True
            except OutcomeUnknown as error:  # read again: the record names its writer
                why = str(error)
        raise OutcomeUnknown(f"job {self._spec.name!r} may have been ended or not: look at `taskgraph status` ({why})")


async def follow_events(coordinator: Coordinator, job: str, *, after: int = 0) -> AsyncIterator[Event]:
    """Yields the events in etcd, and those to come. If the watch's history was compacted, lists the events again.

    Args:
        after: only events written after this revision. Their times say nothing: clocks of hosts differ.
    """
    keys = Keys(job)
    listing, revision = await coordinator.list(keys.events), after
    while True:
        for event in readable_events(kv.value for kv in sort_by_revision(listing) if kv.mod_revision > revision):
            yield event
        revision = max(revision, listing.revision)
        try:
            async for batch in coordinator.watch(keys.events, revision + 1):
                revision = batch.revision
                for event in readable_events(change.kv.value for change in batch.events if change.kind == "put"):
                    yield event
        except WatchCompacted:
            with contextlib.suppress(CoordinationError):  # the watch fails again, and the list is tried again
                listing = await coordinator.list(keys.events)
