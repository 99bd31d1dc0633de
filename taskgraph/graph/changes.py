"""Values that share large buffers with a value before: only the others have to be sent.

A task whose state is a log of arrays that never change (a table's) encodes the same memory in every snapshot. Two
buffers are the same if they begin at the same address and are equally long, since both values are alive, and the memory
of an encoded value never changes.
"""

from __future__ import annotations

import numpy as np

from taskgraph.errors import DecodeError
from taskgraph.graph.values import digest_of
from taskgraph.protocol.messages import Encoded, KeptBuffers

__all__ = ["apply_changes", "changes_since"]

_SENT = -1


def changes_since(value: Encoded, base: Encoded) -> tuple[Encoded, KeptBuffers] | None:
    """Returns the part of a value that `base` does not have, and what to take from `base`; None: they share nothing.

    Args:
        base: a value that the receiver has.
    """
    if type(value) is not Encoded or type(base) is not Encoded or not value.buffers or not base.buffers:
        return None
    there = {_memory_of(buffer): number for number, buffer in enumerate(base.buffers) if buffer.nbytes}
    places = tuple([there.get(_memory_of(buffer), _SENT) for buffer in value.buffers])
    if all(place == _SENT for place in places):
        return None
    sent = tuple([buffer for buffer, place in zip(value.buffers, places, strict=True) if place == _SENT])
    return Encoded(value.meta, sent, digest_of(value.meta, sent)), KeptBuffers(base.digest, places, value.digest)


def apply_changes(part: Encoded, kept: KeptBuffers, base: Encoded) -> Encoded:
    """Returns the whole value of which `changes_since` gave a part: takes the other buffers from `base`.

    Raises:
        DecodeError: the part and `base` do not have the buffers that `kept` names.
    """
    sent = iter(part.buffers)
    try:
        buffers = tuple([next(sent) if place == _SENT else base.buffers[place] for place in kept.places])
    except (StopIteration, RuntimeError, IndexError):
        raise DecodeError("changes of a value name buffers that are not there") from None
    if next(sent, None) is not None or min(kept.places, default=_SENT) < _SENT:
        raise DecodeError("changes of a value have buffers that they do not name")
    return Encoded(part.meta, buffers, kept.digest)


def _memory_of(buffer: memoryview) -> tuple[int, int]:
    """Returns where a buffer begins, and its length."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0] if buffer.nbytes else 0
    return address, buffer.nbytes
