"""The numbers of a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from taskgraph.errors import JobError
from taskgraph.graph.compose import ENCODABLE_TEXTS, is_text

__all__ = ["plain_numbers"]

_NO_NUMBERS = (str, bytes, bytearray, np.complexfloating)
"""float() accepts some of these, and drops half of a complex number."""


def plain_numbers(numbers: Mapping[str, Any], place: Callable[[], str]) -> dict[str, float]:
    """Returns the numbers of a report as floats.

    Args:
        place: says in an error where the report was made.

    Raises:
        JobError: one is no number, or its name cannot be encoded.
    """
    plain = {}
    for name, number in numbers.items():
        if name not in ENCODABLE_TEXTS and not is_text(name):
            raise JobError(f"{place()}: report(): the name {name!a} is no text that can be encoded")
        try:
            if isinstance(number, _NO_NUMBERS):
                raise TypeError
            if callable(detach := getattr(number, "detach", None)):  # PyTorch warns of a number that needs a gradient
                number = detach()
            plain[name] = float(number)
        except OverflowError:
            raise JobError(f"{place()}: report({name}=...): the number is too large for a float") from None
        except (TypeError, ValueError):
            raise JobError(
                f"{place()}: report({name}=...) takes numbers, not {type(number).__name__}; "
                f"return other values (a task: from result())"
            ) from None
    return plain
