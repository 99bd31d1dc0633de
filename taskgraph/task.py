"""What a user subclasses: `Task`, its hooks, its handlers, and the events it is told."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from taskgraph.errors import JobError, StateError

if TYPE_CHECKING:
    from taskgraph.epoch import Epoch

__all__ = [
    "BecameBackup",
    "BecamePrimary",
    "Event",
    "HandlerInfo",
    "NeighborFailed",
    "NeighborRestarted",
    "Task",
    "TaskShape",
    "handles",
    "shape_of",
    "shard",
]

F = TypeVar("F", bound=Callable[..., Any])

_HOOKS = (
    "setup",
    "compose",
    "snapshot",
    "restore",
    "result",
    "on_flag",
    "on_commit",
    "on_event",
    "teardown",
)
_PLAIN_ONLY = ("compose", "snapshot", "restore", "result")
_GIVEN = ("task_id", "tasks", "log", "primary", "xp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened around a task. Information, not state: it may come late, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BecamePrimary(Event):
    """This replica is the task's primary from `term` on."""

    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BecameBackup(Event):
    """This replica was primary, and another one is since `term`."""

    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighborFailed(Event):
    """The primary of `task`, a neighbor along `link`, is suspected dead."""

    task: int
    link: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighborRestarted(Event):
    """`task`, a neighbor along `link`, has another primary, of `term`."""

    task: int
    term: int
    link: str


@dataclass(frozen=True, slots=True)
class HandlerInfo:
    """A method declared with `@tg.handles`."""

    method_name: str
    pure: bool
    is_async: bool


@dataclass(frozen=True, slots=True)
class TaskShape:
    """What a task class overrides, as the node needs to know it.

    Attributes:
        stateful: it declares state, or overrides `snapshot`.
        receives: it can take flags or requests: the epoch must grow quiet before its sync points.
        overrides: names of the hooks it defines.
        handlers: request method -> handler.
    """

    stateful: bool
    receives: bool
    overrides: frozenset[str]
    handlers: Mapping[str, HandlerInfo]


def handles(name: str, *, pure: bool = False) -> Callable[[F], F]:
    """Marks a method as the handler of a request: `def push(self, epoch, sender, payload) -> Value`.

    Args:
        name: what `epoch.request(to, name, payload)` calls it.
        pure: it changes nothing, not even `epoch.scratch`: it may run any number of times.
    """
    if not isinstance(name, str) or not name:
        raise JobError("@tg.handles takes the request's name: @tg.handles('push')")

    def mark(function: F) -> F:
        function.__taskgraph_handles__ = (name, pure)  # type: ignore[attr-defined]
        return function

    return mark


class Task:
    """One task of a job. Subclass it; `class Fit(tg.Task, state=["theta"])` names what a failure cannot take.

    Hooks, computes and handlers are `def` (they run in a worker thread) or `async def` (on the event loop); two of
    one task never run at once. `compose`, `snapshot`, `restore` and `result` are `def`.

    Attributes:
        task_id: 0 to tasks - 1.
        tasks: how many tasks the job has.
        log: a logger of this task.
        primary: whether this replica is the primary at the moment.
        xp: cupy on a node with a GPU, else numpy.
    """

    task_id: int
    tasks: int
    log: logging.Logger
    primary: bool
    xp: ModuleType

    __taskgraph_state__: ClassVar[tuple[str, ...]] = ()
    __taskgraph_shape__: ClassVar[TaskShape]

    def __init_subclass__(cls, state: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if isinstance(state, str):
            raise JobError(f"class {cls.__name__}: state takes a list of names: state=[{state!r}]")
        for name in state:
            if not isinstance(name, str) or not name.isidentifier():
                raise JobError(f"class {cls.__name__}: state names attributes, and {name!r} is no attribute name")
            if name in _GIVEN:
                raise JobError(f"class {cls.__name__}: {name!r} is set by the framework and cannot be state")
        inherited = cls.__taskgraph_state__
        cls.__taskgraph_state__ = (*inherited, *(name for name in state if name not in inherited))
        cls.__taskgraph_shape__ = _shape(cls)

    def __getattr__(self, name: str) -> Any:
        if name in _GIVEN:
            raise JobError(
                f"{type(self).__name__}.{name} is set after the task is built: read it in setup(), not in __init__"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def setup(self) -> Any:
        """Runs once per replica: load data (`tg.shard`), make the first state."""

    def compose(self, epoch: Epoch) -> None:
        """Declares this epoch's processors and channels, from state and epoch alone; changes no state."""
        raise JobError(f"class {type(self).__name__} must define compose(self, epoch)")

    def snapshot(self) -> Any:
        """The state, as a value. May return the task's own arrays: they are encoded before anything else runs."""
        state = {}
        for name in self.__taskgraph_state__:
            if name not in vars(self) and not hasattr(type(self), name):
                raise StateError(
                    f"task {self.task_id}: class {type(self).__name__} declares state {name!r}, but has no such "
                    f"attribute: set self.{name} in setup()"
                )
            state[name] = getattr(self, name)
        return state or None

    def restore(self, state: Any) -> None:
        """Takes a snapshot back; its arrays are yours to write."""
        given = state or {}
        if not isinstance(given, dict) or set(given) != set(self.__taskgraph_state__):
            names = sorted(given) if isinstance(given, dict) else type(given).__name__
            raise StateError(
                f"task {self.task_id}: the snapshot holds {names}, but class {type(self).__name__} declares state "
                f"{sorted(self.__taskgraph_state__)}"
            )
        for name, value in given.items():
            setattr(self, name, value)

    def result(self) -> Any:
        """The task's part of the job's result, from the last committed state. None is left out."""
        return None

    def on_flag(self, epoch: Epoch, sender: int, meta: Any) -> Any:
        """A flag of `sender` arrived. May write epoch.scratch, not state; sync points see it all."""

    def on_commit(self, number: int, state: Any) -> Any:
        """Epoch `number` committed, with this state. On the primary, in order, at least once per epoch."""

    def on_event(self, event: Event) -> Any:
        """Something happened around this task; information, not state."""

    def teardown(self) -> Any:
        """At the end of each living replica: the last chance to save work."""


def _shape(cls: type[Task]) -> TaskShape:
    overrides = frozenset(name for name in _HOOKS if getattr(cls, name) is not getattr(Task, name))
    for name in _PLAIN_ONLY:
        if inspect.iscoroutinefunction(getattr(cls, name)):
            raise JobError(f"class {cls.__name__}: {name} must be a plain `def`, not `async def`")
    if ("snapshot" in overrides) != ("restore" in overrides):
        one, other = ("snapshot", "restore") if "snapshot" in overrides else ("restore", "snapshot")
        raise JobError(f"class {cls.__name__} overrides {one} but not {other}: a snapshot must be restored by its kin")
    handlers: dict[str, HandlerInfo] = {}
    for attribute in dir(cls):
        mark = getattr(getattr(cls, attribute, None), "__taskgraph_handles__", None)
        if mark is None:
            continue
        name, pure = mark
        if name in handlers:
            raise JobError(
                f"class {cls.__name__}: methods {handlers[name].method_name!r} and {attribute!r} both handle {name!r}"
            )
        handlers[name] = HandlerInfo(attribute, pure, inspect.iscoroutinefunction(getattr(cls, attribute)))
    return TaskShape(
        stateful=bool(cls.__taskgraph_state__) or "snapshot" in overrides,
        receives=bool(handlers) or "on_flag" in overrides,
        overrides=overrides,
        handlers=MappingProxyType(handlers),
    )


Task.__taskgraph_shape__ = _shape(Task)


def shape_of(cls: type[Task]) -> TaskShape:
    """What the node needs to know of a task class."""
    return cls.__taskgraph_shape__


def shard(n: int, task_id: int, tasks: int) -> slice:
    """The part of `n` rows that is `task_id`'s: contiguous, all parts within one row of each other.

    Raises:
        JobError: task_id is not one of the tasks.
    """
    if not 0 <= task_id < tasks:
        raise JobError(f"shard: there is no task {task_id} among {tasks}")
    return slice(n * task_id // tasks, n * (task_id + 1) // tasks)
