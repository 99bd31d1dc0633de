"""The node: what one process does for a job, from registering to leaving.

    load the job ──► register ──► live: reconcile with the view ──► stop everything ──► leave
                                   (until the job's end, a drain, or an error)

This module puts the parts together. `core.py` has what every part needs, `roles.py` what runs here of the tasks.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Unpack

from taskgraph.device.visible import device_ids
from taskgraph.driver.spec import JobSpec
from taskgraph.errors import CoordinationError, FingerprintMismatch, JobError
from taskgraph.node.answers import node_status, task_results
from taskgraph.node.core import Point, ended_itself
from taskgraph.node.membership.arithmetic import arithmetic
from taskgraph.node.membership.draining import Draining
from taskgraph.node.membership.failed_setups import FailedSetUps
from taskgraph.node.membership.fatal import FatalCode
from taskgraph.node.membership.notices import Notices
from taskgraph.node.membership.registration import Registration
from taskgraph.node.membership.suspicion import Suspicion
from taskgraph.node.primary.takeovers import TakeOvers
from taskgraph.node.reconciler import Reconciler
from taskgraph.node.roles import Roles
from taskgraph.node.services import NodeServices, ServicesArguments
from taskgraph.node.serving import Serving
from taskgraph.node.usercode import lastwords
from taskgraph.node.usercode.forks import kept_from_children
from taskgraph.observe.status import NodeStatus, TaskResult
from taskgraph.protocol import transactions
from taskgraph.protocol.records import NodeRecord, RunningCode
from taskgraph.protocol.view import JobView
from taskgraph.system.alongside import alongside, any_done

__all__ = ["Node", "Point"]

_OWN_TASKS = "asyncio tasks of its own"
_STOP_S = 0.5
"""How long an ending node waits for running computes."""
_LOG_EVERY = 10
"""The number of waits of `_STOP_S` after which the node logs again which computes it waits for."""


class Node(NodeServices):
    """One node of one job. `run` it once."""

    def __init__(
        self,
        *,
        control: str = "",
        token_mark: str = "",
        keep_results: bool = False,
        **services: Unpack[ServicesArguments],
    ) -> None:
        """Args:
        control: the address of its control service.
        token_mark: the mark of its token.
        keep_results: keep results without limit, since the launcher that collects them ends this node.
        """
        super().__init__(**services)
        self._control, self._token_mark = control, token_mark
        self._results_kept_s = None if keep_results else self.settings.results_kept_s
        self.roles = Roles(self)
        self.suspicion = Suspicion(
            self,
            self.roles.primaries,
            unproved=lambda: self.registration.unproved,
            changed=self.roles.reconsider,
        )
        fatal_code = FatalCode(self, self.roles.reconsider)
        self.takeovers = TakeOvers(self, self.roles, suspicion=self.suspicion, fatal_code=fatal_code)
        self.failed_set_ups = FailedSetUps(
            self, lambda: bool(self.roles.primaries or self.roles.runs or self.takeovers.any_under_way)
        )
        self.notices = Notices(self, self.roles)
        self.reconciler = Reconciler(
            self,
            self.roles,
            suspicion=self.suspicion,
            fatal_code=fatal_code,
            takeovers=self.takeovers,
            notices=self.notices,
        )
        self.registration = Registration(self, suspicion=self.suspicion, reconcile=self.reconciler.reconcile)
        self.serving = Serving(self, self.roles, self.takeovers)
        self._draining = Draining(
            self, lambda: not (self.roles.primaries or self.roles.runs), lambda: self.registration.waits
        )
        self.router.on_gone = self._on_call_refused
        # From the first read on: a node takes offers while it registers, and must drop boundaries that a roll-back
        # undid before it holds later ones.
        self._stop_following = self.keeper.on_change(self.reconciler.follow)

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
                with kept_from_children():
                    await self._live()
            finally:
                await self.registration.leave()
        finally:
            if not self._leaving:  # it does not take part, but may hold offers from its registration
                await self._stop_everything([])
            self.threads.close()
            self.file_threads.close()
            await self.transport.close()

    async def _live(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                services = [
                    self._child(group, self.keeper.run(), "view"),
                    self._child(group, self.registration.run(), "lease"),
                    self._child(group, self.suspicion.watch_absent(), "absent nodes"),
                    self._child(group, self.suspicion.ended_leases.watch(), "leases"),
                    self._child(group, self.notices.watch(), "notices"),
                    self._child(group, self.reconciler.run(), "reconcile"),
                ]
                if self.draining:
                    self._draining.announce()
                try:
                    await self._wait_for_end()
                except asyncio.CancelledError:
                    if self._first_error is not None:  # the task group cancelled this
                        self._why_left = ended_itself(self._first_error)
                    elif self.own_process:
                        self._note_cancelled()
                    raise
                finally:
                    self._stop_following()
                    await self._stop_everything(services)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._group = None

    async def _stop_everything(self, services: list[asyncio.Task[None]]) -> None:
        self._leaving = True
        setups = [r.setting_up for r in self.roles.replicas.values() if r.setting_up is not None]
        tasks = [*services, *self._owned, *setups]
        pending, rounds = set(tasks), 0
        while pending:
            for task in pending:
                task.cancel()
            # A running compute may return first; otherwise it ends with the process.
            _, pending = await asyncio.wait(pending, timeout=_STOP_S)
            if pending:
                self.threads.abandon()
                rounds += 1
                if rounds % _LOG_EVERY == 0:
                    self.log.warning("still ending: %s", ", ".join(sorted(task.get_name() for task in pending)))
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.roles.end()

    def _record(self) -> NodeRecord:
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
            arithmetic=arithmetic(),
            machine=self.machine,
        )

    def _check_spec(self) -> None:
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
        """Returns when the node's work is over. Raises the error that ends the node, if one was noted."""
        assert self._failure is not None
        async with alongside(self._wait_for_end_of_work()) as (over,):
            await any_done(over, self._failure)
            if self._failure.done():
                self._failure.result()
            await over

    async def _wait_for_end_of_work(self) -> None:
        view = self.keeper.view
        while True:
            await self._wait_for_view(lambda v: not v.running or self._is_superseded())
            if self._draining.over or self._is_superseded() or not view.finished:
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
        """Records in etcd that the results are given up. False if the job changed: look at it again."""
        view, writer = self.keeper.view, self.writer()
        why = f"nobody collected them within {self.settings.results_kept_s:g} s (settings.results_kept_s)"
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
        """Returns when `shows` holds for the view, or this node has drained.

        Only a draining node looks at every commit: the holders of a boundary depend on the epoch. `shows` must not.
        """
        await self.keeper.wait_until(lambda v: shows(v) or self.draining, structure=True)
        await self.keeper.wait_until(lambda v: shows(v) or self._draining.over)

    def _is_superseded(self) -> bool:
        """True if the job's name belongs to another run, or was deleted."""
        return self.keeper.view.superseded or self.keeper.view.spec is None

    def drain(self, why: str) -> None:
        """Asks the node to hand everything over and leave. Asking again changes nothing."""
        self._draining.begin(why)

    def _on_connection_lost(self, node: str) -> None:
        if self.running:
            self.suspicion.connection_lost(node)

    def _on_call_refused(self, node: str) -> None:
        if self.running:
            self.suspicion.call_refused(node)

    def _note_cancelled(self) -> None:
        """Notes that the node was cancelled: in a node's own process only user code does that, of an unknown task."""
        self._why_left = (
            "was ended by user code (sys.exit in an asyncio task of its own, a cancel of all, or loop.stop)"
        )
        latest = {task: primary.attempts.latest for task, primary in self.roles.primaries.items()}
        self._ran_code = tuple(
            RunningCode(_OWN_TASKS, t, self.epoch if at is None else at.epoch) for t, at in latest.items()
        )
        if lastwords.here is not None:  # this node may not be able to tell etcd
            for ran in self._ran_code:
                lastwords.here.note_call((ran.task, -1), ran.task, ran.epoch, lastwords.encoded_name(_OWN_TASKS))
        self.log.error("this node %s", self._why_left)

    # -- for the control service and tests --------------------------------------------------------

    def status(self) -> NodeStatus:
        """Returns the node's status: what runs here, and what it waits for."""
        leader = self.roles.leader
        waits = (
            *self.registration.waits,
            *self.placement.waits,
            *self.takeovers.waits,
            *(leader.waits if leader is not None else ()),
            *self.keeper.waits,
            *self.writes.waits,
            *self.roles.waits,
            *self.notices.waits,
            *self.serving.waits,
        )
        return node_status(self, self.roles, waits)

    @property
    def latest(self) -> int:
        """The latest epoch that a task here has begun, or the one at work; -1: none."""
        latest = (primary.attempts.latest for primary in self.roles.primaries.values())
        return max(self.epoch, *(stamp.epoch for stamp in latest if stamp is not None), -1)

    async def results(self) -> list[TaskResult]:
        """Waits until the primaries here have computed their results, after the last commit; returns them."""
        return await task_results(self.keeper, self.roles.primaries)
