"""Collects the result of a finished job from its nodes. Once the result is kept, the nodes may leave.

Whoever runs the job (`tg.run`, `taskgraph run`) goes first: `results`, then `let_go`. Others who look at the job call
`collect`, which waits a while for the run, keeps the result on this host, and then lets the nodes go. In etcd this is
the key `collected`: nodes leave when they see it, and its text says where the values are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from taskgraph.coordination.api import Coordinator
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import CoordinationError, DecodeError, OutcomeUnknown, TaskGraphError
from taskgraph.launch.collect import assemble, complete, damaged, kept_copy, size_bytes
from taskgraph.launch.follow import Follower, client_of, if_etcd_answers
from taskgraph.launch.kept import kept_record, lost_text, why_given_up
from taskgraph.launch.runtime import Runtime
from taskgraph.network.tls import Tls
from taskgraph.observe.control_client import StillAtWork
from taskgraph.observe.events import Event
from taskgraph.observe.status import TaskResult
from taskgraph.protocol.kv import Compare, Put, Txn
from taskgraph.protocol.records import State, StatusRecord, name_of
from taskgraph.protocol.view import JobView
from taskgraph.results import JobResult
from taskgraph.system.alongside import alongside, any_done

__all__ = ["Collector"]

log = logging.getLogger("taskgraph.follow")

T = TypeVar("T")

_RETRY_S = 0.1
_REST_S = 1.0
"""How long etcd is asked for the events that are kept beside a result."""
_UNCOLLECTED_S = 5.0
"""After this time an event says why the results cannot be collected."""
_SILENT_S = 60.0
"""A node that was silent for so long is asked again. It is silent while it computes its results."""
_COLLECTED_S = 10.0
"""A caller that has the result waits for etcd no longer than this."""
_OTHERS_FIRST_S = 15.0
"""How long the run has to collect its results before others do it."""
_RAN_GOT = "the run has returned them"
"""Said by `tg.run` and `taskgraph run` only: others keep what they collect."""
_DAMAGED_TRIES = 3
"""A value that a network damaged arrives whole the next time; one that a memory damaged never does."""


class Collector(Follower):
    """Follows one job, and collects its result. It writes nothing but `collected` and `result`.

    Attributes:
        kept_json: the collected result as JSON; None: it is not collected, or too large.
        not_kept: why a collected result has no `kept_json`, or why it will never be collected.
        only_there: why the job's nodes alone keep a result that was collected; they were not let go.
        unreachable: why the last node that was asked did not answer; None: it computes its results.
    """

    def __init__(self, coordinator: Coordinator, spec: JobSpec, token: bytes, tls: Tls | None = None) -> None:
        super().__init__(coordinator, spec, token, tls)
        self.kept_json: str | None = None
        self.not_kept = ""
        self.only_there = ""
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
            if complete(found, self._spec.tasks):
                broken = damaged(found)
                if not broken:
                    await self.tell_rest()
                    return found
                damaged_tries += 1
                self._report_damaged(broken[0], damaged_tries)
                for task in broken:
                    del kept[task]
            await asyncio.sleep(_RETRY_S)

    async def _ask_for_others(self, kept: dict[int, TaskResult]) -> TaskGraphError | None:
        """Asks the nodes of tasks that are not `kept`, and adds their results. Returns the last error."""
        failed = None
        holders = {primary.record.node for task, primary in self.view.primaries.items() if task not in kept}
        for node, record in [(n, v.record) for n, v in sorted(self.view.nodes.items()) if n in holders]:
            try:
                async with client_of(record, self._token, self._tls) as client:
                    found = await client.results(silent_s=_SILENT_S)
                if sorted(each.task for each in found) == self._tasks_of(node):
                    kept |= {each.task: each for each in found}
            except StillAtWork:
                self.unreachable = None
            except TaskGraphError as error:  # others take its tasks over, and are asked
                self.unreachable = failed = error
        return failed

    def _report_damaged(self, task: int, tries: int) -> None:
        """Logs a damaged result; raises DecodeError after the last try."""
        holder = name_of(self.view.primaries[task].record.node)
        text = (
            f"the result of task {task} arrived damaged from node {holder}, {tries} times: its bytes are not those its "
            f"digest was taken of"
        )
        log.warning("%s", text)
        if tries == _DAMAGED_TRIES:
            raise DecodeError(text)

    def _tasks_of(self, node: str) -> list[int]:
        """Returns the tasks whose primary a node is."""
        return sorted(task for task, primary in self.view.primaries.items() if primary.record.node == node)

    async def collect(self, here: asyncio.Future[Any] | None = None, *, let_go: bool = True) -> JobResult | None:
        """Returns the result of a finished job. Once the result is kept, its nodes are let go.

        Returns None if another process collected it; if its nodes are gone, as `not_kept` says; or if the job is no
        longer finished, because it failed, or because it computes lost results again.

        Args:
            here: done once all nodes of this launcher have ended; before that some may be about to register.
            let_go: False: only look; nothing is kept, and the nodes stay.
        """
        run = self._spec.run

        def over(view: JobView) -> bool:
            there = view.live_nodes(run) or (here is not None and not here.done())
            return view.collected or not self.finished or not there

        if self._spec.expected_nodes:  # the run goes first, unless it has ended
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_OTHERS_FIRST_S):
                    await self.keeper.wait_until(over, structure=True)
        found = None if over(self.view) else await self._results_unless(over)
        if found is None:
            await self.tell_rest()
            await self._note_lost()
            return None
        result = self.assemble(found, max(each.lasted_s for each in found))  # this process may have come just now
        if let_go:
            await self._keep_and_let_go(found, result)
        return result

    async def _results_unless(self, over: Callable[[JobView], bool]) -> list[TaskResult] | None:
        """Returns `results`, or None as soon as the job is `over`."""
        async with alongside(self.results(), self.keeper.wait_until(over, structure=True)) as (collecting, ending):
            await any_done(collecting, ending)
            return collecting.result() if collecting.done() else None

    def assemble(self, found: list[TaskResult], wall_s: float) -> JobResult:
        return assemble(self._spec.name, found, self.view.primaries.values(), wall_s)

    async def let_go(self, found: list[TaskResult], result: JobResult) -> None:
        """Keeps a copy of the run's result, if possible, and lets the nodes go.

        If etcd does not take it, the nodes leave after `results_kept_s`.
        """
        copy = await _in_thread(lambda: kept_copy(result, size_bytes(found)))
        self.kept_json, self.not_kept = copy.here, copy.not_here and f"{copy.not_here}: {_RAN_GOT}"
        await self._tell_collected(copy.in_etcd, copy.not_in_etcd and f"{copy.not_in_etcd}: {_RAN_GOT}")

    async def _keep_and_let_go(self, found: list[TaskResult], result: JobResult) -> None:
        """Keeps a result that no other process may have, on this host, and then lets the nodes go.

        If it cannot be kept, the nodes stay, and `only_there` says why.
        """
        copy = await _in_thread(lambda: kept_copy(result, size_bytes(found), whole=True))
        self.kept_json, self.only_there = copy.here, copy.not_here
        if copy.here is not None:
            try:
                await self._keep_here(copy.here, self.status or StatusRecord(state=State.FINISHED))
            except (OSError, TaskGraphError) as error:  # a full disk
                log.warning("the result of job %s is not kept on this host: %s", self._spec.name, error)
                if copy.in_etcd != copy.here:
                    self.only_there = f"they are not kept on this host ({error})"
        if not self.only_there:
            where = f"`taskgraph result {self._spec.name}` has them on host {os.uname().nodename}"
            await self._tell_collected(copy.in_etcd, copy.not_in_etcd and f"{copy.not_in_etcd}; {where}")

    async def keep_end(self, status: StatusRecord, not_kept: str) -> None:
        """Keeps on this host how the job ended, unless something of this run is kept here.

        Otherwise the end and the values of an earlier run of this name would be taken for this one's.

        Args:
            not_kept: where the values are, if the job finished.
        """
        if Runtime().finished(self._spec.name, self._spec.run) is not None:
            return
        try:
            await self._keep_here(None, status, not_kept)
        except (OSError, TaskGraphError) as error:  # a full disk: what became of the job counts for more
            log.warning("how job %s ended is not kept on this host: %s", self._spec.name, error)

    async def _keep_here(self, text: str | None, status: StatusRecord | None, not_kept: str = "") -> None:
        """Writes the record; raises OSError or TaskGraphError if that fails."""
        events: list[Event] = []
        async with if_etcd_answers(_REST_S):
            events = await self.kept()

        def keep() -> None:
            Runtime().keep_finished(self._spec.name, kept_record(self._spec.run, status, not_kept, events), text)

        await _in_thread(keep)

    def only_there_text(self) -> str:
        """Says which nodes have a result that is kept nowhere else, and how to get it."""
        kept_s = self._spec.setting("results_kept_s")
        return (
            f"the nodes of job {self._spec.name} alone keep its values ({self.only_there}), for {kept_s:g} s "
            f"(results_kept_s): `taskgraph result {self._spec.name} --json > FILE` takes them"
        )

    async def tell_uncollected(self, why: str) -> None:
        """Writes why the values of a finished job are not kept, once no node is left that has them."""
        await self._tell_collected(None, why)

    async def taken(self, here: asyncio.Future[Any]) -> None:
        """Reports `only_there_text`, and waits until the result is collected or given up.

        Args:
            here: done once all nodes of this process have ended.
        """
        self._say("waits", self.only_there_text())
        await self.keeper.wait_until(lambda v: v.collected or not self.finished or here.done(), structure=True)
        await self._note_lost()

    async def _note_lost(self) -> None:
        """Sets `not_kept` if the values of a finished job are lost."""
        view = self.view
        if self.finished and not view.collected and not view.live_nodes(self._spec.run):
            self.not_kept = lost_text(self._spec.name, view.checkpoint)
        elif self.finished and view.collected:
            async with if_etcd_answers(_REST_S):
                self.not_kept = why_given_up(await self._coordinator.get(view.keys.collected))

    async def tell_taken(self, why: str) -> None:
        """Lets the nodes go once a user's file has the values; `why`: nothing else keeps them."""
        await self._tell_collected(None, f"{why}; `taskgraph result --json` wrote them on host {os.uname().nodename}")

    async def _tell_collected(self, kept: str | None, not_kept: str) -> None:
        """Writes `collected`: the nodes may leave, and others read where the values are."""
        keys = self.view.keys
        puts = [Put(keys.result, kept.encode())] if kept is not None else []
        puts.append(Put(keys.collected, json.dumps({"by": "launcher", "not_kept": not_kept}).encode()))
        # Not if another run was submitted under this name meanwhile.
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
