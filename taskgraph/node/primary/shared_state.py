"""The shared state of one task's primary: fetched from the keeper's primary after a takeover, and given to others.

    takeover, roll-back, resume:  boundary without shared state ──► `FetchShared` to the keeper's primary ──► whole

The keeper answers once it has the committed boundary of the caller's view. No epoch commits meanwhile, since the caller
has not reported; after a roll-back the caller begins again with the boundary that the job went back to.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from taskgraph.errors import Refused, StateError
from taskgraph.graph.values import decode, encode
from taskgraph.node.snapshots import shared_digest
from taskgraph.protocol.boundaries import Boundary
from taskgraph.protocol.messages import Encoded, FetchShared, Reason, SharedDigests, SharedState, Stamp
from taskgraph.protocol.shared import keeper_of

if TYPE_CHECKING:
    from taskgraph.node.replica import Replica
    from taskgraph.node.services import NodeServices
    from taskgraph.protocol.view import JobView

__all__ = ["SharedStateAccess"]

_NO_MEMORY_PAUSE_S = 1.0
"""Pause before shared state is fetched again that this node had no memory for."""


class SharedStateAccess:
    """Fetches the shared state of one task for its primary, and gives it to primaries of other tasks, in one term.

    Attributes:
        stage: what the primary waits for here, for `status`; empty: nothing.
    """

    def __init__(self, node: NodeServices, replica: Replica, term: int) -> None:
        self._node = node
        self._replica = replica
        self._task = replica.task
        self._term = term
        self.stage = ""

    async def find_keeper(self) -> None:
        """Waits until all lower tasks have begun, so that the keeper is known, and sets `Replica.keeps_shared`."""
        task, keeper = self._task, self._node.keeper
        if self._replica.shape.shared:
            self.stage = "the first primaries of the tasks before it: one of them may keep its shared state"
            await keeper.wait_until(lambda view: keeper_of(view, task) is not None)
            self._replica.keeps_shared = keeper_of(keeper.view, task) == task
            self.stage = ""

    async def complete(self, boundary: Boundary, lineage: int) -> Boundary | None:
        """Returns the committed boundary with its shared state, which is fetched if it is not here.

        Returns None if the job was rolled back meanwhile.

        Args:
            lineage: the job's lineage when `boundary` was read as committed.

        Raises:
            StateError: the keeper has other shared state than the task had.
        """
        replica, keeper = self._replica, self._node.keeper
        if not replica.shape.shared or replica.keeps_shared or boundary.shared is not None:
            return boundary
        of = keeper_of(keeper.view, self._task)
        assert of is not None
        self.stage = f"the shared state of boundary {boundary.stamp.epoch}, from task {of}"
        reply = await self._fetch(of)
        self.stage = ""
        epoch = keeper.view.epoch
        if epoch is None or epoch.record.lineage > lineage:
            return None
        number, recorded = boundary.stamp.epoch, shared_digest(boundary)
        if reply.stamp.epoch != number or recorded not in (b"", reply.value.digest):
            raise StateError(
                f"task {self._task}: the shared state of boundary {number} that task {of} has (boundary "
                f"{reply.stamp.epoch}, {reply.value.digest.hex()}) is not what this task had ({recorded.hex()}): "
                f"setup() makes other values each time, or a codec gives other bytes for what it has decoded"
            )
        whole = Boundary(boundary.stamp, boundary.term, boundary.value, boundary.log, reply.value)
        return whole if replica.boundaries.store(whole, committed=True) else None

    async def _fetch(self, of: int) -> SharedState:
        """Fetches the shared state of the committed boundary from task `of`, with retries if this node lacks memory."""
        node = self._node

        def message() -> FetchShared:
            assert node.keeper.view.stamp is not None
            return FetchShared(node.keeper.view.stamp, of)

        while True:
            try:
                reply = await node.router.to_primary(of, message)
            except Refused as refused:
                if refused.reason != Reason.NO_MEMORY:
                    raise
                await asyncio.sleep(_NO_MEMORY_PAUSE_S)
            else:
                assert isinstance(reply, SharedState)
                return reply

    async def answer_fetch(self, stamp: Stamp) -> SharedState:
        """Answers `FetchShared`: waits until the primary has the boundary that is committed at `stamp`.

        Raises:
            Refused: the job moved on, or the task has another primary.
        """
        keeper = self._node.keeper
        await keeper.wait_until(lambda view: self._has_boundary(stamp, view) is not None)
        boundary = self._replica.boundaries.committed
        if not self._has_boundary(stamp, keeper.view) or boundary is None:
            raise Refused(Reason.STALE, f"the job is not at {stamp}, or task {self._task} has another primary")
        value = await self._replica.shared_in(boundary)
        return SharedState(Stamp(boundary.stamp.attempt, boundary.stamp.epoch), self._term, value)

    def _has_boundary(self, stamp: Stamp, view: JobView) -> bool | None:
        """True if the committed boundary at `stamp` is here; False if it never will be; None: wait."""
        replica = self._replica
        if view.stamp != stamp or not view.is_primary(self._task, self._node.id, self._term):
            return False
        assert view.epoch is not None
        replica.follow(view.epoch.record)
        return True if replica.ready and replica.boundaries.has_committed(stamp.epoch) else None

    async def describe(self, stamp: Stamp, *, before: bool) -> SharedDigests:
        """Answers `DescribeShared`: a digest of each shared attribute, before or after an epoch.

        Raises:
            Refused: the boundary is not here.
        """
        boundaries, key = self._replica.boundaries, (stamp.epoch + 1, stamp.attempt, self._term)
        found = boundaries.committed if before else next((b for b in boundaries.pending if b.key == key), None)
        if found is None:
            raise Refused(Reason.STALE, f"task {self._task} has no such boundary at {stamp}")
        value = await self._replica.shared_in(found)
        digests = await self._replica.in_thread_if_large(partial(_attribute_digests, value), value.size_bytes)
        return SharedDigests(self._term, digests)


def _attribute_digests(value: Encoded) -> tuple[tuple[str, bytes], ...]:
    return tuple((name, encode(each, ordered=True).digest) for name, each in sorted(decode(value).items()))
