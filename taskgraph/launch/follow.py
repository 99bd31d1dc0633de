"""Following a job from outside: its view, its events, its results. Reads only, but for the final `collected`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import math
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from taskgraph.alongside import alongside, any_done
from taskgraph.coordination.api import Coordinator, WatchCompacted
from taskgraph.coordination.viewkeeper import ViewKeeper
from taskgraph.driver import JobSpec
from taskgraph.errors import CoordinationError, DecodeError, OutcomeUnknown, TaskGraphError
from taskgraph.launch.collect import assemble, complete, damaged, kept_copy, kept_record, size_bytes, why_given_up
from taskgraph.launch.resuming import lost_text, way_on
from taskgraph.launch.runtime import Runtime
from taskgraph.observe.control_client import ControlClient, StillAtWork, control_address
from taskgraph.observe.events import Event, careful, in_order
from taskgraph.observe.status import NodeStatus, TaskResult
from taskgraph.protocol import transactions
from taskgraph.protocol.keys import Keys
from taskgraph.protocol.kv import Compare, Put, Txn
from taskgraph.protocol.records import NodeRecord, State, StatusRecord, name_of
from taskgraph.protocol.view import JobView
from taskgraph.results import JobResult
from taskgraph.settings import Settings
from taskgraph.tls import Tls
from taskgraph.transport.endpoints import host_key

__all__ = ["DELETED", "Follower", "client_of", "kept_events", "node_statuses"]

log = logging.getLogger("taskgraph.follow")

T = TypeVar("T")

DELETED = (
    "the job was deleted from etcd, or etcd was started without its data, or from a backup; one that left a checkpoint "
    "goes on from there with --resume"
)
"""Of a job whose keys are there no more. An etcd that is behind what it told says itself that it lost them."""
_RETRY_S = 0.1
_CANCEL_TRIES = 5
_UNCOLLECTED_S = 5.0
"""Results that cannot be collected for longer, with nobody to take over from who keeps them, are told of."""
_SILENT_S = 60.0
"""A node that told nothing for so long is asked again. One that computes its results tells nothing meanwhile."""
_COLLECTED_S = 10.0
"""Whoever has the result does not wait for etcd any longer."""
_OTHERS_FIRST_S = 15.0
"""How long whoever ran the job has for its results before others collect them and let the nodes go."""
_TOLD = 8192
"""Events that are remembered, to be told once: twice as many as a leader remembers to tell again."""
_REST_S = 1.0
_RAN_GOT = "who ran the job got them"
"""True of `tg.run` and `taskgraph run` only: others who collect keep what they got."""
_DAMAGED_TRIES = 3
"""What a network damaged arrives whole the next time; what a memory damaged never does."""


def client_of(record: NodeRecord, token: bytes, tls: Tls | None = None) -> ControlClient:
    """A client of a node's control service; raises TaskGraphError where it cannot be reached from here."""
    return ControlClient(control_address(record.control, host_key()), token, tls)


async def kept_events(coordinator: Coordinator, job: str) -> tuple[list[Event], int]:
    """Events kept in etcd, oldest first, and the revision they were read at."""
    listing = await coordinator.list(Keys(job).events)
    return [event for kv in in_order(listing) if (event := _event(kv.value)) is not None], listing.revision


async def node_statuses(
    view: JobView, run: str, token: bytes, tls: Tls | None = None
) -> dict[str, NodeStatus | TaskGraphError]:
    """What every registered node says of itself, or why it does not."""

    async def ask(record: NodeRecord) -> NodeStatus | TaskGraphError:
        try:
            async with client_of(record, token, tls) as client:
                return await client.status()
        except TaskGraphError as error:
            return error

    live = view.live_nodes(run)
    return dict(zip(live, await asyncio.gather(*(ask(record) for record in live.values())), strict=True))


async def _in_thread(work: Callable[[], T]) -> T:
    """What `work` makes, in a thread; here, where none can be started: the main thread may be through already.

    The loop's own executor is left alone. asyncio starts a thread to end it, too.
    """
    pool = ThreadPoolExecutor(1)
    try:
        working = asyncio.get_running_loop().run_in_executor(pool, work)
    except RuntimeError:
        return work()
    finally:
        pool.shutdown(wait=False)
    return await working


class Follower:
    """Follows one job until it ended, and collects its result."""

    def __init__(self, coordinator: Coordinator, spec: JobSpec, token: bytes, tls: Tls | None = None) -> None:
        self.keeper = ViewKeeper(coordinator, spec.name, refresh_s=spec.settings.get("refresh_s", 0.05))
        self._coordinator = coordinator
        self._spec = spec
        self._token = token
        self._tls = tls
        self._services: list[asyncio.Task[None]] = []
        self._run_at = 0  # the revision of the spec of the run that is followed
        self.kept_json: str | None = None
        """The result as JSON, once it was collected and unless it is too large for that."""
        self.not_kept = ""
        """Why there is none, if it was collected, or nobody will."""
        self.only_there = ""
        """Why a result that we got is kept by the job's nodes alone, which were not let go."""
        self._on_event: Callable[[Event], None] | None = None
        self._told: OrderedDict[tuple[float, str, str], None] = OrderedDict()
        self.unreachable: TaskGraphError | None = None
        """Why a node did not tell its results, last; None where it computes them still."""

    @property
    def view(self) -> JobView:
        return self.keeper.view

    def way_on(self, before: str = "") -> str:
        """How the job is continued where it left a checkpoint, after `before`; empty where it left none."""
        pointer = self.view.checkpoint
        return before + way_on(pointer.record) if pointer is not None else ""

    @property
    def _is_ours(self) -> bool:
        """Whether the job's name still is that of the run that is followed."""
        spec = self.view.spec
        return spec is not None and JobSpec.from_bytes(spec).run == self._spec.run

    @property
    def finished(self) -> bool:
        """Whether the run that is followed has committed its last epoch."""
        return self.view.finished and self.view.spec_revision == self._run_at

    async def start(self, on_event: Callable[[Event], None] | None = None) -> None:
        """Begins; `on_event` gets every event, commits too (at least once: a new leader may repeat the last).

        Other events come twice, from etcd and, sooner, from the leader where they are the leader's, and are told once.
        Where it raises, it is told no more (`careful`). An etcd that is away is waited for.
        """
        await self.keeper.load_persistently()
        if self._is_ours:
            self._run_at = self.view.spec_revision
        loop = asyncio.get_running_loop()
        self._services.append(loop.create_task(self.keeper.run(), name="view"))
        if on_event is not None:
            self._on_event = on_event = careful(on_event)
            self._services.append(loop.create_task(self._follow_kept(), name="events"))
            self._services.append(loop.create_task(self._follow_leader(on_event), name="commits"))

    async def broken(self) -> None:
        """Waits until following fails, and raises why."""
        done, _ = await asyncio.wait(self._services, return_when=asyncio.FIRST_COMPLETED)
        for service in done:
            await service

    async def stop(self) -> None:
        for service in self._services:
            service.cancel()
        await asyncio.gather(*self._services, return_exceptions=True)
        self._services.clear()  # their frames hold us

    async def _follow_kept(self) -> None:
        async for event in follow_events(self._coordinator, self._spec.name):
            self._tell(event)

    def _tell(self, event: Event) -> None:
        known = (event.at, event.node, event.text)
        if self._on_event is None or known in self._told:
            return
        self._told[known] = None
        if len(self._told) > _TOLD:
            self._told.popitem(last=False)
        self._on_event(event)

    def _say(self, kind: str, text: str) -> None:
        """Tells something that whoever follows sees alone: as an event, or in the log where nobody takes events."""
        if self._on_event is None:
            log.warning("%s", text)
        self._tell(Event(time.time(), "launcher", kind, text))

    async def tell_rest(self) -> None:
        """Tells the events that are in etcd and did not come yet: a job may end before its events are read."""
        if self._on_event is None:
            return
        try:
            async with asyncio.timeout(_REST_S):
                found, _ = await kept_events(self._coordinator, self._spec.name)
        except (CoordinationError, TimeoutError) as error:
            log.warning("the last events of job %r were not read: %s", self._spec.name, str(error) or "no answer")
            return
        for event in found:
            self._tell(event)

    async def _follow_leader(self, on_event: Callable[[Event], None]) -> None:
        """Commits come from the leader itself: they are too many for etcd."""
        last = -1
        while True:
            await self.keeper.wait_until(lambda v: v.primary_node(0) in v.nodes, structure=True)
            node = self.view.primary_node(0)
            assert node is not None
            commits = self._commits(self.view.nodes[node].record, last, on_event)
            async with alongside(self._other_leader(node), commits) as (changed, streaming):
                await any_done(changed, streaming)
                if streaming.done():
                    last = max(last, streaming.result())
                    await asyncio.sleep(_RETRY_S)

    async def _other_leader(self, node: str) -> None:
        await self.keeper.wait_until(lambda view: view.primary_node(0) != node, structure=True)

    async def _commits(self, record: NodeRecord, last: int, on_event: Callable[[Event], None]) -> int:
        try:
            async with client_of(record, self._token, self._tls) as client:
                async for event, _ in client.events(follow=True):
                    if event.kind != "commit":
                        if not event.transient:
                            self._tell(event)
                    elif (event.epoch or 0) > last:
                        last = event.epoch or 0
                        on_event(event)
        except TaskGraphError as error:
            log.debug("the leader's events: %s", error)
        return last

    async def ended(self) -> StatusRecord:
        """Waits for the job's end."""
        await self.keeper.wait_until(
            lambda view: not view.running or view.spec_revision != self._run_at, structure=True
        )
        status = self.view.status
        if self.view.spec_revision != self._run_at:  # what became of it went with its keys
            reason = f"job {self._spec.name!r} has ended, and another one was submitted under its name"
            return StatusRecord(state=State.CANCELLED, reason=reason if status else DELETED)
        return status.record if status else StatusRecord(state=State.CANCELLED, reason=DELETED)

    async def results(self) -> list[TaskResult]:
        """The results of all tasks, of one (epoch, attempt); through takeovers, for as long as it takes.

        Raises:
            DecodeError: values arrive damaged, again and again.
            FingerprintMismatch: the nodes' digests are not those of this version.
        """
        self._spec.check_protocol()
        broken_tries = 0
        tell_at = time.monotonic() + _UNCOLLECTED_S
        kept: dict[int, TaskResult] = {}  # of nodes that told all of theirs: what may be large is not asked for twice
        while True:
            failed: TaskGraphError | None = None
            holders = {primary.record.node for task, primary in self.view.primaries.items() if task not in kept}
            for node, record in [(n, v.record) for n, v in sorted(self.view.nodes.items()) if n in holders]:
                try:
                    async with client_of(record, self._token, self._tls) as client:
                        told = await client.results(silent_s=_SILENT_S)
                    if sorted(each.task for each in told) == self._tasks_of(node):
                        kept |= {each.task: each for each in told}
                except StillAtWork:
                    self.unreachable = None
                except TaskGraphError as error:  # lost: its tasks are taken over, and asked for again
                    self.unreachable = failed = error
            if failed is not None and time.monotonic() > tell_at:
                tell_at = math.inf
                self._say("waits", f"the job has finished, and its results cannot be collected: {failed}")
            newest = max(((each.attempt, each.epoch) for each in kept.values()), default=None)
            kept = {task: each for task, each in kept.items() if (each.attempt, each.epoch) == newest}
            found = list(kept.values())
            if complete(found, self._spec.tasks):
                broken = damaged(found)
                if not broken:
                    await self.tell_rest()
                    return found
                broken_tries += 1
                holder = name_of(self.view.primaries[broken[0]].record.node)
                text = (
                    f"the result of task {broken[0]} arrived damaged from node {holder}, {broken_tries} times: its "
                    f"bytes are not those its digest was taken of"
                )
                log.warning("%s", text)
                if broken_tries == _DAMAGED_TRIES:
                    raise DecodeError(text)
                for task in broken:
                    del kept[task]
            await asyncio.sleep(_RETRY_S)

    def _tasks_of(self, node: str) -> list[int]:
        """Whose primary it is."""
        return sorted(task for task, primary in self.view.primaries.items() if primary.record.node == node)

    async def collect(self, here: asyncio.Future[Any] | None = None, *, let_go: bool = True) -> JobResult | None:
        """The result of a job that finished. Once all of it is kept for whoever asks later its nodes are let go.

        None where somebody else has collected it; where its nodes are gone, and `not_kept` says so; and where the job
        is not finished any more: it failed, or computes again what was lost with its nodes.

        Args:
            here: done once all nodes of this process have ended; before that some may be about to register.
            let_go: False: it is somebody else's to collect, and nothing is kept.
        """
        run = self._spec.run

        def over(view: JobView) -> bool:
            there = view.live_nodes(run) or (here is not None and not here.done())
            return view.collected or not self.finished or not there

        if self._spec.expected_nodes:  # whoever ran it wants its values: it goes first, unless it is gone
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_OTHERS_FIRST_S):
                    await self.keeper.wait_until(over, structure=True)
        found = None if over(self.view) else await self._results_unless(over)
        if found is None:
            await self.tell_rest()
            await self._see_lost()
            return None
        result = self.assemble(found, max(each.lasted_s for each in found))  # who collects may have come just now
        if let_go:
            await self._keep_and_let_go(found, result)
        return result

    async def _results_unless(self, over: Callable[[JobView], bool]) -> list[TaskResult] | None:
        """`results`, or None as soon as it is `over`."""
        async with alongside(self.results(), self.keeper.wait_until(over, structure=True)) as (collecting, ending):
            await any_done(collecting, ending)
            return collecting.result() if collecting.done() else None

    def assemble(self, found: list[TaskResult], wall_s: float) -> JobResult:
        return assemble(self._spec.name, found, self.view.primaries.values(), wall_s)

    async def let_go(self, found: list[TaskResult], result: JobResult) -> None:
        """Keeps a copy of a result that is here, for whoever asks later, and lets the nodes go.

        Whoever has the result loses nothing by it: what cannot be kept is not, and where etcd does not take it the
        nodes leave after `results_kept_s`.
        """
        copy = await _in_thread(lambda: kept_copy(result, size_bytes(found)))
        self.kept_json, self.not_kept = copy.here, copy.not_here and f"{copy.not_here}: {_RAN_GOT}"
        await self._tell_collected(copy.in_etcd, copy.not_in_etcd and f"{copy.not_in_etcd}: {_RAN_GOT}")

    async def _keep_and_let_go(self, found: list[TaskResult], result: JobResult) -> None:
        """Keeps all of a result, which nobody may have but us, on this host, and then lets the nodes go.

        Where it cannot be kept they are not: `only_there`.
        """
        copy = await _in_thread(lambda: kept_copy(result, size_bytes(found), whole=True))
        self.kept_json, self.only_there = copy.here, copy.not_here
        if copy.here is not None:
            try:
                await self._keep_here(copy.here)
            except (OSError, TaskGraphError) as error:  # a full disk
                log.warning("the result of job %s is not kept on this host: %s", self._spec.name, error)
                if copy.in_etcd != copy.here:
                    self.only_there = f"they are not kept on this host ({error})"
        if not self.only_there:
            where = f"`taskgraph result {self._spec.name}` has them on host {os.uname().nodename}"
            await self._tell_collected(copy.in_etcd, copy.not_in_etcd and f"{copy.not_in_etcd}; {where}")

    async def _keep_here(self, text: str) -> None:
        """Raises OSError or TaskGraphError where it cannot be kept."""
        events: list[Event] = []
        with contextlib.suppress(CoordinationError, TimeoutError):
            async with asyncio.timeout(_REST_S):
                events, _ = await kept_events(self._coordinator, self._spec.name)
        status = self.view.status.record if self.view.status else None

        def keep() -> None:
            Runtime().keep_finished(self._spec.name, kept_record(self._spec.run, status, "", events), text)

        await _in_thread(keep)

    def only_there_text(self) -> str:
        """Who has a result that was kept nowhere, and how one gets it."""
        kept_s = self._spec.settings.get("results_kept_s", Settings().results_kept_s)
        return (
            f"the nodes of job {self._spec.name} alone keep its values ({self.only_there}), for {kept_s:g} s "
            f"(results_kept_s): `taskgraph result {self._spec.name} --json > FILE` takes them"
        )

    async def tell_uncollected(self, why: str) -> None:
        """Tells others why the values of a job that finished are not kept; once no node is left that has them."""
        await self._tell_collected(None, why)

    async def taken(self, here: asyncio.Future[Any]) -> None:
        """Says who keeps a result that was kept nowhere, and waits until that was taken or given up.

        Args:
            here: done once all nodes of this process have ended.
        """
        self._say("waits", self.only_there_text())
        await self.keeper.wait_until(lambda v: v.collected or not self.finished or here.done(), structure=True)
        await self._see_lost()

    async def _see_lost(self) -> None:
        """Where nobody has the values of a job that finished, and nobody will: `not_kept`."""
        view = self.view
        if self.finished and not view.collected and not view.live_nodes(self._spec.run):
            self.not_kept = lost_text(self._spec.name, view.checkpoint)
        elif self.finished and view.collected:
            with contextlib.suppress(CoordinationError, TimeoutError):
                async with asyncio.timeout(_REST_S):
                    self.not_kept = why_given_up(await self._coordinator.get(view.keys.collected))

    async def tell_taken(self, why: str) -> None:
        """Lets the nodes go whose values were written where a user wanted them; `why` they are kept nowhere else."""
        await self._tell_collected(None, f"{why}; `taskgraph result --json` wrote them on host {os.uname().nodename}")

    async def _tell_collected(self, kept: str | None, not_kept: str) -> None:
        """Tells nodes that they may leave, and others what became of the values."""
        keys = self.view.keys
        puts = [Put(keys.result, kept.encode())] if kept is not None else []
        puts.append(Put(keys.collected, json.dumps({"by": "launcher", "not_kept": not_kept}).encode()))
        # Nothing of a run that was submitted under this name meanwhile.
        txn = Txn((Compare(keys.spec, self._run_at),), tuple(puts))
        try:
            async with asyncio.timeout(_COLLECTED_S):
                while True:
                    with contextlib.suppress(OutcomeUnknown):  # writing the same again changes nothing
                        await self._coordinator.txn(txn)
                        return
                    await asyncio.sleep(_RETRY_S)
        except (CoordinationError, TimeoutError) as error:
            log.warning(
                "that the results were collected is not known to nodes elsewhere: %s", str(error) or "no answer"
            )

    async def cancel_job(self, reason: str, *, state: str = State.CANCELLED) -> bool:
        """Ends the job, if it runs; tells it as an event.

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
            if found is None or found.record.state != State.RUNNING or not self._is_ours:
                return found is not None and found.record.writer == writer
            txn = transactions.fail(self.view, status)
            put = Put(self.view.keys.event(f"{event.at:017.6f}-{writer.replace(' ', '-')}"), event.to_bytes())
            try:
                if (await self._coordinator.txn(dataclasses.replace(txn, success=(*txn.success, put)))).succeeded:
                    return True
            except OutcomeUnknown as error:  # read again: the writer tells
                why = str(error)
        raise OutcomeUnknown(
            f"whether job {self._spec.name!r} was ended is not known: look at `taskgraph status` ({why})"
        )


def _event(value: bytes) -> Event | None:
    """An event kept in etcd; what is none there is left out, since a story with a gap beats none."""
    try:
        return Event.from_bytes(value)
    except DecodeError as error:
        log.warning("%s", error)
        return None


async def follow_events(coordinator: Coordinator, job: str, *, after: int = 0) -> AsyncIterator[Event]:
    """Events kept in etcd, those there and those to come. What history no longer has is read from what is there.

    Args:
        after: those alone that were written after this revision. Their times do not tell: clocks of hosts differ.
    """
    keys = Keys(job)
    listing, revision = await coordinator.list(keys.events), after
    while True:
        for kv in in_order(listing):
            if kv.mod_revision > revision and (told := _event(kv.value)) is not None:
                yield told
        revision = max(revision, listing.revision)
        try:
            async for batch in coordinator.watch(keys.events, revision + 1):
                revision = batch.revision
                for change in batch.events:
                    if change.kind == "put" and (told := _event(change.kv.value)) is not None:
                        yield told
        except WatchCompacted:
            with contextlib.suppress(CoordinationError):  # tried again: the watch is refused as before
                listing = await coordinator.list(keys.events)
