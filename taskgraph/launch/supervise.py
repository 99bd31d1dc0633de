"""Supervises one job's nodes on this host, from their start to the job's end. Ends every node in any case."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from taskgraph.coordination.api import Coordinator
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import JobFailed, JobTimeout, TaskGraphError, error_text
from taskgraph.launch.collector import Collector
from taskgraph.launch.follow import DELETED, find_kept, ignoring_etcd_failures, node_statuses
from taskgraph.launch.forkserver import ForkServer, NotStarted
from taskgraph.launch.kept import KeptJob, job_failed
from taskgraph.launch.local import LocalNodes
from taskgraph.launch.resuming import finish_checkpoint
from taskgraph.launch.runtime import JobEntry, Runtime
from taskgraph.launch.standing import with_stalls
from taskgraph.network.listening import NOWHERE, Listening
from taskgraph.node.membership.failing import culprit_text, memory_text
from taskgraph.observe.events import Event
from taskgraph.observe.status import TaskResult, waits_text
from taskgraph.protocol.records import GoneRecord, JobStatus, StatusRecord, name_of
from taskgraph.protocol.view import JobView
from taskgraph.results import JobResult
from taskgraph.system.alongside import alongside, any_done
from taskgraph.system.processes import signal_name

__all__ = ["FrontEndHooks", "Supervisor", "end_reason", "launch_nodes"]

log = logging.getLogger("taskgraph.launch")

E = TypeVar("E", bound=Exception)

_NODE_END_S = 5.0
"""Nodes that are to leave, or whose job ended, get this long."""
_CANCELLED_END_S = 1.0
"""Nodes of an interrupted job get less: a user waits, and needs nothing of theirs."""
_LAST_WORDS_S = 2.0
"""etcd gets this long for the last status of a job, and for its events."""
_TAILS = 8
"""A failure shows the logs of at most this many nodes: etcd keeps the text, too."""
_ALL_ENDED_S = 1.0
"""All nodes may have ended because the job did: its end is read within this time."""
_SAME_SIGNAL_S = 0.1
"""All processes of a group have acted upon a signal within this time."""

_INTERRUPTED = "interrupted"


@dataclass
class FrontEndHooks:
    """Functions of a front end that are called during a run.

    Attributes:
        on_event: gets every event of the job, until it raises, which is logged.
        on_start: (follower, nodes) once the nodes are started.
    """

    on_event: Callable[[Event], None] | None = None
    on_start: Callable[[Collector, LocalNodes], None] | None = None


class Supervisor:
    """Starts nodes for a submitted job, follows it to its end, collects its result. The caller stops the follower.

    Args:
        etcd_ended: returns when the job's own etcd ended, and how; None: the etcd is not the job's own.
        ahead: a fork server that was started before.
        replace: start another node in place of one that died, while the job runs.
    """

    def __init__(
        self,
        spec: JobSpec,
        entry: JobEntry,
        coordinator: Coordinator,
        follower: Collector,
        hooks: FrontEndHooks,
        *,
        listening: Listening = NOWHERE,
        etcd_ended: Callable[[], Awaitable[str]] | None = None,
        ahead: ForkServer | None = None,
        replace: bool = False,
    ) -> None:
        self._spec = spec
        self._entry = entry
        self._coordinator = coordinator
        self._follower = follower
        self._hooks = hooks
        self._etcd_ended = etcd_ended
        self._began = time.monotonic()
        self._runtime = Runtime()
        self._nodes = LocalNodes(
            entry,
            coordinator,
            self._runtime,
            blas_threads=spec.setting("blas_threads"),
            deal_devices=spec.setting("deal_devices"),
            listening=listening,
            collects=True,
            ahead=ahead,
            replace=lambda: replace and follower.has_work,
        )
        self._without_etcd = ""
        """The way in which the job's own etcd ended; "": it runs, or there is none."""
        self._uncollected = ""
        """Why the values of a finished job were not collected."""

    async def run(self, count: int, timeout_s: float | None) -> JobResult:
        """Runs the job on `count` nodes of this host, and returns its result.

        Raises:
            JobFailed: the job failed, or no node is left.
            JobTimeout: it did not end within `timeout_s`; None: there is no limit.
        """
        grace_s = others_s = _NODE_END_S
        try:
            try:
                async with asyncio.timeout(timeout_s):  # from the first read on an etcd that is away is waited for
                    await self._follower.start(self._hooks.on_event)
                    await self._start(count)
                    if self._hooks.on_start is not None:
                        self._hooks.on_start(self._follower, self._nodes)
                    found, result = await self._wait_for_result()
            except TimeoutError:
                raise await self._end_after_timeout(timeout_s or 0.0) from None
            await self._follower.let_nodes_go(found, result)
            others_s += self._spec.setting("cancel_s")
            await self._nodes.wait_to_end(_NODE_END_S, self._spec.setting("cancel_s"))
            return result
        except asyncio.CancelledError as error:
            grace_s = others_s = _CANCELLED_END_S
            self._uncollected = _why_uncollected(error)
            await asyncio.shield(self._try_to_end(_INTERRUPTED, JobStatus.CANCELLED))
            raise
        except JobFailed as error:
            self._uncollected = _why_uncollected(error)
            if self._without_etcd:
                grace_s = 0.0  # its nodes cannot hand anything over
            else:
                await self._nodes.wait(_CANCELLED_END_S)  # they read the failure, and leave
            raise
        except Exception as error:  # not the job's failure, but its status must say why it ended
            self._uncollected = _why_uncollected(error)
            await self._try_to_end(end_reason(error), JobStatus.FAILED)
            raise
        finally:
            await self._finish(grace_s, others_s)

    async def _start(self, count: int) -> None:
        """Starts the nodes; if a process cannot be started, ends the job and raises JobFailed."""
        try:
            await self._nodes.start(count)
        except NotStarted as error:
            await self._try_to_end(str(error), JobStatus.FAILED)
            raise JobFailed(str(error), job=self._spec.name) from error

    async def _wait_for_result(self) -> tuple[list[TaskResult], JobResult]:
        """Waits for the job's end, and returns its results. Raises if all nodes or etcd end first, or the job cannot be
        followed.
        """
        stops = [self._fail_without_nodes(), self._follower.wait_until_broken()]
        if self._etcd_ended is not None:
            stops.append(self._fail_without_etcd(self._etcd_ended))
        async with alongside(self._collect_at_end()) as (ending,), alongside(*stops) as stopped:
            await any_done(ending, *stopped)
            if not ending.done() and (not self._without_etcd or not self._follower.view.running):
                await asyncio.wait([ending], timeout=_ALL_ENDED_S)
            if ending.done():
                result: tuple[list[TaskResult], JobResult] = ending.result()
                _report_deaths(self._nodes)
                return result
            for other in stopped:
                if other.done():
                    await other
            raise AssertionError("each of them raises")

    async def _collect_at_end(self) -> tuple[list[TaskResult], JobResult]:
        """Waits for the job's end; returns the results of its tasks, and the job's. Raises JobFailed if it failed."""
        status = await self._follower.wait_for_end()
        if status.state != JobStatus.FINISHED:
            await self._follower.report_last_events()
            raise self._with_resume_hint(job_failed(self._spec.name, with_stalls(status, self._nodes.stalls)))
        async with alongside(self._wait_for_failure(), self._follower.results()) as (failed, collecting):
            await any_done(failed, collecting)
            if failed.done():
                await self._follower.report_last_events()
                raise self._with_resume_hint(job_failed(self._spec.name, failed.result()))
            found = collecting.result()
        return found, self._follower.assemble(found, time.monotonic() - self._began)

    async def _wait_for_failure(self) -> StatusRecord:
        """Waits until a finished job fails all the same, as one whose `result()` raised; returns its status.

        A roll-back, after which the job runs again, is no failure.
        """
        keeper, going_on = self._follower.keeper, (JobStatus.FINISHED, JobStatus.RUNNING)
        await keeper.wait_until(lambda v: v.status is None or v.status.record.state not in going_on, structure=True)
        status = keeper.view.status
        return status.record if status else StatusRecord(state=JobStatus.CANCELLED, reason=DELETED)

    async def _fail_without_nodes(self) -> None:
        """Waits until every node started here has ended, and no other node is there or may come back; then raises
        JobFailed.
        """
        await self._nodes.wait(None)
        keeper, run = self._follower.keeper, self._spec.run
        await keeper.refresh()  # the watch may be late
        while True:
            await keeper.wait_until(lambda view: not view.live_nodes(run), structure=True)
            await self._wait_for_absent_nodes()
            await asyncio.sleep(_ALL_ENDED_S)  # the job may have ended: that is read meanwhile
            if not keeper.view.live_nodes(run):
                break
        what = "no node is left to go on"
        if self._follower.view.collected:
            raise JobFailed(await self._collected_elsewhere_text(), job=self._spec.name)
        if self._follower.view.finished:
            what = (
                f"its results, of a job that had finished, with them ({self._follower.unreachable or 'not asked for'})"
            )
        silent = f" or was silent for {self._lost_after_s:g} s" if self._absent_nodes_of_others(keeper.view) else ""
        ended = f"every node has ended{silent}, {what}{self._follower.resume_hint('; ')}"
        reason = f"{_last_end_text(self._nodes)}{ended}\n{_log_tails(self._nodes)}"
        await self._try_to_end(reason, JobStatus.FAILED)
        raise JobFailed(reason, job=self._spec.name)

    async def _wait_for_absent_nodes(self) -> None:
        """Waits, at most `lost_after_s`, for absent nodes of other launchers: their host or etcd may have paused."""
        keeper, run = self._follower.keeper, self._spec.run
        absent = self._absent_nodes_of_others(keeper.view)
        if not absent:
            return
        log.warning(
            "every node started here has ended, and the key of %s is gone: waiting %g s for it to come back",
            ", ".join(map(name_of, absent)),
            self._lost_after_s,
        )
        back = keeper.wait_until(
            lambda view: bool(view.live_nodes(run)) or not self._absent_nodes_of_others(view), structure=True
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._lost_after_s):
                await back

    def _absent_nodes_of_others(self, view: JobView) -> list[str]:
        """Returns nodes started elsewhere that hold a task, are not registered, and are not declared gone."""
        holders = {known.record.node for known in view.primaries.values()}
        holders |= {node for task in view.primaries for node in view.in_sync(task)}
        return sorted(holders - view.nodes.keys() - view.gone.keys() - self._nodes.ids())

    @property
    def _lost_after_s(self) -> float:
        return float(self._spec.setting("lost_after_s"))

    async def _collected_elsewhere_text(self) -> str:
        """Says where the results of a finished job are that another process collected."""
        await self._read_collected()
        kept = self._follower.kept
        has = f"another process collected them first, and `taskgraph result {self._spec.name}` has its values"
        return (
            f"job {self._spec.name!r} has finished, but this run did not collect its results: "
            f"{has if kept.result else kept.not_kept}"
        )

    async def _read_collected(self) -> None:
        """Sets the follower's `kept` to the results that another process collected, or to why they are not known."""
        kept = self._runtime.find_finished(self._spec.name, self._spec.run)
        async with ignoring_etcd_failures(_LAST_WORDS_S):
            kept = await find_kept(self._coordinator, self._spec.name) or kept
        if kept is None or not (kept.result or kept.not_kept):
            kept = KeptJob(not_kept="another process collected them")
        self._follower.kept = kept

    def _with_resume_hint(self, error: E) -> E:
        """Adds a note to the error that says how the job can be continued."""
        pointer = self._follower.view.checkpoint
        # An error that names the checkpoint says that it cannot be used.
        if pointer is not None and pointer.record.name not in str(error):
            error.add_note(self._follower.resume_hint())
        return error

    async def _fail_without_etcd(self, ended: Callable[[], Awaitable[str]]) -> None:
        """Waits until the job's own etcd has ended; then raises JobFailed."""
        self._without_etcd = how = await ended()
        kept = self._runtime.kept_logs(self._spec.name)
        lost = "the job cannot end" if self._spec.elastic else "no epoch can commit"
        if self._follower.view.finished:
            lost = "the results, of a job that had finished, cannot be collected"
        raise JobFailed(
            f"job {self._spec.name!r}: its embedded etcd has ended, so that {lost}. It {how}\n"
            f"Its log and those of the nodes are kept in {kept}. Run the job again, or on your own etcd (--etcd): "
            f"a job outlives its restart{self._follower.resume_hint('; ')}",
            job=self._spec.name,
        )

    async def _end_after_timeout(self, timeout_s: float) -> JobTimeout:
        """Ends a job that reached its time limit, and returns the error to raise."""
        what = f"did not end within {timeout_s:g} s; {await self._waits()}"
        await self._try_to_end(f"it {what}", JobStatus.FAILED)
        return self._with_resume_hint(JobTimeout(f"job {self._spec.name!r} {what}", job=self._spec.name))

    async def _waits(self) -> str:
        """Asks the nodes, and says what the job waits for."""
        view = self._follower.view
        if view.finished:
            why = self._follower.unreachable or "`result()` of some task was still at work, or they were on their way"
            return f"its {'steps' if self._spec.elastic else 'epochs'} were done, and its results not yet here: {why}"
        statuses = await node_statuses(view, self._spec.run, self._entry.token_bytes, self._entry.node_access)
        said = [status for status in statuses.values() if not isinstance(status, TaskGraphError)]
        if statuses and not said:
            return f"none of its nodes answers: {next(iter(statuses.values()))}"
        return waits_text(said, elastic=self._spec.elastic)

    async def _try_to_end(self, reason: str, state: str) -> None:
        """Writes to etcd that the job ended, in this state; gives up if etcd refuses or does not answer in time."""
        async with ignoring_etcd_failures(_LAST_WORDS_S):
            await self._follower.cancel_job(reason, state=state)

    async def _note_uncollected(self) -> None:
        """Sets the follower's `kept` to why values were not collected; writes it to etcd unless nodes keep them."""
        self._follower.kept = KeptJob(not_kept=self._uncollected)
        if self._without_etcd or self._follower.view.live_nodes(self._spec.run):
            return
        async with ignoring_etcd_failures(_LAST_WORDS_S):
            await self._follower.mark_uncollected(self._uncollected)

    async def _wait_for_others(self, within_s: float) -> None:
        """Waits until nodes of other launchers have left, if our etcd ends with the job, where they read that."""
        keeper, run = self._follower.keeper, self._spec.run
        if self._etcd_ended is None or keeper.view.has_work:
            return
        ours = self._nodes.ids()
        left = keeper.wait_until(lambda view: view.live_nodes(run).keys() <= ours, structure=True)
        async with alongside(left, self._fail_without_etcd(self._etcd_ended)) as waits:
            await asyncio.wait(waits, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)

    async def _finish(self, grace_s: float, others_s: float) -> None:
        """Ends all nodes here, waits for those elsewhere (`others_s`), and keeps on this host how the job ended."""
        follower = self._follower
        await self._nodes.stop(grace_s, tell=not self._without_etcd)
        if not self._without_etcd:  # else the last known view is kept
            async with ignoring_etcd_failures(_LAST_WORDS_S):
                await follower.keeper.load()
            await self._wait_for_others(others_s)
        view, status = follower.view, follower.status
        if self._etcd_ended is not None and view.checkpoint is not None and not follower.finished:
            await finish_checkpoint(self._spec, view.checkpoint.record)
        collected = follower.kept.result or follower.kept.not_kept
        if follower.finished and self._uncollected and not collected:
            await (self._read_collected() if view.collected else self._note_uncollected())
        if status is None and follower.kept.result:
            status = StatusRecord(state=JobStatus.FINISHED)
        if self._without_etcd and view.running:
            reason = f"its embedded etcd {self._without_etcd}"
            status = StatusRecord(state=JobStatus.FAILED, reason=reason, writer="launcher")
        await follower.keep_end(status, etcd=not self._without_etcd)


def _why_uncollected(error: BaseException) -> str:
    """Says why a run ended without the values of a finished job."""
    if isinstance(error, asyncio.CancelledError):
        return "the run was interrupted before they were collected"
    if isinstance(error, JobTimeout):
        return "the run had no more time to collect them (timeout_s)"
    return f"the run ended before they were collected: {error_text(error).splitlines()[0]}"


def end_reason(error: BaseException) -> str:
    """Says why a launcher ended a job."""
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        return _INTERRUPTED
    return f"its launcher could not go on: {error_text(error)}"


def _report_deaths(nodes: LocalNodes) -> None:
    """Logs why, if all nodes started here died before the job was over. No event of a job that did not fail says it."""
    if (codes := nodes.codes()) and not nodes.alive_count and codes.keys() == nodes.deaths().keys():
        log.warning("every node started here had ended before the job was over\n%s", _log_tails(nodes))


def _last_end_text(nodes: LocalNodes) -> str:
    """Says how and why the last node ended, as the beginning of a message; "": no node of this launcher ended."""
    codes = list(nodes.codes().items())
    if not codes:
        return ""
    name, code = codes[-1]
    last = next(reversed(nodes.log_tail(name).strip().splitlines()), "")
    said = last.removeprefix("taskgraph node: ")
    if code > 0 and said != last:  # an error of ours, in one line
        return f"{name}: {said.rstrip('.')}\n"
    return f"{name} {_death_text(code, nodes.deaths().get(name))}; "


def _log_tails(nodes: LocalNodes) -> str:
    """Returns the ends of the logs of the last nodes that died or failed, and what they have in common."""
    deaths = nodes.deaths()
    codes = [(name, code) for name, code in nodes.codes().items() if code or name in deaths]
    alike: dict[tuple[str, str], list[str]] = {}
    for name, code in codes[-_TAILS:]:
        alike.setdefault((_death_text(code, deaths.get(name)), nodes.log_tail(name)), []).append(name)
    shown = [
        f"--- {', '.join(sorted(names))} {how}; the end of {'its log' if len(names) == 1 else 'each log'}:\n{tail}"
        for (how, tail), names in alike.items()
    ]
    more = [f"--- and {len(codes) - _TAILS} before"] if len(codes) > _TAILS else []
    why = [f"--- {text}" for text in (culprit_text(deaths), memory_text(deaths)) if text]
    return "\n".join([*shown, *more, *why])


def _death_text(code: int, death: GoneRecord | None) -> str:
    """Says how a node ended, and while which code ran."""
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    if death is not None and death.out_of_memory:
        how = f"was {death.reason}"
    if death is not None and death.running:
        how += f" while it ran {' and '.join(death.running)}"
    return how + (f" at {death.at}" if death is not None and death.at else "")


async def launch_nodes(
    entry: JobEntry,
    coordinator: Coordinator,
    follower: Collector,
    spec: JobSpec,
    count: int,
    listening: Listening,
    on_start: Callable[[LocalNodes], None],
    leave: asyncio.Event,
    *,
    etcd_ends: bool = False,
    replace: bool = False,
) -> tuple[StatusRecord, JobResult | None]:
    """Runs nodes on this host for a job that was submitted elsewhere, until the job or all of them ended.

    Args:
        on_start: gets the nodes once they are started.
        leave: once it is set, the nodes hand over and leave, within `drain_s`. A cancellation after that ends them at
            once.
        etcd_ends: the run ends the etcd once the job has ended and no node is registered.
        replace: start another node in place of one that died, while the job runs.

    Returns:
        The job's status, and its result, if this process collected it; else `kept` of the follower says why not. If
        the job goes on, the status's reason is why the nodes here do not; "": they were asked to leave.
    """
    listening.check(count)
    nodes = LocalNodes(
        entry,
        coordinator,
        Runtime(),
        blas_threads=spec.setting("blas_threads"),
        deal_devices=spec.setting("deal_devices"),
        listening=listening,
        replace=lambda: replace and follower.has_work,
    )
    try:
        await _start_unless(leave, nodes, count)
        on_start(nodes)
        leaves = _leave_when(leave, nodes, spec.setting("drain_s"))
        async with (
            alongside(nodes.wait(None)) as (gone,),
            alongside(_collect_at_end(follower, gone), follower.wait_until_broken(), leaves) as (
                ending,
                broken,
                leaving,
            ),
        ):
            gone.add_done_callback(lambda _: follower.keeper.notify_later())
            await any_done(ending, gone, broken, leaving)
            for service in (broken, leaving):
                if service.done():
                    await service
            if not ending.done():
                await asyncio.wait([ending], timeout=_ALL_ENDED_S)
            if not ending.done() and not follower.finished:
                reason = f"every node started here has ended\n{_log_tails(nodes)}\n" if nodes.deaths() else ""
                return StatusRecord(state=JobStatus.RUNNING, reason=reason), None
            # Nodes keep results until they are collected, and leave then. Nodes elsewhere may still have them.
            await any_done(ending, broken)
            if not ending.done():
                await broken
            if ending.result()[0].state != JobStatus.FAILED:
                _report_deaths(nodes)
            until_left = [_follow_until_left(follower, nodes, spec.run)] if etcd_ends else []
            async with alongside(*until_left):
                await nodes.wait_to_end(_NODE_END_S, spec.setting("cancel_s"))
            result: tuple[StatusRecord, JobResult | None] = ending.result()
            return result
    finally:
        await nodes.stop(0.0 if leave.is_set() else _NODE_END_S)


async def _follow_until_left(follower: Collector, nodes: LocalNodes, run: str) -> None:
    """Follows the job until its nodes here are not registered, and stops then: its etcd ends at that moment."""
    ours = nodes.ids()
    await follower.keeper.wait_until(lambda view: ours.isdisjoint(view.live_nodes(run)), structure=True)
    await follower.stop()


async def _start_unless(leave: asyncio.Event, nodes: LocalNodes, count: int) -> None:
    """Starts nodes. Once `leave` is set, stops starting them."""
    async with alongside(nodes.start(count), leave.wait()) as (starting, leaving):
        await any_done(starting, leaving)
        if starting.done() and starting.exception() is not None:
            # A signal to the whole group ends the fork server, too, and perhaps first.
            await asyncio.wait([leaving], timeout=_SAME_SIGNAL_S)
        if not leaving.done():
            await starting


async def _collect_at_end(follower: Collector, gone: asyncio.Future[None]) -> tuple[StatusRecord, JobResult | None]:
    """Waits for the job's end; returns its status and, if this process collected it, its result. A finished job may run
    again if it lost its results.

    Args:
        gone: done once all nodes that were started here have ended.
    """
    while True:
        status, result = await follower.wait_for_end(), None
        if status.state == JobStatus.FINISHED:
            result = await follower.collect(gone)
            if result is None and not follower.finished:
                continue
            if follower.only_on_nodes:
                await follower.wait_until_taken(gone)
        return status, result


async def _leave_when(leave: asyncio.Event, nodes: LocalNodes, within_s: float) -> None:
    """Waits until `leave` is set; then has the nodes hand over and leave, within `within_s`."""
    await leave.wait()
    await nodes.drain_or_kill(within_s + _NODE_END_S)
