"""A job's values as text for people. No other text of this package needs numpy."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from taskgraph.results import all_equal, plain_value

__all__ = ["values_text"]

_LONG = 200
"""The most elements of an array that is printed whole."""
_LINES = 5000
"""Lines of a list that are printed. Many jobs return one value per epoch; `--json` has all of them."""


def values_text(values: dict[int, Any]) -> str:
    """Formats the values of a job's tasks; a single value without its task, and equal values once."""
    if len(values) == 1:
        return _value_text(next(iter(values.values())))
    if values and _are_equal(values.values()):
        return _entry_text(f"all {len(values)} tasks", next(iter(values.values())))
    return "\n".join(_entry_text(f"task {task}", value) for task, value in values.items())


def _are_equal(values: Collection[Any]) -> bool:
    try:
        return all_equal(values)
    except Exception:  # a type of the user's that cannot be encoded here: each value is shown
        return False


def _value_text(value: Any) -> str:
    try:
        return _exact_text(value)
    except Exception:  # an int of some thousand digits, a type of the user's: less exact, but something
        return str(plain_value(value))


def _exact_text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return np.array2string(value, threshold=_LONG, separator=", ")
    if type(value).__module__ == "torch" and value.numel() > _LONG and value.dtype.is_floating_point:
        array = value.detach().float().cpu().numpy()
        return f"tensor({np.array2string(array, threshold=_LONG, separator=', ', prefix='tensor(')})"
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, int | float | str) for item in value):
        left_out = len(value) - _LINES
        shown = value if left_out <= 0 else [*value[: _LINES // 2], f"... ({left_out} more)", *value[-_LINES // 2 :]]
        return "\n".join(map(str, shown))
    if isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
        return "\n".join(_entry_text(key, item) for key, item in value.items())
    text = repr(value)
    return text if len(text) < 20_000 else f"{text[:20_000]}... ({len(text)} characters)"


def _entry_text(key: str, value: Any) -> str:
    """Formats an entry as `key: value`, with a value of several lines indented below its key."""
    text = _value_text(value)
    if "\n" in text or isinstance(value, dict):
        return f"{key}:\n" + "\n".join(f"  {line}" for line in text.splitlines())
    return f"{key}: {text}"
