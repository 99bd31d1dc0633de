"""The local variables of a user's function: an error names those that later steps may read outside `run.state`."""

from __future__ import annotations

import hashlib
import inspect
from types import CodeType
from typing import Any

import numpy as np

__all__ = ["digests_of_plain", "variables_of"]

_MOST_ITEMS = 100
_MOST_BYTES = 1 << 16
"""Larger values are not looked at: that would take long in each step."""


def variables_of(code: CodeType) -> dict[str, Any]:
    """Returns the local variables of this thread's innermost call of a function in the file of `code`, by name.

    {} if the thread runs no such function.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != code.co_filename:
        frame = frame.f_back
    return dict(frame.f_locals) if frame is not None else {}


def digests_of_plain(local_variables: dict[str, Any]) -> dict[str, bytes]:
    """Returns digests of variables by name: of numbers, texts, small arrays, small lists, tuples and dicts of these,
    and of objects (schedulers) whose `state_dict()` is such a value. Leaves out all others."""
    found = {}
    for name, value in local_variables.items():
        digest = hashlib.blake2b(digest_size=16)
        if _add_to_digest(digest, _content(value), 0):
            found[name] = digest.digest()
    return found


def _content(value: Any) -> Any:
    """Returns the `state_dict()` of an object that has one, any other value as it is."""
    has_dict = not isinstance(value, type) and callable(getattr(value, "state_dict", None))
    return value.state_dict() if has_dict else value


def _add_to_digest(digest: Any, value: Any, depth: int) -> bool:
    """Adds a value to a digest. Returns False if it is large, or of a kind that `digests_of_plain` leaves out."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        digest.update(repr(value)[:_MOST_BYTES].encode())
        return True
    if isinstance(value, np.ndarray) and value.nbytes <= _MOST_BYTES and value.dtype != object:
        digest.update(value.tobytes())
        return True
    if type(value) in (list, tuple, dict) and len(value) <= _MOST_ITEMS and depth < 2:
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return all(_add_to_digest(digest, item, depth + 1) for item in items)
    return False
