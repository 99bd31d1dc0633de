"""Answers calls of other nodes of an elastic job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from msgspec import structs

from taskgraph.graph.sums import encode_sums
from taskgraph.protocol.messages import (
    Accepted,
    Call,
    ComparedPart,
    CopyState,
    DescribeState,
    DescribeValue,
    FollowTotals,
    GroupKey,
    HoldsTotals,
    PartSums,
    Reason,
    Refusal,
    Reply,
    SliceSum,
    Totals,
    TotalsPage,
    ValueDigest,
    WorkerReport,
)
from taskgraph.protocol.records import name_of

if TYPE_CHECKING:
    from taskgraph.elastic_jobs.interface import WorkerNode
    from taskgraph.elastic_jobs.usercall import UserCall

__all__ = ["WorkerServing"]

_IN_STEPS: Final = (PartSums, SliceSum, HoldsTotals, GroupKey)
_TO_ENGINE: Final = (*_IN_STEPS, ComparedPart, WorkerReport, Totals)


class WorkerServing:
    """Answers calls for one node.

    Args:
        call: returns the call of user code, which an excluded worker makes anew.
        changed: called when the worker may have read a newer view, or a flush may have ended.
    """

    def __init__(self, node: WorkerNode, call: Callable[[], UserCall], changed: Callable[[], None]) -> None:
        self._node = node
        self._call = call
        self._changed = changed

    def answer_now(self, peer: str, message: Call) -> Reply | None:
        """Takes a message of a step or of a flush at once, and returns the reply; None: await `__call__`."""
        if type(message) not in _TO_ENGINE or not self._node.running:
            return None
        self._node.engine.receive(peer, message)
        if type(message) not in _IN_STEPS:
            self._changed()
        return Accepted()

    async def __call__(self, peer: str, message: Call) -> Reply:
        """Answers a call that `answer_now` did not; returns a refusal if the node ends."""
        node = self._node
        if not node.running:
            return Refusal(Reason.CLOSING, "")
        match message:
            case CopyState():
                mark = node.trace.begin(of_step=False)
                copy = await self._call().copied_state(peer)
                if copy is None:
                    return self._closing
                name, size = name_of(peer), copy.value.size_bytes
                node.trace.keep(mark, "copy", f"makes the state ready for {name}", peer=name, size_bytes=size)
                return structs.replace(copy, reports=node.reports.packed())
            case DescribeState():
                return node.digests
            case DescribeValue():
                value = await self._call().returned()
                return self._closing if value is None else ValueDigest(value.digest)
            case FollowTotals():
                return self._totals_for(peer, message)
            case _:
                raise TypeError(f"no message of an elastic job: {message!r}")

    @property
    def _closing(self) -> Refusal:
        """The refusal of a node that ends."""
        return Refusal(Reason.CLOSING, "")

    def _totals_for(self, newcomer: str, message: FollowTotals) -> Reply:
        """Returns totals, if asked to send some. Keeps later ones for the newcomer, unless it lacks a dropped one."""
        engine = self._node.engine
        first, totals = engine.totals.page(message.position)
        if first <= message.position:
            engine.totals.keep_for(newcomer, message.position)
        if not message.send:
            totals = []
        return TotalsPage(first, len(totals), engine.core.stable, encode_sums(totals))
