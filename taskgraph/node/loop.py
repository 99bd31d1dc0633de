"""The event loop of a node's process: uvloop's, protected from user code that would stop it."""

from __future__ import annotations

import asyncio
from typing import Any

import uvloop

from taskgraph.errors import JobError, class_name, error_text
from taskgraph.node.usercode.uncaught import is_expected_end, report_uncaught

__all__ = ["NodeLoop"]


class NodeLoop(uvloop.Loop):
    """The loop of a node, which user coroutines get from `asyncio.get_running_loop()`."""

    def default_exception_handler(self, context: Any) -> None:
        """Logs errors that were never retrieved, unless they are expected. Not called if user code sets a handler."""
        if not is_expected_end(context.get("exception")):
            super().default_exception_handler(context)
            report_uncaught(context.get("exception"), "an asyncio task or callback")

    def stop(self) -> None:
        """Ends `run_forever`, unless an asyncio task calls it, as user code would.

        Raises:
            JobError: an asyncio task calls it, which would end this node, and every node that takes the task over.
        """
        if asyncio.current_task(self) is not None:
            raise JobError(
                "loop.stop(): this event loop is the node's, which would end with it: to end a processor return from "
                "it, to fail the job raise"
            )
        super().stop()

    def set_task_factory(self, factory: Any) -> None:
        """Sets a factory, which then makes all asyncio tasks of the node. Its tasks must start as asyncio's own.

        Raises:
            JobError: the factory raises, returns no task, or starts tasks before their creator goes on.
        """
        before, started = self.get_task_factory(), False

        async def begins() -> None:
            nonlocal started
            started = True

        super().set_task_factory(factory)
        trial, why = begins(), ""
        try:
            made = self.create_task(trial)
            if not (asyncio.isfuture(made) and hasattr(made, "uncancel")):
                why = f"it returns no task, but {class_name(type(made))} (it has to return the one that it makes)"
                self.call_soon(trial.close)  # after the first step of a task that a factory may have made and hidden
        except Exception as error:
            trial.close()
            why = f"it cannot make them, {error_text(error)}"
        if started:
            why = "it begins them at once"
        if why:
            super().set_task_factory(before)
            raise JobError(
                f"set_task_factory({factory!r:.200}): this event loop is the node's, whose own tasks are made by that, "
                f"too, and {why}. Leave it as it is, and give a task of yours what it needs where you make it; or run "
                f"a loop of your own in a plain `def`, by asyncio.run"
            )
