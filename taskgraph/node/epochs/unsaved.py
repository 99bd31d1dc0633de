"""Finds attributes that an epoch changed and that no snapshot has, and hints at them by an event, in ordinary runs.

A job whose `state=[...]` lacks an attribute gives the right result until a backup takes over: there the attribute is as
`setup` left it. Strict mode finds that in tests. This module checks the first epochs of a term, and computes nothing
twice: a cache looks like state, so the event is a hint. A task that overrides `snapshot` or `restore` is not checked:
it may restore the attribute by itself.

A new primary does not have a changed global or class attribute either. Writes to these are found in the bytecode of the
class, since values do not show which task wrote them. Attributes of a global `threading.local` that `setup` sets are
found in the same way.

The checks run on the event loop, beside user threads, and call no user code: numbers, texts and numpy arrays are
compared by value, everything else by identity. After an unexpected error they stop: a hint is not worth a node.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np

from taskgraph.errors import class_name, error_text, first_names
from taskgraph.shape import FRAMEWORK_ATTRIBUTES
from taskgraph.task import Task

if TYPE_CHECKING:
    from taskgraph.node.replica import Replica
    from taskgraph.node.services import NodeServices

__all__ = ["UnsavedStateCheck", "outside_writes"]

_EPOCHS = 2
"""The number of epochs of a term that are checked: some attributes change only from the second epoch on."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_SMALL_BYTES = 4 << 10
"""Larger values are compared by identity, and arrays also by both ends: most steps change a whole array."""
_ARRAYS_BYTES = 64 << 10
"""The most bytes of a task's arrays that are kept for comparison."""
_NAMES = 5
"""Names in one event, at most."""
_RUN_ON_EVERY_NODE = ("__init__", "setup", "teardown")
"""Methods that run on every node, so that what they write outside the object is on every node."""

_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]

_Check = Callable[[object], bool]
"""(value of an attribute) -> whether it equals the attribute's earlier value."""


class UnsavedStateCheck:
    """Checks the first epochs of one task in one term for changed attributes that no snapshot has."""

    def __init__(self, node: NodeServices, replica: Replica, term: int) -> None:
        self._node = node
        self._replica = replica
        self._term = term
        self._epochs_left = _EPOCHS
        self._before: dict[str, _Check] = {}
        self._state_left = 0  # epochs whose state is checked before the sync points

    def begin_attempt(self) -> bool:
        """Notes the values of attributes when an attempt begins. True if its first epoch is to be checked."""
        if self._epochs_left and not self._replica.shape.overrides & {"snapshot", "restore"}:
            try:
                self._before = _capture(self._replica.user_task)
                self._state_left = _EPOCHS if self._replica.job.settings.epochs_in_flight == 1 else 0
                self._emit_outside_writes()
            except Exception as error:
                self._give_up(error)
        return bool(self._before)

    def emit_if_changed(self, epoch: int) -> bool:
        """Checks an epoch that has run, and emits an event about attributes that it changed. Returns True if the next
        epoch is to be checked, too.
        """
        try:
            self._check(epoch)
        except Exception as error:
            self._give_up(error)
        return self._epochs_left > 0

    def _check(self, epoch: int) -> None:
        names = _changed_names(self._before, self._replica.user_task)
        # `on_commit` may change attributes between two epochs.
        self._epochs_left = 0 if names or "on_commit" in self._replica.shape.overrides else self._epochs_left - 1
        if not self._epochs_left:
            self._before = {}
        if names:
            self._emit_changed(names, epoch)

    def capture_state(self) -> dict[str, _Check] | None:
        """Returns checks of the state at an epoch's beginning, for `emit_if_state_changed_early`; None: no check."""
        if not self._state_left:
            return None
        self._state_left -= 1
        try:
            return _capture(self._replica.user_task, state=True)
        except Exception as error:
            self._give_up(error)
            return None

    def emit_if_state_changed_early(self, before: dict[str, _Check], epoch: int) -> None:
        """Emits an event if declared state changed before the sync points: a restart would change it twice."""
        try:
            names = _changed_names(before, self._replica.user_task)
        except Exception as error:
            self._give_up(error)
            return
        if names:
            self._state_left = 0
            kind = class_name(type(self._replica.user_task))
            changed = first_names([f"self.{name}" for name in names], _NAMES)
            self._emit_once(
                f"{kind} changed {changed} outside a sync point: if the "
                f"epoch starts again, that change is made twice. Change state only in a processor without outbound "
                f"channels; tg.testing.run finds the place",
                epoch,
            )

    def _give_up(self, error: Exception) -> None:
        """Ends the checks after an unexpected error, and logs it once on the node."""
        self._epochs_left, self._before, self._state_left = 0, {}, 0
        kind = class_name(type(self._replica.user_task))
        text = f"{kind} is no longer checked for changes that no snapshot has: {error_text(error)}"
        if text not in self._node.emitted_unsaved:
            self._node.emitted_unsaved.add(text)
            self._node.log.warning("task %d: %s", self._replica.task, text)

    def _emit_outside_writes(self) -> None:
        """Emits events about globals that the task's class writes, once for each class on the node."""
        kind, seen = type(self._replica.user_task), self._node.emitted_unsaved
        if (checked := f"class {id(kind)}") in seen:
            return
        seen.add(checked)
        for method, names in thread_locals_set(kind).items():
            self._emit_once(
                f"{class_name(kind)}.{method} sets {first_names(names, _NAMES)} of a threading.local: other calls may "
                f"run in another thread, and find nothing there, or what another task set. Keep it in an attribute of "
                f"the task, or in a contextvars.ContextVar"
            )
        for method, what in outside_writes(kind).items():
            self._emit_once(
                f"{class_name(kind)}.{method} writes {what}: no snapshot has that, and another node has "
                f"what the module set. If results depend on it, they differ after a failover: keep it in the state, or "
                f"fill it in setup(), from what any node has"
            )

    def _emit_changed(self, names: list[str], epoch: int) -> None:
        kind = class_name(type(self._replica.user_task))
        changed = first_names([f"self.{name}" for name in names], _NAMES)
        it, them = ("it is", "it") if len(names) == 1 else ("they are", "them")
        self._emit_once(
            f"{kind} changed {changed} in an epoch, and no snapshot has {them}: after a failover {it} as "
            f"setup() left {them}. If later epochs or result() depend on {them}, which tg.testing.run finds out, write "
            f"state={names[:_NAMES]!r}; what is for one epoch alone is better kept in epoch.scratch",
            epoch,
        )

    def _emit_once(self, text: str, epoch: int | None = None) -> None:
        """Emits an event once per node: many tasks of a class may have the same mistake."""
        task = self._replica.task
        if text not in self._node.emitted_unsaved:
            self._node.emitted_unsaved.add(text)
            self._node.events.emit("unheld", f"task {task}: {text}", task=task, epoch=epoch, term=self._term)


def outside_writes(kind: type) -> dict[str, str]:
    """Returns {method: text about the globals or class attributes that it writes} of a task class.

    Methods that run on every node, such as `setup`, are left out, and functions outside the class.
    """
    bases = list(itertools.takewhile(lambda base: base is not Task, kind.__mro__))
    codes: dict[str, CodeType] = {}
    users: dict[str, set[str]] = {}
    for base in bases:
        for name, member in vars(base).items():
            code = getattr(inspect.unwrap(member), "__code__", None) if inspect.isfunction(member) else None
            if type(code) is CodeType:
                codes.setdefault(name, code)  # the method of a subclass counts
                for used in _names_in(code):
                    users.setdefault(used, set()).add(name)
    around = set(_RUN_ON_EVERY_NODE)
    while more := {m for m in codes.keys() - around if (by := users.get(m, set()) - {m}) and by <= around}:
        around |= more  # methods that only these call run on every node, too
    names, found = {class_name(base) for base in bases}, {}
    for name, code in codes.items():
        if name not in around and (written := dict.fromkeys(_writes_in(code, names))):
            found[name] = " and ".join(list(written)[:_NAMES])
    return found


def thread_locals_set(kind: type) -> dict[str, list[str]]:
    """Returns {method: attributes of a global `threading.local` that it sets} of methods called once per replica."""
    found: dict[str, list[str]] = {}
    for method in ("__init__", "setup"):
        function = inspect.unwrap(getattr(kind, method))
        code = getattr(function, "__code__", None)
        if type(code) is CodeType:
            known = function.__globals__
            local = {name for name in code.co_names if type(known.get(name)) is threading.local}
            steps = dis.get_instructions(code) if local else ()
            for before, step in itertools.pairwise(steps):
                if before.argval in local and before.opname == "LOAD_GLOBAL" and step.opname == "STORE_ATTR":
                    found.setdefault(method, []).append(f"{before.argval}.{step.argval}")
    return found


def _names_in(code: CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes in the code."""
    yield from code.co_names
    for inner in code.co_consts:
        if type(inner) is CodeType:
            yield from _names_in(inner)


def _writes_in(code: CodeType, classes: set[str]) -> Iterator[str]:
    """Yields text about each write to a global (`MODEL = ...`) or class attribute (`Fit.best = ...`) in the code."""
    steps: list[tuple[str, Any]] = []
    if not classes.isdisjoint(code.co_names) or _STORE_GLOBAL in code.co_code[::2]:  # disassembling is slow
        steps = [(step.opname, step.argval) for step in dis.get_instructions(code)]
    for (before, of), (step, name), (after, later) in zip(steps, steps[1:], [*steps[2:], ("", "")], strict=False):
        of_class = before == "LOAD_GLOBAL" and of in classes
        if step == "STORE_GLOBAL":
            yield f"the global {name}"
        elif of_class and step == "STORE_ATTR":
            yield f"{of}.{name}, an attribute of the class"
        elif of_class and step == "COPY" and after == "LOAD_ATTR":
            yield f"{of}.{later}, an attribute of the class"
    for inner in code.co_consts:
        if type(inner) is CodeType:
            yield from _writes_in(inner, classes)


def _attributes(task: object) -> dict[str, object]:
    """Copies a task's attributes in one step, without calling a user's `__getattribute__` or the `__eq__` of a name."""
    found: dict[str, object] = object.__getattribute__(task, "__dict__").copy()
    return {name: value for name, value in found.items() if type(name) is str}


def _capture(task: Any, *, state: bool = False) -> dict[str, _Check]:
    """Returns a check for each attribute that is not state, or with `state` for each attribute that is."""
    declared = type(task).__taskgraph_state__
    left, seen = _ARRAYS_BYTES, {}
    for name, value in _attributes(task).items():
        if name not in FRAMEWORK_ATTRIBUTES and (name in declared) == state:
            ends = _array_ends(value) if left > 0 else b""
            left -= len(ends)
            seen[name] = _same_value(value, ends)
    return seen


def _changed_names(seen: dict[str, _Check], task: object) -> list[str]:
    """Returns the names of the captured attributes that have another value now, or are gone."""
    now, gone = _attributes(task), object()
    return [name for name, same in seen.items() if not same(now.get(name, gone))]


def _array_ends(value: object) -> bytes:
    """Returns the bytes of an array of numbers, or of its two ends; b"" for other values.

    Also b"" for memory that numpy does not own: a file may be slow to read, and shared memory may be gone.
    """
    if type(value) is not np.ndarray or value.dtype.kind not in "biufc":
        return b""
    owner: object = value
    while type(owner) is np.ndarray and owner.base is not None:
        owner = owner.base
    if type(owner) is not np.ndarray or not owner.flags.owndata:
        return b""
    if value.nbytes <= _SMALL_BYTES:
        return value.tobytes()
    if not value.flags.forc:
        return b""
    flat, count = value.ravel(order="K"), _SMALL_BYTES // 2 // value.itemsize
    return flat[:count].tobytes() + flat[-count:].tobytes()


def _same_value(value: Any, ends: bytes) -> _Check:
    """Returns a function that is True of an equal value, if `value` is a small number, text or array; else of itself.

    Args:
        ends: `_array_ends` of `value`: a large array must also have the same ends.
    """
    kind = type(value)
    if any(kind is plain for plain in _PLAIN) and sys.getsizeof(value) <= _SMALL_BYTES:
        return lambda now: type(now) is kind and (now is value or now == value)  # a NaN is not equal to itself
    if ends and value.nbytes == len(ends):
        dtype, shape = value.dtype, value.shape
        return lambda now: _array_ends(now) == ends and now.dtype == dtype and now.shape == shape  # type: ignore[attr-defined]
    is_it = _same_object(value)
    return (lambda now: is_it(now) and _array_ends(now) == ends) if ends else is_it


def _same_object(value: object) -> _Check:
    """Returns a function that is True of the same object, and does not keep that alive: it may be large."""
    try:
        at = weakref.ref(value)
    except TypeError:  # a list, a dict
        number = id(value)
        return lambda now: id(now) == number
    return lambda now: now is not None and at() is now
