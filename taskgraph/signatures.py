"""Reads the parameters of users' functions, without evaluating annotations.

Since Python 3.14 reading annotations evaluates them. They may name objects that are defined later, or that only a type
checker imports: evaluating them raises NameError.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["declares_fields", "returns_coroutine", "signature"]


def signature(function: Callable[..., Any], *, follow_wrapped: bool = True) -> inspect.Signature:
    """Returns a signature like `inspect.signature`, without annotations."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        found = inspect.signature(function, follow_wrapped=follow_wrapped, annotation_format=Format.STRING)
    else:
        found = inspect.signature(function, follow_wrapped=follow_wrapped)
    return inspect.Signature([each.replace(annotation=each.empty) for each in found.parameters.values()])


def declares_fields(cls: type) -> bool:
    """True if a class has annotations of its own."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return bool(inspect.get_annotations(cls, format=Format.STRING))
    return bool(inspect.get_annotations(cls))


def returns_coroutine(function: Callable[..., Any]) -> bool:
    """True if a call of the function, `functools.partial` or callable object returns a coroutine."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
