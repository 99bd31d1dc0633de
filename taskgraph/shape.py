"""The hooks and handlers of a task class, found and checked once, when the class is made."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from taskgraph.errors import JobError
from taskgraph.signatures import signature

__all__ = [
    "FRAMEWORK_ATTRIBUTES",
    "HandlerInfo",
    "TaskShape",
    "arguments_of",
    "check_attributes",
    "check_declared_once",
    "check_keywords",
    "check_state",
    "handles",
    "is_stateless",
    "make_shape",
    "stateless",
]

F = TypeVar("F", bound=Callable[..., Any])

_HOOKS: Mapping[str, tuple[str, ...]] = {  # name -> what it is called with
    "setup": (),
    "compose": ("epoch",),
    "snapshot": (),
    "restore": ("state",),
    "result": (),
    "on_flag": ("epoch", "sender", "meta"),
    "on_commit": ("number", "state"),
    "on_event": ("event",),
    "teardown": (),
}
_SIMILARITY = 0.8
"""difflib's ratio from which on a method's name is a misspelt hook: `reslut`, `on_flags`, `set_up`."""
_HANDLER = ("epoch", "sender", "payload")
_PLAIN_ONLY = ("snapshot", "restore", "result")
_ALWAYS_CALLED = frozenset({"compose", "result"})
"""Hooks that are called on every task; the others are called only if the class defines them."""
FRAMEWORK_ATTRIBUTES = ("task_id", "tasks", "log", "primary", "xp")


@dataclass(frozen=True, slots=True)
class HandlerInfo:
    """A method declared with `@tg.handles`."""

    method_name: str
    pure: bool


@dataclass(frozen=True, slots=True)
class TaskShape:
    """What a node must know of a task class: its hooks, its handlers and their kinds.

    Attributes:
        stateful: the class declares state, or overrides `snapshot`.
        shared: the state that is declared as equal on all tasks, sorted.
        own: the class has state beside `shared`.
        receives: the class takes flags or requests: no message may be on its way when its sync points run.
        overrides: names of the hooks that the class defines.
        handlers: request method -> handler.
        in_flight: epochs may begin while earlier ones are worked on: `compose` is stateless, and nothing else of the
            task has an order among committed epochs.
    """

    stateful: bool
    shared: tuple[str, ...]
    own: bool
    receives: bool
    overrides: frozenset[str]
    handlers: Mapping[str, HandlerInfo]
    in_flight: bool


def handles(name: str, *, pure: bool = False) -> Callable[[F], F]:
    """Marks a method as the handler of a request: `def push(self, epoch, sender, payload) -> Value`.

    A subclass that overrides the method handles the request, too, decorated again or not.

    Args:
        name: what `epoch.request(to, name, payload)` calls it.
        pure: the handler changes nothing, not even `epoch.scratch`, so it may run any number of times.

    Raises:
        JobError: there is no name; or the method handles a request of another name.
    """
    if not isinstance(name, str) or not name:
        raise JobError("@tg.handles takes the request's name: @tg.handles('push')")

    def mark(function: F) -> F:
        marked = function.__func__ if isinstance(function, staticmethod | classmethod) else function
        before, _ = getattr(marked, "__taskgraph_handles__", (name, pure))
        if before != name and not hasattr(marked, "__wrapped__"):  # what wraps it may have it by being like it
            called = getattr(marked, "__name__", "it")
            raise JobError(
                f"@tg.handles: {called} handles {before!r} and cannot handle {name!r}, too: give that a method of its "
                f"own, which may call this one"
            )
        marked.__taskgraph_handles__ = (name, pure)  # type: ignore[attr-defined]
        return function

    return mark


def stateless(function: F = None) -> F:  # type: ignore[assignment]  # None: `@tg.stateless()`, for which the error says what to write
    """Marks a `compose` or a compute that may run before earlier epochs of its task are finished.

    The method depends on the epoch, its inputs, `epoch.scratch` and what `setup` made. It neither reads nor changes
    anything that a method changes after `setup`, declared as state or not. If `compose` is marked, up to
    `Settings.epochs_in_flight` epochs of the task are worked on at a time, and methods without the mark run epoch by
    epoch. A marked `compose` that uses nothing of the epoch that may change is called once for many epochs. A subclass
    that overrides the method marks it again, if the promise still holds.

    Raises:
        JobError: the argument is no function.
    """
    if not inspect.isfunction(function):
        raise JobError(f"@tg.stateless stands before a method, without parentheses; it was given {function!r}")
    function.__taskgraph_stateless__ = True  # type: ignore[attr-defined]
    return function


def is_stateless(function: Callable[..., Any]) -> bool:
    """True if a method, or the method inside a `functools.partial`, is marked with `@tg.stateless`."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__taskgraph_stateless__", False) is True


def arguments_of(shape: TaskShape, method: str) -> tuple[str, ...] | None:
    """Returns the arguments, without `self`, that a hook or handler is called with; None for any other method."""
    if any(info.method_name == method for info in shape.handlers.values()):
        return _HANDLER
    return _HOOKS.get(method)


def check_keywords(cls: type, base: type, keywords: Mapping[str, object]) -> None:
    """Raises JobError if a class statement has keywords that nothing takes.

    A mixin after `base` with an `__init_subclass__` of its own checks them itself: then none is refused here.

    Args:
        keywords: those that `base` does not take.
    """
    after = cls.__mro__[cls.__mro__.index(base) + 1 :]
    if keywords and not any("__init_subclass__" in vars(other) for other in after if other is not object):
        names = ", ".join(map(repr, keywords))
        raise JobError(f"class {cls.__name__}: tg.Task takes state=[...] and shared=[...], not {names}")


def check_attributes(task: object, shape: TaskShape) -> None:
    """Raises JobError for an attribute that hides a hook, such as `self.result = 0.5`."""
    own = vars(task)
    for name in [name for name in _HOOKS if name in own]:  # hashes our names only: a name in `own` may be any object
        value, called = own[name], f"{name}({', '.join(('self', *_HOOKS[name]))})"
        if not callable(value):
            raise JobError(
                f"{type(task).__name__}: self.{name} was set to {_value_text(value)}, which hides the hook {called}: "
                f"give the attribute another name" + (", and return it from there" if name == "result" else "")
            )
        stated = shape.stateful and name in ("snapshot", "restore")  # the default does as much, and is called
        if name not in shape.overrides | _ALWAYS_CALLED and not stated:
            raise JobError(
                f"{type(task).__name__}: self.{name} was set on the object and would not be called: hooks are methods "
                f"of the class, `def {called}`, which may call what the object has under another name"
            )


def _value_text(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def check_state(cls: type, state: Sequence[str], word: str = "state") -> None:
    """Checks the names that a class declares with `state=[...]`, or another `word`.

    Raises:
        JobError: a name cannot be state.
    """
    if not isinstance(state, list | tuple):  # not a set: its order differs from process to process
        example = f"[{state!r}]" if isinstance(state, str) else '["theta"]'
        raise JobError(f"class {cls.__name__}: {word} takes a list of names: {word}={example}")
    for name in state:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise JobError(f"class {cls.__name__}: {word} names attributes, and {name!r} is no attribute name")
        if name in FRAMEWORK_ATTRIBUTES:
            raise JobError(f"class {cls.__name__}: {name!r} is set by the framework and cannot be {word}")
        if name in _HOOKS or inspect.isfunction(inspect.getattr_static(cls, name, None)):
            raise JobError(f"class {cls.__name__}: {name!r} is a method and cannot be {word}")
        if name.startswith("__"):
            raise JobError(
                f"class {cls.__name__}: Python renames self.{name} inside a class, so it cannot be {word}: call it "
                f"{name.strip('_')!r} or {'_' + name.strip('_')!r}"
            )
    if len(set(state)) != len(state):
        raise JobError(f"class {cls.__name__}: {word} names an attribute twice: {list(state)}")


def check_declared_once(cls: type, state: Sequence[str], shared: Sequence[str]) -> None:
    """Raises JobError if a name is declared both as `shared` and as state, by the class or its bases.

    Args:
        state: the names that the class itself declares as state.
        shared: the shared names of the class and its bases.
    """
    own = {*state}
    for base in cls.__mro__[1:]:
        own |= {*vars(base).get("__taskgraph_state__", ())} - {*vars(base).get("__taskgraph_shared__", ())}
    if twice := own.intersection(shared):
        raise JobError(
            f"class {cls.__name__}: {', '.join(map(repr, sorted(twice)))} is declared as state and as shared: name it "
            f"once, in shared if it is equal on all tasks"
        )


def make_shape(cls: type, base: type, state: Sequence[str], shared: Sequence[str] = ()) -> TaskShape:
    """Returns the shape of `cls`, a subclass of `base`. Raises JobError if its hooks or handlers are wrong.

    Args:
        state: all declared names, also those in `shared`.
    """
    overrides = frozenset(name for name in _HOOKS if getattr(cls, name) is not getattr(base, name))
    for name in sorted(overrides):
        _check_callable(cls, name, _HOOKS[name])
        if name in _PLAIN_ONLY and inspect.iscoroutinefunction(getattr(cls, name)):
            raise JobError(f"class {cls.__name__}: {name} must be a plain `def`, not `async def`")
    # A class that declares its state may correct a snapshot in `restore`, and call the default `restore` with it.
    if ("snapshot" in overrides) != ("restore" in overrides) and not (state and "restore" in overrides):
        one, other = ("snapshot", "restore") if "snapshot" in overrides else ("restore", "snapshot")
        raise JobError(f"class {cls.__name__} overrides {one} but not {other}: one undoes the other, define both")
    handlers = _find_handlers(cls)
    _check_stateless(cls, {info.method_name for info in handlers.values()})
    _check_spelling(cls, overrides, {info.method_name for info in handlers.values()})
    return TaskShape(
        stateful=bool(state) or "snapshot" in overrides,
        shared=tuple(sorted(shared)),
        own=len(state) > len(shared) or "snapshot" in overrides,
        receives=bool(handlers) or "on_flag" in overrides,
        overrides=overrides,
        handlers=MappingProxyType(handlers),
        in_flight=is_stateless(cls.compose) and not handlers and not overrides & {"on_flag", "on_commit"},  # type: ignore[attr-defined]
    )


def _check_stateless(cls: type, handlers: set[str]) -> None:
    """Raises JobError if `@tg.stateless` marks a hook other than `compose`, or a handler."""
    for name in sorted(_HOOKS.keys() - {"compose"} | handlers):
        if is_stateless(getattr(cls, name)):
            kind = "a handler" if name in handlers else "a hook"
            raise JobError(
                f"class {cls.__name__}: {name} is {kind}, which no epoch calls early: @tg.stateless marks compose and "
                f"computes"
            )


def _check_spelling(cls: type, overrides: frozenset[str], handlers: set[str]) -> None:
    """Raises JobError for a misspelt hook, which would never be called."""
    for name, function in vars(cls).items():
        if name in _HOOKS or name in handlers or name.startswith("_") or not inspect.isfunction(function):
            continue
        for hook in difflib.get_close_matches(name, _HOOKS.keys() - overrides, n=1, cutoff=_SIMILARITY):
            with contextlib.suppress(TypeError):
                signature(function).bind("self", *_HOOKS[hook])
                raise JobError(
                    f"class {cls.__name__}: {name} is no hook and would not be called: did you mean {hook}? A method "
                    f"of your own gets a name less like it, or one that begins with '_'"
                )


def _find_handlers(cls: type) -> dict[str, HandlerInfo]:
    """Returns {request name: handler}. A method inherits `@tg.handles` of the method that it overrides."""
    handlers: dict[str, HandlerInfo] = {}
    for attribute in dir(cls):
        given = (vars(base)[attribute] for base in cls.__mro__ if attribute in vars(base))
        marks = (getattr(getattr(member, "__func__", member), "__taskgraph_handles__", None) for member in given)
        mark = next((mark for mark in marks if mark is not None), None)
        if mark is None or getattr(cls, attribute) is None:  # `push = None` in a subclass takes a handler away
            continue
        name, pure = mark
        if attribute in _HOOKS:
            raise JobError(f"class {cls.__name__}: {attribute} is a hook and cannot handle {name!r}, too")
        if name in handlers:
            raise JobError(
                f"class {cls.__name__}: methods {handlers[name].method_name!r} and {attribute!r} both handle {name!r}"
            )
        _check_callable(cls, attribute, _HANDLER)
        handlers[name] = HandlerInfo(attribute, pure)
    return handlers


def _check_callable(cls: type, name: str, parameters: tuple[str, ...]) -> None:
    """Raises JobError if a method would fail, or do nothing, when a node calls it with these arguments."""
    function = getattr(cls, name)
    if not callable(function):
        raise JobError(f"class {cls.__name__}: {name} must be a method, not {type(function).__name__}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise JobError(f"class {cls.__name__}: {name} has a `yield`, so calling it would run nothing of it: remove it")
    if not inspect.isfunction(inspect.getattr_static(cls, name)):
        return  # something callable of another kind: it knows what it takes
    try:
        signature(function).bind("self", *parameters)
    except TypeError:
        raise JobError(
            f"class {cls.__name__}: {name} is called as {name}(self{''.join(f', {p}' for p in parameters)}), but "
            f"takes {signature(function)}"
        ) from None
