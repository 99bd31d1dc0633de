"""A node's life, whatever runs on it: one process takes part in a job, from registering to leaving.

load the job ──► register ──► live: follow the view ──► stop everything ──► leave
                               (until the job's end, a drain, or an error)
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any, NotRequired, Protocol, Unpack

from taskgraph.device.visible import device_ids
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import CoordinationError, FingerprintMismatch, JobError
from taskgraph.node.core import CoreArguments, NodeCore, ended_itself_text
from taskgraph.node.membership.arithmetic import describe_arithmetic
from taskgraph.node.membership.registration import Registration
from taskgraph.node.membership.suspicion import Suspicion
from taskgraph.node.usercode import lastwords
from taskgraph.node.usercode.forks import ending_forked_children
from taskgraph.node.usercode.threads import Threads
from taskgraph.observe.status import NodeStatus, TaskResult
from taskgraph.protocol import transactions
from taskgraph.protocol.records import NodeRecord, RunningCode
from taskgraph.protocol.view import JobView
from taskgraph.system.alongside import alongside, any_done
from taskgraph.transport.api import Serve

__all__ = ["OWN_TASKS", "DrainingState", "LifeArguments", "NodeLife"]

OWN_TASKS = "asyncio tasks of its own"
_STOP_S = 0.5
"""How long an ending node waits for running computes."""
_LOG_EVERY = 10
"""The number of waits of `_STOP_S` after which the node logs again which computes it waits for."""


class LifeArguments(CoreArguments):
    """Keyword arguments of `NodeLife`, beside those of `NodeCore`.

    Attributes:
        control: the address of its control service.
        token_mark: the mark of its token.
        keep_results: keep results without limit, since the launcher that collects them ends this node.
    """

    control: NotRequired[str]
    token_mark: NotRequired[str]
    keep_results: NotRequired[bool]


class DrainingState(Protocol):
    """What makes a node leave in good order."""

    def begin(self, why: str) -> None:
        """Asks the node to leave. Asking again changes nothing."""

    def announce_in_etcd(self) -> None:
        """Begins to write to etcd that this node leaves. Called if `begin` was, once the node is registered."""

    @property
    def over(self) -> bool:
        """True once the node may leave."""


class NodeLife(NodeCore):
    """One node of one job. `run` it once. A subclass sets the attributes, and says what runs here.

    Attributes:
        serving: the handler of calls from other nodes.
        file_threads: threads that read and write files.
    """

    registration: Registration
    suspicion: Suspicion
    draining_state: DrainingState
    serving: Serve
    file_threads: Threads

    def __init__(
        self, *, control: str = "", token_mark: str = "", keep_results: bool = False, **core: Unpack[CoreArguments]
    ) -> None:
        super().__init__(**core)
        self._control, self._token_mark = control, token_mark
        self._results_kept_s = None if keep_results else self.settings.results_kept_s
        self.router.on_call_refused = self._on_call_refused

    # -- what runs here ---------------------------------------------------------------------------

    def services(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Returns {name: coroutine} of further services, which run until the node leaves."""
        raise NotImplementedError

    def status(self) -> NodeStatus:
        """Returns the node's status: what runs here, and what it waits for."""
        raise NotImplementedError

    @property
    def latest_epoch(self) -> int:
        """The latest epoch that a task or worker on this node has begun, or the one at work; -1: none."""
        return self.epoch

    def in_sync(self) -> bool | None:
        """Returns True if this node has all that it should have, in sync, so that nothing is less safe than possible
        because of it.

        None: that is not known yet; the view's listeners are called again once it is.
        """
        raise NotImplementedError

    async def results(self) -> list[TaskResult]:
        """Waits for the results that are here, after the last commit; returns them."""
        raise NotImplementedError

    def set_ups(self) -> list[asyncio.Task[None]]:
        """Returns the asyncio tasks of set-ups that run now, which the node cancels at its end."""
        return []

    def stop_new_work(self) -> None:
        """Stops the parts that begin new work; called before all work on this node is ended."""

    async def end_parts(self) -> None:
        """Ends what is left, such as replicas; called once all asyncio tasks here have ended."""

    def close_threads(self) -> None:
        self.threads.close()

    def code_at_work(self) -> tuple[RunningCode, ...]:
        """Returns the user code that may be to blame, if code of an unknown task ended the node."""
        return ()

    # -- life -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Takes part in the job until the job ends, or this node has drained.

        Raises:
            TaskGraphError: the node cannot go on; the message says why.
        """
        self._failure = asyncio.get_running_loop().create_future()
        self.started_at = self.now()
        await self.transport.start(self.id, self.serving, self._on_connection_lost)
        try:
            await self.retry_until_answered(self.keeper.load)
            if self.draining:
                return  # no other node knows this one
            self._check_spec()
            await self.registration.register(self._record())
            if not self.node_revision:
                return  # the order to leave came before it was registered
            try:
                self.registration.check_reach()
                with ending_forked_children():
                    await self._live()
            finally:
                await self.registration.leave()
        finally:
            if not self._leaving:  # it does not take part, but may hold offers from its registration
                await self._stop_everything([])
            self.close_threads()
            await self.transport.close()

    async def _live(self) -> None:
        """Runs the node's services until its work is over, then stops everything; raises the error that ended
        the node.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                services = [
                    self._child(group, self.keeper.run(), "view"),
                    self._child(group, self.registration.run(), "lease"),
                    self._child(group, self.suspicion.declare_absent_gone(), "absent nodes"),
                    self._child(group, self.suspicion.lease_poll.run(), "leases"),
                    *(self._child(group, work, name) for name, work in self.services().items()),
                ]
                if self.draining:
                    self.draining_state.announce_in_etcd()
                try:
                    await self._wait_for_end()
                except asyncio.CancelledError:
                    if self._first_error is not None:  # the task group cancelled this
                        self._why_left = ended_itself_text(self._first_error)
                    elif self.own_process:
                        self._note_cancelled()
                    raise
                finally:
                    self.stop_new_work()
                    await self._stop_everything(services)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._group = None

    async def _stop_everything(self, services: list[asyncio.Task[None]]) -> None:
        """Cancels all asyncio tasks of the node until they have ended, then ends its parts."""
        self._leaving = True
        tasks = [*services, *self._owned, *self.set_ups()]
        pending, rounds = set(tasks), 0
        while pending:
            for task in pending:
                task.cancel()
            # A running compute may return first; otherwise it ends with the process.
            _, pending = await asyncio.wait(pending, timeout=_STOP_S)
            if pending:
                self.threads.cancel_futures()
                rounds += 1
                if rounds % _LOG_EVERY == 0:
                    self.log.warning("still ending: %s", ", ".join(sorted(task.get_name() for task in pending)))
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.end_parts()

    def _record(self) -> NodeRecord:
        """Makes the value of the node's key in etcd, without what changes with each write."""
        return NodeRecord(
            name=self.name,
            run=self.spec.run,
            host=self.host,
            pid=os.getpid(),
            endpoints=self.transport.endpoints,
            control=self._control,
            fingerprint=self.spec.fingerprint,
            lease=0,
            devices=self.devices,
            device_ids=device_ids(self.devices),
            token_mark=self._token_mark,
            arithmetic=describe_arithmetic(),
            machine=self.machine,
        )

    def _check_spec(self) -> None:
        """Raises if the job in etcd has another driver, run or token than this node, or was not submitted."""
        if self.keeper.view.spec is None:
            raise JobError(f"no job {self.spec.name!r} was submitted")
        submitted = JobSpec.from_bytes(self.keeper.view.spec)
        if submitted.fingerprint != self.spec.fingerprint:
            raise FingerprintMismatch(
                f"job {self.spec.name!r} was submitted with driver {submitted.fingerprint}, this node has "
                f"{self.spec.fingerprint}: start it with the same version of the driver"
            )
        if submitted.run != self.spec.run:
            raise JobError(f"job {self.spec.name!r} was submitted anew while this node started: start the node again")
        if submitted.token_mark and self._token_mark and submitted.token_mark != self._token_mark:
            raise JobError(
                f"job {self.spec.name!r} was submitted with another token than this node has: give it the file that "
                f"`taskgraph submit` wrote (--token-file)"
            )

    async def _wait_for_end(self) -> None:
        """Waits until the node's work is over. Raises the error that ends the node, if one was noted."""
        assert self._failure is not None
        async with alongside(self._wait_for_end_of_work()) as (over,):
            await any_done(over, self._failure)
            if self._failure.done():
                self._failure.result()
            await over

    async def _wait_for_end_of_work(self) -> None:
        """Waits until the job has ended and its results are collected or given up, or until this node has drained."""
        view = self.keeper.view
        while True:
            await self._wait_for_view(lambda v: not v.running or self._is_superseded())
            if self.draining_state.over or self._is_superseded() or not view.finished:
                return
            try:
                async with asyncio.timeout(self._results_kept_s):
                    await self._wait_for_view(lambda v: v.collected or self._is_superseded() or not v.finished)
            except TimeoutError:
                if await self._give_results_up():
                    return
                continue
            if not view.running:  # else the job runs again, to compute lost results
                return

    async def _give_results_up(self) -> bool:
        """Records in etcd that the results are given up. Returns False if the job has changed, and must be waited for
        again.
        """
        view, writer = self.keeper.view, self.new_writer()
        within = f"{self.settings.results_kept_s:g} s (settings.results_kept_s)"
        why = f"neither a launcher nor `taskgraph result` collected them within {within}"
        txn = transactions.give_results_up(view, why, by=self.name, writer=writer)
        try:
            async with asyncio.timeout(self.settings.call_s):
                if await self.transact(txn, key=view.keys.collected, writer=writer) is None:
                    await self.keeper.refresh()
                    return False
        except (CoordinationError, TimeoutError) as error:  # without etcd no launcher takes the results for lost
            self.log.info("the results were not given up in etcd: %s", str(error) or "no answer")
        self.log.warning("the results are given up: %s", why)
        return True

    async def _wait_for_view(self, shows: Callable[[JobView], bool]) -> None:
        """Waits until `shows` is true of the view, or this node has drained.

        Args:
            shows: must not depend on the view's `epoch`. While the node does not drain, commits are not looked at;
                the end of a drain depends on the epoch, so a draining node looks at every commit.
        """
        await self.keeper.wait_until(lambda v: shows(v) or self.draining, structure=True)
        await self.keeper.wait_until(lambda v: shows(v) or self.draining_state.over)

    def _is_superseded(self) -> bool:
        """True if the job's name belongs to another run, or was deleted."""
        return self.keeper.view.superseded or self.keeper.view.spec is None

    def drain(self, why: str) -> None:
        """Asks the node to hand everything over and leave. Asking again changes nothing."""
        self.draining_state.begin(why)

    def _on_connection_lost(self, node: str) -> None:
        if self.running:
            self.suspicion.note_connection_lost(node)

    def _on_call_refused(self, node: str) -> None:
        if self.running:
            self.suspicion.note_call_refused(node)

    def _note_cancelled(self) -> None:
        """Notes that the node was cancelled: in a node's own process only user code does that, of an unknown task."""
        self._why_left = (
            "was ended by user code (sys.exit in an asyncio task of its own, a cancel of all, or loop.stop)"
        )
        self._ran_code = self.code_at_work()
        if lastwords.here is not None:  # this node may not be able to tell etcd
            for ran in self._ran_code:
                lastwords.here.note_call((ran.task, -1), ran.task, ran.epoch, lastwords.encoded_name(OWN_TASKS))
        self.log.error("this node %s", self._why_left)
