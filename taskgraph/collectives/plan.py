"""The tree along which the members of a group add up and hand down values. Pure.

The values of all members are added along the tree of `protocol.elastic.tree`, in the order of the members. Each span of
it has a *head*, the member that adds it up: the root if it is in the span, else the first member. A head sends the sum
of its largest span to its *parent*, the head of the span above:

    members   0 1 2 3 4 5      root 0: 1 ► 0, 3 ► 2 ► 0, 5 ► 4 ► 0
    spans     0..3    4..5
              01  23  45

What is handed down takes the same ways back.

An allreduce of a large value sends no more than its layout along the tree. Then all members exchange slices: each adds
up one slice of all values, and sends the sum to all. How large a value must be depends on what all members know alike:
the size of the value, which is the same on all of them, and how many members there are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Literal, NamedTuple

from taskgraph.protocol.elastic.tree import Span, halves

__all__ = ["LARGE_SLICE_BYTES", "Op", "TreeChild", "TreePlace", "Via", "slicing_bytes", "tree_place"]

Op = Literal["sum", "mean", "min", "max"]
Via = Literal["auto", "tree", "ring"]

LARGE_SLICE_BYTES: Final = 512 << 10
"""With `via="auto"` values are sliced if each slice has at least this size. Smaller ones cost more than they save."""


def slicing_bytes(via: Via, members: int) -> int | None:
    """Returns the size, in bytes, from which on an allreduce cuts values into slices; None: it never does."""
    if members == 1 or via == "tree":
        return None
    return 1 if via == "ring" else members * LARGE_SLICE_BYTES


class TreeChild(NamedTuple):
    """A member that sends a sum to its parent.

    Attributes:
        earlier: the members in its sum come before those that the parent has added up so far.
    """

    member: int
    earlier: bool


class TreePlace(NamedTuple):
    """A member's place in the tree.

    Attributes:
        parent: None for the root.
        children: in the order in which their sums are added.
    """

    parent: int | None
    children: tuple[TreeChild, ...]


@lru_cache(maxsize=4096)
def tree_place(members: tuple[int, ...], root: int, member: int) -> TreePlace:
    """Returns a member's place in the tree whose sums end at `root`; both are task ids."""
    span, head, me = Span(0, len(members)), members.index(root), members.index(member)
    parent: int | None = None
    children: list[TreeChild] = []
    while span.end - span.first > 1:
        first, second = halves(span)
        own, other = (first, second) if head < second.first else (second, first)
        if me == head:
            children.append(TreeChild(members[other.first], earlier=other is first))
        elif other.first <= me < other.end:
            own, parent, head = other, members[head], other.first
        span = own
    if me == members.index(root):
        parent = None
    return TreePlace(parent, tuple(reversed(children)))
