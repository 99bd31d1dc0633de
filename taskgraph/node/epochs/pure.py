"""Strict mode: checks that a handler that is marked pure does not change `epoch.scratch`.

A pure handler may run any number of times for one request. A replay also runs it once, so it cannot show the mistake.
Instead `epoch.scratch` is compared right before and after the handler, if no other user code can run in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taskgraph.epoch import Scratch
from taskgraph.errors import StateError
from taskgraph.node.epochs.differing import Digests, changed_names, digest, pickled
from taskgraph.node.epochs.recording import Recording
from taskgraph.node.usercode.coroutines import is_async

__all__ = ["PureWatch"]


class PureWatch:
    """Watches one call of a pure handler.

    Args:
        others: returns True if threads or asyncio tasks of user code may change `scratch` during the call: then it is
            not checked.
    """

    def __init__(self, scratch: Scratch, recording: Recording, others: Callable[[], bool]) -> None:
        self._scratch = scratch
        self._recording = recording
        self._others = others
        self._changed: list[str] = []

    def wrap(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the handler to note, for `check`, what it changes in `epoch.scratch`."""
        if is_async(handler):

            async def run_async(*args: Any) -> Any:
                before = self._note_begin()
                try:
                    return await handler(*args)
                finally:
                    self._note_end(*before)

            return run_async

        def run(*args: Any) -> Any:
            before = self._note_begin()
            try:
                return handler(*args)
            finally:
                self._note_end(*before)

        return run

    def _note_begin(self) -> tuple[bool, int, Digests]:
        others = self._others()
        return others, self._recording.switches, {} if others else self._content()

    def _note_end(self, others: bool, switches: int, before: Digests) -> None:
        if not others and self._recording.switches == switches:
            self._changed = changed_names(before, self._content())

    def _content(self) -> Digests:
        """Returns digests of the attributes of `epoch.scratch`, by name."""
        return {name: _content_of(value) for name, value in vars(self._scratch).copy().items()}

    def check(self, what: str) -> None:
        """Raises StateError if the handler changed `epoch.scratch`.

        Args:
            what: names the handler in the message.
        """
        if self._changed:
            names = ", ".join(f"epoch.scratch.{name}" for name in self._changed)
            raise StateError(
                f"{what}: it is marked pure, so it may run any number of times, and changed {names}, which may then "
                f"count more than once; leave pure=True out"
            )


def _content_of(value: object) -> bytes:
    """Returns bytes that differ if a value has changed: its digest; its pickle if it cannot travel; else its id()."""
    if (found := digest(value)) is not None:
        return found
    try:
        return pickled(value)
    except Exception:  # the value cannot be pickled, or a thread writes to it
        return id(value).to_bytes(8)
