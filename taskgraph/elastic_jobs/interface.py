"""The interface of an elastic node, for its parts."""

from __future__ import annotations

from taskgraph.elastic_jobs.engine import Engine
from taskgraph.elastic_jobs.reports import StableReports
from taskgraph.elastic_jobs.tracing import WorkerTrace
from taskgraph.errors import CoordinationError, JobError, LeaseGone
from taskgraph.node.life import NodeLife
from taskgraph.node.usercode.errors import UserCodeError
from taskgraph.protocol.kv import Compare, Txn
from taskgraph.protocol.messages import StateCopy, StateDigests

__all__ = ["WorkerNode"]


class WorkerNode(NodeLife):
    """A node of an elastic job, as its parts see it.

    Attributes:
        engine: the values, messages and user code of its worker; `begin_anew` replaces it.
        reports: the reports of user code.
        lineage: the lineage of the state that user code began with.
        trace: the node's spans.
    """

    engine: Engine
    reports: StableReports
    lineage: int
    trace: WorkerTrace

    def look_again(self) -> None:
        """Called when the job's view in etcd or the suspected nodes changed: wakes the task that may propose a view."""
        raise NotImplementedError

    def begin_anew(self) -> None:
        """Stops user code and drops its state: this worker is in no view now, and copies another worker's state."""
        raise NotImplementedError

    def begin_anew_behind(self) -> None:
        """Calls `begin_anew`, and emits `behind`: the workers do not keep the totals that this newcomer lacks."""
        raise NotImplementedError

    def has_begun(self) -> bool:
        """True once user code has its first state, its own or a copied one, and may compute."""
        raise NotImplementedError

    def let_code_begin(self) -> None:
        """Lets user code begin with the state that it makes."""
        raise NotImplementedError

    def let_code_begin_with(self, copy: StateCopy, lineage: int) -> None:
        """Lets user code begin with a copied state of this lineage, and continue the reports in the copy."""
        raise NotImplementedError

    async def copied_state(self) -> StateCopy | None:
        """Returns the state between two steps, once the totals before it are stable; None: user code was stopped."""
        raise NotImplementedError

    @property
    def digests(self) -> StateDigests:
        """The digests of the state before the last checked step, and where user code is now."""
        raise NotImplementedError

    async def fail_job(self, error: UserCodeError | JobError, *fences: Compare) -> None:
        """Fails the job with this error, unless this node is taken for lost, or one of the fences does not hold."""
        raise NotImplementedError

    async def put_view(self, txn: Txn, writer: str) -> int | None:
        """Writes a view to etcd. Returns its revision; None if another view came first, or etcd did not answer."""
        try:
            revision = await self.transact(txn, key=self.keeper.view.keys.workers, writer=writer)
        except (CoordinationError, LeaseGone):
            revision = None
        if revision is None:
            await self.keeper.refresh()
        return revision
