"""Declares the processors and channels of a collective, of one task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, get_args

from taskgraph.collectives.plan import Op, TreePlace, Via, slicing_bytes, tree_place
from taskgraph.collectives.ports import AttemptPort
from taskgraph.collectives.steps import AddAndJoinSlices, AddChildren, AddShares, DropResults, Relay, no_user_code
from taskgraph.collectives.values import Put, PutEach, PutPartial, PutShares, PutSlices, Then
from taskgraph.errors import GraphError
from taskgraph.graph.compose import RELAY, UNNAMED, Composition, ComputeWrapper, name_of

__all__ = ["CollectiveDeclaration"]

Value = Callable[..., Any]
_KEPT = 1024
"""Wrappers and names are made once for many epochs."""

_then = Then()
_drop = DropResults()
_put = lru_cache(_KEPT)(Put)
_put_each = lru_cache(_KEPT)(PutEach)
_put_partial = lru_cache(_KEPT)(PutPartial)
_put_slices = lru_cache(_KEPT)(PutSlices)
_put_shares = lru_cache(_KEPT)(PutShares)
_relay = lru_cache(_KEPT)(Relay)
_add_children = lru_cache(_KEPT)(AddChildren)
_add_shares = lru_cache(_KEPT)(AddShares)
_exchange = lru_cache(_KEPT)(AddAndJoinSlices)


Declare = Callable[[Value, Mapping[str, Any], Mapping[str, Any], str, bool, ComputeWrapper], None]
"""Declares a processor: function, inbound and outbound channels, name, whether it is parallel, wrapper."""


class CollectiveDeclaration:
    """Declares the processors and channels of one collective in a task's `compose`; a method for each kind.

    Args:
        kind: the name of the method of `tg.Epoch`.
        tag, over, inbound: as users gave them.
        root: the task that gives or gets a value; None: all do, and the first member is the root of the tree.
        at: task and epoch, for errors.
    """

    def __init__(
        self,
        work: AttemptPort,
        composition: Composition,
        declare: Declare,
        neighbors: Callable[[str], tuple[int, ...]],
        kind: str,
        tag: str,
        over: str,
        inbound: Any,
        root: int | None,
        at: str,
    ) -> None:
        self._me = work.task
        self._composition = composition
        self._declare = declare
        self._tag = str(tag)
        self._what = f"{kind} of {self._tag!r}"
        self._at = f"{at}: {self._what}"
        self._members = self._find_members(work, neighbors, over)
        self._root = self._members[0] if root is None else self._check_root(root)
        self._inbound = self._find_inbound(inbound)
        if self._tag in composition.results:
            raise GraphError(f"{self._at}: another collective has this tag: give each one of its own")
        number = composition.collectives.get(self._members, 0)
        composition.collectives[self._members] = number + 1
        self._key = f"{self._tag}: {kind} {number}"

    # -- the kinds --------------------------------------------------------------------------------

    def allreduce(self, value: Value, then: Value | None, op: Op, via: Via) -> None:
        self._check_choice("op", op, get_args(Op))
        self._check_choice("via", via, get_args(Via))
        members, me, tag = self._members, self._me, self._tag
        at, large = tree_place(members, self._root, me), slicing_bytes(via, len(members))
        parent = me if at.parent is None else at.parent
        if large is None:
            self._declare_adding(value, op, at, tag, shared=True)
            self._declare_relay(at, tag)
            self._declare_result(then, (parent,))
            return
        key = f"{self._key}, {op} via {via}"
        slices, sums, down = f"{key}, slices", f"{key}, sums", f"{key}, down"
        self._declare_adding(value, op, at, down, shared=True, sliced=(slices, large))
        self._declare_relay(at, down)
        exchange = _exchange(self._what, op, down, parent, slices, sums, members, tag)
        self._declare_internal("exchange", exchange, {down: (parent,), slices: members, sums: members}, {sums: members})
        self._declare_result(then, (me,))

    def reduce(self, value: Value, then: Value | None, op: Op) -> None:
        self._check_choice("op", op, get_args(Op))
        self._declare_adding(value, op, tree_place(self._members, self._root, self._me), self._tag, shared=False)
        self._declare_result(then, (self._me,) if self._is_root else ())

    def broadcast(self, value: Value, then: Value | None) -> None:
        at = tree_place(self._members, self._root, self._me)
        if at.parent is None:
            self._declare_value(value, _put(self._tag), {self._tag: (self._me, *_child_tasks(at))})
        else:
            self._declare_drop()
            self._declare_relay(at, self._tag)
        self._declare_result(then, (self._me if at.parent is None else at.parent,))

    def gather(self, value: Value, then: Value | None) -> None:
        self._declare_value(value, _put(self._tag), {self._tag: (self._root,)})
        self._declare_result(then, self._members if self._is_root else ())

    def allgather(self, value: Value, then: Value | None) -> None:
        self._declare_value(value, _put(self._tag), {self._tag: self._members})
        self._declare_result(then, self._members)

    def scatter(self, value: Value, then: Value | None) -> None:
        if self._is_root:
            self._declare_value(value, _put_each(self._tag, self._members), {self._tag: self._members})
        else:
            self._declare_drop()
        self._declare_result(then, (self._root,))

    def reduce_scatter(self, value: Value, then: Value | None, op: Op) -> None:
        self._check_choice("op", op, get_args(Op))
        members, shares = self._members, f"{self._key}, {op}, shares"
        self._declare_value(value, _put_shares(self._what, op, shares, members), {shares: members})
        add = _add_shares(self._what, op, shares, members, self._tag)
        self._declare_internal("add", add, {shares: members}, {self._tag: (self._me,)})
        self._declare_result(then, (self._me,))

    # -- processors -------------------------------------------------------------------------------

    @property
    def _is_root(self) -> bool:
        return self._me == self._root

    def _declare_adding(
        self, value: Value, op: Op, at: TreePlace, to: str, *, shared: bool, sliced: tuple[str, int] | None = None
    ) -> None:
        """Declares the processors that add up the values along the tree.

        Args:
            to: the tag of the result.
            shared: the root sends the result to its children, too.
            sliced: the tag of the slices of large values, and the size in bytes from which on a value is large.
        """
        what, me, members = self._what, self._me, self._members
        key = f"{self._key}, {op} to {self._root}" if sliced is None else f"{to}, to {self._root}"
        own, up = f"{key}, own", f"{key}, up"
        outbound = {up: (at.parent,)} if at.parent is not None else {to: (me, *_child_tasks(at)) if shared else (me,)}
        puts: Mapping[str, Any] = {own: (me,)} if at.children else outbound
        first = next(iter(puts))
        if sliced is None:
            self._declare_value(value, _put_partial(what, op, first, first == to), puts)
        else:
            slices, large = sliced
            self._declare_value(value, _put_slices(what, op, first, slices, members, large), {**puts, slices: members})
        if at.children:
            add = _add_children(what, op, own, up, at.children, next(iter(outbound)), at.parent is None)
            self._declare_internal(
                "add", add, {own: (me,), up: tuple([child.member for child in at.children])}, outbound
            )

    def _declare_relay(self, at: TreePlace, tag: str) -> None:
        """Declares the processor that passes a value from the parent on to the children, if the task has both."""
        if at.parent is not None and at.children:
            self._declare_internal(RELAY, _relay(tag, at.parent), {tag: (at.parent,)}, {tag: _child_tasks(at)})

    def _declare_value(self, value: Value, wrapper: ComputeWrapper, outbound: Mapping[str, Any]) -> None:
        self._declare(value, self._inbound, outbound, self._processor_name(value, "value"), False, wrapper)

    def _processor_name(self, function: Value, of_lambda: str) -> str:
        name = name_of(function)
        return f"{self._tag}: {of_lambda if name == UNNAMED else name}"

    def _declare_internal(
        self, name: str, wrapper: ComputeWrapper, inbound: Mapping[str, Any], outbound: Mapping[str, Any]
    ) -> None:
        self._declare(no_user_code, inbound, outbound, f"{self._tag} ({name})", True, wrapper)

    def _declare_result(self, then: Value | None, producers: tuple[int, ...]) -> None:
        """Notes which tasks (`producers`) send this one the result; declares `then`, unless either is empty."""
        self._composition.results[self._tag] = producers
        if then is not None and producers:
            self._declare(then, {self._tag: producers}, {}, self._processor_name(then, "then"), False, _then)

    def _declare_drop(self) -> None:
        """Declares a processor that takes the results of `inbound`, which only the root's `value` reads."""
        results = self._composition.results
        if unused := {tag: results[tag] for tag in self._inbound if tag in results}:
            self._declare(no_user_code, unused, {}, f"{self._tag} (drop)", False, _drop)

    # -- arguments --------------------------------------------------------------------------------

    def _find_members(
        self, work: AttemptPort, neighbors: Callable[[str], tuple[int, ...]], over: str
    ) -> tuple[int, ...]:
        if over == "all":
            return _all_tasks(work.tasks())
        if not isinstance(over, str):
            raise GraphError(f'{self._at}: over takes "all" or a link\'s name, not {over!r:.100}')
        members = tuple(sorted({work.task, *neighbors(over)}))
        after = members[(members.index(work.task) + 1) % len(members)]
        if set(members) != {after, *work.neighbors(over, after)}:  # each asks the next one: so all are compared
            others = ", ".join(map(str, sorted({after, *work.neighbors(over, after)})))
            raise GraphError(
                f"{self._at}: over={over!r} joins task {work.task} to {', '.join(map(str, members))}, but task {after} "
                f"to {others}; a collective needs a link that joins each member of a group to all others"
            )
        return members

    def _check_root(self, root: int) -> int:
        if isinstance(root, bool) or not isinstance(root, int) or root not in self._members:
            raise GraphError(
                f"{self._at}: root takes the id of one of the tasks {list(self._members)!r:.100}, not {root!r:.100}"
            )
        return root

    def _find_inbound(self, inbound: Any) -> Mapping[str, Any]:
        if isinstance(inbound, Mapping):
            return inbound
        results = self._composition.results
        if isinstance(inbound, str) or not isinstance(inbound, Sequence):
            raise GraphError(
                f"{self._at}: inbound takes tags of collectives composed before, as in inbound=('grad',), or "
                f"where each tag comes from, as in inbound={{'grad': 'parents'}}; it got {inbound!r:.100}"
            )
        for tag in inbound:
            if tag not in results:
                known = ", ".join(map(repr, results)) or "none"
                raise GraphError(
                    f"{self._at}: inbound={tuple(inbound)!r:.100} names {tag!r:.100}, which no collective before this "
                    f"one has; before it: {known}; for an ordinary channel say where it comes from, "
                    f"inbound={{{tag!r:.100}: link}}"
                )
        return {str(tag): results[tag] for tag in inbound}

    def _check_choice(self, name: str, given: Any, choices: tuple[str, ...]) -> None:
        if given not in choices:
            raise GraphError(f"{self._at}: {name} takes {', '.join(map(repr, choices))}, not {given!r:.100}")


@lru_cache(maxsize=16)
def _all_tasks(tasks: int) -> tuple[int, ...]:
    return tuple(range(tasks))


def _child_tasks(at: TreePlace) -> tuple[int, ...]:
    """Returns the children in the tree, the largest subtree first: its child has to pass the value on."""
    return tuple([child.member for child in reversed(at.children)])
