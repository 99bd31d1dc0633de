"""Collects the result of a finished job from its nodes. Once the result is kept, the nodes may leave.

A run (`tg.run`, `taskgraph run`) goes first: it calls `results`, then `let_nodes_go`. Other commands call `collect`,
which waits a while for the run, keeps the result on this host, and then lets the nodes go. In etcd this is the key
`collected`: nodes leave when they see it. It has the result, or says where that is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from msgspec import structs

from taskgraph.coordination.api import Coordinator
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import CoordinationError, DecodeError, OutcomeUnknown, TaskGraphError
from taskgraph.launch.collect import assemble, damaged_tasks, is_complete, make_copies, size_bytes
from taskgraph.launch.follow import Follower, client_of, ignoring_etcd_failures
from taskgraph.launch.kept import KeptJob, collected_record, lost_text
from taskgraph.launch.runtime import Runtime
from taskgraph.network.tls import Tls
from taskgraph.observe.control_client import StillComputing
from taskgraph.observe.events import Event
from taskgraph.observe.status import TaskResult
from taskgraph.protocol.kv import Compare, Put, Txn
from taskgraph.protocol.records import JobStatus, StatusRecord, name_of
from taskgraph.protocol.view import JobView
from taskgraph.results import JobResult
from taskgraph.system.alongside import alongside, any_done

__all__ = ["Collector"]

log = logging.getLogger("taskgraph.follow")

T = TypeVar("T")

_RETRY_S = 0.1
_REST_S = 2.0
"""The time limit for reading the events that are kept beside a result."""
_UNCOLLECTED_S = 5.0
"""After this time an event says why the results cannot be collected."""
_SILENT_S = 60.0
"""A node that was silent for so long is asked again. It is silent while it computes its results."""
_COLLECTED_S = 10.0
"""A caller that has the result waits for etcd no longer than this."""
_OTHERS_FIRST_S = 15.0
"""Other commands wait so long for the run to collect its results, before they do it."""
_DAMAGED_TRIES = 3
"""A value that a network damaged arrives whole the next time; one that a memory damaged never does."""


class Collector(Follower):
    """Follows one job, and collects its result. It writes no key but `collected`.

    Attributes:
        kept: the result that was collected, or why it will never be.
        only_on_nodes: why the job's nodes alone keep a result that was collected, and may not leave; "": they do not.
        unreachable: why a node did not answer; None: none failed to, or one has said since that it still computes.
    """

    def __init__(self, coordinator: Coordinator, spec: JobSpec, token: bytes, tls: Tls | None = None) -> None:
        super().__init__(coordinator, spec, token, tls)
        self.kept = KeptJob()
        self.only_on_nodes = ""
        self.unreachable: TaskGraphError | None = None

    async def results(self) -> list[TaskResult]:
        """Returns the results of all tasks, of one (epoch, attempt). Waits for takeovers, without a limit.

        Raises:
            DecodeError: values arrive damaged, again and again.
            FingerprintMismatch: the nodes' digests are not those of this version.
        """
        self._spec.check_protocol()
        damaged_tries = 0
        tell_at = time.monotonic() + _UNCOLLECTED_S
        kept: dict[int, TaskResult] = {}  # they may be large, and are not asked for twice
        while True:
            failed = await self._ask_for_others(kept)
            if failed is not None and time.monotonic() > tell_at:
                tell_at = math.inf
                self._say("waits", f"the job has finished, and its results cannot be collected: {failed}")
            newest = max(((each.attempt, each.epoch) for each in kept.values()), default=None)
            kept = {task: each for task, each in kept.items() if (each.attempt, each.epoch) == newest}
            found = list(kept.values())
            if is_complete(found, self._spec.tasks):
                broken = damaged_tasks(found)
                if not broken:
                    await self.report_last_events()
                    return found
                damaged_tries += 1
                self._warn_or_give_up(broken[0], damaged_tries)
                for task in broken:
                    del kept[task]
            await asyncio.sleep(_RETRY_S)

    async def _ask_for_others(self, kept: dict[int, TaskResult]) -> TaskGraphError | None:
        """Asks the nodes of tasks that are not `kept`, and adds their results. Returns the last error; None: none
        failed.
        """
        failed = None
        holders = {node for task, node in self.view.result_holders().items() if task not in kept}
        for node, record in [(n, v.record) for n, v in sorted(self.view.nodes.items()) if n in holders]:
            try:
                async with client_of(record, self._token, self._tls) as client:
                    found = await client.results(silent_s=_SILENT_S)
                if sorted(each.task for each in found) == self._tasks_of(node):
                    kept |= {each.task: each for each in found}
            except StillComputing:
                self.unreachable = None
            except TaskGraphError as error:  # others take its tasks over, and are asked
                self.unreachable = failed = error
        return failed

    def _warn_or_give_up(self, task: int, tries: int) -> None:
        """Logs a damaged result, also the last; raises DecodeError after `_DAMAGED_TRIES` tries."""
        holder = name_of(self.view.result_holders().get(task, "?"))
        text = (
            f"the result of task {task} arrived damaged from node {holder}, {tries} times: its bytes are not those its "
            f"digest was taken of"
        )
        log.warning("%s", text)
        if tries == _DAMAGED_TRIES:
            raise DecodeError(text)

    def _tasks_of(self, node: str) -> list[int]:
        """Returns the tasks whose results a node gives."""
        return sorted(task for task, holder in self.view.result_holders().items() if holder == node)

    async def collect(
        self,
        here: asyncio.Future[Any] | None = None,
        *,
        let_go: bool = True,
        first: bool = False,
        take: Callable[[JobResult], None] | None = None,
    ) -> JobResult | None:
        """Returns the result of a finished job. Lets the nodes go once the result is kept.

        Returns None if another process collected it; if its nodes are gone, as `kept` says; or if the job is no
        longer finished, because it failed, or because it computes lost results again.

        Args:
            here: done once all nodes of this launcher have ended; before that some may be about to register.
            let_go: False: only look; nothing is kept, and the nodes stay.
            first: this process is the job's run, so it waits for no other.
            take: stores the result elsewhere before the nodes are let go. If it raises, they stay.
        """
        run = self._spec.run

        def is_too_late(view: JobView) -> bool:
            """True if another process collected, the job is no longer finished, or no node is there to ask."""
            there = view.live_nodes(run) or (here is not None and not here.done())
            return view.collected or not self.finished or not there

        if self._spec.expected_nodes and not first:  # the run goes first, unless it has ended
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_OTHERS_FIRST_S):
                    await self.keeper.wait_until(is_too_late, structure=True)
        found = None if is_too_late(self.view) else await self._results_unless(is_too_late)
        if found is None:
            await self.report_last_events()
            await self._note_lost()
            return None
        result = self.assemble(found, max(each.lasted_s for each in found))  # this process may have come just now
        if take is not None:
            await _in_thread(lambda: take(result))
        if let_go:
            await self._keep_and_let_go(found, result)
            if take is not None and self.only_on_nodes:
                await self.mark_taken()
        return result

    async def _results_unless(self, is_too_late: Callable[[JobView], bool]) -> list[TaskResult] | None:
        """Waits for the results of all tasks; returns None as soon as `is_too_late` is true of the view."""
        async with alongside(self.results(), self.keeper.wait_until(is_too_late, structure=True)) as (
            collecting,
            ending,
        ):
            await any_done(collecting, ending)
            return collecting.result() if collecting.done() else None

    def assemble(self, found: list[TaskResult], wall_s: float) -> JobResult:
        """Makes the job's result from the results of its tasks."""
        return assemble(self._spec.name, found, self.view.primaries.values(), wall_s)

    async def let_nodes_go(self, found: list[TaskResult], result: JobResult) -> None:
        """Lets the nodes leave: writes `collected` to etcd, with a copy of the run's result if it fits there.

        Sets `kept` to a copy for this host. If etcd does not answer, the nodes leave after `results_kept_s`.
        """
        here, in_etcd = await _in_thread(lambda: make_copies(result, size_bytes(found)))
        returned = ": the run has returned them"
        self.kept = _with_place(here, returned)
        await self._mark_collected(_with_place(in_etcd, returned))

    async def _keep_and_let_go(self, found: list[TaskResult], result: JobResult) -> None:
        """Keeps a result that no other process may have, on this host, and then lets the nodes go.

        If not all of it can be kept, the nodes stay, and `only_on_nodes` says why.
        """
        here, in_etcd = await _in_thread(lambda: make_copies(result, size_bytes(found)))
        if here.not_kept:
            self.only_on_nodes = here.not_kept
            return
        try:
            await self._keep_here(here, self.status or StatusRecord(state=JobStatus.FINISHED))
        except (OSError, TaskGraphError) as error:  # a full disk
            log.warning("the result of job %s is not kept on this host: %s", self._spec.name, error)
            if in_etcd.not_kept:
                self.only_on_nodes = f"they are not kept on this host ({error})"
                return
        self.kept = here
        where = f"; `taskgraph result {self._spec.name}` has them on host {os.uname().nodename}"
        await self._mark_collected(_with_place(in_etcd, where))

    async def keep_end(self, status: StatusRecord | None, otherwise: str = "", *, etcd: bool = True) -> None:
        """Writes on this host how the job ended, and what is left of its result; an error is logged.

        Otherwise the end and the values of an earlier run of this name would be taken for this one's.

        Args:
            status: None: it is not known, since the job's keys are gone.
            otherwise: why the values of a finished job are not kept, if this process does not know another reason.
            etcd: False: there is none to read events from.
        """
        kept = self.kept
        if not kept.result:
            kept = KeptJob(not_kept=kept.not_kept or self.only_on_nodes or otherwise)
        try:
            await self._keep_here(kept, status, etcd=etcd)
        except (OSError, TaskGraphError) as error:  # a full disk: what became of the job counts for more
            log.warning("what is left of job %s is not kept on this host: %s", self._spec.name, error)

    async def _keep_here(self, kept: KeptJob, status: StatusRecord | None, *, etcd: bool = True) -> None:
        """Writes a record on this host, with the job's status and events; raises OSError or TaskGraphError."""
        events: list[Event] = []
        if etcd:
            async with ignoring_etcd_failures(_REST_S):
                events = await self.events_of_run()
        lines = tuple(event.to_json() for event in events)
        spec = self._spec
        kept = structs.replace(kept, run=spec.run, status=status, event_lines=lines, elastic=spec.elastic)
        await _in_thread(lambda: Runtime().keep_finished(self._spec.name, kept))

    def only_on_nodes_text(self) -> str:
        """Says which nodes have a result that is kept nowhere else, and how to get it."""
        kept_s = self._spec.setting("results_kept_s")
        return (
            f"the nodes of job {self._spec.name} alone keep its values ({self.only_on_nodes}), for {kept_s:g} s "
            f"(results_kept_s): `taskgraph result {self._spec.name} --json > FILE` takes them"
        )

    async def mark_uncollected(self, why: str) -> None:
        """Writes `collected` with the reason why a finished job's values are not kept, once no node has them."""
        await self._mark_collected(KeptJob(not_kept=why))

    async def wait_until_taken(self, here: asyncio.Future[Any]) -> None:
        """Reports `only_on_nodes_text`, and waits until the result is collected or given up.

        Args:
            here: done once all nodes of this process have ended.
        """
        self._say("waits", self.only_on_nodes_text())
        await self.keeper.wait_until(lambda v: v.collected or not self.finished or here.done(), structure=True)
        await self._note_lost()

    async def _note_lost(self) -> None:
        """Sets `kept` to the reason if the values of a finished job are lost: its nodes are gone, or gave them up."""
        view = self.view
        if self.finished and not view.collected and not view.live_nodes(self._spec.run):
            self.kept = KeptJob(not_kept=lost_text(self._spec.name, view.checkpoint, self._spec.unit))
        elif self.finished and view.collected:
            async with ignoring_etcd_failures(_REST_S):
                found = collected_record(await self._coordinator.get(view.keys.collected))
                if found.writer:
                    self.kept = KeptJob(not_kept=found.not_kept)

    async def mark_taken(self) -> None:
        """Writes `collected`, which lets the nodes go: a user's file has the values, which nothing else keeps."""
        where = f"; `taskgraph result --json` wrote them on host {os.uname().nodename}"
        await self._mark_collected(KeptJob(not_kept=self.only_on_nodes + where))

    async def _mark_collected(self, kept: KeptJob) -> None:
        """Writes `collected`: the nodes may leave, and others read where the values are. A failure is only logged."""
        keys = self.view.keys
        # Not if another run was submitted under this name meanwhile.
        txn = Txn((Compare(keys.spec, self._run_at),), (Put(keys.collected, kept.to_bytes()),))
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


def _with_place(kept: KeptJob, where: str) -> KeptJob:
    """Adds to `not_kept` where the missing values are."""
    return structs.replace(kept, not_kept=kept.not_kept + where) if kept.not_kept else kept


async def _in_thread(work: Callable[[], T]) -> T:
    """Runs `work` in a thread, or here if no thread can start, as at the interpreter's end.

    It does not use the loop's own executor: asyncio starts another thread to end that.
    """
    pool = ThreadPoolExecutor(1)
    try:
        working = asyncio.get_running_loop().run_in_executor(pool, work)
    except RuntimeError:
        return work()
    finally:
        pool.shutdown(wait=False)
    return await working
