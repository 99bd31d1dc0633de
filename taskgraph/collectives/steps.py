"""The internal processors of a collective: they add up, join and pass on.

They use no state and run beside other processors of their task.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final

from taskgraph.collectives import adding
from taskgraph.collectives.plan import Op
from taskgraph.collectives.ports import InputsPort, OutputsPort
from taskgraph.collectives.values import EveryEpoch, describe_place
from taskgraph.graph.arrays import INLINE_BYTES
from taskgraph.graph.compose import DerivedChannel
from taskgraph.graph.values import encode
from taskgraph.protocol.frozen import frozen

__all__ = ["AddAndJoinSlices", "AddChildren", "AddShares", "DropResults", "Relay", "no_user_code"]


def no_user_code() -> None:
    """Stands in for user code in internal processors. It is never called."""


class _Internal(EveryEpoch):
    """Makes a compute that calls `run`: on the event loop, or in a thread if the values are large.

    Attributes:
        is_brief: `run` only passes values on, so it needs no thread.
    """

    __slots__ = ()
    arguments: ClassVar[tuple[str, ...]] = ()
    is_brief: ClassVar[bool] = False

    def run(self, ins: InputsPort, outs: OutputsPort) -> None:
        raise NotImplementedError

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def compute(epoch: Any, ins: InputsPort, outs: OutputsPort) -> None:
            if self.is_brief or ins.size_bytes < INLINE_BYTES:
                self.run(ins, outs)
            else:  # the event loop has other work, too
                await outs.work.run_in_thread(partial(self.run, ins, outs))

        return _mark_internal(compute)


def _mark_internal(compute: Callable[..., Any]) -> Callable[..., Any]:
    compute.__taskgraph_stateless__ = True  # type: ignore[attr-defined]
    compute.__taskgraph_internal__ = True  # type: ignore[attr-defined]  # it shares nothing with code of the user
    return compute


@frozen
class DropResults(_Internal):
    """Takes results that this task does not use."""

    is_brief: ClassVar[bool] = True

    def run(self, ins: InputsPort, outs: OutputsPort) -> None:
        pass


@frozen
class Relay(_Internal):
    """Passes a value from the task's parent in the tree on to its children."""

    is_brief: ClassVar[bool] = True
    tag: str
    parent: int

    def run(self, ins: InputsPort, outs: OutputsPort) -> None:
        outs.put_encoded(self.tag, ins.encoded(self.tag, self.parent))


@frozen
class AddChildren(_Internal):
    """Adds the sums of this task's children in the tree to its own contribution, and puts the sum.

    Attributes:
        what: names the collective.
        own: the tag of what this task contributes.
        up: the tag of the sums of its children.
        children: (task, whether its members come earlier), in the order of adding.
        to: the tag of the sum, or of the result.
        finishes: the sum is the result.
    """

    what: str
    op: Op
    own: str
    up: str
    children: tuple[tuple[int, bool], ...]
    to: str
    finishes: bool

    def run(self, ins: InputsPort, outs: OutputsPort) -> None:
        work = outs.work
        what, me, allocate = describe_place(work, self.what), work.task, work.allocate
        found = {me: adding.unpack(ins.encoded(self.own, me))}
        for child, _ in self.children:
            found[child] = adding.unpack(ins.encoded(self.up, child))
        found = adding.unify_layouts(found, self.op, what)
        total = found[me]
        for child, earlier in self.children:
            one, other = (found[child], total) if earlier else (total, found[child])
            total = adding.add_two(one, other, self.op, allocate)
        if adding.has_only_layout(total) and self.finishes:
            outs.put_encoded(self.to, _SLICED)
        elif self.finishes:
            outs.put_encoded(self.to, adding.encode_result(total, self.op, what, allocate))
        else:
            outs.put_encoded(self.to, adding.pack(total, what, allocate))


def _add_all_members(
    ins: InputsPort, outs: OutputsPort, tag: str, members: tuple[int, ...], op: Op, what: str
) -> adding.Partial:
    found = {member: adding.unpack(ins.encoded(tag, member)) for member in members}
    found = adding.unify_layouts(found, op, what)
    return adding.add_along_tree(list(found.values()), op, outs.work.allocate)


@frozen
class AddShares(_Internal):
    """Adds up the shares for this task that all members sent, and puts the result."""

    what: str
    op: Op
    tag: str
    members: tuple[int, ...]
    to: str

    def run(self, ins: InputsPort, outs: OutputsPort) -> None:
        what = describe_place(outs.work, self.what)
        total = _add_all_members(ins, outs, self.tag, self.members, self.op, what)
        outs.put_encoded(self.to, adding.encode_result(total, self.op, what, outs.work.allocate))


_SLICED: Final = encode(None)
"""Comes down the tree in place of a result. No result is None."""


@frozen
class AddAndJoinSlices(_Internal):
    """Adds up one slice of all members' large values, and joins all sums. Runs only in epochs with large values.

    Attributes:
        what: names the collective.
        down: the tag of the result, from the parent.
        slices, sums: the tags of the slices of all members, and of their sums; optional channels.
        to: the tag of the result on this task.
    """

    what: str
    op: Op
    down: str
    parent: int
    slices: str
    sums: str
    members: tuple[int, ...]
    to: str

    @property
    def optional(self) -> tuple[str, ...]:
        return (self.slices, self.sums)

    @property
    def derives(self) -> DerivedChannel | None:
        return DerivedChannel(self.to, (self.down, self.parent), _SLICED.digest)

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def add_and_join(epoch: Any, ins: InputsPort, outs: OutputsPort) -> None:
            await ins.fetch(self.slices)
            await outs.work.run_in_thread(partial(self._add, ins, outs))
            await ins.fetch(self.sums)
            await outs.work.run_in_thread(partial(self._join, ins, outs))

        return _mark_internal(add_and_join)

    def _add(self, ins: InputsPort, outs: OutputsPort) -> None:
        """Adds up the slices for this task that all members sent, and puts the sum to all members."""
        what = describe_place(outs.work, self.what)
        total = _add_all_members(ins, outs, self.slices, self.members, self.op, what)
        outs.put_encoded(self.sums, adding.pack(total, what, outs.work.allocate))

    def _join(self, ins: InputsPort, outs: OutputsPort) -> None:
        """Joins the sums of all slices to the result, and supplies that to this task's own channel."""
        work = outs.work
        total = adding.join_parts(
            [adding.unpack(ins.encoded(self.sums, member)) for member in self.members], work.allocate
        )
        work.supply(self.to, adding.encode_result(total, self.op, describe_place(work, self.what), work.allocate))
