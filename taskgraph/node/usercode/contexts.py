"""The contexts (`contextvars`) that a task's code runs in: `decimal`'s precision, `np.seterr`, `ContextVar`s of users.

Every call runs in a copy of the task's context, so a value that a call sets is lost when it returns: no other task and
no later call sees it, as after a failover. The task's context is a copy of that in which the driver was imported, with
the values that the task builder and `setup` set.
"""

from __future__ import annotations

import sys
from contextvars import Context, ContextVar
from typing import Any

__all__ = ["Contexts"]


class Contexts:
    """Makes the `contextvars.Context` of each call of a task's code.

    Args:
        outer: the context in which the driver was imported.
    """

    def __init__(self, outer: Context) -> None:
        self.set_task_context(outer)

    def set_task_context(self, context: Context) -> None:
        """Makes `context` the task's context: all later calls see the values in it."""
        decimal = sys.modules.get("decimal")
        self._context = context
        # A copied context still holds the same object for decimal, which code changes in place.
        self._decimals: list[tuple[ContextVar[Any], Any]] = []
        if decimal is not None:
            self._decimals = [(var, v.copy()) for var, v in context.items() if isinstance(v, decimal.Context)]

    def new_context(self) -> Context:
        """Makes a context for one call."""
        context = self._context.copy()
        for var, value in self._decimals:
            context.run(var.set, value.copy())
        return context
