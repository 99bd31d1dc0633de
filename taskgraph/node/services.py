"""What a node's replicas and primaries use of it: the core, and the parts that serve all tasks alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NotRequired, Unpack

from taskgraph.checkpoint.places import Place
from taskgraph.errors import TaskGraphError
from taskgraph.node.core import CoreArguments, NodeCore
from taskgraph.node.epochs.sharing import Sharing
from taskgraph.node.membership.deviceloss import DeviceLoss
from taskgraph.node.membership.unable import SetUps
from taskgraph.node.membership.wishes import Wishes
from taskgraph.node.primary.checkpoint_reader import FILES_AT_A_TIME, CheckpointReader
from taskgraph.node.primary.gathering import Gathering
from taskgraph.node.replica import Replica
from taskgraph.node.usercode.errors import UserCodeError, met
from taskgraph.node.usercode.threads import PooledThreads, Threads
from taskgraph.protocol.kv import Compare
from taskgraph.protocol.placement import Wish

if TYPE_CHECKING:
    from taskgraph.node.primary.leading import Leading

__all__ = ["NodeServices", "ServicesArguments"]


class ServicesArguments(CoreArguments):
    """What a `NodeServices` is made of."""

    file_threads: NotRequired[Threads | None]
    place: NotRequired[Place | None]


class NodeServices(NodeCore):
    """One node of one job, as its replicas and primaries see it.

    Attributes:
        replicas: the tasks that are here, as primary, as backup, or on their way to be. Filled by `Roles`.
        leader: the leader's role, where it is here. Set by `Roles`.
        sharing: what uncommitted epochs of the primaries here may hold.
        set_ups: what becomes of this node where a backup cannot be set up. Set by `Node`.
        told_unheld: what was told of attributes that no snapshot holds (`Unheld`): of many tasks of a class it is the
            same.
    """

    set_ups: SetUps

    def __init__(
        self, *, file_threads: Threads | None = None, place: Place | None = None, **core: Unpack[CoreArguments]
    ) -> None:
        super().__init__(**core)
        self.replicas: dict[int, Replica] = {}
        self.leader: Leading | None = None
        self.sharing = Sharing()
        self.told_unheld: set[str] = set()
        self.wishes = Wishes(self)
        self.gathering = Gathering(self)
        self.device_loss = DeviceLoss(self, self.replicas)
        # Threads of their own: a place that hangs must take none from user code.
        own = file_threads or core.get("threads")
        self.file_threads = own or PooledThreads(f"{self.name}-files", limit=FILES_AT_A_TIME)
        self.checkpoints = CheckpointReader(self, self.file_threads, place)

    def wish(self, task: int) -> Wish | None:
        """Where placement wants the replicas of a task; None while nobody knows."""
        return self.wishes.by_task.get(task)

    async def fail_job(
        self,
        error: UserCodeError | TaskGraphError,
        task: int | None,
        epoch: int | None,
        fences: Iterable[Compare],
        *,
        finished: bool = False,
    ) -> bool:
        """Ends the job with an error. False where a fence broke, where it had ended already, and where this process
        ends instead, since its device cannot be used any more.

        Args:
            finished: also where its epochs are all committed (a `result()` that raises).
        """
        also: str | None = ""
        if task is not None:
            error, task, epoch = self.device_loss.behind(error, task, epoch)
            also = self.device_loss.why_fail(error, task, epoch or 0)
        return also is not None and await self.fail_with(error, task, epoch, fences, also, finished=finished)

    async def fail_set_up(self, error: UserCodeError | TaskGraphError, task: int) -> None:
        """A backup cannot be set up: this node ends, where the job goes on without it. Otherwise as `fail_early`."""
        if met(error) is not None or not self.set_ups.ends(error, task):
            await self.fail_early(error, task)

    async def fail_early(self, error: UserCodeError | TaskGraphError, task: int, *, finished: bool = False) -> bool:
        """User code failed before there was a primary: this node's own key is the fence. Otherwise as `fail_job`."""
        view = self.keeper.view
        epoch = view.stamp.epoch if view.stamp and view.running else None  # of none: after the last
        fences = (Compare(view.keys.node(self.id), self.node_revision),)
        return await self.fail_job(error, task, epoch, fences, finished=finished)
