"""Explains unequal shared state: asks two tasks for a digest of each shared attribute, and names those that differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskgraph.errors import StateError, TransportError
from taskgraph.protocol.messages import DescribeShared, Report, SharedDigests, Stamp

if TYPE_CHECKING:
    from taskgraph.node.core import NodeCore

__all__ = ["explain_unequal"]

_DIGEST_BYTES = 16


async def explain_unequal(node: NodeCore, stamp: Stamp, one: Report, other: Report) -> StateError | None:
    """Returns the error for two tasks whose done reports of `stamp` have different digests of shared state.

    Returns None if one of them does not answer, or is in another term by now.
    """
    # In epoch 0 the digest of boundary 0 comes first.
    before = stamp.epoch == 0 and one.shared[:_DIGEST_BYTES] != other.shared[:_DIGEST_BYTES]
    found = [await _ask(node, DescribeShared(stamp, report.task, before), report.term) for report in (one, other)]
    if found[0] is None or found[1] is None:
        return None
    mine, others = dict(found[0]), dict(found[1])
    names = [name for name in mine if mine[name] != others.get(name)]
    if not names:
        return None  # asked at different moments: it is decided again
    what, one_name = " and ".join(f"self.{name}" for name in names), len(names) == 1
    if before:
        why = (
            "as setup() made it, before epoch 0. Make it equal on all tasks: from the same data, and with random "
            "numbers of the same seed, as in np.random.default_rng(0)"
        )
    else:
        why = (
            "after this epoch. Each task must compute it from the same values, in the same order (types, the memory "
            "order of arrays and the order of keys count); what differs between tasks is declared with state=[...]"
        )
    return StateError(
        f"epoch {stamp.epoch}: {what} {'is' if one_name else 'are'} declared as shared, and "
        f"{'differs' if one_name else 'differ'} between task {one.task} and task {other.task}, {why}"
    )


async def _ask(node: NodeCore, message: DescribeShared, term: int) -> tuple[tuple[str, bytes], ...] | None:
    """Asks a task's primary for digests of its shared attributes; None if it does not answer, or has another term."""
    holder = node.keeper.view.primary_node(message.task)
    if holder is None:
        return None
    try:
        reply = await node.router.to_node(holder, message, timeout_s=node.settings.call_s)
    except TransportError as error:
        node.log.info("task %d did not describe its shared state: %s", message.task, error)
        return None
    return reply.digests if isinstance(reply, SharedDigests) and reply.term == term else None
