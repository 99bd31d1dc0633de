"""The parts of a node that its replicas and primaries use: the core, and the parts that serve all tasks alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NotRequired, Unpack

from taskgraph.checkpoint.places import Place
from taskgraph.errors import TaskGraphError
from taskgraph.node.epochs.epoch_memory import EpochMemoryShares
from taskgraph.node.life import LifeArguments, NodeLife
from taskgraph.node.membership.deviceloss import DeviceLoss
from taskgraph.node.membership.failed_setups import FailedSetUps
from taskgraph.node.membership.placement import Placement
from taskgraph.node.primary.checkpoint_reader import FILES_AT_A_TIME, CheckpointReader
from taskgraph.node.primary.commit_interval import CommitInterval
from taskgraph.node.replica import Replica
from taskgraph.node.usercode.errors import UserCodeError, cuda_error
from taskgraph.node.usercode.threads import PooledThreads, Threads
from taskgraph.protocol.kv import Compare
from taskgraph.protocol.placement import Wish

if TYPE_CHECKING:
    from taskgraph.node.primary.leader_interface import LeaderInterface

__all__ = ["NodeServices", "ServicesArguments"]


class ServicesArguments(LifeArguments):
    """Keyword arguments of `NodeServices`, beside those of `NodeLife`."""

    file_threads: NotRequired[Threads | None]
    place: NotRequired[Place | None]


class NodeServices(NodeLife):
    """One node of one job, as its replicas and primaries see it.

    Attributes:
        replicas: task -> the replica on this node. Filled by `Roles`.
        leader: the leader's role, if this node leads. Set by `Roles`.
        epoch_memory: divides the memory for uncommitted epochs among the primaries here.
        failed_set_ups: decides whether a failed set-up ends the node. Set by `Node`.
        emitted_unsaved: texts of events that `UnsavedStateCheck` has emitted or logged, each once for a class.
    """

    failed_set_ups: FailedSetUps

    def __init__(
        self, *, file_threads: Threads | None = None, place: Place | None = None, **core: Unpack[LifeArguments]
    ) -> None:
        super().__init__(**core)
        self.replicas: dict[int, Replica] = {}
        self.leader: LeaderInterface | None = None
        self.epoch_memory = EpochMemoryShares()
        self.emitted_unsaved: set[str] = set()
        self.placement = Placement(self)
        self.commit_interval = CommitInterval(self)
        self.device_loss = DeviceLoss(self, self.replicas)
        # Own threads: a place that hangs must not block user code.
        own = file_threads or core.get("threads")
        self.file_threads = own or PooledThreads(f"{self.name}-files", limit=FILES_AT_A_TIME)
        self.checkpoints = CheckpointReader(self, self.file_threads, place)

    def wish(self, task: int) -> Wish | None:
        """Returns where placement wants the replicas of a task; None: not computed yet."""
        return self.placement.by_task.get(task)

    async def fail_job(
        self,
        error: UserCodeError | TaskGraphError,
        task: int | None,
        epoch: int | None,
        fences: Iterable[Compare],
        *,
        finished: bool = False,
    ) -> bool:
        """Fails the job with an error. False if a fence failed, the job had ended, or this process ends instead.

        Args:
            finished: True to fail also a job whose epochs are all committed (a `result()` that raises).
        """
        also: str | None = ""
        if task is not None:
            error, task, epoch = self.device_loss.root_error(error, task, epoch)
            also = self.device_loss.leave_or_explain(error, task, epoch or 0)
        return also is not None and await self.fail_with(error, task, epoch, fences, also, finished=finished)

    async def fail_set_up(self, error: UserCodeError | TaskGraphError, task: int) -> None:
        """Handles a failed set-up of a backup: ends this node if the job can do without it; otherwise `fail_early`."""
        if cuda_error(error) is not None or not self.failed_set_ups.end_node_if_unneeded(error, task):
            await self.fail_early(error, task)

    async def fail_early(self, error: UserCodeError | TaskGraphError, task: int, *, finished: bool = False) -> bool:
        """Fails the job for user code that failed before there was a primary, fenced by this node's own key. Returns
        False as `fail_job` does.
        """
        view = self.keeper.view
        epoch = view.stamp.epoch if view.stamp and view.running else None  # after the last epoch
        fences = (Compare(view.keys.node(self.id), self.node_revision),)
        return await self.fail_job(error, task, epoch, fences, finished=finished)
