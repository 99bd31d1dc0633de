"""User code of a collective, made a processor: `value(epoch, ins)`, whose value is put, and `then(epoch, ins)`.

Wrappers are compared from epoch to epoch (`graph.compose.ComputeWrapper`), so they have names and task ids only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from taskgraph.collectives import adding
from taskgraph.collectives.plan import Op
from taskgraph.collectives.ports import AttemptPort, InputsPort, OutputsPort
from taskgraph.errors import GraphError, JobError
from taskgraph.graph.compose import DerivedChannel
from taskgraph.protocol.frozen import frozen
from taskgraph.shape import is_stateless
from taskgraph.signatures import returns_coroutine

__all__ = ["EveryEpoch", "Put", "PutEach", "PutPartial", "PutShares", "PutSlices", "Then", "describe_place"]


def describe_place(work: AttemptPort, what: str) -> str:
    """Returns task, epoch and collective (`what`) as a text, for errors."""
    return f"task {work.task}, epoch {work.number}: {what}"


class EveryEpoch:
    """A `graph.compose.ComputeWrapper` of processors that run in every epoch, and then use all their channels."""

    __slots__ = ()

    @property
    def optional(self) -> tuple[str, ...]:
        return ()

    @property
    def derives(self) -> DerivedChannel | None:
        return None


class _UserCode(EveryEpoch):
    """Makes a compute of user code that is called with `(epoch, ins)`, as a plain function or a coroutine."""

    __slots__ = ()
    arguments: ClassVar[tuple[str, ...]] = ("epoch", "ins")

    def put_value(self, outs: OutputsPort, value: Any) -> None:
        """Puts what user code returned into the processor's channels."""
        raise NotImplementedError

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if returns_coroutine(function):

            async def compute_async(epoch: Any, ins: InputsPort, outs: OutputsPort) -> None:
                self.put_value(outs, await function(epoch, ins))

            return _copy_mark(compute_async, function)

        def compute(epoch: Any, ins: InputsPort, outs: OutputsPort) -> None:
            self.put_value(outs, function(epoch, ins))

        return _copy_mark(compute, function)


def _copy_mark(compute: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    compute.__taskgraph_stateless__ = is_stateless(function)  # type: ignore[attr-defined]
    return compute


@frozen
class Then(_UserCode):
    """Makes the sync point of `then`, which puts nothing."""

    def put_value(self, outs: OutputsPort, value: Any) -> None:
        pass


@frozen
class Put(_UserCode):
    """Puts a value as it is."""

    tag: str

    def put_value(self, outs: OutputsPort, value: Any) -> None:
        outs.put(self.tag, value)


@frozen
class PutEach(_UserCode):
    """Puts one value to each member."""

    tag: str
    members: tuple[int, ...]

    def put_value(self, outs: OutputsPort, value: Any) -> None:
        for member, each in self._by_member(outs.work, value).items():
            outs.put(self.tag, each, to=member)

    def _by_member(self, work: AttemptPort, value: Any) -> Mapping[int, Any]:
        members = self.members
        if isinstance(value, Mapping):
            if value.keys() == set(members):
                return value
            got = f"a dict with the keys {list(value)!r:.100}"
        elif isinstance(value, list | tuple):
            if len(value) == len(members):
                return dict(zip(members, value, strict=True))
            got = f"{len(value)} values"
        else:
            got = type(value).__name__
        raise GraphError(
            f"{describe_place(work, f'scatter of {self.tag!r}')}: return one value for each of the tasks "
            f"{list(members)!r:.100}, as a list in this order or a dict {{task: value}}; it got {got}"
        )


@frozen
class PutPartial(_UserCode):
    """Puts what this task contributes, to be added along the tree. A task that is alone puts the result.

    Attributes:
        what: names the collective.
    """

    what: str
    op: Op
    tag: str
    alone: bool

    def put_value(self, outs: OutputsPort, value: Any) -> None:
        allocate = outs.work.allocate
        packed = adding.pack(_make_partial(outs.work, self.what, self.op, value), self.what, allocate)
        if self.alone:
            packed = adding.encode_result(
                adding.unpack(packed), self.op, describe_place(outs.work, self.what), allocate
            )
        outs.put_encoded(self.tag, packed)


@frozen
class PutSlices(_UserCode):
    """Puts what this task contributes, to be added along the tree; of a large value its layout, and a slice to each.

    Attributes:
        slices: the tag of the slices, an optional channel.
        large: the size, in bytes, from which on a value is sliced.
    """

    what: str
    op: Op
    tag: str
    slices: str
    members: tuple[int, ...]
    large: int

    @property
    def optional(self) -> tuple[str, ...]:
        return (self.slices,)

    def put_value(self, outs: OutputsPort, value: Any) -> None:
        work, members = outs.work, self.members
        partial = _make_partial(work, self.what, self.op, value)
        if partial.nbytes >= self.large:
            parts = adding.encode_slices(partial, len(members), self.what, work.allocate)
            for member, part in zip(members, parts, strict=True):
                outs.put_encoded(self.slices, part, (member,))
            partial = adding.without_elements(partial)
        outs.put_encoded(self.tag, adding.pack(partial, self.what, work.allocate))


@frozen
class PutShares(_UserCode):
    """Cuts what user code returned into shares of its first axis, and puts each to its member."""

    what: str
    op: Op
    tag: str
    members: tuple[int, ...]

    def put_value(self, outs: OutputsPort, value: Any) -> None:
        work, count = outs.work, len(self.members)
        for index, member in enumerate(self.members):
            try:
                share = adding.cut_share(value, self.op, index, count)
            except JobError as error:
                raise type(error)(f"{describe_place(work, self.what)}: {error}") from None
            partial = _make_partial(work, self.what, self.op, share)
            outs.put_encoded(self.tag, adding.pack(partial, self.what, work.allocate), (member,))


def _make_partial(work: AttemptPort, what: str, op: Op, value: Any) -> adding.Partial:
    try:
        return adding.make_partial(value, op, work.allocate)
    except JobError as error:
        raise type(error)(f"{describe_place(work, what)}: {error}") from None
