"""The collectives of `tg.Epoch`: what users call in `compose`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from taskgraph.collectives.declaring import CollectiveDeclaration
from taskgraph.collectives.plan import Op, Via
from taskgraph.collectives.ports import To

__all__ = ["COLLECTIVES", "Collectives"]

COLLECTIVES: Final = ("allreduce", "reduce", "broadcast", "gather", "allgather", "scatter", "reduce_scatter")


class Collectives:
    """Methods of `tg.Epoch` that declare collectives. Only in `compose`.

    `value(epoch, ins)` returns what this task gives. `then(epoch, ins)` is a sync point that reads the result,
    `ins[tag]`. Both are `def` or `async def`. Without `then` the result is for others that name it: another collective
    with `inbound=(tag,)`, or a processor with `inbound={tag: self.task_id}`.

    Arguments that all have:
        over: "all" tasks, or a link that joins each member of a group to all others.
        inbound: what `ins` of `value` has: tags of earlier collectives, or a mapping tag -> link, as of a processor.

    All tasks of `over` compose the same collectives in the same order.
    """

    __slots__ = ()

    def _begin_collective(
        self, kind: str, tag: str, over: str, inbound: Sequence[str] | Mapping[str, To], root: int | None = None
    ) -> CollectiveDeclaration:
        """Returns what declares a collective of this task; raises GraphError for a wrong argument."""
        raise NotImplementedError

    def allreduce(
        self,
        tag: str,
        value: Callable[..., Any],
        then: Callable[..., Any] | None = None,
        *,
        over: str = "all",
        inbound: Sequence[str] | Mapping[str, To] = (),
        op: Op = "sum",
        via: Via = "auto",
    ) -> None:
        """Adds up the values of all members; every member gets the sum, with the same bits.

        Values are trees of numbers and arrays: dicts, lists and tuples, with the same names, shapes and dtypes on all
        members. 16-bit floats are added in float32, bools and Python ints in int64. A result arrives read-only.

        Args:
            op: "sum"; "mean": `value` returns (weight, tree), and the result is sum(weight * tree) / sum(weight);
                "min", "max": of each element.
            via: "tree": up a tree of the members, and down again. "ring": each member adds up a slice of all values,
                and sends the sum to all; it pays if arrays are large, and the network between hosts is the limit.
                "auto": in each epoch "ring" if a slice has at least 512 KiB, otherwise "tree". The bits are the same.

        Raises:
            GraphError: a wrong argument, or called outside `compose`. While it runs, JobFailed: values that differ, or
                that cannot be added.
        """
        self._begin_collective("allreduce", tag, over, inbound).allreduce(value, then, op, via)

    def reduce(
        self,
        tag: str,
        value: Callable[..., Any],
        then: Callable[..., Any] | None = None,
        *,
        root: int = 0,
        over: str = "all",
        inbound: Sequence[str] | Mapping[str, To] = (),
        op: Op = "sum",
    ) -> None:
        """Adds up the values of all members, as `allreduce`, along the tree. Only the task `root` gets the sum."""
        self._begin_collective("reduce", tag, over, inbound, root).reduce(value, then, op)

    def broadcast(
        self,
        tag: str,
        value: Callable[..., Any],
        then: Callable[..., Any] | None = None,
        *,
        root: int = 0,
        over: str = "all",
        inbound: Sequence[str] | Mapping[str, To] = (),
    ) -> None:
        """Every member gets the value of the task `root`, down the tree. Only there is `value` called."""
        self._begin_collective("broadcast", tag, over, inbound, root).broadcast(value, then)

    def gather(
        self,
        tag: str,
        value: Callable[..., Any],
        then: Callable[..., Any] | None = None,
        *,
        root: int = 0,
        over: str = "all",
        inbound: Sequence[str] | Mapping[str, To] = (),
    ) -> None:
        """The task `root` gets the values of all members, `ins.all(tag)`: {task: value}. Only it calls `then`."""
        self._begin_collective("gather", tag, over, inbound, root).gather(value, then)

    def allgather(
        self,
        tag: str,
        value: Callable[..., Any],
        then: Callable[..., Any] | None = None,
        *,
        over: str = "all",
        inbound: Sequence[str] | Mapping[str, To] = (),
    ) -> None:
        """Every member gets the values of all members, `ins.all(tag)`: {task: value}."""
        self._begin_collective("allgather", tag, over, inbound).allgather(value, then)

    def scatter(
        self,
        tag: str,
        value: Callable[..., Any],
        then: Callable[..., Any] | None = None,
        *,
        root: int = 0,
        over: str = "all",
        inbound: Sequence[str] | Mapping[str, To] = (),
    ) -> None:
        """Each member gets one of the values that the task `root` gives: a list, or {task: value}."""
        self._begin_collective("scatter", tag, over, inbound, root).scatter(value, then)

    def reduce_scatter(
        self,
        tag: str,
        value: Callable[..., Any],
        then: Callable[..., Any] | None = None,
        *,
        over: str = "all",
        inbound: Sequence[str] | Mapping[str, To] = (),
        op: Op = "sum",
    ) -> None:
        """Adds up arrays, as `allreduce`. Each member gets its share of the first axis: `tg.shard` by its place."""
        self._begin_collective("reduce_scatter", tag, over, inbound).reduce_scatter(value, then, op)
