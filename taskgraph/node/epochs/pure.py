"""Strict mode: what a handler that is marked pure changed in `epoch.scratch`, which it may read alone.

It may run any number of times, for one request. A replay runs it as often as it ran, so it says nothing of that: it is
looked at here, right before and after the handler's code, while nothing else of its task runs.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any

import numpy as np

from taskgraph.errors import StateError
from taskgraph.node.epochs.differing import digest
from taskgraph.node.usercode.coroutines import is_async

__all__ = ["PureWatch"]

_STEPS = 8
"""So many steps of a handler that awaits are looked at: what it holds in `epoch.scratch` may be large."""
_HOLDS_OTHERS = (list, tuple, dict, set, frozenset, deque, defaultdict, OrderedDict, Counter)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, np.ndarray, pickle.PickleBuffer)


class PureWatch:
    """Looks at one call of a pure handler.

    Args:
        scratch: what `epoch.scratch` holds.
        beside: whether something of the user's may run meanwhile that nobody keeps apart: threads and asyncio tasks of
            code that holds the epoch, or awaits something. What changes then may be their doing.
    """

    def __init__(self, scratch: dict[str, object], beside: Callable[[], bool]) -> None:
        self._scratch = scratch
        self._beside = beside
        self._changed: set[str] = set()
        self._left = _STEPS

    def around(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """The handler, looked at."""
        if is_async(handler):

            async def run_async(*args: Any) -> Any:
                return await _Stepwise(handler(*args), self._look)

            return run_async

        def run(*args: Any) -> Any:
            return self._look(partial(handler, *args))

        return run

    def check(self, what: str) -> None:
        """Raises StateError where it changed something. `what`: which handler it is, for the message."""
        if self._changed:
            changed = ", ".join(f"epoch.scratch.{name}" for name in sorted(self._changed))
            raise StateError(
                f"{what}: it is marked pure, so it may run any number of times, and changed {changed}, which may then "
                f"count more than once; leave pure=True out"
            )

    def _look(self, run: Callable[[], Any]) -> Any:
        if self._left <= 0 or self._beside():
            return run()
        self._left -= 1
        before = _held(self._scratch)
        try:
            return run()
        finally:
            after = _held(self._scratch)
            self._changed |= {name for name in before | after if before.get(name) != after.get(name)}


class _Stepwise:
    """Drives a coroutine on, each step under a look: between them others run."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], look: Callable[[Callable[[], Any]], Any]) -> None:
        self._coroutine = coroutine
        self._look = look

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine = self._coroutine
        error: BaseException | None = None
        while True:
            step = partial(coroutine.send, None) if error is None else partial(coroutine.throw, error)
            try:
                waited = self._look(step)
            except StopIteration as returned:
                return returned.value
            try:
                error = None
                yield waited
            except BaseException as raised:
                error = raised


def _held(scratch: dict[str, object]) -> dict[str, bytes]:
    return {name: _content(value) for name, value in scratch.copy().items()}


def _content(value: object) -> bytes:
    """What tells whether a value is what it was."""
    if (found := digest(value)) is not None:
        return found
    pickled = io.BytesIO()
    try:
        _Pickler(pickled).dump(value)
    except Exception:  # as where a thread writes to it
        return id(value).to_bytes(8)
    return pickled.getvalue()


class _Pickler(pickle.Pickler):
    """Goes into containers. An object of another type counts as itself: it may keep what it computes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)

    def persistent_id(self, obj: Any) -> int | None:
        kind = type(obj)
        return None if kind in _HOLDS_OTHERS or kind in _PLAIN or issubclass(kind, np.generic) else id(obj)
