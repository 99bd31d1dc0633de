"""Collecting the result of a job that has finished: from its nodes, which may leave once it is kept."""

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
from taskgraph.errors import CoordinationError, DecodeError, JobFailed, OutcomeUnknown, TaskGraphError
from taskgraph.launch.collect import assemble, complete, damaged, kept_copy, size_bytes
from taskgraph.launch.follow import Follower, client_of, if_etcd_answers
from taskgraph.launch.kept import kept_record, lost_text, why_given_up
from taskgraph.launch.runtime import Runtime
from taskgraph.network.tls import Tls
from taskgraph.observe.control_client import StillAtWork, control_address
from taskgraph.observe.events import Event
from taskgraph.observe.status import TaskResult
from taskgraph.protocol.kv import Compare, Put, Txn
from taskgraph.protocol.records import NodeRecord, State, StatusRecord, name_of
from taskgraph.protocol.view import JobView
from taskgraph.results import JobResult
from taskgraph.system.alongside import alongside, any_done
from taskgraph.transport.endpoints import host_key

__all__ = ["Collector"]

log = logging.getLogger("taskgraph.follow")

T = TypeVar("T")

_RETRY_S = 0.1
_REST_S = 1.0
"""How long etcd is asked for what is kept beside a result."""
_UNCOLLECTED_S = 5.0
"""Results that cannot be collected for longer, with nobody to take over from who keeps them, are told of."""
_GONE_S = 30.0
"""A node of this host that nobody can connect to for so long after its lease would have ended will not be reached any
more: it looks every two seconds whether its socket is there."""
_SILENT_S = 60.0
"""A node that told nothing for so long is asked again. One that computes its results tells nothing meanwhile."""
_COLLECTED_S = 10.0
"""Whoever has the result does not wait for etcd any longer."""
_OTHERS_FIRST_S = 15.0
"""How long whoever ran the job has for its results before others collect them and let the nodes go."""
_RAN_GOT = "who ran the job got them"
"""True of `tg.run` and `taskgraph run` only: others who collect keep what they got."""
_DAMAGED_TRIES = 3
"""What a network damaged arrives whole the next time; what a memory damaged never does."""


def _gone_socket(record: NodeRecord) -> str:
    """The file of this host by which a node is reached, where it is not there; "" otherwise."""
    try:
        kind, _, path = control_address(record.control, host_key()).partition(":")
    except TaskGraphError:
        return ""
    return path if kind == "unix" and not os.path.exists(path) else ""


class Collector(Follower):
    """Follows one job, and collects its result. Reads only, but for `collected`, with which its nodes may leave."""

    def __init__(self, coordinator: Coordinator, spec: JobSpec, token: bytes, tls: Tls | None = None) -> None:
        super().__init__(coordinator, spec, token, tls)
        self.kept_json: str | None = None
        """The result as JSON, once it was collected and unless it is too large for that."""
        self.not_kept = ""
        """Why there is none, if it was collected, or nobody will."""
        self.only_there = ""
        """Why a result that we got is kept by the job's nodes alone, which were not let go."""
        self.unreachable: TaskGraphError | None = None
        """Why a node did not tell its results, last; None where it computes them still."""
        self._gone: dict[str, float] = {}  # nodes whose sockets are gone, since when

    async def results(self, *, else_lost: bool = False) -> list[TaskResult]:
        """The results of all tasks, of one (epoch, attempt); through takeovers, for as long as it takes.

        Args:
            else_lost: their nodes keep them for us alone.

        Raises:
            DecodeError: values arrive damaged, again and again.
            FingerprintMismatch: the nodes' digests are not those of this version.
            JobFailed: with `else_lost`, the socket of a node that lives is gone for good.
        """
        self._spec.check_protocol()
        damaged_tries = 0
        tell_at = time.monotonic() + _UNCOLLECTED_S
        kept: dict[int, TaskResult] = {}  # of nodes that told all of theirs: what may be large is not asked for twice
        while True:
            failed = await self._ask_for_others(kept)
            if else_lost:
                await self._see_gone()
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
                self._tell_damaged(broken[0], damaged_tries)
                for task in broken:
                    del kept[task]
            await asyncio.sleep(_RETRY_S)

    async def _ask_for_others(self, kept: dict[int, TaskResult]) -> TaskGraphError | None:
        """Asks the nodes of tasks that are not `kept`, and adds what they tell. Why the last one that failed did."""
        failed, was_gone, self._gone = None, self._gone, {}
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
                if _gone_socket(record):
                    self._gone[node] = was_gone.get(node, time.monotonic())
        return failed

    async def _see_gone(self) -> None:
        """Raises JobFailed where a node lives whose socket was not there for too long. Where etcd does not answer, it
        cannot tell that the node has ended."""
        limit_s = _GONE_S + self._spec.setting("lease_ttl_s")
        for node, since in self._gone.items():
            if time.monotonic() - since <= limit_s:
                continue
            async with if_etcd_answers(_REST_S):
                await self.keeper.load()
                if node in self.view.nodes:
                    path = _gone_socket(self.view.nodes[node].record)
                    raise JobFailed(
                        f"job {self._spec.name!r} has finished, and its values cannot be collected: node "
                        f"{name_of(node)} lives, and keeps them, but its socket {path} is gone, and could not be made "
                        f"anew. Something removes what is in the runtime directory, such as a cleaner of temporary "
                        f"files, or a logout: set TASKGRAPH_RUNTIME_DIR to a directory that stays",
                        job=self._spec.name,
                    )

    def _tell_damaged(self, task: int, tries: int) -> None:
        """Raises DecodeError after the last try."""
        holder = name_of(self.view.primaries[task].record.node)
        text = (
            f"the result of task {task} arrived damaged from node {holder}, {tries} times: its bytes are not those its "
            f"digest was taken of"
        )
        log.warning("%s", text)
        if tries == _DAMAGED_TRIES:
            raise DecodeError(text)

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
                await self._keep_here(copy.here, self.status or StatusRecord(state=State.FINISHED))
            except (OSError, TaskGraphError) as error:  # a full disk
                log.warning("the result of job %s is not kept on this host: %s", self._spec.name, error)
                if copy.in_etcd != copy.here:
                    self.only_there = f"they are not kept on this host ({error})"
        if not self.only_there:
            where = f"`taskgraph result {self._spec.name}` has them on host {os.uname().nodename}"
            await self._tell_collected(copy.in_etcd, copy.not_in_etcd and f"{copy.not_in_etcd}; {where}")

    async def keep_end(self, status: StatusRecord, not_kept: str) -> None:
        """Keeps on this host how the job ended, where nothing of this run is kept here.

        What is kept of an earlier run of its name would be taken for this one's: its end, and its values.

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
        """Raises OSError or TaskGraphError where it cannot be kept."""
        events: list[Event] = []
        async with if_etcd_answers(_REST_S):
            events = await self.kept()

        def keep() -> None:
            Runtime().keep_finished(self._spec.name, kept_record(self._spec.run, status, not_kept, events), text)

        await _in_thread(keep)

    def only_there_text(self) -> str:
        """Who has a result that was kept nowhere, and how one gets it."""
        kept_s = self._spec.setting("results_kept_s")
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
            async with if_etcd_answers(_REST_S):
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
