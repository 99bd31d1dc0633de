"""`Task`, which users subclass: its hooks, its handlers, and the events it gets."""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from taskgraph.errors import JobError, StateError
from taskgraph.shape import TaskShape, check_declared_once, check_keywords, check_state, make_shape

if TYPE_CHECKING:
    from taskgraph.epoch import Epoch

__all__ = [
    "BecameBackup",
    "BecamePrimary",
    "Event",
    "NeighborFailed",
    "NeighborRestarted",
    "Task",
    "shape_of",
    "shard",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event that `Task.on_event` gets. It may come late, or not at all, so `on_event` must not change the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BecamePrimary(Event):
    """This replica is the task's primary from `term` on."""

    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BecameBackup(Event):
    """This replica was the primary; another replica is the task's primary from `term` on."""

    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighborFailed(Event):
    """The primary of `task`, a neighbor along `link`, is suspected dead. It may still prove alive."""

    task: int
    link: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighborRestarted(Event):
    """The task `task`, a neighbor along `link`, has a new primary, of term `term`."""

    task: int
    term: int
    link: str


class _ReadTooEarly(JobError, AttributeError):
    """An attribute was read before the framework set it. As an AttributeError it makes `hasattr` return False."""


class _SetByFramework:
    """An attribute that the framework sets after the task is built; reading it earlier raises a clear error."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, task: object, owner: type) -> Any:
        if task is None:
            return self
        raise _ReadTooEarly(
            f"{owner.__name__}.{self._name} is set after the task is built: read it in setup(), not in __init__ "
            f"(a test without a job sets it itself)"
        )


class Task:
    """One task of a job. Subclass it; `class Fit(tg.Task, state=["theta"])` names what a failure cannot take.

    `shared=["theta"]` names state that is equal on all tasks at every boundary: `class Fit(tg.Task, shared=["theta"])`.
    The tasks that declare the same names are compared, to the last bit; if they differ, the job fails and names tasks,
    attribute and epoch. The lowest of these tasks keeps the state for all: backups of the others do not get it.

    Subclasses add to the state of their bases. Hooks, computes and handlers are `def` (they run in a worker thread) or
    `async def` (on the event loop); two of one task never run at once. `snapshot`, `restore` and `result` are
    `def`.

    Attributes:
        task_id: 0 to tasks - 1.
        tasks: how many tasks the job has.
        log: a logger of this task.
        primary: whether this replica is the primary at the moment.
        xp: cupy on a node with a GPU, else numpy.

    Raises:
        JobError: when the class is made: its state, hooks or handlers do not fit; the message says which. When one of
            the attributes is read before `setup()`.
    """

    if TYPE_CHECKING:
        task_id: int
        tasks: int
        log: logging.Logger
        primary: bool
        xp: ModuleType
    else:
        task_id = _SetByFramework()
        tasks = _SetByFramework()
        log = _SetByFramework()
        primary = _SetByFramework()
        xp = _SetByFramework()

    __taskgraph_state__: ClassVar[tuple[str, ...]] = ()
    __taskgraph_shared__: ClassVar[tuple[str, ...]] = ()
    __taskgraph_shape__: ClassVar[TaskShape]

    def __init_subclass__(cls, state: Sequence[str] = (), shared: Sequence[str] = (), **kwargs: Any) -> None:
        check_keywords(cls, Task, kwargs)
        super().__init_subclass__(**kwargs)
        check_state(cls, state)
        check_state(cls, shared, "shared")
        equal = _declared_names(cls, "__taskgraph_shared__", shared)
        all_state = _declared_names(cls, "__taskgraph_state__", (*state, *shared))
        check_declared_once(cls, state, equal)
        cls.__taskgraph_state__, cls.__taskgraph_shared__ = all_state, equal
        cls.__taskgraph_shape__ = make_shape(cls, Task, all_state, equal)

    def setup(self) -> Any:
        """Runs once per replica: load data (`tg.shard`), make the first state."""

    def compose(self, epoch: Epoch) -> Any:
        """Declares this epoch's processors and channels, from state and epoch alone; changes no state."""
        raise JobError(f"class {type(self).__name__} must define compose(self, epoch)")

    def snapshot(self) -> Any:
        """Returns the state: by default the declared attributes as a dict; None: the task has no state.

        It may contain the task's own arrays: they are encoded before other code runs.
        """
        state = {}
        for name in self.__taskgraph_state__:
            try:
                state[name] = getattr(self, name)
            except AttributeError:
                if hasattr(type(self), name):
                    raise  # a property's own
                raise StateError(
                    f"{_task_title(self)} declares state {name!r}, but has no such attribute: set self.{name} in "
                    f"setup()"
                ) from None
        return state or None

    def restore(self, state: Any) -> None:
        """Sets the state from a snapshot; you may write to its arrays."""
        given = {} if state is None else state
        if not isinstance(given, dict):
            raise StateError(f"{_task_title(self)}: the default restore() takes a dict, not {type(given).__name__}")
        declared = self.__taskgraph_state__
        missing = [name for name in declared if name not in given]
        extra = [str(name) for name in given if name not in declared]
        if missing or extra:
            both = (("lacks", missing), ("holds undeclared", extra))
            differ = " and ".join(f"{verb} {', '.join(map(repr, names))}" for verb, names in both if names)
            raise StateError(
                f"{_task_title(self)}: the snapshot {differ}; the state declared is: {', '.join(declared) or 'none'}"
            )
        for name, value in given.items():
            try:
                setattr(self, name, value)
            except AttributeError:
                made = getattr(type(self), name, None)
                if not isinstance(made, property) or made.fset is not None:
                    raise  # a setter's own, or that of who keeps attributes from being set
                raise StateError(
                    f"{_task_title(self)}: state {name!r} is a property that cannot be set: declare what it is made "
                    f"of, or give it a setter"
                ) from None

    def result(self) -> Any:
        """Returns the task's part of the job's result, from the last committed state; None: no part."""
        return None

    def on_flag(self, epoch: Epoch, sender: int, meta: Any) -> Any:
        """Called for each flag. It may write epoch.scratch, but not the state; sync points run after all flags."""

    def on_commit(self, number: int, state: Any) -> Any:
        """Called on the primary after epoch `number` committed, with the state: in order, at least once per epoch."""

    def on_event(self, event: Event) -> Any:
        """Called for events around this task. It must not change the state."""

    def teardown(self) -> Any:
        """Called at the end of each living replica: the last chance to save work, within `Settings.cancel_s`."""


def _declared_names(cls: type, attribute: str, added: Sequence[str]) -> tuple[str, ...]:
    """Returns the names that a class and all its bases declare, each once: those in `attribute`, and `added`.

    The class itself has some if `@dataclass(slots=True)` makes it once more, without the keywords.
    """
    inherited = (name for base in reversed(cls.__mro__) for name in vars(base).get(attribute, ()))
    return tuple(dict.fromkeys([*inherited, *added]))


def _task_title(task: Task) -> str:
    return f"task {vars(task).get('task_id', '?')} ({type(task).__name__})"


Task.__taskgraph_shape__ = make_shape(Task, Task, ())


def shape_of(cls: type[Task]) -> TaskShape:
    """Returns the shape of a task class."""
    return cls.__taskgraph_shape__


def shard(n: int, task_id: int, tasks: int) -> slice:
    """Returns the rows of `task_id`, out of `n`: contiguous, in order, and all shares differ by at most one row.

    Raises:
        JobError: task_id is not one of the tasks, or n is negative.
    """
    try:  # numpy's integers overflow where Python's do not
        n, task_id, tasks = operator.index(n), operator.index(task_id), operator.index(tasks)
    except TypeError:
        raise JobError(f"shard takes ints (rows, task_id, tasks), not {(n, task_id, tasks)!r}") from None
    if not 0 <= task_id < tasks:
        raise JobError(f"shard: there is no task {task_id} among {tasks}")
    if n < 0:
        raise JobError(f"shard: {n} rows cannot be split")
    return slice(n * task_id // tasks, n * (task_id + 1) // tasks)
